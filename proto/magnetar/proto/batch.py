"""Batches: 1..n messages, encoded once by the client, opaque to broker and bookie (FORMATS.md draws the bytes).

A batch is a fixed header of 48 bytes, an optional extension map, and three columns: values, keys, metadata. The checksum
(xxh3-64) covers everything after itself. What the broker must know (count, sequence id, key hash, extensions) stands in the
header, which is the same for every format; how the columns are written is what a format decides (`FORMATS`).

>>> data = encode_batch([b"a", b"b"], sequence_id=7, publish_time_ms=1000, keys=["k", None])
>>> batch = decode_batch(data)
>>> batch.values, batch.keys, batch.header.sequence_id, batch.header.mixed_keys
([b'a', b'b'], ['k', None], 7, True)

This module and `entry_messages` alone know the layout. The fast way, `encode_singles` for the batches of one message that an
unbatched producer sends, is a few C loops over a whole group of messages.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import compress as select
from itertools import count as count_from
from itertools import pairwise, repeat
from operator import add, ne
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from mmh3 import mmh3_32_uintdigest
from xxhash import xxh3_64_digest

from .batch_extensions import (
    BATCH_HEADER_BYTES,
    DELAYED_HEADER_BYTES,
    DELIVER_AT,
    DELIVER_AT_MARK,
    EXT_CHUNK,
    EXT_DELIVER_AT_MS,
    EXT_LAST_SEQUENCE_ID,
    UNDECODABLE,
)
from .compression import Compression, compress, decompress
from .errors import ChecksumMismatch, MalformedFrame
from .frames import frame_prefix
from .ids import MAX_MESSAGES_PER_ENTRY
from .message_rules import check_message_count

if TYPE_CHECKING:
    from .pulsar.columns import PulsarColumns

_HEADER = struct.Struct(">I8sBBHIIQQII")
_LENGTH = struct.Struct(">I")
assert _HEADER.size == BATCH_HEADER_BYTES
CHECKSUM_END = 12

# What may stand around a message of the largest size in the group that carries it: headers, and in a dead letter where it
# comes from, which is two names of topics of up to 3 KB each.
GROUP_OVERHEAD_BYTES = 16 * 1024

FORMAT_NATIVE = 1
FORMAT_PULSAR = 2  # what a producer of Pulsar's protocol sent, in place of the columns: see `pulsar.batch`

FLAG_SINGLE = 0x01  # one message; its value and its key, if any, stand as they are in place of their columns
FLAG_KEYED = 0x02  # all messages have the same key, whose hash is in the header
FLAG_MIXED_KEYS = 0x04  # there are keys, but not one for all; without either flag there are none
FLAG_BINARY_KEY = 0x08  # with SINGLE and KEYED: the key is bytes, not text
FLAG_COMPRESSION_SHIFT = 4  # bits 4-7: Compression of every column that is there

# Keys of the metadata column (a map of columns, each as long as the batch).
META_PROPERTIES = 1
META_EVENT_TIMES_MS = 2
META_INDEXES = 3  # sparse batch (compacted): index of each message that is left
META_SEQUENCE_IDS = 4  # only when they do not simply count up

Key = str | bytes | None
Properties = Mapping[str, str]

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


class Columns(NamedTuple):
    """Messages to encode, by column; absent columns are None, the others as long as `values`.

    sequence_ids rise; absent: they count up. deliver_at_ms: all messages of one batch have the same.
    """

    values: Sequence[bytes | None]
    keys: Sequence[Key] | None = None
    properties: Sequence[Properties | None] | None = None
    event_times_ms: Sequence[int | None] | None = None
    indexes: Sequence[int] | None = None
    sequence_ids: Sequence[int] | None = None
    deliver_at_ms: Sequence[int | None] | None = None

    def part(self, start: int, end: int) -> Columns:
        """The messages [start, end)."""
        return Columns._make(column and column[start:end] for column in self)


class BatchHeader(NamedTuple):
    """Decoded fixed header. Lengths in bytes, `length` without its own field, times in ms since the epoch.

    key_hash: `key_hash_of` the key that all messages have, 0 unless `keyed`.
    """

    length: int
    checksum: bytes
    format: int
    flags: int
    header_length: int
    message_count: int
    key_hash: int
    sequence_id: int
    publish_time_ms: int
    keys_length: int
    metadata_length: int

    @property
    def size(self) -> int:
        """Bytes of the whole batch."""
        return self.length + 4

    @property
    def keyed(self) -> bool:
        """True if all messages have the same key."""
        return bool(self.flags & FLAG_KEYED)

    @property
    def mixed_keys(self) -> bool:
        """True if there are keys, but not one for all messages."""
        return bool(self.flags & FLAG_MIXED_KEYS)


# --- encoding --------------------------------------------------------------------------------------------------------


def _encode_native(columns: Columns, compression: Compression) -> tuple[int, bytes, bytes, bytes]:
    """Msgpack arrays, made in one call each; a single uncompressed message has its value and its key as they are."""
    values, keys, *metadata, _ = columns
    flags = compression << FLAG_COMPRESSION_SHIFT
    if len(values) == 1 and values[0] is not None and compression is Compression.NONE:
        flags |= FLAG_SINGLE
        values_column, keys_column = bytes(values[0]), b""
        if keys is not None and keys[0] is not None:
            keys_column = _as_bytes(keys[0])
            flags |= FLAG_BINARY_KEY if isinstance(keys[0], bytes) else 0
    else:
        values_column = compress(compression, _pack(values))
        keys_column = b"" if keys is None else compress(compression, _pack(keys))
    present = {
        number: column for number, column in enumerate(metadata, META_PROPERTIES) if column is not None
    }
    return flags, values_column, keys_column, compress(compression, _pack(present)) if present else b""


# What the checksum covers, down to the extensions. Of a single message: constant, key hash, sequence id, publish time, and
# the length of its key; zeros stand for what it has none of.
_REST = struct.Struct(">BBHIIQQII")
_PLAIN_REST = struct.Struct(">8s4xQ8s8x")
_KEYED_REST = struct.Struct(">8sIQ8sI4x")
SINGLE_MARK, TEXT_KEY_MARK, DELAYED_MARK, DELAYED_TEXT_KEY_MARK = (
    struct.pack(">BBHI", FORMAT_NATIVE, FLAG_SINGLE | flags, header_bytes, 1)
    for header_bytes in (BATCH_HEADER_BYTES, DELAYED_HEADER_BYTES)
    for flags in (0, FLAG_KEYED)
)
DELAYED_MARKS = (DELAYED_MARK, DELAYED_TEXT_KEY_MARK)


def _as_bytes(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key


def key_hash_of(key: str | bytes) -> int:
    """The hash of a key in the header: MurmurHash3_x86_32, seed 0, as Pulsar has it; a text counts as UTF-8."""
    return mmh3_32_uintdigest(_as_bytes(key))


class EncodedBatches:
    """Batches ready to be sent, as often as needed: the checksum of each, and what it covers.

    `ends`: how many messages there are up to the end of each batch; None where every batch is one message.
    """

    __slots__ = ("_digests", "_ends", "_rests")

    def __init__(self, rests: list[bytes], ends: Sequence[int] | None = None) -> None:
        self._rests = rests
        self._ends = ends
        self._digests: list[bytes] = list(map(xxh3_64_digest, rests))

    @property
    def largest(self) -> int:
        """Bytes of the largest of them, which is what one frame carries."""
        return max(map(len, self._rests)) + CHECKSUM_END

    def frames(self, header: bytes, first: int = 0) -> bytes:
        """A frame with this header for each batch from the one with message `first` on. 100 ns a frame."""
        if self._ends is not None:
            first = bisect_right(self._ends, first)
        digests, rests = self._digests[first:], self._rests[first:]
        sizes = list(map(len, rests))
        # All of a frame before the checksum depends on the size alone, and a group of messages has few sizes.
        prefixes = {
            size: frame_prefix(header, size + CHECKSUM_END) + _LENGTH.pack(size + 8)
            for size in dict.fromkeys(sizes)
        }
        parts = [b""] * (3 * len(rests))
        parts[0::3] = map(prefixes.__getitem__, sizes)
        parts[1::3] = digests
        parts[2::3] = rests
        return b"".join(parts)

    def batch_end(self, message: int) -> int:
        """How many messages there are up to the end of the batch with this one."""
        return message + 1 if self._ends is None else self._ends[bisect_right(self._ends, message)]

    def batches(self) -> list[bytes]:
        """The batches one by one."""
        lengths = (_LENGTH.pack(len(rest) + 8) for rest in self._rests)
        return list(map(b"".join, zip(lengths, self._digests, self._rests)))


def encode_columns(
    columns: Columns,
    sequence_id: int,
    publish_time_ms: int,
    compression: Compression = Compression.NONE,
    extensions: Mapping[int, Any] | None = None,
) -> EncodedBatches:
    """Messages as one batch. Raises InvalidArgument for too many, and what the format raises for wrong types.

    `extensions`: more than what the columns say themselves.
    """
    check_message_count(len(columns.values))
    if columns.sequence_ids or columns.deliver_at_ms:
        columns, own = _with_extensions(columns)
        extensions = {**own, **(extensions or {})}
    flags, values_column, keys_column, metadata_column = _encode_native(columns, compression)
    key_flags, key_hash = _of_keys(columns.keys)
    extension_bytes = _pack(extensions) if extensions else b""
    header = _REST.pack(
        FORMAT_NATIVE,
        flags | key_flags,
        BATCH_HEADER_BYTES + len(extension_bytes),
        len(columns.values),
        key_hash,
        sequence_id,
        publish_time_ms,
        len(keys_column),
        len(metadata_column),
    )
    rest = b"".join((header, extension_bytes, values_column, keys_column, metadata_column))
    return EncodedBatches([rest], [len(columns.values)])


def _with_extensions(columns: Columns) -> tuple[Columns, dict[int, Any]]:
    """The columns, without sequence ids that simply count up, and the extensions that belong to them."""
    found: dict[int, Any] = {}
    ids, times = columns.sequence_ids, columns.deliver_at_ms
    if times and times[0] is not None:
        found[EXT_DELIVER_AT_MS] = times[0]
    if ids and ids[-1] - ids[0] == len(columns.values) - 1:
        columns = columns._replace(sequence_ids=None)
    elif ids:
        found[EXT_LAST_SEQUENCE_ID] = ids[-1]
    return columns, found


def encode_group(
    columns: Columns,
    first_sequence_id: int,
    publish_time_ms: int,
    compression: Compression = Compression.NONE,
    *,
    by_key: bool = False,
) -> tuple[EncodedBatches, list[int] | None]:
    """Messages as one batch, or as several where they cannot share one: with other delivery times, or keys if `by_key`.

    Sequence ids rise along the batches. `by_key` puts all messages of a key into one batch, in their order, and returns the
    place of each message among those of all batches; where messages have sequence ids of their own, and without `by_key`,
    they stay in their order (None), and a batch ends where the key or the delivery time changes.
    """
    if not columns.deliver_at_ms and not (by_key and columns.keys):
        return encode_columns(columns, first_sequence_id, publish_time_ms, compression), None
    kinds: list[Any] = [
        column for column in (columns.keys if by_key else None, columns.deliver_at_ms) if column
    ]
    kind = kinds[0] if len(kinds) == 1 else list(zip(*kinds))
    count = len(kind)
    order = None
    if by_key and columns.keys and columns.sequence_ids is None:
        firsts: dict[Any, int] = {}
        for number, one in enumerate(kind):
            firsts.setdefault(one, number)
        stored = sorted(range(count), key=[firsts[one] for one in kind].__getitem__)
        if len(firsts) < count:
            columns = Columns._make(column and [column[number] for number in stored] for column in columns)
            kind = [kind[number] for number in stored]
            order = sorted(range(count), key=stored.__getitem__)
    ends = [*select(count_from(1), map(ne, kind, kind[1:])), count]
    if 2 * len(ends) > count > 1 and order is None:
        return encode_singles(columns, first_sequence_id, publish_time_ms, compression), None
    rests: list[bytes] = []
    for start, end in pairwise((0, *ends)):
        first = columns.sequence_ids[start] if columns.sequence_ids else first_sequence_id + start
        rests += encode_columns(columns.part(start, end), first, publish_time_ms, compression)._rests
    return EncodedBatches(rests, ends), order


def encode_singles(
    columns: Columns,
    first_sequence_id: int,
    publish_time_ms: int,
    compression: Compression = Compression.NONE,
) -> EncodedBatches:
    """Messages as batches of one each.

    120 ns a message that has a value only, 210 with a key, 110 more with a delivery time, 4 us with the rare rest.
    """
    values, keys, *metadata, sequence_ids, times = columns
    ids = count_from(first_sequence_id) if sequence_ids is None else sequence_ids
    if (
        compression is Compression.NONE
        and None not in values
        and not any(metadata)
        and (times is None or (None not in times and min(times) > 0xFFFFFFFF))  # type: ignore[type-var, operator]
    ):
        if keys is None:
            return EncodedBatches(_plain_rests(values, ids, publish_time_ms, times))  # type: ignore[arg-type]
        try:
            encoded = list(map(str.encode, keys))  # type: ignore[arg-type]
        except TypeError:
            pass  # not all of them are text
        else:
            return EncodedBatches(_keyed_rests(values, encoded, ids, publish_time_ms, times))  # type: ignore[arg-type]
    rests: list[bytes] = []
    columns = columns._replace(sequence_ids=None)
    rows = zip(*(repeat(None) if column is None else column for column in columns))
    for sequence_id, row in zip(ids, rows):
        value, *others = row
        one = Columns([value], *(None if other is None else [other] for other in others))
        rests += encode_columns(one, sequence_id, publish_time_ms, compression)._rests
    return EncodedBatches(rests)


def _plain_rests(
    values: Sequence[bytes], ids: Iterable[int], publish_time_ms: int, times: Sequence[int] | None
) -> list[bytes]:
    mark = SINGLE_MARK if times is None else DELAYED_MARK
    heads = map(_PLAIN_REST.pack, repeat(mark), ids, repeat(publish_time_ms.to_bytes(8)))
    return list(map(add, _with_times(heads, times), values))


def _keyed_rests(
    values: Sequence[bytes],
    keys: Sequence[bytes],
    ids: Iterable[int],
    publish_time_ms: int,
    times: Sequence[int] | None,
) -> list[bytes]:
    heads = map(
        _KEYED_REST.pack,
        repeat(TEXT_KEY_MARK if times is None else DELAYED_TEXT_KEY_MARK),
        map(mmh3_32_uintdigest, keys),
        ids,
        repeat(publish_time_ms.to_bytes(8)),
        map(len, keys),
    )
    return list(map(b"".join, zip(_with_times(heads, times), values, keys)))


def _with_times(heads: Iterable[bytes], times: Sequence[int] | None) -> Iterable[bytes]:
    return heads if times is None else map(add, heads, map(DELIVER_AT.pack, repeat(DELIVER_AT_MARK), times))


def _of_keys(keys: Sequence[Key] | None) -> tuple[int, int]:
    """Flags and key hash of the header, for a column of keys."""
    if not keys:
        return 0, 0
    first = keys[0]
    if first == keys[-1] and keys.count(first) == len(keys):
        return (0, 0) if first is None else (FLAG_KEYED, key_hash_of(first))
    return FLAG_MIXED_KEYS, 0


def encode_batch(
    values: Sequence[bytes | None],
    *,
    sequence_id: int,
    publish_time_ms: int,
    keys: Sequence[Key] | None = None,
    properties: Sequence[Properties | None] | None = None,
    event_times_ms: Sequence[int | None] | None = None,
    indexes: Sequence[int] | None = None,
    sequence_ids: Sequence[int] | None = None,
    compression: Compression = Compression.NONE,
    extensions: Mapping[int, Any] | None = None,
) -> bytes:
    """The bytes of `encode_columns`. Columns given must be as long as `values`."""
    columns = Columns(values, keys, properties, event_times_ms, indexes, sequence_ids)
    (batch,) = encode_columns(columns, sequence_id, publish_time_ms, compression, extensions).batches()
    return batch


# --- decoding --------------------------------------------------------------------------------------------------------


def decode_batch_header(data: bytes | memoryview, offset: int = 0) -> BatchHeader:
    """Reads the fixed header at `offset` and checks its lengths against `data`; verifies no checksum."""
    if len(data) - offset < BATCH_HEADER_BYTES:
        raise MalformedFrame(f"a batch has at least {BATCH_HEADER_BYTES} bytes, not {len(data) - offset}")
    header = BatchHeader(*_HEADER.unpack_from(data, offset))
    columns = header.header_length + header.keys_length + header.metadata_length
    if (
        offset + header.size > len(data)
        or header.header_length < BATCH_HEADER_BYTES
        or columns > header.size
        or not 0 < header.message_count <= MAX_MESSAGES_PER_ENTRY
    ):
        raise MalformedFrame(f"a batch header contradicts itself: {header}")
    return header


def verify_batch(data: bytes | memoryview, offset: int, size: int) -> None:
    """Raises ChecksumMismatch unless the batch of `size` bytes at `offset` matches its checksum."""
    view = memoryview(data)
    if (
        xxh3_64_digest(view[offset + CHECKSUM_END : offset + size])
        != view[offset + 4 : offset + CHECKSUM_END]
    ):
        raise ChecksumMismatch("a batch does not match its checksum: it was damaged on its way")


VALUES, KEYS, METADATA = range(3)


class DecodedBatch:
    """A batch whose columns are decoded when they are asked for. Those that are absent are None.

    Raises MalformedFrame, at first for a header that contradicts its bytes, later for a column that is damaged.
    """

    def __init__(self, data: bytes | memoryview, offset: int, *, verify: bool) -> None:
        self.header = header = decode_batch_header(data, offset)
        if verify:
            verify_batch(data, offset, header.size)
        if header.format not in FORMATS:
            raise MalformedFrame(f"batch format {header.format} is not known here; upgrade this client")
        self._view = memoryview(data)[offset : offset + header.size]

    @cached_property
    def values(self) -> list[bytes | None]:
        return self._list(self._column(VALUES))

    @cached_property
    def keys(self) -> list[Key] | None:
        found = self._column(KEYS)
        return None if found is None else self._list(found)

    @cached_property
    def metadata(self) -> Mapping[int, list[Any]] | None:
        found = self._column(METADATA)
        if not isinstance(found, dict | None):
            raise MalformedFrame("the metadata column of a batch is not a map")
        return found and {number: self._list(one) for number, one in found.items()}

    @cached_property
    def extensions(self) -> Mapping[int, Any]:
        """What is known of the batch beside its columns, and needs no decoding of them."""
        column = self._view[BATCH_HEADER_BYTES : self.header.header_length]
        try:
            found = _unpack(column) if column else {}
        except UNDECODABLE as error:
            raise MalformedFrame(f"the extensions of a batch are damaged: {error}") from error
        return found if isinstance(found, dict) else {}

    def column(self, which: int) -> memoryview:
        """Its bytes."""
        metadata_start = self.header.size - self.header.metadata_length
        keys_start = metadata_start - self.header.keys_length
        borders = (self.header.header_length, keys_start, metadata_start, self.header.size)
        return self._view[borders[which] : borders[which + 1]]

    @cached_property
    def pulsar(self) -> PulsarColumns:
        """Of format 2."""
        from .pulsar.columns import PulsarColumns

        body = bytes(self._view[self.header.header_length :])
        return PulsarColumns(body, self.header.message_count, is_chunk=EXT_CHUNK in self.extensions)

    def _column(self, which: int) -> Any:
        try:
            return FORMATS[self.header.format](self, which)
        except UNDECODABLE as error:
            raise MalformedFrame(f"a batch column is damaged: {error}") from error

    def _list(self, column: Any) -> list[Any]:
        if not isinstance(column, list) or len(column) != self.header.message_count:
            raise MalformedFrame("the columns of a batch differ in length")
        return column


def decode_batch(data: bytes | memoryview, offset: int = 0, *, verify: bool = True) -> DecodedBatch:
    """Decodes the batch at `offset` and all its columns. Raises MalformedFrame or ChecksumMismatch."""
    batch = DecodedBatch(data, offset, verify=verify)
    _ = batch.values, batch.keys, batch.metadata, batch.extensions
    return batch


# --- formats ---------------------------------------------------------------------------------------------------------


def _decode_native(batch: DecodedBatch, which: int) -> Any:
    header, column = batch.header, batch.column(which)
    if not column and which != VALUES and not (which == KEYS and header.keyed):
        return None
    if header.flags & FLAG_SINGLE and which != METADATA:
        return [
            str(column, "utf-8") if which == KEYS and not header.flags & FLAG_BINARY_KEY else bytes(column)
        ]
    codec = header.flags >> FLAG_COMPRESSION_SHIFT
    return _unpack(column if codec == Compression.NONE else decompress(codec, column))


def _decode_pulsar(batch: DecodedBatch, which: int) -> Any:
    found = batch.pulsar
    if which != METADATA:
        return found.values if which == VALUES else found.keys
    columns = {
        META_PROPERTIES: found.properties,
        META_EVENT_TIMES_MS: found.event_times_ms,
        META_SEQUENCE_IDS: found.sequence_ids,
    }
    return {number: column for number, column in columns.items() if column is not None} or None


# What decodes one of the three columns; None: it is absent. The caller checks that it is a list (metadata: a map of them) of
# the right length. The header names the format; storing and forwarding batches takes none.
FORMATS: dict[int, Callable[[DecodedBatch, int], Any]] = {
    FORMAT_NATIVE: _decode_native,
    FORMAT_PULSAR: _decode_pulsar,
}
