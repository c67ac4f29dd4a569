"""The client of Pulsar's protocol that the simulation uses, against the real listener: it does what Java's does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from magnetar.broker import Broker
from magnetar.proto.errors import RetryableError, TopicNotServed
from magnetar.proto.ids import TopicName
from support.pulsar_client import (
    Consumer,
    ConsumerOptions,
    Id,
    Producer,
    ProducerOptions,
    PulsarClient,
    Received,
)
from support.pulsar_scenario import pulsar_server
from support.virtual_time import in_virtual_time

TOPIC = "orders"


@asynccontextmanager
async def clients(count: int = 1, **settings: Any) -> AsyncIterator[tuple[Broker, list[PulsarClient]]]:
    """A broker, and clients of it."""
    async with pulsar_server(**settings) as (broker, _):
        made = [
            PulsarClient(
                "pulsar://127.0.0.1:6650", rng=random.Random(number), now_ms=lambda: 1_700_000_000_000
            )
            for number in range(count)
        ]
        yield broker, made
        for client in made:
            await client.close()


async def subscribed(client: PulsarClient, **options: Any) -> Consumer:
    """To the topic."""
    return await client.subscribe(TOPIC, ConsumerOptions(**{"subscription": "s", "name": "c", **options}))


async def produce(producer: Producer, *values: bytes, key: str | None = None) -> list[tuple[Id, ...]]:
    """Their ids."""
    return await asyncio.gather(*[producer.send(value, key) for value in values])


async def take(consumer: Consumer, count: int) -> list[Received]:
    """The next ones."""
    found: list[Received] = []
    while len(found) < count:
        found += await consumer.receive(count - len(found), 5.0)
    return found


def values(messages: list[Received]) -> list[bytes]:
    """Of each."""
    return [one.value for one in messages]


@pytest.mark.parametrize("style", ["first and last", "first", "last"])
def test_batches_single_messages_and_chunks_come_with_the_ids_of_their_receipts(style: Any) -> None:
    @in_virtual_time
    async def play() -> None:
        async with clients() as (_, [client]):
            consumer = await subscribed(client)
            options = {"name": "p", "sequence_ids": style, "max_message_bytes": 100}
            producer = await client.create_producer(TOPIC, ProducerOptions(max_batch=3, **options))
            ids = await produce(producer, b"a", b"b", b"c", b"d" * 250, b"e")
            found = await take(consumer, 5)
            assert values(found) == [b"a", b"b", b"c", b"d" * 250, b"e"]
            assert [one.chunks for one in found] == ids
            assert [one.sequence_id for one in found] == [0, 1, 2, 3, 4]
            assert [len(one.chunks) for one in found] == [1, 1, 1, 3, 1]
            assert ids[0][0].batch_size == 3
            assert ids[4][0].batch_size == 1

    play()


@in_virtual_time
async def test_what_has_no_receipt_is_sent_again_in_its_order() -> None:
    async with clients() as (broker, [client]):
        producer = await client.create_producer(TOPIC, ProducerOptions(name="p"))
        await produce(producer, b"0")
        await broker.unload(TopicName.parse(TOPIC), TopicNotServed("the topic is unloaded"))
        await produce(producer, b"1", b"2")
        assert not producer.protocol_errors
        consumer = await subscribed(client)
        assert values(await take(consumer, 3)) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("ack_sets", [True, False])
def test_a_batch_in_part(ack_sets: bool) -> None:
    @in_virtual_time
    async def play() -> None:
        async with clients(2) as (_, [client, other]):
            consumer = await subscribed(client, type="shared", ack_sets=ack_sets)
            producer = await client.create_producer(TOPIC, ProducerOptions(name="p", max_batch=3))
            await produce(producer, b"a", b"b", b"c")
            first, _, _ = await take(consumer, 3)
            assert await consumer.ack([first], receipt=True) == ([first] if ack_sets else [])
            await consumer.close()
            again = await subscribed(other, type="shared", ack_sets=ack_sets)
            left = await take(again, 2 if ack_sets else 3)
            assert values(left) == [b"b", b"c"] if ack_sets else [b"a", b"b", b"c"]
            assert await again.ack(left, receipt=True) == left

    play()


@in_virtual_time
async def test_up_to_the_middle_of_a_batch_names_the_entry_before_it() -> None:
    async with clients(2) as (_, [client, other]):
        consumer = await subscribed(client)
        producer = await client.create_producer(TOPIC, ProducerOptions(name="p", max_batch=2))
        await produce(producer, b"a", b"b", b"c", b"d")
        found = await take(consumer, 4)
        assert not await consumer.ack_cumulative(found[2], receipt=True)
        await consumer.close()
        assert values(await take(await subscribed(other), 2)) == [b"c", b"d"]


@pytest.mark.parametrize("kind", ["shared", "exclusive"])
def test_nacked_and_never_acknowledged_messages_come_again(kind: str) -> None:
    @in_virtual_time
    async def play() -> None:
        async with clients() as (_, [client]):
            consumer = await subscribed(client, type=kind, nack_delay=1.0, ack_timeout=3.0, queue=2)
            producer = await client.create_producer(TOPIC, ProducerOptions(name="p"))
            await produce(producer, b"a", b"b")
            first, _ = await take(consumer, 2)
            consumer.nack(first)
            again = await take(consumer, 1 if kind == "shared" else 2)
            assert values(again) == [b"a"] if kind == "shared" else [b"a", b"b"]
            assert again[0].redelivery_count == (1 if kind == "shared" else 0)
            assert await consumer.ack(again, receipt=True) == again
            if kind == "shared":
                assert values(await take(consumer, 1)) == [b"b"]

    play()


@in_virtual_time
async def test_a_seek_and_permits_of_a_small_queue() -> None:
    async with clients() as (_, [client]):
        consumer = await subscribed(client, queue=4)
        producer = await client.create_producer(TOPIC, ProducerOptions(name="p"))
        await produce(producer, *[b"%d" % n for n in range(20)])
        found = await take(consumer, 10)
        before = consumer.attachment_id
        await consumer.seek(found[5].id)
        assert values(await take(consumer, 15)) == [b"%d" % n for n in range(5, 20)]
        assert consumer.attachment_id == before + 1


@in_virtual_time
async def test_a_reader_goes_on_behind_what_it_has() -> None:
    async with clients() as (broker, [client]):
        producer = await client.create_producer(TOPIC, ProducerOptions(name="p", max_batch=2))
        await produce(producer, b"a", b"b", b"c")
        reader = await subscribed(client, durable=False, start=Id(-1, -1))
        assert values(await take(reader, 1)) == [b"a"]
        await broker.unload(TopicName.parse(TOPIC), TopicNotServed("the topic is unloaded"))
        await asyncio.sleep(1.0)
        assert values(await take(reader, 2)) == [b"b", b"c"]
        assert (await reader.last_message_id()).batch_index == 0
        assert await client.partitions(TOPIC) == 0


@in_virtual_time
async def test_the_next_consumer_of_a_failover_subscription_becomes_active() -> None:
    async with clients(2) as (_, [client, other]):
        first = await subscribed(client, type="failover", name="a")
        second = await subscribed(other, type="failover", name="b")
        await asyncio.sleep(0.1)
        assert (first.active, second.active) == (True, False)
        await first.close()
        await asyncio.sleep(2.0)
        assert second.active


@in_virtual_time
async def test_a_client_that_is_not_answered_leaves() -> None:
    async with clients() as (_, [client]):
        consumer = await subscribed(client)
        before = consumer.attachment_id
        connection = consumer.attachment.connection
        assert connection is not None
        await asyncio.sleep(100.0)
        assert not connection.closed
        connection.close()
        await asyncio.sleep(5.0)
        assert consumer.attachment_id > before


@in_virtual_time
async def test_what_is_asked_of_a_consumer_that_was_just_closed_is_asked_again() -> None:
    async with clients() as (broker, [client]):
        consumer = await subscribed(client)
        await broker.unload(TopicName.parse(TOPIC), TopicNotServed("the topic is unloaded"))
        with pytest.raises(RetryableError, match="MetadataError: consumer 1 is not open"):
            await consumer.seek(Id(-1, -1))
