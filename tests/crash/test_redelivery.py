"""Nacks, redelivery counts, retry and dead-letter topics while the service is killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from magnetar.client import Client, DeadLetterPolicy, ReceiveTimeout, connect
from support.service import Service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.real]

MESSAGES = 300
LIMIT = 3


async def test_every_message_is_acknowledged_or_buried_whatever_is_killed(tmp_path: Path) -> None:
    service = Service(tmp_path / "data")
    service.start()
    try:
        async with connect(service.url, backoff_first=0.05, backoff_max=0.2) as client:
            producer = await client.create_producer("t")
            await producer.send_many([b"%d" % number for number in range(MESSAGES)])
            good: set[int] = set()
            seen: dict[int, int] = {}
            consuming = asyncio.create_task(consume(client, good, seen))
            for _ in range(3):
                await asyncio.sleep(0.4)  # what is interrupted is a matter of chance; nothing is waited for
                service.kill()
                await asyncio.to_thread(service.start)
            # What a connection that broke had handed out was counted: a message may be buried that is good, none is lost.
            buried: set[int] = set()
            everything = set(range(MESSAGES))
            async with client.create_reader("t-s-DLQ", start="earliest") as reader:
                while not (everything - good) | set(range(1, MESSAGES, 2)) <= buried:
                    assert not consuming.done(), consuming.exception()
                    with contextlib.suppress(ReceiveTimeout):
                        buried.add(int((await reader.receive(1.0)).value or b""))
            consuming.cancel()
            await asyncio.wait([consuming])
        # No count began anew: of each crash two deliveries at most are not counted, that of the moment, and the one before
        # if its count waited for the next write of the cursor (cursor_flush_interval_ms).
        assert max(seen.values()) <= 1 + LIMIT + 3 * 2
    finally:
        service.stop()


async def consume(client: Client, good: set[int], seen: dict[int, int]) -> None:
    """Acknowledges even numbers (`good`) and nacks odd ones, until it is cancelled; `seen`: how often each came."""
    policy = DeadLetterPolicy(max_redeliver_count=LIMIT)
    async with client.subscribe(
        "t",
        "s",
        type="shared",
        start="earliest",
        nack_delay=0.2,
        dead_letter=policy,
        receiver_queue_messages=50,
    ) as consumer:
        while True:
            message = await consumer.receive()
            number = int(message.value or b"")
            seen[number] = seen.get(number, 0) + 1
            if number % 2:
                consumer.nack(message)
            else:
                await consumer.ack(message)
                good.add(number)
            await asyncio.sleep(0.001)
