"""Native batches as Pulsar's consumers read them: one message unbatched, more as a batch, or as several small ones.

>>> from magnetar.proto.batch import encode_batch
>>> batch = encode_batch([b"a", b"b"], sequence_id=7, publish_time_ms=1000, keys=["k", None])
>>> [(first, messages) for first, messages, _ in to_pulsar(batch, "p", 5_000_000)]
[(0, 2)]

Where a batch is cut depends on its messages and the limit alone, so whoever asks again gets the same slices.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

from ..batch import (
    CHECKSUM_END,
    FLAG_KEYED,
    META_EVENT_TIMES_MS,
    META_PROPERTIES,
    META_SEQUENCE_IDS,
    SINGLE_MARK,
    TEXT_KEY_MARK,
    DecodedBatch,
    Key,
    Properties,
)
from ..batch_extensions import (
    BATCH_HEADER_BYTES,
    EXT_SCHEMA_VERSION,
    EXT_UUID,
    UNDECODABLE,
    BatchExtensions,
    batch_extensions,
)
from ..errors import InvalidArgument, MagnetarError, MalformedFrame
from .columns import CODECS
from .crc import checksummed
from .metadata import MessageMetadata, encode, varint, write_properties

_CODEC_NUMBERS: dict[int, int] = {codec: number for number, codec in CODECS.items()}
_METADATA_BYTES = 256  # of a batch at most, beside the producer's name and the schema version
_PLAIN = struct.Struct(">24xQQI4x")  # of a batch header: sequence id, publish time, length of the keys
_PLAIN_MARKS = (SINGLE_MARK, TEXT_KEY_MARK)
_METADATA_LENGTH_AT, _NONE = 44, bytes(4)
_PLAIN_MARK_END = CHECKSUM_END + len(SINGLE_MARK)
_LOW = [bytes((number,)) for number in range(128)]
_LOW_OF_MORE = [bytes((number | 0x80,)) for number in range(128)]
_SEQUENCE_ID = b"\x40"  # the tag in SingleMessageMetadata
_NULL = -1  # in place of a size


class Slice(NamedTuple):
    """A part of a batch, or all of it, as one batch of Pulsar's."""

    first: int  # its first message, counted in the batch
    messages: int  # one: it is no batch
    data: bytes | memoryview  # what stands behind the command of a MESSAGE, from 0x0e01 on


def to_pulsar(batch: bytes | memoryview, producer_name: str, max_bytes: int) -> list[Slice]:
    """A native batch, whose checksum is not verified, in slices of at most `max_bytes` of messages, but one at least.

    Raises MalformedFrame, and InvalidArgument for a chunk of a message whose size nobody knew when it was sent. 0.3 us a
    message where keys, sizes and properties are few.
    """
    mark = batch[CHECKSUM_END:_PLAIN_MARK_END]
    if mark in _PLAIN_MARKS and batch[_METADATA_LENGTH_AT:BATCH_HEADER_BYTES] == _NONE:
        return [Slice(0, 1, _plain(bytes(batch), producer_name))]
    try:
        return _slices(batch, producer_name, max_bytes)
    except MagnetarError:
        raise
    except (*UNDECODABLE, AttributeError, IndexError) as error:  # no broker looks at keys when they come
        raise MalformedFrame(f"a batch has what no message may have: {error}") from error


def _slices(batch: bytes | memoryview, producer_name: str, max_bytes: int) -> list[Slice]:
    read = DecodedBatch(batch, 0, verify=False)
    header, values, metadata = read.header, read.values, read.metadata or {}
    n = header.message_count
    properties, times = metadata.get(META_PROPERTIES), metadata.get(META_EVENT_TIMES_MS)
    ids: Sequence[int] = metadata.get(META_SEQUENCE_IDS) or range(header.sequence_id, header.sequence_id + n)
    extensions = batch_extensions(batch, header.header_length) if read.extensions else BatchExtensions()
    common = MessageMetadata(
        producer_name=producer_name,
        sequence_id=header.sequence_id,
        publish_time=header.publish_time_ms,
        schema_version=read.extensions.get(EXT_SCHEMA_VERSION),
        deliver_at_time=extensions.deliver_at_ms,
    )

    def single(at: int) -> Slice:
        one = common._replace(
            sequence_id=ids[at],
            properties=properties[at] if properties else None,
            event_time=times[at] if times else None,
            null_value=True if values[at] is None else None,
            **_key_fields(read.keys[at] if read.keys else None),
            **_chunk_fields(extensions, producer_name, read.extensions.get(EXT_UUID)),
        )
        return Slice(at, 1, _frame(encode(one), values[at] or b""))

    if n == 1:
        return [single(0)]
    written = _counting(ids[0], n) if isinstance(ids, range) else list(map(varint, ids))
    parts = _in_batch(values, read.keys, properties, times, written)
    max_bytes -= _METADATA_BYTES + len(producer_name) + len(common.schema_version or b"")
    slices: list[Slice] = []
    for first, end, payload in _cuts(parts, n, max_bytes):
        if end == first + 1:
            slices.append(single(first))
            continue
        its = common._replace(
            sequence_id=ids[first], highest_sequence_id=ids[end - 1], num_messages_in_batch=end - first
        )
        slices.append(Slice(first, end - first, _frame(encode(its), payload)))
    return slices


def _plain(batch: bytes, producer_name: str) -> bytes:
    """A message that has a value, perhaps a text as its key, and nothing else: 2 us, where all others cost 15."""
    sequence_id, time_ms, key_length = _PLAIN.unpack_from(batch)
    value_end = len(batch) - key_length
    if value_end < BATCH_HEADER_BYTES:
        raise MalformedFrame("the columns of a batch are longer than the batch")
    metadata = b"".join((_of_producer(producer_name, time_ms), b"\x10", varint(sequence_id)))
    if batch[CHECKSUM_END + 1] & FLAG_KEYED:
        metadata = b"".join((metadata, b"\x32", varint(key_length), batch[value_end:]))
    return _frame(metadata, batch[BATCH_HEADER_BYTES:value_end])


@lru_cache(maxsize=256)
def _of_producer(name: str, publish_time_ms: int) -> bytes:
    return encode(MessageMetadata(producer_name=name, publish_time=publish_time_ms))


def _frame(metadata: bytes, payload: bytes) -> bytes:
    return checksummed(b"".join((len(metadata).to_bytes(4, "big"), metadata, payload)))


def _key_fields(key: Key) -> dict[str, Any]:
    """Of either metadata."""
    if isinstance(key, bytes):
        return {"partition_key": base64.b64encode(key), "partition_key_b64_encoded": True}
    return {} if key is None else {"partition_key": key.encode()}


def _chunk_fields(extensions: BatchExtensions, producer_name: str, uuid: bytes | None) -> dict[str, Any]:
    """`uuid`: the chunk came from a producer of Pulsar's and was archived, perhaps unlike others of its message."""
    chunk, whole = extensions.chunk, extensions.whole
    if chunk is None:
        return {}
    if whole is None:
        raise InvalidArgument(
            "a message in chunks was sent as a stream, and consumers of Pulsar's protocol have to know its size beforehand"
        )
    compression = {
        "compression": _CODEC_NUMBERS.get(whole.codec, whole.codec),
        "uncompressed_size": whole.raw_bytes,
    }
    return {
        "uuid": uuid.decode() if uuid else f"{producer_name}-{chunk.chunk_id.hex()}",
        "num_chunks_from_msg": whole.chunks,
        "total_chunk_msg_size": whole.size,
        "chunk_id": chunk.index,
        **(compression if whole.codec else {}),
    }


def _cuts(parts: list[bytes], n: int, max_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Slices of messages, each of three parts: the first message, the end, and their bytes."""
    payload = b"".join(parts)
    if len(payload) <= max_bytes:
        yield 0, n, payload
        return
    first = size = 0
    for at in range(n):
        added = sum(map(len, parts[3 * at : 3 * at + 3]))
        if size + added > max_bytes and at > first:
            yield first, at, b"".join(parts[3 * first : 3 * at])
            first, size = at, 0
        size += added
    yield first, n, b"".join(parts[3 * first :])


def _in_batch(
    values: Sequence[bytes | None],
    keys: Sequence[Key] | None,
    properties: Sequence[Properties | None] | None,
    times: Sequence[int | None] | None,
    sequence_ids: list[bytes],
) -> list[bytes]:
    """What a batch has of each message: size and metadata up to the sequence id, the sequence id, the value.

    Messages that are alike in all but the sequence id and the value share the first of these.
    """
    sizes = [_NULL if value is None else len(value) for value in values]
    shapes: list[Any] = list(zip(sizes, map(len, sequence_ids), keys or repeat(None)))
    if properties is not None or times is not None:
        maps = [tuple(one.items()) if one else None for one in properties or repeat(None, len(sizes))]
        shapes = [(*shape, *more) for shape, more in zip(shapes, zip(maps, times or repeat(None)))]
    heads = {shape: _head(*shape) for shape in dict.fromkeys(shapes)}
    parts = [b""] * (3 * len(sizes))
    parts[0::3] = map(heads.__getitem__, shapes)
    parts[1::3] = sequence_ids
    parts[2::3] = [value or b"" for value in values] if _NULL in sizes else values  # type: ignore[assignment]
    return parts


def _head(
    size: int,
    id_bytes: int,
    key: Key,
    properties: tuple[tuple[str, str], ...] | None = None,
    time_ms: int | None = None,
) -> bytes:
    """Built by hand: 2 us, where `encode` takes 10, for every key of a batch."""
    fields = [b"\x0a" + varint(len(pair)) + pair for pair in write_properties(dict(properties or ()))]
    fields += [
        b"\x30\x01" if value is True else b"\x12" + varint(len(value)) + value
        for value in _key_fields(key).values()
    ]
    fields.append(b"\x18" + varint(max(size, 0)))
    if time_ms is not None:
        fields.append(b"\x28" + varint(time_ms))
    if size == _NULL:
        fields.append(b"\x48\x01")
    encoded = b"".join(fields) + _SEQUENCE_ID
    return (len(encoded) + id_bytes).to_bytes(4, "big") + encoded


def _counting(first: int, messages: int) -> list[bytes]:
    """The varints of numbers that count up, of which 128 at a time differ in their first byte only: 40 ns each."""
    found: list[bytes] = []
    for high in range(first >> 7, (first + messages - 1 >> 7) + 1):
        low = max(first - (high << 7), 0)
        end = min(first + messages - (high << 7), 128)
        tail = varint(high)
        found += [one + tail for one in _LOW_OF_MORE[low:end]] if high else _LOW[low:end]
    return found
