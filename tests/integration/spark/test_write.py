"""`write` and `writeStream` to topics of a real service: all of a batch or nothing, and each batch once."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from magnetar.proto import commands as c
from magnetar.proto.errors import InvalidArgument
from magnetar.spark.batches import last_batch
from magnetar.spark.data_source import MagnetarDataSource
from magnetar.spark.options import WriteOptions
from magnetar.spark.sink import TopicWriter
from support.broken_line import BrokenLine
from support.service import Service
from support.spark_kit import old_spark
from support.spark_topics import Topics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120, func_only=True), pytest.mark.real]


@pytest.fixture
def write(service: Service) -> Callable[..., None]:
    """`write(frame, "orders", compression="lz4")`."""

    def save(frame: Any, topic: str, **options: str) -> None:
        writer = frame.write.format("magnetar").mode("append").option("service_url", service.url)
        writer.option("topic", topic).options(**options).save()

    return save


def test_what_is_written_is_read_in_every_column_and_in_order_of_the_tasks(
    spark: Any, topics: Topics, write: Callable[..., None]
) -> None:
    topics.produce("written", [b"before"])
    frame = spark.range(0, 3000, 1, 3).selectExpr(
        "concat('v', id) AS value",
        "if(id % 3 = 0, null, concat('k', id % 7)) AS key",
        "if(id % 2 = 0, map('n', cast(id AS string)), null) AS properties",
        "if(id % 5 = 0, null, timestamp_millis(1700000000000 + id)) AS event_time",
        "id AS offset",  # a topic's own column is passed over
    )
    write(frame, "written", compression="zstd")
    topics.produce("written", [b"after"])
    rows = topics.rows("written", 3002)
    assert (rows[0].value, rows[-1].value) == (b"before", b"after")
    for n, row in enumerate(rows[1:-1]):
        assert row.value == b"v%d" % n
        assert row.key == (None if n % 3 == 0 else b"k%d" % (n % 7))
        assert row.properties == ({"n": str(n)} if n % 2 == 0 else None)
        assert row.event_time == (None if n % 5 == 0 else 1700000000000 + n)
    assert [row.message_id for row in rows] == sorted(row.message_id for row in rows)
    assert len(topics.ledgers("written")) == 1, "a small batch gets no ledger of its own"
    assert topics.staged("written") == 0


def test_a_large_batch_is_attached_in_the_order_of_its_tasks(
    spark: Any, topics: Topics, write: Callable[..., None]
) -> None:
    topics.produce("large", [b"before"])
    write(spark.range(0, 600, 1, 3).selectExpr("concat(id, repeat('x', 4000)) AS value"), "large")
    topics.produce("large", [b"after"])
    values = [value.rstrip(b"x") for value in topics.values("large") if value is not None]
    assert values == [b"before", *[b"%d" % n for n in range(600)], b"after"]
    assert len(topics.ledgers("large")) == 5
    assert topics.staged("large") == 0


@pytest.mark.skipif(old_spark(4, 2), reason="before 4.2 Spark makes one batch of what is there")
@pytest.mark.parametrize("answered", [False, True], ids=["before it reached the broker", "after it was done"])
def test_a_stream_whose_commit_fails_has_one_copy_after_its_restart(
    spark: Any, topics: Topics, service: Service, tmp_path: Path, answered: bool
) -> None:
    """The line to the broker breaks at the commit of the second batch, and stays down until the query has failed."""
    source, target = f"cut-{answered}", f"cut-{answered}-copy"
    sent = [b"%d" % n for n in range(90)]
    topics.produce(source, sent, per_entry=10)
    topics.create(target)

    def copy(url: str) -> Any:
        reader = spark.readStream.format("magnetar").option("service_url", service.url)
        rows = reader.option("max_rows_per_batch", "30").load(source).select("key", "value")
        writer = rows.writeStream.format("magnetar").option("service_url", url).option("timeout_s", "1")
        writer = writer.option("topic", target).option("checkpointLocation", str(tmp_path / "checkpoint"))
        return writer.trigger(availableNow=True).start()

    with BrokenLine(service) as line:
        query = copy(line.url)
        topics.wait_for(lambda: bool(query.recentProgress), "the first batch is done")
        line.break_at(c.AttachLedgers, answered=answered)
        with pytest.raises(Exception, match=r"(?s)magnetar\.proto\.errors\.\w+: .*127\.0\.0\.1"):
            query.awaitTermination()
        assert line.broken
        done = len(topics.values(target))
        assert done % 30 == 0
        assert 0 < done < 90
        assert len(list((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))) == done // 30 - answered
        line.mend()
        copy(line.url).awaitTermination()
    assert topics.values(target) == sent
    topics.wait_for(lambda: topics.staged(target) == 0, "nothing is staged")


def test_a_task_that_fails_after_its_ledger_was_closed_leaves_nothing(
    spark: Any, topics: Topics, service: Service
) -> None:
    """Here a task has one attempt, so that the write fails, and is aborted at once."""
    spark.dataSource.register(late_failure())
    topics.create("late")
    frame = spark.range(0, 100, 1, 2).selectExpr("cast(id AS string) AS value")
    writer = frame.write.format("magnetar_late").mode("append").option("service_url", service.url)
    writer = writer.option("staged_ttl_s", "3600")  # the sweep would discard it, too
    with pytest.raises(Exception, match="after the ledger was closed"):
        writer.option("topic", "late").save()
    assert topics.values("late") == []
    topics.wait_for(lambda: topics.staged("late") == 0, "the abort discards")


def late_failure() -> type:
    """Made in a function, so that it is sent to the tasks as it is: they cannot import a test."""

    class LateWriter(TopicWriter):
        def write(self, iterator: Any) -> Any:
            from pyspark import TaskContext

            written = super().write(iterator)
            context = TaskContext.get()
            assert context is not None
            if context.partitionId() == 1:
                raise ValueError("after the ledger was closed")
            return written

    class Late(MagnetarDataSource):
        @classmethod
        def name(cls) -> str:
            return "magnetar_late"

        def writer(self, schema: Any, overwrite: bool) -> Any:
            return LateWriter(WriteOptions.parse(self.options), schema)

    return Late


def write_here(topics: Topics, topic: str, *tasks: pa.RecordBatch, **options: str) -> None:
    """A write of these tasks, one after another, without Spark."""
    given = {"service_url": topics.service.url, "topic": topic, **options}
    writer = MagnetarDataSource(given).writer(from_arrow_schema(tasks[0].schema), overwrite=False)
    written: list[Any] = [writer.write(iter([rows])) for rows in tasks]
    try:
        writer.commit(written)
    except InvalidArgument:
        writer.abort(written)
        raise


def values(*some: str) -> pa.RecordBatch:
    return pa.record_batch({"value": list(some)})


def test_a_named_write_is_done_once(topics: Topics) -> None:
    topics.create("named")
    for batch in (0, 0, 1, 1):  # as a foreachBatch that is repeated after a crash
        rows = values(*(f"{batch}-{n}" for n in range(3)))
        write_here(topics, "named", rows, query="fan-out", batch=str(batch))
    write_here(topics, "named", values("x"), query="another", batch="0")
    for batch in (0, 1):  # a backfill, and another write of the same batch
        with pytest.raises(InvalidArgument, match=rf"batch {batch} of query 'fan-out' is not written"):
            write_here(topics, "named", values("lost"), query="fan-out", batch=str(batch))
    write_here(topics, "named", values("other"), query="fan-out", batch="1", repeated_batch="done")
    assert topics.values("named") == [b"0-0", b"0-1", b"0-2", b"1-0", b"1-1", b"1-2", b"x"]
    assert [last_batch(topics.service.url, "named", query) for query in ("fan-out", "another", "none")] == [
        1,
        0,
        -1,
    ]
    assert topics.staged("named") == 0


def test_a_repeated_batch_is_known_by_its_rows_in_any_order_and_from_any_tasks(topics: Topics) -> None:
    topics.create("shuffled")
    rows = pa.record_batch(
        {
            "value": [None if n % 3 == 0 else f"v{n}" for n in range(300)],
            "key": [None if n % 2 == 0 else f"k{n}" for n in range(300)],
            "properties": pa.array([[("n", str(n))] for n in range(300)], pa.map_(pa.string(), pa.string())),
            "event_time": pa.array(range(300), pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC")),
        }
    )

    def write(*tasks: pa.RecordBatch) -> None:
        write_here(topics, "shuffled", *tasks, query="q", batch="0")

    def changed(column: str, row: int, value: Any) -> pa.RecordBatch:
        cells = rows.column(column).to_pylist()
        cells[row] = value
        at = rows.schema.get_field_index(column)
        return rows.set_column(at, column, pa.array(cells, rows.schema.field(at).type))

    write(rows)
    order = [*range(300)]
    random.Random(1).shuffle(order)
    turned = rows.take(pa.array(order))
    write(turned.slice(0, 100), turned.slice(100, 1), turned.slice(101))
    assert len(topics.values("shuffled")) == 300
    for column, row, value in (
        ("value", 4, "w4"), ("key", 1, "k2"), ("properties", 4, [("n", "m")]), ("event_time", 4, 1_000_000)
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match="with other rows"):
            write(changed(column, row, value))
    with pytest.raises(InvalidArgument, match="with other rows"):
        write(rows.slice(1))  # whose first row has neither value nor key
    assert topics.staged("shuffled") == 0


@pytest.mark.spark
def test_a_new_checkpoint_writes_again_and_a_copied_one_fails(
    spark: Any, topics: Topics, service: Service, tmp_path: Path
) -> None:
    topics.produce("source", [b"%d" % n for n in range(10)])
    topics.create("direct")
    topics.create("fanned")

    def fan_out(rows: Any, number: int) -> None:
        for name in ("first", "second"):
            named = rows.write.format("magnetar").mode("append").option("service_url", service.url)
            named.option("query", name).option("batch", number).save("fanned")

    def run(checkpoint: str, kind: str) -> None:
        reader = spark.readStream.format("magnetar").option("service_url", service.url)
        writer = reader.schema("value binary").load("source").writeStream.queryName(f"{checkpoint}-{kind}")
        if kind == "direct":
            writer = writer.format("magnetar").option("service_url", service.url).option("topic", "direct")
        else:
            writer = writer.foreachBatch(fan_out)
        writer = writer.option("checkpointLocation", str(tmp_path / f"{checkpoint}-{kind}"))
        writer.trigger(availableNow=True).start().awaitTermination()

    for kind, copies in (("direct", 1), ("fanned", 2)):
        run("one", kind)
        assert len(topics.values(kind)) == 10 * copies
        shutil.copytree(tmp_path / f"one-{kind}", tmp_path / f"copied-{kind}")
    topics.produce("source", [b"more"])
    for kind, copies in (("direct", 1), ("fanned", 2)):
        run("one", kind)
        assert len(topics.values(kind)) == 11 * copies
        run("new", kind)
        assert len(topics.values(kind)) == 22 * copies
    topics.produce("source", [b"and more"])
    for kind, copies in (("direct", 1), ("fanned", 2)):
        with pytest.raises(Exception, match="has batch 1 of it, with other rows"):
            run("copied", kind)
        assert len(topics.values(kind)) == 22 * copies


def test_a_write_without_rows_and_tasks_without_rows(
    spark: Any, topics: Topics, write: Callable[..., None]
) -> None:
    topics.create("sparse")
    write(spark.range(0).selectExpr("cast(id AS string) AS value"), "sparse")
    assert topics.values("sparse") == []
    write(spark.range(0, 4, 1, 4).where("id = 2").selectExpr("cast(id AS string) AS value"), "sparse")
    assert topics.values("sparse") == [b"2"]


def test_a_write_that_fails_leaves_nothing_staged_and_nothing_visible(
    spark: Any, topics: Topics, write: Callable[..., None]
) -> None:
    topics.create("failing")
    bad = spark.range(0, 2000, 1, 2).selectExpr(
        "if(id = 1500, raise_error('the rows end here'), cast(id AS string)) AS value"
    )
    with pytest.raises(Exception, match="the rows end here"):
        write(bad, "failing", staged_ttl_s="2")
    large = spark.range(0, 2, 1, 2).selectExpr("repeat('x', 100 + cast(id AS int) * 100) AS value")
    with pytest.raises(
        Exception,
        match="InvalidArgument: a row to write has 200 bytes of value, key and properties, and",
    ):
        write(large, "failing", staged_ttl_s="2", max_message_bytes="150")
    assert topics.values("failing") == []
    # A task that Spark killed, rather than failed, leaves its ledger to the sweep.
    topics.wait_for(lambda: topics.staged("failing") == 0, "nothing is staged")


def test_readers_see_all_of_a_batch_or_nothing(
    spark: Any, topics: Topics, write: Callable[..., None], service: Service
) -> None:
    """One counts again and again, while batches of 600 rows from three tasks appear: small, large and small ones."""
    topics.create("whole")
    counts: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            counts.append(sum(row[4] for row in topics.ledgers("whole")))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for batch in range(3):
            rows = f"concat('{batch}/', id, repeat('x', {4000 * (batch % 2)})) AS value"
            write(spark.range(0, 600, 1, 3).selectExpr(rows), "whole")
            assert len(topics.values("whole")) == 600 * (batch + 1)
    finally:
        done.set()
        watcher.join()
    assert {*counts} <= {0, 600, 1200, 1800}
    assert len({*counts}) >= 3
    values = [value.rstrip(b"x") for value in topics.values("whole") if value is not None]
    assert values == [b"%d/%d" % (b, n) for b in range(3) for n in range(600)]
    assert len(topics.ledgers("whole")) == 5
