"""Topics that other brokers of the cluster make, as one who watches a namespace learns of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.broker.log.records import TOPICS_ROOT
from magnetar.broker.topics import watches
from magnetar.broker.topics.watches import TopicWatches
from magnetar.proto import commands as c
from magnetar.proto.errors import ConnectionLost
from support.broker_kit import FakeClient, running_broker
from support.memory_metadata import MemoryMetadataStore

NAMESPACE = "public/default"


class Seen(asyncio.Queue[tuple[str, bool]]):
    """What a watch is told."""

    def topic_changed(self, topic: str, exists: bool) -> None:
        """See TopicWatch."""
        self.put_nowait((topic, exists))


async def test_a_list_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the next one came with the next change, so whoever watched waited for that."""
    monkeypatch.setattr(watches, "LIST_INTERVAL_S", 0.001)
    store = MemoryMetadataStore()
    list_children = store.children
    failures = 1

    async def children(path: str) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise ConnectionLost("the request is lost")
        return await list_children(path)

    monkeypatch.setattr(store, "children", children)
    found, seen = TopicWatches(store), Seen()
    try:
        async with asyncio.timeout(5):
            await found.watch(NAMESPACE, seen.topic_changed)
            failures = 1
            await store.create(f"{TOPICS_ROOT}/{NAMESPACE}/persistent/made-elsewhere", b"")
            assert await seen.get() == (f"persistent://{NAMESPACE}/made-elsewhere", True)
    finally:
        found.close()


async def test_rule_44_a_watch_that_ends_while_it_begins_leaves_nothing_at_the_broker() -> None:
    """Regression: what ends a watch was not known yet, so the broker went on telling one that nobody had any more."""
    async with running_broker() as broker:
        client = FakeClient(broker)
        gate, watch = asyncio.Event(), broker.watches.watch

        async def slowly(*given: Any) -> Any:
            stop = await watch(*given)
            await gate.wait()
            return stop

        broker.watches.watch = slowly  # type: ignore[assignment, method-assign]
        begins = client.ask(c.WatchTopics, 1, NAMESPACE)
        await asyncio.sleep(0)
        ends = client.ask(c.WatchTopics, 1, "")
        await ends
        gate.set()
        await begins
        await asyncio.sleep(0)
        assert not broker.watches._watches
