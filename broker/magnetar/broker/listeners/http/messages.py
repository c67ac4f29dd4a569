"""Messages as Pulsar's tools read them over HTTP: the value is the body, the rest stands in X-Pulsar-... headers.

Of an entry with several messages, asked for as a whole, the body is what a Pulsar client sends as a batch, which its tools
take apart: for each message the length of its metadata (u32), the metadata (protobuf SingleMessageMetadata), the value.
"""

from __future__ import annotations

import base64
import struct
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from magnetar.proto.batch import META_EVENT_TIMES_MS, META_PROPERTIES, META_SEQUENCE_IDS, Key, decode_batch
from magnetar.proto.batch_extensions import EXT_DELIVER_AT_MS
from magnetar.proto.errors import MessageLost

from ...service.admin import FoundMessage
from .shapes import iso


class _Message(NamedTuple):
    value: bytes | None
    key: Key
    properties: dict[str, str]
    event_time_ms: int
    sequence_id: int
    publish_time_ms: int
    producer: str
    deliver_at_ms: int


def response(found: FoundMessage) -> web.Response:
    """One message, or all of an entry. Raises MessageLost for an index that the entry does not have."""
    messages = _messages(found)
    if found.number is not None:
        base = found.entry.base_index
        if not 0 <= found.number - base < len(messages):
            raise MessageLost(
                f"entry {found.entry_id} of ledger {found.ledger_id} has no message {found.number}"
            )
        messages = [messages[found.number - base]]
    first = messages[0]
    place = f"{found.ledger_id}:{found.entry_id}"
    if found.number is not None and found.entry.message_count > 1:
        place += f":{found.number}"
    body = first.value or b"" if len(messages) == 1 else b"".join(map(_single, messages))
    headers = {
        "X-Pulsar-Message-ID": place,
        "X-Pulsar-publish-time": iso(first.publish_time_ms),
        "X-Pulsar-producer-name": _text(first.producer),
        "X-Pulsar-sequence-id": str(first.sequence_id),
        "X-Pulsar-uncompressed-size": str(len(body)),
        "X-Pulsar-Is-Encrypted": "false",
        "X-Pulsar-txn-uncommitted": "false",
    }
    if len(messages) > 1:
        headers["X-Pulsar-num-batch-message"] = str(len(messages))
    else:
        headers["X-Pulsar-PROPERTY"] = _text(msgspec.json.encode(first.properties).decode())
        headers |= _of_one(first)
    return web.Response(body=body, headers=headers, content_type="application/octet-stream")


def _of_one(message: _Message) -> dict[str, str]:
    found = {}
    if message.key is not None:
        encoded = isinstance(message.key, bytes) or not (message.key.isascii() and message.key.isprintable())
        raw = message.key if isinstance(message.key, bytes) else message.key.encode()
        found["X-Pulsar-partition-key"] = base64.b64encode(raw).decode() if encoded else raw.decode()
        found["X-Pulsar-partition-key-b64-encoded"] = str(encoded).lower()
    if message.event_time_ms:
        found["X-Pulsar-event-time"] = iso(message.event_time_ms)
    if message.deliver_at_ms:
        found["X-Pulsar-deliver-at-time"] = iso(message.deliver_at_ms)
    if message.value is None:
        found["X-Pulsar-null-value"] = "true"
    return found


def _text(text: str) -> str:
    """A header has no other letters; in JSON they can be written otherwise."""
    return "".join(
        letter if " " <= letter <= "~" else "".join(f"\\u{unit:04x}" for unit in _units(letter))
        for letter in text
    )


def _units(letter: str) -> tuple[int, ...]:
    data = letter.encode("utf-16-be", "surrogatepass")
    return struct.unpack(f">{len(data) // 2}H", data)


def _messages(found: FoundMessage) -> list[_Message]:
    entry = found.entry
    messages: list[_Message] = []
    for position in range(entry.batch_count):
        start, end = entry.batch_bounds(position)
        if end == start:  # left out: all of it is acknowledged
            messages += [_NOTHING] * (entry.end_indexes[position] - entry.batch_start_index(position))
            continue
        batch = decode_batch(entry.data, start)
        columns: dict[int, list[Any]] = dict(batch.metadata or {})
        count, header = batch.header.message_count, batch.header
        absent: list[Any] = [None] * count
        ids = columns.get(META_SEQUENCE_IDS) or range(header.sequence_id, header.sequence_id + count)
        rows = zip(
            batch.values, batch.keys or absent, columns.get(META_PROPERTIES, absent),
            columns.get(META_EVENT_TIMES_MS, absent), ids, strict=True,
        )  # fmt: skip
        producer = entry.producer_names[entry.producers[position]]
        deliver_at_ms = batch.extensions.get(EXT_DELIVER_AT_MS, 0)
        messages += [
            _Message(
                value,
                key,
                dict(properties or {}),
                event_ms or 0,
                number,
                header.publish_time_ms,
                producer,
                deliver_at_ms,
            )
            for value, key, properties, event_ms, number in rows
        ]
    return messages


_NOTHING = _Message(None, None, {}, 0, 0, 0, "", 0)

# --- a batch of Pulsar ------------------------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _single(message: _Message) -> bytes:
    """A message with its SingleMessageMetadata: properties 1, partition_key 2, payload_size 3, event_time 5,
    partition_key_b64_encoded 6, sequence_id 8, null_value 9.
    """
    value = message.value or b""
    fields = [
        _bytes_field(1, _bytes_field(1, key.encode()) + _bytes_field(2, text.encode()))
        for key, text in message.properties.items()
    ]
    if message.key is not None:
        encoded = isinstance(message.key, bytes)
        key = base64.b64encode(message.key) if isinstance(message.key, bytes) else message.key.encode()
        fields += [_bytes_field(2, key), _varint(6 << 3) + _varint(encoded)]
    fields.append(_varint(3 << 3) + _varint(len(value)))
    if message.event_time_ms:
        fields.append(_varint(5 << 3) + _varint(message.event_time_ms))
    fields.append(_varint(8 << 3) + _varint(message.sequence_id))
    if message.value is None:
        fields.append(_varint(9 << 3) + _varint(1))
    metadata = b"".join(fields)
    return struct.pack(">I", len(metadata)) + metadata + value
