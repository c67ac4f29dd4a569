"""Frames that somebody changed, in every state of a connection: it alone is closed, and nothing is a defect of ours.

What others send to the same topic all the while is stored, and consumers of both protocols read all of it afterwards; no
connection, no byte of a budget and, from round to round, no memory is left. `make fuzz` throws 1,000,000 frames; one round
of them again: `make fuzz ARGS='-k round[17]'`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from magnetar.broker import Broker, start_pulsar_listener
from magnetar.proto import commands as c
from magnetar.proto.batch import decode_batch
from magnetar.proto.entry import Entry
from magnetar.proto.errors import MagnetarError
from magnetar.proto.ids import TopicName
from magnetar.runtime.connection import Authenticated, Challenge, ConnectionOptions, FramedServer
from support.broker_kit import FakeClient, running_broker
from support.fake_ledger import FakeLedgers
from support.long_form import LONG, times
from support.pulsar_messages import frame
from support.pulsar_mutations import any_frame, command_frame
from support.pulsar_scenario import PulsarClient
from support.service import resident_bytes
from support.sim import SimLoop

ROUNDS = times(3, 80)
FRAMES = 12_500 if LONG else 5_000  # of a round
FRAMES_PER_CONNECTION = 30
GOOD_EVERY = 15  # connections
PORT, GUARDED_PORT = 6650, 6651
Connections = weakref.WeakSet[Any]  # of ClientConnection
# Budgets of a service on a small machine, so that little is needed to fill them.
TOPIC_BYTES = 128 << 10
HIGH_WATER_BYTES = 128 << 10
LARGE = bytes(64 << 10)
LARGE_MESSAGES = 32  # more than the buffers of the two ends of a connection have room for
WARM_UP = 4  # rounds in which caches are filled, before growth counts
MAX_GROWTH_BYTES = 48 << 20


class Riddle:
    """An authenticator that asks once before it is satisfied."""

    def begin(self, method: str) -> Riddle:
        return self

    def respond(self, data: bytes) -> Authenticated | Challenge:
        return Authenticated("oedipus") if data == b"man" else Challenge(b"what walks on four legs?")


@dataclass
class Place:
    """Where frames are thrown. `guarded`: the same broker's listener with a `Riddle`."""

    rng: random.Random
    ledgers: FakeLedgers
    broker: Broker
    server: FramedServer
    guarded: FramedServer
    ended: int = 0  # topics that were terminated
    reached: Counter[str] = field(default_factory=Counter)

    @property
    def newest(self) -> Any:
        """The transport of the last connection to `server`."""
        return self.server.connections[-1]

    def open(self, client: PulsarClient, *topics: str, what: str = "PRODUCER SUBSCRIBE") -> None:
        """Producers and consumers of these topics, with ids from 1 on."""
        for number, topic in enumerate(topics, 1):
            if "PRODUCER" in what:
                client.send("PRODUCER", topic=topic, producer_id=number, request_id=number)
            if "SUBSCRIBE" in what:
                client.send(
                    "SUBSCRIBE",
                    topic=topic,
                    subscription="s",
                    sub_type=self.rng.randrange(4),
                    consumer_id=number,
                    request_id=9,
                )

    async def opened(self, client: PulsarClient, *topics: str, what: str = "PRODUCER SUBSCRIBE") -> bool:
        """The same, and they are answered. False if none could be opened: others' frames are in the way."""
        self.open(client, *(topics or ("orders", "shared")), what=what)
        await asyncio.sleep(0.3)
        if "SUBSCRIBE" in what:
            client.send("FLOW", consumer_id=self.rng.randrange(1, 3), message_permits=1000)
        return bool({"success", "producer_success"} & heard(client))


def heard(client: PulsarClient) -> set[str]:
    return {name for name, *_ in client.received}


# --- the states of a connection: each returns whether it is in it now --------------------------------------------------


async def connected(place: Place, client: PulsarClient) -> bool:
    client.send("CONNECT", client_version="fuzz", protocol_version=place.rng.randrange(22))
    await client.until(1)
    return "connected" in heard(client)


async def before_connect(place: Place, client: PulsarClient) -> bool:
    return place.newest.protocol._connection is None


async def while_it_is_authenticated(place: Place, client: PulsarClient) -> bool:
    client.send("CONNECT", client_version="fuzz", auth_method_name="riddle", protocol_version=21)
    await client.until(1)
    return heard(client) == {"auth_challenge"}


async def while_producers_and_consumers_are_opened(place: Place, client: PulsarClient) -> bool:
    await connected(place, client)
    place.open(client, "orders", "shared")
    return True


async def with_producers(place: Place, client: PulsarClient) -> bool:
    await connected(place, client)
    return await place.opened(client, what="PRODUCER")


async def with_consumers(place: Place, client: PulsarClient) -> bool:
    await connected(place, client)
    return await place.opened(client, what="SUBSCRIBE")


async def with_both(place: Place, client: PulsarClient) -> bool:
    await connected(place, client)
    return await place.opened(client)


async def during_a_seek(place: Place, client: PulsarClient) -> bool:
    """No write is confirmed, of the cursor's state either."""
    await connected(place, client)
    await place.opened(client)
    place.ledgers.hold = True
    known = len(client.received)
    for number in (1, 2):
        client.send("SEEK", consumer_id=number, request_id=50 + number, message_publish_time=1)
    await asyncio.sleep(0.05)
    return not any(getattr(command, "request_id", 0) > 50 for _, command, _ in client.received[known:])


async def while_producers_and_consumers_are_closed(place: Place, client: PulsarClient) -> bool:
    await connected(place, client)
    opened = await place.opened(client)
    place.ledgers.hold = True
    client.send("SEND", frame(b"x"), producer_id=1, sequence_id=0)
    for number in (1, 2):
        client.send("CLOSE_PRODUCER", producer_id=number, request_id=60)
        client.send("CLOSE_CONSUMER", consumer_id=number, request_id=61)
    return opened


async def while_the_connection_is_closed(place: Place, client: PulsarClient) -> bool:
    """It hangs up on a client that reads nothing, and waits for it."""
    await connected(place, client)
    await place.opened(client)
    client.hear(hears=False)
    client.writer.write(command_frame("LOOKUP", topic="shared", request_id=1) + bytes(8))
    await asyncio.sleep(0.01)
    return bool(place.newest.closing)


async def while_the_client_reads_nothing(place: Place, client: PulsarClient) -> bool:
    await connected(place, client)
    name = f"r{place.rng.getrandbits(64)}"
    fields: dict[str, Any] = {
        "topic": "large",
        "subscription": name,
        "sub_type": 1,
        "durable": False,
        "initial_position": 1,
    }
    client.send("SUBSCRIBE", consumer_id=1, request_id=1, **fields)
    await asyncio.sleep(0.3)
    client.hear(hears=False)
    client.send("FLOW", consumer_id=1, message_permits=1000)
    await asyncio.sleep(0.3)
    return not place.newest.writable


async def while_its_reading_is_paused(place: Place, client: PulsarClient) -> bool:
    await connected(place, client)
    await place.opened(client, "held", "shared")
    place.ledgers.hold = True
    for number in range(2 * TOPIC_BYTES // len(LARGE)):
        client.send("SEND", frame(LARGE, sequence_id=number), producer_id=1, sequence_id=number)
    await asyncio.sleep(0.01)
    return bool(place.newest.reading_paused)


async def after_the_end_of_its_topic(place: Place, client: PulsarClient) -> bool:
    await connected(place, client)
    place.ended += 1
    name = f"ended-{place.ended}"
    await place.opened(client, name, "shared")
    client.send("SEND", frame(b"x"), producer_id=1, sequence_id=0)
    await asyncio.sleep(0.01)
    await (await place.broker.topic(TopicName.parse(name), create=False)).terminate()
    if place.rng.random() < 0.5:
        await asyncio.sleep(0.1)  # else it is not told yet
    place.open(client, name)
    return True


State = Callable[[Place, PulsarClient], Awaitable[bool]]
STATES: list[State] = [
    before_connect,
    while_it_is_authenticated,
    connected,
    while_producers_and_consumers_are_opened,
    with_producers,
    with_consumers,
    with_both,
    with_both,
    during_a_seek,
    while_producers_and_consumers_are_closed,
    while_the_connection_is_closed,
    while_the_client_reads_nothing,
    while_its_reading_is_paused,
    after_the_end_of_its_topic,
]


async def throw(place: Place, state: State) -> tuple[int, int, list[str]]:
    """One connection, in this state when the frames come: how many, how many of them were read, what it heard."""
    rng = place.rng
    guarded = state is while_it_is_authenticated
    server = place.guarded if guarded else place.server
    client = await PulsarClient.connect(server)
    while not server.connections:
        await asyncio.sleep(0.001)
    protocol = server.connections[-1].protocol
    place.reached[state.__name__] += await state(place, client)
    before, thrown = protocol.progress()[0], 0
    if rng.random() < 0.1:
        client.hear(hears=False)
    while thrown < FRAMES_PER_CONNECTION and not client.ended:
        client.writer.write(any_frame(rng))
        thrown += 1
        if guarded and rng.random() < 0.05:
            client.send("AUTH_RESPONSE", response={"auth_method_name": "riddle", "auth_data": b"man"})
        if rng.random() < 0.3:
            await asyncio.sleep(0.01)
    await asyncio.sleep(rng.choice([0.0, 0.3]))
    place.ledgers.hold = False
    place.ledgers.confirm()
    await asyncio.sleep(rng.choice([0.0, 0.1]))
    await client.close()
    return thrown, protocol.progress()[0] - before, [name for name, *_ in client.received]


async def publish_good(server: FramedServer, value: bytes, topic: str = "shared") -> None:
    client = await PulsarClient.opened(*server.addresses[0])
    client.send("PRODUCER", topic=topic, producer_id=1, request_id=1)
    await client.next("producer_success")
    client.send("SEND", frame(value), producer_id=1, sequence_id=0)
    await client.next("send_receipt")
    await client.close()


async def read_by_pulsar(server: FramedServer, last: bytes) -> list[bytes]:
    client = await PulsarClient.opened(*server.addresses[0])
    found = await client.read("shared", last)
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


async def fuzz(seed: int, frames: int, connections: Connections) -> Counter[str]:
    """One round, with a broker of its own; its figures."""
    rng, ledgers = random.Random(seed), FakeLedgers()
    answers, figures, good = Counter[str](), Counter[str](), list[bytes]()
    options = ConnectionOptions("broker", handshake_timeout_s=30.0, high_water_bytes=HIGH_WATER_BYTES)
    guard = replace(options, authenticator=Riddle())
    async with contextlib.AsyncExitStack() as stack:
        broker = await stack.enter_async_context(
            running_broker(ledgers, pulsar_port=PORT, max_topic_publish_bytes=TOPIC_BYTES)
        )
        server = await start_pulsar_listener(broker, "127.0.0.1", PORT, options)
        guarded = await start_pulsar_listener(broker, "127.0.0.1", GUARDED_PORT, guard)
        for one in (server, guarded):
            stack.push_async_callback(one.close, 0.0)
        place = Place(rng, ledgers, broker, server, guarded)
        for _ in range(LARGE_MESSAGES):
            await publish_good(server, LARGE, "large")
        bystander = await PulsarClient.opened(*server.addresses[0])
        while figures["thrown"] < frames:
            state = STATES[figures["connections"] % len(STATES)]
            thrown, read, names = await throw(place, state)
            connections.update(broker.connections)
            answers.update(names)
            figures.update(connections=1, thrown=thrown, read=read)
            if figures["connections"] % GOOD_EVERY == 0:
                good.append(b"good-%d" % len(good))
                await publish_good(server, good[-1])
        await asyncio.sleep(1)
        bystander.send("PRODUCER", topic="quiet", producer_id=1, request_id=1)
        await asyncio.sleep(1)
        assert [name for name, *_ in bystander.received] == ["producer_success"]
        assert len(server.connections) == 1
        assert not guarded.connections
        assert len(broker.connections) == 1
        assert (broker.publish_budget.used, broker.publish_budget.waiting) == (0, 0)
        await bystander.close()
        for found in (await read_by_pulsar(server, good[-1]), await read_by_native(broker, good[-1])):
            assert [value for value in found if value.startswith(b"good")] == good
        assert len(answers) >= 20, answers
        for state in STATES:
            assert place.reached[state.__name__] >= figures["connections"] // len(STATES) // 2, place.reached
    return figures


@pytest.fixture(scope="module")
def residents() -> list[int]:
    """Bytes of this process after each round."""
    return []


def play(seed: int) -> tuple[Counter[str], Connections]:
    """A round in virtual time: its figures, and those of its connections that are still there."""
    loop, connections = SimLoop(seed=1), Connections()
    try:
        figures = loop.run_until_complete(fuzz(seed, FRAMES, connections))
        loop.check()
    finally:
        loop.close()
    return figures, connections


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.timeout(3600)
def test_a_round(seed: int, residents: list[int], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):  # a record of a warning may hold what it is about
        figures, connections = play(seed)
    defects = caplog.records
    assert not defects, defects[0].getMessage() + str(defects[0].exc_info)
    gc.collect()
    residents.append(resident_bytes(os.getpid()))
    print(f"round {seed}: {dict(figures)}; {residents[-1] >> 20} MiB")
    assert not list(connections)


@pytest.mark.skipif(ROUNDS <= WARM_UP, reason="a long form: LONG=1, as `make fuzz` sets it")
def test_rounds_leave_no_memory_behind(residents: list[int]) -> None:
    assert residents[-1] - residents[WARM_UP] < MAX_GROWTH_BYTES
