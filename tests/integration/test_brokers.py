"""Brokers of a cluster and the public client, over real sockets: look-ups, failover, transfers."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from magnetar.broker.ownership.balance import BalanceSettings
from magnetar.client import connect
from support.cluster_kit import Cluster, brokers

TOPICS = [f"topic-{number}" for number in range(20)]


def urls(cluster: Cluster) -> str:
    """One URL for all of them."""
    return "magnetar://" + ",".join(one.url.partition("://")[2] for one in cluster.brokers.values())


def connecting(cluster: Cluster, **options: Any) -> Any:
    """A client with short times."""
    return connect(urls(cluster), **{"backoff_first": 0.01, "operation_timeout": 10.0, **options})


async def test_a_client_finds_every_owner_and_the_loss_of_a_broker_is_a_short_stall() -> None:
    async with brokers("a", "b", "c") as cluster, connecting(cluster) as client:
        producers = [await client.create_producer(topic) for topic in TOPICS]
        consumers = [await client.subscribe(topic, "all", start="earliest") for topic in TOPICS]
        for number in range(10):
            await asyncio.gather(*(producer.send(b"%d" % number) for producer in producers))
        assert len({cluster.owner_of(topic).url for topic in TOPICS}) > 1
        sending = [
            asyncio.create_task(producer.send(b"%d" % number))
            for number in range(10, 20)
            for producer in producers
        ]
        lost = cluster.owner_of(TOPICS[0])
        cluster.expire(lost.broker.settings.name)
        await asyncio.gather(*sending)
        for consumer in consumers:
            seen: list[bytes] = []
            while len(seen) < 20:
                message = await consumer.receive(timeout=5)
                await consumer.ack(message, receipt=True)
                if message.value not in seen:
                    seen.append(message.value)
            assert seen == [b"%d" % number for number in range(20)]


async def test_a_transfer_under_load_loses_and_reorders_nothing() -> None:
    async with brokers("a", "b", default_bundles=1) as cluster, connecting(cluster) as client:
        producer = await client.create_producer(TOPICS[0])
        consumer = await client.subscribe(TOPICS[0], "all", start="earliest")
        await producer.send(b"0")
        loop = asyncio.get_running_loop()
        longest = 0.0
        source = target = cluster.owner_of(TOPICS[0])
        moving: asyncio.Task[None] | None = None
        for number in range(1, 400):
            began = loop.time()
            if number in (50, 150, 250):
                source = cluster.owner_of(TOPICS[0])
                target = next(one for one in cluster.brokers.values() if one is not source)
                moving = asyncio.create_task(
                    source.ownership.administration.transfer(TOPICS[0], target.broker.settings.name)
                )
            await producer.send(b"%d" % number)
            longest = max(longest, loop.time() - began)
            if number in (100, 200, 300):
                assert moving is not None
                await moving
                assert cluster.owner_of(TOPICS[0]) is target
        seen: list[bytes] = []
        while len(seen) < 400:
            message = await consumer.receive(timeout=5)
            await consumer.ack(message)
            if message.value not in seen:
                seen.append(message.value)
        assert seen == [b"%d" % number for number in range(400)]


async def test_what_a_new_owner_reads_for_consumers_near_the_tail_is_one_read_a_topic() -> None:
    """However many subscriptions a topic has: so there is nothing to gain by filling the cache beforehand."""
    async with brokers("a", default_bundles=16) as cluster, connecting(cluster) as client:
        consumers = [
            await client.subscribe(topic, f"s{number}", start="earliest")
            for topic in TOPICS
            for number in range(3)
        ]
        for topic in TOPICS:
            async with client.create_producer(topic) as producer:
                for number in range(6):
                    await producer.send(b"%d" % number)
        for consumer in consumers:
            await consumer.ack(await consumer.receive(timeout=5), receipt=True)
        b = await cluster.start("b", default_bundles=16)
        before = cluster.ledgers.reads
        await b.ownership.administration.drain("a")
        async with asyncio.timeout(20):
            while b.broker.dispatched.messages_out < 5 * len(consumers):
                await asyncio.sleep(0.01)
        assert cluster.ledgers.reads - before == len(TOPICS)


async def test_administration_reaches_the_owner_whatever_broker_is_asked() -> None:
    async with brokers("a", "b", default_bundles=8) as cluster, connecting(cluster) as client:
        for topic in TOPICS:
            await client.admin.create_topic(topic)
        assert len(await client.admin.list_topics()) == len(TOPICS)
        await cluster.brokers["a"].ownership.administration.drain("a", undo=False)
        for topic in TOPICS:
            await client.admin.create_subscription(topic, "s")
            assert (await client.admin.topic_stats(topic))["subscriptions"]
            await client.admin.delete_topic(topic)
        assert await client.admin.list_topics() == []


async def test_a_pattern_consumer_learns_of_topics_that_other_brokers_make() -> None:
    import re

    async with brokers("a", "b", default_bundles=16) as cluster, connecting(cluster) as client:
        consumer = await client.subscribe(re.compile("new-.*"), "s", start="earliest", discovery_interval=60)
        for number in range(10):
            async with client.create_producer(f"new-{number}") as producer:
                await producer.send(b"%d" % number)
        seen = {(await consumer.receive(timeout=10)).value for _ in range(10)}
        assert seen == {b"%d" % number for number in range(10)}


async def test_the_elected_balancer_moves_bundles_from_a_broker_that_has_too_much() -> None:
    balance = BalanceSettings(
        balance_interval_s=0.05,
        shed_rounds=1,
        move_cooldown_s=0.0,
        load_settle_s=0.0,
        report_interval_s=0.05,
        shed_threshold=0.05,
    )
    async with brokers("a", default_bundles=8, balance=balance) as cluster, connecting(cluster) as client:
        producers = [await client.create_producer(topic) for topic in TOPICS]
        await cluster.start("b", balance=balance)
        assert len(cluster.brokers["a"].topics) == len(TOPICS)
        cluster.busy.add("a")
        async with asyncio.timeout(20):
            while not cluster.brokers["b"].topics:
                await asyncio.gather(*(producer.send(b"x" * 100) for producer in producers))
        assert await cluster.brokers["a"].ownership.administration.balancer() in ("a", "b")


async def test_a_broker_with_too_many_connections_gets_no_more_bundles() -> None:
    balance = BalanceSettings(max_connections=3, report_interval_s=0.05)
    async with brokers("a", "b", default_bundles=16, balance=balance) as cluster, AsyncExitStack() as crowd:
        a, b = cluster.brokers["a"], cluster.brokers["b"]

        async def reported(count: int) -> bool:
            return (await b.ownership.administration.brokers())[0].load.connections == count

        async def until_reported(count: int) -> None:
            async with asyncio.timeout(20):
                while not await reported(count):
                    await asyncio.sleep(0.01)

        for _ in range(3):
            client = await crowd.enter_async_context(connect(a.url))
            await client.admin.brokers()
        await until_reported(3)
        async with connect(b.url) as client:
            for topic in TOPICS:
                await client.admin.create_topic(topic)
            assert (len(a.topics), len(b.topics)) == (0, len(TOPICS))
            await crowd.aclose()
            await until_reported(0)
            for topic in TOPICS:
                await client.admin.create_topic(f"persistent://public/other/{topic}")
            assert a.topics, "it gets bundles again"


async def test_a_change_of_policies_is_in_force_within_a_second_on_every_open_topic_of_every_broker() -> None:
    async with brokers("a", "b", "c") as cluster, connecting(cluster) as client, connecting(cluster) as other:
        for topic in TOPICS:
            await client.create_producer(topic)

        async def reached(policy: str, value: int, source: str) -> bool:
            async with asyncio.timeout(1):
                while True:
                    found = [
                        topic.policies.in_force()
                        for one in cluster.brokers.values()
                        for topic in one.broker.topics.values()
                    ]
                    if all(one is not None and one.value(policy) == (value, source) for one in found):
                        return len(found) == len(TOPICS)
                    await asyncio.sleep(0.01)

        await asyncio.gather(
            client.admin.update_broker_policies({"max_producers": 7}),
            other.admin.update_broker_policies({"max_consumers": 8}),
            client.admin.update_namespace_policies("public/default", {"message_ttl_ms": 9_000}),
            other.admin.update_namespace_policies("public/default", {"retention_ms": 10_000}),
        )
        assert await reached("max_producers", 7, "broker")
        assert await reached("max_consumers", 8, "broker")
        assert await reached("message_ttl_ms", 9_000, "namespace")
        cluster.expire(cluster.owner_of(TOPICS[0]).broker.settings.name)
        for topic in TOPICS:
            await client.create_producer(topic)
        assert await reached("retention_ms", 10_000, "namespace")
        assert await reached("max_producers", 7, "broker"), "after a hand-over as well"
        await other.admin.update_broker_policies({"max_producers": None})
        assert await reached("max_producers", 0, "broker")
