"""Operators' calls of whole partitioned topics: they ask each partition, and end whole or say what did not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.client import (
    AlreadyExists,
    InvalidArgument,
    MessageId,
    PartitionNotFound,
    SubscriptionNotFound,
    TopicInUse,
    TopicNotFound,
    blocking,
    connect,
)
from magnetar.client import administration as administration_module
from magnetar.client.connection import calls
from magnetar.proto import commands as c
from magnetar.proto.ids import TopicName
from support.cluster_kit import brokers
from support.served_broker import connect_to, serving

WHOLE = TopicName.parse("orders")
NAMES = [str(WHOLE.partition_of(number)) for number in range(3)]


async def fill(client: Any, *counts: int) -> None:
    """Stores so many messages in each partition."""
    for number, count in enumerate(counts):
        async with client.create_producer(f"orders-partition-{number}") as producer:
            for value in range(count):
                await producer.send(b"%d" % value)


async def test_a_partitioned_topic_is_made_grows_and_is_deleted() -> None:
    async with serving() as server, connect_to(server) as client:
        admin = client.admin
        assert await admin.partitions("orders") == 0
        await admin.create_topic("orders", partitions=2)
        await admin.create_topic("orders", partitions=2)
        with pytest.raises(AlreadyExists, match="has 2 partitions"):
            await admin.create_topic("orders", partitions=3)
        assert await admin.partitions("orders") == 2
        assert await admin.update_partitions("orders", 3) == 3
        assert await admin.list_topics("public/default") == NAMES
        with pytest.raises(InvalidArgument, match="never has fewer"):
            await admin.update_partitions("orders", 2)
        async with client.create_producer(NAMES[1]):
            with pytest.raises(TopicInUse, match="orders-partition-1"):
                await admin.delete_topic("orders")
            assert await admin.list_topics() == NAMES, "nothing is deleted"
            await admin.delete_topic("orders", force=True)
        assert await admin.list_topics() == []
        with pytest.raises(TopicNotFound):
            await admin.delete_topic("orders")
        await admin.create_topic("orders")  # a topic of the name


async def test_figures_subscriptions_and_compaction_of_the_whole_and_of_one() -> None:
    async with serving() as server, connect_to(server) as client:
        admin = client.admin
        await admin.create_topic("orders", partitions=3)
        await admin.create_subscription("orders", "billing")
        with pytest.raises(AlreadyExists, match="3 of 3 topics failed"):
            await admin.create_subscription("orders", "billing")
        with pytest.raises(InvalidArgument, match="begin at 'earliest'"):
            await admin.create_subscription("orders", "other", start=MessageId(1, 0, 0, 1))
        await fill(client, 1, 2, 3)
        found = await admin.topic_stats("orders")
        assert (found["topic"], found["stored_messages"]) == (str(WHOLE), 6)
        assert found["subscriptions"]["billing"]["backlog_messages"] == 6
        assert [one["stored_messages"] for one in found["partitions"]] == [1, 2, 3]
        assert (await admin.topic_stats(NAMES[2]))["stored_messages"] == 3
        peeked = await admin.peek_messages("orders", "billing", 4)
        assert [(one.topic, one.value, one.id.partition) for one in peeked] == [
            (NAMES[0], b"0", 0),
            (NAMES[1], b"0", 1),
            (NAMES[1], b"1", 1),
            (NAMES[2], b"0", 2),
        ]
        assert (await admin.compact_topic("orders", wait=True))["state"] == "done"
        assert (await admin.compaction_status("orders"))["compacted_messages"] == 6
        await admin.remove_compaction(NAMES[0])
        assert (await admin.compaction_status("orders"))["compacted_messages"] == 5
        with pytest.raises(InvalidArgument, match=r"skip those of one, such as orders-partition-0"):
            await admin.skip_messages("orders", "billing", 1)
        assert await admin.skip_messages(NAMES[2], "billing", 1) == 1
        assert await admin.clear_backlog("orders", "billing") == 5
        await admin.seek_subscription("orders", "billing", "earliest")
        await admin.seek_subscription("orders", "billing", peeked[2].id)
        found = (await admin.topic_stats("orders"))["partitions"]
        assert [one["subscriptions"]["billing"]["backlog_messages"] for one in found] == [1, 1, 3]
        with pytest.raises(InvalidArgument, match="does not say of which partition"):
            await admin.seek_subscription("orders", "billing", MessageId(1, 0, 0))
        with pytest.raises(PartitionNotFound, match="no partition 7"):
            await admin.seek_subscription("orders", "billing", MessageId(1, 0, 0, 7))
        assert await admin.expire_messages("orders", "billing", 1 << 42) == 5
        await admin.delete_subscription("orders", "billing")
        with pytest.raises(SubscriptionNotFound):
            await admin.delete_subscription("orders", "billing")
        await admin.unload_bundle("orders")


async def test_rule_48_a_partition_that_fails_costs_no_other_one() -> None:
    async with serving() as server, connect_to(server) as client:
        admin = client.admin
        await admin.create_topic("orders", partitions=3)
        await admin.create_subscription(NAMES[1], "billing")
        with pytest.raises(AlreadyExists) as raised:
            await admin.create_subscription("orders", "billing")
        assert list(raised.value.details["failed"]) == [NAMES[1]]
        stats = await admin.topic_stats("orders")
        assert [list(one["subscriptions"]) for one in stats["partitions"]] == [["billing"]] * 3
        await admin.delete_subscription(NAMES[0], "billing")
        with pytest.raises(SubscriptionNotFound, match=r"1 of 3 topics failed: .*orders-partition-0"):
            await admin.delete_subscription("orders", "billing")
        assert (await admin.topic_stats("orders"))["subscriptions"] == {}


async def test_partitions_that_come_during_a_call_are_asked_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as server, connect_to(server) as client:
        admin = client.admin
        await admin.create_topic("orders", partitions=1)
        side_by_side, grown = administration_module._side_by_side, False

        async def and_grow(*args: Any) -> Any:
            nonlocal grown
            if not grown:
                grown = True
                await admin.update_partitions("orders", 3)
            return await side_by_side(*args)

        monkeypatch.setattr(administration_module, "_side_by_side", and_grow)
        await admin.create_subscription("orders", "billing")
        stats = await admin.topic_stats("orders")
        assert [list(one["subscriptions"]) for one in stats["partitions"]] == [["billing"]] * 3


async def test_at_most_so_many_partitions_are_asked_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "TOPICS_AT_ONCE", 4)
    async with serving() as server, connect_to(server) as client:
        await client.admin.create_topic("orders", partitions=30)
        at_once = most = 0
        request = client._pool.request

        async def counted(*args: Any) -> Any:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            try:
                return await request(*args)
            finally:
                at_once -= 1

        monkeypatch.setattr(client._pool, "request", counted)
        assert len((await client.admin.topic_stats("orders"))["partitions"]) == 30
        assert most == 4


async def test_policies_of_the_whole_and_of_one() -> None:
    async with serving() as server, connect_to(server) as client:
        admin = client.admin
        await admin.create_topic("orders", partitions=2)
        await admin.update_topic_policies("orders", {"message_ttl_ms": 5})
        found = await admin.update_topic_policies(NAMES[0], {"message_ttl_ms": 7})
        assert {row.value: row.source for row in found.in_force if row.policy == "message_ttl_ms"} == {
            7: "partition"
        }
        found = await admin.topic_policies(NAMES[1])
        assert {row.value: row.source for row in found.in_force if row.policy == "message_ttl_ms"} == {
            5: "topic"
        }
        assert (await admin.topic_policies("orders")).policies.message_ttl_ms == 5


async def test_a_deletion_that_was_interrupted_goes_on() -> None:
    async with serving() as server, connect_to(server) as client:
        admin = client.admin
        await admin.create_topic("orders", partitions=3)
        await administration_module.ask(admin, c.DeleteTopic(0, str(WHOLE)))
        await administration_module.ask(admin, c.DeleteTopic(0, NAMES[1], True), topic=NAMES[1])
        assert await admin.partitions("orders") == 0
        await admin.delete_topic("orders")
        assert await admin.list_topics() == []


async def test_partitions_of_several_brokers_outlive_them() -> None:
    """Made at one broker, they are served by all; what another one changes is known by a watch, without a poll."""
    async with brokers("a", "b", "c") as cluster:
        urls = [broker.url for broker in cluster.brokers.values()]
        options: dict[str, Any] = {"backoff_first": 0.01, "operation_timeout": 10.0}
        async with connect(urls[0], **options) as client, connect(urls[1], **options) as other:
            await client.admin.create_topic("orders", partitions=12)
            assert await other.admin.partitions("orders") == 12
            await other.admin.create_subscription("orders", "billing")
            await fill(client, *[1] * 12)
            owners = {name: len(broker.topics) for name, broker in cluster.brokers.items()}
            assert all(owners.values()), owners
            told: asyncio.Queue[int] = asyncio.Queue()
            count, stop = await cluster.brokers["c"].broker.partitioned.watch(WHOLE, told.put_nowait)
            assert count == 12
            await client.admin.update_partitions("orders", 14)
            async with asyncio.timeout(10):
                assert await told.get() == 14
            stop()
            await client.admin.update_topic_policies("orders", {"message_ttl_ms": 5})
            cluster.expire("c")
            await cluster.stop("c")
            found = await client.admin.topic_stats("orders")
            assert (found["stored_messages"], len(found["partitions"])) == (12, 14)
            assert found["subscriptions"]["billing"]["backlog_messages"] == 12
            row = (await other.admin.topic_policies("orders-partition-13")).in_force[2]
            assert (row.value, row.source) == (5, "topic")
            await client.admin.unload_bundle("orders")
            await other.admin.delete_topic("orders")
            assert await client.admin.list_topics() == []


async def test_a_partitioned_topic_may_be_the_first_of_its_namespace() -> None:
    async with brokers("a", "b") as cluster:
        url = cluster.brokers["a"].url
        async with connect(url, backoff_first=0.01, operation_timeout=10.0) as client:
            await client.admin.create_topic("acme/fresh/orders", partitions=4)
            async with client.create_producer("acme/fresh/orders-partition-3") as producer:
                await producer.send(b"x")
            assert (await client.admin.topic_stats("acme/fresh/orders"))["stored_messages"] == 1
            await client.admin.delete_topic("acme/fresh/orders")


@pytest.mark.real
async def test_the_blocking_client_does_the_same() -> None:
    async with serving() as server:
        url = f"magnetar://127.0.0.1:{server.addresses[0][1]}"

        def work() -> None:
            with blocking.connect(url) as client:
                client.admin.create_topic("orders", partitions=2)
                assert client.admin.update_partitions("orders", 3) == 3
                assert client.admin.partitions("orders") == 3
                assert len(client.admin.topic_stats("orders")["partitions"]) == 3

        await asyncio.to_thread(work)
