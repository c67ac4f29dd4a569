"""Stopping in order: what is in hand is finished and acknowledged, nothing more is handed out, nothing that was acknowledged
comes again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from magnetar.client import AlreadyClosed, Client, Consumer, DeadLetterPolicy, connect
from magnetar.proto.commands import Ack, CloseConsumer, Flow
from support.client_kit import fill, until
from support.fake_broker import FakeBroker
from support.served_broker import connect_to, serving, take

TOPICS: list[Any] = ["t", ["t", "u"]]


async def consume(consumer: Consumer, on_message: Callable[[int], None]) -> list[bytes | None]:
    values = []
    async for message in consumer:
        values.append(message.value)
        on_message(len(values))
        await asyncio.sleep(0.01)  # the work
        await consumer.ack(message)
    return values


@pytest.mark.parametrize("topic", TOPICS)
async def test_stop_ends_a_loop_behind_what_is_in_hand(
    broker: FakeBroker, client: Client, topic: Any
) -> None:
    fill(broker, 30, entry=10)
    consumer = await client.subscribe(topic, "s", start="earliest", ack_group_delay=30.0)
    assert await consume(consumer, lambda count: consumer.stop() if count == 3 else None) == [
        b"0",
        b"1",
        b"2",
    ]
    for timeout in (0, 1.0, None):
        with pytest.raises(AlreadyClosed, match="was stopped"):
            await consumer.receive(timeout)
    assert [message async for message in consumer] == []
    assert [batch async for batch in consumer.batches()] == []
    await consumer.close()
    assert broker.topic("t").acked["s"] == {(0, index) for index in range(3)}
    again = await client.subscribe("t", "s", ack_group_delay=30.0)
    assert (await again.receive(1.0)).value == b"3"


async def test_stop_wakes_whoever_waits_and_lets_go_of_what_waits_here(
    broker: FakeBroker, client: Client
) -> None:
    consumer = await client.subscribe("t", "s", start="earliest")
    receiving, looping = (
        asyncio.create_task(consumer.receive()),
        asyncio.create_task(consume(consumer, lambda _: None)),
    )
    batches = asyncio.create_task(anext(consumer.batches(), None))
    await asyncio.sleep(0.01)
    consumer.stop()
    with pytest.raises(AlreadyClosed):
        await receiving
    assert await looping == []
    assert await batches is None
    granted = len(broker.received(Flow))
    async with client.create_producer("t") as producer:
        await producer.send_many([b"x"] * 2000)
    await asyncio.sleep(0.01)
    consumer.resume()
    assert len(broker.received(Flow)) == granted, "it asks for nothing more"
    await consumer.close()


async def test_a_batch_in_hand_is_acknowledged_after_the_stop(broker: FakeBroker, client: Client) -> None:
    fill(broker, 20, entry=10)
    consumer = await client.subscribe("t", "s", start="earliest")
    async for batch in consumer.batches():
        consumer.stop()
        await consumer.ack(batch, receipt=True)
    assert len(broker.topic("t").acked["s"]) == 10


@pytest.mark.parametrize("topic", TOPICS)
async def test_close_ends_a_loop_as_well_and_takes_acknowledgements_while_it_runs(
    broker: FakeBroker, client: Client, topic: Any
) -> None:
    """Without a connection: it is waited for, and what is acknowledged until it is there is sent."""
    fill(broker, 10)
    consumer = await client.subscribe(topic, "s", start="earliest", ack_group_delay=30.0)
    first, second, third = await take(consumer, 3)
    await consumer.ack(first)
    port = broker.port
    await broker.close()
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(consumer.close())
    await asyncio.sleep(0.05)
    await consumer.ack(second)
    receipt = asyncio.create_task(consumer.ack(third, receipt=True))
    await broker.listen(port)
    await asyncio.gather(closing, receipt)
    assert broker.topic("t").acked["s"] == {(0, 0), (0, 1), (0, 2)}


async def test_close_waits_for_a_broker_only_if_there_is_something_to_send(broker: FakeBroker) -> None:
    loop = asyncio.get_running_loop()
    fill(broker, 1)
    async with connect(broker.url) as client:
        idle = await client.subscribe("t", "idle", start="earliest")
        consumer = await client.subscribe("t", "s", start="earliest", ack_group_delay=30.0)
        message = await consumer.receive(1.0)
        await broker.close()
        await asyncio.sleep(0.05)
        began = loop.time()
        await idle.close()
        assert loop.time() == began
        await consumer.ack(message)
        await consumer.close()
        assert loop.time() - began == pytest.approx(5.0)


@pytest.mark.parametrize("group", [1, 1000])
async def test_after_close_acknowledging_says_that_it_comes_to_nothing(
    broker: FakeBroker, client: Client, group: int
) -> None:
    fill(broker, 10)
    consumer = await client.subscribe("t", "s", start="earliest", ack_group_messages=group)
    messages = await take(consumer, 4)
    await consumer.close()
    calls: list[Callable[[], Any]] = [
        lambda: consumer.ack(messages[0]),
        lambda: consumer.ack(messages),
        lambda: consumer.ack(messages[1].id),
        lambda: consumer.ack(messages[2], receipt=True),
        lambda: consumer.ack_cumulative(messages[3]),
        lambda: consumer.nack(messages[3]),
    ]
    for acknowledge in calls:
        with pytest.raises(AlreadyClosed, match="not acknowledged before"):
            await acknowledge()


async def test_who_waits_for_a_receipt_when_its_consumer_is_given_up_gets_an_error_and_is_not_cancelled(
    broker: FakeBroker, client: Client
) -> None:
    fill(broker, 1)
    consumer = await client.subscribe("t", "s", start="earliest")
    message = await consumer.receive(1.0)
    broker.unanswered.append(Ack)
    receipts = [asyncio.create_task(consumer.ack(message, receipt=True)) for _ in range(2)]
    await until(lambda: broker.received(Ack))
    consumer.abort()
    with pytest.raises(AlreadyClosed):
        await receipts[0]
    assert isinstance(await asyncio.gather(receipts[1], return_exceptions=True), list)
    assert not receipts[1].cancelled()


async def test_closing_a_client_closes_producers_before_what_feeds_them(
    broker: FakeBroker, client: Client
) -> None:
    """A program that consumes, sends on and then acknowledges: nothing of it is done twice."""
    fill(broker, 10, name="in")
    producer = await client.create_producer("out")
    consumer = await client.subscribe("in", "s", start="earliest", ack_group_delay=30.0)
    broker.hold_receipts = True

    async def work() -> None:
        async for message in consumer:
            await producer.send(message.value)
            await consumer.ack(message)

    working = asyncio.create_task(work())
    await until(lambda: broker.held)
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0.05)
    broker.release_receipts()
    await closing
    await working
    assert broker.topic("in").acked["s"] == {(0, 0)}


async def test_rule_49_what_a_stop_takes_back_is_not_counted() -> None:
    """Under a dead-letter policy a loop is told of several messages at a time."""
    policy = DeadLetterPolicy(max_redeliver_count=3)
    async with serving() as server, connect_to(server) as client:
        async with client.create_producer("t") as producer:
            await producer.send_many([b"m"] * 100)
        consumer = await client.subscribe("t", "s", type="shared", start="earliest", dead_letter=policy)
        taken = 0
        async for _ in consumer:
            taken += 1
            if taken == 20:
                consumer.stop()
        assert taken == 20
        await consumer.close()
        consumer = await client.subscribe("t", "s", type="shared", dead_letter=policy)
        counts = [message.redelivery_count for message in await take(consumer, 100)]
        assert sorted(counts) == [0] * 80 + [1] * 20


async def test_a_reader_stops_as_well(broker: FakeBroker, client: Client) -> None:
    fill(broker, 10)
    reader = await client.create_reader("t", start="earliest")
    async for _ in reader:
        reader.stop()
    await reader.close()


async def test_what_has_become_of_the_connection_is_known_and_told(broker: FakeBroker) -> None:
    states: list[str] = []
    async with connect(broker.url, backoff_first=0.01, on_connection_state=states.append) as client:
        assert client.connection_state == "connected"
        consumer, producer = await client.subscribe("t", "s"), await client.create_producer("t")
        port = broker.port
        await broker.close()
        await until(lambda: client.connection_state == "reconnecting")
        await producer_is_away(producer)
        await broker.listen(port)
        await until(lambda: client.connection_state == "connected")
        await asyncio.gather(consumer.close(), producer.close())
    assert client.connection_state == "closed"
    await asyncio.sleep(0)
    assert states == ["reconnecting", "connected", "closed"]


async def producer_is_away(producer: Any) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await producer.send(b"waits")


async def test_what_is_given_up_is_not_waited_for(broker: FakeBroker) -> None:
    async with connect(broker.url, backoff_first=0.01) as client:
        consumer = await client.subscribe("t", "s")
        await broker.close()
        await until(lambda: client.connection_state == "reconnecting")
        consumer.abort()
        assert client.connection_state == "connected", "nothing that is open waits for a broker"


@pytest.mark.asyncio(
    loop_factories=["uvloop"]
)  # that of the simulation takes a failing callback for a failing test
async def test_a_callback_that_fails_disturbs_nobody(broker: FakeBroker) -> None:
    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

    def callback(state: str) -> None:
        raise ValueError(state)

    async with connect(broker.url, backoff_first=0.01, on_connection_state=callback) as client:
        consumer = await client.subscribe("t", "s", start="earliest")
        broker.cut()
        await until(lambda: len(failures) == 2)
        fill(broker, 1)
        with contextlib.suppress(AlreadyClosed):
            broker.cut()
            assert (await consumer.receive(5.0)).value == b"0"
    assert broker.received(CloseConsumer)


async def test_a_client_without_a_broker_closes_all_of_its_consumers_together(broker: FakeBroker) -> None:
    loop = asyncio.get_running_loop()
    fill(broker, 1)
    async with connect(broker.url) as client:
        for name in ("a", "b", "c"):
            consumer = await client.subscribe("t", name, start="earliest", ack_group_delay=30.0)
            await consumer.ack(await consumer.receive(1.0))
        await broker.close()
        await asyncio.sleep(0.05)
        began = loop.time()
    assert loop.time() - began == pytest.approx(5.0, abs=1.0), "not one after the other"
