"""Frames of Pulsar's protocol that somebody changed: any command, any values, lies, bytes that were flipped."""

from __future__ import annotations

import random
from typing import Any

from magnetar.broker.listeners.pulsar.connection import COMMANDS
from magnetar.broker.listeners.pulsar.requests import ROWS
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.commands import FIELDS
from magnetar.proto.pulsar.frames import encode_frame
from support.pulsar_lies import REFUSED, STORED
from support.pulsar_messages import batch, frame, single

__all__ = ["HELLO", "any_frame", "command_frame"]

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


def any_frame(rng: random.Random) -> bytes:
    """One, which may be whole."""
    kind = rng.choice(list(FIELDS)) if rng.random() < 0.05 else rng.choice(OF_CLIENTS)
    command = wire.BaseCommand(type=kind)  # type: ignore[arg-type]
    part = getattr(command, FIELDS[kind])
    part.SetInParent()
    _fill(part, rng)
    rest = b""
    if kind == wire.BaseCommand.SEND:
        number = rng.randrange(4)
        part.Clear()
        part.producer_id, part.sequence_id = rng.randrange(1, 3), number
        content = [frame(b"x", sequence_id=number), batch([single(b"a"), single(b"b")], sequence_id=number)]
        rest = rng.choice(LIES) if rng.random() < 0.4 else rng.choice([*content, b"", rng.randbytes(20)])
    if kind == wire.BaseCommand.PRODUCER and part.topic == "shared":
        part.ClearField("producer_access_mode")  # or nobody else could send there
    data = bytearray(encode_frame(command.SerializePartialToString(), rest))
    if len(data) < 10_000 and rng.random() < 0.1:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif rng.random() < 0.02:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


def command_frame(name: str, **fields: Any) -> bytes:
    """A command as it should be."""
    part = getattr(wire, "Command" + name.title().replace("_", ""))(**fields)
    command = wire.BaseCommand(type=name, **{name.lower(): part})
    return encode_frame(command.SerializeToString())


HELLO = command_frame("CONNECT", client_version="fuzz", protocol_version=21)
