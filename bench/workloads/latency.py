"""(d), (e): how long one message takes."""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from collections.abc import Awaitable
from typing import Any

from bench.machine import percentile
from magnetar.client import connect

WARM_UP = 50
TICK_S = 0.001
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
    return _percentiles(times) | {"messages": messages}


async def end_to_end(url: str, topic: str, *, rate: int, seconds: float, size: int) -> dict[str, Any]:
    """(e): from send_nowait to the tailing reader, in one process, at a steady rate; ten messages a millisecond."""
    messages = int(rate * seconds)
    times: list[float] = []
    async with (
        connect(url) as client,
        client.create_reader(topic, start="earliest") as reader,
        client.create_producer(topic) as producer,
    ):

        async def tail() -> None:
            async for message in reader:
                times.append(time.perf_counter() - _STAMP.unpack_from(message.value or b"")[0])
                if len(times) >= messages:
                    return

        tailing = asyncio.ensure_future(tail())
        pad = bytes(size - _STAMP.size)
        pending: deque[Awaitable[Any]] = deque()
        sent = 0
        began = time.perf_counter()
        while sent < messages:
            due = min(messages, int((time.perf_counter() - began) * rate) + 1)
            for _ in range(due - sent):
                pending.append(producer.send_nowait(_STAMP.pack(time.perf_counter()) + pad))
            sent = due
            await asyncio.sleep(TICK_S)
        for receipt in pending:
            await receipt
        await tailing
        taken = time.perf_counter() - began
    # The first tenth is warming up.
    return _percentiles(times[len(times) // 10 :]) | {"messages": messages, "rate": messages / taken}


def _percentiles(times: list[float]) -> dict[str, float]:
    return {
        "p50": percentile(times, 50) * 1e3,
        "p99": percentile(times, 99) * 1e3,
        "p999": percentile(times, 99.9) * 1e3,
    }
