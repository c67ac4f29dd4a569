"""Partitioned topics behind one producer, consumer, reader and table view, against a fake broker."""

import asyncio
import random
import re
from collections import Counter
from typing import Any

import pytest

from magnetar.client import (
    AlreadyClosed,
    Client,
    InvalidArgument,
    MessageId,
    MessageTooLarge,
    PartitionNotFound,
    Producer,
    ProducerQueueFull,
    ReceiveTimeout,
    SendTimeout,
    StorageFailed,
    TopicNotFound,
    connect,
)
from magnetar.client.core.routing import OutgoingMessage, Router
from magnetar.proto.commands import CloseProducer, CreateProducer, Lookup, Subscribe, WatchPartitions
from magnetar.proto.errors import NotEnoughBookies, ServiceNotReady
from support.client_kit import take, until
from support.fake_broker import FakeBroker
from support.fake_cluster import FakeCluster

T = "persistent://public/default/t"


def partition(number: int, name: str = T) -> str:
    return f"{name}-partition-{number}"


def stored(broker: FakeBroker, number: int) -> list[bytes]:
    from magnetar.proto.batch import decode_batch

    values: list[Any] = []
    for entry in broker.topic(partition(number)).entries:
        for position in range(entry.batch_count):
            values += decode_batch(entry.batch(position)).values
    return values


def sends_to(producer: Any) -> int:
    """How many partitions."""
    return len(producer._producer._producers)


def number_of(message: OutgoingMessage) -> int:
    return int(message.value or b"")


@pytest.fixture
def eight(broker: FakeBroker) -> None:
    broker.grow("t", 8)


pytestmark = pytest.mark.usefixtures("eight")


# --- producing ---------------------------------------------------------------------------------------------------------


async def test_batches_go_to_one_partition_after_the_other(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t", batching_max_messages=10)
    assert producer.topic == T
    receipts = [producer.send_nowait(b"%d" % number) for number in range(160)]
    ids = [await receipt for receipt in receipts]
    batches = [ids[start : start + 10] for start in range(0, 160, 10)]
    places = [batch[0].partition for batch in batches]
    assert sorted(places) == sorted(2 * list(range(8)))
    assert places == [(places[0] + turn) % 8 for turn in range(16)]
    for batch in batches:
        assert batch == [batch[0]._replace(index=batch[0].index + number) for number in range(10)]
    for number in range(8):
        assert len(stored(broker, number)) == 20


async def test_a_batch_that_a_turn_of_the_loop_ends_stays_together(
    broker: FakeBroker, client: Client
) -> None:
    producer = await client.create_producer("t")
    for _ in range(8):
        ids = await asyncio.gather(*[producer.send(b"m") for _ in range(5)])
        assert len({message_id.partition for message_id in ids}) == 1
    assert [len(stored(broker, number)) for number in range(8)] == [5] * 8


@pytest.mark.parametrize("routing", ["round_robin", "single"])
async def test_a_message_with_a_key_goes_by_its_key(broker: FakeBroker, client: Client, routing: Any) -> None:
    producer = await client.create_producer("t", routing=routing)
    expected = Router("single", "murmur3", 8, lambda count: 0)
    keys: list[str | bytes] = [f"k{number}" for number in range(50)] + [
        b"\xff%d" % number for number in range(50)
    ]
    ids = await asyncio.gather(*[producer.send(b"v", key) for key in keys])
    many = await producer.send_many([b"v"] * 100, keys=keys)
    assert [message_id.partition for message_id in ids] == [expected.of_key[key] for key in keys]
    assert [message_id.partition for message_id in many] == [message_id.partition for message_id in ids]
    with pytest.raises(InvalidArgument, match="a key is str or bytes"):
        producer.send_nowait(b"v", 5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="UTF-8"):
        await producer.send(b"v", "\udc00")


async def test_single_keeps_to_one_partition(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t", routing="single")
    ids = [await producer.send(b"m") for _ in range(5)] + await producer.send_many([b"m"] * 20_001)
    assert len({message_id.partition for message_id in ids}) == 1
    others = [await client.create_producer("t", routing="single") for _ in range(20)]
    assert len({(await other.send(b"m")).partition for other in others}) > 1


async def test_a_function_says_where_each_message_goes(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer(
        "t", routing=lambda message, count: number_of(message) % (count + 1)
    )
    assert (await producer.send(b"13", "a key")).partition == 4
    ids = await producer.send_many([b"%d" % number for number in range(8)])
    assert [message_id.partition for message_id in ids] == list(range(8))
    before = [len(stored(broker, number)) for number in range(8)]
    with pytest.raises(InvalidArgument, match="answered 8; with 8 partitions"):
        producer.send_nowait(b"8")
    with pytest.raises(ValueError, match="invalid literal"):
        await producer.send(b"x")
    with pytest.raises(InvalidArgument, match="answered 8"):
        await producer.send_many([b"0", b"1", b"8"])
    await producer.flush()
    assert [len(stored(broker, number)) for number in range(8)] == before, "nothing was sent of that call"


async def test_send_many_is_split_by_partition_and_answered_in_order(
    broker: FakeBroker, client: Client
) -> None:
    producer = await client.create_producer("t")
    values = [b"%d" % number for number in range(1000)]
    keys = [None if number % 7 == 0 else f"k{number}" for number in range(1000)]
    ids = await producer.send_many(values, keys=keys)
    for number in range(8):
        mine = [value for value, message_id in zip(values, ids) if message_id.partition == number]
        assert stored(broker, number) == mine
        indexes = [message_id[:3] for message_id in ids if message_id.partition == number]
        assert indexes == sorted(indexes)
    assert len({ids[number].partition for number in range(0, 1000, 7)}) == 1
    assert await producer.send_many([]) == []
    spread = await producer.send_many([b"m"] * 40_000)
    assert Counter(message_id.partition for message_id in spread) == dict.fromkeys(
        {message_id.partition for message_id in spread}, 10_000
    )
    with pytest.raises(MessageTooLarge):
        await producer.send_many([b"", b"x" * (6 << 20)], keys=["a", "b"])


async def test_of_a_call_that_failed_in_part_the_ids_say_what_is_stored(
    broker: FakeBroker, client: Client
) -> None:
    producer = await client.create_producer("t", routing=lambda message, count: number_of(message) % 2)
    broker.fail_next_send = StorageFailed("this one not")
    with pytest.raises(StorageFailed, match="of 10 messages 5 are stored") as failed:
        await producer.send_many([b"%d" % number for number in range(10)])
    ids = failed.value.details["ids"]
    lost = [number for number in range(10) if ids[number] is None]
    assert lost in ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9])
    kept = 1 - lost[0]
    assert stored(broker, kept) == [b"%d" % number for number in range(kept, 10, 2)]
    assert all(ids[number].partition == kept for number in range(kept, 10, 2))
    assert len(await producer.send_many([b"%d" % number for number in range(10)])) == 10, "and it goes on"


async def test_flush_and_close_say_what_a_partition_failed_with_and_do_the_others(
    broker: FakeBroker, client: Client
) -> None:
    for leave in (Producer.flush, Producer.close):
        producer = await client.create_producer("t", routing=lambda message, count: number_of(message))
        broker.fail_next_send = StorageFailed("this one not")
        receipts = [producer.send_nowait(b"%d" % number) for number in range(8)]
        with pytest.raises(StorageFailed, match="this one not"):
            await leave(producer)
        assert all(receipt.done for receipt in receipts)
        assert producer.pending_bytes == 0
        assert producer.ended == (leave is Producer.close)
        await producer.close()
        with pytest.raises(AlreadyClosed):
            await producer.send(b"0")
    await client.admin.list_topics()
    assert [handler.watches for handler in broker.handlers] == [{}]


async def test_partition_0_is_opened_first_and_all_have_its_name(broker: FakeBroker, client: Client) -> None:
    broker.unanswered = [CreateProducer]
    opening = asyncio.ensure_future(client.create_producer("t"))
    await until(lambda: broker.received(CreateProducer))
    assert [command.topic for command in broker.received(CreateProducer)] == [partition(0)]
    broker.unanswered = []
    broker.cut()
    producer = await opening
    names = {command.topic: command.name for command in broker.received(CreateProducer)}
    assert names == {partition(0): None} | {partition(number): producer.name for number in range(1, 8)}
    assert not any(command.topic == T for command in broker.received(Lookup))
    chosen = await client.create_producer("t", name="mine")
    assert chosen.name == "mine"


def refuse(broker: FakeBroker, number: int) -> None:
    """Producers and consumers of this partition."""
    original = broker.answer

    def answer(handler: Any, command: Any, payload: bytes) -> Any:
        if isinstance(command, CreateProducer | Subscribe) and command.topic == partition(number):
            raise PartitionNotFound("not here")
        return original(handler, command, payload)

    broker.answer = answer  # type: ignore[method-assign]


@pytest.mark.parametrize("refused", [0, 5])
async def test_a_partition_that_cannot_be_opened_closes_all(
    broker: FakeBroker, client: Client, refused: int
) -> None:
    refuse(broker, refused)
    with pytest.raises(PartitionNotFound, match="not here"):
        await client.create_producer("t")
    await until(lambda: not any(handler.producers for handler in broker.handlers))
    assert client.connection_state == "connected"


@pytest.mark.parametrize("step", ["partitions", "first", "others"])
async def test_an_opening_that_is_cancelled_leaves_nothing_behind(
    broker: FakeBroker, client: Client, step: str
) -> None:
    from magnetar.proto.commands import Partitions

    broker.unanswered = [Partitions] if step == "partitions" else [CreateProducer] if step == "first" else []
    original = broker.answer

    def answer(handler: Any, command: Any, payload: bytes) -> Any:
        if step == "others" and isinstance(command, CreateProducer) and command.topic != partition(0):
            from support.fake_broker import HELD

            original(handler, command, payload)
            return HELD
        return original(handler, command, payload)

    broker.answer = answer  # type: ignore[method-assign]
    opening = asyncio.ensure_future(client.create_producer("t"))
    wanted = {"partitions": 0, "first": 1, "others": 8}[step]
    await until(lambda: len(broker.received(CreateProducer)) >= wanted and broker.commands)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    broker.unanswered = []
    await client.admin.list_topics()
    assert not any(handler.producers for handler in broker.handlers)


async def test_a_close_that_is_cancelled_leaves_nothing_behind(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t")
    broker.hold_receipts = True
    receipt = producer.send_nowait(b"m")
    await until(lambda: broker.held)
    closing = asyncio.ensure_future(producer.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(AlreadyClosed):
        await receipt
    await client.admin.list_topics()
    assert not any(handler.producers or handler.watches for handler in broker.handlers)


async def test_the_memory_bound_is_shared_and_free_messages_go_where_there_is_room(
    broker: FakeBroker, client: Client
) -> None:
    producer = await client.create_producer("t", max_pending_bytes=8 * 1064, block_when_full=False)
    broker.hold_receipts = True
    receipts = []
    for _ in range(8):
        receipts.append(producer.send_nowait(b"x" * 1000))
        await asyncio.sleep(0)
    assert producer.pending_bytes == 8 * 1064
    with pytest.raises(ProducerQueueFull):
        producer.send_nowait(b"x")
    with pytest.raises(ProducerQueueFull):
        await producer.send(b"x", "key")
    await until(lambda: len(broker.held) == 8)
    broker.release_receipts()
    assert {(await receipt).partition for receipt in receipts} == set(range(8))
    blocking = await client.create_producer("t", max_pending_bytes=8 * 1064)
    assert len(await asyncio.gather(*[blocking.send(b"x" * 1000) for _ in range(100)])) == 100
    single = await client.create_producer(
        "t", max_pending_bytes=8 * 1064, routing="single", block_when_full=False
    )
    single.send_nowait(b"x" * 1000)
    with pytest.raises(ProducerQueueFull):
        single.send_nowait(b"x")
    await single.flush()


async def test_sequence_ids_are_counted_by_partition(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t", routing=lambda message, count: number_of(message))
    assert producer.last_sequence_id == -1
    await producer.send_many([b"0", b"0", b"1"])
    assert producer.last_sequence_id == -1, "partition 2 has none"
    await producer.send_many([b"%d" % number for number in range(2, 8)])
    assert producer.last_sequence_id == 0


async def test_a_partition_without_a_broker_holds_up_nobody_else() -> None:
    async with FakeCluster.of(2) as cluster:
        for broker in cluster.brokers:
            broker.grow("t", 4)
        cluster.owners[partition(2)] = 1
        async with connect(cluster.brokers[0].url, backoff_first=0.01, operation_timeout=1.0) as client:
            producer = await client.create_producer("t", send_timeout=0.5)
            consumer = await client.subscribe("t", "s", start="earliest")
            cluster.fail(1)
            await until(lambda: client.connection_state == "reconnecting")
            ids = [await producer.send(b"%d" % number) for number in range(30)]
            assert {message_id.partition for message_id in ids} == {0, 1, 3}, "passed over"
            assert Counter(message_id.partition for message_id in ids) == {0: 10, 1: 10, 3: 10}
            keys = {Router("single", "murmur3", 4, lambda _: 0).of_key[f"k{n}"]: f"k{n}" for n in range(40)}
            await asyncio.gather(*[producer.send(b"v", keys[number]) for number in (0, 1, 3)])
            with pytest.raises(SendTimeout):
                await producer.send(b"v", keys[2])
            assert len(await take(consumer, 33)) == 33
            waiting = asyncio.ensure_future(producer.send(b"w", keys[2]))
            cluster.give(1, 0)
            assert (await waiting).partition == 2
            assert (await consumer.receive(5.0)).value == b"w"


async def test_a_producer_keeps_its_plain_way_of_sending(broker: FakeBroker, client: Client) -> None:
    plain = await client.create_producer("plain")
    assert plain.send_nowait.__self__ is plain._producer  # type: ignore[attr-defined]  # no call more than before
    direct = await client.create_producer("t-partition-3")
    assert direct.topic == partition(3)
    assert (await direct.send(b"m")).partition == 3
    consumer = await client.subscribe("t-partition-3", "s", start="earliest")
    message = await consumer.receive(2.0)
    assert (message.topic, message.id.partition) == (partition(3), 3)
    assert await consumer.last_message_id() == message.id
    with pytest.raises(InvalidArgument, match="is of partition 4"):
        await consumer.seek(message.id._replace(partition=4))
    with pytest.raises(PartitionNotFound):
        await client.create_producer("t-partition-8")


# --- growth ------------------------------------------------------------------------------------------------------------


async def test_growth_while_producing_and_consuming_loses_nothing(broker: FakeBroker, client: Client) -> None:
    broker.grow("t", 2)
    producer = await client.create_producer("t")
    consumer = await client.subscribe("t", "s", start="latest")
    reader = await client.create_reader("t")
    sent: list[bytes] = []
    rng = random.Random(3)

    async def send() -> None:
        for number in range(600):
            value = b"%d" % number
            sent.append(value)
            await producer.send(value, rng.choice([None, f"k{number}"]))
            if number in (100, 300):
                broker.grow("t", 4 if number == 100 else 9)

    sending = asyncio.ensure_future(send())
    received = [(await consumer.receive(5.0)) for _ in range(600)]
    await sending
    assert sorted(message.value or b"" for message in received) == sorted(sent)
    assert {message.id.partition for message in received} == set(range(9))
    assert len({(message.topic, message.id) for message in received}) == 600
    assert [message.value for message in await take(reader, 600)]
    assert consumer.topics == [partition(number) for number in range(9)]


async def test_after_a_lost_connection_the_number_is_asked_again(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t")
    consumer = await client.subscribe("t", "s")
    await until(lambda: sum(len(handler.watches) for handler in broker.handlers) == 2)
    broker.cut()
    broker.partitions[T] = 9  # nobody is told
    await until(lambda: consumer.topics[-1] == partition(8))
    await until(lambda: sends_to(producer) == 9)
    await until(lambda: client.connection_state == "connected")
    ids = [await producer.send(b"m") for _ in range(9)]
    assert {message_id.partition for message_id in ids} == set(range(9))
    assert len(await take(consumer, 9)) == 9


async def test_a_new_partition_that_cannot_be_opened_is_tried_again(
    broker: FakeBroker, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    producer = await client.create_producer("t")
    await until(lambda: any(handler.watches for handler in broker.handlers))
    broker.failures[CreateProducer] = NotEnoughBookies("not now")
    broker.grow("t", 9)
    await until(lambda: sends_to(producer) == 9)
    broker.failures[CreateProducer] = PartitionNotFound("not yet")
    broker.grow("t", 10)
    await until(lambda: len(broker.received(CreateProducer)) >= 11)
    assert {(await producer.send(b"m")).partition for _ in range(9)} <= set(range(10)), "the others go on"
    await until(lambda: sends_to(producer) == 10)


async def test_counts_that_no_topic_has_break_nothing(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t")
    await until(lambda: any(handler.watches for handler in broker.handlers))
    broker.partitions[T] = 5_000_000
    for handler in broker.handlers:
        for watch_id in handler.watches:
            from magnetar.proto.commands import PartitionsChanged

            handler.connection.send(PartitionsChanged(0, watch_id, 5_000_000).encode())
    await client.admin.list_topics()
    broker.partitions[T] = 8
    assert (await producer.send(b"m")).partition in range(8)


async def test_a_watch_that_is_refused_becomes_a_poll(
    broker: FakeBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from magnetar.client import partitioned_producer
    from magnetar.proto.errors import UnknownCommand

    monkeypatch.setattr(partitioned_producer, "_LOOK_INTERVAL_S", 0.05)
    broker.failures[WatchPartitions] = UnknownCommand("an older broker")
    producer = await client.create_producer("t")
    await until(lambda: broker.received(WatchPartitions))
    broker.partitions[T] = 9
    await until(lambda: sends_to(producer) == 9)


# --- consuming ---------------------------------------------------------------------------------------------------------


async def send_to_all(client: Client, each: int = 5) -> list[MessageId]:
    producer = await client.create_producer("t", routing=lambda message, count: number_of(message) % count)
    return await producer.send_many([b"%d" % number for number in range(8 * each)])


@pytest.mark.parametrize("type", ["exclusive", "failover", "shared", "key_shared"])
async def test_one_consumer_has_all_partitions(broker: FakeBroker, client: Client, type: Any) -> None:
    ids = await send_to_all(client)
    consumer = await client.subscribe("t", "s", type=type, start="earliest")
    assert consumer.topic == T
    assert consumer.topics == [partition(number) for number in range(8)]
    messages = await take(consumer, 40)
    assert sorted(message.id for message in messages) == sorted(ids)
    assert all(message.topic == partition(message.id.partition) for message in messages)
    for number in range(8):
        mine = [message.value for message in messages if message.id.partition == number]
        assert mine == stored(broker, number), "each in its order"
    await consumer.ack(messages[:10])
    await consumer.ack([message.id for message in messages[10:20]], receipt=True)
    await consumer.ack(messages[20].id, receipt=True)
    if type in ("exclusive", "failover"):
        last = {message.id.partition: message.id for message in messages}
        for message_id in last.values():
            await consumer.ack_cumulative(message_id, receipt=True)
        await consumer.close()
        acked = [broker.topic(partition(number)).acked["s"] for number in range(8)]
        assert sum(map(len, acked)) == 40
    else:
        await consumer.close()
        acked = [broker.topic(partition(number)).acked["s"] for number in range(8)]
        assert sum(map(len, acked)) == 21


async def test_what_an_id_cannot_say_is_refused(broker: FakeBroker, client: Client) -> None:
    ids = await send_to_all(client)
    with pytest.raises(InvalidArgument, match="a place in one partition: start at 'earliest'"):
        await client.subscribe("t", "s", start=ids[0])
    with pytest.raises(InvalidArgument, match="a place in one partition"):
        await client.create_reader("t", start=ids[0])
    consumer = await client.subscribe("t", "s", start="earliest")
    for wrong in (ids[0]._replace(partition=-1), ids[0]._replace(partition=8)):
        for call in (
            consumer.ack(wrong),
            consumer.ack([wrong]),
            consumer.seek(wrong),
            consumer.ack_cumulative(wrong),
        ):
            with pytest.raises(InvalidArgument, match="has several topics"):
                await call
    broker.grow("u", 8)
    both = await client.subscribe(["t", "u"], "both", start="earliest")
    with pytest.raises(InvalidArgument, match="has several topics"):
        await both.ack(ids[0])


async def test_seeks(broker: FakeBroker, client: Client) -> None:
    ids = await send_to_all(client, 3)
    consumer = await client.subscribe("t", "s", start="earliest")
    messages = await take(consumer, 24)
    wanted = next(message for message in messages if message.value == b"11")
    assert wanted.id.partition == 3
    for target in (wanted, wanted.id):
        await consumer.seek(target)
        assert [message.value for message in await take(consumer, 2)] == [b"11", b"19"]
    for everything in ("earliest", broker.now_ms):
        await consumer.seek(everything)
        assert len(await take(consumer, 24)) == 24
    with pytest.raises(InvalidArgument, match=r"^not a start position: 'begin'"):
        await consumer.seek("begin")  # type: ignore[arg-type]
    await consumer.seek("latest")
    with pytest.raises(ReceiveTimeout):
        await consumer.receive(0.05)
    await consumer.seek(lambda topic: ids[-1] if topic == partition(7) else None)
    assert (await consumer.receive(2.0)).value == b"23"


async def test_last_ids_and_readers(broker: FakeBroker, client: Client) -> None:
    reader = await client.create_reader("t", start="earliest")
    assert not await reader.has_message_available()
    assert await reader.last_message_ids() == {partition(number): None for number in range(8)}
    ids = await send_to_all(client, 3)
    assert await reader.has_message_available()
    last = {partition(number): ids[16 + number] for number in range(8)}
    assert await reader.last_message_ids() == last
    assert await reader.last_message_id("t-partition-2") == ids[18]
    with pytest.raises(InvalidArgument, match=r"last_message_ids\(\) has all"):
        await reader.last_message_id()
    messages = [await reader.read_next(2.0) for _ in range(24)]
    assert sorted(message.id for message in messages) == sorted(ids)
    assert not await reader.has_message_available()
    plain = await client.create_reader("t-partition-0", start="earliest")
    assert await plain.last_message_ids() == {partition(0): ids[16]}


async def test_a_table_view_has_the_keys_of_all_partitions(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t")
    await producer.send_many([b"%d" % number for number in range(100)], keys=[f"k{n}" for n in range(100)])
    async with client.create_table_view("t") as view:
        assert len(view) == 100
        await producer.send(b"new", "k7")
        await producer.send(None, "k8")
        await view.refresh()
        assert (view["k7"], view.get("k8"), len(view)) == (b"new", None, 99)
        broker.grow("t", 9)
        await until(lambda: len(view._consumer.consumers) == 9)
        direct = await client.create_producer("t-partition-8")
        await direct.send(b"there", "new")
        await view.refresh()
        assert view["new"] == b"there"


async def test_several_topics_of_which_some_are_partitioned_and_patterns(
    broker: FakeBroker, client: Client
) -> None:
    broker.grow("t", 2)
    consumer = await client.subscribe(["t", "plain"], "s", start="earliest")
    assert consumer.topics == [partition(0), partition(1), "persistent://public/default/plain"]
    pattern = await client.subscribe(re.compile("t|pl.*"), "p", start="earliest")
    assert sorted(pattern.topics) == sorted(consumer.topics)
    for name in ("t", "plain"):
        producer = await client.create_producer(name)
        await producer.send_many([b"a", b"b", b"c", b"d"], keys=["1", "2", "3", "4"])
    assert len(await take(consumer, 8)) == len(await take(pattern, 8)) == 8


# --- deleted and made again --------------------------------------------------------------------------------------------


def delete(broker: FakeBroker, number: int) -> None:
    """A partition is gone, and its producers and consumers learn it."""
    from magnetar.proto.commands import CloseConsumer

    topic = broker.topics.pop(partition(number))
    gone = TopicNotFound("it was deleted")
    for handler in broker.handlers:
        for producer_id, (of, _, _) in list(handler.producers.items()):
            if of is topic:
                del handler.producers[producer_id]
                handler.connection.send(CloseProducer.of(producer_id, gone).encode())
        for consumer_id, consumer in list(handler.consumers.items()):
            if consumer.topic is topic:
                del handler.consumers[consumer_id]
                handler.connection.send(CloseConsumer.of(consumer_id, gone).encode())


async def test_a_topic_that_is_deleted_ends_its_users_and_one_that_is_made_again_has_them_again(
    broker: FakeBroker, client: Client
) -> None:
    broker.grow("t", 4)
    producer = await client.create_producer("t")
    consumer = await client.subscribe("t", "s", start="earliest")
    await producer.send(b"old")
    assert (await consumer.receive(2.0)).value == b"old"
    broker.grow("t", 0)
    for number in range(4):
        delete(broker, number)
    with pytest.raises(TopicNotFound):
        await consumer.receive(2.0)
    with pytest.raises(TopicNotFound):
        await consumer.receive(2.0)
    assert consumer.topics == []
    for key in (None, "k"):
        with pytest.raises(TopicNotFound):
            await producer.send(b"m", key)
    assert producer.ended
    created = len(broker.received(CreateProducer))
    broker.grow("t", 2)
    await until(lambda: consumer.topics == [partition(0), partition(1)])
    await until(lambda: not producer.ended)
    ids = await producer.send_many([b"%d" % number for number in range(10)], keys=[str(n) for n in range(10)])
    assert {message_id.partition for message_id in ids} == {0, 1}
    assert sorted(message.value or b"" for message in await take(consumer, 10)) == [
        b"%d" % n for n in range(10)
    ]
    assert len(broker.received(CreateProducer)) == created + 2


async def test_one_partition_that_is_deleted_takes_the_others_along_in_nothing(
    broker: FakeBroker, client: Client
) -> None:
    producer = await client.create_producer("t", routing=lambda message, count: number_of(message))
    consumer = await client.subscribe("t", "s", start="earliest")
    refuse(broker, 3)
    delete(broker, 3)
    await until(lambda: len(consumer.topics) == 7)
    with pytest.raises((TopicNotFound, PartitionNotFound)):
        await producer.send(b"3")
    for number in (0, 7):
        await producer.send(b"%d" % number)
    assert {message.value for message in await take(consumer, 2)} == {b"0", b"7"}
    assert not producer.ended


async def test_a_consumer_whose_place_is_taken_on_one_partition_opens_none(
    broker: FakeBroker, client: Client
) -> None:
    broker.failures[Subscribe] = ServiceNotReady("not yet")
    other = await client.subscribe("t-partition-5", "s")
    from magnetar.client import ConsumerBusy

    with pytest.raises(ConsumerBusy):
        await client.subscribe("t", "s")
    await other.close()
    consumer = await client.subscribe("t", "s")
    assert len(consumer.topics) == 8


async def test_a_topic_that_is_made_again_before_its_users_have_learned_of_its_end(
    broker: FakeBroker, client: Client
) -> None:
    broker.grow("t", 4)
    producer = await client.create_producer("t", routing=lambda message, count: number_of(message) % count)
    consumer = await client.subscribe("t", "s", start="earliest")
    broker.grow("t", 0)
    broker.grow("t", 4)
    await client.admin.list_topics()  # behind what was told
    for number in range(4):
        delete(broker, number)
    await client.admin.list_topics()
    for number in range(4):
        while True:
            try:
                await producer.send(b"%d" % number)
            except TopicNotFound:
                await asyncio.sleep(0.01)
            else:
                break
    await until(lambda: sorted(consumer.topics) == [partition(number) for number in range(4)])
    found: list[bytes] = []
    while len(found) < 4:
        try:
            found.append((await consumer.receive(5.0)).value or b"")
        except TopicNotFound:  # of the last one that was gone
            await asyncio.sleep(0.01)
    assert sorted(found) == [b"0", b"1", b"2", b"3"]


async def test_partitions_that_are_found_later_are_read_from_their_beginning(
    broker: FakeBroker, client: Client
) -> None:
    reader = await client.create_reader("t", start="latest")
    consumer = await client.subscribe("t", "s", start="latest")
    broker.partitions[T] = 9  # not told yet
    direct = await client.create_producer("t-partition-8")
    await direct.send(b"before they know of it")
    broker.grow("t", 9)
    for one in (reader, consumer):
        assert (await one.receive(5.0)).value == b"before they know of it"


async def test_the_memory_bound_holds_after_growth(broker: FakeBroker, client: Client) -> None:
    broker.grow("t", 2)
    producer = await client.create_producer("t", max_pending_bytes=8 * 1064, block_when_full=False)
    broker.grow("t", 8)
    await until(lambda: sends_to(producer) == 8)
    broker.hold_receipts = True
    for _ in range(8):
        producer.send_nowait(b"x" * 1000)
        await asyncio.sleep(0)
    with pytest.raises(ProducerQueueFull):
        producer.send_nowait(b"x")
    assert producer.pending_bytes == 8 * 1064
    broker.release_receipts()


async def test_a_table_view_waits_for_all_partitions(
    broker: FakeBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = await client.create_producer("t", routing=lambda message, count: number_of(message))
    await producer.send_many([b"1", b"5"], keys=["one", "five"])
    after, held = broker.after, []

    def hold(handler: Any, command: Any) -> None:
        consumer = handler.consumers.get(getattr(command, "consumer_id", -1))
        if consumer is not None and consumer.topic is broker.topic(partition(5)):
            held.append((handler, command))
        else:
            after(handler, command)

    monkeypatch.setattr(broker, "after", hold)
    opening = asyncio.ensure_future(client.create_table_view("t"))
    await until(lambda: held)
    await asyncio.sleep(0.2)
    assert not opening.done()
    for handler, command in held:
        after(handler, command)
    view = await opening
    assert sorted(view.items()) == [("five", b"5"), ("one", b"1")]
    await view.close()
