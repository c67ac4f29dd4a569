"""(a), (b), (c): produce as fast as it goes while a reader tails; a message counts when it was confirmed and has arrived."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable
from typing import Any

from magnetar.client import Client, connect

IN_FLIGHT_MESSAGES = 20_000
CHUNK = 500
BATCHES_IN_FLIGHT = 12


async def unbatched(url: str, topic: str, *, messages: int, size: int) -> dict[str, Any]:
    """(a): per-message calls on both sides, one message a batch on the wire."""
    async with connect(url) as client:
        return await _with_tail(
            client, topic, messages, _send_singly(client, topic, messages, size), batches=False
        )


async def batched(url: str, topic: str, *, messages: int, size: int, batch: int) -> dict[str, Any]:
    """(b), (c): send_many and batches() in one process."""
    async with connect(url) as client:
        sending = _send_batches(client, topic, messages, size, batch)
        return await _with_tail(client, topic, messages, sending, batches=True)


async def produce_batched(url: str, topic: str, *, messages: int, size: int, batch: int) -> dict[str, Any]:
    """(b) apart: the producing process."""
    async with connect(url) as client:
        began = time.time()
        await _send_batches(client, topic, messages, size, batch)
        return {"began": began, "ended": time.time(), "messages": messages}


async def tail_batched(url: str, topic: str, *, messages: int) -> dict[str, Any]:
    """(b) apart: the tailing process; it prints a line when it is ready."""
    async with connect(url) as client, client.create_reader(topic, start="earliest") as reader:
        print("ready", flush=True)
        seen = 0
        async for batch in reader.batches():
            seen += len(batch)
            if seen >= messages:
                break
        return {"ended": time.time(), "messages": seen}


async def _with_tail(
    client: Client, topic: str, messages: int, sending: Awaitable[None], *, batches: bool
) -> dict[str, Any]:
    """Rate from the first send to the last arrival."""

    async def tail() -> None:
        seen = 0
        if batches:
            async for batch in reader.batches():
                seen += len(batch)
                if seen >= messages:
                    return
        async for _message in reader:
            seen += 1
            if seen >= messages:
                return

    async with client.create_reader(topic, start="earliest") as reader:
        tailing = asyncio.ensure_future(tail())
        began = time.perf_counter()
        await sending
        sent = time.perf_counter() - began
        await tailing
        seconds = time.perf_counter() - began
    return {
        "rate": messages / seconds,
        "confirmed_rate": messages / sent,
        "seconds": seconds,
        "messages": messages,
    }


async def _send_singly(client: Client, topic: str, messages: int, size: int) -> None:
    value = b"x" * size
    async with client.create_producer(topic, batching=False, send_timeout=60.0) as producer:
        send = producer.send_nowait
        pending: deque[Awaitable[Any]] = deque()
        for _ in range(messages // CHUNK):
            for _ in range(CHUNK - 1):
                send(value)
            # Receipts come in order: the last of a chunk speaks for all of it.
            pending.append(send(value))
            if len(pending) >= IN_FLIGHT_MESSAGES // CHUNK:
                await pending.popleft()
            else:
                await asyncio.sleep(0)
        for _ in range(messages % CHUNK):
            send(value)
        await producer.flush()


async def _send_batches(client: Client, topic: str, messages: int, size: int, batch: int) -> None:
    values = [b"x" * size] * batch
    async with client.create_producer(
        topic, batching_max_messages=max(batch, 1000), batching_max_bytes=1 << 20, send_timeout=60.0
    ) as producer:
        pending: deque[asyncio.Future[Any]] = deque()
        for _ in range(messages // batch):
            pending.append(asyncio.ensure_future(producer.send_many(values)))
            if len(pending) >= BATCHES_IN_FLIGHT:
                await pending.popleft()
        while pending:
            await pending.popleft()
        await producer.flush()
