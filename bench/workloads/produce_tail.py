"""(a), (b), (c), (i): produce as fast as it goes while a reader tails.

A message counts when it was confirmed and has arrived.

A tenth more is sent first, to warm up: it is counted in the CPU, not in the rate.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from magnetar.client import Producer, Reader, connect

IN_FLIGHT_MESSAGES = 20_000
CHUNK = 500
BATCHES_IN_FLIGHT = 48  # a twelfth of max_pending_bytes: enough for 4 ms syncs at these rates
SEND_TIMEOUT_S = 60.0
KEYS = [f"customer-{number:05}" for number in range(CHUNK)]  # of (i)


async def unbatched(url: str, topic: str, *, messages: int, size: int, keyed: bool = False) -> dict[str, Any]:
    """(a), (i): per-message calls on both sides, one message a batch on the wire."""
    async with (
        connect(url) as client,
        client.create_producer(topic, batching=False, send_timeout=SEND_TIMEOUT_S) as producer,
        client.create_reader(topic, start="earliest") as reader,
    ):

        async def once(count: int) -> None:
            tailing = asyncio.ensure_future(tail_messages(reader, count))
            await send_singly(producer, count, size, keyed=keyed)
            await tailing

        return await measured(once, messages, CHUNK)


async def batched(
    url: str, topic: str, *, messages: int, size: int, batch: int, keyed: bool = False
) -> dict[str, Any]:
    """(b), (c), (i): send_many and batches() in one process."""
    async with (
        connect(url) as client,
        client.create_producer(topic, send_timeout=SEND_TIMEOUT_S) as producer,
        client.create_reader(topic, start="earliest") as reader,
    ):

        async def once(count: int) -> None:
            tailing = asyncio.ensure_future(tail_batches(reader, count))
            await send_batches(producer, count, size, batch, keyed=keyed)
            await tailing

        return await measured(once, messages, batch)


async def produce_batched(url: str, topic: str, *, messages: int, size: int, batch: int) -> dict[str, Any]:
    """(b) apart: the producing process. It warms up with whole batches, and pauses so that the reader is through."""
    warm_up = warm_up_messages(messages, batch)
    async with (
        connect(url) as client,
        client.create_producer(topic, send_timeout=SEND_TIMEOUT_S) as producer,
    ):
        await send_batches(producer, warm_up, size, batch)
        await asyncio.sleep(0.2)
        began = time.perf_counter()
        await send_batches(producer, messages, size, batch)
    return {"began": began, "ended": time.perf_counter(), "messages": messages + warm_up}


async def tail_batched(url: str, topic: str, *, messages: int, batch: int) -> dict[str, Any]:
    """(b) apart: the tailing process; it prints a line when it is ready."""
    expected = messages + warm_up_messages(messages, batch)
    async with connect(url) as client, client.create_reader(topic, start="earliest") as reader:
        print("ready", flush=True)
        await tail_batches(reader, expected)
        return {"ended": time.perf_counter(), "messages": expected}


def warm_up_messages(messages: int, unit: int) -> int:
    """A tenth, in whole units."""
    return max(1, messages // 10 // unit) * unit


async def measured(once: Callable[[int], Awaitable[None]], messages: int, unit: int) -> dict[str, Any]:
    """Rate from the first send to the last receipt and the last arrival."""
    warm_up = warm_up_messages(messages, unit)
    await once(warm_up)
    began = time.perf_counter()
    await once(messages)
    seconds = time.perf_counter() - began
    return {"rate": messages / seconds, "seconds": seconds, "messages": messages + warm_up}


async def tail_messages(reader: Reader, count: int) -> None:
    """One at a time."""
    seen = 0
    async for _message in reader:
        seen += 1
        if seen == count:
            return


async def tail_batches(reader: Reader, count: int) -> None:
    """A batch at a time."""
    seen = 0
    async for batch in reader.batches():
        seen += len(batch)
        if seen >= count:
            assert seen == count, f"{seen} messages arrived, {count} were sent"
            return


async def send_singly(producer: Producer, messages: int, size: int, *, keyed: bool = False) -> None:
    """`send_nowait` with at most IN_FLIGHT_MESSAGES unconfirmed; returns when all are confirmed."""
    value = b"x" * size
    send = producer.send_nowait
    pending: deque[Awaitable[Any]] = deque()
    for first in range(0, messages, CHUNK):
        count = min(CHUNK, messages - first)
        if keyed:
            for key in KEYS[1:count]:
                send(value, key)
        else:
            for _ in range(count - 1):
                send(value)
        # Receipts come in order: the last of a chunk speaks for all of it.
        pending.append(send(value, KEYS[0] if keyed else None))
        if len(pending) >= IN_FLIGHT_MESSAGES // CHUNK:
            await pending.popleft()
        await asyncio.sleep(0)
    await producer.flush()
    for receipt in pending:
        await receipt


async def send_batches(
    producer: Producer, messages: int, size: int, batch: int, *, keyed: bool = False
) -> None:
    """`send_many` with BATCHES_IN_FLIGHT calls unconfirmed; returns when all are confirmed."""
    values = [b"x" * size] * batch
    keys = (KEYS * -(-batch // len(KEYS)))[:batch] if keyed else None
    pending: deque[asyncio.Future[Any]] = deque()
    for _ in range(messages // batch):
        pending.append(asyncio.ensure_future(producer.send_many(values, keys=keys)))
        if len(pending) >= BATCHES_IN_FLIGHT:
            await pending.popleft()
    while pending:
        await pending.popleft()
