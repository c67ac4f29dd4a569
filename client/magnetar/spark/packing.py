"""Rows to entries: what a task of a sink appends to its ledger. A few C calls per column of a batch, no code per row.

Columns of a row to write: `value` (binary or string, required), `key` (binary or string), `properties` (map<string,string>),
`event_time` (timestamp). Other columns of a topic (offset, message_id, ...) are the topic's to give and may stand there:
they are passed over, so that what was read can be written as it is.

A value is bytes: a row of several columns becomes one in Spark, `to_json(struct("*"))` for example.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pyspark.sql.types import BinaryType, DataType, MapType, StringType, StructType, TimestampType

from magnetar.proto.batch import Properties, encode_batch
from magnetar.proto.compression import Compression
from magnetar.proto.entry import encode_entry
from magnetar.proto.errors import InvalidArgument
from magnetar.proto.message_rules import checked_properties, checked_time_ms, properties_bytes

from .options import WriteOptions
from .schema import COLUMNS

_BYTES: tuple[DataType, ...] = (BinaryType(), StringType())
WRITTEN: dict[str, tuple[DataType, ...]] = {
    "value": _BYTES,
    "key": _BYTES,
    "properties": (MapType(StringType(), StringType()),),
    "event_time": (TimestampType(),),
}
BATCH_ROWS = 10_000
# An entry is closed when it has so many bytes of values and keys; a single row may be larger.
ENTRY_BYTES = 512 << 10
ROW_BYTES = 16
# A number without a type costs fifty times as much: pyarrow looks for dateutil and pandas first.
CONTENT_MODULUS = 1 << 64
# A null is no empty key or value.
_NULL_VALUE, _NULL_KEY = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
_SEPARATOR, _EMPTY = pa.scalar(b"\0", pa.binary()), pa.scalar(b"", pa.binary())
_NO_BYTES, _ROW_BYTES = pa.scalar(0, pa.int64()), pa.scalar(ROW_BYTES, pa.int64())


def check_written(schema: StructType, options: WriteOptions) -> None:
    """Raises InvalidArgument, which names the column and the cure."""
    given = {field.name: field.dataType for field in schema.fields}
    if not options.topic and given.get("topic") != StringType():
        raise InvalidArgument(
            "the rows to write have no column 'topic' of type string that says where each goes; add one, or set the option "
            "topic"
        )
    if "value" not in given:
        raise InvalidArgument(
            f"the rows to write have no column 'value', but {', '.join(given)}; name the one with the message so, or make "
            "it of them all: select(to_json(struct('*')).alias('value'))"
        )
    for name, data_type in given.items():
        if name in WRITTEN:
            # Whether values may be null in a map does not show in the messages.
            wanted = [one.simpleString() for one in WRITTEN[name]]
            if data_type.simpleString() not in wanted:
                raise InvalidArgument(
                    f"column {name!r} is of type {data_type.simpleString()}; cast it to {' or '.join(wanted)}"
                )
        elif name not in COLUMNS:
            raise InvalidArgument(
                f"a message has no column {name!r}: drop it, or make it part of the value: "
                f"to_json(struct('value', {name!r}))"
            )


class PackedEntry(NamedTuple):
    """An entry for a ledger."""

    payload: bytes
    messages: int


class Packer:
    """Numbers what one task writes: sequence ids and indexes in the ledger count up from 0."""

    def __init__(self, producer: str, options: WriteOptions, max_message_bytes: int) -> None:
        """`max_message_bytes`: what the topic takes."""
        self._producer = producer
        self._compression = Compression.parse(options.compression)
        self._max_message_bytes = min(options.max_message_bytes, max_message_bytes)
        self._key_batches = options.key_batches
        self._compared = options.repeated_batch == "compare"
        self.messages = 0
        self.last_ms = 0  # of the last entry
        self._digest = 0

    @property
    def content(self) -> int:
        """A digest of the rows, whatever their order; those of several tasks are added up, modulo CONTENT_MODULUS.

        Unless the option repeated_batch says that nobody looks at it.
        """
        return self._digest % CONTENT_MODULUS

    def pack(self, rows: pa.RecordBatch, now_ms: int) -> Iterator[PackedEntry]:
        """Entries of about ENTRY_BYTES, in the order of the rows. Raises InvalidArgument for a row that is too large."""
        if self._key_batches and (keys := keys_of(rows)) is not None:
            rows = rows.take(pc.array_sort_indices(keys))  # which keeps the order of rows with one key
        values, keys = rows.column("value"), keys_of(rows)
        sizes = _sizes(values) if keys is None else pc.add(_sizes(values), _sizes(keys))
        properties = _properties(rows)
        if properties is not None:
            sizes = pc.add(sizes, pa.array(map(properties_bytes, properties), pa.int64()))
        largest = pc.max(sizes).as_py() or 0
        if largest > self._max_message_bytes:
            raise InvalidArgument(
                f"a row to write has {largest} bytes of value, key and properties, and a message at most "
                f"{self._max_message_bytes}, the option max_message_bytes; write where large values are stored, or raise "
                "it, up to the broker's"
            )
        for start, length in _cuts(sizes):
            part = properties and properties[start : start + length]
            yield self._entry(rows.slice(start, length), part, now_ms)

    def _entry(
        self, rows: pa.RecordBatch, properties: Sequence[Properties | None] | None, now_ms: int
    ) -> PackedEntry:
        value_column, key_column = rows.column("value").cast(pa.binary()), keys_of(rows)
        values = value_column.to_pylist()
        keys = None if key_column is None else _listed(key_column, "key")
        event_times_ms = _times_ms(rows.column("event_time")) if "event_time" in rows.schema.names else None
        if self._compared:
            self._digest += _digest_of(values, value_column, key_column, (properties, event_times_ms))
        batches: list[bytes] = []
        ends = _key_ends(key_column) if self._key_batches and key_column is not None else [len(values)]
        for start, end in itertools.pairwise((0, *ends)):
            part = slice(start, end)
            batches.append(
                encode_batch(
                    values[part],
                    sequence_id=self.messages + start,
                    publish_time_ms=now_ms,
                    keys=keys and keys[part],
                    properties=properties and properties[part],
                    event_times_ms=event_times_ms and event_times_ms[part],
                    compression=self._compression,
                )
            )
        counts = [end - start for start, end in itertools.pairwise((0, *ends))]
        payload = encode_entry(
            batches,
            counts,
            [0] * len(batches),
            [self._producer],
            first_index=self.messages,
            append_time_ms=now_ms,
        )
        self.messages += len(values)
        self.last_ms = now_ms
        return PackedEntry(payload, len(values))


def _digest_of(
    values: Sequence[bytes | None],
    value_column: pa.Array,
    key_column: pa.Array | None,
    more: Sequence[Sequence[Any] | None],
) -> int:
    """The sum of the rows' digests: 37 ns a row, 110 with keys.

    A sum has no order, so rows may come in another one, and from other tasks, when the batch is repeated; a hash of whole
    columns would not do. Arrow adds faster than Python, modulo 2^64, and the bytes of a digest are made faster than numbers.

    Whether a run of rows has a column at all does not matter: other tasks have other runs.
    """
    rows: Sequence[Any] = values
    null_keys = len(values)
    if key_column is not None:
        both = key_column.cast(pa.binary()), value_column
        rows = pc.binary_join_element_wise(*both, _SEPARATOR, null_handling="skip").to_pylist()
        null_keys = key_column.null_count
    elif value_column.null_count:
        rows = pc.fill_null(value_column, _EMPTY).to_pylist()
    digests = pa.py_buffer(b"".join(map(xxhash.xxh3_64_digest, rows)))
    total: int = pc.sum(pa.Array.from_buffers(pa.uint64(), len(rows), [None, digests])).as_py()
    total += value_column.null_count * _NULL_VALUE + null_keys * _NULL_KEY
    for column in more:
        if column is not None:
            total += sum(xxhash.xxh3_64_intdigest(repr(one).encode()) for one in column if one)
    return total


def _key_ends(keys: pa.Array) -> list[int]:
    """Where runs of rows with one key end."""
    ends: list[int] = pc.run_end_encode(keys.cast(pa.binary())).run_ends.to_pylist()
    return ends


def keys_of(rows: pa.RecordBatch) -> pa.Array | None:
    """None if no row has one. A text key stays text: consumers get the str that a Python producer would have sent."""
    if "key" not in rows.schema.names:
        return None
    column = rows.column("key")
    return None if column.null_count == len(column) else column


def _sizes(column: pa.Array) -> pa.Array:
    lengths = pc.binary_length(column).cast(pa.int64())
    return pc.fill_null(lengths, _NO_BYTES) if lengths.null_count else lengths


def _cuts(sizes: pa.Array) -> Iterator[tuple[int, int]]:
    """(start, length) of runs of rows for an entry each."""
    ends = memoryview(pc.cumulative_sum(pc.add(sizes, _ROW_BYTES)).buffers()[1]).cast("q")
    start, before = 0, 0
    while start < len(sizes):
        most = min(start + BATCH_ROWS, len(sizes))
        end = max(start + 1, bisect_right(ends, before + ENTRY_BYTES, start, most))
        yield start, end - start
        start, before = end, ends[end - 1]


def _properties(rows: pa.RecordBatch) -> Sequence[Properties | None] | None:
    """None if no row has any. By name: a batch that is repeated has its maps in any order. Raises InvalidArgument."""
    if "properties" not in rows.schema.names or rows.column("properties").null_count == len(rows):
        return None
    column = _listed(rows.column("properties"), "properties")
    try:
        return [None if pairs is None else checked_properties(dict(sorted(pairs))) or {} for pairs in column]
    except (InvalidArgument, TypeError) as error:
        raise InvalidArgument(
            f"{error}; a row to write has a property that is null: leave it out, as by map_filter(properties, (k, v) -> v "
            "IS NOT NULL)"
        ) from None


def _listed(column: pa.Array, name: str) -> list[Any]:
    """Raises InvalidArgument: Spark's cast from binary to string does not look whether it is text."""
    try:
        found: list[Any] = column.to_pylist()
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"the column {name} of a row to write has a string that is no UTF-8 ({error.object!r}); a key may be binary"
        ) from None
    return found


def _times_ms(column: pa.Array) -> Sequence[int | None] | None:
    if column.null_count == len(column):
        return None
    times = column.cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
    for extreme in pc.min_max(times).as_py().values():
        try:
            checked_time_ms(extreme)
        except InvalidArgument as error:
            raise InvalidArgument(f"the column event_time of a row to write: {error.message}") from None
    found: list[int | None] = times.to_pylist()
    return found
