"""What stands before Pulsar's payloads, MessageMetadata and SingleMessageMetadata, without the protobuf runtime.

Field numbers and types are the protocol; fields that nobody asks for are passed over, as protobuf does with unknown ones. A
field that is not there is None, and encoding leaves it out: for some of them, as `num_messages_in_batch`, it matters whether
they are there. Of a field that is there twice the last one counts.

>>> metadata = MessageMetadata(producer_name="p", sequence_id=7, publish_time=1000, properties={"a": "1"})
>>> encode(metadata).hex()
'0a0170100718e80722060a0161120131'
>>> decode_message_metadata(encode(metadata)) == metadata
True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from ..errors import MalformedFrame

_MASK = (1 << 64) - 1


class MessageMetadata(NamedTuple):
    """Of an entry of Pulsar: one message, or a batch. Times in ms since the epoch, sizes in bytes."""

    producer_name: str | None = None
    sequence_id: int | None = None
    publish_time: int | None = None
    properties: Mapping[str, str] | None = None
    partition_key: bytes | None = None
    compression: int | None = None
    uncompressed_size: int | None = None
    num_messages_in_batch: int | None = None
    event_time: int | None = None
    encryption_keys: list[bytes] | None = None  # as they stand there
    schema_version: bytes | None = None
    partition_key_b64_encoded: bool | None = None
    deliver_at_time: int | None = None
    highest_sequence_id: int | None = None
    null_value: bool | None = None
    uuid: str | None = None
    num_chunks_from_msg: int | None = None
    total_chunk_msg_size: int | None = None
    chunk_id: int | None = None
    null_partition_key: bool | None = None


class SingleMessageMetadata(NamedTuple):
    """Of one message in a batch."""

    properties: Mapping[str, str] | None = None
    partition_key: bytes | None = None
    payload_size: int | None = None
    compacted_out: bool | None = None
    event_time: int | None = None
    partition_key_b64_encoded: bool | None = None
    sequence_id: int | None = None
    null_value: bool | None = None
    null_partition_key: bool | None = None


# --- varints and fields ----------------------------------------------------------------------------------------------

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types: the low three bits of a tag


def varint(number: int) -> bytes:
    """A number of 64 bits, of which a negative one is the complement."""
    number &= _MASK
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where it ends. Raises MalformedFrame for one of more than ten bytes, IndexError."""
    number = shift = 0
    for place in range(at, at + 10):
        byte = data[place]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & _MASK, place + 1
        shift += 7
    raise MalformedFrame("a number of protobuf is longer than ten bytes")


def raw_fields(data: bytes, repeated: tuple[int, ...] = ()) -> dict[int, Any]:
    """The fields of a message by tag (number << 3 | wire type): int, bytes, and of the `repeated` tags a list of them.

    Raises MalformedFrame. 150 ns a field.
    """
    found: dict[int, Any] = {}
    at, end = 0, len(data)
    try:
        while at < end:
            tag = data[at]
            at += 1
            if tag > 0x7F:
                tag, at = read_varint(data, at - 1)
            kind = tag & 7
            if kind == VARINT or kind == BYTES:  # noqa: SIM109 (no tuple is made)
                value: Any = data[at]
                at += 1
                if value > 0x7F:
                    value, at = read_varint(data, at - 1)
                if kind == BYTES:
                    at += value
                    value = data[at - value : at]
            elif kind == FIXED64 or kind == FIXED32:  # noqa: SIM109
                at += 8 if kind == FIXED64 else 4
                value = None
            else:
                raise MalformedFrame(f"protobuf has no wire type {kind} here")
            if tag < 8 or tag > 0xFFFFFFFF:
                raise MalformedFrame("protobuf has no such field number")
            if tag in repeated:
                found.setdefault(tag, []).append(value)
            else:
                found[tag] = value
    except IndexError:
        at = end + 1
    if at != end:
        raise MalformedFrame("a message of protobuf is cut short")
    return found


# --- kinds of fields -------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    wire_type: int
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    repeated: bool = False


def signed(number: int, bits: int) -> int:
    """What a varint means in a field of so many bits with a sign."""
    half = 1 << bits - 1
    return (number + half & (half << 1) - 1) - half


def text(data: bytes) -> str:
    """UTF-8, which clients in some languages do not check: what is none of it is replaced."""
    return data.decode(errors="replace")


def _same(value: Any) -> Any:
    return value


def read_properties(pairs: list[bytes]) -> dict[str, str]:
    """From the KeyValues of a message."""
    rows = map(raw_fields, pairs)
    return {text(row.get(_KEY, b"")): text(row.get(_VALUE, b"")) for row in rows}


def write_properties(properties: Mapping[str, str]) -> list[bytes]:
    """As KeyValues."""
    rows = ((key.encode(), value.encode()) for key, value in properties.items())
    return [
        b"".join((b"\x0a", varint(len(key)), key, b"\x12", varint(len(value)), value)) for key, value in rows
    ]


_KEY, _VALUE = 1 << 3 | BYTES, 2 << 3 | BYTES  # of KeyValue

_TEXT = _Kind(BYTES, text, str.encode)
_BYTES = _Kind(BYTES, _same, _same)
_LIST = _Kind(BYTES, _same, _same, repeated=True)
_MAP = _Kind(BYTES, read_properties, write_properties, repeated=True)
_UINT64 = _Kind(VARINT, _same, _same)
_UINT32 = _Kind(VARINT, lambda number: number & 0xFFFFFFFF, _same)
_INT32 = _Kind(VARINT, partial(signed, bits=32), _same)
_INT64 = _Kind(VARINT, partial(signed, bits=64), _same)
_BOOL = _Kind(VARINT, bool, int)


class _Field(NamedTuple):
    name: str
    tag: int
    kind: _Kind


def _fields(message: type[Any], *kinds: tuple[int, _Kind]) -> tuple[_Field, ...]:
    """In the order in which the class has them, and protobuf writes them."""
    names = message._fields
    assert len(names) == len(kinds)
    return tuple(
        _Field(name, number << 3 | kind.wire_type, kind) for name, (number, kind) in zip(names, kinds)
    )


_TABLES: dict[type[Any], tuple[_Field, ...]] = {
    MessageMetadata: _fields(
        MessageMetadata,
        (1, _TEXT), (2, _UINT64), (3, _UINT64), (4, _MAP), (6, _BYTES), (8, _INT32), (9, _UINT32), (11, _INT32),
        (12, _UINT64), (13, _LIST), (16, _BYTES), (17, _BOOL), (19, _INT64), (24, _UINT64), (25, _BOOL), (26, _TEXT),
        (27, _INT32), (28, _INT32), (29, _INT32), (30, _BOOL),
    ),
    SingleMessageMetadata: _fields(
        SingleMessageMetadata,
        (1, _MAP), (2, _BYTES), (3, _INT32), (4, _BOOL), (5, _UINT64), (6, _BOOL), (8, _UINT64), (9, _BOOL), (10, _BOOL),
    ),
}  # fmt: skip
_REPEATED = {
    message: tuple(field.tag for field in table if field.kind.repeated) for message, table in _TABLES.items()
}


def _decode(message: type[Any], data: bytes) -> Any:
    found = raw_fields(data, _REPEATED[message])
    get = found.get
    return message._make(
        [None if (value := get(tag)) is None else kind.read(value) for _, tag, kind in _TABLES[message]]
    )


def decode_message_metadata(data: bytes) -> MessageMetadata:
    """Raises MalformedFrame. 4 us: hot paths ask `raw_fields` for what they need."""
    found: MessageMetadata = _decode(MessageMetadata, data)
    return found


def decode_single_metadata(data: bytes) -> SingleMessageMetadata:
    """Raises MalformedFrame."""
    found: SingleMessageMetadata = _decode(SingleMessageMetadata, data)
    return found


def encode(message: MessageMetadata | SingleMessageMetadata) -> bytes:
    """As protobuf writes it: by field number."""
    parts: list[bytes] = []
    for value, (_, tag, kind) in zip(message, _TABLES[type(message)]):
        if value is not None:
            start = varint(tag)
            written = kind.write(value)
            for one in written if kind.repeated else (written,):
                if kind.wire_type == BYTES:
                    parts += (start, varint(len(one)), one)
                else:
                    parts += (start, varint(one))
    return b"".join(parts)
