"""Raw bytes thrown at the ports of a real service: it answers or closes, goes on serving, and does not grow.

20,000 mutated frames (100,000 in the long form), before and after the handshake, at the ports of
broker and bookie: valid frames with flipped bytes, cut short, with wrong lengths, unknown commands, and plain noise.
"""

from __future__ import annotations

import asyncio
import random
import struct
from pathlib import Path

import msgpack
import pytest

from magnetar.client import connect
from magnetar.proto import commands as c
from magnetar.proto.batch import encode_batch
from magnetar.proto.frames import encode_frame
from magnetar.proto.ledger_entry import encode_ledger_entry
from support.long_form import times
from support.service import Service, resident_bytes

pytestmark = pytest.mark.real


FRAMES = times(20_000, 100_000)
# Few: a frame whose border is lost ends its connection, and what follows it there is not read.
FRAMES_PER_CONNECTION = 5
TOGETHER = 10  # connections: half of them wait a moment for the service to hang up
MAX_GROWTH_BYTES = 64 * 1024 * 1024
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


async def throw(port: int, rng: random.Random, frames: list[bytes], count: int) -> None:
    """Throws `count` frames at one connection, reading whatever comes back, and leaves in one of several ways."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answers = asyncio.create_task(drain(reader))
    try:
        if rng.random() < 0.85:
            writer.write(HELLO)
        for _ in range(count):
            writer.write(mutate(rng, frames))
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


@pytest.mark.timeout(600)
async def test_mutated_frames_neither_crash_nor_hang_nor_grow_the_service(tmp_path: Path) -> None:
    frames = seed_frames()
    service = Service(tmp_path / "data")
    await asyncio.to_thread(service.start)
    try:
        async with connect(service.url) as client:
            producer = await client.create_producer("healthy")
            ids = [await producer.send(b"%d" % n) for n in range(10)]
            connections = FRAMES // FRAMES_PER_CONNECTION
            after_warm_up = 0
            for first in range(0, connections, TOGETHER):
                turns = range(first, first + TOGETHER)
                ports = [service.bookie_port if turn % 4 == 3 else service.port for turn in turns]
                await asyncio.gather(
                    *[
                        throw(port, random.Random(turn), frames, FRAMES_PER_CONNECTION)
                        for port, turn in zip(ports, turns)
                    ]
                )
                if first % 1000 == 0:
                    async with asyncio.timeout(5):
                        ids.append(await producer.send(b"%d" % len(ids)))
                if not after_warm_up and first >= connections // 4:
                    after_warm_up = resident_bytes(service.daemon_pid)
            growth = resident_bytes(service.daemon_pid) - after_warm_up
            async with client.create_reader("healthy", start="earliest") as healthy:
                found = [(await healthy.read_next(timeout=10)) for _ in ids]
            assert [message.value for message in found] == [b"%d" % n for n in range(len(ids))]
        print(
            f"{connections * FRAMES_PER_CONNECTION} frames, {connections} connections, daemon grew {growth >> 10} KiB"
        )
        assert growth < MAX_GROWTH_BYTES
    finally:
        await asyncio.to_thread(service.stop)
