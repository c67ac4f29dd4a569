"""What tasks and drivers do, without a session: slow ones lose nothing, rows are routed, small ledgers are read together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from magnetar.proto.errors import InvalidArgument
from magnetar.spark.batch_source import TopicReader
from magnetar.spark.options import ReadOptions, WriteOptions
from magnetar.spark.sink import attach, write_task
from support.service import Service
from support.spark_topics import Topics

from .conftest import arguments

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60), pytest.mark.real]

TTL_S = 3


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """Staged ledgers expire soon."""
    settings = (
        f"broker.staged_ttl_ms={round(TTL_S * 1000)}",
        "broker.maintenance_interval_s=0.1",
        "broker.attach_min_bytes=0",
    )
    service = Service(tmp_path / "data", arguments=arguments(settings))
    service.start()
    yield service
    service.stop()


def batch(*values: bytes) -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array(values, pa.binary())})


def slow(service: Service, topics: Topics, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """As behind a sort: the first row comes when what nobody has renewed since is gone."""
    topics.create("forgotten")
    given = {"service_url": service.url, "topic": "forgotten", "staged_ttl_s": str(2 * TTL_S)}
    write_task(WriteOptions.parse(given), "forgotten", 0, iter([batch(b"a")]))
    topics.wait_for(lambda: topics.staged("forgotten") == 0, "what was staged with it is swept")
    yield rows


def test_a_task_that_waits_for_its_first_row_keeps_what_others_wrote(
    service: Service, topics: Topics
) -> None:
    options = WriteOptions.parse({"service_url": service.url, "topic": "slow"})
    topics.create("slow")
    rows = (iter([batch(b"a")]), slow(service, topics, batch(b"b")))
    written = [write_task(options, "q", 0, one) for one in rows]
    assert attach(options, written)
    assert topics.values("slow") == [b"a", b"b"]


def test_a_writer_says_how_long_its_ledgers_wait_for_the_commit(service: Service, topics: Topics) -> None:
    topics.create("patient")
    given = {"service_url": service.url, "topic": "patient"}
    patient, other = (WriteOptions.parse({**given, "staged_ttl_s": ttl_s}) for ttl_s in ("3600", "0"))
    lives, dies = (
        write_task(options, f"q{options.staged_ttl_s}", 0, iter([batch(b"a")]))
        for options in (patient, other)
    )
    topics.wait_for(lambda: topics.staged("patient") == 1, "the driver plans, or collects garbage")
    with pytest.raises(Exception, match="was not renewed in time"):
        attach(other, [dies])
    assert attach(patient, [lives])
    assert topics.values("patient") == [b"a"]


def test_rows_go_to_the_topics_that_they_name_each_once(service: Service, topics: Topics) -> None:
    options = WriteOptions.parse({"service_url": service.url})
    for name in ("one", "two"):
        topics.create(name)
    names = ["one", "persistent://public/default/two", "one", "two"]
    rows = pa.record_batch({"value": pa.array([b"a", b"b", b"c", b"d"], pa.binary()), "topic": names})
    written = [write_task(options, "routed", 0, iter([rows])) for _ in range(2)]
    assert attach(options, written)
    assert not attach(options, written)
    assert (topics.values("one"), topics.values("two")) == ([b"a", b"c"] * 2, [b"b", b"d"] * 2)
    none = pa.record_batch({"value": pa.array([b"a"], pa.binary()), "topic": pa.array([None], pa.string())})
    with pytest.raises(InvalidArgument, match="its column 'topic' is null"):
        write_task(options, "routed", 1, iter([none]))
    # The first topic has the batch when the driver dies; whoever repeats it writes the second.
    halves = [replace(one, batch=2) for one in (write_task(options, "routed", 2, iter([rows])),)]
    first = replace(halves[0], ledgers=halves[0].ledgers[:1])
    assert attach(options, [first])
    assert attach(options, [write_task(options, "routed", 2, iter([rows]))])
    assert (topics.values("one"), topics.values("two")) == ([b"a", b"c"] * 3, [b"b", b"d"] * 3)


def test_a_topic_that_the_running_tasks_have_no_rows_for_keeps_what_others_wrote(
    service: Service, topics: Topics
) -> None:
    """Also when its broker has begun anew meanwhile."""
    options = WriteOptions.parse({"service_url": service.url})
    for name in ("early", "late"):
        topics.create(name)
    tasks = [
        pa.record_batch({"value": [b"a"], "topic": ["early"]}),
        pa.record_batch({"value": [b"b"], "topic": ["late"]}),
    ]
    written = [write_task(options, "routed", 0, iter([tasks[0]]))]
    service.stop()
    service.start()
    written.append(write_task(options, "routed", 0, slow(service, topics, tasks[1])))
    assert attach(options, written)
    assert (topics.values("early"), topics.values("late")) == ([b"a"], [b"b"])


def test_many_small_ledgers_are_read_by_one_task(service: Service, topics: Topics) -> None:
    topics.create("many")
    options = WriteOptions.parse({"service_url": service.url, "topic": "many"})
    for number in range(20):
        tasks = [write_task(options, "q", number, iter([batch(b"%d-%d" % (number, n))])) for n in range(3)]
        assert attach(options, tasks)
    reader = TopicReader(
        ReadOptions.parse({"service_url": service.url, "topic": "many"}), ("offset", "value")
    )
    partitions = reader.partitions()
    assert len(topics.ledgers("many")) == 60
    assert len(partitions) == 1
    rows = [row for one in partitions for found in reader.read(one) for row in found.to_pylist()]
    assert rows == [{"offset": n, "value": b"%d-%d" % divmod(n, 3)} for n in range(60)]
    spread = ReadOptions.parse({"service_url": service.url, "topic": "many", "min_partitions": "10"})
    assert 10 <= len(TopicReader(spread, ("offset",)).partitions()) <= 60
