"""Sources and a sink that do nothing but hand over Arrow batches: the ceiling of a data source written in Python.

They have the columns of a topic, or some of them, and rows as a topic would give them: made once in each task, before the
first batch leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from magnetar.spark.schema import COLUMNS, topic_schema

ROWS_PER_BATCH = 16_384


@dataclass
class Piece(InputPartition):
    """How many rows a task hands over."""

    rows: int


def record_batch(names: list[str], rows: int, value_bytes: int) -> pa.RecordBatch:
    """As the source of topics makes them: the same value in every row but for its number."""
    columns: dict[str, list[Any]] = {
        "key": [None] * rows,
        "value": [b"%010d" % row + b"x" * (value_bytes - 10) for row in range(rows)],
        "topic": ["persistent://public/default/bench"] * rows,
        "partition": [-1] * rows,
        "message_id": [b"%024d" % row for row in range(rows)],
        "offset": list(range(rows)),
        "publish_time": [1_700_000_000_000_000] * rows,
        "event_time": [None] * rows,
        "append_time": [1_700_000_000_000_000] * rows,
        "properties": [None] * rows,
        "producer": ["standalone-1-1"] * rows,
        "sequence_id": list(range(rows)),
    }
    arrays = [
        pa.array(columns[name], pa.int64() if name.endswith("_time") else COLUMNS[name][1]) for name in names
    ]
    return pa.RecordBatch.from_arrays(
        [array.cast(COLUMNS[name][1]) for name, array in zip(names, arrays, strict=True)], names=names
    )


class ToySource(DataSource):
    """Options: rows, pieces, value_bytes."""

    @classmethod
    def name(cls) -> str:
        """What stands in `format(...)`."""
        return "toy"

    def schema(self) -> StructType:
        """That of a topic."""
        return topic_schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        """All rows at once."""
        return ToyReader(self.options, schema.fieldNames())

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """All rows in the first micro-batch."""
        return ToyStreamReader(self.options, schema.fieldNames())

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Counts rows."""
        return ToyWriter()

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Counts rows."""
        return ToyStreamWriter()


class ToyReader(DataSourceReader):
    """In `pieces` equal parts."""

    def __init__(self, options: Any, names: list[str]) -> None:
        self.rows, self.pieces = int(options["rows"]), int(options["pieces"])
        self.value_bytes = int(options["value_bytes"])
        self.names = names

    def partitions(self) -> list[InputPartition]:
        """One a task."""
        return [Piece(self.rows // self.pieces)] * self.pieces

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The same batch again and again."""
        assert isinstance(partition, Piece)
        batch = record_batch(self.names, ROWS_PER_BATCH, self.value_bytes)
        left = partition.rows
        while left > 0:
            yield batch if left >= batch.num_rows else batch.slice(0, left)
            left -= batch.num_rows


class ToyStreamReader(DataSourceStreamReader):
    """One micro-batch, then none. `rows_per_batch` cuts it into several."""

    def __init__(self, options: Any, names: list[str]) -> None:
        self.reader = ToyReader(options, names)
        self.step = int(options.get("rows_per_batch", self.reader.rows))

    def initialOffset(self) -> dict[str, int]:
        """Of no row."""
        return {"rows": 0}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
        """A step further, until all rows are there."""
        return {"rows": min(self.reader.rows, start["rows"] + self.step)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        """As of a batch read."""
        pieces = self.reader.pieces
        return [Piece((end["rows"] - start["rows"]) // pieces)] * pieces

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """As of a batch read."""
        return self.reader.read(partition)


class ToyWriter(DataSourceArrowWriter):
    """Takes every batch and drops it."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task."""
        for _ in iterator:
            pass
        return WriterCommitMessage()


class ToyStreamWriter(DataSourceStreamArrowWriter):
    """The same for micro-batches."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task."""
        for _ in iterator:
            pass
        return WriterCommitMessage()
