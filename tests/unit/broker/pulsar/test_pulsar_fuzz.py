"""Frames that somebody changed, in every state of a connection: it alone is closed, and nothing is a defect of ours.

What others send to the same topic all the while is stored, and consumers of both protocols read all of it afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter

import pytest

from magnetar.broker import Broker
from magnetar.proto import commands as c
from magnetar.proto.batch import decode_batch
from magnetar.proto.entry import Entry
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.connection import FramedServer
from support.broker_kit import FakeClient
from support.long_form import times
from support.pulsar_messages import frame
from support.pulsar_mutations import any_frame
from support.pulsar_scenario import PulsarClient, pulsar_server
from support.virtual_time import in_virtual_time

SEEDS = 3
FRAMES = 30
CONNECTIONS = times(150, 1_000_000 // (SEEDS * FRAMES) + 1)  # of each seed
GOOD_EVERY = 15  # connections


async def throw(rng: random.Random, server: FramedServer) -> list[str]:
    """One connection, in one of its states when the frames come; the names of what it heard."""
    client = await PulsarClient.connect(server)
    if rng.random() < 0.95:
        client.send("CONNECT", client_version="fuzz", protocol_version=rng.randrange(22))
    if rng.random() < 0.9:
        for number, topic in enumerate(("orders", "shared"), 1):
            client.send("PRODUCER", topic=topic, producer_id=number, request_id=number)
            client.send(
                "SUBSCRIBE",
                topic=topic,
                subscription="s",
                sub_type=rng.randrange(4),
                consumer_id=number,
                request_id=9,
            )
        if rng.random() < 0.6:  # else they are being opened
            await asyncio.sleep(0.3)
            client.send("FLOW", consumer_id=rng.randrange(1, 3), message_permits=1000)
    if rng.random() < 0.1:
        client.hear(hears=False)
    for _ in range(FRAMES):
        client.writer.write(any_frame(rng))
        if rng.random() < 0.3:
            await asyncio.sleep(0.01)
    await asyncio.sleep(rng.choice([0.0, 0.3]))
    await client.close()
    return [name for name, *_ in client.received]


async def publish_good(server: FramedServer, number: int) -> None:
    client = await PulsarClient.connect(server)
    client.send("CONNECT", client_version="good", protocol_version=21)
    await client.next("connected")
    client.send("PRODUCER", topic="shared", producer_id=1, request_id=1)
    await client.next("producer_success")
    client.send("SEND", frame(b"good-%d" % number), producer_id=1, sequence_id=0)
    await client.next("send_receipt")
    await client.close()


async def read_by_pulsar(server: FramedServer, last: bytes) -> list[bytes]:
    client = await PulsarClient.connect(server)
    client.send("CONNECT", client_version="good", protocol_version=21)
    client.send(
        "SUBSCRIBE",
        topic="shared",
        subscription="r",
        sub_type=0,
        consumer_id=1,
        request_id=1,
        initial_position=1,
    )
    await client.next("connected")
    await client.next("success")
    client.send("FLOW", consumer_id=1, message_permits=2**31)
    found: list[bytes] = []
    async with asyncio.timeout(60):
        while last not in found:
            await asyncio.sleep(0.1)
            found += [
                rest[10 + int.from_bytes(rest[6:10]) :]
                for name, _, rest in client.received
                if name == "message"
            ]
            client.received.clear()
    await client.close()
    return found


class Reader(FakeClient):
    """A native consumer, which shrugs at batches that cannot be read."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self.found: list[bytes] = []

    def _delivered(self, command: c.Deliver, body: bytes) -> None:
        entry = Entry(body, command.ack_set_rows * c.ACK_SET_ROW.size)
        for position in range(entry.batch_count):
            start, end = entry.batch_bounds(position)
            with contextlib.suppress(MagnetarError):
                self.found += [value or b"" for value in decode_batch(entry.data[start:end]).values]


async def read_by_native(broker: Broker, last: bytes) -> list[bytes]:
    client = Reader(broker)
    await client.consumer(topic="shared", permits=2**31)
    async with asyncio.timeout(60):
        while last not in client.found:
            await asyncio.sleep(0.1)
    client.close()
    return client.found


@in_virtual_time
async def fuzz(seed: int, connections: int) -> None:
    rng, answers, good = random.Random(seed), Counter[str](), list[bytes]()
    async with pulsar_server() as (broker, server):
        bystander = await PulsarClient.connect(server)
        bystander.send("CONNECT", client_version="bystander", protocol_version=21)
        for number in range(connections):
            answers.update(await throw(rng, server))
            if number % GOOD_EVERY == GOOD_EVERY - 1:
                await publish_good(server, len(good))
                good.append(b"good-%d" % len(good))
        await asyncio.sleep(1)
        bystander.send("PRODUCER", topic="quiet", producer_id=1, request_id=1)
        await asyncio.sleep(1)
        assert [name for name, *_ in bystander.received] == ["connected", "producer_success"]
        assert len(server.connections) == 1
        assert len(broker.connections) == 1
        await bystander.close()
        for found in (await read_by_pulsar(server, good[-1]), await read_by_native(broker, good[-1])):
            assert [value for value in found if value.startswith(b"good")] == good
        assert len(answers) >= 20, answers


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.timeout(3600 * 2)
def test_changed_frames(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fuzz(seed, CONNECTIONS)
    defects = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not defects, defects[0].getMessage() + str(defects[0].exc_info)
