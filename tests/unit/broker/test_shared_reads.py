"""Readers of the same region share their reads."""

import asyncio
from collections import deque

import pytest

from magnetar.broker.log.shared_reads import SharedReads
from magnetar.proto import commands as c
from magnetar.proto.errors import BookieUnavailable, EntryDamaged, MagnetarError
from support.broker_kit import TOPIC, FakeClient, running_broker, settle
from support.fake_ledger import FakeLedgers

ENTRIES, SIZE = 100, 10
FLOW = c.Flow(0, 1, 1_000)


class Bookie:
    """A ledger of entries of ten bytes; reads end when the test says so."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.shared = SharedReads(limit)
        self.asked: list[tuple[int, int]] = []
        self.answers: deque[asyncio.Future[None]] = deque()

    def read(self, first: int, max_bytes: int = 100, entry_bytes: int = SIZE) -> asyncio.Task[list[bytes]]:
        """Somebody wants entries."""

        async def fetch(first: int, last: int) -> list[bytes]:
            self.asked.append((first, last))
            self.answers.append(asyncio.get_running_loop().create_future())
            await self.answers[-1]
            return self.entries(first, min(last, first + max_bytes // SIZE - 1))

        wanted = self.shared.read(7, first, ENTRIES - 1, fetch, max_bytes=max_bytes, entry_bytes=entry_bytes)
        return asyncio.get_running_loop().create_task(wanted)

    def entries(self, first: int, last: int) -> list[bytes]:
        """As they are stored."""
        return [b"%010d" % number for number in range(first, last + 1)]

    async def answer(self, error: MagnetarError | None = None) -> None:
        """The oldest read ends."""
        answer = self.answers.popleft()
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)
        await settle(5)


async def test_who_wants_the_same_waits_for_the_read_in_flight() -> None:
    bookie = Bookie()
    readers = [bookie.read(0) for _ in range(20)]
    await settle(5)
    assert len(bookie.asked) == 1
    await bookie.answer()
    assert {tuple(reader.result()) for reader in readers} == {tuple(bookie.entries(0, 9))}
    assert [await bookie.read(3)] == [
        bookie.entries(3, 9)
    ]  # what comes after it is read by whoever needs it first
    assert len(bookie.asked) == 1
    assert bookie.shared.joined == 20
    assert bookie.shared.fetched_bytes == 100


async def test_a_reader_behind_reads_up_to_where_a_read_in_flight_begins() -> None:
    bookie = Bookie()
    ahead = bookie.read(8)
    await settle(5)
    behind, within = bookie.read(5), bookie.read(12)
    await settle(5)
    assert bookie.asked == [(8, 99), (5, 7)]
    await bookie.answer()
    await bookie.answer()
    assert behind.result() == bookie.entries(5, 7)
    assert ahead.result() == bookie.entries(8, 17)
    assert within.result() == bookie.entries(12, 17)


async def test_entries_that_are_larger_than_expected_are_read_by_whoever_waited_in_vain() -> None:
    bookie = Bookie()
    first, second = bookie.read(0, entry_bytes=1), bookie.read(50, entry_bytes=1)
    await settle(5)
    assert len(bookie.asked) == 1
    await bookie.answer()
    assert first.result() == bookie.entries(0, 9)
    await bookie.answer()
    assert second.result() == bookie.entries(50, 59)


async def test_who_gives_up_does_not_take_the_others_along() -> None:
    bookie = Bookie()
    first, second, third = bookie.read(0), bookie.read(0), bookie.read(1)
    await settle(5)
    first.cancel()
    await settle(5)
    bookie.answers.popleft()
    assert len(bookie.asked) > 1
    while bookie.answers:
        await bookie.answer()
    assert second.result() == bookie.entries(0, 9)
    assert third.result()[0] == bookie.entries(1, 1)[0]
    assert not bookie.shared._in_flight


async def test_an_error_is_for_those_who_asked_for_that_entry_only() -> None:
    bookie = Bookie()
    first, second, neighbour = bookie.read(0), bookie.read(0), bookie.read(1)
    await settle(5)
    await bookie.answer(EntryDamaged("entry 0 is damaged"))
    for failed in (first, second):
        with pytest.raises(EntryDamaged, match="entry 0 is damaged"):
            await failed
    await bookie.answer()
    assert neighbour.result() == bookie.entries(1, 10)
    retried = bookie.read(0)
    await settle(5)
    await bookie.answer()
    assert retried.result()[:2] == bookie.entries(0, 1)


async def test_the_window_keeps_to_its_limit() -> None:
    bookie = Bookie(limit=20 * (SIZE + 250))
    for first in range(0, 100, 10):
        reading = bookie.read(first)
        await settle(5)
        await bookie.answer()
        assert len(await reading) == 10
        assert bookie.shared.used <= bookie.shared.limit
    assert await bookie.read(85) == bookie.entries(85, 94)
    bookie.read(0)
    await settle(5)
    assert bookie.asked[-1][0] == 0
    await bookie.answer()


# --- a whole broker --------------------------------------------------------------------------------------------------


async def test_twenty_readers_from_the_start_cost_one_readers_reads_and_the_tail_none() -> None:
    ledgers = FakeLedgers()
    async with running_broker(
        ledgers, read_bytes=2_000, read_ahead_bytes=4_000, max_ledger_entries=40, memory_budget_bytes=1 << 20
    ) as broker:
        producer = FakeClient(broker)
        await producer.producer()
        sent = [b"%0100d" % number for number in range(100)]
        for number, value in enumerate(sent):
            producer.publish(value, first=number)
            await producer.confirmed(number + 1)
        readers = [FakeClient(broker) for _ in range(20)]
        for reader in readers:
            await reader.consumer(subscription="", durable=False, permits=0)
        ledgers.reads = 0
        for reader in readers:
            reader.frame(FLOW)
        for reader in readers:
            assert await reader.received(100) == sent
        figures = broker.figures()
        assert ledgers.reads < 2 * sum(len(value) for value in sent) / 2_000 + 20
        assert figures["ledger_read_bytes_total"] < 2 * figures["entry_read_bytes_total"] / 20
        # All are readers of the tail now: what comes is not read any more.
        reads = ledgers.reads
        producer.publish(b"new", first=100)
        for reader in readers:
            assert (await reader.received(101))[-1] == b"new"
        assert ledgers.reads == reads


async def test_a_reader_far_behind_leaves_the_cache_to_the_tail_and_comes_back_to_it() -> None:
    """What the tail reader has not passed stays; for the one at the start of the topic no more than the window does."""
    async with running_broker(read_bytes=2_000, read_ahead_bytes=8_000) as broker:
        producer, behind, tail = FakeClient(broker), FakeClient(broker), FakeClient(broker)
        await producer.producer()
        sent = [b"%0200d" % number for number in range(240)]

        async def publish(first: int, end: int) -> None:
            for number in range(first, end):
                producer.publish(sent[number], first=number)
                await producer.confirmed(number + 1)

        await publish(0, 100)
        await behind.consumer(1, "behind", permits=1)
        await behind.received(1)
        await tail.consumer(1, "tail", permits=100, start=("latest", None))
        reads = broker.dispatched.reads
        await publish(100, 200)
        assert await tail.received(100) == sent[100:200]
        topic = broker.topics[str(TOPIC)]
        assert topic.cache.used < 1.5 * 8_000
        tail.frame(c.Flow(0, 1, 0))
        await publish(200, 240)  # the tail reader has no permits: these wait for it
        assert 40 * 600 < topic.cache.used < 40 * 800 + 1.5 * 8_000
        tail.frame(FLOW)
        assert await tail.received(140) == sent[100:]
        assert broker.dispatched.reads == reads, "the tail was read from the ledger"
        behind.frame(FLOW)
        assert await behind.received(240) == sent
        assert 100 < broker.dispatched.reads < 240, "what was in the window was read as well"
        reads = broker.dispatched.reads
        producer.publish(b"new", first=240)
        assert (await behind.received(241))[-1] == b"new"
        assert broker.dispatched.reads == reads


async def test_reads_that_wait_for_a_bookie_are_counted_in_the_budget() -> None:
    """A thousand subscriptions whose bookies are slow ask for small reads: what may come at once is bounded."""
    async with running_broker(memory_budget_bytes=1 << 20, read_bytes=100_000) as broker:
        producer = FakeClient(broker)
        await producer.producer()
        producer.publish(b"x")
        await producer.confirmed(1)
        topic = broker.topics[str(TOPIC)]
        asked: list[int] = []
        release = asyncio.Event()

        async def read(ledger: int, first: int, *, max_bytes: int) -> list[bytes]:
            asked.append(max_bytes)
            await release.wait()
            raise BookieUnavailable("away")

        topic.log.read = read  # type: ignore[method-assign, assignment]
        clients = [FakeClient(broker) for _ in range(10)]
        for number, client in enumerate(clients):
            await client.consumer(1, f"s-{number}")
        await settle()
        assert asked == [100_000] * 3 + [64 * 1024] * 7
        for client in clients:
            client.close()
        release.set()
        await settle()
        assert broker.figures()["read_ahead_bytes"] == 0
