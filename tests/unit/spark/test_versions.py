"""What older releases of PySpark lack, and what stands in for it."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.types import BinaryType, StringType, StructField, StructType, TimestampNTZType, TimestampType

from magnetar.spark import versions
from magnetar.spark.options import ReadOptions
from magnetar.spark.stream_source import TopicStreamReader
from magnetar.spark.versions import arrow_batches, arrow_schema

GOOD = {"service_url": "magnetar://127.0.0.1:7650", "topic": "orders"}


def test_rows_become_arrow_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "ROWS_PER_BATCH", 3)
    schema = StructType([StructField("value", BinaryType()), StructField("key", StringType())])
    rows = [Row(value=b"%d" % n, key=None if n % 2 else "k") for n in range(7)]
    batches = list(arrow_batches(iter(rows), schema))
    assert [batch.num_rows for batch in batches] == [3, 3, 1]
    assert pa.Table.from_batches(batches).to_pylist() == [row.asDict() for row in rows]
    assert list(arrow_batches(iter([]), schema)) == []


def test_times_are_utc_before_spark_can_be_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = StructType([StructField("at", TimestampType()), StructField("local", TimestampNTZType())])
    expected = pa.schema([("at", pa.timestamp("us", "UTC")), ("local", pa.timestamp("us"))])
    assert arrow_schema(schema) == expected

    def older(schema: StructType, timestamp_utc: bool = True) -> pa.Schema:
        assert timestamp_utc
        return expected

    monkeypatch.setattr("pyspark.sql.pandas.types.to_arrow_schema", older)
    assert arrow_schema(schema) == expected


def test_a_batch_waits_for_rows_and_not_for_ever() -> None:
    options = ReadOptions.parse({**GOOD, "min_rows_per_batch": "10", "max_trigger_delay_s": "0.05"})
    reader = TopicStreamReader(options, ("value",))
    waits = [reader._waits(9) for _ in range(2)]
    assert waits == [True, True]
    assert not reader._waits(10)
    assert reader._waits(9)
    while reader._waits(9):  # until the delay is over
        pass
    assert reader._waits(9), "the delay begins anew"
