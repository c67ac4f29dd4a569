"""Entries of a topic to Arrow record batches: a few C calls per column of a batch, no Python code per message of it.

A batch that holds a single message (unbatched sends) costs Python code of its own; entries made of nothing else, which is
what many small producers leave, take a way that handles all of them column by column.

Entries were verified by their ledger's digest, which the broker computed after it had verified every batch; the batches'
own checksums are not verified again.
"""

from __future__ import annotations

import functools
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from itertools import repeat
from operator import sub
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from magnetar.archive.files import BATCH_COLUMNS
from magnetar.proto.batch import (
    FLAG_COMPRESSION_SHIFT,
    FLAG_SINGLE,
    FORMAT_NATIVE,
    META_EVENT_TIMES_MS,
    META_INDEXES,
    META_PROPERTIES,
    META_SEQUENCE_IDS,
    DecodedBatch,
    Properties,
)
from magnetar.proto.batch_extensions import BATCH_HEADER_BYTES, Chunk, entry_extensions
from magnetar.proto.chunks import Assembler
from magnetar.proto.entry import ENTRY_CHUNKED, Entry
from magnetar.proto.entry_messages import without_values
from magnetar.proto.errors import MessageTooLarge
from magnetar.proto.ids import MAX_MESSAGES_PER_ENTRY
from magnetar.proto.ledger_entry import LEDGER_ENTRY_FIELDS, LEDGER_ENTRY_HEADER_BYTES
from magnetar.proto.message_rules import MAX_TIME_MS

from .plan import Range
from .schema import COLUMNS

ROWS_PER_RECORD_BATCH = 16_384
BYTES_PER_RECORD_BATCH = 64 * 1024 * 1024  # of messages in chunks
MAX_VALUE_BYTES = (1 << 31) - 1  # Arrow's offsets have 32 bits
MAX_UNFINISHED = 1_000  # messages in chunks at the same place
UNFINISHED_S = 3600.0  # whose chunks are further apart is never finished
# What is known of a message once its offset is: the columns of `offset_rows`.
OFFSET_COLUMNS = frozenset({"topic", "partition", "offset"})
# Of a batch header: format, flags, header length and count as they stand; sequence id, publish time, two column lengths.
_SINGLE = struct.Struct(">12x8s4xQQ8s")
_SINGLE_ALIKE = struct.pack(">BBHI", FORMAT_NATIVE, FLAG_SINGLE, BATCH_HEADER_BYTES, 1)
_NO_COLUMNS = bytes(8)
_INDEX_SHIFT = pa.scalar(32, pa.int64())
_TYPES = {name: column[1] for name, column in COLUMNS.items()} | BATCH_COLUMNS
_TIME_MS, _TIME = pa.timestamp("ms", "UTC"), pa.timestamp("us", "UTC")
# Slices of it are memory copies; a range would make an int for each number.
_COUNT = array("q", range(MAX_MESSAGES_PER_ENTRY))


class Source(NamedTuple):
    """Where entries come from: what their rows say of their place."""

    ledger: int  # position id: as message ids of the topic name it
    first_offset: int  # topic-wide index of its first message
    append_ms: int = 0  # of all its messages; 0: each entry says it


class Rows:
    """Gathers messages of a topic column by column. `names`: the columns wanted, of `BATCH_COLUMNS` all or none."""

    def __init__(self, names: Sequence[str], topic: str, partition: int) -> None:
        self._names = names
        self._topic = topic
        self._partition = partition
        # What no column needs is neither decoded nor gathered: a number a message costs as much as its share of the network.
        self._values_wanted = "value" in names
        self._keys_wanted = "key" in names
        self._properties_wanted = "properties" in names
        self._event_times_wanted = "event_time" in names
        self._producers_wanted = "producer" in names
        self._entries_wanted = "message_id" in names
        self._offsets_wanted = "offset" in names
        self._append_times_wanted = "append_time" in names
        self._publish_times_wanted = "publish_time" in names
        self._sequence_ids_wanted = "sequence_id" in names
        self._batches_wanted = "batch" in names
        # Messages in chunks that began in the range; times in seconds, by when chunks were stored.
        self._chunks = Assembler[None](MAX_UNFINISHED, MAX_VALUE_BYTES, UNFINISHED_S)
        self._schema = pa.schema([pa.field(name, _TYPES[name]) for name in names])
        self._clear()

    def _clear(self) -> None:
        self.count = 0
        self.large_bytes = 0  # of messages in chunks
        self._values: list[bytes | None] = []
        self._producers: list[str] = []
        # Columns that most batches lack are empty until one has them, and as long as the others from then on.
        self._keys: list[str | bytes | None] = []
        self._properties: list[Properties | None] = []
        self._event_ms: list[int | None] = []
        self._extensions: list[bytes | None] = []
        # One number a message each. Offset and sequence id are the index in the entry plus a number that seldom changes.
        self._ledgers = array("q")
        self._entries = array("q")
        self._indexes = array("q")
        self._offset_shifts = array("q")
        self._sequence_shifts = array("q")
        self._publish_ms = array("q")
        self._append_ms = array("q")
        self._batches = array("q")
        self._compressions = array("q")

    def add(self, ledger_entry: bytes, source: Source, wanted: Range) -> None:
        """Those messages of a stored entry that lie in the range. Raises MalformedFrame."""
        entry_id = LEDGER_ENTRY_FIELDS.unpack_from(ledger_entry)[1]
        entry = Entry(ledger_entry, LEDGER_ENTRY_HEADER_BYTES)
        first_offset = source.first_offset + entry.first_index
        append_ms = source.append_ms or entry.append_time_ms
        low, high = wanted.indexes(source.ledger, entry_id, first_offset, entry.message_count, append_ms)
        if low >= high:
            if self.unfinished_since_ms is not None:
                self.finish(ledger_entry, source)
            return
        if self._batches_wanted or not entry.flags & ENTRY_CHUNKED:
            self._add_part(entry, entry_id, source, low, high)
            return
        at = 0
        self._forget_silent(entry)
        for position, extensions in entry_extensions(entry).items():
            if extensions.chunk is not None:
                self._add_whole(entry, at, position, entry_id, source, low, high)
                at = position + 1
                if extensions.chunk.index or low <= entry.batch_start_index(position) < high:
                    self._add_chunk(entry, position, entry_id, source, extensions.chunk)
        self._add_whole(entry, at, entry.batch_count, entry_id, source, low, high)

    def finish(self, ledger_entry: bytes, source: Source) -> None:
        """An entry behind the range: what it has of messages that began in it."""
        entry_id = LEDGER_ENTRY_FIELDS.unpack_from(ledger_entry)[1]
        entry = Entry(ledger_entry, LEDGER_ENTRY_HEADER_BYTES)
        self._forget_silent(entry)
        for position, extensions in entry_extensions(entry).items() if entry.flags & ENTRY_CHUNKED else ():
            if extensions.chunk is not None and extensions.chunk.index:
                self._add_chunk(entry, position, entry_id, source, extensions.chunk)

    @property
    def unfinished_since_ms(self) -> int | None:
        """When the last chunk was stored of all messages that are not finished; None: there are none."""
        return max([round(message.heard * 1000) for message in self._chunks.unfinished], default=None)

    def _forget_silent(self, entry: Entry) -> None:
        for message in self._chunks.silent(entry.append_time_ms / 1000):
            self._chunks.remove(message)

    def _add_chunk(self, entry: Entry, position: int, entry_id: int, source: Source, chunk: Chunk) -> None:
        """The message gets a row once its last chunk is here: that of its first one."""
        part = Entry(b"".join(entry.slice(position, position + 1)))
        value = DecodedBatch(part.data, part.body, verify=False).values[0] if self._values_wanted else None
        producer = entry.producer_names[entry.producers[position]]
        added = self._chunks.add(producer, chunk, None, value or b"", entry.append_time_ms / 1000)
        message = added.message
        if message is not None and message.sink is None:
            message.sink = without_values(part), entry_id, source
        if message is not None and message.finished:
            if message.too_large:
                raise MessageTooLarge(
                    f"message {source.ledger}:{entry_id} of {self._topic} has {message.size} bytes, and a row may have "
                    f"{MAX_VALUE_BYTES}"
                )
            self.large_bytes += message.size
            first, first_entry, its_source = message.sink
            value = b"".join(message.pieces)
            (extensions,) = entry_extensions(first).values()
            if extensions.whole is not None and self._values_wanted:
                value = extensions.whole.value(value, MAX_VALUE_BYTES)
            self._add_part(first, first_entry, its_source, 0, MAX_MESSAGES_PER_ENTRY, [value])

    def _add_whole(
        self, entry: Entry, first: int, last: int, entry_id: int, source: Source, low: int, high: int
    ) -> None:
        """The batches [first, last), which are no chunks."""
        if first < last:
            self._add_part(Entry(b"".join(entry.slice(first, last))), entry_id, source, low, high)

    def _add_part(
        self,
        entry: Entry,
        entry_id: int,
        source: Source,
        low: int,
        high: int,
        values: list[bytes | None] | None = None,
    ) -> None:
        """Messages low..high-1 of an entry or slice. `values`: what they have, whatever their batch says."""
        first_offset = source.first_offset + entry.first_index
        append_ms = source.append_ms or entry.append_time_ms
        before = self.count
        if values is not None or entry.batch_count != entry.message_count or not self._add_singles(entry):
            for position in range(entry.batch_count):
                self._add_batch(entry, position, values)
        n = self.count - before
        if self._entries_wanted:
            _repeat(self._ledgers, source.ledger, n)
            _repeat(self._entries, entry_id, n)
        if self._append_times_wanted:
            _repeat(self._append_ms, append_ms, n)
        if self._offsets_wanted:
            _repeat(self._offset_shifts, first_offset, n)
        if low > entry.base_index or high < entry.base_index + entry.message_count:
            self._cut(before, low, high)

    def _cut(self, before: int, low: int, high: int) -> None:
        """Drops what was added since there were `before` rows, but for the indexes low..high-1."""
        first = bisect_left(self._indexes, low, before)
        end = bisect_left(self._indexes, high, before)
        columns: tuple[MutableSequence[Any], ...] = (
            self._values, self._producers, self._keys, self._properties, self._event_ms, self._extensions, self._ledgers,
            self._entries, self._indexes, self._batches, self._compressions,
            self._offset_shifts, self._sequence_shifts, self._publish_ms, self._append_ms,
        )  # fmt: skip
        for column in columns:
            del column[end:]
            del column[before:first]
        self.count = before + max(0, end - first)

    def _add_batch(self, entry: Entry, position: int, own_values: list[bytes | None] | None) -> None:
        start, _ = entry.batch_bounds(position)
        batch = DecodedBatch(entry.data, start, verify=False)
        header, n = batch.header, batch.header.message_count
        index = entry.batch_start_index(position)
        metadata = batch.metadata or {}
        if self._values_wanted:
            self._values += batch.values if own_values is None else own_values
        if self._keys_wanted:
            self._seldom(self._keys, batch.keys, n)
        if self._properties_wanted:
            self._seldom(self._properties, metadata.get(META_PROPERTIES), n)
        if self._event_times_wanted:
            self._seldom(self._event_ms, metadata.get(META_EVENT_TIMES_MS), n)
        if self._producers_wanted:
            self._producers += [entry.producer_names[entry.producers[position]]] * n
        stored = metadata.get(META_INDEXES)
        indexes = _COUNT[index : index + n] if stored is None else array("q", map(index.__add__, stored))
        self._indexes += indexes
        if self._sequence_ids_wanted:
            sequence_ids = metadata.get(META_SEQUENCE_IDS)
            if sequence_ids is None:
                _repeat(self._sequence_shifts, header.sequence_id - index, n)
            else:
                self._sequence_shifts.extend(map(sub, sequence_ids, indexes))
        if self._publish_times_wanted:
            _repeat(self._publish_ms, header.publish_time_ms, n)
        if self._batches_wanted:
            _repeat(self._batches, index, n)
            _repeat(self._compressions, header.flags >> FLAG_COMPRESSION_SHIFT, n)
            extensions = entry.data[start + BATCH_HEADER_BYTES : start + header.header_length]
            self._seldom(self._extensions, [extensions] * n if extensions else None, n)
        self.count += n

    def _add_singles(self, entry: Entry) -> bool:
        """An entry of single, plain messages; False if it holds others as well."""
        data, n, index = entry.data, entry.batch_count, entry.base_index
        shift = entry.body - entry.base_offset
        ends = [end + shift for end in entry.end_offsets]
        starts = [entry.body, *ends[:-1]]
        alike, sequence_ids, times_ms, lengths = zip(*map(_SINGLE.unpack_from, repeat(data), starts))
        if {*alike} != {_SINGLE_ALIKE} or {*lengths} != {_NO_COLUMNS}:
            return False
        if self._values_wanted:
            self._values += [data[start + BATCH_HEADER_BYTES : end] for start, end in zip(starts, ends)]
        for column in (self._keys, self._properties, self._event_ms, self._extensions):
            self._seldom(column, None, n)
        if self._producers_wanted:
            self._producers += map(entry.producer_names.__getitem__, entry.producers)
        self._indexes += _COUNT[index : index + n]
        self._sequence_shifts.extend(map(sub, sequence_ids, _COUNT[index : index + n]))
        self._publish_ms.extend(times_ms)
        if self._batches_wanted:
            self._batches += _COUNT[index : index + n]
            _repeat(self._compressions, 0, n)
        self.count += n
        return True

    def _seldom(self, column: list[Any], added: Sequence[Any] | None, n: int) -> None:
        if added is not None:
            if not column:
                column += [None] * self.count
            column += added
        elif column:
            column += [None] * n

    def take(self) -> pa.RecordBatch:
        """What was gathered, as a record batch; afterwards there is nothing."""
        arrays = [_BUILDERS[name](self) for name in self._names]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._clear()
        return batch

    def _nullable(self, column: list[Any], arrow_type: pa.DataType) -> pa.Array:
        return pa.array(column, arrow_type) if column else pa.nulls(self.count, arrow_type)

    def _event_times(self) -> pa.Array:
        """A time that no reader can show is null: it closes neither the topic nor its archive."""
        times = self._event_ms
        if times and (
            max(filter(None, times), default=0) > MAX_TIME_MS or min(filter(None, times), default=0) < 0
        ):
            times = [None if time is None or not 0 <= time <= MAX_TIME_MS else time for time in times]
        return self._nullable(times, _TIME_MS).cast(_TIME)

    def _key_array(self) -> pa.Array:
        keys = self._keys
        if str in {*map(type, keys)}:
            keys = [key.encode() if isinstance(key, str) else key for key in keys]
        return self._nullable(keys, pa.binary())

    def _text_keys(self) -> pa.Array:
        return self._nullable(
            [None if key is None else isinstance(key, str) for key in self._keys], pa.bool_()
        )

    def _message_ids(self) -> pa.Array:
        # Three big-endian words each: ledger, entry, index and partition.
        words = array("q", bytes(24 * self.count))
        words[0::3] = self._ledgers
        words[1::3] = self._entries
        # Numbers with their type: pyarrow looks for dateutil and pandas before it knows that of another.
        partition = pa.scalar(self._partition & 0xFFFFFFFF, pa.int64())
        low = pc.bit_wise_or(pc.shift_left(_longs(self._indexes), _INDEX_SHIFT), partition)
        words[2::3] = array("q", low.buffers()[1].to_pybytes())
        if sys.byteorder == "little":
            words.byteswap()
        ends = _id_ends(self.count.bit_length()).slice(0, 4 * self.count + 4)
        return pa.Array.from_buffers(pa.binary(), self.count, [None, ends, pa.py_buffer(words)])


def offset_rows(
    names: Sequence[str], topic: str, partition: int, first: int, end: int
) -> Iterator[pa.RecordBatch]:
    """Rows for the offsets first..end-1, of OFFSET_COLUMNS. They cost what Spark takes for them: no entry is read."""
    schema = pa.schema([pa.field(name, COLUMNS[name][1]) for name in names])
    count = min(ROWS_PER_RECORD_BATCH, end - first)
    alike = {
        "topic": pa.repeat(pa.scalar(topic), count),
        "partition": pa.repeat(pa.scalar(partition, pa.int32()), count),
    }
    for start in range(first, end, ROWS_PER_RECORD_BATCH):
        rows = min(ROWS_PER_RECORD_BATCH, end - start)
        offsets = pc.add(_longs(_COUNT[:rows]), pa.scalar(start, pa.int64()))
        columns = [offsets if name == "offset" else alike[name].slice(0, rows) for name in names]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


@functools.lru_cache(maxsize=4)  # nearly all batches have about as many rows
def _id_ends(bits: int) -> pa.Buffer:
    """Where up to 2**bits ids of 24 bytes begin and end."""
    return pa.py_buffer(array("i", range(0, (24 << bits) + 1, 24)))


def _repeat(column: array[int], number: int, n: int) -> None:
    column += array("q", (number,)) * n


def _longs(column: array[int], arrow_type: pa.DataType = pa.int64()) -> pa.Array:  # noqa: B008
    return pa.Array.from_buffers(arrow_type, len(column), [None, pa.py_buffer(column)])


_BUILDERS: dict[str, Callable[[Rows], pa.Array]] = {
    "key": Rows._key_array,
    "value": lambda rows: pa.array(rows._values, pa.binary()),
    "topic": lambda rows: pa.repeat(pa.scalar(rows._topic), rows.count),
    "partition": lambda rows: pa.repeat(pa.scalar(rows._partition, pa.int32()), rows.count),
    "message_id": Rows._message_ids,
    "offset": lambda rows: pc.add(_longs(rows._indexes), _longs(rows._offset_shifts)),
    "publish_time": lambda rows: _longs(rows._publish_ms, _TIME_MS).cast(_TIME),
    "event_time": Rows._event_times,
    "append_time": lambda rows: _longs(rows._append_ms, _TIME_MS).cast(_TIME),
    "properties": lambda rows: rows._nullable(rows._properties, COLUMNS["properties"][1]),
    "producer": lambda rows: pa.array(rows._producers, pa.string()),
    "sequence_id": lambda rows: pc.add(_longs(rows._indexes), _longs(rows._sequence_shifts)),
    "batch": lambda rows: _longs(rows._batches).cast(pa.int32()),
    "compression": lambda rows: _longs(rows._compressions).cast(pa.int8()),
    "extensions": lambda rows: rows._nullable(rows._extensions, pa.binary()),
    "text_key": Rows._text_keys,
}
