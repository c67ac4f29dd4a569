"""Partitioned topics through the public client and a real broker."""

import asyncio
import random
import re
import threading
from collections import Counter
from typing import Any

import pytest

from magnetar.client import (
    Client,
    DeadLetterPolicy,
    Message,
    PartitionNotFound,
    TopicNotFound,
    blocking,
)
from magnetar.client.administration import ask
from magnetar.proto.commands import CreateTopic, DeleteTopic, UpdatePartitions
from support.client_kit import until
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.served_broker import connect_to, serving, take


def full(name: str) -> str:
    return f"persistent://public/default/{name}"


def partitions(name: str, count: int) -> list[str]:
    return [f"{full(name)}-partition-{number}" for number in range(count)]


async def create(client: Client, name: str, count: int) -> None:
    await ask(client.admin, CreateTopic(0, full(name), count))


async def grow(client: Client, name: str, count: int) -> None:
    await ask(client.admin, UpdatePartitions(0, full(name), count))


async def delete(client: Client, name: str) -> None:
    """Each partition by its owner, between the two calls for the topic."""
    while left := (await ask(client.admin, DeleteTopic(0, full(name), True)))["partitions"]:
        for number in left:
            one = f"{full(name)}-partition-{number}"
            await ask(client.admin, DeleteTopic(0, one, True), topic=one)


def sends_to(producer: Any) -> int:
    """How many partitions."""
    return len(producer._producer._producers)


def in_order(messages: list[Message]) -> bool:
    """True if the messages of each partition came as they are stored."""
    return all(
        [message.id for message in messages if message.topic == topic]
        == sorted(message.id for message in messages if message.topic == topic)
        for topic in {message.topic for message in messages}
    )


@pytest.mark.parametrize("type", ["exclusive", "failover", "shared", "key_shared"])
async def test_a_subscription_of_each_type(type: Any) -> None:
    async with serving() as server, connect_to(server) as client:
        await create(client, "t", 4)
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", type=type, start="earliest")
        assert consumer.topics == partitions("t", 4)
        keys = [None if number % 2 else f"k{number}" for number in range(400)]
        ids = [await producer.send(b"%d" % number, keys[number]) for number in range(100)]
        ids += await producer.send_many([b"%d" % number for number in range(100, 400)], keys=keys[100:])
        messages = await take(consumer, 400)
        assert in_order(messages)
        assert sorted((int(message.value or b""), message.id) for message in messages) == list(enumerate(ids))
        assert set(Counter(message.id.partition for message in messages)) == {0, 1, 2, 3}
        await consumer.ack([message.id for message in messages[:100]], receipt=True)
        await consumer.ack(messages[100:399], receipt=True)
        consumer.nack(messages[399], delay=0.0)
        again = await consumer.receive(5.0)
        assert (again.id, again.topic) == (messages[399].id, messages[399].topic)
        await consumer.redeliver_unacknowledged()
        assert (await consumer.receive(5.0)).id == again.id
        await consumer.close()
        async with client.subscribe("t", "s", type=type) as successor:
            assert (await successor.receive(5.0)).id == again.id
            await successor.unsubscribe()


async def test_growth_while_producing_and_consuming_loses_nothing() -> None:
    async with serving() as server, connect_to(server) as client, connect_to(server) as other:
        await create(client, "t", 1)
        producer = await client.create_producer("t")
        consumers = [await one.subscribe("t", "s", type="shared") for one in (client, other)]
        exclusive = await other.subscribe("t", "x")
        rng = random.Random(5)
        total = 3_000

        async def send() -> None:
            for start in range(0, total, 10):
                keys = [rng.choice([None, f"k{rng.randrange(100)}"]) for _ in range(10)]
                await producer.send_many([b"%d" % number for number in range(start, start + 10)], keys=keys)

        sending = asyncio.ensure_future(send())
        got: list[Message] = []

        async def receive(consumer: Any) -> None:
            async for message in consumer:
                got.append(message)
                await consumer.ack(message)

        receiving = [asyncio.ensure_future(receive(consumer)) for consumer in consumers]
        for count in (2, 5, 8):
            await asyncio.sleep(0.02)
            await grow(client, "t", count)
        await sending
        later = [await producer.send(b"%d" % number) for number in range(total, total + 100)]
        assert {message_id.partition for message_id in later} == set(range(8))
        whole = await take(exclusive, total + 100)
        async with asyncio.timeout(20):
            await until(lambda: len(got) >= total + 100)
        for consumer in consumers:
            consumer.stop()
        await asyncio.gather(*receiving)
        for messages in (got, whole):
            assert sorted(int(message.value or b"") for message in messages) == list(range(total + 100))
        assert in_order(whole)


async def test_after_a_restart_of_the_broker_all_goes_on_and_growth_is_learned() -> None:
    metadata, ledgers = MemoryMetadataStore(), FakeLedgers()
    async with serving(metadata, ledgers) as server:
        port = server.addresses[0][1]
        client = await connect_to(server, operation_timeout=30.0)  # type: ignore[misc]
        await create(client, "t", 3)
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s")
        await producer.send_many([b"%d" % number for number in range(30)], keys=list("abc" * 10))
        assert len(await take(consumer, 30)) == 30
    receipts = [producer.send_nowait(b"while it is away") for _ in range(5)]
    async with serving(metadata, ledgers, port) as server, connect_to(server) as other:
        await grow(other, "t", 4)
        assert all([await receipt for receipt in receipts])
        await until(lambda: len(consumer.topics) == 4)
        await until(lambda: client.connection_state == "connected")
        ids = [await producer.send(b"m") for _ in range(40)]
        await until(lambda: sends_to(producer) == 4)
        ids += [await producer.send(b"m") for _ in range(4)]
        assert {message_id.partition for message_id in ids} == {0, 1, 2, 3}
        assert len({message.id for message in await take(consumer, 79)}) == 79  # nothing was acknowledged
        await client.close()


async def test_a_topic_is_partitioned_or_not_and_partitions_that_are_not_there_are_clear_errors() -> None:
    async with serving() as server, connect_to(server) as client:
        await create(client, "t", 2)
        for call in (client.create_producer("t-partition-2"), client.subscribe("t-partition-2", "s")):
            with pytest.raises(PartitionNotFound):
                await call
        with pytest.raises(PartitionNotFound, match="is no partitioned topic"):
            await client.create_producer("nothing-partition-0")
        direct = await client.create_producer("t-partition-1")
        message_id = await direct.send(b"m")
        assert message_id.partition == 1
        async with client.create_reader("public/default/t", start="earliest") as reader:
            message = await reader.receive(5.0)
            assert (message.id, message.topic) == (message_id, partitions("t", 2)[1])


async def test_readers_and_table_views_see_all_partitions() -> None:
    async with serving() as server, connect_to(server) as client:
        await create(client, "t", 3)
        producer = await client.create_producer("t")
        await producer.send_many(
            [b"%d" % number for number in range(60)], keys=[f"k{n % 20}" for n in range(60)]
        )
        reader = await client.create_reader("t", start="earliest")
        assert len(await take(reader, 60)) == 60
        assert not await reader.has_message_available()
        async with client.create_table_view("t") as view:
            assert {view[f"k{number}"] for number in range(20)} == {
                b"%d" % number for number in range(40, 60)
            }
            await grow(client, "t", 6)
            await until(lambda: sends_to(producer) == 6)
            await producer.send_many([b"new"] * 20, keys=[f"n{number}" for number in range(20)])
            assert await reader.has_message_available() or len(await reader.last_message_ids()) < 6
            assert {message.value for message in await take(reader, 20)} == {b"new"}
            await until(lambda: len(view._consumer.consumers) == 6)
            await view.refresh()
            assert len(view) == 40


async def test_patterns_match_without_the_number_of_a_partition() -> None:
    async with serving() as server, connect_to(server) as client:
        await create(client, "orders", 2)
        consumer = await client.subscribe(re.compile("orders"), "s", start="earliest")
        both = await client.subscribe(re.compile("orders|new.*"), "b", start="earliest")
        assert consumer.topics == partitions("orders", 2)
        producer = await client.create_producer("orders")
        await grow(client, "orders", 3)
        await until(lambda: sorted(consumer.topics) == partitions("orders", 3))
        await create(client, "news", 2)
        await until(lambda: len(both.topics) == 5)
        await until(lambda: sends_to(producer) == 3)
        sent = [await producer.send(b"m") for _ in range(30)]
        assert sorted(message.id for message in await take(consumer, 30)) == sorted(sent)


# --- letters -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("letters", [0, 3], ids=["plain letter topics", "partitioned letter topics"])
async def test_letters_of_all_partitions_go_to_one_topic(letters: int) -> None:
    async with serving() as server, connect_to(server) as client:
        await create(client, "t", 4)
        if letters:
            await create(client, "t-s-DLQ", letters)
            await create(client, "t-s-RETRY", letters)
        consumer = await client.subscribe(
            "t", "s", type="shared", retry=True, dead_letter=DeadLetterPolicy(max_redeliver_count=1)
        )
        retry_topics = partitions("t-s-RETRY", letters) if letters else [full("t-s-RETRY")]
        assert consumer.topics == [*partitions("t", 4), *retry_topics]
        producer = await client.create_producer("t")
        sent = await producer.send_many(
            [b"%d" % number for number in range(12)], keys=[str(n) for n in range(12)]
        )
        for round_number in range(2):
            for message in await take(consumer, 12):
                assert message.topic in (retry_topics if round_number else partitions("t", 4))
                await consumer.reconsume_later(message, properties={"round": str(round_number)})
        dead = await client.subscribe("t-s-DLQ", "look", start="earliest")
        found = await take(dead, 12)
        assert sorted(message.value or b"" for message in found) == sorted(
            b"%d" % number for number in range(12)
        )
        for message in found:
            assert message.properties["REAL_TOPIC"] == full("t")
            assert message.properties["LETTER_TOPIC"] == full("t-s-DLQ")
            assert message.properties["ORIGIN_MESSAGE_ID"] == str(sent[int(message.value or b"")])
            assert message.properties["round"] == "1"
        topics = await client.admin.list_topics()
        assert not [topic for topic in topics if re.search("partition-[0-9]+-s-", topic)]


async def test_what_is_redelivered_too_often_on_any_partition_is_a_dead_letter_of_the_topic() -> None:
    async with serving() as server, connect_to(server) as client:
        await create(client, "t", 3)
        consumer = await client.subscribe(
            "t", "s", type="shared", dead_letter=DeadLetterPolicy(max_redeliver_count=1), nack_delay=0.0
        )
        dead = await client.subscribe("t-s-DLQ", "look", start="earliest")
        producer = await client.create_producer("t")
        await producer.send_many([b"%d" % number for number in range(9)], keys=[str(n) for n in range(9)])
        for _ in range(2):
            for message in await take(consumer, 9):
                consumer.nack(message)
        assert len(await take(dead, 9)) == 9


async def test_patterns_with_retry_topics() -> None:
    async with serving() as server, connect_to(server) as client:
        await create(client, "t", 2)
        consumer = await client.subscribe(re.compile("t"), "s", type="shared", retry=True, start="earliest")
        assert sorted(consumer.topics) == sorted([*partitions("t", 2), full("t-s-RETRY")])
        producer = await client.create_producer("t")
        await producer.send_many([b"a", b"b"])
        for message in await take(consumer, 2):
            await consumer.reconsume_later(message)
        assert [message.topic for message in await take(consumer, 2)] == [full("t-s-RETRY")] * 2


# --- deleted and made again --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4, 6])
async def test_a_topic_that_is_deleted_and_made_again_with_another_number(count: int) -> None:
    async with serving() as server, connect_to(server) as client, connect_to(server) as other:
        await create(client, "t", 4)
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s")
        await producer.send_many([b"old"] * 8, keys=list("abcdefgh"))
        assert len(await take(consumer, 8)) == 8
        await delete(other, "t")
        with pytest.raises(TopicNotFound):
            await consumer.receive(5.0)
        with pytest.raises(TopicNotFound):
            await producer.send(b"m")
        await create(other, "t", count)
        async with asyncio.timeout(10):
            await until(lambda: sorted(consumer.topics) == partitions("t", count))
            await until(lambda: not producer.ended)
        await until(lambda: sends_to(producer) == count)
        ids = await producer.send_many([b"new"] * 100, keys=[str(number) for number in range(100)])
        assert {message_id.partition for message_id in ids} == set(range(count))
        messages = await take(consumer, 100)
        assert {message.value for message in messages} == {b"new"}
        await consumer.ack(messages, receipt=True)


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_a_program_without_asyncio() -> None:
    async with serving() as server, connect_to(server) as client:
        await create(client, "t", 3)
        url = f"magnetar://127.0.0.1:{server.addresses[0][1]}"
        found: dict[str, Any] = {}

        def program() -> None:
            with blocking.connect(url) as blocked:
                producer = blocked.create_producer("t", routing=lambda message, count: count - 1)
                found["id"] = producer.send(b"m", "k")
                with blocked.subscribe("t", "s", start="earliest") as consumer:
                    message = consumer.receive(5.0)
                    consumer.ack(message.id)
                    found["message"] = message
                    found["last"] = consumer.last_message_ids()

        thread = threading.Thread(target=program)
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.01)
        assert found["id"].partition == 2
        assert found["message"].id == found["id"]
        assert found["last"] == dict(zip(partitions("t", 3), [None, None, found["id"]]))


# --- failover ----------------------------------------------------------------------------------------------------------


async def test_failover_consumers_share_the_partitions_evenly() -> None:
    async with serving(failover_delay_ms=20) as server, connect_to(server) as client:
        await create(client, "t", 6)
        producer = await client.create_producer(
            "t", routing=lambda message, count: int(message.value or b"") % count
        )
        consumers: dict[str, Any] = {}

        def active() -> dict[str, list[int]]:
            return {
                name: [one.partition for one in consumer._consumer.consumers.values() if one.active]
                for name, consumer in consumers.items()
            }

        async def join(name: str, **more: Any) -> None:
            consumers[name] = await client.subscribe("t", "s", type="failover", name=name, **more)
            shares = len(consumers) if not more else 1
            await until(lambda: sorted(map(len, active().values()))[-1] == 6 // shares)

        await join("b")
        assert active() == {"b": [0, 1, 2, 3, 4, 5]}
        await join("a")
        assert active() == {"a": [0, 2, 4], "b": [1, 3, 5]}
        await producer.send_many([b"%d" % number for number in range(60)])
        for name, consumer in consumers.items():
            messages = await take(consumer, 30)
            assert {message.id.partition for message in messages} == set(active()[name])
            await consumer.ack(messages, receipt=True)
        await consumers.pop("a").close()
        await until(lambda: active() == {"b": [0, 1, 2, 3, 4, 5]})
        await producer.send_many([b"%d" % number for number in range(6)])
        assert len(await take(consumers["b"], 6)) == 6
        await client.subscribe("t", "s", type="failover", name="z", priority_level=1)
        assert active() == {"b": [0, 1, 2, 3, 4, 5]}, "a lower priority waits"


async def test_failover_consumers_without_names_share_them_too() -> None:
    async with (
        serving(failover_delay_ms=20) as server,
        connect_to(server) as client,
        connect_to(server) as other,
    ):
        await create(client, "t", 8)
        consumers: list[Any] = [await one.subscribe("t", "s", type="failover") for one in (client, other)]

        def shares() -> list[int]:
            return [sum(one.active for one in whole._consumer.consumers.values()) for whole in consumers]

        await until(lambda: shares() == [4, 4])
        assert len((await client.admin.topic_stats("t"))["subscriptions"]["s"]["consumers"]) == 2
