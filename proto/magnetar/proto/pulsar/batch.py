"""Batch format 2: what Pulsar's producers send, verbatim behind a batch header; and native batches for its consumers.

    header, 48 bytes | extensions | 0x0e01 | crc32c | u32 | MessageMetadata | payload
                                    `--- as in the SEND that brought it, and in the MESSAGE that delivers it

The header has what the broker must know, so MessageMetadata is read once, at admission; payloads are never opened there. The
key hash is that by which Pulsar routes: of the ordering key, else of the partition key. A batch of several keys has that of
its first one. Sequence ids are taken from the metadata and never counted: the last one is the larger of `sequence_id` and
`highest_sequence_id`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from google_crc32c import value as crc32c
from xxhash import xxh3_64_digest

from ..admission import AdmittedGroups
from ..batch import FLAG_KEYED, FORMAT_PULSAR, key_hash_of
from ..batch_extensions import (
    BATCH_HEADER_BYTES,
    EXT_BATCH_OF_ONE,
    EXT_CHUNK,
    EXT_DELIVER_AT_MS,
    EXT_LAST_SEQUENCE_ID,
    EXT_SCHEMA_VERSION,
    EXT_UUID,
    EXT_WHOLE,
    MAX_CHUNKS,
    BatchExtensions,
    Chunk,
    WholeMessage,
)
from ..compression import MAX_RAW_COLUMN_BYTES
from ..errors import ChecksumMismatch, InvalidArgument, MagnetarError, MalformedFrame
from ..message_rules import (
    MAX_TIME_MS,
    check_message_count,
    checked_sequence_id,
    checked_time_ms,
)
from .columns import CODECS, key_bytes
from .crc import MAGIC, checksummed
from .metadata import BYTES, VARINT, raw_fields, read_varint, signed

_LENGTH = struct.Struct(">I")
_REST = struct.Struct(">12sQQ8x")  # of a batch header, behind its checksum
_MARK = struct.Struct(">BBHII")
_pack = msgspec.msgpack.Encoder().encode

# Of MessageMetadata, by tag.
_NAME, _KEY, _ENCRYPTION, _SCHEMA_VERSION, _ORDERING_KEY, _UUID = (
    number << 3 | BYTES for number in (1, 6, 13, 16, 18, 26)
)
_SEQUENCE_ID, _PUBLISH_TIME, _COMPRESSION, _RAW_SIZE, _COUNT, _EVENT_TIME, _BASE64 = (
    number << 3 | VARINT for number in (2, 3, 8, 9, 11, 12, 17)
)
_DELIVER_AT, _MARKER, _TRANSACTION, _HIGHEST, _CHUNKS, _CHUNKED_BYTES, _CHUNK = (
    number << 3 | VARINT for number in (19, 20, 22, 24, 27, 28, 29)
)

MAX_EXTENSIONS_BYTES = 1024
_LEAST_BYTES = 6  # of a message in a batch: the size of its metadata, and the size of its value there
_REMEMBERED_BYTES = 256  # of metadata, without what every message has of its own

# Of a batch: its constant part, its extensions, what the broker looks at of these.
Header = tuple[bytes, bytes, BatchExtensions | None]


class _Kind(NamedTuple):
    """What metadata says beside the producer's name, the sequence id and the publish time: the same for many messages."""

    messages: int
    least_bytes: int  # of what follows the metadata
    highest_sequence_id: int
    flags: int
    key_hash: int
    extensions: dict[int, Any]
    header: Header  # where sequence ids count up from the first to the last one


def admit_pulsar(frames: Sequence[bytes]) -> AdmittedGroups:
    """What SENDs carry behind their commands, verified, as batches of format 2, before the broker appends them.

    Raises as `admission.admit_groups`. For an unbatched message of 100 bytes 0.8 us if it is like the one before it but for
    the low seven bits of its sequence id, else 2.4, and 3 more where its metadata is not like that of others (event times,
    many keys); nothing for a message of a batch.
    """
    batches, counts, sequence_ids = list[bytes](), list[int](), list[int]()
    extensions: dict[int, BatchExtensions] = {}
    # Of the last frame: its metadata on both sides of the lowest byte of its sequence id. A size of -1: there is none.
    size, before, low, behind, end, others = -1, b"", 0, b"", 0, 0
    length, mark, packed, publish_time_ms, count = b"", b"", b"", 0, 0
    known: BatchExtensions | None = None
    try:
        for frame in frames:
            if (
                len(frame) == size
                and frame[6:low] == before
                and frame[low + 1 : end] == behind
                and frame[low] > 0x7F
                and frame[:6] == MAGIC + crc32c(frame[6:]).to_bytes(4, "big")
            ):
                sequence_id = others + frame[low]
            else:
                if frame[:2] != MAGIC:  # the producer leaves checksums out
                    frame = checksummed(frame)
                low, end, sequence_id, publish_time_ms, kind = _parsed(frame)
                count, highest = kind.messages, kind.highest_sequence_id
                last = highest if highest > sequence_id else sequence_id
                mark, packed, known = kind.header
                size = -1
                if last != sequence_id + count - 1:
                    mark, packed, known = _with_last(kind, last)
                elif low and not highest:
                    size, others = len(frame), (sequence_id & ~0x7F) - 0x80
                    before, behind = frame[6:low], frame[low + 1 : end]
                if last >> 63:
                    checked_sequence_id(last)
                length = _LENGTH.pack(BATCH_HEADER_BYTES - _LENGTH.size + len(packed) + len(frame))
            if known is not None:
                extensions[len(batches)] = known
            content = _REST.pack(mark, sequence_id, publish_time_ms) + packed + frame
            batches.append(length + xxh3_64_digest(content) + content)
            counts.append(count)
            sequence_ids.append(sequence_id)
    except (MagnetarError, IndexError) as error:
        failure = error if isinstance(error, MagnetarError) else MalformedFrame("a message is cut short")
        failure.details["position"] = len(batches)
        raise failure from None
    return AdmittedGroups(batches, counts, sequence_ids, extensions or None)


def _parsed(frame: bytes) -> tuple[int, int, int, int, _Kind]:
    """Where a sequence id of several bytes begins, else 0; where the metadata ends; sequence id, publish time, the rest."""
    if crc32c(frame[6:]) != int.from_bytes(frame[2:6], "big"):
        raise ChecksumMismatch("a message does not match its checksum: it was damaged on its way")
    end = 10 + int.from_bytes(frame[6:10], "big")
    if end > len(frame):
        raise MalformedFrame("the metadata of a message is longer than the message")
    # As every client writes it: name, sequence id, publish time, and the rest.
    at = 12 + frame[11]
    if frame[10] == _NAME and frame[11] < 0x80 and frame[at] == _SEQUENCE_ID:
        low = at + 1 if frame[at + 1] > 0x7F else 0
        sequence_id, at = read_varint(frame, at + 1)
        if frame[at] != _PUBLISH_TIME:
            raise MalformedFrame("the metadata of a message has no publish time")
        publish_time_ms, at = read_varint(frame, at + 1)
        rest = frame[at:end]
        kind = _kind(rest) if len(rest) <= _REMEMBERED_BYTES else _kind.__wrapped__(rest)
    else:
        low, at = 0, end
        sequence_id, publish_time_ms, kind = _in_any_order(frame[10:end])
    if at > end:
        raise MalformedFrame("the metadata of a message is cut short")
    if kind.messages > 1 and len(frame) - end < kind.least_bytes:
        raise MalformedFrame(f"a batch of {kind.messages} messages has {len(frame) - end} bytes for them")
    return low, end, sequence_id, checked_time_ms(publish_time_ms), kind


def _in_any_order(metadata: bytes) -> tuple[int, int, _Kind]:
    fields = raw_fields(metadata)
    try:
        time_ms = fields.pop(_PUBLISH_TIME)
        sequence_id = fields.pop(_SEQUENCE_ID)
        fields.pop(_NAME)
    except KeyError:
        raise MalformedFrame(
            "the metadata of a message has no producer, sequence id or publish time"
        ) from None
    return sequence_id, time_ms, _kind_of(fields)


@lru_cache(maxsize=1024)
def _kind(rest: bytes) -> _Kind:
    """Of metadata without its first three fields."""
    fields = raw_fields(rest)
    if not fields.keys().isdisjoint((_NAME, _SEQUENCE_ID, _PUBLISH_TIME)):
        raise MalformedFrame("the metadata of a message has a field twice")
    return _kind_of(fields)


def _kind_of(fields: dict[int, Any]) -> _Kind:
    get = fields.get
    if _MARKER in fields or _TRANSACTION in fields:
        raise InvalidArgument("markers and messages of transactions are not taken from producers")
    count = signed(get(_COUNT, 1), 32)
    if count < 1:
        raise InvalidArgument(f"a batch of {count} messages")
    check_message_count(count)
    if get(_EVENT_TIME, 0) > MAX_TIME_MS:
        checked_time_ms(fields[_EVENT_TIME])
    compressed, raw_bytes = get(_COMPRESSION, 0) != 0, get(_RAW_SIZE, 0) & 0xFFFFFFFF
    found: dict[int, Any] = {}
    deliver_at_ms = signed(get(_DELIVER_AT, 0), 64)
    if deliver_at_ms > 0:
        found[EXT_DELIVER_AT_MS] = checked_time_ms(deliver_at_ms)
    if _SCHEMA_VERSION in fields:
        found[EXT_SCHEMA_VERSION] = get(_SCHEMA_VERSION)
    chunks = signed(get(_CHUNKS, 0), 32)
    # Consumers believe what it says, and make room.
    if chunks <= 1 and compressed and raw_bytes > MAX_RAW_COLUMN_BYTES:
        raise InvalidArgument(
            f"a message that inflates to {raw_bytes} bytes, more than {MAX_RAW_COLUMN_BYTES}"
        )
    if chunks > 1:
        if count > 1:
            raise InvalidArgument("a chunk is a batch of its own")
        found[EXT_CHUNK], found[EXT_WHOLE] = _chunk(fields, chunks)
        found[EXT_UUID] = fields[_UUID]
    elif count == 1 and _COUNT in fields:
        found[EXT_BATCH_OF_ONE] = True
    key: bytes | None = get(_ORDERING_KEY)
    if key is None and _KEY in fields:
        key = key_bytes(fields[_KEY], encoded=bool(get(_BASE64)))
    flags, key_hash = (0, 0) if key is None else (FLAG_KEYED, key_hash_of(key))
    header = _header(flags, count, key_hash, found)
    least_bytes = 0 if compressed or _ENCRYPTION in fields else _LEAST_BYTES * count
    return _Kind(count, least_bytes, get(_HIGHEST, 0), flags, key_hash, found, header)


def _chunk(fields: dict[int, Any], chunks: int) -> tuple[Chunk, WholeMessage]:
    get = fields.get
    index = signed(get(_CHUNK, 0), 32)
    if not 0 <= index < chunks <= MAX_CHUNKS or _UUID not in fields:
        raise InvalidArgument(f"not a chunk: number {index} of {chunks}, at most {MAX_CHUNKS}, with a uuid")
    size, raw_bytes = signed(get(_CHUNKED_BYTES, 0), 32), signed(get(_RAW_SIZE, 0), 32)
    codec = CODECS.get(get(_COMPRESSION, 0))
    if codec is None or size < 0 or raw_bytes < 0:
        raise InvalidArgument(
            f"a message of {size} bytes in chunks, {raw_bytes} before compression {get(_COMPRESSION)}"
        )
    # A uuid is the name and the sequence id as a rule, which a producer that begins anew has for other messages, too.
    chunk_id = xxh3_64_digest(b"%b %d %d %d" % (fields[_UUID], chunks, size, raw_bytes))
    whole = WholeMessage(chunks, size, codec, raw_bytes if codec else 0)
    return Chunk(chunk_id, index, index == chunks - 1), whole


def _with_last(kind: _Kind, last_sequence_id: int) -> Header:
    extensions = {**kind.extensions, EXT_LAST_SEQUENCE_ID: last_sequence_id}
    return _header(kind.flags, kind.messages, kind.key_hash, extensions)


def _header(flags: int, messages: int, key_hash: int, extensions: dict[int, Any]) -> Header:
    if not extensions:
        return _MARK.pack(FORMAT_PULSAR, flags, BATCH_HEADER_BYTES, messages, key_hash), b"", None
    packed = _pack(extensions)
    if len(packed) > MAX_EXTENSIONS_BYTES:
        raise InvalidArgument(
            f"{len(packed)} bytes of schema version and uuid, and at most {MAX_EXTENSIONS_BYTES} are possible"
        )
    mark = _MARK.pack(FORMAT_PULSAR, flags, BATCH_HEADER_BYTES + len(packed), messages, key_hash)
    get = extensions.get
    known = BatchExtensions(get(EXT_DELIVER_AT_MS), get(EXT_LAST_SEQUENCE_ID), get(EXT_CHUNK), get(EXT_WHOLE))
    return mark, packed, None if known == BatchExtensions() else known
