"""Namespaces and tenants are deleted whole, whatever crashes in between and whoever owns their topics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.broker import Broker
from magnetar.broker.service.broker import BrokerService
from magnetar.broker.topics.core.schemas import Schema, SchemaType
from magnetar.proto import commands as c
from magnetar.proto.errors import NotAllowed, NotEmpty, NotFound, TopicBusy, TopicNotServed
from magnetar.proto.ids import TopicName
from magnetar.proto.policies import Policies
from support.broker_kit import FakeClient, running_broker, settle
from support.cluster_kit import brokers
from support.fake_ledger import FakeLedgers
from support.memory_metadata import CrashingStore, MemoryMetadataStore, ModelKeyValue
from unit.broker.ownership.test_ownership import locate


class Everyone:
    """May do everything."""

    def authorize(self, operation: str, resource: str) -> None:
        """Allows it."""


ME = Everyone()
ROOTS = ("/namespaces", "/topics", "/partitioned", "/deletions", "/bundles", "/schemas")


async def everything(store: Any, *paths: str) -> list[str]:
    found = []
    for path in paths:
        below = [f"{path}/{name}" for name in await store.children(path)]
        found += below + await everything(store, *below)
    return found


async def filled(broker: Broker) -> FakeClient:
    """A namespace with all that it can have."""
    service, client = BrokerService(broker), FakeClient(broker)
    await service.tenancy.create_tenant(ME, "acme")
    await service.tenancy.create_namespace(ME, "acme/one", policies=Policies(message_ttl_ms=5), bundles=8)
    await client.ask(c.CreateTopic, "acme/one/parts", 2)
    await client.producer(topic="acme/one/plain")
    client.publish(b"a", b"b")
    await client.confirmed(2)
    await client.ask(c.CreateSubscription, "acme/one/parts-partition-1", "billing")
    await client.consumer(1, "audit", topic="acme/one/plain")
    await client.producer(2, "non-persistent://acme/one/light")
    await service.tenancy.grant_topic(ME, "acme/one/plain", "dave", ["produce"])
    for name in ("plain", "parts-partition-1", "light", "never-made"):
        await service.schemas.set_schema(ME, f"acme/one/{name}", Schema(SchemaType.STRING, b"", {}))
    return client


async def test_a_namespace_with_topics_is_refused_and_stays_as_it_was() -> None:
    async with running_broker() as broker:
        await filled(broker)
        tenancy = BrokerService(broker).tenancy
        with pytest.raises(NotEmpty, match=r"^Cannot delete non empty namespace"):
            await tenancy.delete_namespace(ME, "acme/one")
        with pytest.raises(NotAllowed, match=r"^Broker doesn't allow forced deletion of namespaces"):
            await tenancy.delete_namespace(ME, "acme/one", force=True)
        with pytest.raises(NotAllowed, match=r"^Broker doesn't allow forced deletion of tenants"):
            await tenancy.delete_tenant(ME, "acme", force=True)
        with pytest.raises(NotFound, match=r"^Namespace acme/two does not exist\."):
            await tenancy.delete_namespace(ME, "acme/two")
        await FakeClient(broker).producer(topic="acme/one/another")
        assert await tenancy.namespaces(ME, "acme") == ["acme/one"]


async def test_a_topic_that_comes_at_the_last_moment_keeps_its_namespace() -> None:
    """It was made before the record said that the namespace goes, and after it was looked for."""
    async with running_broker() as broker:
        client, looked = FakeClient(broker), broker.deletions._topics
        await client.producer(topic="acme/one/plain")
        looks = 0

        async def look(namespace: str) -> list[TopicName]:
            nonlocal looks
            looks += 1
            if looks == 2:
                with pytest.raises(TopicBusy, match=r"namespace acme/one .* is being deleted"):
                    await client.ask(c.CreateTopic, "acme/one/late")
            return await looked(namespace) if looks > 1 else []

        broker.deletions._topics = look  # type: ignore[method-assign]
        with pytest.raises(NotEmpty):
            await broker.deletions.delete_namespace("acme/one", force=False)
        assert await broker.metadata.children("/deletions") == []
        await asyncio.sleep(0.15)  # a failed load is remembered for a moment
        await client.ask(c.CreateTopic, "acme/one/late")


async def test_by_force_all_of_it_goes_and_who_used_it_learns_that() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers, allow_forced_deletion=True) as broker:
        client = await filled(broker)
        tenancy = BrokerService(broker).tenancy
        await tenancy.delete_namespace(ME, "acme/one", force=True)
        await settle()
        assert await everything(broker.metadata, *ROOTS) == ["/namespaces/acme"]
        assert not ledgers.ledgers
        closed = {type(command).__name__ for command, _ in client.frames}
        assert {"CloseProducer", "CloseConsumer"} <= closed
        with pytest.raises(NotFound):
            await tenancy.namespace(ME, "acme/one")
        await tenancy.create_namespace(ME, "acme/one")
        assert (await tenancy.namespace(ME, "acme/one")).topic_permissions == {}
        await filled_again(broker)
        await tenancy.delete_tenant(ME, "acme", force=True)
        assert await everything(broker.metadata, *ROOTS) == []
        assert await tenancy.tenants(ME) == ["public"]


async def filled_again(broker: Broker) -> None:
    client = FakeClient(broker)
    for name in ("one/a", "two/b"):
        await client.ask(c.CreateTopic, f"acme/{name}")


async def test_public_default_is_emptied_and_there_again() -> None:
    async with running_broker(allow_forced_deletion=True) as broker:
        service = BrokerService(broker)
        await FakeClient(broker).producer()
        await service.change_namespace_policies(ME, "public/default", {"message_ttl_ms": 5})
        await service.tenancy.delete_namespace(ME, "public/default", force=True)
        assert await service.tenancy.namespaces(ME, "public") == ["public/default"]
        assert (await service.namespace_policies(ME, "public/default")).policies == Policies()
        await FakeClient(broker).producer()
        await service.tenancy.delete_tenant(ME, "public", force=True)
        assert await everything(broker.metadata, *ROOTS) == []


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("what", ["acme/one", "acme"])
async def test_whatever_write_a_crash_meets_the_next_broker_completes_the_deletion(
    what: str, after: bool
) -> None:
    at, done, begun = 0, False, 0
    while not done:
        disk, ledgers = ModelKeyValue(), FakeLedgers()
        store = CrashingStore(disk)
        async with running_broker(ledgers, store, allow_forced_deletion=True) as broker:
            await filled(broker)
            store.writes, store.at, store.after = 0, at, after
            tenancy = BrokerService(broker).tenancy
            deletes = tenancy.delete_namespace if "/" in what else tenancy.delete_tenant
            deleting = asyncio.ensure_future(deletes(ME, what, force=True))
            while not deleting.done() and store.writes <= at:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            done = store.writes <= at
            await broker.deletions.close()  # the process is gone
            deleting.cancel()
            await asyncio.gather(deleting, return_exceptions=True)
            store.at = -1
        heir = MemoryMetadataStore(disk)
        if not await heir.children("/deletions"):
            left = await everything(heir, *ROOTS)
            assert f"/namespaces/{what}" not in left or at == 0, "not begun, or all done"
            at += 1
            continue
        begun += 1
        async with running_broker(ledgers, heir) as broker:
            async with asyncio.timeout(5):
                while await heir.children("/deletions"):
                    await asyncio.sleep(0.01)
            left = await everything(heir, *ROOTS)
            assert left == (["/namespaces/acme"] if "/" in what else []), at
            assert not ledgers.ledgers, at
        at += 1
    assert begun > 10


@pytest.mark.parametrize("partitions", [0, 1])
async def test_no_crash_leaves_the_permissions_of_a_topic_that_is_gone(partitions: int) -> None:
    at, done = 0, False
    while not done:
        disk, ledgers = ModelKeyValue(), FakeLedgers()
        store = CrashingStore(disk)
        async with running_broker(ledgers, store) as broker:
            service = BrokerService(broker)
            await service.create_topic(ME, "orders", partitions=partitions)
            await service.tenancy.grant_topic(ME, "orders", "dave", ["produce"])
            if partitions:
                await service.delete_topic(ME, "orders", force=True)
                await service.delete_topic(ME, "orders-partition-0", force=True)
            store.writes, store.at, store.after = 0, at, True
            deleting = asyncio.ensure_future(service.delete_topic(ME, "orders", force=True))
            while not deleting.done() and store.writes <= at:
                await asyncio.sleep(0)
            await settle()
            done = store.writes <= at
            deleting.cancel()
            await asyncio.gather(deleting, return_exceptions=True)
            store.at = -1
        heir = MemoryMetadataStore(disk)
        if not await everything(heir, "/topics/public/default/persistent", "/partitioned/public/default"):
            async with running_broker(ledgers, heir) as broker:
                assert not await BrokerService(broker).tenancy.topic_permissions(ME, "orders"), at
        at += 1
    assert at > 1 + partitions


async def test_in_a_cluster_each_broker_deletes_what_it_owns() -> None:
    async with brokers("a", "b") as cluster:
        a, b = cluster.brokers.values()
        names = [TopicName.parse(f"acme/one/t{number}") for number in range(20)]
        for number, name in enumerate(names):
            place = (a, b)[number % 2]
            if (found := await locate(place, name)).url != place.url or not found.final:
                place = next(one for one in (a, b) if one.url == found.url)
                await locate(place, name, authoritative=True)
            await place.broker.topic(name, create=True)
        await b.broker.unload(names[0], TopicNotServed("it is closed"))
        assert len(a.topics) > 2 < len(b.topics)
        await a.broker.deletions.delete_namespace("acme/one", force=True)
        assert a.topics == b.topics == []
        left = await everything(cluster.metadata, "/namespaces", "/topics", "/deletions")
        assert left == ["/namespaces/acme"]
        place = next(one for one in (a, b) if one.ownership.serves(names[3]))
        await place.broker.topic(names[3], create=True)
