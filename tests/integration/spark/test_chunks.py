"""Messages in chunks in Spark: whole, once, whichever task or batch their chunks lie in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from magnetar.client import connect
from magnetar.proto.errors import Unsupported
from magnetar.spark.jobs import archive, read_archive
from magnetar.spark.plan import TopicLedger
from support.service import Service
from support.spark_tasks import LocalSession
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


async def produce_one(url: str, topic: str, value: bytes) -> dict[bytes, bytes | None]:
    """Each chunk in an entry of its own."""
    async with (
        connect(url, max_message_bytes=SIZE) as client,
        client.create_producer(topic, chunking=True) as producer,
    ):
        return {(await producer.send_stream(_slowly(value))).to_bytes(): value}


def rows(frame: Any) -> dict[bytes, bytes]:
    found = [
        (bytes(row.message_id), bytes(row.value)) for row in frame.select("message_id", "value").collect()
    ]
    assert len(found) == len(dict(found)), "a row came twice"
    return dict(found)


def test_batch(topics: Topics, service: Service, read: Callable[..., Any]) -> None:
    """Tasks of a few entries each."""
    topics.create("in-chunks")
    sent = asyncio.run(produce(service.url, "in-chunks", 2))
    frame = read("in-chunks", partition_bytes="12000")
    assert rows(frame) == sent
    assert frame.where("message_id is not null").count() == len(sent)
    keyed = frame.where("key is not null").select("key", "properties", "sequence_id").collect()
    assert sorted(row.properties["n"] for row in keyed) == ["0", "1"]


def rows_of_tasks(topics: Topics, topic: str, **options: str) -> dict[bytes, bytes]:
    found = topics.read("message_id", "value", topic=topic, **options)
    assert len(found) == len(dict(found)), "a row came twice"
    return dict(found)


def check_cuts(topics: Topics, topic: str, sent: dict[bytes, bytes | None], cuts: Iterable[int]) -> None:
    """Two ranges that meet at an offset have all messages between them, each by its first chunk."""
    for cut in cuts:
        first = rows_of_tasks(topics, topic, end=f"offset:{cut}")
        second = rows_of_tasks(topics, topic, start=f"offset:{cut}")
        assert first | second == sent, cut
        assert not first.keys() & second.keys()
        assert sorted(first) == sorted(sent)[: len(first)]


def test_a_range_that_begins_or_ends_between_chunks(topics: Topics, service: Service) -> None:
    topics.create("cut")
    sent = asyncio.run(produce(service.url, "cut", 2))
    end = sum(row[4] for row in topics.ledgers("cut"))
    check_cuts(topics, "cut", sent, range(1, end, 5))


def test_stream(topics: Topics, service: Service, stream: Callable[..., Any], tmp_path: Path) -> None:
    """Micro-batches of few rows: a message comes with the batch that has its first chunk."""
    topics.create("streamed")
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


def test_archived(topics: Topics, service: Service, tmp_path: Path) -> None:
    """The last message begins in the archive and ends at the bookies."""
    topics.create("archived")
    sent = asyncio.run(produce(service.url, "archived", 2))
    sent |= asyncio.run(produce_one(service.url, "archived", large(7, 9)))
    if (
        TopicLedger(*topics.ledgers("archived")[-1]).entries == 4
    ):  # full (conftest), so it would be archived, too
        sent |= asyncio.run(produce_one(service.url, "archived", large(8, 9)))
    path = str(tmp_path / "archive")
    archive(LocalSession(), service.url, ["archived"], path, file_bytes=3000, trim=True)  # type: ignore[arg-type]
    ledgers = [TopicLedger(*row) for row in topics.ledgers("archived")]
    assert [bool(ledger.archive) for ledger in ledgers] == [True] * (len(ledgers) - 1) + [False]
    border = ledgers[-1].first_offset
    assert border > ledgers[-1].end_offset - 9
    for partition_bytes in ("2500", "64m"):
        assert rows_of_tasks(topics, "archived", partition_bytes=partition_bytes) == sent
    check_cuts(topics, "archived", sent, (3, border - 5, border - 1, border, border + 1))
    with pytest.raises(Unsupported, match="has messages in chunks"):
        read_archive(LocalSession(), path)  # type: ignore[arg-type]
