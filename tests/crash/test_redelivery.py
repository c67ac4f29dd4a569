"""Nacks, redelivery counts, retry and dead-letter topics while the service is killed and started again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from magnetar.client import Client, DeadLetterPolicy, ReceiveTimeout, connect
from support.service import Service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MESSAGES = 300
LIMIT = 3


async def test_every_message_is_acknowledged_or_buried_whatever_is_killed(tmp_path: Path) -> None:
    service = Service(tmp_path / "data")
    service.start()
    try:
        async with connect(service.url, backoff_first=0.05, backoff_max=0.2) as client:
            producer = await client.create_producer("t")
            await producer.send_many([b"%d" % number for number in range(MESSAGES)])
            done = asyncio.create_task(consume(client))
            for _ in range(3):
                await asyncio.sleep(0.4)  # what is interrupted is a matter of chance; nothing is waited for
                service.kill()
                await asyncio.to_thread(service.start)
            good, seen = await asyncio.wait_for(done, 60.0)
            buried = set()
            async with client.create_reader("t-s-DLQ", start="earliest") as reader:
                while await reader.has_message_available():
                    buried.add(int((await reader.receive(10.0)).value or b""))
        bad = set(range(1, MESSAGES, 2))
        assert bad <= buried
        # What was in the client when a connection broke was counted: a message may be buried that is good, none is lost.
        assert good | buried == set(range(MESSAGES))
        # No count began anew: nobody saw a message more often than the limit says, and once more for each crash, since the
        # deliveries of that moment are not counted.
        assert max(seen.values()) <= 1 + LIMIT + 3
    finally:
        service.stop()


async def consume(client: Client) -> tuple[set[int], dict[int, int]]:
    """Acknowledges even numbers and nacks odd ones, until none comes for a while; also how often each was seen."""
    good: set[int] = set()
    seen: dict[int, int] = {}
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
            try:
                message = await consumer.receive(5.0)
            except ReceiveTimeout:
                return good, seen
            number = int(message.value or b"")
            seen[number] = seen.get(number, 0) + 1
            if number % 2:
                consumer.nack(message)
            else:
                await consumer.ack(message)
                good.add(number)
            await asyncio.sleep(0.001)
