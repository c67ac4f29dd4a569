"""The balancer on a real ZooKeeper: brokers report, one of them leads, requests are made; another one takes over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from magnetar.broker.ownership.balance import BalanceSettings
from magnetar.broker.ownership.balance.loads import LoadReporter
from magnetar.broker.ownership.records import BALANCER_PATH
from support.balance_kit import ClusterNodes, Counting
from support.zookeeper import Ensemble, opened

pytestmark = [pytest.mark.integration, pytest.mark.real]

FAST = BalanceSettings(balance_interval_s=0.2, report_interval_s=0.1, load_settle_s=0.1, move_cooldown_s=60)
BUNDLES = [f"t/n/0x{number:08x}_0x{number + 9:08x}" for number in range(0, 60, 10)]


async def eventually(condition: Callable[[], bool]) -> None:
    """Until it holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


async def test_reports_lead_to_requests_and_the_leader_is_replaced(zookeeper: Ensemble, root: str) -> None:
    url = zookeeper.url + root
    async with opened(url) as store_a, opened(url) as store_b:
        sessions = {"a": await store_a.open_session(4), "b": await store_b.open_session(4)}
        nodes = {"a": ClusterNodes(store_a), "b": ClusterNodes(store_b)}
        sources = {"a": Counting(), "b": Counting()}
        for bundle in BUNDLES:
            sources["a"].serve(bundle, topics=3)
            await nodes["a"].own(sessions["a"], bundle, "a")
        await nodes["a"].add_broker(sessions["a"], "a", cpu=0.6)
        await nodes["b"].add_broker(sessions["b"], "b", cpu=0.1)
        leaders, tasks = {}, []

        async def traffic() -> None:
            while True:
                for bundle in BUNDLES:
                    sources["a"].count(bundle, 500, 50_000)
                await asyncio.sleep(0.05)

        tasks.append(asyncio.ensure_future(traffic()))
        for name, store in (("a", store_a), ("b", store_b)):
            reporter = LoadReporter(store, sources[name].counters, FAST, random.Random(1), name)
            leaders[name] = nodes[name].leader(name, FAST)
            tasks.append(asyncio.ensure_future(reporter.serve(sessions[name])))
            tasks.append(asyncio.ensure_future(leaders[name].serve(sessions[name])))
            await eventually(lambda: leaders["a"].elected)
        await eventually(lambda: leaders["a"].figures()["balancer_moves_total"] > 0)
        assert not leaders["b"].elected
        async with asyncio.timeout(20):
            while not (requests := await nodes["b"].requests()):
                await asyncio.sleep(0.02)
        assert {(one.to, one.split) for one in requests.values()} == {("b", False)}
        # Broker a goes: its nodes go with its session, and b leads. Nothing is left that could be moved.
        await sessions["a"].close()
        await eventually(lambda: leaders["b"].elected and leaders["b"].rounds >= 4)
        assert leaders["b"].figures()["balancer_moves_total"] == 0
        node = await store_b.get(BALANCER_PATH)
        assert node is not None
        assert node.value == b"b"
        assert await store_b.children("/bundle-loads") == ["b"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
