"""Messages in chunks in Spark: whole, once, whichever task or batch their chunks lie in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from magnetar.client import connect
from support.service import Service
from support.spark_topics import Topics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180, func_only=True), pytest.mark.real]

SIZE = 1000


def large(number: int, chunks: int) -> bytes:
    return random.Random(number).randbytes(SIZE * chunks - 10)


async def _slowly(value: bytes) -> AsyncIterator[bytes]:
    """In pieces that others come between."""
    for start in range(0, len(value), SIZE):
        yield value[start : start + SIZE]
        await asyncio.sleep(0.02)


async def _never_finished() -> AsyncIterator[bytes]:
    yield large(99, 3)
    raise OSError("gone")


async def produce(url: str, topic: str, rounds: int, *, unfinished: bool = True) -> dict[bytes, bytes | None]:
    """Two producers whose chunks come between each other's messages; values by message id, as a reader gets them."""
    async with connect(url, max_message_bytes=SIZE) as client:
        first, second = [await client.create_producer(topic, chunking=True) for _ in range(2)]
        for number in range(rounds):
            await asyncio.gather(
                first.send_stream(_slowly(large(number, 7)), b"key", properties={"n": str(number)}),
                second.send_stream(_slowly(large(100 + number, 3))),
            )
            await second.send(b"small %d" % number)
        if unfinished:  # a stream waits a minute for the rest
            with pytest.raises(OSError, match="gone"):
                await first.send_stream(_never_finished())
        await second.send(b"last")
        async with client.create_reader(topic, start="earliest") as reader:
            got = [await reader.receive(10.0) for _ in range(3 * rounds + 1)]
            return {message.id.to_bytes(): message.value for message in got}


def rows(frame: Any) -> dict[bytes, bytes]:
    found = [
        (bytes(row.message_id), bytes(row.value)) for row in frame.select("message_id", "value").collect()
    ]
    assert len(found) == len(dict(found)), "a row came twice"
    return dict(found)


def test_batch(topics: Topics, service: Service, read: Callable[..., Any]) -> None:
    """Tasks of a few entries each."""
    sent = asyncio.run(produce(service.url, "whole", 2))
    frame = read("whole", partition_bytes="12000")
    assert rows(frame) == sent
    assert frame.where("message_id is not null").count() == len(sent)
    keyed = frame.where("key is not null").select("key", "properties", "sequence_id").collect()
    assert sorted(row.properties["n"] for row in keyed) == ["0", "1"]


def test_a_range_that_begins_or_ends_between_chunks(
    topics: Topics, service: Service, read: Callable[..., Any]
) -> None:
    sent = asyncio.run(produce(service.url, "cut", 2))
    ids = sorted(sent)
    offsets = sorted(
        (row.offset, bytes(row.message_id)) for row in read("cut").select("offset", "message_id").collect()
    )
    end = offsets[-1][0] + 1
    for cut in range(1, end, 5):
        first, second = rows(read("cut", end=f"offset:{cut}")), rows(read("cut", start=f"offset:{cut}"))
        assert first | second == sent, cut
        assert not first.keys() & second.keys()
        assert sorted(first) == ids[: len(first)]


def test_stream(topics: Topics, service: Service, stream: Callable[..., Any], tmp_path: Path) -> None:
    """Micro-batches of few rows: a message comes with the batch that has its first chunk."""
    sent = asyncio.run(produce(service.url, "streamed", 2, unfinished=False))
    found: list[tuple[bytes, bytes]] = []

    def take(frame: Any, _batch: int) -> None:
        found.extend((bytes(row.message_id), bytes(row.value)) for row in frame.collect())

    query = (
        stream("streamed", "message_id binary, value binary", max_rows_per_batch="7", start="earliest")
        .writeStream.foreachBatch(take)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert len(found) == len(dict(found))
    assert dict(found) == sent
