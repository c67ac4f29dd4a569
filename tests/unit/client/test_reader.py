"""Readers: positions, nothing twice and nothing left out across reconnects."""

import asyncio
from typing import Any

import pytest

from magnetar.client import Client, MessageId, ReceiveTimeout, connect
from magnetar.proto.batch import encode_batch
from magnetar.proto.commands import Ack, Flow, Subscribe
from support.client_kit import until
from support.fake_broker import FakeBroker
from support.virtual_time import in_virtual_time


def fill(broker: FakeBroker, first: int, count: int, batch: int) -> list[bytes]:
    values = [b"%d" % i for i in range(first, first + count)]
    for i in range(0, count, batch):
        part = encode_batch(values[i : i + batch], sequence_id=i, publish_time_ms=broker.now_ms)
        broker.store(broker.topic("t"), [part], [batch], "p")
    return values


@pytest.mark.parametrize("cut_after", [1, 7, 10, 11, 95])
async def test_after_a_reconnect_it_goes_on_where_it_was(
    broker: FakeBroker, client: Client, cut_after: int
) -> None:
    values = fill(broker, 0, 100, batch=10)
    async with client.create_reader("t", start="earliest") as reader:
        got = []
        async for message in reader:
            got.append(message.value)
            if len(got) in (cut_after, cut_after + 1):
                attempts = len(broker.received(Subscribe))
                broker.cut()
                await until(lambda attempts=attempts: len(broker.received(Subscribe)) > attempts)
            if len(got) == 100:
                break
        assert got == values
        with pytest.raises(ReceiveTimeout):
            await reader.read_next(0.01)
    assert not broker.received(Ack)
    assert not broker.received(Subscribe)[0].durable


async def test_batches_and_reconnects(broker: FakeBroker, client: Client) -> None:
    values = fill(broker, 0, 60, batch=10)
    reader = await client.create_reader("t", start=MessageId(1, 1, 4))
    got = []
    async for batch in reader.batches():
        got += [message.value for message in batch]
        broker.cut()
        if len(got) == 46:
            break
    assert got == values[14:]


async def test_has_message_available(broker: FakeBroker, client: Client) -> None:
    earliest = await client.create_reader("t", start="earliest")
    latest = await client.create_reader("t")
    assert not await earliest.has_message_available()
    assert not await latest.has_message_available()
    fill(broker, 0, 2, batch=2)
    assert await earliest.has_message_available()
    assert await latest.has_message_available()
    from_id = await client.create_reader("t", start=MessageId(1, 0, 1))
    assert await from_id.has_message_available()
    assert (await from_id.read_next(1.0)).value == b"1"
    assert not await from_id.has_message_available()
    late = await client.create_reader("t", start="latest")
    assert not await late.has_message_available()
    by_time = await client.create_reader("t", start=broker.now_ms)
    assert await by_time.has_message_available()


async def test_latest_misses_nothing_that_came_after_it_was_made(broker: FakeBroker, client: Client) -> None:
    fill(broker, 0, 2, batch=2)
    reader = await client.create_reader("t", start="latest")
    fill(broker, 2, 2, batch=1)  # stored, not dispatched
    broker.cut()
    assert [(await reader.read_next(2.0)).value for _ in range(2)] == [b"2", b"3"]


async def test_seek(broker: FakeBroker, client: Client) -> None:
    values = fill(broker, 0, 30, batch=10)
    reader = await client.create_reader("t", start="earliest")
    messages = [await reader.read_next(1.0) for _ in range(25)]
    await reader.seek(messages[13].id)
    assert (await reader.read_next(1.0)).value == values[13]
    broker.cut()
    assert (await reader.read_next(2.0)).value == values[14]
    await reader.seek("latest")
    assert not await reader.has_message_available()
    fill(broker, 30, 1, batch=1)
    broker.cut()
    assert (await reader.read_next(2.0)).value == b"30"
    await reader.seek("earliest")
    broker.cut()
    assert (await reader.read_next(2.0)).value == b"0"


@in_virtual_time
async def test_a_start_by_time_is_told_apart_from_the_end_without_a_delivery() -> None:
    broker = await FakeBroker.start()
    async with connect(broker.url) as client:
        fill(broker, 0, 10, batch=5)
        broker.now_ms += 1000
        late = await client.create_reader("t", start=broker.now_ms, receiver_queue_messages=1)
        assert not await late.has_message_available()
        fill(broker, 10, 5, batch=5)  # stored, not dispatched
        assert await late.has_message_available()
        broker.unanswered.append(Flow)  # no delivery comes
        early = await client.create_reader("t", start=broker.now_ms - 1000)
        began = asyncio.get_running_loop().time()
        assert await early.has_message_available()
        assert asyncio.get_running_loop().time() - began < 1
    await broker.close()


@pytest.mark.parametrize("start", ["latest", 0])
async def test_a_reconnect_before_the_first_message_goes_back_to_where_it_began(
    broker: FakeBroker, client: Client, start: Any
) -> None:
    fill(broker, 0, 4, batch=2)
    reader = await client.create_reader("t", start=start if start == "latest" else broker.now_ms + 1)
    fill(broker, 4, 2, batch=2)  # stored, not dispatched
    broker.now_ms += 10
    broker.cut()
    assert (await reader.read_next(2.0)).value == b"4"
