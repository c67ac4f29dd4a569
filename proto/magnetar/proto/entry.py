"""Entries: what the broker appends to a ledger, and slices of them, which is what it delivers (FORMATS.md).

An entry is a header, a table with a row per batch in columns, then the batches untouched. A *slice* has the same form:
`base_index` and `base_offset` say which part of the stored entry it is, the columns keep the values of the stored entry,
so that cutting at batch borders copies columns and batch bytes and computes nothing per batch.

>>> from magnetar.proto.batch import encode_batch
>>> a = encode_batch([b"1", b"2"], sequence_id=0, publish_time_ms=0)
>>> b = encode_batch([b"3"], sequence_id=2, publish_time_ms=0)
>>> entry = Entry(encode_entry([a, b], [2, 1], [0, 0], ["p"], first_index=10, append_time_ms=99))
>>> entry.message_count, entry.first_index, list(entry.end_indexes)
(3, 10, [2, 3])
>>> tail = Entry(b"".join(entry.slice(1, 2)))
>>> tail.base_index, bytes(tail.batch(0)) == b
(2, True)
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from .errors import MalformedFrame
from .ids import MAX_BATCHES_PER_ENTRY, MAX_MESSAGES_PER_ENTRY

ENTRY_VERSION = 1
# Flags: some batch of the stored entry has such an extension. Readers look into the headers of such entries' batches only.
ENTRY_DELAYED = 0x01
ENTRY_CHUNKED = 0x02
ENTRY_PUBLISHED = (
    0x04  # a job's batch that the broker put together: no producer of the topic has these names and ids
)
_HEADER = struct.Struct(">BBHIIIIQQ")
ENTRY_HEADER_BYTES = _HEADER.size
_ROW_BYTES = 4 + 4 + 2

_decode_names = msgspec.msgpack.Decoder(list[str]).decode

assert array("I").itemsize == 4
assert array("H").itemsize == 2


def encode_entry(
    batches: Sequence[bytes],
    counts: Sequence[int],
    producers: Sequence[int],
    producer_names: Sequence[str],
    *,
    first_index: int,
    append_time_ms: int,
    flags: int = 0,
) -> bytes:
    """Joins batches into an entry.

    `counts` are messages per batch, `producers` indexes into `producer_names`, `first_index` the ledger-wide index of the
    first message, `flags` what `batch.entry_flags` finds in the batches. At most 65,535 batches and 2^20 messages (the
    caller's bound). Cost per batch: three list passes in C.
    """
    assert 0 < len(batches) <= MAX_BATCHES_PER_ENTRY
    end_indexes = array("I", accumulate(counts))
    end_offsets = array("I", accumulate(map(len, batches)))
    producer_column = array("H", producers)
    message_count = end_indexes[-1]
    assert message_count <= MAX_MESSAGES_PER_ENTRY
    names = msgspec.msgpack.encode(producer_names)
    header = _HEADER.pack(
        ENTRY_VERSION,
        flags,
        ENTRY_HEADER_BYTES + len(names),
        len(batches),
        message_count,
        0,
        0,
        append_time_ms,
        first_index,
    )
    return b"".join(
        (header, names, _little(end_indexes), _little(end_offsets), _little(producer_column), *batches)
    )


def rebase_entry(data: bytes, first_index: int) -> bytes:
    """The same whole entry for another place: what is appended again to the next ledger starts at another index there."""
    return b"".join(
        (data[: ENTRY_HEADER_BYTES - 8], first_index.to_bytes(8, "big"), data[ENTRY_HEADER_BYTES:])
    )


def entry_content(data: bytes) -> bytes:
    """A whole entry without what depends on where and when it was appended: the append time and the first index."""
    return data[: ENTRY_HEADER_BYTES - 16] + data[ENTRY_HEADER_BYTES:]


def _little(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()


def _column(data: bytes, offset: int, typecode: str, count: int) -> array[int]:
    column = array(typecode)
    column.frombytes(data[offset : offset + count * column.itemsize])
    if sys.byteorder == "big":
        column.byteswap()
    return column


class Entry:
    """A decoded entry or slice over the bytes it came in. Raises MalformedFrame when header and length contradict.

    batch_count, message_count: of this slice. base_index: index, in the stored entry, of the first message here.
    base_offset: byte offset of the first batch in the stored entry's batch area. first_index: ledger-wide index of the
    *stored entry's* first message. end_indexes[i], end_offsets[i]: where batch i ends, counted from the stored entry's
    start. producers[i]: index into producer_names. flags: of the stored entry.
    """

    __slots__ = (
        "_names",
        "_producer_names",
        "append_time_ms",
        "base_index",
        "base_offset",
        "batch_count",
        "body",
        "data",
        "end_indexes",
        "end_offsets",
        "first_index",
        "flags",
        "message_count",
        "producers",
    )

    def __init__(self, data: bytes, offset: int = 0) -> None:
        """`offset`: where the entry starts in `data` (a ledger entry header or an ack set may stand before it)."""
        if len(data) - offset < ENTRY_HEADER_BYTES:
            raise MalformedFrame("an entry is cut short")
        (
            version,
            self.flags,
            header_length,
            self.batch_count,
            self.message_count,
            self.base_index,
            self.base_offset,
            self.append_time_ms,
            self.first_index,
        ) = _HEADER.unpack_from(data, offset)
        if version != ENTRY_VERSION:
            raise MalformedFrame(f"entry version {version} is not known here; upgrade this program")
        n = self.batch_count
        columns = offset + header_length
        self.body = columns + n * _ROW_BYTES
        if header_length < ENTRY_HEADER_BYTES or not 0 < n <= MAX_BATCHES_PER_ENTRY or self.body > len(data):
            raise MalformedFrame("an entry header contradicts its length")
        self.data = data
        self._names = (offset + ENTRY_HEADER_BYTES, columns)
        self._producer_names: list[str] | None = None
        self.end_indexes = _column(data, columns, "I", n)
        self.end_offsets = _column(data, columns + 4 * n, "I", n)
        self.producers = _column(data, columns + 8 * n, "H", n)
        if self.end_indexes[-1] - self.base_index != self.message_count or self.body + self.end_offsets[
            -1
        ] - self.base_offset != len(data):
            raise MalformedFrame("an entry table contradicts its length")

    @property
    def producer_names(self) -> list[str]:
        """Names that `producers` points into."""
        if self._producer_names is None:
            start, end = self._names
            try:
                self._producer_names = _decode_names(self.data[start:end])
            except (ValueError, msgspec.MsgspecError) as error:
                raise MalformedFrame(f"the producer names of an entry are damaged: {error}") from error
        return self._producer_names

    def batch_bounds(self, position: int) -> tuple[int, int]:
        """Start and end of batch `position` in `data`."""
        shift = self.body - self.base_offset
        start = self.body if position == 0 else self.end_offsets[position - 1] + shift
        return start, self.end_offsets[position] + shift

    def batch(self, position: int) -> memoryview:
        """Bytes of batch `position` of this slice."""
        start, end = self.batch_bounds(position)
        return memoryview(self.data)[start:end]

    def batch_start_index(self, position: int) -> int:
        """Index in the stored entry of the first message of batch `position`."""
        return self.base_index if position == 0 else self.end_indexes[position - 1]

    def batch_of(self, index: int) -> int:
        """Position of the batch that holds message `index` (of the stored entry); batch_count if past the end."""
        return bisect_right(self.end_indexes, index)

    def slice(self, first: int, last: int) -> list[bytes]:
        """Batches [first, last) as the parts of a slice; join them or write them one after another."""
        if first == 0 and last == self.batch_count:
            return [self.data[self._names[0] - ENTRY_HEADER_BYTES :]]
        start, _ = self.batch_bounds(first)
        _, end = self.batch_bounds(last - 1)
        return [*self._table(first, last, self.end_offsets[first:last]), self.data[start:end]]

    def replaced(self, batches: Sequence[bytes]) -> Entry:
        """The same slice with other bytes of its batches."""
        ends = accumulate(map(len, batches), initial=self.base_offset)
        table = self._table(0, self.batch_count, array("I", ends)[1:])
        return Entry(b"".join([*table, *batches]))

    def gather(self, first: int, last: int, hidden: Sequence[tuple[int, int]]) -> list[bytes]:
        """As `slice`, without the bytes of batches whose messages are all `hidden`: their length is 0.

        `hidden`: sorted, disjoint, inclusive ranges of message indexes. About 0.4 us for each of them.
        """
        end_indexes, end_offsets, shift = self.end_indexes, self.end_offsets, self.body - self.base_offset
        base, data = self.base_index, self.data
        unbatched = self.message_count == self.batch_count
        offsets, parts = list[int](), list[bytes]()
        position = first
        offset = at = (
            self.base_offset if first == 0 else end_offsets[first - 1]
        )  # in the slice; in the stored entry
        for start, end in (*hidden, (end_indexes[last - 1], -1)):
            # Batches [left_out, following) are hidden as a whole; after the last range, none.
            if unbatched:
                left_out, following = start - base, end + 1 - base
            else:
                left_out = bisect_left(end_indexes, start) + 1 if start > base else 0
                following = bisect_right(end_indexes, end + 1)
            if left_out < position:
                left_out = position
            if following > last:
                following = last
            if following <= left_out and end >= 0:
                continue
            if left_out > last:
                left_out = last
            if left_out == position + 1:
                end_offset = end_offsets[position]
                offset += end_offset - at
                offsets.append(offset)
                parts.append(data[at + shift : end_offset + shift])
            elif left_out > position:
                moved = offset - at
                offsets += [one + moved for one in end_offsets[position:left_out]]
                parts.append(data[at + shift : end_offsets[left_out - 1] + shift])
                offset = offsets[-1]
            if following > left_out:
                offsets += [offset] * (following - left_out)
                position, at = following, end_offsets[following - 1]
        return [*self._table(first, last, array("I", offsets)), *parts]

    def _table(self, first: int, last: int, end_offsets: array[int]) -> list[bytes]:
        """Header, names and columns of batches [first, last)."""
        base_index = self.batch_start_index(first)
        names = self.data[self._names[0] : self._names[1]]
        header = _HEADER.pack(
            ENTRY_VERSION,
            self.flags,
            ENTRY_HEADER_BYTES + len(names),
            last - first,
            self.end_indexes[last - 1] - base_index,
            base_index,
            self.base_offset if first == 0 else self.end_offsets[first - 1],
            self.append_time_ms,
            self.first_index,
        )
        return [
            header,
            names,
            _little(self.end_indexes[first:last]),
            _little(end_offsets),
            _little(self.producers[first:last]),
        ]
