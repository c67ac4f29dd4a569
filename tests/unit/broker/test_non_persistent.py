"""Non-persistent topics: delivered to who is there, nothing stored, what is dropped is counted exactly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.broker import Broker, BrokerSettings
from magnetar.broker.log.records import TopicRecord, topic_path
from magnetar.broker.service.topic_metrics import topic_metrics
from magnetar.proto import commands as c
from magnetar.proto.errors import InvalidSetting, InvalidTopicName, TopicNotFound, TopicNotServed, Unsupported
from magnetar.proto.ids import MessageId, TopicName
from support.broker_kit import FakeClient, FakeClock, running_broker, settle
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.virtual_time import in_virtual_time

NAME = "non-persistent://public/default/prices"
TOPIC = TopicName.parse(NAME)
RING = 64 * 1024
SMALL_RING: dict[str, Any] = {"max_non_persistent_topic_bytes": RING}
TYPES = ("exclusive", "failover", "shared", "key_shared")


async def stats(client: FakeClient) -> dict[str, Any]:
    found: dict[str, Any] = await client.ask(c.TopicStats, NAME)
    return found


def ring_of(broker: Broker) -> Any:
    ring = broker.topics[NAME].ledger._ring
    assert ring is not None
    ring.check()
    return ring


async def test_a_topic_that_does_not_exist_is_not_written_when_its_load_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metadata = MemoryMetadataStore()
    async with running_broker(None, metadata, auto_create_topics=False) as broker:
        with pytest.raises(TopicNotFound):
            await FakeClient(broker).producer(topic=NAME)
        assert await metadata.get(topic_path(TOPIC)) is None
    assert "fenced" not in caplog.text


async def test_messages_are_delivered_and_receipted_in_order_and_nothing_is_stored() -> None:
    metadata, ledgers = MemoryMetadataStore(), FakeLedgers()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await client.consumer(topic=NAME, start=("latest", None))
        await client.producer(topic=NAME)
        for number in range(20):
            client.publish_batch([b"%d.%d" % (number, index) for index in range(5)], first=5 * number)
        await client.confirmed(100)
        assert await client.received(100) == [b"%d.%d" % divmod(number, 5) for number in range(100)]
        rows = [row[2:] for row in client.receipts]
        assert rows == sorted(rows)
        await client.ack(*[message.row() for message in client.messages])
        found = await stats(client)
        assert (found["messages_in"], found["stored_messages"], found["dropped_messages"]) == (100, 100, 0)
        assert found["subscriptions"]["billing"]["backlog_messages"] == 0
        assert found["subscriptions"]["billing"]["durable"] is False
        assert found["open_ledger"] is None
        assert not found["degraded"]
        assert "in memory" in found["retained_by"]
        assert not ledgers.ledgers, "a ledger was made"
        stored = await metadata.get(topic_path(TOPIC))
        assert stored is not None
        record = TopicRecord.decode(stored.value, "")
        assert (record.ledgers, record.segments, record.trimmed, record.next_index) == ([], [], [], 0)
        assert not await metadata.children(f"{topic_path(TOPIC)}/cursors")
        client.close()
        await settle()
        assert not broker.topics[NAME].subscriptions, "it lives as long as it has consumers"


async def test_the_record_of_a_topic_whose_policies_or_owner_change_never_names_a_segment() -> None:
    metadata = MemoryMetadataStore()
    clock = FakeClock()
    async with running_broker(
        metadata=metadata, clock=clock, retention_ms=1, retention_bytes=1, **SMALL_RING
    ) as broker:
        client = FakeClient(broker)
        await client.producer(topic=NAME)
        for number in range(40):
            client.publish(bytes(8_000), first=number)
            await client.confirmed(number + 1)
        topic = broker.topics[NAME]
        assert len(topic.ledger.list.ledgers) > 2
        await topic.ledger.changes.edit(lambda: topic.ledger.list.commit(properties={"a": "b"}))
        ring_of(broker)
        stored = await metadata.get(topic_path(TOPIC))
        assert stored is not None
        assert TopicRecord.decode(stored.value, "").ledgers == []
        clock.now += 1_000
        held = len(topic.ledger.list.ledgers)
        topic.maintain()
        await topic.maintenance.stop()
        ring_of(broker)
        assert len(topic.ledger.list.ledgers) == held, "a policy takes what only the ring may let go of"


@pytest.mark.parametrize("type", TYPES)
async def test_a_consumer_that_falls_out_of_the_ring_loses_messages_which_are_counted(type: str) -> None:
    async with running_broker(**SMALL_RING) as broker:
        slow, fast = FakeClient(broker), FakeClient(broker)
        await slow.consumer(topic=NAME, subscription="slow", type=type, permits=7)
        await fast.consumer(topic=NAME, subscription="fast", type=type, permits=100_000)
        await fast.producer(topic=NAME)
        for number in range(100):
            fast.publish_batch([bytes(1_000) + b"%d" % number] * 3, first=3 * number)
            await fast.confirmed(3 * number + 3)
            assert ring_of(broker).used <= RING
        await fast.received(300)
        assert not fast.paused, "a slow consumer slows the producer"
        assert broker.publish_budget.used == 0
        found = await stats(fast)
        dropped = found["subscriptions"]["slow"]["dropped_messages"]
        assert found["dropped_messages"] == dropped > 200
        assert found["subscriptions"]["fast"]["dropped_messages"] == 0
        metrics = await topic_metrics(broker)
        assert dict(metrics["topic_dropped_messages"])[(NAME,)] == dropped
        assert dict(metrics["subscription_dropped_messages"])[(NAME, "slow")] == dropped
        assert broker.figures()["dropped_messages_total"] == dropped
        begun = len(slow.messages)
        assert 7 <= begun < 10
        slow.frame(c.Flow(0, 1, 100_000))
        await slow.received(300 - dropped)
        await settle()
        assert len(slow.messages) == 300 - dropped
        got = [int(value.removeprefix(bytes(1_000))) for value in slow.values]
        assert got == [number // 3 for number in (*range(begun), *range(begun + dropped, 300))]


async def test_a_message_that_is_nacked_comes_again_while_it_is_there_and_counts_as_dropped_when_it_leaves() -> (
    None
):
    async with running_broker(**SMALL_RING) as broker:
        client = FakeClient(broker)
        await client.consumer(topic=NAME, type="shared", permits=2)
        await client.producer(topic=NAME)
        client.publish(b"a", b"b")
        await client.received(2)
        first, second = client.messages
        client.frame(c.Redeliver(0, 1, True), c.encode_rows(c.ACK_ROW, [first.row()]))
        client.frame(c.Flow(0, 1, 1))
        await client.received(3)
        assert (client.messages[2].value, client.messages[2].redelivered) == (b"a", 1)
        client.frame(c.Redeliver(0, 1, True), c.encode_rows(c.ACK_ROW, [first.row()]))
        for number in range(2, 20):  # 'a' waits to be delivered again, 'b' is pending, and both leave
            client.publish(bytes(8_000), first=number)
            await client.confirmed(number + 1)
        found = (await stats(client))["subscriptions"]["billing"]
        waiting = found["backlog_messages"]
        assert found["dropped_messages"] == 1 + 18 - waiting, "b was delivered; a was to be once more"
        assert found["unacked_messages"] == 0, "nobody has to acknowledge what is not there any more"
        client.frame(c.Redeliver(0, 1, True), c.encode_rows(c.ACK_ROW, [second.row()]))  # too late
        await client.ack(first.row(), second.row())
        client.frame(c.Flow(0, 1, 100))
        await client.received(3 + waiting)
        await settle()
        assert len(client.messages) == 3 + waiting


async def test_what_is_acknowledged_is_not_dropped_wherever_the_read_position_goes_back_to() -> None:
    async with running_broker(**SMALL_RING) as broker:
        client = FakeClient(broker)
        await client.consumer(topic=NAME, permits=4)
        await client.producer(topic=NAME)
        client.publish_batch([b"a", b"b", b"c", b"d"])
        await client.received(4)
        await client.ack(client.messages[1].row(), client.messages[2].row())
        client.frame(c.Redeliver(0, 1, True))  # all of it comes again, when there are permits
        for number in range(4, 24):
            client.publish(bytes(8_000), first=number)
            await client.confirmed(number + 1)
        found = (await stats(client))["subscriptions"]["billing"]
        assert found["dropped_messages"] == 2 + 20 - found["backlog_messages"]


STEP = st.one_of(
    st.tuples(st.just("publish"), st.integers(1, 4), st.sampled_from([10, 3_000])),
    st.tuples(st.sampled_from(["flow", "nack", "ack"]), st.integers(0, 1), st.integers(1, 6)),
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TYPES), st.lists(STEP, max_size=40))
def test_every_message_is_delivered_or_counted(type: str, steps: list[tuple[str, int, int]]) -> None:
    """Deliveries and drops together are what was published and what was to be delivered again."""

    @in_virtual_time
    async def run() -> None:
        async with running_broker(max_non_persistent_topic_bytes=16_000, failover_delay_ms=1) as broker:
            producer, consumers = FakeClient(broker), [FakeClient(broker), FakeClient(broker)]
            await producer.producer(topic=NAME)
            if type == "exclusive":
                consumers.pop()
            for consumer in consumers:
                await consumer.consumer(topic=NAME, type=type, permits=0, start=("latest", None))
            topic, published, again = broker.topics[NAME], 0, 0
            for what, one, two in steps:
                if what == "publish":
                    producer.publish_batch([bytes(two)] * one, first=published)
                    published += one
                    await producer.confirmed(published)
                else:
                    consumer = consumers[one % len(consumers)]
                    if what == "flow":
                        consumer.frame(c.Flow(0, 1, two))
                    elif consumer.messages:
                        message = consumer.messages[-min(two, len(consumer.messages))]
                        if what == "ack":
                            await consumer.ack(message.row())
                        elif type in ("shared", "key_shared"):
                            ledger, entry, index = message.id
                            holder = topic.subscriptions["billing"].consumers[one]
                            pending = holder.pending_acks.get((ledger, entry))
                            again += pending is not None and any(
                                first <= index <= last for first, last, _ in pending.rows()
                            )
                            rows = c.encode_rows(c.ACK_ROW, [message.row()])
                            consumer.frame(c.Redeliver(0, 1, True), rows)
                await settle(10)
                ring_of(broker)
                topic.subscriptions["billing"]._core.check()
            for consumer in consumers:
                consumer.frame(c.Flow(0, 1, 100_000))
            await asyncio.sleep(1)
            delivered = topic.dispatched.messages_out
            subscription = topic.subscriptions["billing"]
            assert delivered + subscription.dropped_messages == published + again
            assert delivered == sum(len(consumer.messages) for consumer in consumers)

    run()


async def test_all_topics_together_stay_within_their_share_of_the_memory_budget() -> None:
    async with running_broker(memory_budget_bytes=4 * 1024 * 1024) as broker:
        client = FakeClient(broker)
        limit = broker.settings.non_persistent_bytes
        for number in range(30):
            await client.producer(producer_id=number + 1, topic=f"{NAME}{number}")
            client.publish(bytes(100_000), producer_id=number + 1)
            await client.confirmed(number + 1)
            assert broker.figures()["non_persistent_bytes"] <= limit
        assert broker.figures()["non_persistent_bytes"] > limit - 200_000
        for number in range(30):
            await client.ask(c.DeleteTopic, f"{NAME}{number}", True)
        assert broker.figures()["non_persistent_bytes"] == 0


async def test_a_hand_over_ends_the_subscription_and_ids_go_on_rising() -> None:
    metadata = MemoryMetadataStore()
    async with running_broker(metadata=metadata) as broker:
        client = FakeClient(broker)
        await client.consumer(topic=NAME)
        await client.producer(topic=NAME)
        client.publish(b"a")
        await client.received(1)
        before = client.messages[0].id
        await broker.unload(TOPIC, TopicNotServed("elsewhere"))
        assert [type(frame) for frame, _ in client.frames if isinstance(frame, c.CloseConsumer | c.CloseProducer)] == [
            c.CloseProducer, c.CloseConsumer
        ]  # fmt: skip
        assert broker.figures()["non_persistent_bytes"] == 0
    async with running_broker(metadata=metadata) as broker:
        other = FakeClient(broker)
        await other.producer(topic=NAME)
        other.publish(b"b")
        await other.confirmed(1)
        resumed = ("id", MessageId(before[0], before[1], before[2] + 1).to_bytes())
        answer = await other.consumer(topic=NAME, start=resumed)
        assert answer["trimmed"] is False
        assert await other.received(1) == [b"b"], "what was sent since the hand-over"
        assert other.messages[0].id > before


async def test_starts_seeks_skips_and_peeks_go_by_what_is_there() -> None:
    async with running_broker(**SMALL_RING) as broker:
        client = FakeClient(broker)
        await client.producer(topic=NAME)
        for number in range(6):
            client.publish(b"%d" % number, first=number)
            await client.confirmed(number + 1)
        await client.consumer(topic=NAME, permits=0, durable=True)
        assert (await client.ask(c.PeekMessages, NAME, "billing", 2))["entries"]
        assert (await client.ask(c.SkipMessages, NAME, "billing", 2))["skipped"] == 2
        client.frame(c.Flow(0, 1, 100))
        assert await client.received(4) == [b"2", b"3", b"4", b"5"]
        await client.ask(c.Seek, 1, ("earliest", None))
        await client.received(10)
        assert client.values[4:] == [b"%d" % number for number in range(6)]
        last = MessageId.from_bytes(await client.ask(c.LastMessageId, 1))
        assert last[:3] == client.messages[-1].id
        for number in range(6, 30):
            client.publish(bytes(8_000), first=number)
            await client.confirmed(number + 1)
        reader = FakeClient(broker)
        gone = ("id", MessageId(*client.messages[4].id).to_bytes())
        await reader.consumer(topic=NAME, subscription="", durable=False, start=gone)
        await settle()
        assert set(reader.values) == {bytes(8_000)}, "it begins with the oldest that is there"


async def test_what_needs_a_store_is_refused_in_one_way() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateTopic, NAME)
        for command in (
            (c.CompactTopic, NAME),
            (c.CreateSubscription, NAME, "s"),
            (c.TopicLedgers, NAME),
            (c.CreateStagedLedger, NAME, "t"),
        ):
            with pytest.raises(
                Unsupported, match=f"{NAME} is a non-persistent topic: nothing of it is stored"
            ):
                await client.ask(*command)
        with pytest.raises(Unsupported, match="nothing of it is stored"):
            await client.ask(c.ChangePolicies, NAME, payload=b"\x80")
        await client.consumer(topic=NAME, read_compacted=True)  # as a table view does: nothing is compacted
        with pytest.raises(TopicNotFound):
            await client.ask(c.TopicStats, NAME + "-other")
    with pytest.raises(InvalidSetting, match="non_persistent_share is a share"):
        BrokerSettings(non_persistent_share=1.0)
    with pytest.raises(InvalidSetting, match="max_non_persistent_topic_bytes is 0"):
        BrokerSettings(max_non_persistent_topic_bytes=0)
    with pytest.raises(InvalidTopicName):
        TopicName.parse("volatile://public/default/x")


async def test_it_is_listed_deleted_and_made_again() -> None:
    metadata = MemoryMetadataStore()
    async with running_broker(metadata=metadata, auto_create_topics=False) as broker:
        client = FakeClient(broker)
        with pytest.raises(TopicNotFound):
            await client.producer(topic=NAME)
        await client.ask(c.CreateTopic, NAME)
        await client.ask(c.CreateTopic, "prices")
        listed = (await client.ask(c.ListTopics, "public/default"))["topics"]
        assert listed == [NAME, "persistent://public/default/prices"]
        await client.producer(topic=NAME)
        client.publish(b"a")
        await client.confirmed(1)
        await client.ask(c.DeleteTopic, NAME, True)
        assert await metadata.get(topic_path(TOPIC)) is None
        assert not await broker.exists(TOPIC)
        assert await broker.exists(TopicName.parse("prices"))
        await client.ask(c.CreateTopic, NAME)
        await client.consumer(topic=NAME, start=("earliest", None))
        await settle()
        assert not client.messages


@in_virtual_time
async def test_an_idle_topic_is_unloaded_whatever_its_namespace_keeps() -> None:
    idle: dict[str, Any] = {"topic_idle_unload_ms": 60_000, "maintenance_interval_s": 10.0}
    async with running_broker(retention_ms=3_600_000, retention_bytes=-1, **idle) as broker:
        client = FakeClient(broker)
        await client.producer(topic=NAME)
        client.publish(b"a")
        await client.confirmed(1)
        client.close()
        await asyncio.sleep(90)
        assert NAME not in broker.topics


async def test_a_former_owner_is_fenced_by_the_record() -> None:
    metadata = MemoryMetadataStore()
    async with running_broker(metadata=metadata) as first, running_broker(metadata=metadata) as second:
        await first.topic(TOPIC, create=True)
        topic = first.topics[NAME]
        await second.topic(TOPIC, create=False)
        with pytest.raises(TopicNotServed):
            await topic.ledger.changes.edit(lambda: topic.ledger.list.commit())
        await settle()
        assert NAME not in first.topics
        assert NAME in second.topics
