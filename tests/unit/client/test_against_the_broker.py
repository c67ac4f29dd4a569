"""The client against the real broker and listener, over fake ledgers: what both sides must agree on."""

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest

from magnetar.client import (
    AlreadyExists,
    Client,
    ConsumerBusy,
    ProducerBusy,
    ReceiveTimeout,
    SubscriptionNotFound,
    TopicInUse,
)
from magnetar.client.options import SubscriptionType
from magnetar.proto.errors import MessageTooLarge
from magnetar.runtime.connection import FramedServer
from support.memory_metadata import MemoryMetadataStore
from support.served_broker import client, connect_to, server, serving, take

__all__ = ["client", "server"]


@pytest.mark.parametrize("batching", [True, False])
async def test_a_stream_with_acks(client: Client, batching: bool) -> None:
    values = [b"%d" % i for i in range(20_000)]
    producer = await client.create_producer("t", batching=batching)
    consumer = await client.subscribe("t", "s", start="earliest")
    receipts = [producer.send_nowait(value) for value in values]
    got = []
    async for message in consumer:
        got.append(message)
        await consumer.ack(message)
        if len(got) == len(values):
            break
    assert [message.value for message in got] == values
    assert [await receipt for receipt in receipts] == [message.id for message in got]
    await consumer.ack(got[-1], receipt=True)
    stats = await client.admin.topic_stats("t")
    assert stats["subscriptions"]["s"]["backlog_messages"] == 0
    [one] = stats["subscriptions"]["s"]["consumers"]
    assert one["permits"] > 500, "it grants again before half of its permits are left"


async def test_permits_of_both_sides_agree_after_partial_acks(client: Client) -> None:
    """What a client takes for spent and the broker does not, or the other way round, moves the permits for good."""
    producer = await client.create_producer("t")
    for _ in range(20):
        await producer.send_many([b"%d" % i for i in range(100)])
    values = [b"%d" % i for i in range(100)] * 20
    first = await client.subscribe("t", "s", start="earliest", receiver_queue_messages=30)
    await first.ack((await take(first, 2000))[::2], receipt=True)
    await first.close()
    for _ in range(2):
        consumer = await client.subscribe("t", "s", receiver_queue_messages=30)
        assert [m.value for m in await take(consumer, 1000)] == values[1::2]
        stats = await client.admin.topic_stats("t")
        [one] = stats["subscriptions"]["s"]["consumers"]
        assert 15 < one["permits"] <= 30
        await consumer.close()


async def test_rule_50_conflicts_with_others_are_answered_at_once(client: Client) -> None:
    """What others hold is not waited for until operation_timeout, after which it would be a RequestTimeout."""
    producer = await client.create_producer("t", name="p")
    with pytest.raises(ProducerBusy, match="'p' is in use"):
        await client.create_producer("t", name="p")
    with pytest.raises(TopicInUse, match=r"1 producer\(s\) and 0 consumer"):
        await client.admin.delete_topic("t")
    await producer.close()
    await (await client.create_producer("t", name="p")).close()
    consumers = [await client.subscribe("t", "shared", type="shared") for _ in range(2)]
    for refused in (
        lambda: client.subscribe("t", "shared"),
        lambda: client.admin.delete_subscription("t", "shared"),
        lambda: consumers[0].unsubscribe(),
    ):
        with pytest.raises(ConsumerBusy):
            await refused()
    with pytest.raises(AlreadyExists):
        await client.admin.create_subscription("t", "shared")
    with pytest.raises(TopicInUse, match=r"0 producer\(s\) and 2 consumer"):
        await client.admin.delete_topic("t")
    for consumer in consumers:
        await consumer.close()
    await client.admin.delete_topic("t")


async def test_a_subscription_that_is_not_durable_ends_with_its_last_consumer(client: Client) -> None:
    producer = await client.create_producer("t")
    await producer.send_many([b"%d" % i for i in range(10)])
    options: dict[str, Any] = {"type": "shared", "start": "earliest", "durable": False}
    first = await client.subscribe("t", "s", **options)
    messages = await take(first, 4)
    await first.ack(messages[:3], receipt=True)
    second = await client.subscribe("t", "s", **options)
    with pytest.raises(ConsumerBusy, match="exists and is not durable; choose another name"):
        await client.subscribe("t", "s", type="shared")
    await first.close()
    assert (await second.receive(2.0)).value == b"3"  # held by the first, and not acknowledged
    stats = await client.admin.topic_stats("t")
    assert stats["subscriptions"]["s"]["durable"] is False
    await second.close()
    assert (await client.admin.topic_stats("t"))["subscriptions"] == {}
    async with client.subscribe("t", "s", **options) as again:
        assert (await again.receive(2.0)).value == b"0"
        await again.unsubscribe()
    with pytest.raises(SubscriptionNotFound):
        await client.admin.delete_subscription("t", "s")
    async with client.subscribe("t", "s"):
        with pytest.raises(ConsumerBusy, match="exists and is durable"):
            await client.subscribe("t", "s", durable=False)


async def test_reconnects_lose_nothing(client: Client, server: FramedServer) -> None:
    producer = await client.create_producer("t", batching_max_messages=50)
    consumer = await client.subscribe("t", "s", start="earliest")
    reader = await client.create_reader("t", start="earliest")
    seen: dict[bytes, int] = {}
    read: list[bytes] = []
    total = 5000

    async def produce() -> None:
        for i in range(total):
            await producer.send(b"%d" % i) if i % 100 == 0 else producer.send_nowait(b"%d" % i)
        await producer.flush()

    async def consume() -> None:
        async for message in consumer:
            seen[message.value or b""] = 1
            await consumer.ack(message)
            if len(seen) == total:
                return

    async def tail() -> None:
        async for message in reader:
            read.append(message.value or b"")
            if message.value == b"%d" % (total - 1):
                return

    async def cut() -> None:
        while True:
            await asyncio.sleep(0.02)
            for connection in server.connections:
                connection.abort()

    cutting = asyncio.create_task(cut())
    async with asyncio.timeout(30):
        producing = asyncio.create_task(produce())
        await asyncio.sleep(0.3)
        cutting.cancel()
        await asyncio.gather(producing, consume(), tail())
    assert list(dict.fromkeys(read)) == [b"%d" % i for i in range(total)]
    assert sorted(seen) == sorted(b"%d" % i for i in range(total))


async def test_seek_nack_and_reader(client: Client) -> None:
    producer = await client.create_producer("t")
    ids = await producer.send_many([b"%d" % i for i in range(100)])
    ids += [await producer.send(b"%d" % i) for i in range(100, 110)]
    consumer = await client.subscribe("t", "s", start=ids[42], type="shared", nack_delay=0.01)
    assert [m.value for m in await take(consumer, 3)] == [b"42", b"43", b"44"]
    await consumer.seek(ids[7])
    messages = await take(consumer, 103)
    assert [m.value for m in messages] == [b"%d" % i for i in range(7, 110)]
    consumer.nack(messages[5])
    again = await consumer.receive(2.0)
    assert (again.value, again.redelivery_count) == (b"12", 1)
    await consumer.seek("latest")
    with pytest.raises(ReceiveTimeout):
        await consumer.receive(0.02)
    async with client.create_reader("t", start=ids[99]) as reader:
        got = []
        while await reader.has_message_available():
            got.append((await reader.read_next(1.0)).value)
        assert got == [b"%d" % i for i in range(99, 110)]
        await reader.seek("earliest")
        assert [m.value for m in await take(reader, 110)] == [b"%d" % i for i in range(110)]
    await consumer.unsubscribe()
    assert (await client.admin.topic_stats("t"))["subscriptions"] == {}


async def test_the_largest_message(client: Client) -> None:
    producer = await client.create_producer("t")
    size = 5 * 1024 * 1024 - 4096
    await producer.send(b"x" * size)
    reader = await client.create_reader("t", start="earliest")
    assert len((await reader.read_next(2.0)).value or b"") == size


class SlowMetadata(MemoryMetadataStore):
    """Making a node takes 0 to 4 ms, as with a disk."""

    rng = random.Random(2)

    async def create(self, path: str, value: bytes, *, session: Any = None) -> int:
        await asyncio.sleep(self.rng.random() * 0.004)
        return await super().create(path, value, session=session)


async def test_openings_that_are_cancelled_hold_no_place() -> None:
    rng = random.Random(1)
    async with serving(SlowMetadata()) as server, connect_to(server) as client:
        for number in range(300):
            opening = asyncio.ensure_future(client.subscribe("t", f"s{number}", start="earliest"))
            await asyncio.sleep(rng.random() * 0.003)
            opening.cancel()
            with suppress(asyncio.CancelledError):
                await (await opening).close()
        stats = await client.admin.topic_stats("t")
        held = [name for name, one in stats["subscriptions"].items() if one["consumers"]]
        assert held == []


async def test_a_producer_whose_opening_was_cut_off_is_not_dead(client: Client) -> None:
    for _ in range(30):
        with suppress(TimeoutError):
            async with asyncio.timeout(0.0005):
                producer = await client.create_producer("t", name="p")
            await producer.close()
    producer = await client.create_producer("t", name="p")
    await producer.send(b"alive")
    stats = await client.admin.topic_stats("t")
    assert [one["name"] for one in stats["producers"]] == ["p"]


async def test_deliveries_fit_the_frames_of_a_small_client(server: FramedServer, client: Client) -> None:
    values = [b"%04d" % number + b"x" * 100 for number in range(3000)]
    producer = await client.create_producer("t", batching=False)
    for value in values:
        producer.send_nowait(value)
    await producer.flush()
    async with connect_to(server, max_message_bytes=8_000) as small:
        consumer = await small.subscribe("t", "s", start="earliest", receiver_queue_messages=5000)
        got = await take(consumer, 3000)
        assert [message.value for message in got] == values
        await consumer.ack([message for message in got if message.value[3] % 2], receipt=True)
        await consumer.close()
        consumer = await small.subscribe("t", "s", receiver_queue_messages=5000)
        rest = [message.value for message in await take(consumer, 1500)]
        assert rest == [value for value in values if not value[3] % 2]


@pytest.mark.parametrize("type", ["exclusive", "shared"])
async def test_a_message_that_does_not_fit_a_small_client_ends_its_consumer_alone(
    server: FramedServer, client: Client, type: SubscriptionType
) -> None:
    producer = await client.create_producer("t")
    sent = [b"before", b"x" * 100_000, b"after"]
    for value in sent:
        await producer.send(value)
    async with connect_to(server, max_message_bytes=8_000) as small:
        other = await small.subscribe("quiet", "s", start="earliest")
        consumer = await small.subscribe("t", "s", type=type, start="earliest")
        with pytest.raises(MessageTooLarge, match="max_message_bytes of 100"):
            await take(consumer, 3)
        quiet = await client.create_producer("quiet")
        await quiet.send(b"alive")
        assert (await other.receive(2.0)).value == b"alive", "the connection is not cut"
    consumer = await client.subscribe("t", "s", type=type)
    assert sorted(message.value for message in await take(consumer, 3)) == sorted(sent)
