"""The broker's own rounds have an owner that begins them anew after a defect, and says so."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from magnetar.broker.ownership.balance.balancing import Balancing
from magnetar.broker.ownership.balance.settings import BalanceSettings
from magnetar.broker.topics.watches import TopicWatches
from magnetar.runtime.tasks import LongTask, long_tasks
from support.broker_kit import running_broker, settle
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.virtual_time import in_virtual_time


def long_task(name: str) -> LongTask:
    """The only one of this name."""
    (task,) = [task for task in long_tasks() if task.name == name]
    return task


@pytest.mark.parametrize(
    ("name", "part"),
    [("the maintenance of topics", "_round"), ("the expiry of messages", "_for_all_topics")],
)
def test_rule_46_rounds_of_topics_go_on_after_a_defect(
    name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @in_virtual_time
    async def run() -> None:
        rounds: dict[str, Any] = {"maintenance_interval_s": 10.0, "message_expiry_interval_s": 10.0}
        async with running_broker(FakeLedgers(), **rounds) as broker:
            real, calls = getattr(broker, part), 0
            failed: list[int] = []

            async def broken(*arguments: Any) -> Any:
                nonlocal calls
                calls += not arguments or arguments[0] == "expiry"
                if calls == 1 and not failed:
                    failed.append(calls)
                    raise ValueError("a defect")
                return await real(*arguments)

            monkeypatch.setattr(broker, part, broken)
            await asyncio.sleep(10.5)
            assert calls == 1
            task = long_task(name)
            assert (task.failures, task.trouble) == (1, "ValueError: a defect")
            await asyncio.sleep(60)
            assert calls > 3
            assert (task.failures, task.last_error, task.trouble) == (1, "ValueError: a defect", "")
        assert long_tasks() == [], "all are closed with their broker"

    run()


@in_virtual_time
async def test_rule_46_topics_of_a_namespace_are_followed_after_a_defect() -> None:
    store: Any = MemoryMetadataStore()
    real, failures = store.children, 1

    async def children(path: str) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise KeyError("a defect")
        return await real(path)

    store.children = children
    watches = TopicWatches(store)
    begins = asyncio.ensure_future(watches.watch("public/default", lambda topic, exists: None))
    await settle()
    assert long_task("the list of topics of namespace public/default").failures == 1
    await asyncio.wait_for(begins, 10)
    watches.close()
    assert long_tasks() == []
    await asyncio.sleep(1)


class Part:
    """Of the balancing: one that meets a defect, and goes on when it is begun again."""

    def __init__(self) -> None:
        self.begun = 0

    async def serve(self, _: object) -> None:
        """See BalanceLeader."""
        self.begun += 1
        if self.begun == 1:
            raise ValueError("a defect")
        await asyncio.Event().wait()


@in_virtual_time
async def test_rule_46_the_parts_of_balancing_go_on_each_by_itself_after_a_defect() -> None:
    metadata: Any = MemoryMetadataStore()
    anything: Any = SimpleNamespace(counters=None)
    settings, rng = BalanceSettings(), random.Random(1)
    balancing = Balancing(metadata, anything, anything, settings, rng, "a", print, anything)
    parts = vars(balancing)
    broken, well = Part(), Part()
    well.begun = 1
    parts["_leader"], parts["_reporter"], parts["_report_load"] = broken, well, well.serve
    session = await metadata.open_session(10.0)
    serving = asyncio.create_task(balancing.serve(session))
    await asyncio.sleep(0.5)
    assert long_task("the balance of the cluster").trouble == "ValueError: a defect"
    await asyncio.sleep(10)
    assert (broken.begun, well.begun) == (2, 3)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert long_tasks() == []
    await session.close()
