"""What tests of the client against a fake broker share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from magnetar.proto.batch import encode_batch

from .fake_broker import FakeBroker


def fill(broker: FakeBroker, count: int, *, batch: int = 1, entry: int = 10, name: str = "t") -> list[bytes]:
    """`count` messages in batches of `batch`, `entry` batches an entry; returns the values."""
    values = [b"%d" % i for i in range(count)]
    batches = [
        encode_batch(values[i : i + batch], sequence_id=i, publish_time_ms=broker.now_ms)
        for i in range(0, count, batch)
    ]
    for i in range(0, len(batches), entry):
        part = batches[i : i + entry]
        broker.store(broker.topic(name), part, [batch] * len(part), "p")
    return values


async def until(condition: Callable[..., Any]) -> None:
    """Returns when `condition` holds; fails after 5 s."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def until_sent(producer: Any, sequence_id: int) -> None:
    """Returns when the message with this id, or its first chunk, is on its way."""
    await until(lambda: producer._producer._sent_through >= sequence_id)


async def take(consumer: Any, count: int) -> list[Any]:
    """The next `count` messages, each within 2 s."""
    return [await consumer.receive(2.0) for _ in range(count)]
