"""The columns of a topic as Spark sees it, and their Arrow types.

| column | type | what |
|---|---|---|
| key, value | binary | as produced; a text key as UTF-8 |
| topic, partition | string, int | full name; -1 when the topic is not partitioned |
| message_id | binary | 24 bytes of `MessageId.from_bytes`; grows along the topic |
| offset | bigint | topic-wide index: orders rows as the topic does |
| publish_time, event_time | timestamp | the producer's clock; event_time is null unless given |
| append_time | timestamp | when the broker stored it; what time ranges go by |
| properties | map<string,string> | null if there are none |
| producer, sequence_id | string, bigint | who sent it, and its number |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from magnetar.proto.errors import InvalidArgument

COLUMNS: Final[dict[str, tuple[DataType, pa.DataType]]] = {
    "key": (BinaryType(), pa.binary()),
    "value": (BinaryType(), pa.binary()),
    "topic": (StringType(), pa.string()),
    "partition": (IntegerType(), pa.int32()),
    "message_id": (BinaryType(), pa.binary()),
    "offset": (LongType(), pa.int64()),
    "publish_time": (TimestampType(), pa.timestamp("us", "UTC")),
    "event_time": (TimestampType(), pa.timestamp("us", "UTC")),
    "append_time": (TimestampType(), pa.timestamp("us", "UTC")),
    "properties": (MapType(StringType(), StringType()), pa.map_(pa.string(), pa.string())),
    "producer": (StringType(), pa.string()),
    "sequence_id": (LongType(), pa.int64()),
}


def topic_schema(names: Sequence[str] = tuple(COLUMNS)) -> StructType:
    """Spark's schema of these columns."""
    return StructType([StructField(name, COLUMNS[name][0]) for name in names])


def chosen_columns(schema: StructType) -> tuple[str, ...]:
    """The columns that a user's `.schema(...)` asks for. Raises InvalidArgument for one that a topic does not have."""
    for field in schema.fields:
        if field.name not in COLUMNS:
            raise InvalidArgument(
                f"a topic has no column {field.name!r}; it has {', '.join(COLUMNS)}, and those of `value_schema`"
            )
        if field.dataType != COLUMNS[field.name][0]:
            wanted = COLUMNS[field.name][0].simpleString()
            raise InvalidArgument(
                f"column {field.name!r} is of type {wanted}, not {field.dataType.simpleString()}; cast it after reading"
            )
    return tuple(schema.fieldNames())
