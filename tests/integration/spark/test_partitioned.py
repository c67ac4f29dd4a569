"""Partitioned topics as a whole: read, followed while they grow, written by key, and committed once in all partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from magnetar.client import Client
from magnetar.client.core.routing import Router
from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import MessageId
from magnetar.spark.batch_source import TopicReader
from magnetar.spark.batches import last_batch
from magnetar.spark.count import count_messages
from magnetar.spark.jobs import archive, audit, check_replay, compact, read_archive, replay
from magnetar.spark.options import ReadOptions, WriteOptions
from magnetar.spark.sink import WrittenByTask, attach, write_task
from support.service import Service
from support.spark_kit import old_spark
from support.spark_topics import Topics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180, func_only=True), pytest.mark.real]


def create(topics: Topics, name: str, partitions: int) -> None:
    topics.ask(lambda client: client.admin.create_topic(name, partitions=partitions))


def grow(topics: Topics, name: str, partitions: int) -> None:
    topics.ask(lambda client: client.admin.update_partitions(name, partitions))


def send(topics: Topics, name: str, numbers: range) -> None:
    """Keyed by the number, as the client routes it."""

    async def work(client: Client) -> None:
        async with client.create_producer(name) as producer:
            await producer.send_many([b"%d" % n for n in numbers], keys=[f"k{n}" for n in numbers])

    topics.ask(work)


def of_partitions(topics: Topics, name: str, partitions: int) -> list[list[bytes | None]]:
    return [topics.values(f"{name}-partition-{number}") for number in range(partitions)]


def test_a_read_has_all_partitions_with_their_numbers_and_ids(
    read: Callable[..., Any], topics: Topics, service: Service
) -> None:
    create(topics, "parts-read", 3)
    send(topics, "parts-read", range(60))
    rows = read("parts-read").collect()
    assert Counter(int(row.value) for row in rows) == Counter(range(60))
    assert {row.topic for row in rows} == {"persistent://public/default/parts-read"}
    by_partition = Counter(row.partition for row in rows)
    assert set(by_partition) == {0, 1, 2}
    for row in rows:
        assert MessageId.from_bytes(bytes(row.message_id)).partition == row.partition
    assert sorted(row.offset for row in rows if row.partition == 1) == list(range(by_partition[1]))
    assert count_messages(service.url, "parts-read-partition-2") == by_partition[2]
    assert count_messages(service.url, "parts-read") == 60
    places = '{"parts-read-partition-0": "offset:2", "": "latest"}'
    assert count_messages(service.url, "parts-read", start=places) == by_partition[0] - 2
    assert count_messages(service.url, topics_pattern="parts-rea.") == 60
    for place in ("0:0:0", "offset:3"):
        options = ReadOptions.parse({"service_url": service.url, "topic": "parts-read", "start": place})
        with pytest.raises(InvalidArgument, match=f"option start is {place}, a place in one log"):
            TopicReader(options, ["value"]).partitions()


@pytest.mark.skipif(old_spark(4, 2), reason="before 4.2 Spark makes one batch of what is there")
def test_a_stream_follows_a_topic_that_grows_and_writes_as_the_client_routes(
    stream: Callable[..., Any], topics: Topics, service: Service, tmp_path: Path
) -> None:
    create(topics, "grows", 2)
    create(topics, "grows-copy", 3)

    def run() -> None:
        rows = stream("grows", "key binary, value binary", subscription="copying")
        writer = rows.selectExpr("value", "cast(key AS string) AS key").writeStream.format("magnetar")
        writer = writer.option("service_url", service.url).option("topic", "grows-copy")
        writer.option("checkpointLocation", str(tmp_path)).trigger(
            availableNow=True
        ).start().awaitTermination()

    send(topics, "grows", range(40))
    run()
    grow(topics, "grows", 4)
    send(topics, "grows", range(40, 100))
    run()
    run()
    found = of_partitions(topics, "grows-copy", 3)
    assert Counter(int(value or b"") for values in found for value in values) == Counter(range(100))
    router = Router("single", "murmur3", 3, lambda _: 0)
    for number, values in enumerate(found):
        assert all(router.of_key[f"k{int(value or b'')}"] == number for value in values)
    for number in range(4):
        (cursor,) = topics.stats(f"grows-partition-{number}")["subscriptions"].values()
        assert cursor["backlog_messages"] == 0


def test_rows_without_a_key_go_to_one_partition_for_each_task(
    spark: Any, topics: Topics, service: Service
) -> None:
    create(topics, "turns", 3)
    rows = spark.range(0, 90, 1, 3).selectExpr("cast(id AS string) AS value", "cast(null AS string) AS key")
    writer = rows.write.format("magnetar").mode("append").option("service_url", service.url)
    writer.option("topic", "turns").save()
    assert [len(values) for values in of_partitions(topics, "turns", 3)] == [30, 30, 30]


def attempt(
    service: Service, topic: str, batch: int, first: int, end: int
) -> tuple[WriteOptions, list[WrittenByTask]]:
    """What the tasks of a batch of a stream write, in this process."""
    options = WriteOptions.parse({"service_url": service.url, "topic": topic})
    values, keys = [b"%d" % n for n in range(first, end)], [f"k{n}" for n in range(first, end)]
    rows = pa.record_batch({"value": values, "key": keys})
    halves = [rows.slice(0, 10), rows.slice(10)]
    return options, [write_task(options, "q", batch, iter([half])) for half in halves]


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_a_commit_that_was_interrupted_is_completed_by_its_repetition_though_the_topic_has_grown(
    topics: Topics, service: Service, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    """The driver dies when so many partitions have the batch."""
    topic = f"once-{done}"
    create(topics, topic, 3)
    options, written = attempt(service, topic, 0, 0, 30)
    assert attach(options, written)
    options, written = attempt(service, topic, 1, 30, 60)
    from magnetar.spark import sink

    attach_one, left = sink._attach, done

    async def dies(*given: Any) -> bool:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return await attach_one(*given)

    with monkeypatch.context() as patch:
        patch.setattr(sink, "_attach", dies)
        if done < 3:
            with pytest.raises(KeyboardInterrupt):
                attach(options, written)
        else:
            attach(options, written)
    assert last_batch(service.url, topic, "q") == (1 if done == 3 else 0), (
        "it says that it is done before it is"
    )
    grow(topics, topic, 5)
    options, written = attempt(service, topic, 1, 30, 60)
    attach(options, written)
    attach(options, written)
    assert last_batch(service.url, topic, "q") == 1
    options, written = attempt(service, topic, 2, 60, 90)
    attach(options, written)
    found = of_partitions(topics, topic, 5)
    assert Counter(int(value or b"") for values in found for value in values) == Counter(range(90))
    assert all(found), "new partitions get their share, of the next batch at the latest"
    assert sum(topics.staged(f"{topic}-partition-{number}") for number in range(5)) == 0


def test_tasks_that_divided_rows_differently_publish_nothing(topics: Topics, service: Service) -> None:
    create(topics, "torn", 2)
    options, before = attempt(service, "torn", 0, 0, 20)
    grow(topics, "torn", 3)
    _, after = attempt(service, "torn", 0, 0, 20)
    with pytest.raises(Exception, match="among 2 and among 3; nothing was published"):
        attach(options, [before[0], after[1]])
    assert of_partitions(topics, "torn", 3) == [[], [], []]
    with pytest.raises(InvalidArgument, match="option routing_hash is 'md5'"):
        WriteOptions.parse({"service_url": service.url, "topic": "torn", "routing_hash": "md5"})


def test_jobs_take_the_whole_topic(spark: Any, topics: Topics, service: Service, tmp_path: Path) -> None:
    create(topics, "worked", 2)
    create(topics, "worked-again", 3)
    for _ in range(6):  # more than one ledger has
        send(topics, "worked", range(20))
    url = service.url
    compacted = compact(spark, url, "worked", to_topic="worked-last")
    assert (compacted.messages_read, compacted.messages_kept) == (120, 20)
    assert sorted(int(value or b"") for value in topics.values("worked-last")) == list(range(20))
    again = replay(spark, url, to_topic="worked-again", topics=["worked"], mark=True)
    assert again.messages == 120
    assert sum(len(values) for values in of_partitions(topics, "worked-again", 3)) == 120
    origin = topics.rows("worked-again-partition-0")[0].properties
    assert origin is not None
    assert "worked-partition-" in origin["magnetar.replay.topic"]
    with pytest.raises(InvalidArgument, match="cannot be replayed into itself"):
        check_replay(url, to_topic="worked", topics=["worked"])
    checked = audit(spark, url, ["worked"], report=False)
    assert checked.clean
    assert {row.topic[-1] for row in checked.table.select("topic").distinct().collect()} == {"0", "1"}
    checked.close()
    archived = archive(spark, url, ["worked"], str(tmp_path / "archive"))
    assert archived.rows
    table, names = read_archive(spark, str(tmp_path / "archive"), ["worked"])
    rows = table.collect()
    assert len(rows) == archived.rows
    assert set(names) == {f"persistent://public/default/worked-partition-{number}" for number in range(2)}
    assert {(row.topic[-6:], row.partition) for row in rows} == {("worked", 0), ("worked", 1)}
