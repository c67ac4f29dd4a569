"""Partitioned topics of brokers whose ZooKeeper servers lag behind each other, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from magnetar.broker import Broker
from magnetar.metadata.zookeeper.store import open_zookeeper_store
from magnetar.proto.errors import AlreadyExists, PartitionNotFound, TopicBusy
from magnetar.proto.ids import TopicName
from support.broker_kit import running_broker
from support.fake_ledger import FakeLedgers
from support.sim import SimLoop
from support.zookeeper_model import ModelZooKeeper

WHOLE = TopicName.parse("orders")


@asynccontextmanager
async def brokers(count: int, *lags_s: float) -> AsyncIterator[list[Broker]]:
    """Brokers that share a ZooKeeper, whose servers are behind by so much."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    model = ModelZooKeeper(loop)
    url = model.start()
    model.lags = {f"zk-{number}": lag_s for number, lag_s in enumerate(lags_s, 1)}
    ledgers = FakeLedgers()
    async with AsyncExitStack() as stack:
        found = []
        for number in range(count):
            server = url.removeprefix("zk://").split(",")[number]
            store = await open_zookeeper_store(f"zk://{server}", rng=random.Random(number), clock=loop.time)
            stack.push_async_callback(store.close)
            found.append(await stack.enter_async_context(running_broker(ledgers, store)))
        yield found


@pytest.mark.parametrize("first", [0, 1])
async def test_a_name_is_partitioned_or_not_wherever_it_is_made(first: int) -> None:
    async with brokers(2, 0.0, 0.7) as (a, b):
        for number in range(5):  # the first one makes the parents of both nodes
            name = TopicName.parse(f"orders{number}")
            calls = [a.partitioned.create(name, 3), b.topic(name, create=True)]
            ended = await asyncio.gather(*(calls[::-1] if first else calls), return_exceptions=True)
            (error,) = [one for one in ended if isinstance(one, BaseException)]
            assert isinstance(error, AlreadyExists), error


async def test_growth_reaches_a_broker_that_reads_late() -> None:
    """Whoever was told of a partition may open it anywhere: a broker that does not know it yet says nothing final."""
    async with brokers(2, 0.0, 0.5) as (a, b):
        await a.partitioned.create(WHOLE, 2)
        told: list[int] = []
        count, stop = await b.partitioned.watch(WHOLE, told.append)
        assert count == 2, "a node that is absent is looked for anew"
        await b.partitioned.check(WHOLE.partition_of(1))
        with pytest.raises(PartitionNotFound):
            await b.partitioned.check(WHOLE.partition_of(3))
        await a.partitioned.update(WHOLE, 4)
        busy = 0
        while True:
            try:
                await b.partitioned.check(WHOLE.partition_of(3))
                break
            except TopicBusy:
                busy += 1
                await asyncio.sleep(0.1)
        assert busy, "it did not know"
        await b.topic(WHOLE.partition_of(3), create=False)
        async with asyncio.timeout(5):
            while set(told) != {4}:  # once for each reading; a connection sends it once
                await asyncio.sleep(0.1)
        stop()


async def test_two_brokers_that_grow_and_delete_a_topic_leave_all_or_nothing() -> None:
    async with brokers(2, 0.3, 0.0) as (a, b):
        await a.partitioned.create(WHOLE, 2)
        ended = await asyncio.gather(
            a.partitioned.update(WHOLE, 300), b.partitioned.delete(WHOLE), return_exceptions=True
        )
        assert not any(isinstance(one, BaseException) and not isinstance(one, TopicBusy) for one in ended), (
            ended
        )
        while left := await b.partitioned.delete(WHOLE):
            for number in left:
                await b.delete_topic(WHOLE.partition_of(number), force=True)
        assert await a.metadata.children("/topics/public/default/persistent") == []
        assert await a.metadata.children("/partitioned/public/default/persistent") == []
