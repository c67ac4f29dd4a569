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
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from bench.service_process import resident_bytes
from bench.workloads.produce_tail import BATCHES_IN_FLIGHT, SEND_TIMEOUT_S, send_batches
from magnetar.client import Client, Consumer, MessageBatch, connect
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
    connections: int = 1,
    slow_s: float = 0.0,
) -> dict[str, Any]:
    """Consumers of one subscription, who acknowledge each message, or each batch of them as they arrived.

    They take nothing but what fills their queues before the driver says so, and end when it says so. `slow_s`: the pause
    after each delivery.
    """
    driver = await Driver.open()
    seen = [0] * consumers
    began = time.perf_counter()
    async with AsyncExitStack() as stack:
        found = await _subscribed(stack, url, topic, type, consumers, connections)
        await driver.report(seconds=time.perf_counter() - began, resident_bytes=resident_bytes(os.getpid()))

        async def messages(number: int, consumer: Consumer) -> None:
            async for message in consumer:
                await consumer.ack(message)
                seen[number] += 1

        async def batches(number: int, consumer: Consumer) -> None:
            async for batch in consumer.batches():
                if slow_s:
                    await asyncio.sleep(slow_s)
                await consumer.ack(batch)
                seen[number] += len(batch)

        work = batches if by_batch else messages
        tasks = [asyncio.ensure_future(work(*numbered)) for numbered in enumerate(found)]
        await driver.next_line()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return {"seen": seen, "messages": sum(seen), "resident_bytes": resident_bytes(os.getpid())}


async def stick(
    url: str, topic: str, *, type: SubscriptionType, consumers: int, connections: int, take_all: bool
) -> dict[str, Any]:
    """Consumers who take what comes and acknowledge nothing, or take nothing."""
    driver = await Driver.open()
    async with AsyncExitStack() as stack:
        found = await _subscribed(stack, url, topic, type, consumers, connections)

        async def hold(consumer: Consumer) -> None:
            async for _ in consumer.batches():
                pass

        tasks = [asyncio.ensure_future(hold(consumer)) for consumer in found if take_all]
        await driver.report()
        for task in tasks:
            task.cancel()
    return {"messages": 0}


async def _subscribed(
    stack: AsyncExitStack, url: str, topic: str, type: SubscriptionType, consumers: int, connections: int
) -> list[Consumer]:
    """Spread over so many connections."""
    slots = asyncio.Semaphore(CLIENTS_AT_ONCE)

    async def connected() -> Client:
        async with slots:
            return await connect(url)

    async def subscribed(client: Client) -> Consumer:
        async with slots:
            return await client.subscribe(topic, SUBSCRIPTION, type=type, start="earliest")

    clients = await asyncio.gather(*(connected() for _ in range(connections)))
    for client in clients:
        await stack.enter_async_context(client)
    return await asyncio.gather(*(subscribed(clients[n % connections]) for n in range(consumers)))


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


async def paced(
    url: str, topic: str, *, rate: int, keys: int, batched: bool, messages: int | None = None
) -> dict[str, Any]:
    """Sends so many a second; each says when it was sent, and its number in its key.

    Ends when so many `messages` are sent; None: when the driver says that it is enough.

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
        while sent != messages and not enough.done():
            due = int((time.perf_counter() - began) * rate)
            if messages is not None:
                due = min(due, messages)
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


# --- consumers that come and go ------------------------------------------------------------------------------------------


class Order:
    """What was handed out of each key, to whom; counts what must not happen."""

    def __init__(self) -> None:
        self._next: dict[Any, int] = {}  # number that is to come next
        self._highest: dict[Any, int] = {}  # number that came
        self._acked: dict[Any, int] = {}  # numbers below it are acknowledged
        self._holders: dict[Any, Any] = {}
        self.leaving: dict[Any, None] = {}  # consumers
        self.violations: Counter[str] = Counter()
        self.messages = self.again = 0
        self.longest_wait_s = 0.0

    def take(self, consumer: Any, batch: MessageBatch) -> None:
        """Handed out."""
        now = time.perf_counter()
        for message in batch:
            key = message.key
            sent, number = _STAMP.unpack_from(message.value or b"")
            expected = self._next.get(key, 0)
            if number > expected:
                self.violations[f"a message was overtaken ({expected} was to come next)"] += 1
            elif number < self._acked.get(key, 0):
                self.violations["an acknowledged message came again"] += 1
            holder = self._holders.get(key)
            if holder is not None and holder is not consumer and holder not in self.leaving:
                self.violations["two consumers have messages of a key"] += 1
            self._holders[key] = consumer
            if number <= self._highest.get(key, -1):
                self.again += 1
            else:
                self._highest[key] = number
                self.messages += 1
                self.longest_wait_s = max(self.longest_wait_s, now - sent)
            self._next[key] = number + 1

    def ack(self, batch: MessageBatch) -> None:
        """About to be acknowledged."""
        for message in batch:
            key = message.key
            self._acked[key] = max(self._acked.get(key, 0), _STAMP.unpack_from(message.value or b"")[1] + 1)
            self._holders.pop(key, None)


async def churn(url: str, topic: str, *, consumers: int, every_s: float, connections: int) -> dict[str, Any]:
    """Key_Shared consumers, of whom one leaves and another one joins every `every_s` seconds; checks the order by key.

    Half of those who leave have taken something that they do not acknowledge.
    """
    driver = await Driver.open()
    rng = random.Random(2)
    order = Order()
    changes = 0
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(url)) for _ in range(connections)]
        working: dict[Consumer, asyncio.Task[None]] = {}

        async def join() -> None:
            subscribing = rng.choice(clients).subscribe(
                topic, SUBSCRIPTION, type="key_shared", start="earliest"
            )
            consumer = await subscribing
            working[consumer] = asyncio.ensure_future(work(consumer))

        async def work(consumer: Consumer) -> None:
            async for batch in consumer.batches():
                order.take(consumer, batch)
                if not rng.randrange(10):
                    await asyncio.sleep(HOLD_S)
                order.ack(batch)
                await consumer.ack(batch)

        async def leave() -> None:
            consumer = rng.choice(list(working))
            task = working.pop(consumer)
            order.leaving[consumer] = None
            task.cancel()
            await asyncio.wait([task])
            await consumer.close()

        await asyncio.gather(*(join() for _ in range(consumers)))
        driver.tell(ready=True)
        enough = asyncio.ensure_future(driver.next_line())
        began = time.perf_counter()
        while not enough.done():
            await asyncio.wait([enough], timeout=every_s)
            await leave()
            await join()
            changes += 1
            if not changes % 20:
                driver.tell(seen=order.messages, changes=changes)
        taken = time.perf_counter() - began
        for task in working.values():
            task.cancel()
        await asyncio.wait(working.values())
    return {
        "messages": order.messages, "again": order.again, "changes": changes, "seconds": taken,
        "longest_wait_s": order.longest_wait_s, "violations": dict(order.violations),
        "resident_bytes": resident_bytes(os.getpid()), "done": True,
    }  # fmt: skip


Workload = Callable[..., Awaitable[dict[str, Any]]]
WORKLOADS: dict[str, Workload] = {
    work.__name__: work
    for work in (fill_keys, fill_topics, take, stick, take_topics, fail_over, paced, churn)
}
