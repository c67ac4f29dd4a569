"""(d), (e): how long one message takes."""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from collections.abc import Awaitable
from typing import Any

from bench.percentiles import percentiles
from magnetar.client import connect

WARM_UP = 100
TICK_S = 0.001  # the resolution of the loop's timers
_STAMP = struct.Struct(">d")


async def synchronous(url: str, topic: str, *, messages: int, size: int) -> dict[str, Any]:
    """(d): `await producer.send`, one at a time."""
    value = b"x" * size
    times: list[float] = []
    async with connect(url) as client, client.create_producer(topic) as producer:
        for _ in range(WARM_UP):
            await producer.send(value)
        for _ in range(messages):
            began = time.perf_counter()
            await producer.send(value)
            times.append(time.perf_counter() - began)
    return percentiles(times)._asdict() | {"messages": messages + WARM_UP}


async def end_to_end(url: str, topic: str, *, rate: int, seconds: float, size: int) -> dict[str, Any]:
    """(e): from the call of send_nowait to the tailing reader's loop body, in one process, at a steady rate.

    Unbatched, as one does it for latency: a batch would wait up to a millisecond for company while something is in flight.
    The first tenth is warming up. "samples" are when each message was sent, and the seconds until it was there.
    """
    messages = int(rate * seconds)
    samples: list[tuple[float, float]] = []
    async with (
        connect(url) as client,
        client.create_producer(topic, batching=False) as producer,
        client.create_reader(topic, start="earliest") as reader,
    ):

        async def tail() -> None:
            async for message in reader:
                sent_at = _STAMP.unpack_from(message.value or b"")[0]
                samples.append((sent_at, time.perf_counter() - sent_at))
                if len(samples) == messages:
                    return

        tailing = asyncio.ensure_future(tail())
        pad = bytes(size - _STAMP.size)
        pending: deque[Awaitable[Any]] = deque()
        sent = 0
        began = time.perf_counter()
        while sent < messages:
            # What fell due since the last turn: about ten messages.
            due = min(messages, int((time.perf_counter() - began) * rate) + 1)
            for _ in range(due - sent):
                pending.append(producer.send_nowait(_STAMP.pack(time.perf_counter()) + pad))
            sent = due
            await asyncio.sleep(TICK_S)
        taken = time.perf_counter() - began
        for receipt in pending:
            await receipt
        await tailing
    return {"samples": samples[messages // 10 :], "messages": messages, "rate": messages / taken}
