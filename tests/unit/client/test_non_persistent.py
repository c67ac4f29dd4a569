"""Non-persistent topics through the public client: every type, slow and fast consumers, hand-over, letters, mistakes."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from typing import Any

import pytest

from magnetar.client import DeadLetterPolicy, ReceiveTimeout, TopicTerminated, Unsupported
from magnetar.client.administration import ask
from magnetar.proto.commands import TerminateTopic
from magnetar.proto.ids import MessageId
from support.memory_metadata import MemoryMetadataStore
from support.served_broker import connect_to, serving, take

PRICES = "non-persistent://public/default/prices"


@pytest.mark.parametrize("type", ["exclusive", "failover", "shared", "key_shared"])
async def test_a_consumer_that_keeps_up_loses_nothing(type: Any) -> None:
    count = 30_000
    async with serving(max_non_persistent_topic_bytes=1024 * 1024) as server, connect_to(server) as client:
        got: list[Any] = []
        consumer = await client.subscribe(PRICES, "screen", type=type)
        slow = await client.subscribe(PRICES, "slow", type=type, receiver_queue_messages=1)
        producer = await client.create_producer(PRICES)

        async def consume() -> None:
            async for message in consumer:
                got.append(message.value)
                await consumer.ack(message)
                if len(got) == count:
                    return

        consuming = asyncio.ensure_future(consume())
        for first in range(0, count, 100):
            values = [b"%d" % number for number in range(first, first + 100)]
            await producer.send_many(values, keys=[value[-1:] for value in values])
        await asyncio.wait_for(consuming, 60)
        assert sorted(got, key=int) == [b"%d" % number for number in range(count)]
        figures = await client.admin.topic_stats(PRICES)
        assert figures["subscriptions"]["screen"]["dropped_messages"] == 0
        assert (await slow.receive(5.0)).value


async def test_a_slow_consumer_gets_what_is_left_and_the_rest_is_counted() -> None:
    async with serving(max_non_persistent_topic_bytes=200_000) as server, connect_to(server) as client:
        consumer = await client.subscribe(PRICES, "slow", type="shared", receiver_queue_messages=1)
        producer = await client.create_producer(PRICES, batching=False)
        for number in range(300):
            await producer.send(bytes(4_000) + b"%d" % number)
        got: list[Any] = []
        while not got or not got[-1].value.endswith(b"299"):
            got.append(await consumer.receive(5.0))
        numbers = [int(message.value.removeprefix(bytes(4_000))) for message in got]
        assert numbers == sorted(numbers)
        assert numbers[-1] == 299
        figures = await client.admin.topic_stats(PRICES)
        assert figures["dropped_messages"] == 300 - len(got) > 200


async def test_clients_go_on_at_the_next_owner_and_ids_rise() -> None:
    metadata = MemoryMetadataStore()
    async with AsyncExitStack() as stack:
        async with serving(metadata) as server:
            port = server.addresses[0][1]
            client = await stack.enter_async_context(connect_to(server))
            consumer = await client.subscribe(PRICES, "screen", type="shared")
            producer = await client.create_producer(PRICES)
            await producer.send(b"a")
            (first,) = await take(consumer, 1)
        async with serving(metadata, port=port):
            await producer.send(b"b")  # before the consumer is there, perhaps
            (second,) = await take(consumer, 1)
            assert (second.value, second.id > first.id) == (b"b", True)
            await consumer.nack(second, delay=0)
            (again,) = await take(consumer, 1)
            assert (again.value, again.redelivery_count) == (b"b", 1)
            assert await consumer.last_message_id() == second.id
            await client.close()


async def test_dead_letters_go_where_the_policy_says_and_patterns_say_their_domain() -> None:
    async with serving() as server, connect_to(server) as client:
        kept = DeadLetterPolicy(max_redeliver_count=1, topic="kept", initial_subscription="all")
        consumer = await client.subscribe(PRICES, "screen", type="shared", dead_letter=kept)
        producer = await client.create_producer(PRICES)
        await producer.send(b"bad")
        for _ in range(2):
            message = await consumer.receive(5.0)
            await consumer.nack(message, delay=0)
        letters = await client.subscribe("kept", "all")
        assert (await letters.receive(5.0)).value == b"bad"
        pattern = re.compile("non-persistent://public/default/pri.*")
        everything = await client.subscribe(pattern, "others", start="earliest")
        assert (await everything.receive(5.0)).value == b"bad"
        other = await client.subscribe(re.compile("public/default/.*"), "stored", start="earliest")
        assert (await other.receive(5.0)).topic.endswith("/kept")
        with pytest.raises(ReceiveTimeout):
            await other.receive(0.1)


async def test_readers_and_table_views_have_what_is_left() -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer(PRICES)
        await producer.send_many([b"1", b"2", b"3"], keys=["tea", "milk", "tea"])
        async with client.create_reader(PRICES, start="earliest") as reader:
            assert [(await reader.receive(5.0)).value for _ in range(3)] == [b"1", b"2", b"3"]
        async with client.create_table_view(PRICES) as view:
            assert dict(view) == {"tea": b"3", "milk": b"2"}


async def test_what_needs_a_store_is_one_clear_error() -> None:
    async with serving() as server, connect_to(server) as client:
        with pytest.raises(Unsupported, match="nothing of it is stored"):
            await client.admin.create_subscription(PRICES, "s")
        with pytest.raises(Unsupported, match="nothing of it is stored"):
            await client.admin.compact_topic(PRICES)


async def test_a_partitioned_one_and_delivery_times_which_mean_nothing_there() -> None:
    async with serving() as server, connect_to(server) as client:
        await client.admin.create_topic(PRICES, partitions=3)
        consumer = await client.subscribe(PRICES, "screen", type="shared")
        producer = await client.create_producer(PRICES)
        values = [b"%d" % number for number in range(60)]
        await producer.send_many(values, keys=[value.decode() for value in values])
        await producer.send(b"60", key="60", deliver_after=3600)
        got = await take(consumer, 61)
        assert sorted(int(message.value) for message in got) == list(range(61))
        assert {message.id.partition for message in got} == {0, 1, 2}
        assert (await client.admin.topic_stats(PRICES))["dropped_messages"] == 0
        await client.admin.update_partitions(PRICES, 4)
        await client.admin.delete_topic(PRICES, force=True)
        assert await client.admin.list_topics() == []


async def test_it_ends_when_it_is_terminated() -> None:
    async with serving() as server, connect_to(server) as client:
        consumer = await client.subscribe(PRICES, "screen")
        producer = await client.create_producer(PRICES)
        sent = await producer.send(b"last")
        last = await ask(client.admin, TerminateTopic(0, PRICES), topic=PRICES)
        assert MessageId.from_bytes(last) == sent
        with pytest.raises(TopicTerminated):
            await producer.send(b"more")
        assert (await consumer.receive(5.0)).value == b"last"
