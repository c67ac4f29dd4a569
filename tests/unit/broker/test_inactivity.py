"""What nobody uses any more goes by policy, also of topics that nobody has loaded since the broker started."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.broker import Broker
from magnetar.broker.service.broker import BrokerService
from magnetar.proto import commands as c
from magnetar.proto.errors import PartitionNotFound
from magnetar.proto.ids import TopicName
from support.broker_kit import FakeClient, FakeClock, running_broker, settle
from support.cluster_kit import brokers
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.virtual_time import in_virtual_time
from unit.broker.ownership.test_ownership import locate

MINUTE = 60_000
FAST: dict[str, Any] = {"maintenance_interval_s": 10.0, "staged_ttl_ms": 20_000}


class LoopClock:
    """A wall clock that goes with the loop's time."""

    def now_ms(self) -> int:
        """The time."""
        return 1_000_000 + int(1000 * asyncio.get_running_loop().time())


class Everyone:
    """May do everything."""

    def authorize(self, operation: str, resource: str) -> None:
        """Allows it."""


async def with_policies(broker: Broker, **fields: Any) -> FakeClient:
    await BrokerService(broker).change_namespace_policies(Everyone(), "public/default", fields)
    return FakeClient(broker)


async def topics(client: FakeClient) -> list[str]:
    names = (await client.ask(c.ListTopics, "public/default"))["topics"]
    return [name.rpartition("/")[2] for name in names]


async def publish(client: FakeClient, topic: str) -> None:
    await client.producer(9, topic)
    before = len(client.receipts)
    client.publish(b"x", producer_id=9)
    await client.until(lambda: len(client.receipts) > before)
    await client.ask(c.CloseProducer, 9)


@in_virtual_time
async def test_topics_without_subscriptions_go_after_a_while_and_those_in_use_stay() -> None:
    async with running_broker(clock=LoopClock(), **FAST) as broker:
        client = await with_policies(broker, delete_inactive_topics=True, inactive_topic_ms=MINUTE)
        for name in ("left", "subscribed", "read", "parts", "half"):
            await client.ask(c.CreateTopic, name, 2 if name in ("parts", "half") else 0)
        await publish(client, "left")
        await client.ask(c.CreateSubscription, "subscribed", "billing")
        await client.consumer(1, "", topic="read", durable=False)
        await client.consumer(2, "", topic="half-partition-1", durable=False)
        await asyncio.sleep(50)
        assert "left" in await topics(client)
        await asyncio.sleep(40)
        kept = ["half-partition-0", "half-partition-1", "read", "subscribed"]
        assert await topics(client) == kept
        assert not (await broker.partitioned.read(TopicName.parse("parts"))).exists
        await client.ask(c.CreateTopic, "parts", 3)
        await client.ask(c.DeleteTopic, "parts", force=True)
        for number in range(3):
            await client.ask(c.DeleteTopic, f"parts-partition-{number}", force=True)
        await client.ask(c.DeleteTopic, "parts", force=True)
        await with_policies(broker, delete_inactive_topics=False)
        for number in (1, 2):
            await client.ask(c.CloseConsumer, number)
        await asyncio.sleep(200)
        assert await topics(client) == kept, "it was taken back"


async def test_a_partition_that_is_used_again_keeps_its_topic_and_owners_delete_their_own() -> None:
    async with brokers("a", "b") as cluster:
        a, b = cluster.brokers.values()
        await BrokerService(a.broker).change_namespace_policies(
            Everyone(), "public/default", {"delete_inactive_topics": True}
        )
        whole = TopicName.parse("orders")
        await a.broker.partitioned.create(whole, 4)
        owners: dict[TopicName, Broker] = {}
        for number in range(4):
            name, place = whole.partition_of(number), (a, b)[number % 2]
            if (found := await locate(place, name)).url != place.url or not found.final:
                place = next(one for one in (a, b) if one.url == found.url)
                await locate(place, name, authoritative=True)
            owners[name] = place.broker
            await place.broker.known(name)
        assert len(set(owners.values())) == 2
        await settle()

        async def unused(*names: TopicName) -> list[int]:
            for name in names:
                topic = await owners[name].topic(name, create=False)
                await settle()  # they learn of what was noted before
                await owners[name].inactivity.round(topic, come_back_s=0, unused_ms=MINUTE)
            return (await a.broker.partitioned.read(whole)).record.inactive

        first, *_, last = owners
        assert await unused(*list(owners)[:3]) == [0, 1, 2]
        await settle()
        await owners[first].find(first)
        assert await unused(last) == [1, 2, 3], "the first one is used again"
        assert (await a.broker.partitioned.read(whole)).exists
        assert await unused(first) == [0, 1, 2, 3]
        await settle()
        with pytest.raises(PartitionNotFound, match="being deleted"):
            await owners[last].find(last)
        await unused(*list(owners)[1:])
        assert not await cluster.metadata.children("/topics/public/default/persistent")
        assert not await cluster.metadata.children("/partitioned/public/default/persistent")


@in_virtual_time
async def test_topics_whose_subscriptions_have_caught_up_go_if_the_policy_says_so() -> None:
    mode = "delete_when_subscriptions_caught_up"
    async with running_broker(clock=LoopClock(), **FAST) as broker:
        client = await with_policies(
            broker, delete_inactive_topics=True, inactive_topic_ms=MINUTE, inactive_topic_mode=mode
        )
        for name in ("caught-up", "behind"):
            await client.ask(c.CreateTopic, name)
            await client.ask(c.CreateSubscription, name, "billing")
            await publish(client, name)
        await client.ask(c.ClearBacklog, "caught-up", "billing")
        await asyncio.sleep(90)
        assert await topics(client) == ["behind"]


@in_virtual_time
async def test_subscriptions_without_consumers_expire_also_over_a_restart() -> None:
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    async with running_broker(ledgers, metadata, LoopClock(), **FAST) as broker:
        client = await with_policies(broker, subscription_expiration_ms=10 * MINUTE)
        await client.ask(c.CreateTopic, "orders")
        for name in ("left", "used"):
            await client.ask(c.CreateSubscription, "orders", name)
        await client.consumer(1, "used")
        await asyncio.sleep(8 * 60)
        assert len((await client.ask(c.TopicStats, "orders"))["subscriptions"]) == 2
    async with running_broker(ledgers, metadata, LoopClock(), **FAST) as broker:
        client = FakeClient(broker)
        assert len((await client.ask(c.TopicStats, "orders"))["subscriptions"]) == 2
        await asyncio.sleep(4 * 60)
        assert list((await client.ask(c.TopicStats, "orders"))["subscriptions"]) == ["used"]
        await client.consumer(1, "used")
        await asyncio.sleep(25 * 60)
        assert list((await client.ask(c.TopicStats, "orders"))["subscriptions"]) == ["used"]
        await client.ask(c.CloseConsumer, 1)
        await asyncio.sleep(13 * 60)
        assert not (await client.ask(c.TopicStats, "orders"))["subscriptions"]


@in_virtual_time
async def test_what_nobody_has_loaded_since_the_start_is_looked_at() -> None:
    """Its old messages expire and are deleted, its old subscriptions go, and so does an old topic; then it is unloaded."""
    ledgers, metadata, clock = FakeLedgers(), MemoryMetadataStore(), FakeClock()
    async with running_broker(ledgers, metadata, clock) as broker:
        client = FakeClient(broker)
        for name in ("old", "older", "left"):
            await publish(client, name)
        for name in ("old", "older"):
            await client.ask(c.CreateSubscription, name, "billing", start=("earliest", None))
    settings = {
        **FAST,
        "topic_idle_unload_ms": 20_000,
        "message_expiry_interval_s": 10.0,
        "max_lease_ms": 5_000,
    }
    async with running_broker(ledgers, metadata, clock, **settings) as broker:
        client = await with_policies(broker, message_ttl_ms=60 * MINUTE)
        await asyncio.sleep(60)
        assert broker.loaded() == []
        clock.now += 61 * MINUTE
        await asyncio.sleep(120)
        assert broker.loaded() == []
        assert list(ledgers.ledgers) == [2], "of the one without subscriptions"
        loads = len(ledgers.log)
        await asyncio.sleep(600)
        assert len(ledgers.log) == loads, "it is not loaded again in vain"
        await with_policies(broker, delete_inactive_topics=True, inactive_topic_ms=MINUTE)
        await asyncio.sleep(60)
        assert await topics(client) == ["old", "older"], "their subscriptions have not expired"
        await with_policies(broker, inactive_topic_ms=90 * MINUTE, subscription_expiration_ms=MINUTE)
        await asyncio.sleep(60)
        assert await topics(client) == ["old", "older"], "they had messages an hour ago"
        for name in ("old", "older"):
            assert not (await client.ask(c.TopicStats, name))["subscriptions"]
        await asyncio.sleep(60)
        clock.now += 61 * MINUTE
        await asyncio.sleep(100)
        assert await topics(client) == []


@pytest.mark.parametrize("force", [True, False])
async def test_permissions_of_a_topic_go_with_it(force: bool) -> None:
    async with running_broker() as broker:
        client, tenancy = FakeClient(broker), BrokerService(broker).tenancy
        await client.ask(c.CreateTopic, "orders")
        await tenancy.grant_topic(Everyone(), "orders", "dave", ["consume"])
        await client.ask(c.DeleteTopic, "orders", force=force)
        assert await tenancy.topic_permissions(Everyone(), "orders") == {}
