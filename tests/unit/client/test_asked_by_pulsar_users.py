"""What users of Pulsar's clients look for: the last message id, redelivery of all, a reader that starts behind an id."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from magnetar.client import Client, InvalidArgument, MessageId, ReceiveTimeout, blocking
from magnetar.client.options import SubscriptionType
from support.served_broker import connect_to, serving, take
from support.virtual_time import in_virtual_time


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    async with serving() as server, connect_to(server) as client:
        yield client


async def test_the_last_message_id_is_that_of_the_last_message(client: Client) -> None:
    producer = await client.create_producer("t")
    consumer = await client.subscribe("t", "s")
    reader = await client.create_reader("t")
    assert await consumer.last_message_id() is None
    sent = await producer.send_many([b"0", b"1", b"2"])
    assert await consumer.last_message_id() == await reader.last_message_id() == sent[-1]
    assert await consumer.last_message_id("public/default/t") == sent[-1]
    with pytest.raises(InvalidArgument, match="has no messages of u"):
        await consumer.last_message_id("u")
    both = await client.subscribe(["t", "u"], "s2")
    assert (await both.last_message_id("t"), await both.last_message_id("u")) == (sent[-1], None)
    with pytest.raises(InvalidArgument, match="has several topics: of which one"):
        await both.last_message_id()


async def test_a_reader_may_start_behind_an_id(client: Client) -> None:
    producer = await client.create_producer("t")
    ids = await producer.send_many([b"0", b"1", b"2"])
    ids += await producer.send_many([b"3"])
    for number, message_id in enumerate(ids):
        for inclusive in (True, False):
            reader = await client.create_reader("t", start=message_id, inclusive=inclusive)
            wanted = [b"%d" % n for n in range(number + (not inclusive), 4)]
            assert await reader.has_message_available() == bool(wanted)
            assert [message.value for message in await take(reader, len(wanted))] == wanted
            assert not await reader.has_message_available()
            await reader.close()
    first = await client.create_reader("t", start="earliest", inclusive=False)
    assert (await first.read_next(1.0)).value == b"0", "nothing is named, and nothing is left out"


@in_virtual_time
@pytest.mark.parametrize("type", ["exclusive", "failover", "shared", "key_shared"])
@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("queue", [None, 1])
async def test_all_that_is_not_acknowledged_comes_again_once_and_in_order(
    type: SubscriptionType, durable: bool, queue: int | None
) -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        for first in (0, 4, 8):
            await producer.send_many([b"%d" % n for n in range(first, first + 4)])
        consumer = await client.subscribe(
            "t", "s", type=type, start="earliest", durable=durable, receiver_queue_messages=queue
        )
        messages = await take(consumer, 6)
        await consumer.ack(messages[:2])
        await consumer.ack(messages[3])
        consumer.nack(messages[4], delay=60.0)
        await consumer.redeliver_unacknowledged()
        values = [b"%d" % n for n in range(12) if n not in (0, 1, 3)]
        again = await take(consumer, len(values))
        assert [message.value for message in again] == values
        assert {message.redelivery_count for message in again[:3]} == {1}
        await consumer.ack(again, receipt=True)
        with pytest.raises(ReceiveTimeout):
            await consumer.receive(100.0)
        await consumer.redeliver_unacknowledged()
        with pytest.raises(ReceiveTimeout):
            await consumer.receive(100.0)
        await producer.send(b"12")
        assert (await consumer.receive(1.0)).value == b"12"
        if not durable:
            assert consumer._consumer.position._next is not None  # type: ignore[union-attr]


@in_virtual_time
async def test_what_others_hold_is_left_to_them() -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        one, other = [
            await client.subscribe("t", "s", type="shared", start="earliest", receiver_queue_messages=2)
            for _ in range(2)
        ]
        for number in range(4):
            await producer.send(b"%d" % number)
        mine = {message.value for message in await take(one, 2)}
        held = await take(other, 2)
        await one.redeliver_unacknowledged()
        again = []
        for consumer in (one, other, one, other):
            while True:
                try:
                    again.append((await consumer.receive(1.0)).value)
                except ReceiveTimeout:
                    break
        assert (set(again), len(again)) == (mine, 2), "whoever has room gets it"
        await other.ack(held, receipt=True)
        standby = await client.subscribe("t", "f", type="failover", start="earliest")
        waiting = await client.subscribe("t", "f", type="failover", start="earliest")
        assert len(await take(standby, 2)) == 2
        await waiting.redeliver_unacknowledged()
        assert [message.value for message in await take(standby, 2)] == [b"2", b"3"]
        with pytest.raises(ReceiveTimeout):
            await standby.receive(10.0)


@in_virtual_time
async def test_several_topics_and_a_lost_connection() -> None:
    async with serving() as server, connect_to(server) as client:
        consumer = await client.subscribe(["t", "u"], "s", type="shared", start="earliest")
        for name in ("t", "u"):
            await (await client.create_producer(name)).send(name.encode())
        await take(consumer, 2)
        again = asyncio.ensure_future(consumer.redeliver_unacknowledged())
        await asyncio.sleep(0)
        for connection in server.connections:
            connection.abort()
        await again
        assert {message.value for message in await take(consumer, 2)} == {b"t", b"u"}
        with pytest.raises(ReceiveTimeout):
            await consumer.receive(10.0)


async def test_a_nack_may_be_awaited_and_an_id_as_text_is_told_how_to_be_read(client: Client) -> None:
    producer = await client.create_producer("t")
    consumer = await client.subscribe("t", "s", type="shared", start="earliest")
    message_id = await producer.send(b"0")
    await consumer.nack(await consumer.receive(1.0), delay=0)
    assert (await consumer.receive(1.0)).redelivery_count == 1
    with pytest.raises(InvalidArgument, match=r"MessageId\.parse"):
        client.create_reader("t", start=str(message_id))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"MessageId\.parse"):
        await consumer.seek(str(message_id))  # type: ignore[arg-type]
    reader = await client.create_reader("t", start=MessageId.parse(str(message_id)))
    assert (await reader.read_next(1.0)).value == b"0"


@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_the_blocking_client_has_the_same(client: Client) -> None:
    def use(url: str) -> None:
        with blocking.connect(url) as connected:
            ids = connected.create_producer("t").send_many([b"0", b"1"])
            consumer = connected.subscribe("t", "s", start="earliest")
            assert consumer.last_message_id() == ids[1]
            assert consumer.receive(1.0).value == b"0"
            consumer.redeliver_unacknowledged()
            assert consumer.receive(1.0).value == b"0"
            assert consumer.nack(consumer.receive(1.0)) is None
            reader = connected.create_reader("t", start=ids[0], inclusive=False)
            assert (reader.last_message_id(), reader.read_next(1.0).value) == (ids[1], b"1")

    await asyncio.to_thread(use, client.service_url)
