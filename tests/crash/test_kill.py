"""kill -9 of the daemon, of the journal writer and of both, under load, many times in a row.

One client lives through all of it: two producers (one unbatched, one batched), a tailing reader, and a consumer that
acknowledges with receipts. What it saw confirmed is counted against what is stored at the end:

* nothing confirmed is lost (CORRECTNESS.md rules 1 to 5);
* first occurrences are in order per producer; duplicates are counted, since there is no deduplication (rule 33);
* what was acknowledged with a receipt never comes back (rule 34).

`journal_disk="lossy"` runs the same with a disk seam in the writer process that drops what was not synced when it
dies, since kill -9 alone leaves the page cache alone and so proves nothing about fsync.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from magnetar.client import Client, Message, connect
from magnetar.proto.errors import MagnetarError
from magnetar.proto.ids import MessageId
from support.long_form import LONG, times
from support.service import Service

pytestmark = pytest.mark.real


# 50 kills in each of six ways in the long form, `make crash`; the short one has three: each victim, and both disks.
KILLS = times(4, 50)
SEED = int(os.environ.get("MAGNETAR_SEED", "1"))
TOPIC = "kills"


@dataclass
class Observed:
    """What the client saw. Values are b"<producer>:<number>"."""

    confirmed: set[bytes] = field(default_factory=set)
    delivered: int = 0
    acknowledged: set[MessageId] = field(default_factory=set)  # receipt arrived
    came_back: list[MessageId] = field(default_factory=list)  # delivered after its receipt
    tailed: list[MessageId] = field(default_factory=list)


async def produce(client: Client, name: str, *, batching: bool, seen: Observed, stop: asyncio.Event) -> int:
    """Sends numbered messages until told to stop, with at most 2,000 unconfirmed; returns how many were sent."""
    producer = await client.create_producer(TOPIC, name=name, batching=batching, send_timeout=120.0)
    number = 0
    while not stop.is_set():
        values = [b"%s:%d" % (name.encode(), number + n) for n in range(200)]
        number += len(values)
        receipts = [producer.send_nowait(value) for value in values]
        for value, receipt in zip(values, receipts, strict=True):
            await receipt
            seen.confirmed.add(value)
    await producer.flush()
    await producer.close()
    return number


async def consume(client: Client, seen: Observed, stop: asyncio.Event) -> None:
    """Acknowledges with receipts, in groups; notes whatever comes back although its receipt had arrived."""
    consumer = await client.subscribe(TOPIC, "worker", type="shared", start="earliest")
    while not stop.is_set():
        try:
            first = await consumer.receive(timeout=0.2)
        except MagnetarError as error:
            if not error.retryable:
                raise
            continue
        seen.delivered += 1
        if first.id in seen.acknowledged:
            seen.came_back.append(first.id)
        try:
            await consumer.ack(first, receipt=True)
        except MagnetarError as error:
            if not error.retryable:
                raise
        else:
            seen.acknowledged.add(first.id)
    await consumer.close()


async def tail(client: Client, seen: Observed, stop: asyncio.Event) -> None:
    """A reader that lives through the kills."""
    async with client.create_reader(TOPIC, start="earliest") as reader:
        while not stop.is_set():
            try:
                message = await reader.read_next(timeout=0.2)
            except MagnetarError as error:
                if not error.retryable:
                    raise
            else:
                seen.tailed.append(message.id)


async def kill_and_restart(
    service: Service, victim: str, rng: random.Random, kills: int, seen: Observed
) -> None:
    """Before the last kill enough has been sent and acknowledged, however busy the machine is, to prove something."""
    for kill in range(1, kills + 1):
        async with asyncio.timeout(60):
            while kill == kills and not (seen.acknowledged and len(seen.confirmed) > 20 * kills):
                await asyncio.sleep(0.01)
        await asyncio.sleep(rng.uniform(0.05, 0.6))  # the random moment, not a wait for a condition
        await asyncio.to_thread(service.kill, victim)
        await asyncio.to_thread(service.start)


async def stored_messages(client: Client) -> list[Message]:
    """Everything in the topic, in its order."""
    messages: list[Message] = []
    async with client.create_reader(TOPIC, start="earliest") as reader:
        while await reader.has_message_available():
            messages.append(await reader.read_next(timeout=30))
    return messages


def first_occurrences_in_order(values: list[bytes], producer: str) -> bool:
    prefix = producer.encode() + b":"
    seen: set[bytes] = set()
    numbers: list[int] = []
    for value in values:
        if value.startswith(prefix) and value not in seen:
            seen.add(value)
            numbers.append(int(value[len(prefix) :]))
    return numbers == sorted(numbers)


async def wait_until_tailed(seen: Observed, count: int) -> None:
    async with asyncio.timeout(60):
        while len(seen.tailed) < count:
            await asyncio.sleep(0.05)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("victim", "journal_disk"),
    [
        (victim, disk)
        for victim, disk in itertools.product(("daemon", "writer", "both"), ("real", "lossy"))
        if LONG or (victim == "daemon") == (disk == "real")
    ],
)
async def test_rule_04_kill_9_loses_nothing_confirmed(tmp_path: Path, victim: str, journal_disk: str) -> None:
    rng = random.Random(f"{SEED} {victim} {journal_disk}")
    service = Service(tmp_path / "data", journal_disk=journal_disk)
    seen = Observed()
    stop = asyncio.Event()
    stop_tail = asyncio.Event()
    await asyncio.to_thread(service.start)
    try:
        async with connect(service.url) as client:
            producing = [
                asyncio.create_task(produce(client, "single", batching=False, seen=seen, stop=stop)),
                asyncio.create_task(produce(client, "batched", batching=True, seen=seen, stop=stop)),
            ]
            tailing = asyncio.create_task(tail(client, seen, stop_tail))
            consuming = asyncio.create_task(consume(client, seen, stop))
            await kill_and_restart(service, victim, rng, KILLS, seen)
            stop.set()
            sent = sum(await asyncio.gather(*producing))
            await consuming
            messages = await stored_messages(client)
            await wait_until_tailed(seen, len(messages))
            stop_tail.set()
            await tailing
        stored = [message.value or b"" for message in messages]
        duplicates = len(stored) - len(set(stored))
        print(
            f"{victim}/{journal_disk}: {KILLS} kills, {sent} sent, {len(seen.confirmed)} confirmed, {len(stored)} stored, "
            f"{duplicates} duplicates, {len(seen.acknowledged)} acknowledged with receipt, {len(seen.came_back)} came back"
        )
        assert len(seen.confirmed) == sent > 20 * KILLS
        assert len(seen.acknowledged) > 0
        assert not seen.confirmed - set(stored), "confirmed messages were lost"
        assert seen.tailed == [message.id for message in messages], (
            "a reader that lived through it saw something else"
        )
        assert not seen.came_back, "acknowledged with receipt, and redelivered"
        for producer in ("single", "batched"):
            assert first_occurrences_in_order(stored, producer)
    finally:
        await asyncio.to_thread(service.stop)
