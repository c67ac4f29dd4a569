"""What a program may rely on beside the ways of a message: overriding, callbacks, partial failures, what is left open."""

import asyncio
import gc
import warnings
from datetime import timedelta
from typing import Any

import pytest

from magnetar.client import (
    AlreadyClosed,
    Client,
    Consumer,
    InvalidArgument,
    MessageId,
    Producer,
    Receipt,
    ReceiveTimeout,
    SendTimeout,
    StorageFailed,
    connect,
)
from support.client_kit import fill
from support.fake_broker import FakeBroker


async def test_a_batch_has_at_most_what_was_asked_for(broker: FakeBroker, client: Client) -> None:
    values = fill(broker, 10, batch=10)
    consumer = await client.subscribe("t", "s", start="earliest")
    batches = [await consumer.receive_batch(4, timeout=5.0) for _ in range(3)]
    assert [[message.value for message in batch] for batch in batches] == [
        values[:4],
        values[4:8],
        values[8:],
    ]
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(InvalidArgument, match="max_messages"):
            await consumer.receive_batch(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["receive", "receive_batch"])
async def test_both_ways_of_receiving_end_alike(client: Client, how: str) -> None:
    consumer = await client.subscribe("t", "s")
    receive = getattr(consumer, how)
    with pytest.raises(ReceiveTimeout):
        await receive(timeout=timedelta(milliseconds=10))
    waiting = asyncio.ensure_future(receive())
    await asyncio.sleep(0)
    await consumer.close()
    for call in (waiting, receive(), receive(timeout=1)):
        with pytest.raises(AlreadyClosed):
            await call


async def test_what_a_subclass_overrides_is_called(client: Client) -> None:
    calls: list[str] = []

    class OwnProducer(Producer):
        def send_nowait(self, value: bytes | None, *args: Any, **options: Any) -> Receipt:
            calls.append("send_nowait")
            return super().send_nowait(value, *args, **options)

    class OwnConsumer(Consumer):
        async def ack(self, messages: Any, *, receipt: bool = False) -> None:
            calls.append("ack")
            await super().ack(messages, receipt=receipt)

    producer = await client.create_producer("t")
    consumer = await client.subscribe("t", "s")
    message_id = await OwnProducer(producer._producer).send(b"x")
    await OwnConsumer("t", "s", consumer._consumer).ack(message_id)
    assert calls == ["send_nowait", "ack"]


async def test_a_receipt_calls_back_once_it_is_done(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t")
    done: list[Receipt] = []
    receipt = producer.send_nowait(b"x")
    receipt.add_done_callback(done.append)
    with pytest.raises(InvalidArgument, match="not confirmed yet"):
        receipt.result()
    await receipt
    await asyncio.sleep(0)
    receipt.add_done_callback(done.append)
    await asyncio.sleep(0)
    assert done == [receipt, receipt]
    assert receipt.result() == MessageId(1, 0, 0)
    broker.fail_next_send = StorageFailed("no room")
    failing = producer.send_nowait(b"y")
    failing.add_done_callback(done.append)
    with pytest.raises(StorageFailed):
        await failing
    await asyncio.sleep(0)
    assert done[2:] == [failing]
    with pytest.raises(StorageFailed):
        failing.result()
    # Whoever awaits the receipt beside it may be cancelled.
    watched = producer.send_nowait(b"z")
    waiting = asyncio.ensure_future(_result_of(watched))
    await asyncio.sleep(0)
    watched.add_done_callback(done.append)
    waiting.cancel()
    await asyncio.wait([waiting])
    await watched
    await asyncio.sleep(0)
    assert done[3:] == [watched]


async def _result_of(receipt: Receipt) -> MessageId:
    return await receipt


async def test_a_part_of_send_many_that_fails_is_named(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t")
    broker.fail_next_send = StorageFailed("no room")
    with pytest.raises(
        StorageFailed, match=r"of 25000 messages 15000 are stored, the first 0 .* not"
    ) as failed:
        await producer.send_many([b"x"] * 25_000)
    ids = failed.value.details["ids"]
    assert ids[:10_000] == [None] * 10_000
    assert len(set(ids[10_000:])) == 15_000
    assert None not in ids[10_000:]
    await producer.flush()  # the error was seen
    assert len(await producer.send_many([b"y"] * 3)) == 3


async def test_what_may_be_stored_is_said_to_be_unknown(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t", send_timeout=0.05)
    broker.lose_sends = True
    with pytest.raises(SendTimeout, match=r"0 are stored, .* whether more are is not known") as failed:
        await producer.send_many([b"x"] * 3)
    assert failed.value.details["ids"] == [None] * 3


async def test_what_is_left_open_is_warned_of(broker: FakeBroker) -> None:
    client = await connect(broker.url)
    await client.create_producer("t")
    await client.subscribe("t", "s")
    pool = client._pool
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        del client
        gc.collect()
    await pool.close(1.0)
    topic = "persistent://public/default/t"
    texts = [str(one.message) for one in caught if issubclass(one.category, ResourceWarning)]
    assert texts == [
        f"<Producer of {topic}> was not closed",
        f"<Consumer of {topic}> was not closed",
        f"<Client of {broker.url}> was not closed",
    ]


async def test_a_forgotten_argument_or_await_is_said_of_the_call(client: Client) -> None:
    with pytest.raises(
        TypeError, match=r"^subscribe\(\) missing 1 required positional argument: 'subscription'"
    ):
        client.subscribe("t")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^create_producer\(\) got an unexpected keyword argument 'nix'"):
        client.create_producer("t", nix=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="await it first"):
        async for _ in client.subscribe("t", "s"):  # type: ignore[attr-defined]
            pass
