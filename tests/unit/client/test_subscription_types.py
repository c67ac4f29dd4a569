"""Failover, Key_Shared and priorities, through the public client and over real sockets."""

import asyncio
import contextlib
import functools
import itertools
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from magnetar.client import Client, ConsumerBusy, InvalidArgument, ReceiveTimeout
from magnetar.proto.batch import key_hash_of
from support.served_broker import connect_to, serving, take


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    async with serving() as server, connect_to(server) as client:
        yield client


# --- failover --------------------------------------------------------------------------------------------------------


async def test_failover_hands_over_what_is_not_acknowledged_when_the_active_consumer_closes(
    client: Client,
) -> None:
    producer = await client.create_producer("t")
    first = await client.subscribe("t", "s", type="failover", start="earliest")
    second = await client.subscribe("t", "s", type="failover")
    await producer.send_many([b"%d" % i for i in range(100)])
    messages = await take(first, 60)
    assert (first.active, second.active) == (True, False)
    await first.ack_cumulative(messages[39], receipt=True)
    with pytest.raises(ReceiveTimeout):
        await second.receive(0)
    await first.close()
    assert [m.value for m in await take(second, 60)] == [b"%d" % i for i in range(40, 100)]
    assert second.active


async def test_failover_of_a_higher_priority_takes_over(client: Client) -> None:
    producer = await client.create_producer("t")
    low = await client.subscribe("t", "s", type="failover", start="earliest", priority_level=5)
    await producer.send_many([b"%d" % i for i in range(100)])
    messages = await take(low, 60)
    await low.ack(messages[:40])  # without a receipt, and sent when the other one takes over
    high = await client.subscribe("t", "s", type="failover", priority_level=1)
    assert [m.value for m in await take(high, 60)] == [b"%d" % i for i in range(40, 100)]
    assert (low.active, high.active) == (False, True)
    with pytest.raises(ReceiveTimeout):  # what waited in its queue was dropped
        await low.receive(0)
    await high.close()
    assert (await low.receive(2.0)).value == b"40"


async def test_shared_consumers_of_a_lower_priority_get_what_others_cannot_take(client: Client) -> None:
    producer = await client.create_producer("t")
    high = await client.subscribe(
        "t", "s", type="shared", start="earliest", priority_level=0, receiver_queue_messages=10
    )
    low = await client.subscribe("t", "s", type="shared", priority_level=1)
    for value in range(5):
        await producer.send(b"%d" % value)
    assert [m.value for m in await take(high, 5)] == [b"%d" % value for value in range(5)]
    with pytest.raises(ReceiveTimeout):
        await low.receive(0)
    for value in range(100):
        await producer.send(b"%d" % value)
    assert (await low.receive(2.0)).value == b"10"


# --- key_shared ------------------------------------------------------------------------------------------------------


class KeyOrder:
    """Of each key: messages come in order, and to one consumer at a time (rule 28)."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = defaultdict(lambda: -1)
        self.holder: dict[
            str, tuple[str, int]
        ] = {}  # who has unacknowledged messages of the key, and how many
        self.redelivered = 0

    def received(self, name: str, message: Any) -> None:
        """Called when it is handed out."""
        key, number = message.key, int(message.value)
        holder, held = self.holder.get(key, (name, 0))
        assert holder == name or not held, f"{key} is at {holder} and at {name}"
        if message.redelivery_count:
            self.redelivered += 1
        else:
            assert number == self.seen[key] + 1, f"{key}: {number} after {self.seen[key]}"
        self.seen[key] = max(number, self.seen[key])
        self.holder[key] = (name, held + 1)

    def acknowledged(self, message: Any) -> None:
        """Called before the acknowledgement is sent."""
        holder, held = self.holder[message.key]
        self.holder[message.key] = (holder, held - 1)


@pytest.mark.parametrize("batching", [True, False])
async def test_rule_28_keys_stay_in_order_while_consumers_come_and_go(client: Client, batching: bool) -> None:
    rng = random.Random(7)
    order, keys, count = KeyOrder(), [f"key-{n}" for n in range(50)], 6_000
    producer = await client.create_producer("t", batching=batching, batching_max_messages=20)
    numbers: dict[str, int] = defaultdict(int)
    stopped, done = asyncio.Event(), 0

    async def consume(name: str) -> None:
        nonlocal done
        async with client.subscribe(
            "t",
            "s",
            type="key_shared",
            start="earliest",
            name=name,
            receiver_queue_messages=rng.choice([5, 50, 1000]),
        ) as consumer:
            for _ in range(rng.randrange(100, 900)):
                try:
                    message = await consumer.receive(0.05)
                except ReceiveTimeout:
                    if stopped.is_set():
                        return
                    continue
                order.received(name, message)
                if rng.random() < 0.2:
                    await asyncio.sleep(0)
                order.acknowledged(message)
                await consumer.ack(message, receipt=rng.random() < 0.05)
                done += 1

    async def come_and_go(number: int) -> None:
        for generation in itertools.count():
            if stopped.is_set():
                return
            await consume(f"c{number}.{generation}")

    consumers = [asyncio.ensure_future(come_and_go(number)) for number in range(4)]
    for _ in range(count // 20):
        for _ in range(20):
            key = rng.choice(keys)
            producer.send_nowait(b"%d" % numbers[key], key)
            numbers[key] += 1
        await producer.flush()
    async with asyncio.timeout(30):
        while done < count:
            await asyncio.sleep(0.01)
    stopped.set()
    await asyncio.gather(*consumers)
    assert {key: seen + 1 for key, seen in order.seen.items()} == numbers
    stats = (await client.admin.topic_stats("t"))["subscriptions"]["s"]
    assert stats["backlog_messages"] == 0


async def test_a_producer_that_batches_by_key_keeps_ids_and_the_order_of_each_key(client: Client) -> None:
    producer = await client.create_producer("t", batching_by_key=True)
    keys = ["a", "b", "a", "c", "b", "a"]
    values = [b"%d" % number for number in range(6)]
    receipts = [producer.send_nowait(value, key) for value, key in zip(values, keys)]
    ids = {value: await receipt for value, receipt in zip(values, receipts)}
    many = await producer.send_many(values, keys=keys)
    ids |= {value + b"+": message_id for value, message_id in zip(values, many)}
    consumer = await client.subscribe("t", "s", type="key_shared", start="earliest")
    messages = await take(consumer, 12)
    assert {m.id for m in messages[:6]} == {ids[value] for value in values}
    assert all(ids[m.value] == m.id for m in messages[:6])
    assert all(ids[m.value + b"+"] == m.id for m in messages[6:])
    assert [m.value for m in messages[:6]] == [b"0", b"2", b"5", b"1", b"4", b"3"]
    assert [m.sequence_id for m in messages] == list(range(12))
    headers = [m.delivery.header(m.index) for m in messages]
    assert not any(header.mixed_keys for header in headers)


async def test_consumers_may_name_the_hash_ranges_that_they_want(client: Client) -> None:
    producer = await client.create_producer("t")
    ranges: dict[str, tuple[tuple[int, int], ...]] = {
        "low": ((0, 32_767),), "high": ((32_768, 40_000), (40_001, 65_535)),
    }  # fmt: skip
    options: dict[str, Any] = {"type": "key_shared", "start": "earliest"}
    low = await client.subscribe("t", "s", hash_ranges=ranges["low"], **options)
    keys = [f"key-{n}" for n in range(40)]
    await producer.send_many([key.encode() for key in keys], keys=keys)
    expected = {
        name: [
            key.encode() for key in keys if any(a <= key_hash_of(key) % 65_536 <= b for a, b in ranges[name])
        ]
        for name in ranges
    }
    assert [m.value for m in await take(low, len(expected["low"]))] == expected["low"]
    # What nobody wants waits for somebody who does.
    high = await client.subscribe("t", "s", hash_ranges=ranges["high"], **options)
    assert [m.value for m in await take(high, len(expected["high"]))] == expected["high"]
    with pytest.raises(ConsumerBusy, match="overlaps 5 to 7"):
        await client.subscribe("t", "s", hash_ranges=((5, 7),), **options)
    with pytest.raises(ConsumerBusy, match="share its keys in the same way"):
        await client.subscribe("t", "s", **options)
    with pytest.raises(InvalidArgument, match="0 to 65535"):
        await client.subscribe("t", "s", hash_ranges=((7, 5),), **options)
    with pytest.raises(InvalidArgument, match="for key_shared and exclusive subscriptions"):
        await client.subscribe("t", "other", type="shared", hash_ranges=((5, 7),))


async def test_an_exclusive_consumer_may_name_the_hash_ranges_that_it_wants(client: Client) -> None:
    producer = await client.create_producer("t")
    keys = [f"key-{n}" for n in range(40)]
    subscribe = functools.partial(client.subscribe, "t", "s", start="earliest")
    async with await subscribe(hash_ranges=((0, 9_999), (40_000, 65_535))) as consumer:
        for part in (keys[:20], keys[20:]):
            await producer.send_many([key.encode() for key in part], keys=part)
        wanted = [key.encode() for key in keys if not 10_000 <= key_hash_of(key) % 65_536 < 40_000]
        messages = await take(consumer, len(wanted))
        assert [m.value for m in messages] == wanted
        await consumer.ack_cumulative(messages[-1])
    async with await subscribe() as consumer:  # the others were passed
        await producer.send(b"the next")
        assert [m.value for m in await take(consumer, 1)] == [b"the next"]


async def test_key_shared_messages_without_a_key_are_spread_over_the_consumers(client: Client) -> None:
    options: dict[str, Any] = {"type": "key_shared", "start": "earliest"}
    consumers = [await client.subscribe("t", "s", name=f"c{n}", **options) for n in range(3)]
    producer = await client.create_producer("t", batching=False)
    for number in range(120):
        await producer.send(b"%d" % number)
    found: list[int] = []
    for consumer in consumers:
        before = len(found)
        with contextlib.suppress(ReceiveTimeout):
            while True:
                found.append(int((await consumer.receive(0.5)).value or b""))
        assert len(found) - before >= 15, "its share is a third"
    assert sorted(found) == list(range(120))
