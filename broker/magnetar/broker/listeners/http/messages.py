"""A message as Pulsar's tools read it over HTTP: the value is the body, the rest stands in X-Pulsar-... headers."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from magnetar.proto.batch import META_EVENT_TIMES_MS, META_PROPERTIES, META_SEQUENCE_IDS, decode_batch
from magnetar.proto.batch_extensions import EXT_DELIVER_AT_MS
from magnetar.proto.entry import Entry
from magnetar.proto.errors import MessageLost
from magnetar.proto.pulsar.metadata import SingleMessageMetadata, encode

from ...service.admin import FoundMessage
from .shapes import iso, packed_id


def response(found: FoundMessage, *, whole: bool = False) -> web.Response:
    """A message, or the `whole` batch that has it. Raises MessageLost for a number that there is not."""
    ledger, packed, index = packed_id(found)
    place = f"{ledger}:{packed}"
    if whole and index >= 0:
        rows = [_message(found.entry, number) for number in range(*found.batch)]
        body = b"".join(_in_batch(*row) for row in rows)
        return _response(body, {**rows[0][1], "Message-ID": place, "num-batch-message": str(len(rows))})
    value, headers = _message(found.entry, found.number)
    return _response(value or b"", {**headers, "Message-ID": place if index < 0 else f"{place}:{index}"})


def _message(entry: Entry, number: int) -> tuple[bytes | None, dict[str, str]]:
    """Its value, and its headers."""
    at = entry.batch_of(number)
    start, end = entry.batch_bounds(at) if at < entry.batch_count else (0, 0)
    if number < entry.base_index or end == start:
        raise MessageLost(f"this entry has no message {number}")
    batch, index = decode_batch(entry.data, start), number - entry.batch_start_index(at)
    value, key = batch.values[index], batch.keys[index] if batch.keys else None

    def column(which: int) -> Any:
        return batch.metadata[which][index] if batch.metadata and which in batch.metadata else None

    sequence_id, properties = column(META_SEQUENCE_IDS), column(META_PROPERTIES) or {}
    times = {
        "event-time": column(META_EVENT_TIMES_MS),
        "deliver-at-time": batch.extensions.get(EXT_DELIVER_AT_MS),
    }
    headers = {
        "PROPERTY": msgspec.json.encode(properties).decode(),
        "publish-time": iso(batch.header.publish_time_ms),
        "producer-name": entry.producer_names[entry.producers[at]],
        "sequence-id": str(batch.header.sequence_id + index if sequence_id is None else sequence_id),
        "uncompressed-size": str(len(value or b"")),
        "Is-Encrypted": "false",
        "txn-uncommitted": "false",
        **{name: iso(time_ms) for name, time_ms in times.items() if time_ms},
        **({"null-value": "true"} if value is None else {}),
    }
    if key is not None:
        raw = key.encode() if isinstance(key, str) else key
        plain = isinstance(key, str) and key.isascii() and key.isprintable()
        headers["partition-key"] = raw.decode() if plain else base64.b64encode(raw).decode()
        headers["partition-key-b64-encoded"] = str(not plain).lower()
    return value, headers


def _in_batch(value: bytes | None, headers: dict[str, str]) -> bytes:
    """As in a batch of Pulsar."""
    key = headers.get("partition-key")
    metadata = encode(
        SingleMessageMetadata(
            properties=msgspec.json.decode(headers["PROPERTY"], type=dict[str, str]),
            partition_key=None if key is None else key.encode(),
            payload_size=len(value or b""),
            partition_key_b64_encoded=None if key is None else headers["partition-key-b64-encoded"] == "true",
            sequence_id=int(headers["sequence-id"]),
            null_value=value is None,
        )
    )
    return len(metadata).to_bytes(4, "big") + metadata + (value or b"")


def _response(body: bytes, headers: Mapping[str, str]) -> web.Response:
    return web.Response(
        body=body,
        headers={f"X-Pulsar-{name}": _text(text) for name, text in headers.items()},
        content_type="application/octet-stream",
    )


def _text(text: str) -> str:
    """A header has printable ASCII alone; in JSON all else can be written otherwise."""
    units = text.encode("utf-16-be", "surrogatepass")
    numbers = (units[at] << 8 | units[at + 1] for at in range(0, len(units), 2))
    return "".join(chr(number) if 0x20 <= number < 0x7F else f"\\u{number:04x}" for number in numbers)
