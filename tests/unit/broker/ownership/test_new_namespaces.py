"""Namespaces in which nobody made a topic yet: anybody can look up a topic there, whatever it is called."""

import asyncio

import pytest

from magnetar.broker.ownership.balance import BalanceSettings
from magnetar.broker.ownership.ownership import Located
from magnetar.metadata.store import Versioned
from magnetar.proto.errors import InvalidArgument, TopicNotFound, TopicNotServed
from magnetar.proto.ids import TopicName
from support.broker_kit import running_broker
from support.cluster_kit import brokers
from support.memory_metadata import MemoryMetadataStore
from unit.broker.ownership.test_ownership import TOPICS, locate, owner


async def nodes(metadata: MemoryMetadataStore, path: str = "") -> list[str]:
    """All below a path."""
    found = []
    for name in await metadata.children(path or "/"):
        found += [f"{path}/{name}", *await nodes(metadata, f"{path}/{name}")]
    return found


async def test_rule_47_looking_up_topics_of_made_up_namespaces_leaves_nothing_behind() -> None:
    async with brokers("a", "b") as cluster:
        a, b = cluster.brokers.values()
        before = await nodes(cluster.metadata)
        watched: list[str] = []
        watch = cluster.metadata.watch

        def recorded(path: str, callback: object) -> object:
            watched.append(path)
            return watch(path, callback)  # type: ignore[arg-type]

        cluster.metadata.watch = recorded  # type: ignore[method-assign, assignment]
        for number in range(10_000):
            name = TopicName.parse(f"made-up/{number}/topic")
            if number % 2:
                found = await locate(a, name)
                assert found.final is (found.url == a.url)
            else:
                assert await locate(b, name, authoritative=True) == Located(b.url, True)
        for number in range(100):
            assert {row.broker for row in await a.ownership.administration.bundles(f"made-up/{number}")} == {
                ""
            }
            with pytest.raises(TopicNotFound):
                await b.broker.topic(TopicName.parse(f"made-up/{number}/topic"), create=False)
        assert await nodes(cluster.metadata) == before
        assert watched == []
        assert not a.ownership.held
        assert not b.ownership.held


async def test_look_ups_of_made_up_namespaces_fill_no_broker() -> None:
    async with brokers("a", "b", balance=BalanceSettings(max_bundles=20)) as cluster:
        a, _ = cluster.brokers.values()
        for number in range(100):
            await locate(a, TopicName.parse(f"made-up/{number}/topic"))
        await owner(cluster, TOPICS[0])


async def test_whoever_makes_the_first_topic_of_a_namespace_owns_its_bundle() -> None:
    async with brokers("a", "b", default_bundles=1) as cluster:
        name = TopicName.parse("new/space/first")
        found = await owner(cluster, name)
        await found.broker.topic(name, create=True)
        other = next(one for one in cluster.brokers.values() if one is not found)
        assert await locate(other, name, authoritative=True) == Located(found.url, True)
        with pytest.raises(TopicNotServed):
            await other.broker.topic(TopicName.parse("new/space/second"), create=True)
        (row,) = await other.ownership.administration.bundles("new/space")
        assert row.url == found.url


async def test_brokers_that_make_the_first_topic_at_the_same_time_end_with_one_owner() -> None:
    async with brokers("a", "b", "c") as cluster:
        for number in range(10):
            name = TopicName.parse(f"new/{number}/topic")
            made = [one.broker.topic(name, create=True) for one in cluster.brokers.values()]
            results = await asyncio.gather(*made, return_exceptions=True)
            assert sum(isinstance(result, TopicNotServed) for result in results) == len(results) - 1, results
            assert [name.name] in [one.topics[-1:] for one in cluster.brokers.values()]


async def test_one_broker_makes_topics_of_several_bundles_of_a_new_namespace_at_once() -> None:
    async with brokers("a", default_bundles=16) as cluster:
        (a,) = cluster.brokers.values()
        names = [TopicName.parse(f"new/space/{number}") for number in range(40)]
        await asyncio.gather(*(a.broker.topic(name, create=True) for name in names))
        assert len(a.topics) == len(names)


async def test_topics_of_a_broker_that_was_alone_are_found_in_a_cluster() -> None:
    async with brokers("a") as cluster:
        (a,) = cluster.brokers.values()
        name = TopicName.parse("old/space/topic")
        async with running_broker(metadata=cluster.metadata, ledgers=cluster.ledgers) as alone:
            await alone.topic(name, create=True)
        assert await locate(a, name) == Located(a.url, True)
        assert (await a.broker.topic(name, create=False)).name == name


async def test_a_drained_broker_takes_no_new_namespace() -> None:
    async with brokers("a", "b") as cluster:
        a, b = cluster.brokers.values()
        await b.ownership.administration.drain("a")
        name = TopicName.parse("new/space/topic")
        assert await locate(a, name, authoritative=True) == Located(b.url, False)
        with pytest.raises((TopicNotServed, InvalidArgument)):
            await a.broker.topic(name, create=True)


async def test_a_broker_without_a_session_asks_the_store_for_nothing_before_it_sends_clients_away() -> None:
    async with brokers("a") as cluster:
        (a,) = cluster.brokers.values()
        asked: list[str] = []
        get = cluster.metadata.get

        async def recorded(path: str) -> Versioned | None:
            asked.append(path)
            return await get(path)

        cluster.expire("a")
        cluster.metadata.get = recorded  # type: ignore[method-assign]
        opening = a.broker.topic(TopicName.parse("new/space/topic"), create=True)
        with pytest.raises(TopicNotServed):
            opening.send(None)  # not even a turn of the loop
        assert asked == []
