"""What `magnetar doctor` says is wrong, each with the fault really made; and who is busy."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.broker import Broker
from magnetar.broker.service.broker import BrokerService
from magnetar.broker.service.diagnosis import Finding
from magnetar.broker.service.topic_metrics import topic_metrics
from magnetar.proto import commands as c
from magnetar.proto.batch import encode_batch
from magnetar.proto.batch_extensions import EXT_DELIVER_AT_MS
from magnetar.proto.errors import EntryDamaged
from magnetar.proto.ids import TopicName
from support.broker_kit import FakeClient, FakeClock, running_broker, settle
from unit.broker.test_cursor import publish
from unit.broker.test_dispatch_faults import FAST, Damage, damage

__all__ = ["damage"]
SUBJECT = "subscription billing of persistent://public/default/orders"


async def findings(broker: Broker, client: FakeClient) -> list[Finding]:
    return (await BrokerService(broker).diagnose(client)).findings


def pass_time(broker: Broker, *after_s: float) -> None:
    """It is looked every ten seconds; over a minute unless `after_s` says when."""
    for topic in broker.topics.values():
        now = asyncio.get_running_loop().time()
        for after in after_s or range(0, 80, 10):
            for subscription in topic.subscriptions.values():
                subscription.count_rates(now + after)


async def test_of_a_broker_that_works_nothing_is_said() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared")
        await publish(client, 3)
        await client.received(3)
        await client.ack(*[message.row() for message in client.messages])
        pass_time(broker)
        assert await findings(broker, client) == []


async def test_a_consumer_whose_program_takes_nothing_is_named() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared", permits=2, name="worker-7")
        await publish(client, 5)
        await client.received(2)
        assert await findings(broker, client) == [], "it may just begin"
        pass_time(broker)
        (found,) = await findings(broker, client)
        assert (found.severity, found.subject) == ("critical", SUBJECT)
        assert "worker-7 at 127.0.0.1:50000 takes nothing out of its queue" in found.cause
        assert "(2 of its messages are unacknowledged)" in found.cause
        client.frame(c.Flow(0, 1, 10))
        await client.received(5)
        pass_time(broker)
        assert await findings(broker, client) == []


async def test_a_consumer_at_its_cap_is_named() -> None:
    async with running_broker(max_unacked_messages_per_consumer=2) as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared", name="worker-7")
        await publish(client, 5)
        await client.received(2)
        pass_time(broker)
        (found,) = await findings(broker, client)
        assert "worker-7 at 127.0.0.1:50000 holds 2 unacknowledged messages, as many as it may" in found.cause


async def test_a_consumer_that_holds_all_there_is_and_acknowledges_nothing_is_named() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared", name="worker-7")
        await publish(client, 5)
        await client.received(5)
        pass_time(broker, 0, 10, 20, 30, 40)
        assert await findings(broker, client) == [], "it may need time for each"
        pass_time(broker, 50, 60, 70)
        (found,) = await findings(broker, client)
        assert (found.severity, found.subject) == ("warning", SUBJECT)
        assert found.cause.startswith("it stands still: worker-7 at 127.0.0.1:50000 holds 5 unacknowledged")
        await client.ack(client.messages[0].row())
        pass_time(broker, 90)
        assert await findings(broker, client) == []


async def test_what_nobody_consumes_is_named_with_its_age() -> None:
    clock = FakeClock()
    async with running_broker(clock=clock) as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateSubscription, "orders", "billing", ("earliest", None))
        await publish(client, 4)
        await settle()
        assert await findings(broker, client) == []
        clock.now += 3_600_000
        assert await findings(broker, client) == [], "the topic was just loaded"
        pass_time(broker)
        (found,) = await findings(broker, client)
        assert found.severity == "warning"
        assert found.cause == "no consumer is connected, and 4 messages wait, the first for 60 min"
        assert "magnetar subscriptions delete persistent://public/default/orders billing" in found.cure


async def test_a_message_that_one_consumer_holds_while_others_go_on_is_named() -> None:
    clock = FakeClock()
    async with running_broker(clock=clock) as broker:
        slow, fast = FakeClient(broker), FakeClient(broker)
        await slow.consumer(type="shared", permits=1, name="slow")
        await fast.consumer(type="shared", name="fast")
        await publish(fast, 4)
        await slow.received(1)
        await fast.received(3)
        await fast.ack(*[message.row() for message in fast.messages])
        clock.now += 120_000
        assert await findings(broker, fast) == [], "it may have got an old message just now"
        pass_time(broker)
        (found,) = await findings(broker, fast)
        assert found.cause.startswith("slow at 127.0.0.1:50000 holds message ")
        assert "stored 120 s ago, while others have acknowledged what is behind it" in found.cause


@pytest.mark.parametrize("action", ["hold", "refuse"])
async def test_a_backlog_quota_that_keeps_producers_from_publishing_is_named(action: str) -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateSubscription, "orders", "billing", ("earliest", None))
        await publish(client, 4)
        topic = await broker.find(TopicName.parse("orders"))
        await topic.change_policies({"backlog_quota_bytes": 100, "backlog_quota_action": action})
        async with asyncio.timeout(20):
            while not (found := await findings(broker, client)):
                await asyncio.sleep(0.002)
        (found_one,) = found
        assert (found_one.severity, found_one.subject) == (
            "critical",
            "topic persistent://public/default/orders",
        )
        assert found_one.cause.startswith(
            "subscription 'billing' of topic persistent://public/default/orders has not"
        )
        assert found_one.cause.endswith("(backlog_quota_bytes=100, a policy of the topic)")
        assert ("send_timeout" in found_one.consequence) is (action == "hold")
        assert "policies persistent://public/default/orders --backlog-quota SIZE" in found_one.cure
        await topic.change_policies({"backlog_quota_bytes": None})
        assert await findings(broker, client) == []


async def test_producers_ahead_of_a_rate_are_named_and_counted() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.producer()
        topic = await broker.find(TopicName.parse("orders"))
        await topic.change_policies({"publish_rate_messages": 1})
        client.publish(*[b"m"] * 5)
        await settle()
        (found,) = await findings(broker, client)
        assert found.severity == "warning"
        assert (
            found.cause == "1 producer sends more than publish_rate_messages=1, a policy of the topic, allows"
        )
        stats = await client.ask(c.TopicStats, "orders")
        assert stats["held_times"] == 1
        assert (await topic_metrics(broker))["pulsar_publish_rate_limit_times"][0][1] == 1
        await topic.change_policies({"publish_rate_messages": None})
        assert await findings(broker, client) == []


async def test_an_entry_that_cannot_be_read_is_named(damage: Damage) -> None:
    async with running_broker(**FAST) as broker:
        client = FakeClient(broker)
        await publish(client, 3)
        damage.entries[1] = EntryDamaged("bit rot")
        await client.consumer()
        await client.received(1)
        async with asyncio.timeout(20):
            while not (found := await findings(broker, client)):
                await asyncio.sleep(0.002)
        assert (found[0].severity, found[0].consequence) == ("critical", "delivery waits for it")
        assert "bit rot" in found[0].cause


async def test_what_health_knows_is_explained_and_contradicting_settings_are_named() -> None:
    async with running_broker(max_unacked_messages_per_subscription=10) as broker:
        broker.trouble = lambda: {
            "bookie b1": "it is lost: it has no session with the metadata store",
            "space of /data": "full in about 5 h, at 12:00 UTC, at the pace of the last hour",
            "repair": "3 ledgers wait for repair",
            "broker b2, topics": "2 of them write fewer copies than their policy says",
            "something new": "nobody explained it",
        }
        found = {one.subject: one for one in await findings(broker, FakeClient(broker))}
        assert "magnetar cluster recover" in found["bookie b1"].cure
        assert found["space of /data"].severity == "warning"
        assert "--retention" in found["space of /data"].cure
        assert "fewer copies" in found["repair"].consequence
        assert "survives fewer losses" in found["broker b2, topics"].consequence
        assert found["something new"].cause == "nobody explained it"
        assert "one consumer that acknowledges nothing" in found["settings of the broker"].consequence


async def test_the_busiest_come_first_and_the_sums_are_of_all() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        for number in range(4):
            topic = await broker.find(TopicName.parse(f"t{number}"))
            await topic.subscriptions.create("s", ("earliest", None))
            topic.rates.per_second = (10.0 * number, 1.0, 0.0, 0.0, 0.0)
        await client.producer(1, "t2")
        client.publish(b"a", b"b")
        await client.confirmed(1)
        found: Any = await BrokerService(broker).list_busiest(client, count=2)
        assert [one.topic.rpartition("/")[2] for one in found.busiest_topics] == ["t3", "t2"]
        assert (found.topics, found.totals.message_rate_in) == (4, 60)
        first, second = found.largest_backlogs
        assert (first.topic.rpartition("/")[2], first.backlog_messages) == ("t2", 2)
        assert second.backlog_messages == 0


async def test_what_is_slow_idle_or_not_due_is_not_named() -> None:
    clock = FakeClock()
    async with running_broker(clock=clock) as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared", permits=2)
        pass_time(broker, *range(0, 600, 10))
        clock.now += 600_000
        await publish(client, 5)
        await client.received(2)
        assert await findings(broker, client) == [], "nothing came for long, and this just now"
        pass_time(broker, 600)
        for number in range(5):  # a message every 40 s, out of a full queue
            await client.ack(client.messages[number].row())
            client.frame(c.Flow(0, 1, 1))
            clock.now += 40_000
            pass_time(broker, *range(610 + 40 * number, 650 + 40 * number, 10))
            assert await findings(broker, client) == []


async def test_who_takes_old_messages_in_turn_holds_nothing_back() -> None:
    clock = FakeClock()
    async with running_broker(clock=clock) as broker:
        slow, fast = FakeClient(broker), FakeClient(broker)
        await publish(fast, 8)
        clock.now += 3_600_000  # a backlog of an hour is worked off
        await slow.consumer(type="shared", permits=1)
        await fast.consumer(type="shared", permits=3)
        await slow.received(1)
        await fast.received(3)
        await fast.ack(*[message.row() for message in fast.messages])
        pass_time(broker, 0, 10, 20)
        assert await findings(broker, fast) == []


async def test_a_failover_consumer_that_waits_and_a_reader_are_not_named() -> None:
    async with running_broker() as broker:
        active, waits, reader = FakeClient(broker), FakeClient(broker), FakeClient(broker)
        await active.consumer(type="failover", name="a")
        await waits.consumer(type="failover", name="b", permits=0)
        await reader.consumer(subscription="reading", durable=False, permits=0)
        await publish(active, 3)
        await active.received(3)
        await active.ack(*[message.row() for message in active.messages])
        pass_time(broker)
        assert await findings(broker, active) == []


async def test_messages_that_are_not_due_are_not_forsaken() -> None:
    clock = FakeClock()
    async with running_broker(clock=clock) as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateSubscription, "orders", "billing", ("earliest", None))
        await client.producer(1, "orders")
        batch = encode_batch(
            [b"later"], sequence_id=0, publish_time_ms=0, extensions={EXT_DELIVER_AT_MS: clock.now + 10**8}
        )
        client.frame(c.Send(0, 1, 0), batch)
        await client.confirmed(1)
        clock.now += 3_600_000
        pass_time(broker)
        assert await findings(broker, client) == []


async def test_a_consumer_that_keeps_keys_of_others_is_named() -> None:
    async with running_broker() as broker:
        first, second = FakeClient(broker), FakeClient(broker)
        await first.consumer(type="key_shared", name="first")
        await first.producer(1, "orders")
        keys = [b"%d" % number for number in range(40)]
        for number, key in enumerate(keys):
            batch = encode_batch([key], sequence_id=number, publish_time_ms=0, keys=[key])
            first.frame(c.Send(0, 1, 0), batch)
        await first.received(40)
        await second.consumer(type="key_shared", name="second")
        pass_time(broker, 0, 10)
        assert await findings(broker, first) == [], "it has them since a moment ago"
        pass_time(broker, *range(20, 90, 10))
        (found,) = await findings(broker, first)
        assert found.cause.startswith("first (")
        assert "kept keys that belong to others now" in found.cause
