"""A message in chunks that is not whole: it is waited for while the rest may come, and dropped once it never can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from magnetar.client import Client, MessageId, MessageLost, SubscriptionType
from magnetar.client.options import SUBSCRIPTION_TYPES
from magnetar.proto.errors import BookieUnavailable
from magnetar.runtime.connection import FramedServer
from support.fake_ledger import FakeLedgers, FakeReader
from support.served_broker import connect_to, serving
from support.virtual_time import in_virtual_time

SIZE = 1000  # of a chunk, about
LONG_S = 900.0  # in virtual time: many times what a message may be unfinished


@asynccontextmanager
async def served() -> AsyncIterator[tuple[FramedServer, Client, FakeLedgers]]:
    ledgers = FakeLedgers()
    async with serving(ledgers=ledgers) as server, connect_to(server, max_message_bytes=SIZE) as client:
        yield server, client, ledgers


async def pieces(count: int, *, then: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    """Of a chunk each, which are stored in entries of their own. `then`: before the last one."""
    for number in range(count):
        if number == count - 1 and then is not None:
            await then.wait()
        yield bytes([number]) * (SIZE - 500)
        await asyncio.sleep(1.0)


WHOLE = b"".join(bytes([number]) * (SIZE - 500) for number in range(8))


async def backlog(client: Client) -> int:
    found: int = (await client.admin.topic_stats("t"))["subscriptions"]["s"]["backlog_messages"]
    return found


def unreadable(entries: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bookies are away, as long as they are in the set."""
    read = FakeReader.read

    async def away(self: Any, first: int, last: int, **named: Any) -> list[bytes]:
        missing = [entry for entry in range(first, last + 1) if (self.ledger_id, entry) in entries]
        if missing and missing[0] == first:
            raise BookieUnavailable("away")
        return await read(self, first, missing[0] - 1 if missing else last, **named)

    monkeypatch.setattr(FakeReader, "read", away)


@in_virtual_time
@pytest.mark.parametrize("type", SUBSCRIPTION_TYPES)
async def test_chunks_that_cannot_be_read_for_long_are_no_reason_to_acknowledge_the_others(
    type: SubscriptionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: after three rounds of an expiry each, 4.5 minutes, all of it was acknowledged, and never seen."""
    async with served() as (_, client, _):
        async with client.create_producer("t", chunking=True) as producer:
            first = await producer.send_stream(pieces(8))
        count = await stored(client)
        away = {(first.ledger, first.entry + count // 2)}
        unreadable(away, monkeypatch)
        consumer = await client.subscribe("t", "s", type=type, start="earliest")
        await asyncio.sleep(LONG_S)
        assert await backlog(client) == count
        assert not consumer.unfinished_messages
        away.clear()
        message = await consumer.receive(200.0)
        assert (message.id, message.value) == (first, WHOLE)
        await consumer.ack(message, receipt=True)
        assert await backlog(client) == 0


async def stored(client: Client) -> int:
    found: int = (await client.admin.topic_stats("t"))["stored_messages"]
    assert found >= 3
    return found


@in_virtual_time
@pytest.mark.parametrize("type", SUBSCRIPTION_TYPES)
async def test_chunks_whose_first_ones_cannot_be_read_for_long_are_given_back(
    type: SubscriptionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come again to another consumer, without the first one."""
    async with served() as (_, client, _):
        async with client.create_producer("t", chunking=True) as producer:
            first = await producer.send_stream(pieces(8))
        count = await stored(client)
        consumer = await client.subscribe("t", "s", type=type, start="earliest", stream_chunks=True)
        await asyncio.sleep(5.0)
        away = {(first.ledger, first.entry)}
        unreadable(away, monkeypatch)
        consumer.abort()
        consumer = await client.subscribe("t", "s", type=type, start="earliest")
        await asyncio.sleep(LONG_S)
        assert await backlog(client) == count
        assert not consumer.unfinished_messages
        away.clear()
        assert (await consumer.receive(200.0)).value == WHOLE


@in_virtual_time
@pytest.mark.parametrize("stream_chunks", [False, True])
@pytest.mark.parametrize("type", SUBSCRIPTION_TYPES)
async def test_what_a_producer_left_behind_that_died_is_dropped_and_counted(
    type: SubscriptionType, stream_chunks: bool
) -> None:
    async with served() as (server, client, _):
        consumer = await client.subscribe("t", "s", type=type, start="earliest", stream_chunks=stream_chunks)
        async with connect_to(server, max_message_bytes=SIZE) as another:
            producer = await another.create_producer("t", chunking=True)
            streaming = asyncio.create_task(producer.send_stream(pieces(8, then=asyncio.Event())))
            await asyncio.sleep(20.0)
            producer.abort()
            streaming.cancel()
        assert await backlog(client) == await stored(client)
        if stream_chunks:
            with pytest.raises(MessageLost, match="none is to come"):
                async for _ in consumer.stream(await consumer.receive(1.0)):
                    pass
        await asyncio.sleep(200.0)
        assert await backlog(client) == 0
        assert consumer.unfinished_messages == 1


@in_virtual_time
@pytest.mark.parametrize("type", SUBSCRIPTION_TYPES)
async def test_what_its_producer_gave_up_is_dropped_though_that_goes_on(type: SubscriptionType) -> None:
    async with served() as (_, client, _):
        consumer = await client.subscribe("t", "s", type=type, start="earliest")
        producer = await client.create_producer("t", chunking=True)
        streaming = asyncio.create_task(producer.send_stream(pieces(8, then=asyncio.Event())))
        await asyncio.sleep(20.0)
        streaming.cancel()
        for _ in range(200):
            await producer.send(b"small")
            await consumer.ack(await consumer.receive(1.0))
            await asyncio.sleep(1.0)
        assert await backlog(client) < 3
        assert consumer.unfinished_messages == 1


@in_virtual_time
@pytest.mark.parametrize("type", SUBSCRIPTION_TYPES)
async def test_a_producer_whose_source_is_slow_is_waited_for(type: SubscriptionType) -> None:
    async with served() as (_, client, _):
        consumer = await client.subscribe("t", "s", type=type, start="earliest")
        producer = await client.create_producer("t", chunking=True)
        more = asyncio.Event()
        streaming = asyncio.create_task(producer.send_stream(pieces(8, then=more)))
        await asyncio.sleep(LONG_S)
        more.set()
        await streaming
        assert (await consumer.receive(200.0)).value == WHOLE
        assert not consumer.unfinished_messages


@in_virtual_time
@pytest.mark.parametrize("type", SUBSCRIPTION_TYPES)
async def test_what_cannot_be_stored_for_long_is_waited_for(type: SubscriptionType) -> None:
    """Its producer has sent the last chunk, and its bookies take nothing."""
    async with served() as (_, client, ledgers):
        consumer = await client.subscribe("t", "s", type=type, start="earliest")
        producer = await client.create_producer("t", chunking=True, send_timeout=3600)
        more = asyncio.Event()
        streaming = asyncio.create_task(producer.send_stream(pieces(8, then=more)))
        await asyncio.sleep(20.0)
        ledgers.hold = True
        more.set()
        await asyncio.sleep(LONG_S)
        assert not streaming.done()
        ledgers.hold = False
        for writer in ledgers.writers.values():
            writer.confirm()
        await streaming
        assert (await consumer.receive(200.0)).value == WHOLE


@in_virtual_time
@pytest.mark.parametrize("type", SUBSCRIPTION_TYPES)
async def test_what_is_left_of_a_message_of_which_one_chunk_was_acknowledged_is_dropped(
    type: SubscriptionType,
) -> None:
    """Nobody can ever have it whole: those before the missing one wait in vain, those behind it come without them."""
    async with served() as (_, client, _):
        consumer = await client.subscribe("t", "s", type=type, start="earliest")
        producer = await client.create_producer("t", chunking=True)
        first = await producer.send_stream(pieces(8))
        chunks = (await consumer.receive(5.0)).id.chunks  # type: ignore[attr-defined]
        ledger, entry, index, _ = chunks[2]
        await consumer.ack(MessageId(first.ledger, entry, index), receipt=True)
        assert ledger == first.ledger
        await consumer.close()
        consumer = await client.subscribe("t", "s", type=type, start="earliest")
        await asyncio.sleep(300.0)
        assert await backlog(client) == 0
        assert consumer.unfinished_messages == len(chunks) - 2  # those before it are one
