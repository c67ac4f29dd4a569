"""Reconnecting, failed seeks and failed receipts: what did not happen leaves no trace, and no loop goes round unpaused."""

import asyncio
import gc
import random
from typing import Any

import pytest

from magnetar.client import Client, InvalidArgument, MagnetarError, RequestTimeout, connect
from magnetar.client.messages import Delivery
from magnetar.proto.commands import (
    Ack,
    CloseConsumer,
    Command,
    Deliver,
    Redeliver,
    Seek,
    Subscribe,
)
from magnetar.proto.errors import MalformedFrame, TopicNotFound
from support.client_kit import fill, take, until
from support.fake_broker import FakeBroker, Handler


async def test_a_failed_seek_changes_nothing(broker: FakeBroker, client: Client) -> None:
    values = fill(broker, 100, batch=10)
    consumer = await client.subscribe("t", "s", start="earliest")
    got = await take(consumer, 15)
    broker.failures[Seek] = InvalidArgument("no such position")
    with pytest.raises(InvalidArgument):
        await consumer.seek("earliest")
    got += await take(consumer, 85)
    assert [message.value for message in got] == values
    reader = await client.create_reader("t", start="earliest")
    read = await take(reader, 15)
    broker.failures[Seek] = InvalidArgument("no such position")
    with pytest.raises(InvalidArgument):
        await reader.seek("latest")
    assert await reader.has_message_available()
    read += await take(reader, 35)
    broker.cut()
    read += await take(reader, 50)
    assert [message.value for message in read] == values


@pytest.mark.parametrize("request_type", [Ack, Seek])
async def test_a_request_that_meets_the_end_of_its_consumer_at_the_broker_is_repeated(
    broker: FakeBroker, client: Client, monkeypatch: pytest.MonkeyPatch, request_type: type[Command]
) -> None:
    """The topic is unloaded while the request is under way: the broker does not know the consumer any more."""
    fill(broker, 3)
    consumer = await client.subscribe("t", "s", start="earliest")
    message = await consumer.receive(2.0)
    answer = broker.answer

    def moved(handler: Handler, command: Command, payload: bytes) -> Any:
        if isinstance(command, request_type) and len(broker.received(request_type)) == 1:
            handler.consumers.clear()
            handler.connection.send(CloseConsumer(0, command.consumer_id).encode())  # type: ignore[attr-defined]
            raise InvalidArgument("consumer 1 is not open on this connection")
        return answer(handler, command, payload)

    monkeypatch.setattr(broker, "answer", moved)
    await (consumer.ack(message, receipt=True) if request_type is Ack else consumer.seek("latest"))
    assert len(broker.received(Subscribe)) == 2


async def test_rule_50_a_request_that_waits_for_a_broker_ends_with_its_refusal(broker: FakeBroker) -> None:
    async with connect(broker.url, backoff_first=0.2, rng=random.Random(1)) as client:
        consumer = await client.subscribe("t", "s")
        broker.failures[Subscribe] = TopicNotFound("it was deleted")
        broker.cut()
        await until(lambda: client.connection_state == "reconnecting")
        async with asyncio.timeout(5):  # and not after operation_timeout
            with pytest.raises(TopicNotFound, match="it was deleted"):
                await consumer.last_message_id()
        assert len(broker.received(Subscribe)) == 2


async def test_a_seek_without_an_answer_starts_anew_from_where_the_broker_is(broker: FakeBroker) -> None:
    values = fill(broker, 30, batch=10, entry=1)
    async with connect(broker.url, backoff_first=0.01, operation_timeout=0.2) as client:
        consumer = await client.subscribe("t", "s", start="earliest")
        messages = await take(consumer, 15)
        await consumer.ack(messages[:10], receipt=True)
        broker.unanswered.append(Seek)
        with pytest.raises(RequestTimeout):
            await consumer.seek(messages[2])
        # Whether it happened is not known: only what the broker delivers from now on can be acknowledged cumulatively.
        assert [message.value for message in await take(consumer, 20)] == values[10:]


async def test_after_a_receipt_that_failed_a_message_can_be_acknowledged_and_nacked(
    broker: FakeBroker, client: Client
) -> None:
    fill(broker, 20, batch=10, entry=1)
    consumer = await client.subscribe(
        "t", "s", start="earliest", type="shared", ack_group_delay=0.0, nack_delay=0.0
    )
    messages = await take(consumer, 20)
    for acknowledged in (messages[0], messages[1:3], messages[10]):
        broker.failures[Ack] = InvalidArgument("no")
        with pytest.raises(InvalidArgument):
            await consumer.ack(acknowledged, receipt=True)
    await consumer.ack(messages[:3])
    await until(lambda: len(broker.topic("t").acked["s"]) == 3)
    consumer.nack(messages[10])
    assert (await consumer.receive(2.0)).id == messages[10].id
    await consumer.ack(messages[11], receipt=True)
    consumer.nack(messages[11])
    await asyncio.sleep(0.01)
    assert len(broker.received(Redeliver)) == 1


async def test_nacks_hold_ids_and_not_payloads(broker: FakeBroker, client: Client) -> None:
    fill(broker, 10, batch=10)
    consumer = await client.subscribe("t", "s", start="earliest", type="shared", nack_delay=0.05)
    messages = await take(consumer, 10)
    consumer.nack(messages)
    await consumer.ack(messages[3], receipt=True)
    first, flags = messages[0].id, messages[0].delivery.flags
    del messages
    inner: Any = consumer._consumer
    inner.open_delivery.close()
    assert not [held for held in gc.get_objects() if isinstance(held, Delivery) and held.flags is flags]
    again = await take(consumer, 9)
    assert [message.id.index for message in again] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert again[0].id == first


async def test_pending_nacks_are_bounded(
    broker: FakeBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.client.topic.acks.MAX_PENDING_NACKS", 15)
    fill(broker, 20, batch=10, entry=1)
    consumer = await client.subscribe("t", "s", start="earliest", type="shared", nack_delay=60.0)
    for message in await take(consumer, 20):
        consumer.nack(message)
    again = await take(consumer, 5)  # the oldest, before their time
    assert [tuple(message.id[1:3]) for message in again] == [(0, index) for index in range(5)]


async def test_a_delivery_that_cannot_be_received_is_not_asked_for_without_pause(broker: FakeBroker) -> None:
    async with connect(broker.url, backoff_first=0.02, backoff_max=10.0, max_message_bytes=10_000) as client:
        fill(broker, 1, name="t")
        broker.store(broker.topic("big"), [b"x" * 200_000], [1], "p")
        consumer = await client.subscribe("big", "s", start="earliest")
        waiting = asyncio.create_task(consumer.receive())
        await asyncio.sleep(0.5)
        # 0.02 + 0.04 + ... + 0.32: five or six times, not some hundred.
        assert 3 <= len(broker.received(Subscribe)) <= 8
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_a_delivery_that_is_no_entry_is_told_and_the_next_arrives(
    broker: FakeBroker, client: Client
) -> None:
    values = fill(broker, 1)
    consumer = await client.subscribe("t", "s", start="earliest")
    assert (await consumer.receive(1.0)).value == values[0]
    [handler] = broker.handlers
    [peer] = handler.consumers.values()
    handler.connection.send(Deliver(0, peer.id, peer.epoch, 1, 7).encode(), b"no entry")
    fill(broker, 1)
    peer.dispatch()
    with pytest.raises(MalformedFrame, match="entry 7 of ledger 1"):
        await consumer.receive(1.0)
    assert (await consumer.receive(1.0)).value == values[0]
    assert len(broker.received(Subscribe)) == 1


async def test_awaiting_the_end_of_something_passes_a_cancellation_on(broker: FakeBroker) -> None:
    client = await connect(broker.url, backoff_first=0.01)
    await client.create_producer("t")
    await broker.server.close(0.0)  # it tries to attach again from now on

    async def close_and_more() -> str:
        await client.close()
        return "not cancelled"

    task = asyncio.create_task(close_and_more())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(MagnetarError):
        await client.create_producer("t")
