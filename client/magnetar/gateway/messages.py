"""Messages as JSON, as Pulsar's WebSocket API and REST have them; ids are the base64 of their bytes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final, TypeVar

import msgspec

from magnetar.client import Message, MessageId
from magnetar.client.chunked_id import ChunkedMessageId
from magnetar.client.options import Start
from magnetar.proto.commands import ACK_ROW, AckRow, decode_rows, encode_rows
from magnetar.proto.errors import InvalidArgument, MagnetarError, MalformedFrame

T = TypeVar("T")
Names = Mapping[str, str]  # what a path says
_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_ID_BYTES: Final = 24
_LAST_DAY_MS: Final = 253_402_300_799_999  # of the year 9999: what a date can be


class Outgoing(msgspec.Struct, rename="camel"):
    """A message to be sent. `payload` is base64 on a WebSocket and text in REST, which has `payloadBase64` for
    bytes that are no text. Neither: a tombstone."""

    payload: str | None = None
    payload_base64: str | None = None
    key: str | None = None
    properties: dict[str, str] = {}
    event_time: _Int64 | None = None  # ms since the epoch, as deliver_at
    sequence_id: _Int64 | None = None
    deliver_at: _Int64 | None = None
    deliver_after: _Int64 | None = None  # ms
    context: str | None = None  # comes back with the answer

    def text(self) -> bytes | None:
        """The value in REST. Raises InvalidArgument."""
        if self.payload_base64 is not None:
            return from_base64(self.payload_base64, "payloadBase64")
        return None if self.payload is None else self.payload.encode()

    def fields(self) -> dict[str, Any]:
        """As `Producer.send` takes them."""
        found = {
            "key": self.key,
            "properties": self.properties or None,
            "event_time": self.event_time,
            "sequence_id": self.sequence_id,
            "deliver_at": self.deliver_at,
            "deliver_after": None if self.deliver_after is None else self.deliver_after / 1000,
        }
        return {name: value for name, value in found.items() if value is not None}


class Published(msgspec.Struct, rename="camel"):
    """The body of a request to publish."""

    messages: list[Outgoing]
    producer_name: str | None = None  # by which what is sent again is recognized, with sequence ids


def topic_of(names: Names) -> str:
    """The full name."""
    return "{domain}://{tenant}/{namespace}/{topic}".format_map(names)


def decoded(body: bytes | str, type: type[T]) -> T:
    """Raises MalformedFrame."""
    try:
        return msgspec.json.decode(body, type=type)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MalformedFrame(f"this is not the JSON that is wanted here: {error}") from None


def from_base64(text: str, what: str) -> bytes:
    """Raises InvalidArgument."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgument(f"{what} is not base64: {text[:80]!r}") from None


def id_text(message_id: MessageId) -> str:
    """Of an id; of a message in chunks it says where they are, so that it can be acknowledged by anybody."""
    chunks: list[AckRow] = getattr(message_id, "chunks", [])
    return base64.b64encode(message_id.to_bytes() + encode_rows(ACK_ROW, chunks)).decode()


def id_of(text: str) -> MessageId:
    """Raises InvalidArgument, MalformedFrame."""
    data = from_base64(text, "messageId")
    first, rows = MessageId.from_bytes(data[:_ID_BYTES]), data[_ID_BYTES:]
    return (
        first
        if not rows
        else ChunkedMessageId.of(first, [AckRow(*row) for row in decode_rows(ACK_ROW, rows)])
    )


def start_of(text: str) -> Start:
    """`earliest`, `latest`, ms since the epoch or an id."""
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    return int(text) if text.isdecimal() and len(text) <= 15 else id_of(text)


def received(message: Message) -> dict[str, Any]:
    """As a consumer gets it."""
    found: dict[str, Any] = {
        "messageId": id_text(message.id),
        "payload": None if message.value is None else base64.b64encode(message.value).decode(),
        "properties": dict(message.properties),
        "publishTime": datetime.fromtimestamp(min(message.publish_time, _LAST_DAY_MS) / 1000, UTC).isoformat(
            timespec="milliseconds"
        ),
        "redeliveryCount": message.redelivery_count,
    }
    if message.key is not None:
        found["key"] = message.key if isinstance(message.key, str) else base64.b64encode(message.key).decode()
    if message.event_time is not None:
        found["eventTime"] = message.event_time
    return found


def failed(error: MagnetarError) -> dict[str, Any]:
    """Of a message that was not stored."""
    return {"messageId": None, "errorCode": error.code, "errorMsg": error.message}


def stored(message_id: MessageId) -> dict[str, Any]:
    """Of one that was."""
    return {"messageId": id_text(message_id), "errorCode": 0, "errorMsg": None}
