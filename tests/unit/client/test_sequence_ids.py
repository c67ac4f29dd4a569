"""Sequence ids of the application's own: they rise, with gaps; what the broker has is receipted as stored before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from magnetar.client import (
    Client,
    InvalidArgument,
    MessageId,
    Producer,
    SendTimeout,
    SequenceIdError,
    connect,
)
from magnetar.proto.commands import CloseProducer
from magnetar.proto.ids import DUPLICATE_ID
from support.client_kit import until
from support.fake_broker import FakeBroker
from support.virtual_time import in_virtual_time

WAYS: dict[str, dict[str, Any]] = {
    "batches": {},
    "singles": {"batching": False},
    "by_key": {"batching_by_key": True},
    "compressed": {"compression": "zlib"},
}


@pytest_asyncio.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    broker = await FakeBroker.start()
    broker.deduplicates = True
    yield broker
    await broker.close()


async def received(client: Client, count: int, topic: str = "t") -> list[tuple[int, bytes | None]]:
    async with client.subscribe(topic, f"s{count}", start="earliest") as consumer:
        messages = [await consumer.receive(2.0) for _ in range(count)]
    return [(message.sequence_id, message.value) for message in messages]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("many", [False, True])
async def test_ids_of_ones_own_arrive_with_their_messages(client: Client, way: str, many: bool) -> None:
    producer = await client.create_producer("t", name="p", **WAYS[way])
    sent = [3, 4, 5, 9, 10, 700, 701, 1 << 40]
    values = [b"%d" % number for number in sent]
    keys = [f"k{number % 2}" for number in sent]
    if many:
        ids = await producer.send_many(values, keys=keys, sequence_ids=sent)
    else:
        triples = zip(values, keys, sent)
        ids = await asyncio.gather(*(producer.send(value, key, sequence_id=n) for value, key, n in triples))
    assert list(ids) == sorted(set(ids))
    assert producer.last_sequence_id == 1 << 40
    await producer.send(b"next", "k0")
    assert producer.last_sequence_id == (1 << 40) + 1
    expected = [*zip(sent, values), ((1 << 40) + 1, b"next")]
    assert await received(client, len(expected)) == expected


async def test_messages_with_and_without_an_id_share_a_batch(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t")
    for sequence_id in (None, None, 2, None, 7, None, 9, None):
        producer.send_nowait(b"x", sequence_id=sequence_id)
    assert producer.last_sequence_id == -1, "nothing is stored yet"
    await producer.flush()
    assert producer.last_sequence_id == 10
    assert broker.frames_of_sends == 1
    assert [number for number, _ in await received(client, 8)] == [0, 1, 2, 3, 7, 8, 9, 10]


async def test_an_id_that_runs_back_is_refused_at_the_call_and_costs_nothing_else(client: Client) -> None:
    producer = await client.create_producer("t")
    await producer.send(b"a", sequence_id=5)
    receipt = producer.send_nowait(b"b", sequence_id=8)
    for wrong in (8, 5, 0):
        with pytest.raises(SequenceIdError, match=rf"sequence id {wrong} follows 8"):
            producer.send_nowait(b"x", sequence_id=wrong)
        with pytest.raises(SequenceIdError, match=rf"sequence id {wrong} follows 8"):
            await producer.send_many([b"x"], sequence_ids=[wrong])
    with pytest.raises(SequenceIdError, match="message 2: the sequence id 11 follows 11"):
        await producer.send_many([b"x"] * 4, sequence_ids=[10, 11, 11, 12])
    for bad in (-1, 1 << 63, 2.0, "9", True):
        with pytest.raises(InvalidArgument, match="not a sequence id"):
            producer.send_nowait(b"x", sequence_id=bad)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="message 1: not a sequence id"):
            await producer.send_many([b"x", b"y"], sequence_ids=[9, bad])  # type: ignore[list-item]
    with pytest.raises(InvalidArgument, match="2 values, but 1 sequence_ids"):
        await producer.send_many([b"x", b"y"], sequence_ids=[9])
    assert not (await receipt).is_duplicate
    assert await received(client, 2) == [(5, b"a"), (8, b"b")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("many", [False, True])
async def test_a_producer_of_the_same_name_goes_on_behind_what_the_broker_has(
    broker: FakeBroker, client: Client, way: str, many: bool
) -> None:
    async def send(producer: Producer, numbers: range) -> list[MessageId]:
        values, keys = [b"%d" % number for number in numbers], ["k"] * len(numbers)
        if many:
            return await producer.send_many(values, keys=keys, sequence_ids=list(numbers))
        receipts = [
            producer.send_nowait(value, "k", sequence_id=number) for value, number in zip(values, numbers)
        ]
        return [await receipt for receipt in receipts]

    async with client.create_producer("t", name="p", **WAYS[way]) as first:
        assert first.last_sequence_id == -1
        await send(first, range(0, 60, 3))
    async with client.create_producer("t", name="p", **WAYS[way]) as again:
        assert again.last_sequence_id == 57
        ids = await send(again, range(0, 90, 3))
        assert [one.is_duplicate for one in ids] == [True] * 20 + [False] * 10
        assert set(ids[:20]) == {DUPLICATE_ID}
        assert ids[20:] == sorted(set(ids[20:]))
        automatic = await again.send(b"88")
        assert not automatic.is_duplicate
        assert again.last_sequence_id == 88
    async with client.create_producer("t", name="p", **WAYS[way]) as third:
        replayed = third.send_nowait(b"x", sequence_id=1)  # what it never sent itself may come in any place
        behind = third.send_nowait(b"y")
        assert (await replayed).is_duplicate
        assert not (await behind).is_duplicate
        assert third.last_sequence_id == 89
    consumer = await client.subscribe("t", "elsewhere")
    for call in (consumer.seek, consumer.ack):
        with pytest.raises(InvalidArgument, match="stored before, and not where"):
            await call(DUPLICATE_ID)
    assert [number for number, _ in await received(client, 32)] == [*range(0, 90, 3), 88, 89]


@pytest.mark.parametrize("way", WAYS)
async def test_what_was_in_flight_when_the_connection_broke_is_stored_once(
    broker: FakeBroker, client: Client, way: str
) -> None:
    producer = await client.create_producer("t", name="p", batching_max_messages=7, **WAYS[way])
    broker.hold_receipts = True
    receipts = [producer.send_nowait(b"%d" % n, "k", sequence_id=2 * n) for n in range(20)]
    await until(lambda: broker.topic("t").message_count >= 7)
    broker.cut()
    receipts += [producer.send_nowait(b"%d" % n, "k", sequence_id=2 * n) for n in range(20, 30)]
    broker.held.clear()
    broker.hold_receipts = False
    ids = [await receipt for receipt in receipts]
    known = [one for one in ids if not one.is_duplicate]
    assert known == sorted(set(known))
    assert await received(client, 30) == [(2 * n, b"%d" % n) for n in range(30)]
    assert producer.pending_bytes == 0


async def test_a_batch_never_holds_ids_on_both_sides_of_what_the_broker_has(
    broker: FakeBroker, client: Client
) -> None:
    broker.topic("t").last_ids["p"] = 10
    producer = await client.create_producer("t", name="p")
    ids = await producer.send_many([b"x"] * 20, sequence_ids=list(range(1, 21)))
    assert [one.is_duplicate for one in ids] == [True] * 10 + [False] * 10
    assert broker.frames_of_sends == 2


@in_virtual_time
async def test_nothing_is_stored_behind_a_message_that_failed() -> None:
    """Who resumes behind last_sequence_id would leave it out."""
    broker = await FakeBroker.start()
    broker.deduplicates = True
    async with connect(broker.url) as client:
        producer = await client.create_producer("t", name="p", send_timeout=1.0)
        await producer.send(b"0", sequence_id=0)
        broker.lose_sends = True
        lost = producer.send_nowait(b"1", sequence_id=1)
        await asyncio.sleep(0.9)
        behind = producer.send_nowait(b"2", sequence_id=2)
        with pytest.raises(SendTimeout, match="whether it was stored is not known"):
            await lost
        with pytest.raises(SendTimeout, match="open it anew, and go on behind its last id"):
            await behind
        assert producer.ended
        broker.lose_sends = False
        for sequence_id in (None, 1, 3):
            with pytest.raises(SendTimeout, match="open it anew"):
                producer.send_nowait(b"3", sequence_id=sequence_id)
        await until(lambda: broker.received(CloseProducer))
        again = await client.create_producer("t", name="p")
        assert again.last_sequence_id == 0
        await again.send_many([b"1", b"2", b"3"], sequence_ids=[1, 2, 3])
        assert await received(client, 4) == [(n, b"%d" % n) for n in range(4)]
    await broker.close()


async def test_a_message_that_is_wrong_itself_ends_no_producer(broker: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t", batching_max_messages=1)
    broker.fail_next_send = InvalidArgument("too late")
    receipts = [producer.send_nowait(b"%d" % n, sequence_id=n) for n in range(3)]
    with pytest.raises(InvalidArgument, match="too late"):
        await receipts[0]
    await asyncio.gather(*receipts[1:])
    assert not producer.ended
    assert await received(client, 2) == [(1, b"1"), (2, b"2")]
