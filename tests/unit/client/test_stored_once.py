"""Own sequence ids, and delivery times, from the client through a real broker to consumers: each message once."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from magnetar.client import Client, InvalidArgument, MessageId, Producer, SendTimeout
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.served_broker import connect_to, serving, take

WAYS: dict[str, dict[str, Any]] = {
    "batches": {"batching_max_messages": 5},
    "singles": {"batching": False},
    "by_key": {"batching_by_key": True},
    "compressed": {"compression": "snappy"},
}


class LoopClock:
    """Wall-clock time that goes as the loop's."""

    def now_ms(self) -> int:
        return 1_700_000_000_000 + int(asyncio.get_running_loop().time() * 1000)


async def send(producer: Producer, numbers: list[int], *, many: bool) -> list[MessageId]:
    values, keys = [b"%d" % number for number in numbers], [f"k{number % 3}" for number in numbers]
    if many:
        return await producer.send_many(values, keys=keys, sequence_ids=numbers)
    rows = zip(values, keys, numbers)
    receipts = [producer.send_nowait(value, key, sequence_id=number) for value, key, number in rows]
    return [await receipt for receipt in receipts]


async def check(client: Client, numbers: list[int]) -> None:
    async with client.subscribe("t", "checked", start="earliest") as consumer:
        messages = await take(consumer, len(numbers))
        last = await consumer.last_message_id()
        assert [(one.sequence_id, one.value, one.key) for one in messages] == [
            (number, b"%d" % number, f"k{number % 3}") for number in numbers
        ]
        assert messages[-1].id == last


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("many", [False, True])
async def test_a_file_that_is_sent_again_and_again_is_stored_once(way: str, many: bool) -> None:
    rng = random.Random(way)
    lines = sorted(rng.sample(range(1000), 200))
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    for upto in (0, 70, 71, 150, 200, 200):
        async with (
            serving(metadata, ledgers, deduplication=True) as server,
            connect_to(server) as client,
            client.create_producer("t", name="file", **WAYS[way]) as producer,
        ):
            before = [one for one in lines if one <= producer.last_sequence_id]
            ids = await send(producer, lines[:upto], many=many)
            assert [one.is_duplicate for one in ids] == [number in before for number in lines[:upto]]
            assert producer.last_sequence_id == (lines[upto - 1] if upto else -1)
    async with serving(metadata, ledgers, deduplication=True) as server, connect_to(server) as client:
        await check(client, lines)


@pytest.mark.parametrize("way", WAYS)
async def test_over_restarts_of_the_broker_nothing_is_stored_twice_or_left_out(way: str) -> None:
    rng = random.Random(way)
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    numbers = sorted(rng.sample(range(10_000), 1500))
    receipts = []
    async with serving(metadata, ledgers, deduplication=True) as server:
        port = server.addresses[0][1]
        client = await connect_to(server).__aenter__()
        producer = await client.create_producer("t", name="p", **WAYS[way])
        for number in numbers[:300]:
            receipts.append(producer.send_nowait(b"%d" % number, f"k{number % 3}", sequence_id=number))
        await receipts[40]
    for part in range(1, 5):
        async with serving(metadata, ledgers, port=port, deduplication=True) as server:
            for number in numbers[300 * part : 300 * part + 300]:
                receipts.append(producer.send_nowait(b"%d" % number, f"k{number % 3}", sequence_id=number))
            await receipts[300 * part + rng.randrange(300)]
    async with serving(metadata, ledgers, port=port, deduplication=True) as server:
        ids = [await receipt for receipt in receipts]
        known = [one for one in ids if not one.is_duplicate]
        assert known == sorted(set(known))
        await check(client, numbers)
        await client.close()


async def test_on_a_partitioned_topic_a_message_with_an_id_needs_a_key() -> None:
    """Without one it would go elsewhere when it is sent again, to a partition that may take it for a duplicate."""
    async with serving(deduplication=True) as server, connect_to(server) as client:
        await client.admin.create_topic("t", partitions=3)
        async with client.create_producer("t", name="p") as producer:
            for call in (
                lambda: producer.send(b"x", sequence_id=1),
                lambda: producer.send_many([b"x", b"y"], sequence_ids=[1, 2]),
                lambda: producer.send_many([b"x", b"y"], keys=["k", None], sequence_ids=[1, 2]),
            ):
                with pytest.raises(InvalidArgument, match="needs a key"):
                    await call()
            await send(producer, list(range(50)), many=True)
        async with client.create_producer("t", name="p") as producer:
            assert producer.last_sequence_id < 49
            ids = await send(producer, list(range(60)), many=True)
            assert [one.is_duplicate for one in ids] == [number < 50 for number in range(60)]
        async with client.create_producer("t", name="q", routing=lambda message, count: 1) as producer:
            await producer.send(b"7", sequence_id=1)


@pytest.mark.parametrize("many", [False, True])
async def test_messages_are_delivered_when_they_are_due(many: bool) -> None:
    rng = random.Random(1)
    clock = LoopClock()
    async with serving(clock=clock) as server, connect_to(server, clock=clock) as client:
        consumer = await client.subscribe("t", "s", type="shared")
        producer = await client.create_producer("t")
        now_ms = clock.now_ms()
        due = [now_ms + rng.randrange(-100, 700) for _ in range(300)]
        values = [b"%d" % number for number in range(300)]
        if many:
            await producer.send_many(values, deliver_at=due)
        else:
            await asyncio.gather(
                *(
                    producer.send(value, deliver_at=time_ms)
                    if number % 2
                    else producer.send(value, deliver_after=(time_ms - now_ms) / 1000)
                    for number, (value, time_ms) in enumerate(zip(values, due))
                )
            )
        seen: set[int] = set()
        for _ in range(300):
            message = await consumer.receive(10.0)
            number = int(message.value or b"")
            assert 0 <= clock.now_ms() - max(due[number], now_ms) <= 120
            seen.add(number)
        assert len(seen) == 300


async def test_what_is_stored_before_a_batch_that_is_refused_has_its_ids_and_is_not_sent_again() -> None:
    """Of one group: its receipts come after the refusal, also when the producer has asked to be opened again meanwhile."""
    ledgers, clock = FakeLedgers(), LoopClock()
    async with (
        serving(ledgers=ledgers, clock=clock, max_delivery_delay_ms=60_000) as server,
        connect_to(server, clock=clock) as client,
        client.create_producer("t") as producer,
    ):
        await producer.send(b"0")
        ledgers.hold = True
        now_ms = clock.now_ms()
        due = [None, now_ms + 50, now_ms + 100_000, None]
        sending = asyncio.create_task(producer.send_many([b"1", b"2", b"too late", b"3"], deliver_at=due))
        await asyncio.sleep(0.1)  # so long does opening it again wait for what is queued
        ledgers.hold = False
        ledgers.confirm()
        with pytest.raises(
            InvalidArgument, match=r"max_delivery_delay_ms.*of 4 messages 3 are stored, the first 2"
        ) as failed:
            await sending
        ids = failed.value.details["ids"]
        assert [one is None for one in ids] == [False, False, True, False]
        await producer.send(b"4")
        async with client.subscribe("t", "s", start="earliest") as consumer:
            messages = await take(consumer, 5)
            assert [one.value for one in messages] == [b"0", b"1", b"2", b"3", b"4"]
            assert [one.id for one in messages[1:4]] == [*ids[:2], ids[3]]
            assert await consumer.last_message_id() == messages[-1].id


async def test_send_timeout_says_that_too_many_messages_are_delayed() -> None:
    async with (
        serving(max_delayed_messages=2) as server,
        connect_to(server) as client,
        client.create_producer("t", send_timeout=0.3) as producer,
    ):
        for _ in range(2):
            await producer.send(b"", deliver_after=3600)
        with pytest.raises(SendTimeout, match="cannot store messages for now: 2 messages of the topic wait"):
            await producer.send(b"", deliver_after=3600)


async def test_what_is_refused_fails_alone_and_what_fails_with_it_is_not_left_out_by_who_resumes() -> None:
    clock = LoopClock()
    async with (
        serving(clock=clock, deduplication=True, max_delivery_delay_ms=60_000) as server,
        connect_to(server, clock=clock) as client,
    ):
        async with client.create_producer("t", name="p") as producer:
            late = clock.now_ms() + 100_000
            values = [b"1", b"too late", b"3"]
            receipts = [
                producer.send_nowait(value, sequence_id=number, deliver_at=due)
                for number, (value, due) in enumerate(zip(values, (None, late, None)), 1)
            ]
            for receipt in (receipts[0], receipts[2]):
                assert not (await receipt).is_duplicate
            with pytest.raises(InvalidArgument, match="max_delivery_delay_ms"):
                await receipts[1]
            assert producer.last_sequence_id == 3
            await producer.flush()  # somebody has seen the error
            due = [None, late, late, late]  # which share a batch
            with pytest.raises(InvalidArgument, match=r"max_delivery_delay_ms.*of 4 messages 1 are stored"):
                await producer.send_many([b""] * 4, sequence_ids=[4, 5, 6, 7], deliver_at=due)
            with pytest.raises(InvalidArgument, match="open it anew"):
                await producer.send(b"8", sequence_id=8)
        async with client.create_producer("t", name="p") as producer:
            assert producer.last_sequence_id == 4
            ids = await producer.send_many([b"5", b"6"], sequence_ids=[5, 6])
            assert not any(one.is_duplicate for one in ids)
