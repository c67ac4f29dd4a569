"""What the broker may have to know of a batch beside its fixed header: delivery time, last sequence id, chunk (FORMATS.md).

They stand behind the header as a msgpack map with integer keys. Whoever forwards a batch leaves them as they are; only an
entry whose flags say that it has such batches is looked into.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from .compression import decompress_raw
from .entry import ENTRY_CHUNKED, ENTRY_DELAYED, Entry
from .errors import InvalidArgument, MalformedFrame
from .message_rules import MAX_TIME_MS, checked_sequence_id, checked_time_ms

BATCH_HEADER_BYTES = 48  # behind which they stand
UNDECODABLE = (ValueError, TypeError, RecursionError, msgspec.MsgspecError)

# Keys of the extension map, in which everybody preserves unknown ones.
EXT_DELIVER_AT_MS = 1
EXT_SCHEMA_VERSION = 2
EXT_LAST_SEQUENCE_ID = 3  # only where they do not simply count up: META_SEQUENCE_IDS has all of them
EXT_CHUNK = 4  # the fields of a Chunk
EXT_WHOLE = 5  # of a chunk: the fields of a WholeMessage
EXT_BATCH_OF_ONE = (
    6  # true: Pulsar's producer sent its message as a batch, and batches of one are framed otherwise
)
EXT_UUID = 7  # of a chunk of Pulsar's producer: its uuid, by which consumers know chunks of one message
# Those of a batch that has a delivery time, not of 1970, and nothing else: a map of one u64, as msgpack packs it.
DELIVER_AT = struct.Struct(">3sQ")
DELIVER_AT_MARK = bytes([0x81, EXT_DELIVER_AT_MS, 0xCF])
DELAYED_HEADER_BYTES = BATCH_HEADER_BYTES + DELIVER_AT.size
CHUNK_ID_BYTES = 8
MAX_CHUNKS = 1 << 24  # of a message: 64 TiB of 4 MiB each


class Chunk(NamedTuple):
    """Which part of a message the only message of a batch is."""

    chunk_id: bytes  # CHUNK_ID_BYTES of random that all chunks of the message have
    index: int  # type: ignore[assignment]  # tuple.index is of no use here
    last: bool


class WholeMessage(NamedTuple):
    """The message whose part a chunk is, where that is known before its last chunk.

    size: bytes of all of its chunks. The value that they are together may be compressed: by `codec`, from `raw_bytes`.
    """

    chunks: int
    size: int
    codec: int = 0
    raw_bytes: int = 0

    def value(self, joined: bytes, max_bytes: int) -> bytes:
        """The value, of all chunks joined. Raises MalformedFrame, also for one of more than `max_bytes`."""
        return decompress_raw(self.codec, joined, self.raw_bytes, max_bytes) if self.codec else joined


class BatchExtensions(NamedTuple):
    """What the broker knows of a batch beside its header. None: the batch does not have it."""

    deliver_at_ms: int | None = None
    last_sequence_id: int | None = None
    chunk: Chunk | None = None
    whole: WholeMessage | None = None

    @property
    def has_ids(self) -> bool:
        """The sequence ids of its messages do not simply count up."""
        return self.last_sequence_id is not None or self.chunk is not None

    @property
    def entry_flags(self) -> int:
        """What an entry with this batch has among its flags."""
        return (self.deliver_at_ms is not None) * ENTRY_DELAYED | (self.chunk is not None) * ENTRY_CHUNKED


_unpack_extensions = msgspec.msgpack.Decoder(dict[int, Any]).decode


def batch_extensions(data: bytes | memoryview, header_length: int, offset: int = 0) -> BatchExtensions:
    """Those of the batch at `offset` that are known here, checked. Raises MalformedFrame, InvalidArgument.

    0.4 us for a delivery time alone, 3 us for others.
    """
    if header_length == DELAYED_HEADER_BYTES and len(data) >= offset + header_length:
        mark, time_ms = DELIVER_AT.unpack_from(data, offset + BATCH_HEADER_BYTES)
        if mark == DELIVER_AT_MARK and time_ms <= MAX_TIME_MS:
            return BatchExtensions(time_ms)
    try:
        found = _unpack_extensions(memoryview(data)[offset + BATCH_HEADER_BYTES : offset + header_length])
    except UNDECODABLE as error:
        raise MalformedFrame(f"the extensions of a batch are damaged: {error}") from error
    deliver_at_ms, last_sequence_id, chunk, whole = map(
        found.get, (EXT_DELIVER_AT_MS, EXT_LAST_SEQUENCE_ID, EXT_CHUNK, EXT_WHOLE)
    )
    if deliver_at_ms is not None:
        checked_time_ms(deliver_at_ms)
    if last_sequence_id is not None:
        checked_sequence_id(last_sequence_id)
    return BatchExtensions(
        deliver_at_ms,
        last_sequence_id,
        None if chunk is None else _chunk(chunk),
        None if whole is None else _whole(whole),
    )


def _chunk(fields: Any) -> Chunk:
    match fields:
        case [bytes(chunk_id), int(index), bool(last)] if (
            len(chunk_id) == CHUNK_ID_BYTES and type(index) is int and 0 <= index < MAX_CHUNKS
        ):
            return Chunk(chunk_id, index, last)
    raise InvalidArgument(
        f"not a chunk: {fields!r} (want an id of {CHUNK_ID_BYTES} bytes, its number, at most {MAX_CHUNKS - 1}, and whether "
        "it is the last)"
    )


def _whole(fields: Any) -> WholeMessage:
    if isinstance(fields, list) and len(fields) == 4 and all(type(one) is int and one >= 0 for one in fields):
        return WholeMessage(*fields)
    raise InvalidArgument(f"not what a message in chunks is as a whole: {fields!r} (want four numbers)")


def entry_extensions(entry: Entry) -> dict[int, BatchExtensions]:
    """Of the batches of an entry (or slice) that have any, by their position in it. 100 ns a batch without."""
    data, start = entry.data, entry.body
    shift = start - entry.base_offset
    found: dict[int, BatchExtensions] = {}
    for position, end in enumerate(entry.end_offsets):
        end += shift
        if end > start:  # else left out
            header_length = int.from_bytes(data[start + 14 : start + 16])
            if header_length != BATCH_HEADER_BYTES:
                found[position] = batch_extensions(data, header_length, start)
        start = end
    return found


MessageKey = tuple[str, bytes]  # producer, chunk id: which message a chunk is of


def entry_chunks(entry: Entry) -> dict[int, tuple[MessageKey, Chunk]]:
    """The chunks among the messages of an entry (or slice), by their index in the stored entry, in order."""
    if not entry.flags & ENTRY_CHUNKED:
        return {}
    names = entry.producer_names
    return {
        entry.batch_start_index(position): (
            (names[entry.producers[position]], extensions.chunk.chunk_id),
            extensions.chunk,
        )
        for position, extensions in entry_extensions(entry).items()
        if extensions.chunk is not None
    }


def entry_flags(batches: Sequence[bytes]) -> int:
    """The flags of an entry of these batches, of which some may be empty."""
    flags = 0
    for batch in batches:
        header_length = int.from_bytes(batch[14:16])
        if header_length > BATCH_HEADER_BYTES:
            flags |= batch_extensions(batch, header_length).entry_flags
    return flags
