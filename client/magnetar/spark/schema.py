"""The columns of a topic as Spark sees it, and their Arrow types.

| column | type | what |
|---|---|---|
| key, value | binary | as produced; a text key as UTF-8 |
| topic, partition | string, int | full name; number of the partition, -1 when the topic is not partitioned |
| message_id | binary | 24 bytes of `MessageId.from_bytes`; grows along the topic |
| offset | bigint | index in the topic, or the partition: orders rows as it does |
| publish_time, event_time | timestamp | the producer's clock; event_time is null unless given |
| append_time | timestamp | when it became part of the topic (broker's clock): never falls, and time ranges go by it |
| properties | map<string,string> | null if there are none |
| producer, sequence_id | string, bigint | who sent it, and its number |

What a value holds is Spark's to decode, in the JVM: `from_json(value.cast("string"), ...)`, `from_avro(value, ...)`.
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
from magnetar.proto.ids import TopicName

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


def topic_and_partition(name: str) -> tuple[str, int]:
    """What stands in these columns for messages of a topic, or of a partition of one, by its full name."""
    parsed = TopicName.parse(name)
    return str(parsed.whole), parsed.partition


def chosen_columns(schema: StructType) -> tuple[str, ...]:
    """The columns that a user's `.schema(...)` asks for, or `topic_schema` gave. Raises InvalidArgument."""
    for field in schema.fields:
        if field.name not in COLUMNS:
            raise InvalidArgument(
                f"a topic has no column {field.name!r}; it has {', '.join(COLUMNS)}. Fields of the value are read from "
                "the column value: from_json(col('value').cast('string'), 'id bigint, ...')"
            )
        wanted = COLUMNS[field.name][0]
        # Whether values may be null in a map is not looked at: those of properties never are.
        if field.dataType.simpleString() != wanted.simpleString():
            raise InvalidArgument(
                f"column {field.name!r} is of type {wanted.simpleString()}, not {field.dataType.simpleString()}; "
                "cast it after reading"
            )
        if not field.nullable:
            raise InvalidArgument(
                f"column {field.name!r} is NOT NULL, and what is read of a topic may be null; leave that out (in a "
                "StructType: nullable=True)"
            )
    return tuple(schema.fieldNames())
