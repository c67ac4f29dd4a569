"""Topics of both protocols: Spark reads what the native client sees, and Pulsar's client reads what Spark wrote.

Pulsar's own Python client, in a process of its own, sends one by one and in batches, with each of its codecs and in chunks;
native producers send between.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("pulsar", reason="there is no pulsar-client for this Python")

from magnetar.client import Client, Message, Reader, connect
from magnetar.proto.ids import MessageId
from magnetar.spark.jobs import archive
from support.service import Service
from support.spark_topics import Sent, Topics, full

from .test_batch_read import ms

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180, func_only=True), pytest.mark.real]

CODECS = ("NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY")
COUNT = 20  # of each producer
LARGE = 6_000_000  # more than one frame takes
_TESTS = Path(__file__).parents[2]


class Seen(NamedTuple):
    """A message, whichever client or table it comes from: what all of them say of it."""

    id: bytes  # native
    value: bytes | None
    key: bytes | None
    properties: dict[str, str]
    event_time: int | None
    publish_time: int
    producer: str


def of_native(message: Message) -> Seen:
    key = message.key.encode() if isinstance(message.key, str) else message.key
    return Seen(
        message.id.to_bytes(),
        message.value,
        key,
        dict(message.properties),
        message.event_time,
        message.publish_time,
        message.producer_name,
    )


def of_spark(row: Any) -> Seen:
    return Seen(
        bytes(row.message_id),
        None if row.value is None else bytes(row.value),
        None if row.key is None else bytes(row.key),
        row.properties or {},
        ms(row.event_time),
        ms(row.publish_time) or 0,
        row.producer,
    )


def of_pulsar(found: dict[str, Any]) -> Seen:
    ledger, entry, batch_index, partition = found["id"]
    entry, first = divmod(entry, 2**20)
    return Seen(
        MessageId(ledger, entry, first + max(batch_index, 0), partition).to_bytes(),
        None if found["value"] is None else base64.b64decode(found["value"]),
        found["key"].encode(),
        found["properties"],
        found["event_time"],
        found["publish_time"],
        found["producer"],
    )


def as_pulsar_says(one: Seen) -> Seen:
    """Its client knows no empty key and no event at 0, and has bytes as base64; here bytes are those that are no text."""
    key = one.key or b""
    try:
        key.decode()
    except UnicodeDecodeError:
        key = base64.b64encode(key)
    return one._replace(key=key, event_time=one.event_time or 0)


class Programs:
    """Of both protocols, on one service."""

    def __init__(self, service: Service) -> None:
        self.topics = Topics(service)
        self._service = service

    def pulsar(self, *requests: Sequence[Any]) -> list[Any]:
        """What Pulsar's client answers to them (`support.pulsar_child exchange`)."""
        done = subprocess.run(
            [sys.executable, "-m", "support.pulsar_child", "exchange", f"pulsar://127.0.0.1:{self._service.pulsar_port}"],
            input="".join(json.dumps(one) + "\n" for one in requests), stdout=subprocess.PIPE, text=True, check=True,
            env={**os.environ, "PYTHONPATH": str(_TESTS)},
        )  # fmt: skip
        return [json.loads(line) for line in done.stdout.splitlines()]

    def pulsar_reads(self, topic: str, count: int = 0, **options: Any) -> list[Seen]:
        """All that a reader finds, `count` at least."""
        (found,) = self.pulsar(("read", topic, options, count))
        return list(map(of_pulsar, found))

    def both_send(self, topic: str, seed: int) -> list[list[Sent]]:
        """At the same time. Returns what each producer has sent."""
        sent: list[list[Sent]] = []
        requests = []
        for codec in CODECS:
            for batched in (True, False):
                # Nothing, compressed by zlib, is what the library in C++ cannot read back: it passes over such a message.
                empty = batched or codec != "ZLib"
                sent.append(messages(len(sent) + seed, COUNT, of_pulsar=True, empty=empty))
                options = {"compression_type": codec, "batching_enabled": batched, "batching_max_messages": 8}
                requests.append(("send", topic, options, list(map(in_json, sent[-1]))))
        with ThreadPoolExecutor(1) as threads:
            answers = threads.submit(self.pulsar, *requests)
            for codec in CODECS:
                for per_entry, batching in ((5, True), (3, False)):
                    sent.append(messages(len(sent) + seed, COUNT, of_pulsar=False))
                    self.topics.produce(
                        topic,
                        sent[-1],
                        batching=batching,
                        compression=codec.lower(),
                        per_entry=per_entry,
                    )
            assert [len(ids) for ids in answers.result()] == [COUNT] * len(requests)
        return sent

    def native_reads(self, topic: str, **options: Any) -> list[Seen]:
        """All that a reader finds, in the order of ids."""

        async def work(client: Client) -> list[Seen]:
            async with client.create_reader(topic, start="earliest", **options) as reader:
                return [of_native(one) async for one in _all(reader)]

        return sorted(self.topics.ask(work), key=lambda one: one.id)


async def _all(reader: Reader) -> Any:
    while await reader.has_message_available():
        yield await reader.read_next(timeout=30)


def messages(seed: int, count: int, *, of_pulsar: bool, empty: bool = True) -> list[Sent]:
    """With everything that a message can have, in any combination. Keys that are bytes are no text."""
    rng = random.Random(seed)
    values = [b"%d" % seed, rng.randbytes(200), bytes(500), *([None, b""] if empty else [])]
    keys: list[str | bytes | None] = [None, "k\u00e91", "k\u00e92", "k\u00e93"]
    if not of_pulsar:
        keys += ["", b"\xff1", b"\xff2"]
    return [
        Sent(
            rng.choice(values),
            rng.choice(keys),
            rng.choice([None, {"n": str(n)}, {"a": "", "\u00fc": "\u4e16"}]),
            rng.choice([None, 1_700_000_000_123 + n]),
        )
        for n in range(count)
    ]


def in_json(one: Sent) -> list[Any]:
    """As `support.pulsar_child` takes it; those with properties have an ordering key as well."""
    named = {
        "properties": one.properties,
        "partition_key": one.key,
        "event_timestamp": one.event_time,
        "ordering_key": "ordering" if one.properties else None,
    }
    value = None if one.value is None else base64.b64encode(one.value).decode()
    return [value, {name: value for name, value in named.items() if value is not None}]


def by_producer(found: Sequence[Seen]) -> list[list[Sent]]:
    of: dict[str, list[Sent]] = defaultdict(list)
    for one in found:
        of[one.producer].append(Sent(one.value, one.key, one.properties or None, one.event_time))
    return list(of.values())


def stored(one: Sent) -> Sent:
    """With a key as Spark has it."""
    return one._replace(key=one.key.encode() if isinstance(one.key, str) else one.key)


def check_same(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """In any order."""
    left = list(wanted)
    for one in found:
        assert one in left
        left.remove(one)
    assert not left


def check_sent(found: Sequence[Seen], sent: Sequence[Sequence[Sent]]) -> None:
    """Each producer's messages are there, unaltered and in order."""
    check_same(by_producer(found), [list(map(stored, its)) for its in sent])


def sorted_rows(frame: Any) -> list[Any]:
    """Of Spark, in the order of ids."""
    return sorted(frame.collect(), key=lambda row: bytes(row.message_id))


def rows(frame: Any) -> list[Seen]:
    """The same."""
    return list(map(of_spark, sorted_rows(frame)))


@pytest.fixture(scope="module")
def programs(service: Service) -> Programs:
    return Programs(service)


@pytest.fixture(scope="module")
def sent(programs: Programs) -> list[list[Sent]]:
    """To the topic `mixed`."""
    programs.topics.create("mixed")
    return programs.both_send("mixed", 0)


@pytest.fixture(scope="module")
def seen(programs: Programs, sent: list[list[Sent]]) -> list[Seen]:
    """Of the topic `mixed`, by the native client."""
    found = programs.native_reads("mixed")
    check_sent(found, sent)
    return found


def test_a_batch(
    programs: Programs, sent: list[list[Sent]], seen: list[Seen], read: Callable[..., Any]
) -> None:
    assert rows(read("mixed")) == seen
    small = read("mixed", partition_bytes="8000")
    assert small.rdd.getNumPartitions() > 5
    found = sorted_rows(small)
    assert list(map(of_spark, found)) == seen
    numbers = [(bytes(row.message_id), row.offset, row.sequence_id) for row in found]
    assert numbers == [
        (row.message_id, row.offset, row.sequence_id) for row in programs.topics.rows("mixed", len(seen))
    ]
    (of_pulsars,) = programs.pulsar(("read", "mixed", {}, 0))
    assert list(map(of_pulsar, of_pulsars)) == list(map(as_pulsar_says, seen))
    ordered = [one for its in sent[: 2 * len(CODECS)] for one in its if one.properties]
    assert [one["ordering_key"] for one in of_pulsars].count("ordering") == len(ordered)


def streamed(frame: Any, room: Path) -> list[Seen]:
    found: list[Seen] = []

    def take(batch: Any, _number: int) -> None:
        found.extend(rows(batch))

    query = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(room))
    query.trigger(availableNow=True).start().awaitTermination()
    return found


def test_a_stream(seen: list[Seen], stream: Callable[..., Any], tmp_path: Path) -> None:
    assert streamed(stream("mixed", max_rows_per_batch="170"), tmp_path / "checkpoint") == seen


def test_what_spark_writes(
    spark: Any,
    programs: Programs,
    seen: list[Seen],
    service: Service,
    read: Callable[..., Any],
    stream: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Keys of a binary column are bytes, those of a column of texts are texts."""
    programs.topics.create("mixed-streamed", "mixed-written")
    copy = stream("mixed").writeStream.format("magnetar").option("service_url", service.url)
    copy = copy.option("topic", "mixed-streamed").option("checkpointLocation", str(tmp_path / "checkpoint"))
    copy.option("compression", "zstd").trigger(availableNow=True).start().awaitTermination()
    text = "if(is_valid_utf8(cast(key AS string)), cast(key AS string), null) AS key"
    frame = read("mixed").selectExpr("value", text, "properties", "event_time")
    writer = frame.write.format("magnetar").mode("append").option("service_url", service.url)
    writer.option("topic", "mixed-written").save()

    def content(of: Sequence[Seen]) -> list[Any]:
        return [one[1:5] for one in of]

    streamed = programs.pulsar_reads("mixed-streamed")
    assert content(streamed) == [
        one[1:5]
        for one in (as_pulsar_says(one)._replace(key=base64.b64encode(one.key or b"")) for one in seen)
    ]
    assert [one.id for one in streamed] == [one.id for one in programs.native_reads("mixed-streamed")]
    written = programs.pulsar_reads("mixed-written")
    texts = [one._replace(key=None) if one.key and one.key[0] == 0xFF else one for one in seen]
    assert content(written) == content(list(map(as_pulsar_says, texts)))
    assert [one.id for one in written] == [one.id for one in programs.native_reads("mixed-written")]


def test_a_table_view_and_what_compaction_leaves(
    programs: Programs, seen: list[Seen], read: Callable[..., Any]
) -> None:
    last = {one.key: one.value for one in seen if one.key is not None}
    table = {key: value for key, value in last.items() if value is not None}

    async def view(client: Client) -> dict[bytes, bytes]:
        async with client.create_table_view("mixed") as view:
            return {key.encode() if isinstance(key, str) else key: value for key, value in view.items()}

    assert programs.topics.ask(view) == table
    state = programs.topics.ask(lambda client: client.admin.compact_topic("mixed", wait=True))
    assert state["state"] == "done", state
    left = programs.native_reads("mixed", read_compacted=True)
    assert len(left) < len(seen)
    assert {one.key: one.value for one in left if one.key is not None and one.value is not None} == table
    assert [one for one in left if one.key is None] == [one for one in seen if one.key is None]
    assert set(map(repr, left)) <= set(map(repr, seen))
    assert programs.pulsar_reads("mixed", is_read_compacted=True) == list(map(as_pulsar_says, left))
    assert programs.topics.ask(view) == table
    assert rows(read("mixed")) == seen
    assert programs.pulsar_reads("mixed") == list(map(as_pulsar_says, seen))


def test_partitions(
    programs: Programs, read: Callable[..., Any], stream: Callable[..., Any], tmp_path: Path
) -> None:
    programs.topics.ask(lambda client: client.admin.create_topic("mixed-parts", partitions=3))
    sent = programs.both_send("mixed-parts", 100)
    found = programs.native_reads("mixed-parts")
    content = [one for its in by_producer(found) for one in its]
    check_same(content, [stored(one) for its in sent for one in its])
    table = sorted_rows(read("mixed-parts"))
    assert list(map(of_spark, table)) == found
    assert {
        (row.topic, row.partition, MessageId.from_bytes(bytes(row.message_id)).partition) for row in table
    } == {(full("mixed-parts"), number, number) for number in range(3)}
    assert sorted(streamed(stream("mixed-parts", max_rows_per_batch="170"), tmp_path / "checkpoint")) == found
    assert sorted(programs.pulsar_reads("mixed-parts", len(found))) == list(map(as_pulsar_says, found))


def whole(one: Seen) -> Seen:
    """Without what Pulsar's client takes from the last chunk, and the native one from the first."""
    return one._replace(id=b"", publish_time=0)


def test_messages_in_chunks_and_what_is_archived(
    spark: Any,
    programs: Programs,
    seen: list[Seen],
    service: Service,
    read: Callable[..., Any],
    stream: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """A topic with messages in chunks, and the one that all others read, before and after their ledgers are in files."""
    programs.topics.create("mixed-chunks")
    large = [random.Random(number).randbytes(LARGE) for number in range(2)]
    sent = [
        [Sent(large[0], "k1", {"n": "1"}, 1_700_000_000_000), Sent(b"behind", "k1")],
        [Sent(large[1] + bytes(10_000), "k2", {"n": "2"})],
        [Sent(bytes(4500), "k3", {"n": str(number)}) for number in range(3)],
        [Sent(b"%d" % number) for number in range(20)],
    ]

    async def chunks() -> None:
        async with (
            connect(service.url, max_message_bytes=1000) as client,
            client.create_producer("mixed-chunks", chunking=True) as producer,
        ):
            for one in sent[2]:
                await producer.send(one.value, one.key, properties=one.properties)

    with ThreadPoolExecutor(2) as threads:
        work: list[Future[Any]] = [
            threads.submit(
                programs.pulsar,
                *[
                    ("send", "mixed-chunks", {"compression_type": codec, "chunking_enabled": True}, list(map(in_json, its)))
                    for codec, its in zip(("NONE", "LZ4"), sent)
                ],
            ),
            threads.submit(lambda: asyncio.run(chunks())),
        ]  # fmt: skip
        programs.topics.produce("mixed-chunks", sent[3], per_entry=1)
        for one in work:
            one.result()
    found = programs.native_reads("mixed-chunks")
    check_sent(found, sent)
    wanted = list(map(whole, map(as_pulsar_says, found)))

    def check() -> None:
        assert rows(read("mixed-chunks", partition_bytes="1000000")) == found
        check_same(list(map(whole, programs.pulsar_reads("mixed-chunks"))), wanted)

    check()
    names = ["mixed", "mixed-chunks"]

    def all_in_files() -> bool:
        return archive(spark, service.url, names, str(tmp_path / "archive"), trim=True).kept == ()

    programs.topics.wait_for(all_in_files, "leases of the queries before are over")
    for topic in names:
        *full_ones, _ = programs.topics.ledgers(topic)
        assert full_ones
        assert all(len(ledger) > 10 for ledger in full_ones)
    check()
    assert sorted(streamed(stream("mixed-chunks", max_rows_per_batch="20"), tmp_path / "checkpoint")) == found
    assert rows(read("mixed")) == programs.native_reads("mixed") == seen
    assert programs.pulsar_reads("mixed") == list(map(as_pulsar_says, seen))
