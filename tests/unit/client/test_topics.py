"""Several topics and patterns behind one consumer, through the public client and a real broker."""

import asyncio
import contextlib
import random
import re
from functools import partial
from typing import Any

import pytest

from magnetar.client import (
    AlreadyClosed,
    ConsumerBusy,
    DeadLetterPolicy,
    InvalidArgument,
    Message,
    ReceiveTimeout,
    TopicNotFound,
    topics_watch,
)
from magnetar.client.options import Start, SubscriptionType
from magnetar.client.topic.consumer import TopicConsumer
from magnetar.client.topic_pattern import TopicPattern
from magnetar.proto.errors import InvalidTopicName
from support.client_kit import until
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.served_broker import connect_to, serving, take
from support.virtual_time import in_virtual_time


def full(name: str) -> str:
    """Of a topic in public/default."""
    return f"persistent://public/default/{name}"


def by_topic(messages: list[Message]) -> dict[str, list[bytes | None]]:
    """Values in the order in which they came."""
    found: dict[str, list[bytes | None]] = {}
    for message in messages:
        found.setdefault(message.topic.rpartition("/")[2], []).append(message.value)
    return found


NAMES = ["a", "b", "c"]


@pytest.mark.parametrize("type", ["exclusive", "failover", "shared", "key_shared"])
async def test_each_topic_keeps_its_order_and_gets_its_acknowledgements(type: SubscriptionType) -> None:
    async with serving() as server, connect_to(server) as client:
        producers = [await client.create_producer(name) for name in NAMES]
        consumer = await client.subscribe([*NAMES, "a"], "s", type=type, start="earliest")
        assert consumer.topics == [full(name) for name in NAMES]
        assert consumer.active
        values = [b"%d" % number for number in range(100)]
        for start in range(0, 100, 10):
            for producer in producers:
                await producer.send_many(values[start : start + 10])
        messages = await take(consumer, 300)
        assert by_topic(messages) == dict.fromkeys(NAMES, values)
        kept = random.Random(1).sample(messages, 30)
        for message in messages:
            if message not in kept:
                await consumer.ack(message)
        await consumer.ack(kept[:10], receipt=True)
        await consumer.close()
        again = await client.subscribe(NAMES, "s", type=type)
        left = await take(again, 20)
        assert {(m.topic, m.id) for m in left} == {(m.topic, m.id) for m in kept[10:]}
        await again.ack(left, receipt=True)
        with pytest.raises(ReceiveTimeout):
            await again.receive(0.05)


async def test_a_busy_topic_does_not_keep_the_others_waiting() -> None:
    async with serving() as server, connect_to(server) as client:
        busy, quiet = await client.create_producer("busy"), await client.create_producer("quiet")
        consumer = await client.subscribe(["busy", "quiet"], "s", start="earliest")
        for _ in range(50):
            await busy.send_many([b"busy"] * 10)
        await quiet.send(b"quiet")
        async with asyncio.timeout(5.0):
            while (await client.admin.topic_stats("quiet"))["subscriptions"]["s"]["type"] != "exclusive":
                await asyncio.sleep(0.01)
        seen = 0
        async for batch in consumer.batches():
            assert len({message.topic for message in batch}) == 1
            seen += 1
            if batch[0].value == b"quiet":
                break
        assert seen <= 5


@pytest.mark.parametrize("names", [NAMES, NAMES[:1]], ids=["several topics", "one topic"])
async def test_a_cancelled_receive_loses_no_message(names: list[str]) -> None:
    async with serving() as server, connect_to(server) as client:
        producers = [await client.create_producer(name) for name in names]
        consumer = await client.subscribe(names, "s", start="earliest")
        chance = random.Random(7)
        values = [b"%d" % number for number in range(100)]

        async def produce() -> None:
            for value in values:
                for producer in producers:
                    await producer.send(value)

        producing = asyncio.create_task(produce())
        found: list[Message] = []

        async def receive() -> Message:
            if chance.random() < 0.5:
                return await consumer.receive()
            return await asyncio.wait_for(consumer.receive(chance.choice([0.0, 0.001, 1.0])), 1.0)

        async with asyncio.timeout(30.0):
            while len(found) < 100 * len(names):
                receiving = asyncio.create_task(receive())
                for _ in range(chance.randrange(6)):
                    await asyncio.sleep(0)
                if not receiving.cancel() or chance.random() < 0.1:
                    await asyncio.sleep(0)
                await asyncio.wait([receiving])
                if not receiving.cancelled() and not isinstance(receiving.exception(), ReceiveTimeout):
                    found.append(receiving.result())
        await producing
        assert by_topic(found) == dict.fromkeys(names, values)


async def test_all_consumers_go_on_after_the_broker_was_restarted() -> None:
    metadata, ledgers = MemoryMetadataStore(), FakeLedgers()
    async with serving(metadata, ledgers) as server, connect_to(server) as client:
        for name in NAMES:
            producer = await client.create_producer(name)
            await producer.send_many([b"1", b"2"])
        consumer = await client.subscribe(NAMES, "s", start="earliest")
        first = await take(consumer, 6)
        await consumer.ack([message for message in first if message.value == b"1"], receipt=True)
        for connection in server.connections:
            connection.close()
        assert by_topic(await take(consumer, 3)) == {key: [b"2"] for key in NAMES}


async def test_the_receiver_queue_is_shared_by_all_topics() -> None:
    async with serving() as server, connect_to(server) as client:
        names = [f"t{number}" for number in range(10)]
        for name in names:
            producer = await client.create_producer(name)
            for _ in range(20):
                await producer.send_many([b"x" * 1000] * 5)
        consumer = await client.subscribe(
            names, "s", start="earliest", receiver_queue_messages=100, receiver_queue_bytes=100_000
        )
        await consumer.receive(5.0)
        await asyncio.sleep(0.1)
        members: Any = consumer._consumer.consumers.values()
        assert sum(member._queued_messages for member in members) <= 100 + 10 * 5
        assert sum(member._queued_bytes for member in members) <= 100_000 + 10 * 5_100
        assert len(await take(consumer, 999)) == 999


async def test_a_paused_consumer_asks_for_no_more() -> None:
    async with serving() as server, connect_to(server) as client:
        producers = [await client.create_producer(name) for name in NAMES]
        for topics in (NAMES, NAMES[0]):
            consumer = await client.subscribe(topics, f"s{len(topics)}", receiver_queue_messages=30)
            consumer.pause()
            for producer in producers:
                for _ in range(100):
                    await producer.send(b"m")
            got = 0
            with contextlib.suppress(ReceiveTimeout):
                while True:
                    await consumer.receive(0.1)
                    got += 1
            assert got <= 30
            consumer.resume()
            assert len(await take(consumer, 100 * (3 if topics is NAMES else 1) - got)) > 0
            await consumer.close()


async def test_what_names_no_topic_is_refused_and_other_mistakes() -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("a")
        await producer.send(b"m")
        consumer = await client.subscribe(["a", "b"], "s", start="earliest")
        message = await consumer.receive(5.0)
        for call in (
            consumer.ack(message.id),
            consumer.ack_cumulative(message.id),
            consumer.seek(message.id),
        ):
            with pytest.raises(InvalidArgument, match="several topics"):
                await call
        wrong: Any = 5
        with pytest.raises(InvalidArgument, match="not int"):
            await consumer.ack(wrong)
        with pytest.raises(InvalidArgument, match="needs a topic"):
            client.subscribe([], "s")
        with pytest.raises(InvalidTopicName):
            client.subscribe(["a", "b c"], "s")
        other = await client.subscribe("b", "x")
        with pytest.raises(ConsumerBusy):  # one of them cannot be opened: none stays
            await client.subscribe(["a", "b"], "x")
        await other.close()
        await client.subscribe(["a", "b"], "x")
        await consumer.close()
        with pytest.raises(AlreadyClosed):
            await consumer.receive(1.0)
        assert [message async for message in consumer] == []


async def test_a_seek_goes_to_a_place_in_each_topic() -> None:
    async with serving() as server, connect_to(server) as client:
        ids = {}
        for name in NAMES:
            producer = await client.create_producer(name)
            ids[full(name)] = await producer.send_many([b"0", b"1", b"2"])
        consumer = await client.subscribe(NAMES, "s", start="earliest")
        messages = await take(consumer, 9)
        places: dict[str, Start] = {full("a"): ids[full("a")][1], full("b"): "latest"}
        await consumer.seek(lambda topic: places.get(topic))  # c stays where it is
        assert by_topic(await take(consumer, 2)) == {"a": [b"1", b"2"]}
        await consumer.seek(next(m for m in messages if m.topic == full("c") and m.value == b"2"))
        assert by_topic(await take(consumer, 1)) == {"c": [b"2"]}
        await consumer.seek("earliest")
        assert by_topic(await take(consumer, 9)) == {key: [b"0", b"1", b"2"] for key in NAMES}


async def test_unsubscribing_deletes_the_subscription_of_each_topic() -> None:
    async with serving() as server, connect_to(server) as client:
        consumer = await client.subscribe(NAMES, "s")
        await consumer.unsubscribe()
        for name in NAMES:
            assert (await client.admin.topic_stats(name))["subscriptions"] == {}


async def test_a_topic_that_fails_for_good_costs_itself_only() -> None:
    async with serving() as server, connect_to(server) as client:
        consumer = await client.subscribe(["a", "b"], "s", start="earliest")
        producer = await client.create_producer("b")
        member: Any = consumer._consumer.consumers[full("a")]
        member._attachment.fail(TopicNotFound("a is gone"))
        with pytest.raises(TopicNotFound, match="a is gone"):
            await consumer.receive(5.0)
        await producer.send(b"m")
        message = await consumer.receive(5.0)
        assert message.value == b"m"
        assert consumer.topics == [full("b")]
        await consumer.ack(message, receipt=True)


async def test_rule_45_who_receives_when_no_topic_is_left_has_an_error_each_time() -> None:
    async with serving() as server, connect_to(server) as client:
        consumer = await client.subscribe(["a", "b"], "s")
        member: Any
        for member in list(consumer._consumer.consumers.values()):
            member._attachment.fail(TopicNotFound(f"{member.topic} is gone"))
        for name in ("a", "b", "b", "b"):
            with pytest.raises(TopicNotFound, match=f"/{name} is gone"):
                await consumer.receive(60.0)
        await consumer.close()


async def test_rule_48_a_call_to_several_topics_ends_for_the_others_and_names_what_failed() -> None:
    async with serving() as server, connect_to(server) as client:
        consumer = await client.subscribe(NAMES, "s")
        members: Any = consumer._consumer
        refusals = {full(name): InvalidArgument(f"not {name}") for name in "ac"}

        async def refuse(topic: str) -> None:
            raise refusals[topic]

        for topic in refusals:
            members.consumers[topic].unsubscribe = partial(refuse, topic)
        with pytest.raises(
            InvalidArgument, match=r"2 of 3 topics failed: .*/a: not a; .*/c: not c"
        ) as failed:
            await consumer.unsubscribe()
        assert failed.value.details["failed"] == refusals
        assert consumer.topics == list(refusals), "what is not consumed any more has left, nothing is deaf"
        assert (await client.admin.topic_stats("b"))["subscriptions"] == {}
        for name in "ac":
            async with client.create_producer(name) as producer:
                await producer.send(name.encode())
        messages = await take(consumer, 2)
        assert by_topic(messages) == {"a": [b"a"], "c": [b"c"]}
        for topic in refusals:
            del members.consumers[topic].unsubscribe
        await consumer.unsubscribe()
        for name in NAMES:
            assert (await client.admin.topic_stats(name))["subscriptions"] == {}


# --- patterns --------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_topics_of_a_pattern_come_and_go() -> None:
    async with serving() as server, connect_to(server) as client:
        for name in ("orders-1", "orders-2", "others", "my-orders-1"):
            await client.admin.create_topic(name)
        consumer = await client.subscribe(re.compile("orders-.*"), "s", discovery_interval=10.0)
        assert consumer.topics == [full("orders-1"), full("orders-2")]
        for name in ("orders-1", "orders-3", "others"):
            producer = await client.create_producer(name)
            await producer.send(name.encode())
            await producer.close()
        # The new topic is read from its beginning, though the others began at the latest message.
        assert {m.value for m in await take(consumer, 2)} == {b"orders-1", b"orders-3"}
        await client.admin.delete_topic("orders-2", force=True)
        await asyncio.sleep(30.0)
        assert consumer.topics == [full("orders-1"), full("orders-3")]
        assert full("orders-2") not in await client.admin.list_topics()  # nobody brought it back
        with pytest.raises(ReceiveTimeout):  # and nobody is bothered with that
            await consumer.receive(1.0)
        await consumer.close()
        await client.admin.create_topic("orders-4")
        await asyncio.sleep(30.0)
        assert full("orders-4") not in consumer.topics


@in_virtual_time
async def test_a_pattern_does_not_match_its_own_letters() -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t1")
        consumer = await client.subscribe(
            re.compile("t.*"), "s", type="shared", start="earliest", discovery_interval=1.0, retry=True,
            dead_letter=DeadLetterPolicy(max_redeliver_count=0),
        )  # fmt: skip
        await producer.send(b"m")
        message = await consumer.receive(5.0)
        consumer.nack(message)
        await asyncio.sleep(10.0)
        assert consumer.topics == [full("t1"), full("t1-s-RETRY")]
        assert full("t1-s-DLQ") in await client.admin.list_topics()
        with pytest.raises(ReceiveTimeout):
            await consumer.receive(1.0)


@in_virtual_time
async def test_many_topics_that_leave_share_their_queue_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each that leaves: 500 of 3,000 held the loop for seconds."""
    shared: list[int] = []
    share_queue = TopicConsumer.share_queue

    def counted(self: TopicConsumer, parts: int) -> None:
        shared.append(parts)
        share_queue(self, parts)

    async with serving() as server, connect_to(server) as client:
        await asyncio.gather(*[client.admin.create_topic(f"t{number}") for number in range(40)])
        consumer = await client.subscribe(re.compile("t.*"), "s", discovery_interval=1e6)
        monkeypatch.setattr(TopicConsumer, "share_queue", counted)
        await asyncio.gather(*[client.admin.delete_topic(f"t{number}", force=True) for number in range(30)])
        await asyncio.sleep(10.0)
        assert len(consumer.topics) == 10
        assert set(shared[-10:]) == {10}
        assert len(shared) <= 60, f"{len(shared)} times for 30 that left"


def test_a_pattern_says_its_namespace_or_means_the_default_one() -> None:
    pattern = TopicPattern(re.compile("ORD.*", re.IGNORECASE))
    assert pattern.namespace == "public/default"
    names = [full("orders"), full("border"), full("ord")]
    assert pattern.matches(names) == [full("orders"), full("ord")]
    assert TopicPattern(re.compile("persistent://acme/sales/o.*")).namespace == "acme/sales"
    assert TopicPattern(re.compile("acme/sales/o.*")).namespace == "acme/sales"
    partitions = [full("orders-partition-0"), full("orders-partition-1"), full("orders")]
    for text, found in {"orders": partitions, r"orders-partition-\d": partitions[:2], r".*\d": []}.items():
        assert TopicPattern(re.compile(text)).matches(partitions) == found
    for wrong in ("acme/o.*", "a.*/sales/o"):
        with pytest.raises((InvalidArgument, InvalidTopicName)):
            TopicPattern(re.compile(wrong))
    binary: Any = re.compile(b"x")
    with pytest.raises(InvalidArgument, match="is text"):
        TopicPattern(binary)


# --- what the broker tells of topics ---------------------------------------------------------------------------------


@in_virtual_time
async def test_a_new_topic_is_consumed_at_once_and_a_deleted_one_leaves_at_once() -> None:
    async with serving() as server, connect_to(server) as client:
        await client.admin.create_topic("orders-1")
        consumer = await client.subscribe(re.compile("orders-.*"), "s", discovery_interval=1e6)
        began = asyncio.get_running_loop().time()
        for name in ("orders-2", "others"):
            async with client.create_producer(name) as producer:
                await producer.send(name.encode())
        assert (await consumer.receive(10.0)).value == b"orders-2"
        assert consumer.topics == [full("orders-1"), full("orders-2")]
        await client.admin.delete_topic("orders-1", force=True)
        await until(lambda: consumer.topics == [full("orders-2")])
        assert asyncio.get_running_loop().time() - began < 10.0


@in_virtual_time
async def test_a_topic_that_is_made_again_before_its_consumer_knows_of_its_end_is_consumed() -> None:
    async with serving() as server, connect_to(server) as client:
        await client.admin.create_topic("orders-1")
        consumer = await client.subscribe(re.compile("orders-.*"), "s", type="shared", discovery_interval=1e6)
        members: Any = consumer._consumer
        old = members.consumers[full("orders-1")]
        members._changing._watch.note(
            {full("orders-1"): True}
        )  # deleted and made again: the last word counts
        await until(lambda: full("orders-1") in members._made)
        old._attachment.fail(TopicNotFound("orders-1 was deleted"))
        await until(lambda: members.consumers.get(full("orders-1")) not in (None, old))
        assert consumer.active


@in_virtual_time
async def test_what_happened_while_the_connection_was_lost_is_found_with_a_list() -> None:
    metadata, ledgers = MemoryMetadataStore(), FakeLedgers()
    async with (
        serving(metadata, ledgers) as server,
        connect_to(server, backoff_first=50.0, backoff_max=50.0, rng=random.Random(1)) as client,
        connect_to(server) as other,
    ):
        consumer = await client.subscribe(re.compile("orders-.*"), "s", discovery_interval=1e6)
        pool: Any = client._pool
        connection = await pool.to_service()
        connection.connection.abort()
        async with other.create_producer("orders-1") as producer:  # before the client is back
            await producer.send(b"1")
        assert not any(isinstance(port, topics_watch.TopicsWatch) for port in connection.ports.values())
        assert (await consumer.receive(1000.0)).value == b"1"
        async with other.create_producer("orders-2") as producer:  # and the new connection tells as well
            await producer.send(b"2")
        assert (await consumer.receive(10.0)).value == b"2"


@in_virtual_time
async def test_where_the_broker_tells_nothing_topics_are_listed() -> None:
    async with serving(max_watches_per_connection=1) as server, connect_to(server) as client:
        await client.subscribe(re.compile("first-.*"), "s", discovery_interval=1e6)
        consumer = await client.subscribe(re.compile("second-.*"), "s", discovery_interval=30.0)
        async with client.create_producer("second-1") as producer:
            await producer.send(b"1")
        assert (await consumer.receive(31.0)).value == b"1"
        await consumer.close()


async def test_changes_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics_watch, "MAX_CHANGES", 10)
    async with serving() as server, connect_to(server) as client:
        pool: Any = client._pool
        watch = topics_watch.TopicsWatch(pool, "public/default", 99)
        await watch.begin()
        for number in range(30):
            await client.admin.create_topic(f"t{number}")
        await until(lambda: watch._list_again)
        assert not watch._changes
        assert await watch.next(5.0) is None
        await client.admin.create_topic("t30")
        assert await watch.next(5.0) == ([full("t30")], [])
        watch.close()
        watch.close()


async def test_the_consumer_of_a_pattern_leaves_no_watch() -> None:
    async with serving() as server, connect_to(server) as client:
        consumer = await client.subscribe(re.compile("x.*"), "s")
        connection = await client._pool.to_service()
        assert sum(isinstance(port, topics_watch.TopicsWatch) for port in connection.ports.values()) == 1
        await consumer.close()
        assert not any(isinstance(port, topics_watch.TopicsWatch) for port in connection.ports.values())
        await client.admin.create_topic("x1")
        assert consumer.topics == []
