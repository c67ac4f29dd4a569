"""A subscription with many holes, whose broker is killed, and which another broker process takes over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from bench.service_process import ServiceProcess

from magnetar.client import Client, connect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.real]

ENTRIES, MESSAGES = 50, 400


async def test_every_hole_and_nothing_else_is_delivered_after_kill_9(tmp_path: Path) -> None:
    """The bookie lives on: the next broker fences and recovers the ledgers of topic and cursor. 10,000 holes."""
    bookie = ServiceProcess(tmp_path / "bookie", command="bookie")
    with bookie:
        listed = f"b1=127.0.0.1:{bookie.ports['bookie']}"
        broker = ServiceProcess(tmp_path / "broker", command="broker", arguments=["--bookies", listed])
        with broker:
            async with connect(broker.url) as client:
                await make_holes(client)
                await asyncio.to_thread(broker.kill, "daemon")
            await asyncio.to_thread(broker.start)
            async with connect(broker.url) as client:
                left = await rest(client)
            assert left == [number for number in range(ENTRIES * MESSAGES) if number % 2 == 0]


async def make_holes(client: Client) -> None:
    """Every odd message is acknowledged, with a receipt for the messages of some entries at a time."""
    async with client.create_producer("holes") as producer:
        for first in range(0, ENTRIES * MESSAGES, MESSAGES):
            await producer.send_many([b"%d" % number for number in range(first, first + MESSAGES)])
    async with client.subscribe("holes", "s", type="shared", start="earliest") as consumer:
        seen = 0
        async for batch in consumer.batches():
            seen += len(batch)
            await consumer.ack([message for message in batch if int(message.value or b"") % 2], receipt=True)
            if seen == ENTRIES * MESSAGES:
                return


async def rest(client: Client) -> list[int]:
    """All that is delivered until what was sent last has come: in order, since nothing is delivered twice."""
    found: list[int] = []
    async with client.create_producer("holes") as producer:
        await producer.send(b"-1")
    async with client.subscribe("holes", "s", type="shared") as consumer:
        async for batch in consumer.batches():
            found += [int(message.value or b"") for message in batch]
            if found[-1] == -1:
                return found[:-1]
    raise AssertionError("the consumer was closed")
