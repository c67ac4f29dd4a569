"""Raw bytes thrown at the ports of a real service: it answers or closes, goes on serving, and does not grow.

20,000 mutated frames (100,000 in the long form), before and after the handshake, at the ports of broker and bookie and at
the one for Pulsar's protocol: valid frames with flipped bytes, cut short, with wrong lengths, unknown commands, plain noise.
And clients that do nothing: connections without a word, halves of frames, answers that nobody reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest

from magnetar.client import Client, MalformedFrame, connect
from magnetar.proto import commands as c
from magnetar.proto.batch import encode_batch
from magnetar.proto.frames import encode_frame
from magnetar.proto.ledger_entry import encode_ledger_entry
from support.long_form import times
from support.pulsar_messages import frame
from support.pulsar_mutations import HELLO as PULSAR_HELLO
from support.pulsar_mutations import any_frame, command_frame
from support.pulsar_scenario import PulsarClient
from support.service import Service, resident_bytes

pytestmark = pytest.mark.real


FRAMES = times(20_000, 100_000)
# Few: a frame whose border is lost ends its connection, and what follows it there is not read.
FRAMES_PER_CONNECTION = 5
TOGETHER = 10  # connections: half of them wait a moment for the service to hang up
MAX_GROWTH_BYTES = 64 * 1024 * 1024
SERVED_S = 60.0  # within which somebody else's message is stored; that nothing ended its producer meanwhile is checked
# Connections that say nothing, or read nothing; messages of 1 MiB meanwhile.
SILENT = min(times(500, 10_000), resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 2 - 200)
UNREAD = times(10, 50)
LARGE = times(40, 400)
HELLO = encode_frame(c.Connect(1, c.PROTOCOL_VERSION, c.MIN_PROTOCOL_VERSION).encode())


def seed_frames() -> list[bytes]:
    """One valid frame of every command, as material for mutation."""
    group = encode_batch([b"v"] * 3, sequence_id=0, publish_time_ms=0, keys=["k"] * 3)
    samples: list[tuple[c.Command, bytes]] = [
        (c.Lookup(1, "fuzz"), b""),
        (c.CreateProducer(2, 1, "fuzz", None), b""),
        (c.Send(0, 1, 0), group),
        (c.Send(0, 1, 0), encode_batch([b"x"], sequence_id=1, publish_time_ms=0) * 2),
        (c.Subscribe(3, 1, "fuzz", "s", start=("earliest", None)), b""),
        (c.Flow(0, 1, 1000), b""),
        (c.Ack(4, 1), c.encode_rows(c.ACK_ROW, [(1, 0, 0, 2)])),
        (c.Ack(0, 1, True), c.encode_rows(c.ACK_ROW, [(1, 0, 0, 2)])),
        (c.Redeliver(0, 1), b""),
        (c.Seek(5, 1, ("id", b"\0" * 24)), b""),
        (c.LastMessageId(6, 1), b""),
        (c.ListTopics(7), b""),
        (c.TopicStats(8, "fuzz"), b""),
        (c.CloseConsumer(9, 1), b""),
        (c.CloseProducer(10, 1), b""),
        (c.TopicLedgers(11, "fuzz"), b""),
        (c.AttachLedgers(17, "fuzz", "q", 1), msgpack.packb([[1, 3, 5, 9], [2, 0, 0, 0]])),
        (c.KeepLedgers(18, "fuzz", "lease", 100), b""),
        (c.CreateStagedLedger(19, "fuzz", "t"), b""),
        (c.GetLedgerMetadata(20, "fuzz", 1), b""),
        (c.PutLedgerMetadata(21, "fuzz", 1, 0), b"\x80"),
        (c.KeepStaged(22, "fuzz", "t", 100), b""),
        (c.DiscardStaged(23, "fuzz", "t"), msgpack.packb([1, 2])),
        (c.QueryState(24, "fuzz", "q"), b""),
        (c.ArchiveLedgers(26, "fuzz", "file:///a"), msgpack.packb([[1, 1, 3, 5]])),
        (c.Ping(12), b""),
        (c.AddEntry(0), encode_ledger_entry(2**40, 0, -1, 5, b"entry")),
        (c.ReadEntries(13, 1, 0, 10), b""),
        (c.ReadLastConfirmed(14, 2**41), b""),
        (c.WriteLastConfirmed(15, 2**42, 3), b""),
        (c.BookieInfo(16), b""),
    ]
    return [encode_frame(command.encode(), payload) for command, payload in samples] + [HELLO]


def mutate(rng: random.Random, frames: list[bytes]) -> bytes:
    frame = bytearray(rng.choice(frames))
    kind = rng.randrange(8)
    if kind == 0:  # cut short; what follows is read as part of it
        del frame[rng.randrange(len(frame)) :]
    elif kind == 1:  # another length
        struct.pack_into(
            ">I", frame, 0, rng.choice([0, 1, 2, 5, len(frame), 2**31, 2**32 - 1, rng.getrandbits(32)])
        )
    elif kind == 2:
        struct.pack_into(">H", frame, 4, rng.getrandbits(16))
    elif kind == 3:
        return rng.randbytes(rng.randrange(1, 300))
    elif kind < 7:
        for _ in range(rng.randrange(1, 6)):
            frame[rng.randrange(6, len(frame))] = rng.getrandbits(8)
    return bytes(frame)


async def throw(seed: int, port: int, hello: bytes, make: Callable[[random.Random], bytes]) -> None:
    """Throws frames at one connection, reading whatever comes back, and leaves in one of several ways."""
    rng = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answers = asyncio.create_task(drain(reader))
    try:
        if rng.random() < 0.85:
            writer.write(hello)
        for _ in range(FRAMES_PER_CONNECTION):
            writer.write(make(rng))
            if rng.random() < 0.05:
                await writer.drain()
        if rng.random() < 0.5:
            writer.write_eof()
        await asyncio.wait([answers], timeout=0.05)
    except OSError:
        pass  # the service hung up in the middle: it may
    finally:
        writer.transport.abort()
        await answers


async def drain(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(65536):
            pass
    except OSError:
        pass


# Of Pulsar's producers and consumers, so that what follows is not refused for want of them.
OPENINGS = b"".join(
    command_frame("PRODUCER", topic=topic, producer_id=number, request_id=number)
    + command_frame("SUBSCRIBE", topic=topic, subscription="s", sub_type=1, consumer_id=number, request_id=9)
    for number, topic in enumerate(("orders", "shared"), 1)
)


async def read_by_native(client: Client, last: bytes) -> list[bytes]:
    """What is good, up to `last`; bad batches are errors, one each."""
    found: list[bytes] = []
    async with client.create_reader("shared", start="earliest") as reader:
        while last not in found[-1:]:
            with contextlib.suppress(MalformedFrame):
                value = (await reader.read_next(timeout=10)).value or b""
                if value.startswith(b"good"):
                    found.append(value)
    return found


async def opened(service: Service) -> PulsarClient:
    """A client of Pulsar's protocol."""
    return await PulsarClient.opened("127.0.0.1", service.pulsar_port)


async def read_by_pulsar(service: Service, last: bytes) -> list[bytes]:
    """What is good; who reads as little of a message as this finds nothing bad."""
    client = await opened(service)
    found = await client.read("shared", last)
    await client.close()
    return [body for body in found if body.startswith(b"good")]


async def check_never_ended(client: Client, service: Service, producer: str, sent: int) -> None:
    """The topic of those who do as they should was loaded once, and their producer was never closed."""
    stats = await client.admin.topic_stats("shared")
    found = [(one["epoch"], one["messages_in"]) for one in stats["producers"] if one["name"] == producer]
    assert found == [(0, sent)], stats["producers"]
    ends = [line for line in service.errors().splitlines() if "fenced" in line and "/shared" in line]
    assert ends == []


@pytest.mark.timeout(600)
async def test_mutated_frames_neither_crash_nor_hang_nor_grow_the_service(tmp_path: Path) -> None:
    frames = seed_frames()
    service = Service(tmp_path / "data", pulsar=True)
    await asyncio.to_thread(service.start)

    def native(rng: random.Random) -> bytes:
        return mutate(rng, frames)

    ports = [
        (service.port, HELLO, native),
        (service.pulsar_port, PULSAR_HELLO + OPENINGS, any_frame),
        (service.bookie_port, HELLO, native),
    ]
    try:
        async with connect(service.url) as client:
            producer = await client.create_producer("shared")
            ids = [await producer.send(b"good-%d" % n) for n in range(10)]
            connections = FRAMES // FRAMES_PER_CONNECTION
            after_warm_up = 0
            for first in range(0, connections, TOGETHER):
                turns = range(first, first + TOGETHER)
                await asyncio.gather(*[throw(turn, *ports[turn % 3]) for turn in turns])
                if first % 1000 == 0:
                    async with asyncio.timeout(SERVED_S):
                        ids.append(await producer.send(b"good-%d" % len(ids)))
                if not after_warm_up and first >= connections // 4:
                    after_warm_up = resident_bytes(service.daemon_pid)
            growth = resident_bytes(service.daemon_pid) - after_warm_up
            await check_never_ended(client, service, producer.name, len(ids))
            sent = [b"good-%d" % n for n in range(len(ids))]
            assert await read_by_native(client, sent[-1]) == sent
            assert await read_by_pulsar(service, sent[-1]) == sent
        print(
            f"{connections * FRAMES_PER_CONNECTION} frames, {connections} connections, daemon grew {growth >> 10} KiB"
        )
        assert growth < MAX_GROWTH_BYTES
    finally:
        await asyncio.to_thread(service.stop)


@pytest.mark.timeout(600)
async def test_clients_that_do_nothing_cost_a_bounded_memory(tmp_path: Path) -> None:
    service = Service(tmp_path / "data", pulsar=True)
    await asyncio.to_thread(service.start)
    try:
        client = await opened(service)
        client.send("PRODUCER", topic="shared", producer_id=1, request_id=1)
        await client.next("producer_success")
        before = resident_bytes(service.daemon_pid)
        silent = [await asyncio.open_connection("127.0.0.1", service.pulsar_port) for _ in range(SILENT)]
        for number, (_, writer) in enumerate(silent):
            if number % 3 == 1:
                writer.write(PULSAR_HELLO)
            elif number % 3 == 2:  # a frame of 5 MiB of which the beginning comes, and no more
                writer.write(PULSAR_HELLO + (5 << 20).to_bytes(4) + bytes(1000))
        unread = [await opened(service) for _ in range(UNREAD)]
        for one in unread:
            one.hear(hears=False)
            one.send("SUBSCRIBE", topic="shared", subscription="s", sub_type=1, consumer_id=1, request_id=1)
            one.writer.write(command_frame("FLOW", consumer_id=1, message_permits=2**32 - 1))
            one.writer.write(command_frame("LOOKUP", topic="shared", request_id=1) * 20_000)
        for number in range(LARGE):
            content = frame(bytes(1 << 20), sequence_id=number)
            client.send("SEND", content, producer_id=1, sequence_id=number)
            await client.next("send_receipt")
        growth = resident_bytes(service.daemon_pid) - before
        print(
            f"{SILENT} silent connections, {UNREAD} that read nothing of {LARGE} MiB: {growth >> 20} MiB more"
        )
        assert growth < SILENT * 32 * 1024 + UNREAD * 4 * 1024 * 1024 + 256 * 1024 * 1024
        for _, writer in silent:
            writer.transport.abort()
        for one in (*unread, client):
            await one.close()
    finally:
        await asyncio.to_thread(service.stop)
