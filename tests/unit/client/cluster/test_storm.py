"""A broker with thousands of producers fails, in virtual time: all find its successor, and no broker meets a storm."""

import asyncio
import random
from collections import Counter

import pytest

from magnetar.client import Client, connect
from magnetar.proto.commands import CreateProducer, Lookup
from support.fake_cluster import FakeCluster
from support.virtual_time import in_virtual_time

SESSION_TIMEOUT_S = 3.0


async def open_producers(client: Client, first: int, count: int) -> None:
    await asyncio.gather(*[client.create_producer(f"t{number}") for number in range(first, first + count)])


async def fail_over(clients: int, producers: int) -> tuple[FakeCluster, Counter[int], float]:
    """The requests after the failure, by the tenth of a second since then, and how long after the end of the owner's session
    the last producer was attached again."""
    loop = asyncio.get_running_loop()
    async with FakeCluster.of(3) as cluster:
        opened = [
            await connect(cluster.url, rng=random.Random(number), operation_timeout=60.0)
            for number in range(clients)
        ]
        await asyncio.gather(
            *[open_producers(client, number * producers, producers) for number, client in enumerate(opened)]
        )
        for broker in cluster.brokers:
            broker.commands.clear()
            broker.times.clear()
        loop.network.latency = (1e-3, 2e-3)  # type: ignore[attr-defined]
        failed_at = loop.time()
        cluster.fail(0)
        await asyncio.sleep(SESSION_TIMEOUT_S)
        cluster.give(0, 1)
        over_at = loop.time()
        while len(cluster.brokers[1].received(CreateProducer)) < clients * producers:
            await asyncio.sleep(0.01)
        took = loop.time() - over_at
        tenths = Counter(int((time - failed_at) * 10) for broker in cluster.brokers for time in broker.times)
        for client in opened:
            await client.abort()
        return cluster, tenths, took


@pytest.mark.parametrize(
    ("clients", "producers", "most"),
    [
        # 64 look-ups at once, each answered within 5 ms.
        pytest.param(1, 2_000, 2_700, id="one client"),
        # Two requests each to find the owner and to report it, one to follow; without pauses most in one tenth.
        pytest.param(300, 10, 2_000, id="many clients"),
    ],
)
def test_a_failed_broker_with_many_producers(clients: int, producers: int, most: int) -> None:
    @in_virtual_time
    async def run() -> None:
        cluster, tenths, took = await fail_over(clients, producers)
        assert max(tenths.values()) <= most, dict(sorted(tenths.items()))
        assert took < 1.0, "all of them are attached again soon after the owner's session has ended"
        asked = [command for broker in cluster.brokers for command in broker.received(Lookup)]
        assert len(asked) == 2 * clients * producers, (
            "asked once for the owner, reported once, and nobody polls"
        )
        attached = Counter(command.topic for command in cluster.brokers[1].received(CreateProducer))
        assert len(attached) == clients * producers
        assert set(attached.values()) == {1}

    run()
