"""Consumers of many kinds, for `python -m bench subscriptions`.

A workload that waits for the driver prints a line of JSON when it has come so far, and goes on at the next line of its
standard input. Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import struct
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from bench.service_process import resident_bytes
from bench.workloads.produce_tail import BATCHES_IN_FLIGHT, SEND_TIMEOUT_S, send_batches
from magnetar.client import Consumer, connect

if TYPE_CHECKING:  # older revisions, which `bench compare` runs with this, lack it
    from magnetar.client.options import SubscriptionType

SUBSCRIPTION = "bench"
TICK_S = 0.001
CLIENTS_AT_ONCE = 50
# A churned consumer holds every tenth delivery for so long before it acknowledges: keys are in flight when owners change.
HOLD_S = 0.005
_STAMP = struct.Struct(">dI")  # when it was sent, its number among those of its key


class Driver:
    """Standard input and output of this process."""

    def __init__(self, lines: asyncio.StreamReader) -> None:
        self._lines = lines

    @classmethod
    async def open(cls) -> Driver:
        """Once a process."""
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        return cls(lines)

    async def report(self, **what: Any) -> None:
        """Says so, and returns when the driver says to go on."""
        self.tell(**what)
        await self.next_line()

    def tell(self, **what: Any) -> None:
        """Says so."""
        print(json.dumps(what), flush=True)

    async def next_line(self) -> None:
        """Returns when the driver says to go on. Raises SystemExit when it has ended."""
        if not await self._lines.readline():
            raise SystemExit(1)


# --- what is stored ------------------------------------------------------------------------------------------------------


async def fill_keys(
    url: str, topic: str, *, messages: int, size: int, keys: int, together: int, batched: bool
) -> dict[str, Any]:
    """Stores messages with keys. `together`: calls of send_many with 1,000 messages have so many of each of their keys.

    Not batched: every message in a batch of its own, keys in turn.
    """
    names = [f"key-{number:06}" for number in range(keys)]
    value = b"x" * size
    began = time.perf_counter()
    async with (
        connect(url) as client,
        client.create_producer(
            topic, batching=batched, batching_by_key=batched, send_timeout=SEND_TIMEOUT_S
        ) as producer,
    ):
        if not batched:
            for number in range(messages):
                receipt = producer.send_nowait(value, names[number % keys])
                if number % 20_000 == 19_999:
                    await receipt
            await producer.flush()
            return {"messages": messages, "seconds": time.perf_counter() - began}
        pending: deque[asyncio.Future[Any]] = deque()
        for number in range(messages // 1_000):
            first = number * (1_000 // together)
            some = [names[(first + n) % keys] for n in range(1_000 // together)] * together
            pending.append(asyncio.ensure_future(producer.send_many([value] * 1_000, keys=some)))
            if len(pending) >= BATCHES_IN_FLIGHT:
                await pending.popleft()
        await asyncio.gather(*pending)
    return {"messages": messages, "seconds": time.perf_counter() - began}


async def fill_topics(
    url: str, topic: str, *, topics: int, messages: int, size: int, batch: int
) -> dict[str, Any]:
    """`messages` in each of the topics `topic`-0, -1, ..., one topic after another."""
    async with connect(url) as client:
        slots = asyncio.Semaphore(CLIENTS_AT_ONCE)

        async def one(number: int) -> None:
            async with (
                slots,
                client.create_producer(f"{topic}-{number}", batching=batch > 1) as producer,
            ):
                if batch > 1:
                    await send_batches(producer, messages, size, batch)
                else:
                    for _ in range(messages):
                        producer.send_nowait(b"x" * size)
                    await producer.flush()

        await asyncio.gather(*map(one, range(topics)))
    return {"messages": topics * messages}


# --- throughput ----------------------------------------------------------------------------------------------------------


async def take(
    url: str,
    topic: str,
    *,
    type: SubscriptionType,
    consumers: int,
    by_batch: bool,
) -> dict[str, Any]:
    """Consumers of one subscription, who acknowledge each message, or each batch of them as they arrived.

    They take nothing but what fills their queues before the driver says so, and end when it says so.
    """
    driver = await Driver.open()
    seen = [0] * consumers
    began = time.perf_counter()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(connect(url))
        found = [
            await client.subscribe(topic, SUBSCRIPTION, type=type, start="earliest") for _ in range(consumers)
        ]
        await driver.report(seconds=time.perf_counter() - began, resident_bytes=resident_bytes(os.getpid()))

        async def messages(number: int, consumer: Consumer) -> None:
            async for message in consumer:
                await consumer.ack(message)
                seen[number] += 1

        async def batches(number: int, consumer: Consumer) -> None:
            async for batch in consumer.batches():
                await consumer.ack(batch)
                seen[number] += len(batch)

        work = batches if by_batch else messages
        tasks = [asyncio.ensure_future(work(*numbered)) for numbered in enumerate(found)]
        await driver.next_line()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return {"seen": seen, "messages": sum(seen), "resident_bytes": resident_bytes(os.getpid())}


async def take_topics(
    url: str, topic: str, *, topics: int, messages: int, pattern: bool, queue: int | None
) -> dict[str, Any]:
    """One consumer of many topics; the driver says when it is to begin. `queue`: receiver_queue_messages."""
    driver = await Driver.open()
    async with connect(url) as client:
        before = resident_bytes(os.getpid())
        began = time.perf_counter()
        wanted = re.compile(f"{topic}-.*") if pattern else [f"{topic}-{number}" for number in range(topics)]
        options: dict[str, Any] = {"type": "shared", "start": "earliest", "receiver_queue_messages": queue}
        async with client.subscribe(wanted, SUBSCRIPTION, **options) as consumer:
            subscribed = time.perf_counter() - began
            assert len(consumer.topics) == topics, len(consumer.topics)
            await driver.report(
                seconds=subscribed, resident_bytes=resident_bytes(os.getpid()), before_bytes=before
            )
            began = time.perf_counter()
            cpu = time.process_time()
            seen = 0
            async for batch in consumer.batches():
                seen += len(batch)
                await consumer.ack(batch)
                if seen >= messages:
                    break
            seconds = time.perf_counter() - began
            return {
                "messages": seen,
                "rate": seen / seconds,
                "take_cpu_s": time.process_time() - cpu,
                "resident_bytes": resident_bytes(os.getpid()),
            }


# --- fail-over -----------------------------------------------------------------------------------------------------------


async def fail_over(url: str, topic: str) -> dict[str, Any]:
    """A consumer of a failover subscription; says when its first message came, and closes when the driver says so."""
    driver = await Driver.open()
    async with connect(url) as client:
        consumer = await client.subscribe(topic, SUBSCRIPTION, type="failover", start="earliest")
        driver.tell(ready=True)

        async def work() -> None:
            first = True
            async for message in consumer:
                if first:
                    driver.tell(first=time.perf_counter())
                    first = False
                await consumer.ack(message)

        working = asyncio.ensure_future(work())
        await driver.next_line()
        began = time.perf_counter()
        await consumer.close()
        driver.tell(closing=began, closed=time.perf_counter())
        await working
    return {"messages": 0}


async def paced(url: str, topic: str, *, rate: int, keys: int, batched: bool) -> dict[str, Any]:
    """Sends so many a second until the driver says that it is enough; each says when it was sent, and its number in its key.

    batched: by key, as many together as fell due in 10 ms.
    """
    driver = await Driver.open()
    numbers = [0] * keys
    names = [f"key-{number:06}" for number in range(keys)]
    rng = random.Random(1)
    pad = bytes(100 - _STAMP.size)
    enough = asyncio.ensure_future(driver.next_line())
    async with (
        connect(url) as client,
        client.create_producer(topic, batching=batched, batching_by_key=batched) as producer,
    ):
        driver.tell(ready=True)
        began, sent = time.perf_counter(), 0
        while not enough.done():
            due = int((time.perf_counter() - began) * rate)
            for _ in range(due - sent):
                key = rng.randrange(keys)
                producer.send_nowait(_STAMP.pack(time.perf_counter(), numbers[key]) + pad, names[key])
                numbers[key] += 1
            sent = due
            await asyncio.sleep(0.01 if batched else TICK_S)
        await producer.flush()
        taken = time.perf_counter() - began
    enough.cancel()
    return {"messages": sent, "rate": sent / taken}


Workload = Callable[..., Awaitable[dict[str, Any]]]
WORKLOADS: dict[str, Workload] = {
    work.__name__: work for work in (fill_keys, fill_topics, take, take_topics, fail_over, paced)
}
