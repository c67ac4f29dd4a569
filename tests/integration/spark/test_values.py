"""Values as columns through a real Spark and a real service: round trips, Spark's own JSON, streams, filters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as sql
from pyspark.sql.types import StructType

from magnetar.spark.avro import derived
from magnetar.spark.ddl import parse_schema
from magnetar.spark.versions import FILTERS_ARE_HANDED_DOWN, arrow_schema
from support.service import Service
from support.spark_topics import Sent, Topics

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(120, func_only=True),
    pytest.mark.real,
    pytest.mark.spark,
]

Read = Callable[..., Any]
Write = Callable[..., None]

# In the order of `id`; the last row is null but for that. Avro has no tinyint.
ROWS = """
    SELECT id, id % 2 = 0 AS b, cast(id AS int) AS i, 9223372036854775807 - id AS l, cast(id AS float) / 8 AS f,
        if(id = 1, double('NaN'), id / 7) AS d, concat('n\u00fc\\n\u4e16', id) AS s, cast(concat('x', id) AS binary) AS y,
        cast(id AS decimal(20,3)) / 8 AS p, date_add(date'2026-11-21', cast(id AS int)) AS day,
        timestamp_micros(1700000000123456 + id) AS at, timestamp_ntz'2026-11-21 12:00:00.000001' AS n,
        array(cast(id AS int), null) AS xs, map('a', id / 3, 'b', null) AS m,
        named_struct('x', id, 'ys', array(named_struct('z', cast(id AS string)))) AS o
    FROM range(0, 5)
    UNION ALL SELECT 5, null, null, null, null, null, null, null, null, null, null, null, null, null, null
"""


@pytest.fixture
def write(service: Service) -> Write:
    """`write(frame, "orders", value_format="json")`."""

    def save(frame: Any, topic: str, **options: str) -> None:
        writer = frame.write.format("magnetar").mode("append").option("service_url", service.url)
        writer.option("topic", topic).options(**options).save()

    return save


@pytest.fixture
def pushdown(spark: Any) -> Iterator[None]:
    """Spark hands filters down."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    yield
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def in_order(frame: Any) -> str:
    """Rows as text: NaN is no equal of itself."""
    return "\n".join(map(repr, frame.orderBy("id").collect()))


@pytest.mark.parametrize("value_format", ["json", "msgpack", "avro"])
def test_what_is_written_is_read_in_every_type(
    spark: Any, topics: Topics, write: Write, read: Read, value_format: str
) -> None:
    topic = f"round-{value_format}"
    topics.create(topic)
    frame = spark.sql(ROWS)
    schema, options = frame.schema.json(), {"value_format": value_format}
    if value_format == "avro":
        fields = arrow_schema(frame.schema)
        schema = options["value_schema"] = json.dumps(derived(pa.struct(list(fields))))
    write(frame.withColumn("key", sql.col("s")), topic, **options)
    found = read(topic, **{**options, "value_schema": schema})
    assert in_order(found.select(frame.columns)) == in_order(frame)
    assert found.schema["o"].dataType.simpleString() == frame.schema["o"].dataType.simpleString()
    if value_format == "json":
        # What was read is written as it is: columns of the topic are passed over, and a tombstone stays one.
        topics.produce(topic, [Sent(None, "gone")])
        topics.create("again")
        write(read(topic, **options, value_schema=schema), "again", **options)
        kept, again = ([(row.key, row.value) for row in topics.rows(name)] for name in (topic, "again"))
        assert len(kept) == 7
        assert sorted(map(repr, again)) == sorted(map(repr, kept))


def test_json_is_what_sparks_own_functions_write_and_read(
    spark: Any, topics: Topics, write: Write, read: Read
) -> None:
    topics.create("theirs", "ours")
    frame = spark.sql(ROWS).withColumn("at", sql.date_trunc("millisecond", "at"))  # to_json cuts times
    frame = frame.withColumn("n", sql.expr("timestamp_ntz'2026-11-21 12:00:00'"))
    write(frame.select(sql.to_json(sql.struct("*")).alias("value")), "theirs")
    assert in_order(read("theirs", schema=_ddl(frame.schema), value_format="json")) == in_order(frame)
    write(frame, "ours", value_format="json")
    parsed = read("ours", schema="value binary").select(
        sql.from_json(sql.col("value").cast("string"), frame.schema).alias("row")
    )
    assert in_order(parsed.select("row.*")) == in_order(frame)


def _ddl(schema: StructType) -> str:
    return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in schema.fields)


def test_bad_values_and_tombstones(topics: Topics, read: Read) -> None:
    values = [b'{"id": 1}', b"{", None, b'{"id": 2, "more": []}']
    topics.produce("mixed", [Sent(value) for value in values], per_entry=2)
    with pytest.raises(
        Exception, match=r"InvalidArgument: the value of message \d+:0:1 of persistent://public/.*mixed"
    ) as caught:
        read("mixed", value_format="json", value_schema="id int").collect()
    assert "on_bad_value=null" in str(caught.value)
    rows = read("mixed", value_format="json", value_schema="id int", on_bad_value="null").collect()
    assert [(row.id, row.value) for row in sorted(rows, key=lambda row: row.offset)] == [
        (1, b'{"id": 1}'), (None, b"{"), (None, None), (2, b'{"id": 2, "more": []}'),
    ]  # fmt: skip
    # Where only the topic's columns are asked for, nothing is decoded.
    assert read("mixed", schema="offset bigint", value_format="json").count() == 4
    with pytest.raises(
        Exception, match="InvalidArgument: option value_schema is not a schema: there is no type 'itn'"
    ):
        read("mixed", value_format="json", value_schema="id itn")


def test_what_cannot_be_written_is_refused_before_any_task(spark: Any, topics: Topics, write: Write) -> None:
    topics.create("refused")
    frame = spark.sql("SELECT cast(raise_error('a task ran') AS string) AS s, interval '1' day AS took")
    with pytest.raises(Exception, match="InvalidArgument: column 'took' is of type duration") as caught:
        write(frame, "refused", value_format="msgpack")
    assert "a task ran" not in str(caught.value)
    with pytest.raises(Exception, match=r"needs the option value_schema.*\"long\""):
        write(spark.range(3), "refused", value_format="avro")
    assert topics.values("refused") == []


@pytest.mark.skipif(not FILTERS_ARE_HANDED_DOWN, reason="before 4.1 Spark has no such setting")
def test_filters_are_handed_down_beside_values(topics: Topics, read: Read, pushdown: None) -> None:
    topics.produce("filtered", [b'{"id": %d, "offset": 0}' % n for n in range(40)], per_entry=4)
    options = {"value_format": "json", "value_schema": "id bigint, offset bigint", "value_prefix": "v_"}
    before = topics.entries_read()
    frame = read("filtered", **options).where("offset >= 20 and v_id < 25 and v_offset = 0 and v_id != 22")
    assert sorted(row.v_id for row in frame.collect()) == [20, 21, 23, 24]
    assert topics.entries_read() - before <= 6, "a ledger of four is passed over"


def test_streams_read_and_write_values(
    spark: Any, topics: Topics, read: Read, stream: Read, service: Service, tmp_path: Path
) -> None:
    topics.create("squares")
    topics.produce("numbers", [json.dumps({"id": n, "at": n}).encode() for n in range(30)], per_entry=3)
    rows = stream(
        "numbers", value_format="json", value_schema="id bigint, at timestamp", max_rows_per_batch="10"
    )
    schema = json.dumps(derived(to_struct("id bigint, square bigint, at timestamp")))
    query = (
        rows.selectExpr("id", "id * id AS square", "at", "offset")
        .writeStream.format("magnetar")
        .options(service_url=service.url, topic="squares", value_format="avro", value_schema=schema)
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    found = read(
        "squares", schema="id bigint, square bigint, at timestamp", value_format="avro", value_schema=schema
    )
    assert [(row.id, row.square, row.at.timestamp()) for row in found.orderBy("id").collect()] == [
        (n, n * n, n) for n in range(30)
    ]


def to_struct(ddl: str) -> Any:
    return pa.struct(list(arrow_schema(parse_schema("value_schema", ddl))))


@pytest.mark.parametrize(
    "ddl",
    [
        "id bigint, name string, tags array<string>, at timestamp, price decimal(10,2)",
        "a INT NOT NULL COMMENT 'it\\'s, a <b>', `x``, y` STRING, c map<string,struct<p: int, q double NOT NULL>>",
        "b byte, s short, r real, d dec, n numeric(5), t timestamp_ntz, y binary, day date, z boolean, e timestamp_ltz",
        "comment string, `not` int, array array<int>, map int",
    ],
)
def test_ddl_is_read_as_spark_reads_it(spark: Any, ddl: str) -> None:
    ours, theirs = parse_schema("value_schema", ddl), StructType.fromDDL(ddl)
    assert ours.simpleString() == theirs.simpleString()
    assert parse_schema("value_schema", theirs.json()).simpleString() == ours.simpleString()
