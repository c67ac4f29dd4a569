"""`spark.read`: what was produced, row for row, from the bookies of a real service."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from magnetar.proto.errors import MessageLost
from magnetar.proto.ids import MessageId
from support.service import Service
from support.spark_kit import old_spark
from support.spark_topics import Row, Sent, Topics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120, func_only=True), pytest.mark.real]

Read = Callable[..., Any]


def ms(time: datetime | None) -> int | None:
    """Spark hands out naive times in this machine's zone."""
    return None if time is None else round(time.timestamp() * 1000)


def as_row(row: Any) -> Row:
    """A row of Spark as the kit reads it through the broker."""
    assert row.partition == -1
    assert ms(row.append_time) is not None
    return Row(
        None if row.key is None else bytes(row.key),
        None if row.value is None else bytes(row.value),
        row.topic,
        bytes(row.message_id),
        row.offset,
        ms(row.publish_time) or 0,
        ms(row.event_time),
        row.properties,
        row.producer,
        row.sequence_id,
    )


def rows_of(frame: Any) -> list[Row]:
    return sorted(map(as_row, frame.collect()), key=lambda row: (row.topic, row.offset))


def values_of(frame: Any) -> list[bytes]:
    """In the order of the topic."""
    return [bytes(row.value) for row in sorted(frame.collect(), key=lambda row: (row.topic, row.offset))]


def mixed(seed: int, count: int) -> list[Sent]:
    """Messages with everything that a message can have, in any combination."""
    rng = random.Random(seed)
    return [
        Sent(
            rng.choice([None, b"", b"%d" % n, rng.randbytes(rng.randrange(300))]),
            rng.choice([None, "", f"k\u00e9{n % 7}", b"\xff%d" % n]),
            rng.choice([None, {"n": str(n)}, {"a": "", "\u00fc": "\u4e16"}]),
            rng.choice([None, 0, 1_700_000_000_123 + n]),
        )
        for n in range(count)
    ]


def test_batch_equals_what_was_produced_in_every_column(topics: Topics, read: Read) -> None:
    for seed, compression in enumerate(["none", "lz4", "zstd", "zlib", "snappy"]):
        for batching in (True, False):
            messages = mixed(seed * 2 + batching, 21)
            topics.produce("every", messages, batching=batching, compression=compression, per_entry=7)
    # Plain ones, unbatched, have a way of their own; they are the open tail.
    topics.produce("every", [b"plain%d" % n for n in range(10)], batching=False)
    sent = topics.rows("every")
    ledgers = topics.ledgers("every")
    assert len(ledgers) >= 5
    assert not ledgers[-1][8], "the last ledger is open"
    assert len(sent) == 10 * 21 + 10
    assert rows_of(read("every")) == sent
    # The same in other pieces.
    small = read("every", partition_bytes="600")
    assert small.rdd.getNumPartitions() > len(ledgers)
    assert rows_of(small) == sent


def test_several_topics_and_a_pattern(topics: Topics) -> None:
    for name in ("many-a", "many-b", "many-c", "other"):
        topics.produce(name, [b"%s%d" % (name.encode(), n) for n in range(20)], per_entry=3)
    a, b, c = (
        [(row.topic, row.value) for row in topics.rows(name)] for name in ("many-a", "many-b", "many-c")
    )
    assert sorted(topics.read("topic", "value", topics="many-c, many-a")) == sorted(a + c)
    assert topics.read("topic", "value", topics_pattern="many-.*") == a + b + c
    assert topics.read("topic", "value", topics_pattern="persistent://public/default/many-[bc]") == b + c
    assert topics.read("topic", "value", topics_pattern="nothing-.*") == []


def test_an_empty_topic_and_a_schema_with_fewer_columns(topics: Topics, read: Read) -> None:
    topics.create("empty")
    assert read("empty").collect() == []
    topics.produce("few", [Sent(b"v%d" % n, f"k{n}") for n in range(10)], per_entry=4)
    frame = read("few", schema="offset bigint, value binary")
    assert frame.columns == ["offset", "value"]
    assert [(row.offset, bytes(row.value)) for row in frame.orderBy("offset").collect()] == [
        (n, b"v%d" % n) for n in range(10)
    ]
    assert read("few").select("key").distinct().count() == 10
    assert read("few").count() == 10


def test_start_and_end_by_id_time_and_topic(topics: Topics) -> None:
    first = topics.produce("range", [b"%d" % n for n in range(40)], per_entry=5)
    rows = topics.read("message_id", "append_time", topic="range")
    between = ms(rows[-1][1])
    assert between is not None
    topics.wait_for(lambda: _now_ms() > between + 1, "the clock goes on")
    second = topics.produce("range", [b"%d" % n for n in range(40, 60)], per_entry=5)
    sent = [b"%d" % n for n in range(60)]

    def cut(**options: str) -> list[bytes]:
        return [value for (value,) in topics.read("value", **{"topic": "range", **options})]

    assert cut(start=str(first[13]), end=str(second[2])) == sent[13:42]
    assert cut(start=str(first[15]), end=str(first[15])) == []
    assert cut(start="latest") == []
    assert cut(start=str(between + 1)) == sent[40:]
    zone = datetime.fromtimestamp((between + 1) / 1000, UTC).isoformat()
    assert cut(end=zone) == sent[:40]
    # An id between two ledgers, and one past all.
    ledger = topics.ledgers("range")[2][0]
    before = sum(MessageId.from_bytes(message_id).ledger < ledger for message_id, _ in rows)
    ends = str(MessageId(ledger - 1, 1000, 0)), str(MessageId(1 << 40, 0, 0))
    assert cut(start=ends[0], end=ends[1]) == sent[before:]
    topics.produce("range2", [b"x%d" % n for n in range(10)], per_entry=2)
    places = f'{{"range": "{second[5]}", "": "earliest"}}'
    assert cut(topic="", topics="range,range2", start=places) == sent[45:] + [b"x%d" % n for n in range(10)]


def _now_ms() -> int:
    return round(datetime.now().timestamp() * 1000)


@pytest.mark.skipif(old_spark(4, 1), reason="before 4.1 Spark has no such setting")
@pytest.mark.parametrize("setting", ["true", "false"])
def test_filters_skip_ledgers_and_entries_where_spark_hands_them_down(
    topics: Topics, read: Read, spark: Any, setting: str
) -> None:
    name = f"filter-{setting}"
    ids = topics.produce(name, [b"%d" % n for n in range(400)], per_entry=20)
    assert sum(row[3] > 0 for row in topics.ledgers(name)) == 5
    key = "spark.sql.python.filterPushdown.enabled"
    before = spark.conf.get(key)
    spark.conf.set(key, setting)
    try:
        frame = read(name)
        for wanted, first, end, entries in (
            ("offset >= 200 and offset < 207", 200, 207, 4),
            (f"message_id <= X'{ids[9].to_bytes().hex()}'", 0, 10, 1),
            (f"message_id > X'{ids[389].to_bytes().hex()}'", 390, 400, 1),
            ("offset < 5 and offset > 10", 0, 0, 0),
            ("value = X'3334'", 34, 35, 20),  # says nothing of a place
        ):
            read_before = topics.entries_read()
            assert values_of(frame.where(wanted)) == [b"%d" % n for n in range(first, end)], wanted
            count = topics.entries_read() - read_before
            assert count <= entries if setting == "true" else count == 20, (wanted, count)
        time = frame.agg({"append_time": "max"}).collect()[0][0]
        assert frame.where(frame.append_time > time).count() == 0
        assert frame.where(frame.append_time <= time).count() == 400
    finally:
        spark.conf.set(key, before)


def test_a_lease_keeps_ledgers_that_are_trimmed_under_the_query(topics: Topics) -> None:
    for name in ("leased", "not-leased"):
        topics.produce(name, [b"%d" % n for n in range(100)], per_entry=2)
    reader = topics.reader("value", topic="leased", partition_bytes="1")
    planned = reader.partitions()
    assert len(planned) >= 12
    for name in ("leased", "not-leased"):
        topics.consume_all(name)
    topics.wait_trimmed("not-leased")
    assert sum(batch.num_rows for piece in planned for batch in reader.read(piece)) == 100


def test_ledgers_that_went_with_an_expired_lease_are_one_clear_error(topics: Topics) -> None:
    topics.produce("expired", [b"%d" % n for n in range(40)], per_entry=2)
    reader = topics.reader("value", topic="expired", lease_s="0.5", partition_bytes="1")
    planned = reader.partitions()
    assert len(planned) >= 5
    first = topics.ledgers("expired")[0][0]
    topics.consume_all("expired")
    topics.wait_trimmed("expired")
    with pytest.raises(MessageLost, match=r"^ledger \d+ of persistent://public/default/expired was "
                       r"trimmed before it was read; raise the option lease_s, now 0\.5"):  # fmt: skip
        next(reader.read(planned[0]))
    # A range that was trimmed as a whole is not empty but lost.
    for start, end in (("offset:0", "offset:6"), ("0:0:0", f"{first}:2:0")):
        with pytest.raises(
            MessageLost, match=rf"\d+ messages of .*expired, from {start} to {end}, were trimmed"
        ):
            topics.read("value", topic="expired", start=start, end=end)
    assert topics.read("value", topic="expired", start="0:0:0", fail_on_data_loss="false") == []


def test_a_topic_is_a_view_and_a_table_in_sql(
    spark: Any, topics: Topics, service: Service, tmp_path: Path
) -> None:
    topics.produce("sql", [b'{"n":%d}' % n for n in range(10)])
    options = f"service_url '{service.url}', topic 'sql'"

    def ask(query: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in spark.sql(query).collect()]

    spark.sql(f"CREATE TEMPORARY VIEW in_sql USING magnetar OPTIONS ({options})")
    spark.sql(f"CREATE TABLE as_table USING magnetar OPTIONS ({options})")
    n = "from_json(CAST(value AS string), 'n int').n"
    for name in ("in_sql", "as_table"):
        assert ask(f"SELECT sum({n}), max(offset) FROM {name} WHERE {n} > 3") == [(39, 9)]
    assert ask(f"SELECT sum({n}) FROM as_table WITH (`start` = 'offset:8')") == [(17,)]
    spark.sql(f"CREATE VIEW decoded AS SELECT offset, {n} AS n FROM as_table")
    assert ask("SELECT count(*) FROM decoded a JOIN decoded b ON a.n = b.n + 1") == [(9,)]
    query = spark.readStream.table("as_table").select("value").writeStream.format("parquet")
    query = query.option("path", str(tmp_path / "rows")).option("checkpointLocation", str(tmp_path / "cp"))
    query.trigger(availableNow=True).start().awaitTermination()
    assert spark.read.parquet(str(tmp_path / "rows")).count() == 10
    # What is selected from a table and written elsewhere goes there.
    topics.create("sql-copy")
    frame = spark.table("as_table").write.format("magnetar").mode("append").option("service_url", service.url)
    frame.save("sql-copy")
    assert topics.values("sql-copy") == topics.values("sql")
    for wrong, error in (
        # Spark 4.0 asks first where the other columns are.
        ("INSERT INTO as_table (value) VALUES (X'31')", "can be read only|CANNOT_FIND_DATA"),
        ("INSERT INTO as_table SELECT * FROM as_table", "can be read only"),
        (
            f"CREATE TABLE other USING magnetar OPTIONS ({options}) AS SELECT X'31' AS value",
            "can be read only",
        ),
        ("CREATE TABLE other USING magnetar", "a table needs to know its topic"),
        ("CREATE TABLE other USING magnetar OPTIONS (topic 'sql')", "option service_url is ''"),
    ):
        with pytest.raises(Exception, match=error):
            spark.sql(wrong)
    spark.sql(f"CREATE TABLE with_columns (value binary) USING magnetar OPTIONS ({options})")
    with pytest.raises(Exception, match="made without columns: CREATE TABLE orders USING magnetar OPTIONS"):
        spark.sql("SELECT * FROM with_columns").collect()
    spark.sql("DROP VIEW decoded")
    for name in ("as_table", "with_columns"):
        spark.sql(f"DROP TABLE {name}")
    assert topics.values("sql") == [b'{"n":%d}' % n for n in range(10)]
