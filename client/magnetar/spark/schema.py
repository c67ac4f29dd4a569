"""The columns of a topic as Spark sees it, and their Arrow types.

| column | type | what |
|---|---|---|
| key, value | binary | as produced; a text key as UTF-8 |
| topic, partition | string, int | full name; -1 when the topic is not partitioned |
| message_id | binary | 24 bytes of `MessageId.from_bytes`; grows along the topic |
| offset | bigint | topic-wide index: orders rows as the topic does |
| publish_time, event_time | timestamp | the producer's clock; event_time is null unless given |
| append_time | timestamp | when it became part of the topic (broker's clock): never falls, and time ranges go by it |
| properties | map<string,string> | null if there are none |
| producer, sequence_id | string, bigint | who sent it, and its number |

With the option `value_format` the value's fields are columns too, behind these: of `value_schema`, or those that
`.schema(...)` asks for. All are null where the value is, or cannot be decoded and `on_bad_value` is `null`; `value` has the
bytes in any case. With `value_prefix` their columns' names begin with it: a field `topic` becomes the column `v_topic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
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

from .ddl import nullable, parse_schema

if TYPE_CHECKING:
    from .options import ReadOptions

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


@dataclass(frozen=True, slots=True)
class ValueFields:
    """What to decode. Goes to the tasks, which make a decoder of it."""

    value_format: str  # json, msgpack or avro
    fields: pa.DataType  # a struct: wanted fields as the value names them
    names: tuple[str, ...]  # the columns they become
    value_schema: str  # avro: what the values were written with
    on_bad_value: str  # fail or null


@dataclass(frozen=True, slots=True)
class RowColumns:
    """What tasks read. `values` says which of the columns the messages' values are decoded into."""

    names: tuple[str, ...]
    values: ValueFields | None = None

    @property
    def of_topic(self) -> tuple[str, ...]:
        """Those that do not come of a value, and what decoding needs besides: the value, and where it stands."""
        if self.values is None:
            return self.names
        wanted = (*self.names, "value", "message_id")
        return tuple(name for name in COLUMNS if name in wanted)


def read_schema(options: ReadOptions) -> StructType:
    """All columns of a topic, and all of the value's. Raises InvalidArgument."""
    return StructType(topic_schema().fields + _value_columns(options).fields)


def chosen_columns(schema: StructType, options: ReadOptions) -> RowColumns:
    """The columns that a user's `.schema(...)` asks for, or `read_schema` gave. Raises InvalidArgument.

    With `value_schema` those of the value must be of it, but structs in them may have fewer fields.
    """
    of_value: list[StructField] = []
    for field in schema.fields:
        if not field.nullable or field.dataType != nullable(field.dataType):
            raise InvalidArgument(
                f"column {field.name!r} is NOT NULL, it or something in it, and what is read of a topic may be null; "
                "leave that out (in a StructType: nullable=True)"
            )
        if field.name not in COLUMNS:
            of_value.append(field)
        elif field.dataType != COLUMNS[field.name][0]:
            wanted = COLUMNS[field.name][0].simpleString()
            raise InvalidArgument(
                f"column {field.name!r} is of type {wanted}, not {field.dataType.simpleString()}; cast it after reading"
                " (a field of the value that is called so needs the option value_prefix)"
            )
    names = tuple(schema.fieldNames())
    return RowColumns(names, _value_fields(of_value, options)) if of_value else RowColumns(names)


def _value_columns(options: ReadOptions) -> StructType:
    """Those that `value_schema` says, with the prefix."""
    if options.value_format == "binary":
        return StructType([])
    if not options.value_schema:
        raise InvalidArgument(
            f"option value_format is {options.value_format!r}, and nothing says what columns the values become; set the "
            "option value_schema, as in 'id bigint, name string', or ask for them: .schema('offset bigint, id bigint')"
        )
    prefix = options.value_prefix
    columns = [StructField(prefix + field.name, field.dataType) for field in _declared(options).fields]
    names = [column.name.lower() for column in columns]
    for column in columns:
        if column.name.lower() in COLUMNS:
            raise InvalidArgument(
                f"option value_schema has a field {column.name!r}, and so is a column of every topic called; "
                "with the option value_prefix the value's columns get other names, as in 'v_'"
            )
        if names.count(column.name.lower()) > 1:
            raise InvalidArgument(
                f"option value_schema has two fields {column.name!r} (case does not count); ask for one of them with "
                ".schema(...), or leave one out"
            )
    return StructType(columns)


def _declared(options: ReadOptions) -> StructType:
    if options.value_format == "avro":
        from pyspark.sql.pandas.types import from_arrow_type

        from .avro import AvroSchema

        whole = from_arrow_type(AvroSchema(options.value_schema).arrow, prefer_timestamp_ntz=True)
        assert isinstance(whole, StructType)
        return whole
    return parse_schema("value_schema", options.value_schema)


def _value_fields(columns: Sequence[StructField], options: ReadOptions) -> ValueFields:
    from .value_types import check_fields, struct_type
    from .versions import arrow_schema

    first = columns[0].name
    if options.value_format == "binary":
        raise InvalidArgument(
            f"a topic has no column {first!r}; it has {', '.join(COLUMNS)}, and with the option value_format also "
            "those of the value"
        )
    if options.value_format == "avro" and not options.value_schema:
        raise InvalidArgument(
            "option value_format is 'avro', whose values cannot be read without the schema that they are written with; "
            "set the option value_schema to it, in Avro's JSON"
        )
    if options.value_schema:
        # A name of it that clashes with another's hurts nobody who does not ask for it.
        declared = {options.value_prefix + one.name: one.dataType for one in _declared(options).fields}
        for column in columns:
            _check_declared(column, declared, options.value_prefix)
    prefix = options.value_prefix
    for column in columns:
        if not column.name.startswith(prefix):
            raise InvalidArgument(
                f"a topic has no column {column.name!r}, and those of the value begin with {prefix!r} (option value_prefix)"
            )
    arrow = arrow_schema(StructType(list(columns)))
    fields = pa.struct([pa.field(field.name[len(prefix) :], field.type) for field in arrow])
    check_fields([field.name for field in fields], "")
    if options.value_format != "avro":
        struct_type(fields, options.value_format, "")  # raises for what cannot be decoded
    return ValueFields(
        options.value_format,
        fields,
        tuple(column.name for column in columns),
        options.value_schema if options.value_format == "avro" else "",
        options.on_bad_value,
    )


def _check_declared(column: StructField, declared: dict[str, DataType], prefix: str) -> None:
    if column.name not in declared:
        raise InvalidArgument(
            f"neither a topic nor the option value_schema has a column {column.name!r}; "
            f"they have {', '.join((*COLUMNS, *declared))}"
        )
    if not _within(column.dataType, declared[column.name]):
        raise InvalidArgument(
            f"column {column.name!r} is of type {declared[column.name].simpleString()} by the option value_schema, not "
            f"{column.dataType.simpleString()}; cast it after reading, or correct one of them"
        )


def _within(wanted: DataType, whole: DataType) -> bool:
    """Whether it is the same type, but for fields of structs that are left out."""
    if isinstance(wanted, StructType) and isinstance(whole, StructType):
        types = {field.name: field.dataType for field in whole.fields}
        return all(one.name in types and _within(one.dataType, types[one.name]) for one in wanted.fields)
    if isinstance(wanted, ArrayType) and isinstance(whole, ArrayType):
        return _within(wanted.elementType, whole.elementType)
    if isinstance(wanted, MapType) and isinstance(whole, MapType):
        return _within(wanted.keyType, whole.keyType) and _within(wanted.valueType, whole.valueType)
    return bool(wanted == whole)
