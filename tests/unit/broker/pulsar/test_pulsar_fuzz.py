"""Frames that somebody changed, in every state of a connection: it alone is closed, and nothing is a defect of ours."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from typing import Any

import pytest

from magnetar.broker.listeners.pulsar.connection import COMMANDS
from magnetar.broker.listeners.pulsar.requests import ROWS
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.commands import FIELDS
from magnetar.proto.pulsar.frames import encode_frame
from support.long_form import LONG
from support.pulsar_messages import batch, frame, single
from support.pulsar_scenario import PulsarClient, pulsar_server
from support.virtual_time import in_virtual_time

CONNECTIONS = 300 * (LONG or 1)
FRAMES = 30
OF_CLIENTS = [kind for kind, name in FIELDS.items() if name in ROWS or name in COMMANDS or name == "send"]
TOPICS = ["orders", "persistent://public/default/other", "non-persistent://public/default/np", "a/b", ""]


def value_of(field: Any, rng: random.Random) -> Any:
    if field.name.endswith("_id") and field.name not in ("request_id", "ledger_id", "entry_id"):
        return rng.randrange(1, 3)
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
            return rng.choice([0, 1, 2, 100, 2**32 - 1])
    return rng.choice([-1, 0, 1, 2, 2**31 - 1])


def fill(message: Any, rng: random.Random, depth: int = 0) -> None:
    for field in message.DESCRIPTOR.fields:
        if not field.is_required and rng.random() < 0.6:
            continue
        if field.message_type is not None:
            if depth < 2:
                part = getattr(message, field.name)
                for one in [part.add() for _ in range(2)] if field.is_repeated else [part]:
                    one.SetInParent()
                    fill(one, rng, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend([value_of(field, rng)])
        else:
            setattr(message, field.name, value_of(field, rng))


def any_frame(rng: random.Random) -> bytes:
    kind = rng.choice(list(FIELDS)) if rng.random() < 0.05 else rng.choice(OF_CLIENTS)
    command = wire.BaseCommand(type=kind)  # type: ignore[arg-type]
    part = getattr(command, FIELDS[kind])
    part.SetInParent()
    fill(part, rng)
    rest = b""
    if kind == wire.BaseCommand.SEND:
        number = rng.randrange(4)
        part.Clear()
        part.producer_id, part.sequence_id = rng.randrange(1, 3), number
        content = [frame(b"x", sequence_id=number), batch([single(b"a"), single(b"b")], sequence_id=number)]
        rest = rng.choice([*content, b"", rng.randbytes(20)])
    data = bytearray(encode_frame(command.SerializePartialToString(), rest))
    if rng.random() < 0.1:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif rng.random() < 0.02:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


@in_virtual_time
async def fuzz(seed: int, connections: int) -> None:
    rng, answers = random.Random(seed), Counter[str]()
    async with pulsar_server() as (broker, server):
        bystander = await PulsarClient.connect(server)
        bystander.send("CONNECT", client_version="bystander", protocol_version=21)
        for _ in range(connections):
            client = await PulsarClient.connect(server)
            if rng.random() < 0.95:
                client.send("CONNECT", client_version="fuzz", protocol_version=rng.randrange(22))
            if rng.random() < 0.9:
                client.send("PRODUCER", topic="orders", producer_id=1, request_id=1)
                client.send(
                    "SUBSCRIBE", topic="orders", subscription="s", sub_type=1, consumer_id=1, request_id=2
                )
                await asyncio.sleep(0.3)
            for _ in range(FRAMES):
                client.writer.write(any_frame(rng))
                if rng.random() < 0.3:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            answers.update(name for name, *_ in client.received)
            await client.close()
        await asyncio.sleep(1)
        bystander.send("PRODUCER", topic="quiet", producer_id=1, request_id=1)
        await asyncio.sleep(1)
        assert [name for name, *_ in bystander.received] == ["connected", "producer_success"]
        assert len(server.connections) == 1
        assert len(broker.connections) == 1
        await bystander.close()
        assert len(answers) >= 20, answers


@pytest.mark.parametrize("seed", range(3))
def test_changed_frames(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fuzz(seed, CONNECTIONS)
    defects = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not defects, defects[0].getMessage() + str(defects[0].exc_info)
