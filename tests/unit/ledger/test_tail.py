"""Readers of open ledgers: LedgerReader.follow and wait, changes of the ensemble and a deletion under a reader."""

import asyncio
from typing import Any

import pytest

from magnetar.ledger import LedgerReader, LedgerSettings, LedgerWriter
from magnetar.ledger import reader as tail_module
from magnetar.ledger.reader import LedgerTail
from magnetar.proto.errors import BookieUnavailable, LedgerNotFound
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from support.bookies import Bookies, Confirmations, FakeBookie
from support.virtual_time import in_virtual_time

FAST = LedgerSettings(explicit_lac_interval_s=0.01, speculative_read_s=0.05)
NO_LAC = LedgerSettings(explicit_lac_interval_s=0)
SHAPES = [(1, 1, 1), (3, 3, 2), (3, 2, 2), (5, 3, 2)]
DOWN = BookieUnavailable("down")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "POLL_S", 0.3)
    monkeypatch.setattr(tail_module, "_REST_S", 0.05)


async def opened(
    bookies: Bookies, shape: tuple[int, int, int] = (3, 3, 2)
) -> tuple[LedgerWriter, LedgerReader]:
    writer = await bookies.client(FAST).create(
        ensemble_size=shape[0], write_quorum=shape[1], ack_quorum=shape[2]
    )
    return writer, await bookies.client(FAST).open(writer.ledger_id, recover=False)


async def append(writer: LedgerWriter, first: int, count: int) -> None:
    confirmed = Confirmations()
    for number in range(first, first + count):
        writer.append(b"%d" % number, confirmed)
    await confirmed.count(count)


async def take(tail: LedgerTail, count: int) -> list[int]:
    """So many entries, within five seconds."""
    numbers: list[int] = []
    while len(numbers) < count:
        entries = await asyncio.wait_for(tail.next(), 5)
        assert entries, "the tail ended"
        numbers += [int(entry[LEDGER_ENTRY_HEADER_BYTES:]) for entry in entries]
    return numbers


def polls(bookies: Bookies) -> int:
    return sum(call[0] == "wait_last_confirmed" for bookie in bookies.values() for call in bookie.calls)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_tail_tells_every_entry_in_order_until_the_ledger_is_closed(
    shape: tuple[int, int, int],
) -> None:
    bookies = Bookies("b1", "b2", "b3", "b4", "b5")
    writer, reader = await opened(bookies, shape)
    numbers: list[int] = []

    async def follow() -> None:
        async with reader.follow(0) as tail:
            async for entries in tail:
                numbers.extend(int(entry[LEDGER_ENTRY_HEADER_BYTES:]) for entry in entries)
            assert tail.ended
            assert await tail.next() == []

    follower = asyncio.create_task(follow())
    for turn in range(5):
        await append(writer, turn * 20, 20)
        await asyncio.sleep(0.005)
    await writer.close()
    await asyncio.wait_for(follower, 5)
    assert numbers == list(range(100))


async def test_rule_19_a_tail_sees_the_last_entry_of_an_idle_writer() -> None:
    bookies = Bookies("b1", "b2", "b3")
    writer, reader = await opened(bookies)
    async with reader.follow(0) as tail:
        for number in range(3):
            await append(writer, number, 1)
            assert await take(tail, 1) == [number]
    assert not reader.closed


@pytest.mark.parametrize("deaf", ["b1", "b2", "b3"])
async def test_a_hung_bookie_does_not_hold_up_a_tail(deaf: str) -> None:
    bookies = Bookies("b1", "b2", "b3")
    writer, reader = await opened(bookies)
    async with reader.follow(0) as tail:
        await append(writer, 0, 1)
        assert await take(tail, 1) == [0]
        bookies[deaf].hold()
        # The hung bookie does not take the explicit LAC, the others do.
        await append(writer, 1, 2)
        assert await take(tail, 2) == [1, 2]


async def test_failing_bookies_are_passed_over_and_asked_again() -> None:
    bookies = Bookies("b1", "b2", "b3")
    writer, reader = await opened(bookies)
    waiting = asyncio.create_task(reader.wait(timeout_s=20))
    await asyncio.sleep(0.02)
    for bookie in bookies.values():
        bookie.fail(BookieUnavailable("down"))
    async with asyncio.timeout(5):
        while polls(bookies) < 6:  # asked again and again
            await asyncio.sleep(0.01)
    loop = asyncio.get_running_loop()
    calls, began = polls(bookies), loop.time()
    await asyncio.sleep(0.2)
    assert polls(bookies) - calls <= 3 * ((loop.time() - began) / 0.05 + 1), "with a pause between attempts"
    for bookie in bookies.values():
        bookie.fail(None)
    await append(writer, 0, 2)
    assert await asyncio.wait_for(waiting, 5) in (0, 1)


async def test_a_tail_ends_when_another_owner_recovers_the_ledger_and_does_not_spin_meanwhile() -> None:
    bookies = Bookies("b1", "b2", "b3")
    writer, reader = await opened(bookies)
    for number in range(3):
        await append(writer, number, 1)
    for _ in range(5):
        await asyncio.sleep(0)
    writer.detach()  # the last entry tells of the one before it
    for bookie in bookies.values():
        bookie.fenced[writer.ledger_id] = None  # a recoverer that died
    async with reader.follow(0) as tail:
        await take(tail, 2)
        assert await tail.next(0.3) == []
        # Each of three bookies rests between two answers.
        assert polls(bookies) <= 3 * (0.3 / 0.05 + 2)
        waiting = asyncio.create_task(take(tail, 1))
        await asyncio.sleep(0)
        recovered = await bookies.client(FAST).open(writer.ledger_id, recover=True)
        assert recovered.last_add_confirmed == 2
        assert await waiting == [2]
        assert await tail.next() == []
        assert tail.ended


async def test_no_wake_up_is_lost_when_the_ledger_is_closed_or_grows_at_any_moment() -> None:
    """The news comes in any turn of the loop around the moment when the tail goes to sleep."""
    for turns in range(30):
        bookies = Bookies("b1")
        writer, reader = await opened(bookies, (1, 1, 1))
        async with reader.follow(0) as tail:
            waiting = asyncio.create_task(tail.next())
            for _ in range(turns):
                await asyncio.sleep(0)
            await writer.close()
            assert await asyncio.wait_for(waiting, 0.25) == [], f"{turns} turns: not before the poll was over"
            assert tail.ended


async def test_after_an_ensemble_change_new_bookies_are_polled_and_read() -> None:
    bookies = Bookies("b1", "b2", "b3", "b4")
    writer, reader = await opened(bookies, (2, 1, 1))
    async with reader.follow(0) as tail:
        await append(writer, 0, 2)
        assert await take(tail, 2) == [0, 1]
        for name in writer.metadata.last_ensemble.bookies:
            bookies[name].fail(BookieUnavailable("down"))
        await append(writer, 2, 4)
        assert len(writer.metadata.ensembles) > 1
        assert await take(tail, 4) == [2, 3, 4, 5]


async def test_a_deleted_ledger_ends_a_tail_with_an_error() -> None:
    bookies = Bookies("b1", "b2", "b3")
    writer, reader = await opened(bookies)
    async with reader.follow() as tail:
        waiting = asyncio.create_task(tail.next())
        await asyncio.sleep(0.02)
        await bookies.client(FAST).delete(writer.ledger_id)
        with pytest.raises(LedgerNotFound):
            await asyncio.wait_for(waiting, 5)


@in_virtual_time
async def test_wait_comes_back_without_news_in_time_and_leaves_nothing_behind() -> None:
    bookies = Bookies("b1", "b2", "b3")
    _, reader = await opened(bookies)
    before = len(asyncio.all_tasks())
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await reader.wait(timeout_s=0.1) == -1
    assert 0.05 < loop.time() - began < 0.2
    assert len(asyncio.all_tasks()) == before


async def test_a_bookie_that_answers_long_polls_at_once_does_not_make_a_busy_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def at_once(self: FakeBookie, ledger_id: int, known: int, **_: Any) -> Any:
        self.calls.append(("wait_last_confirmed", ledger_id, known))
        return -1, False, []

    monkeypatch.setattr(FakeBookie, "wait_last_confirmed", at_once)
    bookies = Bookies("b1", "b2", "b3")
    writer, reader = await opened(bookies)
    async with reader.follow() as tail:
        assert await tail.next(0.3) == []
        assert polls(bookies) <= 3 * (0.3 / 0.05 + 2)
        await append(writer, 0, 2)
        assert await take(tail, 2) == [0, 1], "found by asking the ensemble"


async def test_a_damaged_entry_that_came_with_a_poll_is_read_from_another_replica() -> None:
    bookies = Bookies("b1", "b2", "b3")
    writer, reader = await opened(bookies)
    right = FakeBookie.read

    async def read(self: FakeBookie, *arguments: Any, **options: Any) -> Any:
        entries, lac = await right(self, *arguments, **options)
        return ([entry[:-1] + b"?" for entry in entries] if self.name != "b3" else entries), lac

    async with reader.follow() as tail:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeBookie, "read", read)
            await append(writer, 0, 3)
            assert await take(tail, 3) == [0, 1, 2]


@pytest.mark.parametrize("back", [False, True])
async def test_a_confirmed_entry_on_bookies_that_the_reader_does_not_know_yet(back: bool) -> None:
    """Striped: the bookie that stayed tells of entries that only the new ones have. They did not exist, said the reader."""
    bookies = Bookies("b1", "b2", "b3", "b4", "b5")
    client, other = bookies.client(NO_LAC), bookies.client(NO_LAC)
    writer = await client.create(ensemble_size=3, write_quorum=2, ack_quorum=2)
    heard = Confirmations()
    for n in range(3):
        writer.append(b"%d" % n, heard)
        await heard.count(n + 1)
    reader = await other.open(writer.ledger_id, recover=False)
    stays, *leave = writer.metadata.last_ensemble.bookies
    for name in leave:
        bookies[name].fail(DOWN)
    for n in range(3, 9):
        writer.append(b"%d" % n, heard)
        await heard.count(n + 1)
    for name in leave:
        bookies[name].fail(None if back else DOWN)
    told = (await bookies[stays].read_last_confirmed(writer.ledger_id, fence=False))[0]
    assert told >= 4
    # What a poll, or an answer that was on its way during the change, says.
    reader.update_last_confirmed(told)
    entries = await reader.read(3, told)
    assert [entry[LEDGER_ENTRY_HEADER_BYTES:] for entry in entries] == [b"%d" % n for n in range(3, told + 1)]
    await client.close()
    await other.close()


async def test_a_ledger_that_is_deleted_under_its_reader() -> None:
    bookies = Bookies("b1", "b2", "b3")
    client, other = bookies.client(NO_LAC), bookies.client(NO_LAC)
    writer = await client.create()
    heard = Confirmations()
    for n in range(3):
        writer.append(b"%d" % n, heard)
        await heard.count(n + 1)
    reader = await other.open(writer.ledger_id, recover=False)
    await client.delete(writer.ledger_id)
    while any(bookie.entries for bookie in bookies.values()):
        await asyncio.sleep(0)
    with pytest.raises(LedgerNotFound):
        await reader.read(0, 0)
    with pytest.raises(LedgerNotFound):
        await reader.read_last_confirmed()
    await client.close()
    await other.close()
