"""What PySpark's data source API has got since 4.0, for the releases that lack it: one place knows which can do what.

| since | what | without it |
|---|---|---|
| 4.1 | filters are handed down | options `start` and `end` |
| 4.1 | a stream's sink gets Arrow batches | rows, from which they are made here |
| 4.2 | `latestOffset(start, limit)`, `trigger(availableNow=True)` | batches are bounded by what was seen |
| 4.2 | `to_arrow_schema(timezone=...)` | times are UTC without being asked for |
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import datasource
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
else:
    DataSourceStreamArrowWriter = getattr(
        datasource, "DataSourceStreamArrowWriter", datasource.DataSourceStreamWriter
    )
try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ModuleNotFoundError:

    class ReadLimit:  # type: ignore[no-redef]
        """How much a batch may have."""

    class ReadAllAvailable(ReadLimit):  # type: ignore[no-redef]
        """Everything."""

    @dataclass
    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        """So many messages."""

        max_rows: int

    @dataclass
    class ReadMaxBytes(ReadLimit):  # type: ignore[no-redef]
        """So many bytes."""

        max_bytes: int

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Nobody asks for it."""


STREAMS_WRITE_ARROW = DataSourceStreamArrowWriter is not datasource.DataSourceStreamWriter
ROWS_PER_BATCH = 10_000
_FILTERS_PLANNER = "pyspark.sql.worker.data_source_pushdown_filters"


def hands_filters_down() -> bool:
    """Whether this process plans a read of a session that does. It says so nowhere else: it is a worker of its own kind."""
    started = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _FILTERS_PLANNER in sys.modules or (started is not None and started.name == _FILTERS_PLANNER)


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow types of a schema of Spark, with times in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    zone: dict[str, Any] = (
        {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    )
    found: pa.Schema = to_arrow_schema(schema, **zone)
    return found


def arrow_batches(rows: Iterable[Any], schema: StructType) -> Iterator[pa.RecordBatch]:
    """Rows that a stream's sink gets before 4.1, as Arrow batches."""
    coming = iter(rows)
    types = arrow_schema(schema)
    while some := list(itertools.islice(coming, ROWS_PER_BATCH)):
        yield pa.RecordBatch.from_pylist([row.asDict() for row in some], schema=types)


__all__ = [
    "STREAMS_WRITE_ARROW",
    "DataSourceStreamArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "arrow_batches",
    "arrow_schema",
    "hands_filters_down",
]
