"""What a compaction leaves of one entry, and the bytes of a compacted ledger (FORMATS.md).

A *row* is what is left of one entry of the topic: the entry under its own id, with batches of which nothing is left cut out,
and the ranges of the messages that are left. Messages keep their indexes, so message ids are what they were:

    entry 7:12   batches  [a1 b2 a3] [c4] [d5] [e6]     left: b2, d5      (messages 1 and 4)
    row 7:12     batches  [-- b2 --] []        [d5] []  ranges: 1-1, 4-4

A batch of which nothing is left has no bytes, and adjacent ones are merged into one; a batch of which something is left is
encoded again with nil in place of the removed messages, if that is shorter. Batches that cannot be decoded stay as they are.

Many rows are stored in one *chunk*, an entry of the compacted ledger: the table of the rows, then their bytes. The tables of
all chunks are stored again behind the last chunk, in index pages, so that a reader learns what there is without reading the
messages.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
from xxhash import xxh3_128_intdigest

from magnetar.proto.batch import (
    META_EVENT_TIMES_MS,
    META_PROPERTIES,
    META_SEQUENCE_IDS,
    DecodedBatch,
    Key,
    encode_batch,
)
from magnetar.proto.compression import Compression
from magnetar.proto.entry import Entry, encode_entry
from magnetar.proto.entry_messages import entry_keys
from magnetar.proto.errors import DataDirectoryError, MalformedFrame
from magnetar.proto.ids import MAX_MESSAGES_PER_ENTRY
from magnetar.proto.ranges import Range

CHUNK, INDEX_PAGE = 1, 2  # first byte of an entry of a compacted ledger
_CHUNK_HEAD = struct.Struct(">BI")  # kind, bytes of the table
# In place of the digest of a key, which is not negative: the message has no key, or its batch cannot be decoded.
NO_KEY, UNDECODABLE = -1, -2
MAX_MESSAGES_AT_ONCE = 1024  # that one step of work takes, or one batch that is larger
assert MAX_MESSAGES_AT_ONCE < MAX_MESSAGES_PER_ENTRY


class TableRow(NamedTuple):
    """What is left of one entry of the topic. Messages are flat ranges [first, last, ...] of indexes in that entry."""

    ledger: int  # position id
    entry: int
    size: int  # of the row, in bytes
    messages: list[int]  # those that are left
    tombstones: list[int]  # of those: the ones with a key and without a value, which delete their key


class Row(NamedTuple):
    """A row with its bytes, an entry."""

    table: TableRow
    data: bytes


# --- keys ------------------------------------------------------------------------------------------------------------


def digest_of(key: Key) -> int:
    """128 bits that stand for the key; text and its UTF-8 are the same key."""
    if key is None:
        return NO_KEY
    return int(xxh3_128_intdigest(key.encode() if isinstance(key, str) else key))


def parts_of(entry: Entry) -> list[Entry]:
    """The entry in slices of MAX_MESSAGES_AT_ONCE messages, or of one batch that is larger."""
    if entry.message_count <= MAX_MESSAGES_AT_ONCE:
        return [entry]
    parts: list[Entry] = []
    first = 0
    while first < entry.batch_count:
        last = entry.batch_of(entry.batch_start_index(first) + MAX_MESSAGES_AT_ONCE)
        last = max(last, first + 1)
        parts.append(Entry(b"".join(entry.slice(first, last))))
        first = last
    return parts


def key_digests(part: Entry) -> list[int]:
    """`digest_of` the key of each message. A batch that cannot be decoded has UNDECODABLE."""
    try:
        return list(map(digest_of, entry_keys(part)))
    except MalformedFrame:
        pass
    digests: list[int] = []
    for position in range(part.batch_count):
        count = part.end_indexes[position] - part.batch_start_index(position)
        start, end = part.batch_bounds(position)
        try:
            keys = DecodedBatch(part.data, start, verify=False).keys if end > start else None
        except MalformedFrame:
            digests += [UNDECODABLE] * count
        else:
            digests += map(digest_of, keys or [None] * count)
    return digests


# --- what is left of an entry ----------------------------------------------------------------------------------------


def to_ranges(indexes: Sequence[int]) -> list[int]:
    """Sorted numbers as flat ranges [first, last, ...], both ends included."""
    if not indexes:
        return []
    flat = [indexes[0]]
    for before, number in pairwise(indexes):
        if number != before + 1:
            flat += (before, number)
    flat.append(indexes[-1])
    return flat


def pairs(flat: Sequence[int]) -> list[Range]:
    """Flat ranges as pairs (first, last)."""
    return list(zip(flat[::2], flat[1::2]))


def members(flat: Sequence[int]) -> list[int]:
    """The numbers of flat ranges."""
    return [number for first, last in pairs(flat) for number in range(first, last + 1)]


class Remainder:
    """Makes the row of one entry: call `add` for each batch of which something is left, in their order, then `row`."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._batches: list[bytes] = []
        self._counts: list[int] = []
        self._producers: list[int] = []
        self._names: dict[str, int] = {}
        self._end = 0  # index after the last message that is in `_batches`
        self._left: list[int] = []
        self._tombstones: list[int] = []

    def add(self, position: int, left: list[int], *, keep_tombstones: bool) -> None:
        """Adds the batch at `position`. `left`: indexes in the entry of its messages that are left, at least one.

        Without `keep_tombstones` the tombstones among them are removed as well.
        """
        entry = self._entry
        first, last = entry.batch_start_index(position), entry.end_indexes[position]
        data = bytes(entry.batch(position))
        try:
            batch = DecodedBatch(data, 0, verify=False)
            tombstones = _tombstones_of(batch, [index - first for index in left])
            if tombstones and not keep_tombstones:
                removed = set(tombstones)
                left = [index for index in left if index - first not in removed]
                tombstones = []
                if not left:
                    return
            if len(left) < last - first:
                data = min(_keep_only(batch, {index - first for index in left}), data, key=len)
            self._tombstones += (first + number for number in tombstones)
        except MalformedFrame:  # what this broker cannot decode it does not judge: the whole batch stays
            left = list(range(first, last))
        self._skip_to(first)
        self._batches.append(data)
        self._counts.append(last - first)
        name = entry.producer_names[entry.producers[position]]
        self._producers.append(self._names.setdefault(name, len(self._names)))
        self._end = last
        self._left += left

    def _skip_to(self, index: int) -> None:
        """Adds an empty batch in place of the messages before `index` that are in none yet."""
        if index > self._end:
            self._batches.append(b"")
            self._counts.append(index - self._end)
            self._producers.append(0)

    def row(self, ledger: int, entry_id: int) -> Row | None:
        """The row of the entry with this id; None if nothing is left."""
        if not self._left:
            return None
        entry = self._entry
        self._skip_to(entry.message_count)
        data = encode_entry(
            self._batches,
            self._counts,
            self._producers,
            list(self._names),
            first_index=entry.first_index,
            append_time_ms=entry.append_time_ms,
            flags=entry.flags,
        )
        table = TableRow(ledger, entry_id, len(data), to_ranges(self._left), to_ranges(self._tombstones))
        return Row(table, data)


def _tombstones_of(batch: DecodedBatch, numbers: list[int]) -> list[int]:
    """The messages among `numbers` (indexes in the batch) that have a key and no value."""
    keys = batch.keys
    if keys is None:
        return []
    values = batch.values
    return [number for number in numbers if values[number] is None and keys[number] is not None]


def _keep_only(batch: DecodedBatch, left: set[int]) -> bytes:
    """The batch with nil in place of all messages but these. Sequence ids and event times stay as they are."""
    metadata = dict(batch.metadata or {})

    def sparse(column: list[object] | None) -> list[object] | None:
        if column is None:
            return None
        return [one if number in left else None for number, one in enumerate(column)]

    known = {META_PROPERTIES, META_EVENT_TIMES_MS, META_SEQUENCE_IDS}
    if metadata.keys() - known:
        raise MalformedFrame("a batch has metadata columns that are not known here")
    return encode_batch(
        sparse(batch.values),  # type: ignore[arg-type]
        sequence_id=batch.header.sequence_id,
        publish_time_ms=batch.header.publish_time_ms,
        keys=sparse(batch.keys),  # type: ignore[arg-type]
        properties=sparse(metadata.get(META_PROPERTIES)),  # type: ignore[arg-type]
        event_times_ms=metadata.get(META_EVENT_TIMES_MS),
        sequence_ids=metadata.get(META_SEQUENCE_IDS),
        compression=Compression(batch.header.flags >> 4),
        extensions=batch.extensions,
    )


# --- bytes -----------------------------------------------------------------------------------------------------------

_encode = msgspec.msgpack.Encoder().encode
_decode_table = msgspec.msgpack.Decoder(list[TableRow]).decode
_decode_page = msgspec.msgpack.Decoder(list[list[TableRow]]).decode


def encode_chunk(rows: Sequence[Row]) -> bytes:
    """Payload of a chunk with these rows."""
    table = _encode([row.table for row in rows])
    return b"".join((_CHUNK_HEAD.pack(CHUNK, len(table)), table, *(row.data for row in rows)))


def decode_chunk(payload: bytes) -> tuple[list[TableRow], int]:
    """The table, and where the bytes of the first row begin. Raises DataDirectoryError."""
    try:
        kind, size = _CHUNK_HEAD.unpack_from(payload)
        body = _CHUNK_HEAD.size + size
        if kind == CHUNK:
            table = _decode_table(payload[_CHUNK_HEAD.size : body])
            if body + sum(row.size for row in table) == len(payload):
                return table, body
    except (struct.error, msgspec.MsgspecError) as error:
        raise DataDirectoryError(f"a chunk of a compacted ledger is damaged: {error}") from error
    raise DataDirectoryError("a chunk of a compacted ledger is damaged: its table contradicts its length")


def encode_index_page(tables: Sequence[Sequence[TableRow]]) -> bytes:
    """Payload of an index page: the tables of consecutive chunks."""
    return bytes([INDEX_PAGE]) + _encode(tables)


def decode_index_page(payload: bytes) -> list[list[TableRow]]:
    """Inverse of `encode_index_page`. Raises DataDirectoryError."""
    try:
        if payload[:1] == bytes([INDEX_PAGE]):
            return _decode_page(payload[1:])
    except msgspec.MsgspecError as error:
        raise DataDirectoryError(f"the index of a compacted ledger is damaged: {error}") from error
    raise DataDirectoryError("the index of a compacted ledger is damaged: this entry is not an index page")
