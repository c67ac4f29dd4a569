"""Operations on subscriptions, through the public client and a real broker: they are durable, and consumers notice them."""

import asyncio
from typing import Any

import pytest

from magnetar.client import (
    AlreadyExists,
    ConnectionLost,
    InvalidArgument,
    InvalidCallError,
    Message,
    ReceiveTimeout,
    SubscriptionNotFound,
    TopicNotFound,
)
from magnetar.client.options import SubscriptionType
from magnetar.proto.commands import ClearBacklog, SkipMessages
from support.fake_broker import FakeBroker
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.served_broker import connect_to, serving, take


def values(messages: list[Message]) -> list[bytes | None]:
    return [message.value for message in messages]


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


async def produce(client: Any, topic: str, first: int, end: int) -> list[Any]:
    """Messages with these numbers, an entry each."""
    async with client.create_producer(topic) as producer:
        return [await producer.send(value) for value in numbers(first, end)]


async def backlog(client: Any, topic: str, subscription: str) -> int:
    found: int = (await client.admin.topic_stats(topic))["subscriptions"][subscription]["backlog_messages"]
    return found


async def test_a_subscription_that_was_made_keeps_what_comes() -> None:
    metadata, ledgers = MemoryMetadataStore(), FakeLedgers()
    async with serving(metadata, ledgers) as server, connect_to(server) as client:
        await client.admin.create_subscription("t", "new")  # and the topic
        ids = await produce(client, "t", 0, 4)
        await client.admin.create_subscription("t", "all", start="earliest")
        await client.admin.create_subscription("t", "late", start=ids[2])
        with pytest.raises(AlreadyExists, match="'all' already; use it, move it by seeking, or delete it"):
            await client.admin.create_subscription("t", "all")
        with pytest.raises(InvalidArgument, match="not a subscription name"):
            await client.admin.create_subscription("t", "a b")
        with pytest.raises(InvalidArgument, match="not a start position"):
            await client.admin.create_subscription("t", "x", start="yesterday")  # type: ignore[arg-type]
    async with serving(metadata, ledgers) as server, connect_to(server) as client:
        for subscription, first in (("new", 0), ("all", 0), ("late", 2)):
            async with client.subscribe("t", subscription) as consumer:
                assert values(await take(consumer, 4 - first)) == numbers(first, 4)


async def test_no_topic_is_made_where_settings_forbid_it() -> None:
    async with serving(auto_create_topics=False) as server, connect_to(server) as client:
        with pytest.raises(TopicNotFound):
            await client.admin.create_subscription("t", "s")
        assert await client.admin.list_topics() == []


@pytest.mark.parametrize("type", ["exclusive", "failover", "shared", "key_shared"])
async def test_a_seek_moves_consumers_that_are_connected(type: SubscriptionType) -> None:
    metadata, ledgers = MemoryMetadataStore(), FakeLedgers()
    async with serving(metadata, ledgers) as server, connect_to(server) as client:
        ids = await produce(client, "t", 0, 20)
        async with client.subscribe("t", "s", type=type, start="earliest") as consumer:
            await consumer.ack(await take(consumer, 20), receipt=True)
            await client.admin.seek_subscription("t", "s", ids[15])
            assert values(await take(consumer, 5)) == numbers(15, 20)
            await client.admin.seek_subscription("t", "s", "latest")
            await produce(client, "t", 20, 21)
            message = await consumer.receive(5.0)
            assert message.value == b"20"
            await consumer.ack(message, receipt=True)  # the epoch is the right one: it counts
            assert await backlog(client, "t", "s") == 0
            await client.admin.seek_subscription("t", "s", "earliest")
    async with serving(metadata, ledgers) as server, connect_to(server) as client:
        consumer = await client.subscribe("t", "s", type=type)
        assert values(await take(consumer, 21)) == numbers(0, 21)


async def test_what_waited_in_a_queue_does_not_come_after_a_seek() -> None:
    async with serving() as server, connect_to(server) as client:
        await produce(client, "t", 0, 100)
        async with client.subscribe("t", "s", start="earliest") as consumer:
            assert (await consumer.receive(5.0)).value == b"0"
            held: Any = consumer._consumer
            while held._queued_messages < 99:
                await asyncio.sleep(0)
            await client.admin.seek_subscription("t", "s", "earliest")
            while held._epoch == 0:  # the first delivery from the new place is here
                await asyncio.sleep(0)
            assert values(await take(consumer, 100)) == numbers(0, 100)


@pytest.mark.parametrize("type", ["exclusive", "failover", "shared", "key_shared"])
async def test_a_skip_counts_what_is_not_acknowledged(type: SubscriptionType) -> None:
    metadata, ledgers = MemoryMetadataStore(), FakeLedgers()
    async with serving(metadata, ledgers) as server, connect_to(server) as client:
        await produce(client, "t", 0, 10)
        async with client.subscribe("t", "s", type=type, start="earliest") as consumer:
            messages = await take(consumer, 10)
            await consumer.ack([messages[1], messages[3]], receipt=True)
            assert await client.admin.skip_messages("t", "s", 3) == 3  # 0, 2, 4
            assert await backlog(client, "t", "s") == 5
            stats = (await client.admin.topic_stats("t"))["subscriptions"]["s"]["consumers"][0]
            assert stats["unacked_messages"] == (5 if type in ("shared", "key_shared") else 0)
            await consumer.ack(messages[2], receipt=True)  # late, and no harm
    async with serving(metadata, ledgers) as server, connect_to(server) as client:
        async with client.subscribe("t", "s", type=type) as consumer:
            assert values(await take(consumer, 5)) == numbers(5, 10)
        assert await client.admin.skip_messages("t", "s", 1000) == 5
        assert await client.admin.skip_messages("t", "s", 1) == 0
        with pytest.raises(InvalidArgument, match="0 messages cannot be skipped"):
            await client.admin.skip_messages("t", "s", 0)


async def test_a_skip_frees_a_consumer_that_is_blocked() -> None:
    async with serving(max_unacked_messages_per_consumer=10) as server, connect_to(server) as client:
        await produce(client, "t", 0, 30)
        async with client.subscribe("t", "s", type="shared", start="earliest") as consumer:
            assert values(await take(consumer, 10)) == numbers(0, 10)
            with pytest.raises(ReceiveTimeout):
                await consumer.receive(0.05)
            assert await client.admin.skip_messages("t", "s", 12) == 12
            assert values(await take(consumer, 10)) == numbers(12, 22)


async def test_a_cleared_backlog_does_not_come_back() -> None:
    metadata, ledgers = MemoryMetadataStore(), FakeLedgers()
    async with serving(metadata, ledgers) as server, connect_to(server) as client:
        await produce(client, "t", 0, 10)
        async with client.subscribe("t", "s", type="shared", start="earliest", nack_delay=0.0) as consumer:
            for message in await take(consumer, 5):
                consumer.nack(message)
            assert await client.admin.clear_backlog("t", "s") == 10
            await produce(client, "t", 10, 12)
            while (message := await consumer.receive(5.0)).value != b"10":
                pass  # what it held, or was on its way
            await consumer.ack(message, receipt=True)
    async with serving(metadata, ledgers) as server, connect_to(server) as client:
        consumer = await client.subscribe("t", "s", type="shared")
        assert values(await take(consumer, 1)) == numbers(11, 12)
        with pytest.raises(ReceiveTimeout):
            await consumer.receive(0.05)


async def test_clearing_gets_past_an_entry_that_cannot_be_read() -> None:
    ledgers = FakeLedgers()
    async with serving(None, ledgers) as server, connect_to(server) as client:
        ids = await produce(client, "t", 0, 3)
        await client.admin.create_subscription("t", "s", start="earliest")
        ledgers.damaged.add((ids[0].ledger, ids[0].entry))
        await client.admin.clear_backlog("t", "s")
        assert await backlog(client, "t", "s") == 0


async def test_a_peek_delivers_nothing() -> None:
    async with serving() as server, connect_to(server) as client:
        async with client.create_producer("t") as producer:
            await producer.send_many(numbers(0, 10), keys=[str(number) for number in range(10)])
        async with client.subscribe("t", "s", type="shared", start="earliest", nack_delay=0.0) as consumer:
            messages = await take(consumer, 10)
            await consumer.ack([messages[0], messages[2]], receipt=True)
            consumer.nack(messages[1])
            again = await consumer.receive(5.0)
            consumer.nack(again)
            assert (await consumer.receive(5.0)).redelivery_count == 2
            before = await client.admin.topic_stats("t")
            seen = await client.admin.peek_messages("t", "s", 4)
            assert values(seen) == [b"1", b"3", b"4", b"5"]
            assert [message.redelivery_count for message in seen] == [2, 0, 0, 0]
            assert [message.key for message in seen] == ["1", "3", "4", "5"]
            assert seen[1] == messages[3]
            assert len(await client.admin.peek_messages("t", "s", 1000)) == 8
            assert await client.admin.topic_stats("t") == before
            await consumer.ack(messages, receipt=True)
        assert await client.admin.peek_messages("t", "s") == []


async def test_a_peek_of_what_no_frame_takes_is_one_error() -> None:
    async with serving() as server, connect_to(server) as client:
        async with client.create_producer("t") as producer:
            await producer.send(b"x" * 3_000_000)
        await client.admin.create_subscription("t", "s", start="earliest")
        assert len(await client.admin.peek_messages("t", "s")) == 1
        async with connect_to(server, max_message_bytes=100_000) as small:
            with pytest.raises(InvalidCallError, match="raise max_message_bytes"):
                await small.admin.peek_messages("t", "s")


async def test_what_is_not_there_or_not_durable_is_refused() -> None:
    async with serving() as server, connect_to(server) as client:
        calls: list[Any] = [
            lambda topic, name: client.admin.seek_subscription(topic, name, "earliest"),
            lambda topic, name: client.admin.skip_messages(topic, name, 1),
            client.admin.clear_backlog,
            client.admin.peek_messages,
        ]
        for call in calls:
            with pytest.raises(TopicNotFound):
                await call("none", "s")
        assert await client.admin.list_topics() == []
        async with client.subscribe("t", "r", durable=False) as consumer:
            for call in calls:
                with pytest.raises(SubscriptionNotFound, match="no subscription 'none'"):
                    await call("t", "none")
            for call in calls[:3]:
                with pytest.raises(InvalidArgument, match="'r' is not durable: its consumer keeps its place"):
                    await call("t", "r")
            assert await client.admin.peek_messages("t", "r") == []
            assert consumer.active


async def test_a_skip_is_not_repeated_when_its_answer_is_lost(broker: FakeBroker, client: Any) -> None:
    broker.failures[SkipMessages] = ConnectionLost("gone")
    with pytest.raises(ConnectionLost):
        await client.admin.skip_messages("t", "s", 5)
    broker.failures[ClearBacklog] = ConnectionLost("gone")
    with pytest.raises(ConnectionLost):
        await client.admin.clear_backlog("t", "s")
    assert len(broker.received(SkipMessages)) == len(broker.received(ClearBacklog)) == 1
