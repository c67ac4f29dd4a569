"""Clusters, tenants and namespaces: Pulsar's rules, what exists without anybody having made it, and who may make topics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.broker.log.records import FORCED
from magnetar.broker.service.broker import BrokerService
from magnetar.broker.tenancy.objects import NAMESPACE
from magnetar.metadata.store import Versioned
from magnetar.proto import commands as c
from magnetar.proto.errors import (
    AlreadyExists,
    InvalidArgument,
    MagnetarError,
    NotAuthorized,
    NotEmpty,
    NotFound,
    ServiceNotReady,
    SubscriptionNotFound,
    TopicBusy,
    TopicNotFound,
)
from magnetar.proto.ids import TopicName
from magnetar.proto.policies import Policies
from support.broker_kit import FakeClient, running_broker
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from unit.broker.test_durability import FailingStore


class Everyone:
    """May do everything."""

    def authorize(self, operation: str, resource: str) -> None:
        """Allows it."""


ME = Everyone()


@pytest.fixture
async def service() -> AsyncIterator[BrokerService]:
    async with running_broker() as broker:
        yield BrokerService(broker)


async def refused(call: Any, error: type[MagnetarError], text: str) -> None:
    with pytest.raises(error) as raised:
        await call
    assert type(raised.value) is error
    assert raised.value.message.startswith(text), raised.value.message


async def test_public_default_exists_and_nothing_is_written_for_that(service: BrokerService) -> None:
    tenancy = service.tenancy
    assert await tenancy.clusters(ME) == ["standalone"]
    assert await tenancy.tenants(ME) == ["public"]
    assert await tenancy.namespaces(ME, "public") == ["public/default"]
    assert (await tenancy.tenant(ME, "public")).allowed_clusters == ["standalone"]
    client = FakeClient(service._broker)
    await client.producer()
    assert await service._broker.metadata.children("/namespaces") == []


async def test_tenants_by_the_rules_of_pulsar(service: BrokerService) -> None:
    tenancy = service.tenancy
    await refused(tenancy.tenant(ME, "acme"), NotFound, "Tenant does not exist")
    await refused(tenancy.update_tenant(ME, "acme"), NotFound, "Tenant does not exist")
    await refused(tenancy.delete_tenant(ME, "acme"), NotFound, "Tenant doesn't exist")
    await refused(tenancy.namespaces(ME, "acme"), NotFound, "Tenant does not exist")
    await refused(tenancy.create_tenant(ME, "bad/name"), InvalidArgument, "Tenant name is not valid")
    nowhere = tenancy.create_tenant(ME, "acme", allowed_clusters=["nowhere"])
    await refused(nowhere, InvalidArgument, "Clusters do not exist")
    await refused(
        tenancy.create_tenant(ME, "acme", allowed_clusters=[]), InvalidArgument, "Clusters can not be empty"
    )
    await tenancy.create_tenant(ME, "acme", admin_roles=["ann"])
    await refused(tenancy.create_tenant(ME, "acme"), AlreadyExists, "Tenant already exist")
    await tenancy.update_tenant(ME, "acme", admin_roles=["ann", "bob"])
    found = await tenancy.tenant(ME, "acme")
    assert (found.admin_roles, found.allowed_clusters) == (["ann", "bob"], ["standalone"])
    await tenancy.create_namespace(ME, "acme/one")
    await refused(tenancy.delete_tenant(ME, "acme"), NotEmpty, "The tenant still has active namespaces")
    await refused(tenancy.delete_tenant(ME, "public"), NotEmpty, "The tenant still has active namespaces")
    await tenancy.delete_namespace(ME, "acme/one")
    await tenancy.delete_tenant(ME, "acme")
    assert await tenancy.tenants(ME) == ["public"]


async def test_namespaces_by_the_rules_of_pulsar(service: BrokerService) -> None:
    tenancy = service.tenancy
    await refused(tenancy.create_namespace(ME, "nosuch/one"), NotFound, "Tenant does not exist")
    await tenancy.create_tenant(ME, "acme")
    await tenancy.create_namespace(ME, "acme/one", policies=Policies(message_ttl_ms=5))
    await refused(tenancy.create_namespace(ME, "acme/one"), AlreadyExists, "Namespace already exists")
    await refused(tenancy.namespace(ME, "acme/nosuch"), NotFound, "Namespace does not exist")
    await refused(service.namespace_policies(ME, "acme/nosuch"), NotFound, "Namespace does not exist")
    changed = service.change_namespace_policies(ME, "acme/nosuch", {"message_ttl_ms": 5})
    await refused(changed, NotFound, "Namespace does not exist")
    await refused(tenancy.create_namespace(ME, "acme"), InvalidArgument, "not a namespace")
    wide = tenancy.create_namespace(ME, "acme/two", bundles=5_000)
    await refused(wide, InvalidArgument, "Invalid number of bundles")
    assert await tenancy.namespaces(ME, "acme") == ["acme/one"]
    assert (await service.namespace_policies(ME, "acme/one")).policies == Policies(message_ttl_ms=5)


async def test_clusters_are_kept_for_those_who_ask(service: BrokerService) -> None:
    tenancy = service.tenancy
    await tenancy.create_cluster(ME, "west", {"serviceUrl": "http://west:8080"})
    await refused(tenancy.create_cluster(ME, "west", {}), AlreadyExists, "Cluster already exists")
    await refused(tenancy.create_cluster(ME, "standalone", {}), AlreadyExists, "Cluster already exists")
    await tenancy.update_cluster(ME, "west", {"serviceUrl": "http://west2:8080"})
    await tenancy.set_peer_clusters(ME, "standalone", ["west"])
    assert (await tenancy.cluster(ME, "standalone")).peers == ["west"]
    assert (await tenancy.cluster(ME, "west")).data == {"serviceUrl": "http://west2:8080"}
    await refused(tenancy.cluster(ME, "east"), NotFound, "Cluster does not exist")
    await refused(tenancy.delete_cluster(ME, "east"), NotFound, "Cluster does not exist")
    await refused(tenancy.delete_cluster(ME, "standalone"), InvalidArgument, "Cluster standalone is the one")
    await tenancy.delete_cluster(ME, "west")
    assert await tenancy.clusters(ME) == ["standalone"]


async def test_properties_and_permissions_are_kept(service: BrokerService) -> None:
    tenancy, topic = service.tenancy, "public/default/orders"
    await tenancy.set_properties(ME, "public/default", {"color": "blue", "size": "l"})
    await tenancy.set_properties(ME, "public/default", {"color": "red"})
    assert await tenancy.remove_property(ME, "public/default", "size") == "l"
    assert await tenancy.remove_property(ME, "public/default", "size") is None
    await tenancy.grant(ME, "public/default", "dave", ["produce", "consume"])
    await tenancy.grant_topic(ME, topic, "erin", ["consume"])
    assert await tenancy.topic_permissions(ME, topic) == {"dave": ["produce", "consume"], "erin": ["consume"]}
    found = await tenancy.namespace(ME, "public/default")
    assert (found.properties, found.permissions) == ({"color": "red"}, {"dave": ["produce", "consume"]})
    await tenancy.grant(ME, "public/default", "dave", [])
    await tenancy.grant_topic(ME, topic, "erin", [])
    assert await tenancy.topic_permissions(ME, topic) == {}
    await tenancy.set_properties(ME, "public/default", {}, only=True)
    assert not (await tenancy.namespace(ME, "public/default")).properties
    await refused(tenancy.grant(ME, "public/default", "dave", ["fly"]), InvalidArgument, "'fly' is no action")


# --- who makes topics ------------------------------------------------------------------------------------------------


async def test_the_first_topic_makes_its_namespace_unless_settings_forbid_it() -> None:
    async with running_broker() as broker:
        await FakeClient(broker).producer(topic="acme/one/orders")
        tenancy = BrokerService(broker).tenancy
        assert await tenancy.tenants(ME) == ["acme", "public"]
        assert await tenancy.namespaces(ME, "acme") == ["acme/one"]
    async with running_broker(auto_create_namespaces=False) as broker:
        client = FakeClient(broker)
        await client.producer()
        with pytest.raises(NotFound, match=r"there is no acme/one; .*broker.auto_create_namespaces=true"):
            await client.producer(2, topic="acme/one/orders")
        assert await broker.metadata.children("/namespaces") == []
        assert await broker.metadata.children("/topics/acme") == []


async def test_policies_can_be_there_before_the_first_topic() -> None:
    """As `magnetar namespaces policies` sets them; over HTTP, as for Pulsar, the namespace is made before."""
    changes = msgspec.msgpack.encode({"message_ttl_ms": 5})
    async with running_broker() as broker:
        await FakeClient(broker).ask(c.ChangePolicies, "", "shop/live", payload=changes)
        assert await BrokerService(broker).tenancy.namespaces(ME, "shop") == ["shop/live"]
    async with running_broker(auto_create_namespaces=False) as broker:
        with pytest.raises(NotFound, match="there is no shop/live"):
            await FakeClient(broker).ask(c.ChangePolicies, "", "shop/live", payload=changes)


async def with_policies(broker: Any, **fields: Any) -> FakeClient:
    await BrokerService(broker).change_namespace_policies(ME, "public/default", fields)
    return FakeClient(broker)


async def test_policies_say_what_the_use_of_a_topic_makes() -> None:
    async with running_broker() as broker:
        client = await with_policies(broker, auto_create_topics=False)
        with pytest.raises(TopicNotFound):
            await client.producer()
        with pytest.raises(TopicNotFound):
            await client.ask(c.Partitions, "orders", True)
        await client.ask(c.CreateTopic, "orders")
        await client.producer()
    async with running_broker() as broker:
        client = await with_policies(
            broker, auto_create_topics_type="partitioned", auto_create_topics_partitions=3
        )
        await client.ask(c.CreateTopic, "plain")
        assert await client.ask(c.Partitions, "plain", True) == {"partitions": 0}
        assert await client.ask(c.Partitions, "orders") == {"partitions": 0}, "who only looks makes nothing"
        assert await client.ask(c.Partitions, "orders", True) == {"partitions": 3}
        assert await client.ask(c.Partitions, "orders", True) == {"partitions": 3}
        await client.producer(topic="orders-partition-2")


async def test_policies_say_whether_a_consumer_makes_its_subscription() -> None:
    async with running_broker() as broker:
        client = await with_policies(broker, auto_create_subscriptions=False)
        with pytest.raises(SubscriptionNotFound, match="auto_create_subscriptions"):
            await client.consumer()
        await client.consumer(2, "", durable=False)
        await client.ask(c.CreateSubscription, "orders", "billing")
        await client.consumer()


async def test_while_policies_are_not_known_a_consumer_makes_no_subscription() -> None:
    metadata = FailingStore()
    async with running_broker(FakeLedgers(), metadata) as broker:
        client = await with_policies(broker, auto_create_subscriptions=False)
        await client.ask(c.CreateTopic, "orders")
        await client.ask(c.CreateSubscription, "orders", "known")
        metadata.failing = ("/namespaces/public/default",)
        broker.namespaces.followed.drop("public/default")
        await client.consumer(1, "known")
        with pytest.raises(ServiceNotReady, match="policies are not known"):
            await client.consumer(2, "billing")


class Only:
    """Has this permission."""

    def __init__(self, permission: str) -> None:
        self._permission = permission

    def authorize(self, operation: str, resource: str) -> None:
        """Refuses others."""
        if operation != self._permission:
            raise NotAuthorized(operation)


async def test_who_may_only_look_a_topic_up_makes_none() -> None:
    async with running_broker() as broker:
        await with_policies(broker, auto_create_topics_type="partitioned", auto_create_topics_partitions=3)
        service = BrokerService(broker)
        with pytest.raises(NotAuthorized):
            await service.partitions_to_use(Only("lookup"), "orders")
        assert await service.partitions(Only("lookup"), "orders") == 0
        for permission in ("produce", "consume"):
            assert await service.partitions_to_use(Only(permission), permission) == 3


async def test_the_namespace_of_further_topics_is_known_from_memory() -> None:
    class Counting(MemoryMetadataStore):
        reads = 0

        async def get(self, path: str) -> Versioned | None:
            """Counts those of namespaces."""
            self.reads += path.startswith("/namespaces/")
            return await super().get(path)

    metadata = Counting()
    async with running_broker(FakeLedgers(), metadata) as broker:
        await broker.find(TopicName.parse("acme/one/first"))
        before = metadata.reads
        for number in range(20):
            await broker.find(TopicName.parse(f"acme/one/t{number}"))
        assert metadata.reads == before
        await broker.objects.mark_deleted(NAMESPACE, "acme/one", FORCED)
        with pytest.raises(TopicBusy, match="is being deleted"):
            await broker.find(TopicName.parse("acme/one/late"))


async def test_a_namespace_has_at_most_so_many_topics() -> None:
    async with running_broker() as broker:
        client = await with_policies(broker, max_topics_per_namespace=3)
        await client.producer(1, "a")
        with pytest.raises(InvalidArgument, match="max_topics_per_namespace=3"):
            await client.ask(c.CreateTopic, "many", 3)
        await client.ask(c.CreateTopic, "two", 2)
        for name in ("b", "non-persistent://public/default/b"):
            with pytest.raises(InvalidArgument, match="Exceed maximum number of topics in namespace"):
                await client.producer(2, name)
        await client.ask(c.DeleteTopic, "a", force=True)
        await client.producer(2, "c")


# --- two at a time ---------------------------------------------------------------------------------------------------

CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("set_properties"), st.sampled_from("abc"), st.integers(0, 9)),
        st.tuples(st.just("grant"), st.sampled_from("xyz"), st.sampled_from(["produce", "consume"])),
        st.tuples(st.just("create_namespace"), st.sampled_from("uvw"), st.none()),
        st.tuples(st.just("policies"), st.sampled_from("st"), st.integers(1, 9)),
    ),
    max_size=8,
)


@settings(max_examples=50, deadline=None)
@given(CHANGES, CHANGES)
async def test_of_what_two_brokers_change_at_a_time_nothing_is_lost(one: Any, other: Any) -> None:
    """Keys of the two are apart, so all of both must be there in the end."""

    async def act(service: BrokerService, changes: Any, who: str) -> None:
        for what, key, value in changes:
            name = f"{who}-{key}"
            if what == "set_properties":
                await service.tenancy.set_properties(ME, "t/n", {name: str(value)})
            elif what == "grant":
                await service.tenancy.grant(ME, "t/n", name, [value])
            elif what == "create_namespace":
                if name not in made:
                    await service.tenancy.create_namespace(ME, f"t/{name}")
                made.add(name)
            else:
                changes = {"subscription_ttl_ms": {name: value}}
                await service.change_namespace_policies(ME, "t/n", changes)

    made: set[str] = set()
    metadata = MemoryMetadataStore()
    async with running_broker(metadata=metadata) as a, running_broker(metadata=metadata) as b:
        first, second = BrokerService(a), BrokerService(b)
        await first.tenancy.create_tenant(ME, "t")
        await first.tenancy.create_namespace(ME, "t/n")
        await asyncio.gather(act(first, one, "a"), act(second, other, "b"))
        record = await second.tenancy.namespace(ME, "t/n")
        for who, changes in (("a", one), ("b", other)):
            last = {(what, f"{who}-{key}"): value for what, key, value in changes}
            for (what, name), value in last.items():
                if what == "set_properties":
                    assert record.properties[name] == str(value)
                elif what == "grant":
                    assert record.permissions[name] == [value]
                elif what == "policies":
                    assert record.policies.subscription_ttl_ms[name] == value
        assert set(await first.tenancy.namespaces(ME, "t")) == {"t/n", *(f"t/{name}" for name in made)}
