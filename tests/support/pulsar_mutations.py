"""Frames of Pulsar's protocol that somebody changed: any command, any values, lies, and all of `MUTATIONS`."""

from __future__ import annotations

import random
from typing import Any

from magnetar.broker.listeners.pulsar.connection import COMMANDS
from magnetar.broker.listeners.pulsar.requests import ROWS
from magnetar.proto.frames import DEFAULT_MAX_MESSAGE_BYTES
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.commands import FIELDS
from magnetar.proto.pulsar.crc import MAGIC
from magnetar.proto.pulsar.frames import FRAME_OVERHEAD_BYTES, encode_frame
from magnetar.proto.pulsar.metadata import varint
from support.pulsar_lies import REFUSED, STORED
from support.pulsar_messages import batch, frame, single

__all__ = ["HELLO", "any_frame", "command_frame"]

LONGEST_FRAME = DEFAULT_MAX_MESSAGE_BYTES + FRAME_OVERHEAD_BYTES  # as a service has it by default
LIES = [*REFUSED.values(), *STORED.values()]
IDS = [0, 1, 2, 1 << 19, 1 << 20, 2**31, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
OF_CLIENTS = [kind for kind, name in FIELDS.items() if name in ROWS or name in COMMANDS or name == "send"]
TOPICS = ["orders", "orders-partition-0", "non-persistent://public/default/np", "a/b", "", "shared"]


def _value_of(field: Any, rng: random.Random) -> Any:
    if field.name.endswith("_id") and field.name not in ("request_id", "ledger_id", "entry_id"):
        return rng.randrange(1, 3)
    if field.name in ("ledger_id", "entry_id"):
        return rng.choice(IDS)
    match field.cpp_type:
        case field.CPPTYPE_STRING if field.type == field.TYPE_BYTES:
            return rng.randbytes(3)
        case field.CPPTYPE_STRING:
            return (
                rng.choice(TOPICS)
                if field.name == "topic"
                else rng.choice(["", "s", "public/default", "a.*", "("])
            )
        case field.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case field.CPPTYPE_ENUM:
            return rng.choice([one.number for one in field.enum_type.values])
        case field.CPPTYPE_DOUBLE:
            return rng.random()
        case field.CPPTYPE_UINT64 | field.CPPTYPE_UINT32:
            return rng.choice([0, 1, 2, 100, 2**31 - 1, 2**32 - 1])
        case field.CPPTYPE_INT64:
            return rng.choice([-(2**63), -1, 0, 1, 2**63 - 1])
    return rng.choice([-(2**31), -1, 0, 1, 2, 2**31 - 1])


def _fill(message: Any, rng: random.Random, depth: int = 0) -> None:
    for field in message.DESCRIPTOR.fields:
        if not field.is_required and rng.random() < 0.6:
            continue
        if field.message_type is not None:
            if depth < 2:
                part = getattr(message, field.name)
                for one in [part.add() for _ in range(2)] if field.is_repeated else [part]:
                    one.SetInParent()
                    _fill(one, rng, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend([_value_of(field, rng)])
        else:
            setattr(message, field.name, _value_of(field, rng))


def _content(sequence_id: int, rng: random.Random) -> bytes:
    """Of a SEND: a message, a batch, a lie, noise, nothing."""
    if rng.random() < 0.4:
        return rng.choice(LIES)
    whole = [
        frame(b"x", sequence_id=sequence_id),
        batch([single(b"a"), single(b"b")], sequence_id=sequence_id),
    ]
    return rng.choice([*whole, b"", rng.randbytes(20)])


def _command(rng: random.Random) -> tuple[wire.BaseCommand, bytes]:
    """Any one with any values, and what stands behind it."""
    kind = rng.choice(list(FIELDS)) if rng.random() < 0.02 else rng.choice(OF_CLIENTS)
    command = wire.BaseCommand(type=kind)  # type: ignore[arg-type]
    part = getattr(command, FIELDS[kind])
    part.SetInParent()
    _fill(part, rng)
    if kind == wire.BaseCommand.PRODUCER and part.topic == "shared":
        part.ClearField("producer_access_mode")  # or nobody else could send there
    if kind != wire.BaseCommand.SEND:
        return command, b""
    number = rng.randrange(4)
    part.Clear()
    part.producer_id, part.sequence_id = rng.randrange(1, 3), number
    return command, _content(number, rng)


def _whole(command: wire.BaseCommand, rest: bytes, rng: random.Random) -> bytes:
    return encode_frame(command.SerializePartialToString(), rest)


def _flipped(command: wire.BaseCommand, rest: bytes, rng: random.Random) -> bytes:
    """A few bytes, of any of its parts."""
    data = bytearray(_whole(command, rest[:10_000], rng))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _wrong_checksum(command: wire.BaseCommand, rest: bytes, rng: random.Random) -> bytes:
    """Of a SEND whose metadata and payload are as they were; of another command, in front of nothing."""
    content = rest[6:] if rest[:2] == MAGIC else rest
    return _whole(command, MAGIC + rng.randbytes(4) + content, rng)


def _unknown_field(command: wire.BaseCommand, rest: bytes, rng: random.Random) -> bytes:
    """One of each kind that protobuf has, behind the part of the command or within it; also one that is too long."""
    number = rng.choice([15, 77, 1000, 2**29 - 1])
    values = (0, varint(2**64 - 1)), (1, bytes(8)), (2, varint(3) + b"abc"), (5, bytes(4)), (2, varint(2**40))
    ((kind, value),) = rng.choices(values, (10, 10, 10, 10, 1))
    field = varint(number << 3 | kind) + value
    if rng.random() < 0.5:
        return encode_frame(command.SerializePartialToString() + field, rest)
    name = FIELDS[command.type]
    within = getattr(command, name).SerializePartialToString() + field
    part = wire.BaseCommand.DESCRIPTOR.fields_by_name[name].number
    return encode_frame(
        _typed(command.type) + varint(part << 3 | 2) + varint(len(within)) + within,
        rest,
    )


def _part_of_another(command: wire.BaseCommand, rest: bytes, rng: random.Random) -> bytes:
    """Its type says what follows not."""
    part = command.SerializePartialToString()[2:]
    return encode_frame(_typed(rng.choice(list(FIELDS))) + part, rest)


def _unknown_command(command: wire.BaseCommand, rest: bytes, rng: random.Random) -> bytes:
    """A type that nobody has named, alone or in front of a part that is known."""
    kind = rng.choice([0, 1, max(FIELDS) + 1, 2**31 - 1, 2**32, 2**64 - 1])
    part = command.SerializePartialToString()[2:] if rng.random() < 0.5 else b""
    return encode_frame(_typed(kind) + part, rest)


def _another_size(command: wire.BaseCommand, rest: bytes, rng: random.Random) -> bytes:
    """Of the frame, or of its command."""
    data = _whole(command, rest, rng)
    size = rng.choice([0, 3, 4, len(data) - 5, len(data), LONGEST_FRAME, LONGEST_FRAME + 1, 2**31, 2**32 - 1])
    at = rng.choice([0, 4])
    return data[:at] + size.to_bytes(4) + data[at + 4 :]


def _cut(command: wire.BaseCommand, rest: bytes, rng: random.Random) -> bytes:
    """What follows is read as part of it."""
    data = _whole(command, rest, rng)
    return data[: rng.randrange(len(data))]


def _noise(command: wire.BaseCommand, rest: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(1, 100))


def _typed(kind: int) -> bytes:
    """The beginning of a command: its type, which is one byte where Pulsar has named it."""
    return b"\x08" + varint(kind)


# What is done to a frame, and how often of a hundred times. Behind the last ones no frame is read any more.
MUTATIONS = {
    _whole: 85,
    _flipped: 3,
    _wrong_checksum: 5,
    _unknown_field: 5,
    _part_of_another: 0.5,
    _unknown_command: 0.5,
    _another_size: 0.5,
    _cut: 0.3,
    _noise: 0.2,
}
_KINDS, _CHANCES = list(MUTATIONS), list(MUTATIONS.values())


def any_frame(rng: random.Random) -> bytes:
    """One, which may be whole."""
    command, rest = _command(rng)
    (mutate,) = rng.choices(_KINDS, _CHANCES)
    return mutate(command, rest, rng)


def command_frame(name: str, **fields: Any) -> bytes:
    """A command as it should be."""
    part = getattr(wire, "Command" + name.title().replace("_", ""))(**fields)
    command = wire.BaseCommand(type=name, **{name.lower(): part})
    return encode_frame(command.SerializeToString())


HELLO = command_frame("CONNECT", client_version="fuzz", protocol_version=21)
