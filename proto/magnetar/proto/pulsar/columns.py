"""The columns of batch format 2: what a producer of Pulsar sent, as native consumers, Spark and compaction see it.

    0x0e01 | crc32c | u32 | MessageMetadata | the value of one message                                        (unbatched)
                                            | n times: u32 | SingleMessageMetadata | value                    (a batch)

What follows the metadata is compressed as a whole; of a message in chunks the value is, which is whole once it was put
together. What cannot be read here: a batch that its producer encrypted.

What is no time (0, or behind the year 9999) or no sequence id counts as absent; bytes that are no UTF-8 are replaced in
properties, and such a key stays bytes.
"""

from __future__ import annotations

import binascii
import contextlib
import struct
from functools import cached_property
from itertools import repeat
from typing import NamedTuple, TypeVar

from ..compression import Compression, decompress_raw
from ..errors import MalformedFrame
from ..message_rules import MAX_SEQUENCE_ID, MAX_TIME_MS
from .metadata import (
    MessageMetadata,
    SingleMessageMetadata,
    decode_message_metadata,
    decode_single_metadata,
    read_varint,
)

T = TypeVar("T")

# CompressionType of Pulsar.
CODECS = {
    0: Compression.NONE,
    1: Compression.LZ4,
    2: Compression.ZLIB,
    3: Compression.ZSTD,
    4: Compression.SNAPPY,
}
_MAGIC = b"\x0e\x01"
_HEAD = struct.Struct(">2s4xI")  # magic, checksum, size of the metadata
_SIZE = struct.Struct(">I")
_SEQUENCE_ID = b"\x40"  # the tag in SingleMessageMetadata
# By length: which bits of a varint's bytes say that it goes on, and which of them are set.
_NO_VARINT = (0, 1)
_GOES_ON = {n: (0x8080808080 >> 8 * (5 - n), 0x8080808080 >> 8 * (6 - n)) for n in range(1, 6)}


class _Head(NamedTuple):
    """What a message of a batch has beside its sequence id."""

    size: int
    is_null: bool
    key: str | bytes | None
    properties: dict[str, str] | None
    event_time_ms: int | None
    sequence_id: int | None


def metadata_of(body: bytes) -> tuple[MessageMetadata, int]:
    """The metadata, and where what follows it begins. Raises MalformedFrame."""
    try:
        magic, size = _HEAD.unpack_from(body)
    except struct.error:
        magic, size = b"", 0
    start = _HEAD.size + size
    if magic != _MAGIC or start > len(body):
        raise MalformedFrame("a batch of Pulsar is cut short")
    return decode_message_metadata(body[_HEAD.size : start]), start


def without_payload(body: bytes) -> bytes:
    """What is left of an unbatched message without its value; of a batch all, whose metadata stands between the values."""
    metadata, start = metadata_of(body)
    return body if metadata.num_messages_in_batch is not None else body[:start]


def key_bytes(key: bytes, *, encoded: bool) -> bytes:
    """A partition key as its hash takes it. What is not base64, though it should be, stays as it is."""
    try:
        return binascii.a2b_base64(key, strict_mode=True) if encoded else key
    except binascii.Error:
        return key


class PulsarColumns:
    """The messages of a batch of format 2, decoded when they are asked for. Raises MalformedFrame."""

    def __init__(self, body: bytes, count: int, *, is_chunk: bool) -> None:
        """`body`: from 0x0e01 on."""
        self._body = body
        self._count = count
        self._is_chunk = is_chunk
        self._metadata, self._start = metadata_of(body)
        self._batched = self._metadata.num_messages_in_batch is not None
        if count != (self._metadata.num_messages_in_batch or 1):
            raise MalformedFrame("a batch of Pulsar has not the messages that its header says")

    @property
    def values(self) -> list[bytes | None]:
        """One a message, None for a null value; of a chunk its part, as it is."""
        if self._batched:
            return self._messages[1]
        return [None if self._metadata.null_value else self._payload]

    @property
    def keys(self) -> list[str | bytes | None] | None:
        """None: no message has one."""
        return _unless_absent([head.key for head in self._heads])

    @property
    def properties(self) -> list[dict[str, str] | None] | None:
        """The same."""
        return _unless_absent([head.properties for head in self._heads])

    @property
    def event_times_ms(self) -> list[int | None] | None:
        """The same."""
        return _unless_absent([head.event_time_ms for head in self._heads])

    @property
    def sequence_ids(self) -> list[int] | None:
        """None: they count up from that of the batch."""
        if not self._batched:
            return None
        heads, _, tails = self._messages
        first = self._metadata.sequence_id or 0
        found = [
            read_varint(tail, 0)[0] if tail else first if head.sequence_id is None else head.sequence_id
            for head, tail in zip(heads, tails)
        ]
        if max(found) > MAX_SEQUENCE_ID:
            found = [one if one <= MAX_SEQUENCE_ID else first for one in found]
        return None if found == list(range(first, first + self._count)) else found

    @cached_property
    def _payload(self) -> bytes:
        metadata = self._metadata
        if metadata.encryption_keys:
            raise MalformedFrame(
                "a batch was encrypted by its producer: only consumers of Pulsar's protocol that have its key can read it"
            )
        payload = self._body[self._start :]
        if self._is_chunk or not metadata.compression:
            return payload
        codec = CODECS.get(metadata.compression)
        if codec is None:
            raise MalformedFrame(f"compression {metadata.compression} of Pulsar is not known here")
        return decompress_raw(codec, payload, metadata.uncompressed_size or 0)

    @property
    def _heads(self) -> list[_Head]:
        return self._messages[0] if self._batched else [_head_of(self._metadata, 0, is_null=False)]

    @cached_property
    def _messages(self) -> tuple[list[_Head], list[bytes | None], list[bytes]]:
        """Of a batch: what each has beside its value, its value, and its sequence id, a varint (empty: the head has it)."""
        payload = self._payload
        heads, values, tails = list[_Head](), list[bytes | None](), list[bytes]()
        # Producers write the sequence id last as a rule, and what stands before it is the same in many messages.
        known: dict[bytes, _Head] = {}
        at, unpack = 0, _SIZE.unpack_from
        try:
            for _ in repeat(None, self._count):
                (size,) = unpack(payload, at)
                start = at + 4 + size
                written = payload[at + 4 : start]
                common, _, tail = written.rpartition(_SEQUENCE_ID)
                mask, goes_on = _GOES_ON.get(len(tail), _NO_VARINT)
                if int.from_bytes(tail, "little") & mask != goes_on:
                    common, tail = written, b""
                if (head := known.get(common)) is None:
                    try:
                        head = known[common] = _head(common)
                    except MalformedFrame:
                        if not tail:
                            raise
                        common, tail = written, b""  # what was taken for a tag is a byte of another field
                        head = known[common] = _head(common)
                at = start + head.size
                heads.append(head)
                tails.append(tail)
                values.append(None if head.is_null else payload[start:at])
        except struct.error:
            at = -1
        if at != len(payload):
            raise MalformedFrame("the messages of a batch of Pulsar do not fill it")
        return heads, values, tails


def _unless_absent(found: list[T]) -> list[T] | None:
    return None if all(one is None for one in found) else found


def _head(written: bytes) -> _Head:
    metadata = decode_single_metadata(written)
    if metadata.payload_size is None or metadata.payload_size < 0:
        raise MalformedFrame("a message in a batch of Pulsar does not say its size")
    return _head_of(
        metadata, metadata.payload_size, is_null=bool(metadata.null_value or metadata.compacted_out)
    )


def _head_of(metadata: MessageMetadata | SingleMessageMetadata, size: int, *, is_null: bool) -> _Head:
    key: str | bytes | None = None
    if metadata.partition_key is not None and not metadata.null_partition_key:
        key = written = key_bytes(metadata.partition_key, encoded=bool(metadata.partition_key_b64_encoded))
        if not metadata.partition_key_b64_encoded:
            with contextlib.suppress(UnicodeDecodeError):
                key = written.decode()
    time_ms = metadata.event_time
    return _Head(
        size,
        is_null,
        key,
        dict(metadata.properties) if metadata.properties else None,
        time_ms if time_ms and time_ms <= MAX_TIME_MS else None,
        metadata.sequence_id,
    )
