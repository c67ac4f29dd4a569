"""Consumers: permits, acknowledgements, redelivery, seek, reconnecting; damage; closing."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from magnetar.client import (
    AlreadyClosed,
    Client,
    ConsumerBusy,
    InvalidArgument,
    MessageId,
    ReceiveTimeout,
    SubscriptionNotFound,
    connect,
)
from magnetar.client.options import SubscriptionType
from magnetar.client.queue_budget import QueueBudget
from magnetar.client.topic.window import Window
from magnetar.proto.batch import encode_batch
from magnetar.proto.commands import Ack, CloseConsumer, Flow, Seek, Subscribe
from magnetar.proto.errors import ChecksumMismatch
from support.client_kit import fill, take, until
from support.fake_broker import FakeBroker
from support.virtual_time import in_virtual_time


async def test_leaving_the_loop_loses_nothing(broker: FakeBroker, client: Client) -> None:
    values = fill(broker, 100, batch=50)
    consumer = await client.subscribe("t", "s", start="earliest")
    got: list[Any] = []
    while len(got) < 60:
        async for message in consumer:
            got.append(message.value)
            if len(got) % 7 == 0:
                break
        got.append((await consumer.receive(1.0)).value)
    async for batch in consumer.batches():
        got += [message.value for message in batch]
        if len(got) == 100:
            break
    assert got == values


async def test_several_tasks_share_a_consumer(broker: FakeBroker, client: Client) -> None:
    consumer = await client.subscribe("t", "s")
    tasks = [asyncio.create_task(consumer.receive(2.0)) for _ in range(10)]
    producer = await client.create_producer("t")
    await producer.send_many([b"%d" % i for i in range(10)])
    got = await asyncio.gather(*tasks)
    assert sorted(message.value or b"" for message in got) == [b"%d" % i for i in range(10)]


async def test_acks_are_grouped_into_ranges(broker: FakeBroker, client: Client) -> None:
    fill(broker, 1000, batch=10, entry=50)
    consumer = await client.subscribe("t", "s", start="earliest", ack_group_delay=0.01)
    for message in await take(consumer, 1000):
        if message.id.index % 100 != 50:
            await consumer.ack(message)
    await until(lambda: len(broker.topic("t").acked["s"]) == 990)
    assert len(broker.received(Ack)) <= 2
    assert (0, 50) not in broker.topic("t").acked["s"]


@pytest.mark.parametrize("receipt", [False, True])
async def test_everything_that_can_be_acknowledged(broker: FakeBroker, client: Client, receipt: bool) -> None:
    fill(broker, 60, batch=10, entry=1)
    consumer = await client.subscribe("t", "s", start="earliest", type="shared")
    batches = []
    async for batch in consumer.batches():
        batches.append(batch)
        if len(batches) == 6:
            break
    await consumer.ack(batches[0], receipt=receipt)
    await consumer.ack(list(batches[1]), receipt=receipt)
    await consumer.ack((message.id for message in batches[2]), receipt=receipt)
    await consumer.ack(batches[3][4], receipt=receipt)
    await consumer.ack(batches[3][5].id, receipt=receipt)
    await consumer.ack(batches[4][2:5], receipt=receipt)
    await consumer.ack([], receipt=receipt)
    with pytest.raises(InvalidArgument, match="ack takes"):
        await consumer.ack("message", receipt=receipt)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="shared subscription"):
        await consumer.ack_cumulative(batches[5][0])
    expected = {(entry, index) for entry in range(3) for index in range(10)}
    expected |= {(3, 4), (3, 5), (4, 2), (4, 3), (4, 4)}
    if not receipt:
        await consumer.close()
    assert broker.topic("t").acked["s"] == expected


async def test_rule_34_a_receipt_comes_only_from_the_broker_and_survives_a_reconnect(
    broker: FakeBroker, client: Client
) -> None:
    fill(broker, 20, batch=10, entry=1)
    consumer = await client.subscribe("t", "s", start="earliest")
    first, second, *_ = await take(consumer, 11)
    broker.unanswered.append(Ack)
    waiting = asyncio.gather(consumer.ack(first, receipt=True), consumer.ack(second, receipt=True))
    await until(lambda: broker.received(Ack))
    assert len(broker.received(Ack)) == 1
    assert not waiting.done()
    broker.unanswered.clear()
    broker.cut()
    await waiting
    assert broker.topic("t").acked["s"] == {(0, 0), (0, 1)}
    again = await consumer.receive(2.0)
    assert again.id == MessageId(1, 0, 2)


async def test_cumulative_acks(broker: FakeBroker, client: Client) -> None:
    fill(broker, 30, batch=10, entry=1)
    consumer = await client.subscribe("t", "s", start="earliest")
    messages = await take(consumer, 30)
    await consumer.ack_cumulative(messages[4])
    await consumer.ack_cumulative(messages[14].id, receipt=True)
    assert broker.durable_acks[-1][1] is True
    assert len(broker.topic("t").acked["s"]) == 15


async def test_without_a_connection_acks_wait_and_go_before_the_permits(
    broker: FakeBroker, client: Client
) -> None:
    values = fill(broker, 100, batch=10)
    consumer = await client.subscribe("t", "s", start="earliest", ack_group_delay=30.0)
    for message in await take(consumer, 37):
        await consumer.ack(message)
    broker.cut()
    await until(lambda: len(broker.received(Subscribe)) == 2)
    rest = await take(consumer, 63)
    assert [message.value for message in rest] == values[37:]
    kinds = [type(c) for c in broker.commands if isinstance(c, Subscribe | Ack | Flow)]
    assert kinds[kinds.index(Subscribe, 1) :][:3] == [Subscribe, Ack, Flow]


async def test_what_was_handed_out_and_not_acknowledged_comes_again(
    broker: FakeBroker, client: Client
) -> None:
    values = fill(broker, 20, batch=10)
    consumer = await client.subscribe("t", "s", start="earliest")
    await take(consumer, 5)
    broker.cut()
    await until(lambda: len(broker.received(Subscribe)) == 2)
    assert [message.value for message in await take(consumer, 20)] == values


@pytest.mark.parametrize("kind", ["exclusive", "shared"])
@pytest.mark.parametrize("taken", [1, 9, 10, 11, 30])
async def test_a_subscription_that_is_not_durable_goes_on_behind_what_was_handed_out(
    broker: FakeBroker, client: Client, kind: SubscriptionType, taken: int
) -> None:
    values = fill(broker, 30, batch=10)
    consumer = await client.subscribe("t", "s", start="earliest", type=kind, durable=False)
    for message in await take(consumer, taken):
        await consumer.ack(message)
    await consumer.ack(message, receipt=True)
    broker.cut()
    await until(lambda: len(broker.received(Subscribe)) == 2)
    assert not any(subscribe.durable for subscribe in broker.received(Subscribe))
    assert [message.value for message in await take(consumer, 30 - taken)] == values[taken:]
    with pytest.raises(ReceiveTimeout):
        await consumer.receive(0.01)
    await consumer.seek("earliest")
    broker.cut()
    assert [message.value for message in await take(consumer, 30)] == values


@pytest.mark.parametrize("before", [0, 2])
async def test_a_subscription_that_is_not_durable_misses_nothing_after_latest(
    broker: FakeBroker, client: Client, before: int
) -> None:
    fill(broker, before)
    consumer = await client.subscribe("t", "s", durable=False)
    fill(broker, 3)  # stored, not dispatched
    broker.cut()
    assert [message.value for message in await take(consumer, 3)] == [b"0", b"1", b"2"]


async def test_a_subscription_that_is_not_durable_does_not_go_back_to_what_was_delivered_again(
    broker: FakeBroker, client: Client
) -> None:
    values = fill(broker, 6)
    consumer = await client.subscribe("t", "s", start="earliest", durable=False)
    messages = await take(consumer, 5)
    consumer.nack(messages[1], delay=0)
    await consumer.receive(1.0)  # the sixth
    assert (await consumer.receive(1.0)).value == values[1]
    broker.cut()
    fill(broker, 1)
    assert (await consumer.receive(2.0)).id == MessageId(1, 1, 0)


async def test_a_subscription_that_is_not_durable_goes_on_where_others_moved_it(
    broker: FakeBroker, client: Client
) -> None:
    values = fill(broker, 6, entry=1)
    consumer = await client.subscribe("t", "s", start="earliest", durable=False)
    await take(consumer, 6)
    [moved] = broker.handlers[0].consumers.values()
    moved.epoch, moved.next = moved.epoch + 1, (2, 0)
    moved.dispatch()
    assert (await consumer.receive(1.0)).value == values[2]
    broker.cut()
    await until(lambda: len(broker.received(Subscribe)) == 2)
    assert (await consumer.receive(2.0)).value == values[3]


async def test_a_place_that_another_consumer_took_meanwhile_is_lost(
    broker: FakeBroker, client: Client
) -> None:
    consumer = await client.subscribe("t", "s")
    broker.failures[Subscribe] = ConsumerBusy("another one holds it")
    broker.cut()
    with pytest.raises(ConsumerBusy, match="another one holds it"):
        await consumer.receive(5.0)


async def test_refusals_on_the_way_back_reach_who_waits(broker: FakeBroker, client: Client) -> None:
    consumer = await client.subscribe("t", "s")
    waiting = asyncio.create_task(consumer.receive(5.0))
    await asyncio.sleep(0)
    broker.failures[Subscribe] = SubscriptionNotFound("deleted meanwhile")
    broker.cut()
    with pytest.raises(SubscriptionNotFound, match="deleted meanwhile"):
        await waiting


@in_virtual_time
async def test_nack_delivers_again_after_the_delay_unless_acknowledged() -> None:
    broker = await FakeBroker.start()
    fill(broker, 3)
    loop = asyncio.get_running_loop()
    async with connect(broker.url) as client:
        consumer = await client.subscribe("t", "s", start="earliest", type="shared", nack_delay=2.0)
        first, second, third = await take(consumer, 3)
        wrong: Any = first.id
        with pytest.raises(InvalidArgument, match="nack takes messages, not MessageId"):
            consumer.nack(wrong)
        nacked = loop.time()
        consumer.nack([first, second])
        await asyncio.sleep(1.0)
        consumer.nack(third)
        await consumer.ack(second)
        for message, delay in ((first, 2.0), (third, 3.0)):
            again = await consumer.receive(5.0)
            assert (again.id, again.redelivery_count) == (message.id, 1)
            assert delay <= loop.time() - nacked < delay + 0.1
        with pytest.raises(ReceiveTimeout):
            await consumer.receive(30.0)
    await broker.close()


async def test_receive_with_timeout_0_takes_what_has_arrived_and_passes_a_pending_cancellation_on(
    broker: FakeBroker, client: Client
) -> None:
    fill(broker, 2)
    consumer = await client.subscribe("t", "s", start="earliest")
    first = await consumer.receive(5)
    assert (first.value, (await consumer.receive(0)).value) == (b"0", b"1")
    for _ in range(3):
        with pytest.raises(ReceiveTimeout):
            await consumer.receive(0)

    async def interrupted() -> None:
        # As Ctrl-C does it, which strikes while the task runs.
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await consumer.receive(0)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(interrupted())
    await consumer.close()
    with pytest.raises(AlreadyClosed):
        await consumer.receive(0)


async def test_seek_drops_everything_from_before(broker: FakeBroker, client: Client) -> None:
    values = fill(broker, 1000, batch=10)
    consumer = await client.subscribe("t", "s", start="earliest")
    messages = await take(consumer, 150)
    await consumer.seek(messages[42].id)
    assert [m.value for m in await take(consumer, 100)] == values[42:142]
    await consumer.seek(messages[7])
    assert [m.value for m in await take(consumer, 3)] == values[7:10]
    await consumer.seek("latest")
    with pytest.raises(ReceiveTimeout):
        await consumer.receive(0.01)
    await consumer.seek("earliest")
    assert [m.value for m in await take(consumer, 1000)] == values
    await consumer.seek(datetime.fromtimestamp(broker.now_ms / 1000, UTC))
    assert (await consumer.receive(1.0)).value == b"0"
    await consumer.seek(broker.now_ms + 1)
    with pytest.raises(ReceiveTimeout):
        await consumer.receive(0.01)
    with pytest.raises(InvalidArgument, match="start position"):
        await consumer.seek("yesterday")  # type: ignore[arg-type]


async def test_a_seek_by_somebody_else_makes_the_queue_stale(broker: FakeBroker, client: Client) -> None:
    values = fill(broker, 100, batch=10, entry=1)
    consumer = await client.subscribe("t", "s", start="earliest")
    await take(consumer, 15)
    [handler] = broker.handlers
    [other] = handler.consumers.values()
    other.epoch, other.next = 7, (0, 0)
    other.messages += 1000
    other.dispatch()
    await client.admin.list_topics()  # whose answer comes behind what was delivered anew
    assert [m.value for m in await take(consumer, 100)] == values


async def test_unsubscribe_ends_both(broker: FakeBroker, client: Client) -> None:
    consumer = await client.subscribe("t", "s")
    await consumer.unsubscribe()
    assert "s" not in broker.topic("t").start
    with pytest.raises(AlreadyClosed):
        await consumer.receive(0.1)


async def test_closing_wakes_who_waits(broker: FakeBroker, client: Client) -> None:
    consumer = await client.subscribe("t", "s")
    waiting = asyncio.create_task(consumer.receive())

    async def loop() -> str:
        async for _ in consumer:
            pass
        return "ended"

    looping = asyncio.create_task(loop())
    await asyncio.sleep(0.01)
    await consumer.close()
    assert await looping == "ended"
    with pytest.raises(AlreadyClosed):
        await waiting
    fill(broker, 1)
    with pytest.raises(AlreadyClosed):
        await consumer.seek("earliest")


async def test_the_broker_can_send_a_consumer_away(broker: FakeBroker, client: Client) -> None:
    fill(broker, 2, entry=1)
    consumer = await client.subscribe("t", "s", start="earliest")
    await consumer.ack(await consumer.receive(1.0))
    [handler] = broker.handlers
    [closed] = handler.consumers.values()
    handler.consumers.clear()
    handler.connection.send(CloseConsumer(0, closed.id).encode())
    await until(lambda: len(broker.received(Subscribe)) == 2)
    fill(broker, 1)
    assert [message.value for message in await take(consumer, 2)] == [b"1", b"0"]


@pytest.mark.parametrize("single", [True, False])
async def test_a_damaged_batch_is_told_and_costs_itself_only(
    broker: FakeBroker, client: Client, single: bool
) -> None:
    topic = broker.topic("t")
    good = encode_batch([b"good"], sequence_id=0, publish_time_ms=0)
    damaged = bytearray(
        encode_batch([b"evil"], sequence_id=1, publish_time_ms=0)
        if single
        else encode_batch([b"a", b"b"], sequence_id=0, publish_time_ms=0)
    )
    damaged[-1] ^= 1
    count = 1 if single else 2
    broker.store(topic, [good, bytes(damaged), good], [1, count, 1], "p")
    broker.store(topic, [good], [1], "p")
    consumer = await client.subscribe("t", "s", start="earliest")
    assert (await consumer.receive(1.0)).id == MessageId(1, 0, 0)
    with pytest.raises(ChecksumMismatch, match="entry 0 of ledger 1") as raised:
        await consumer.receive(1.0)
    ids = raised.value.details
    assert (ids["first_id"], ids["last_id"]) == (MessageId(1, 0, 1), MessageId(1, 0, count))
    assert (await consumer.receive(1.0)).id == MessageId(1, 0, 1 + count)
    assert (await consumer.receive(1.0)).id == MessageId(1, 1, 0)


async def test_permits_bound_what_waits_in_the_client(broker: FakeBroker, client: Client) -> None:
    fill(broker, 5000, batch=1, entry=10)
    consumer = await client.subscribe("t", "s", start="earliest", receiver_queue_messages=50)
    got = []
    async for message in consumer:
        got.append(message)
        await asyncio.sleep(0)
        # A full queue, and the delivery of ten that is being handed out.
        assert sum(flow.messages for flow in broker.received(Flow)) <= len(got) + 60
        if len(got) == 1000:
            break
    assert max(flow.messages for flow in broker.received(Flow)) <= 50


async def test_a_consumer_that_does_not_read_holds_a_bounded_amount(
    broker: FakeBroker, client: Client
) -> None:
    for _ in range(100):
        broker.store(
            broker.topic("t"), [encode_batch([b"x" * 100_000], sequence_id=0, publish_time_ms=0)], [1], "p"
        )
    consumer = await client.subscribe("t", "s", start="earliest", receiver_queue_bytes=1_000_000)
    [handler] = broker.handlers
    [fake] = handler.consumers.values()
    await until(lambda: fake.next[0] >= 10)
    for taken in range(5):
        for _ in range(3):
            await client.admin.list_topics()  # whose answer comes behind permits and deliveries
        assert fake.next[0] <= taken + 12, "entries of 100,000 bytes"
        await consumer.receive(2.0)
    assert len(await take(consumer, 95)) == 95


def test_the_window_grows_while_the_broker_is_the_one_that_waits() -> None:
    window = Window(None, 1 << 20, QueueBudget(1 << 30))
    assert window.grant(0, 0) == (1000, 1 << 20)
    for _ in range(3):
        window.received(window.granted, 1000)
        window.grant(0, 0)
        window.found_empty()
    assert window.messages_limit == 8000
    for _ in range(100):
        window.received(window.granted, 1000)
        window.grant(0, 0)
    assert window.messages_limit == 1000
    fixed = Window(10, 1 << 20, QueueBudget(1 << 30))
    for _ in range(3):
        fixed.grant(0, 0)
        fixed.received(10, 1)
        fixed.found_empty()
    assert fixed.messages_limit == 10


def test_an_overshoot_is_not_granted_twice() -> None:
    window = Window(100, 1000, QueueBudget(1 << 30))
    assert window.grant(0, 0) == (100, 1000)
    window.received(150, 100)
    assert window.grant(150, 100) is None
    assert window.grant(0, 0) == (150, 100)
    assert window.granted == 100


async def test_seek_asks_the_broker_once(broker: FakeBroker, client: Client) -> None:
    consumer = await client.subscribe("t", "s")
    await consumer.seek("earliest")
    assert [command.start for command in broker.received(Seek)] == [("earliest", None)]
