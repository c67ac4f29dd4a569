"""Random histories of a producer through the public client: whatever happens to connections, receipts and programs, each
message is stored once, in order, with its own sequence id and delivery time, and its receipt says where."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest

from magnetar.client import Client, MessageId, Producer, SendTimeout, connect
from magnetar.proto.batch import META_SEQUENCE_IDS, decode_batch
from magnetar.proto.batch_extensions import EXT_DELIVER_AT_MS
from magnetar.proto.errors import ServiceNotReady, StorageFailed
from support.fake_broker import FakeBroker
from support.virtual_time import in_virtual_time

WAYS: list[dict[str, Any]] = [
    {"batching_max_messages": 4},
    {"batching": False},
    {"batching_by_key": True},
    {"compression": "zlib", "batching_max_bytes": 300},
    {"max_pending_bytes": 1000},
]
NOW_MS = 1_700_000_000_000
Row = tuple[int, bytes | None, str | bytes | None, int | None]


def stored(broker: FakeBroker) -> dict[MessageId, Row]:
    """Of each message that is stored: sequence id, value, key, delivery time."""
    found: dict[MessageId, Row] = {}
    for number, entry in enumerate(broker.topic("t").entries):
        index = 0
        for position in range(entry.batch_count):
            batch = decode_batch(entry.batch(position))
            count, first = batch.header.message_count, batch.header.sequence_id
            ids = (batch.metadata or {}).get(META_SEQUENCE_IDS) or range(first, first + count)
            for row in zip(ids, batch.values, batch.keys or [None] * count):
                found[MessageId(1, number, index)] = (*row, batch.extensions.get(EXT_DELIVER_AT_MS))
                index += 1
    return found


class Program:
    """Sends its input, messages 0, 3, 6, ... of which each is as its number says, and begins anew behind what is stored."""

    def __init__(self, rng: random.Random, broker: FakeBroker) -> None:
        self.rng = rng
        self.broker = broker
        self.next = 0
        self.wants: dict[int, Row] = {}
        self.receipts: list[tuple[int, Any]] = []

    def message(self) -> dict[str, Any]:
        number = self.next
        self.next += self.rng.choice((1, 1, 1, 2, 50))
        value, key = b"%d" % number * self.rng.randrange(1, 20), self.rng.choice((None, "a", "b"))
        due = self.rng.choice((None, None, NOW_MS, NOW_MS + 1000))
        self.wants[number] = (number, value, key, due)
        return {"value": value, "key": key, "sequence_id": number, "deliver_at": due}

    async def send(self, producer: Producer) -> None:
        kind = self.rng.random()
        if kind < 0.6:
            message = self.message()
            self.receipts.append((message["sequence_id"], asyncio.ensure_future(producer.send(**message))))
        elif kind < 0.8:
            messages = [self.message() for _ in range(self.rng.randrange(1, 30))]
            columns = {name: [message[name] for message in messages] for name in messages[0]}
            ids = await producer.send_many(
                columns["value"],
                keys=columns["key"],
                sequence_ids=columns["sequence_id"],
                deliver_at=columns["deliver_at"],
            )
            self.receipts += zip(columns["sequence_id"], ids)
        else:
            await asyncio.sleep(self.rng.choice((0, 0.01, 1)))

    def disturb(self) -> None:
        broker, kind = self.broker, self.rng.random()
        if kind < 0.05:
            broker.cut()
        elif kind < 0.1:
            broker.hold_receipts = True
        elif kind < 0.2 and broker.hold_receipts:
            if self.rng.random() < 0.5:
                broker.release_receipts()
            else:  # they are lost with the connection
                broker.held.clear()
                broker.hold_receipts = False
                broker.cut()
        elif kind < 0.25:
            broker.split_receipts = not broker.split_receipts
        elif kind < 0.28:
            broker.fail_next_send = ServiceNotReady("not now")


async def check(program: Program, broker: FakeBroker) -> None:
    rows = stored(broker)
    assert list(rows.values()) == [program.wants[number] for number in sorted(program.wants)]
    for number, receipt in program.receipts:
        found = receipt if isinstance(receipt, MessageId) else await receipt
        if not found.is_duplicate:
            assert rows[found][0] == number


@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("seed", range(4))
@in_virtual_time
async def test_each_message_is_stored_once(way: int, seed: int) -> None:
    rng = random.Random(100 * way + seed)
    broker = await FakeBroker.start()
    broker.deduplicates = True
    program = Program(rng, broker)
    async with connect(broker.url, backoff_first=0.01, max_pending_bytes=rng.choice((2000, None))) as client:
        for _ in range(4):
            async with client.create_producer("t", name="p", send_timeout=1000.0, **WAYS[way]) as producer:
                assert producer.last_sequence_id == max(program.wants, default=-1)
                for _ in range(rng.randrange(60)):
                    program.disturb()
                    step = asyncio.ensure_future(program.send(producer))
                    for _ in range(100):
                        if step.done():
                            break
                        await asyncio.sleep(0.05)
                        program.disturb()
                    broker.release_receipts()  # nobody else would, and the step may wait for them
                    await step
                broker.release_receipts()
                await producer.flush()
        await check(program, broker)
    await broker.close()


@in_virtual_time
async def test_a_program_that_fails_and_resumes_leaves_nothing_out() -> None:
    """It loses its receipts, times out and is refused, and each time begins behind the last id that it is told."""
    starts = 0
    for seed in range(40):
        rng = random.Random(seed)
        broker = await FakeBroker.start()
        broker.deduplicates = True
        lines = [3 * number for number in range(200)]
        while broker.topic("t").last_ids.get("p", -1) < lines[-1]:
            starts += 1
            with contextlib.suppress(SendTimeout, StorageFailed):  # which leaving raises once more
                async with connect(broker.url, backoff_first=0.01) as client:
                    await run_once(rng, broker, client, lines)
            broker.hold_receipts = broker.lose_sends = False
            broker.held.clear()
            broker.failed_epochs.clear()  # which belong to the connection that is gone
            broker.fail_next_send = None
        assert [row[0] for row in stored(broker).values()] == lines
        await broker.close()
    assert starts > 60, "few programs failed"


async def run_once(rng: random.Random, broker: FakeBroker, client: Client, lines: list[int]) -> None:
    producer = await client.create_producer("t", name="p", send_timeout=1.0, **WAYS[rng.randrange(4)])
    left = [number for number in lines if number > producer.last_sequence_id or rng.random() < 0.05]
    if rng.random() < 0.3:
        left = lines  # all of it once more
    end = rng.randrange(1, len(left) + 1)
    for position, number in enumerate(left):
        if position == end:
            broker.hold_receipts = rng.random() < 0.5
            broker.lose_sends = rng.random() < 0.3
            broker.fail_next_send = StorageFailed("refused") if rng.random() < 0.3 else None
        try:
            producer.send_nowait(b"%d" % number, sequence_id=number)
        except (SendTimeout, StorageFailed):
            return
        if rng.random() < 0.1:
            await asyncio.sleep(rng.choice((0.001, 0.3)))
        if position == end + 20:
            broker.hold_receipts = broker.lose_sends = False
            broker.cut()
    with contextlib.suppress(SendTimeout, StorageFailed):
        await producer.flush()
