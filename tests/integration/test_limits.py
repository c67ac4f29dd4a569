"""Rates of a real service, with the clocks, sockets and disks that there are, on a quiet machine: ten seconds a row.

    LONG=1 pytest tests/integration/test_limits.py

A service that gets no processor for more than 50 ms gives less than its rate. In virtual time, as `make test` plays them:
tests/unit/broker/test_limits_pace.py and test_limits_adversary.py.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.client import Client, connect
from support.long_form import long_form
from support.service import Service

pytestmark = [pytest.mark.integration, pytest.mark.real, long_form]

RATE = 1_000
SECONDS = 10.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    started = Service(tmp_path_factory.mktemp("service") / "data")
    started.start()
    yield started
    started.stop()


async def send_for_ever(producer: Any, size: int) -> None:
    """As fast as it takes them."""
    while True:
        await asyncio.gather(*[producer.send_nowait(b"m" * size) for _ in range(200)])


async def check(client: Client, topic: str, *, times: int = 1, parts: int = 1) -> None:
    """What comes out of a topic with `parts` times the rate, `times` consumers."""
    passed: list[float] = []

    async def consume() -> None:
        async with client.subscribe(topic, "all", type="shared") as consumer:
            while True:
                message = await consumer.receive()
                passed.append(time.monotonic())
                await consumer.ack(message)

    consumers = [asyncio.ensure_future(consume()) for _ in range(times)]
    await asyncio.sleep(2)
    begin = time.monotonic()
    await asyncio.sleep(SECONDS)
    for consumer in consumers:
        consumer.cancel()
    await asyncio.gather(*consumers, return_exceptions=True)
    counted = [at for at in passed if begin <= at < begin + SECONDS]
    wanted = RATE * parts * SECONDS
    assert abs(len(counted) - wanted) <= 0.05 * wanted, len(counted)
    in_100_ms = Counter(int((at - begin) * 10) for at in counted)
    too_many = [count for count in in_100_ms.values() if count > 2 * RATE * parts * 0.1]
    assert len(too_many) <= 2, too_many  # this program has its pauses, and then gets all at once


@pytest.mark.parametrize(
    ("policies", "partitions", "producers", "size"),
    [
        ({"publish_rate_messages": RATE}, 0, 3, 10),
        ({"publish_rate_messages": RATE}, 3, 2, 10),
        (
            {"publish_rate_bytes": RATE * 1_068},
            0,
            2,
            1_000,
        ),  # 68: what a message takes in an entry beside its value
    ],
    ids=["messages", "partitions", "bytes"],
)
async def test_publish_rates(
    service: Service, policies: dict[str, int], partitions: int, producers: int, size: int
) -> None:
    topic = f"published-{next(NUMBERS)}"
    async with connect(service.url) as client:
        await client.admin.create_topic(topic, partitions=partitions)
        await client.admin.update_topic_policies(topic, policies)
        opened = [await client.create_producer(topic, batching=False) for _ in range(producers)]
        sending = [asyncio.ensure_future(send_for_ever(producer, size)) for producer in 20 * opened]
        await check(client, topic, parts=partitions or 1)
        for task in sending:
            task.cancel()
        await client.admin.update_topic_policies(topic, dict.fromkeys(policies))
        for producer in opened:
            await asyncio.wait_for(producer.close(), 5)


NUMBERS = itertools.count()


async def test_dispatch_rate_of_two_consumers(service: Service) -> None:
    async with connect(service.url) as client:
        await client.admin.create_topic("delivered")
        await client.admin.create_subscription("delivered", "all")
        async with client.create_producer("delivered", batching=False) as producer:
            for _ in range(15):
                await asyncio.gather(*[producer.send_nowait(b"m") for _ in range(RATE)])
        await client.admin.update_topic_policies("delivered", {"subscription_dispatch_rate_messages": RATE})
        await check(client, "delivered", times=2)


HELD = """
import asyncio, sys
from magnetar.client import connect
async def main():
    async with connect(sys.argv[1]) as client, client.create_producer("held", batching=False) as producer:
        while True:
            try:
                async with asyncio.timeout(1):
                    await producer.send(b"m" * 100)
            except TimeoutError:
                print("held", flush=True)
asyncio.run(main())
"""


async def test_a_program_that_is_killed_while_it_is_held_is_in_nobodys_way(
    service: Service, tmp_path: Path
) -> None:
    async with connect(service.url) as client:
        await client.admin.create_topic("held")
        await client.admin.create_subscription("held", "slow")
        await client.admin.update_topic_policies(
            "held", {"backlog_quota_bytes": 5_000, "backlog_quota_action": "hold", "max_producers": 1}
        )
        with subprocess.Popen([sys.executable, "-c", HELD, service.url], stdout=subprocess.PIPE) as program:
            assert program.stdout is not None
            assert await asyncio.to_thread(program.stdout.readline) == b"held\n"
            program.kill()
        await client.admin.delete_subscription("held", "slow")
        async with client.create_producer("held") as producer:
            await asyncio.wait_for(producer.send(b"goes on"), 10)
