"""Messages' values as columns: decoding them on read, encoding columns on write.

Spark has from_json and, in a package that PySpark does not bring, from_avro. They are functions of the JVM: a data source in
Python runs in processes that have none, so what its options promise is done here. Who reads the column `value` has them.

Decoding is msgspec's work for JSON and MessagePack (a C call per value, which checks the types as well), fastavro's for
Avro; the columns are then made by `value_types`, a few C calls each. Avro values are one bare record each, in the binary
encoding, without a schema or its fingerprint before it: `value_schema` is the writer's.

A value that is not what the schema says is bad: decoding names these rows, with the reason, beside the columns, which are
null there. Null values (tombstones), JSON's `null` and, as in Spark's from_json, empty JSON values are not bad: they are
null.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import MessageId

from .avro import AvroSchema
from .schema import COLUMNS, RowColumns, ValueFields
from .value_types import Record, ValueType, struct_type

if TYPE_CHECKING:
    from .options import WriteOptions

# Whatever decoding and making columns of it may raise for a value that is wrong. Those of msgspec and most of pyarrow are
# ValueErrors; fastavro raises whatever it stumbles over.
_BAD: Final = (
    ValueError,
    TypeError,
    ArithmeticError,
    LookupError,
    RecursionError,
    pa.ArrowException,
)
# Python's json writes NaN and Infinity bare, which is not JSON, and Spark reads them: within texts they are passed over.
_NOT_FINITE = re.compile(rb'"(?:[^"\\]|\\.)*"|-?Infinity|NaN', re.DOTALL)


def decoded(batches: Iterator[pa.RecordBatch], columns: RowColumns, topic: str) -> Iterator[pa.RecordBatch]:
    """Batches of `columns.of_topic`, with the value's columns. Raises InvalidArgument for a bad value, which it names."""
    wanted = columns.values
    if wanted is None:
        yield from batches
        return
    decoder = ValueDecoder(wanted)
    for batch in batches:
        arrays, bad = decoder.decode(batch.column("value").to_pylist())
        if bad and wanted.on_bad_value == "fail":
            row = min(bad)
            place = MessageId.from_bytes(batch.column("message_id")[row].as_py())
            raise InvalidArgument(
                f"the value of message {place} of {topic} is not what the option value_format={wanted.value_format} and the "
                f"columns' types say: {bad[row]}; correct these, or read such values as nulls with on_bad_value=null"
            )
        of_value = dict(zip(wanted.names, arrays))
        yield pa.RecordBatch.from_arrays(
            [of_value[name] if name in of_value else batch.column(name) for name in columns.names],
            names=list(columns.names),
        )


class ValueDecoder:
    """Of one task."""

    def __init__(self, wanted: ValueFields) -> None:
        self._format = wanted.value_format
        self._record: Record
        if self._format == "avro":
            avro = AvroSchema(wanted.value_schema)
            self._record = avro.record(wanted.fields)
            self._decode: Any = avro.decode
        else:
            self._record = struct_type(wanted.fields, self._format, "")
            package = msgspec.json if self._format == "json" else msgspec.msgpack
            self._decode = package.Decoder(self._record.hint | None).decode

    def decode(self, values: Sequence[bytes | None]) -> tuple[list[pa.Array], dict[int, str]]:
        """A column of each field, and what is wrong with bad values by row: all columns are null there."""
        bad: dict[int, str] = {}
        values = self._presentable(values)
        try:
            objects = list(map(self._decode, values))
        except _BAD:
            objects = [self._decode_one(row, value, bad) for row, value in enumerate(values)]
        try:
            return self._record.columns(objects), bad
        except _BAD:
            for kind, column in self._record.taken_apart(objects):
                _sift(kind, column, 0, bad)
            # What is wrong in one column makes all of them null.
            return self._record.columns([None if row in bad else one for row, one in enumerate(objects)]), bad

    def _presentable(self, values: Sequence[bytes | None]) -> Sequence[bytes | None]:
        """With what stands for null."""
        if self._format == "json":
            return [value or b"null" for value in values]
        if self._format == "msgpack":
            return [b"\xc0" if value is None else value for value in values]
        return values

    def _decode_one(self, row: int, value: Any, bad: dict[int, str]) -> Any:
        try:
            return self._decode(value)
        except _BAD as error:
            if self._format == "json" and (b"NaN" in value or b"Infinity" in value):
                try:
                    return self._decode(_NOT_FINITE.sub(_in_quotes, value))
                except _BAD:
                    pass
            bad[row] = _reason(error)
            return None


def _sift(kind: ValueType, column: list[Any], first: int, bad: dict[int, str]) -> None:
    """Finds by halving which rows make it no column of its type; `first` is the number of its first row."""
    try:
        kind.to_arrow(column)
    except _BAD as error:
        if len(column) == 1:
            bad[first] = _reason(error)
            return
        middle = len(column) // 2
        _sift(kind, column[:middle], first, bad)
        _sift(kind, column[middle:], first + middle, bad)


def _in_quotes(match: re.Match[bytes]) -> bytes:
    return match[0] if match[0].startswith(b'"') else b'"%b"' % match[0]


def _reason(error: Exception) -> str:
    return f"{error}" if isinstance(error, ValueError) and f"{error}" else f"{error!r}"


class ValueEncoder:
    """Of one task, or of the check before there is one: `columns` are the rows to write but for the message's own.

    Raises InvalidArgument, which names the column, for types that the format cannot hold.
    """

    def __init__(self, value_format: str, value_schema: str, columns: pa.DataType) -> None:
        self._format = value_format
        self._record: Record
        if value_format == "avro":
            avro = AvroSchema(value_schema)
            avro.check_written(columns)
            self._record = avro.record()
            self._encode: Any = avro.encode
        else:
            self._record = struct_type(columns, value_format, "")
            self._encode = (
                msgspec.json.Encoder(decimal_format="number").encode
                if value_format == "json"
                else msgspec.msgpack.Encoder().encode
            )

    def encode(self, names: Sequence[str], columns: Sequence[pa.Array]) -> pa.Array:
        """The values. Raises InvalidArgument for what the schema or the format does not allow."""
        try:
            return pa.array(list(map(self._encode, self._record.records(names, columns))), pa.binary())
        except InvalidArgument:
            raise
        except _BAD as error:
            wanted = "the option value_schema wants it" if self._format == "avro" else self._format
            raise InvalidArgument(
                f"a row to write cannot be encoded as {wanted}: {_reason(error)}; correct the rows (or the schema)"
            ) from error


def value_columns(names: Sequence[str], prefix: str) -> list[str]:
    """Those columns of rows to write that go into the value."""
    return [name for name in names if name not in COLUMNS and name.startswith(prefix)]


class ColumnEncoder:
    """Gives the rows of one task their values."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._encoder: ValueEncoder | None = None

    def with_value(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The message's own columns and the topic's, with the value that is made of the others. Raises InvalidArgument."""
        prefix = self._options.value_prefix
        columns = value_columns(rows.schema.names, prefix)
        arrays = [rows.column(name) for name in columns]
        names = [name[len(prefix) :] for name in columns]
        if self._encoder is None:
            fields = pa.struct([pa.field(name, one.type) for name, one in zip(names, arrays)])
            self._encoder = ValueEncoder(self._options.value_format, self._options.value_schema, fields)
        values = self._encoded(self._encoder, names, arrays, rows)
        kept = [name for name in rows.schema.names if name not in (*columns, "value")]
        return pa.RecordBatch.from_arrays(
            [*(rows.column(name) for name in kept), values], names=[*kept, "value"]
        )

    def _encoded(
        self, encoder: ValueEncoder, names: Sequence[str], columns: Sequence[pa.Array], rows: pa.RecordBatch
    ) -> pa.Array:
        if "value" not in rows.schema.names or not rows.column("value").null_count:
            return encoder.encode(names, columns)
        # Tombstones that were read: nothing of them is encoded, as a schema may allow no nulls.
        nulls = pc.is_null(rows.column("value"))
        for column in columns:
            nulls = pc.and_(nulls, pc.is_null(column))
        kept = pc.invert(nulls)
        values = encoder.encode(names, [column.filter(kept) for column in columns])
        places = pc.subtract(pc.cumulative_sum(kept.cast(pa.int64())), 1)
        return values.take(pc.if_else(kept, places, None))
