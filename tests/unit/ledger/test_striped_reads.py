"""Reads of striped ledgers: in shares, and the same as entry by entry whatever is missing, damaged, down, slow or cut."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.ledger import LedgerReader, LedgerSettings, LedgerWriter
from magnetar.proto.errors import (
    BookieUnavailable,
    EntryDamaged,
    EntryNotFound,
    LedgerNotFound,
    MagnetarError,
)
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from support.bookies import Bookies, Confirmations, FakeBookie

HASTY = LedgerSettings(explicit_lac_interval_s=0, speculative_read_s=0.02)
NAMES = ("b1", "b2", "b3", "b4", "b5", "b6")
SHAPES = [(2, 1, 1), (3, 2, 2), (3, 1, 1), (4, 2, 2), (5, 3, 2), (5, 4, 2), (6, 5, 3)]


async def closed(
    bookies: Bookies, shape: tuple[int, int, int], count: int, size: Callable[[int], int] = lambda _: 8
) -> LedgerWriter:
    e, qw, qa = shape
    writer = await bookies.client(HASTY).create(ensemble_size=e, write_quorum=qw, ack_quorum=qa)
    confirmed = Confirmations()
    for number in range(count):
        writer.append((b"%d" % number).ljust(size(number), b"."), confirmed)
    await confirmed.count(count)
    await writer.close()
    for bookie in bookies.values():
        bookie.calls.clear()
    return writer


def numbers(entries: list[bytes]) -> list[int]:
    return [int(entry[LEDGER_ENTRY_HEADER_BYTES:].rstrip(b".")) for entry in entries]


def reads(bookies: Bookies) -> dict[str, int]:
    """Requests by bookie, of those that were asked."""
    found = {name: sum(call[0] == "read" for call in bookie.calls) for name, bookie in bookies.items()}
    return {name: count for name, count in found.items() if count}


# --- as entry by entry -------------------------------------------------------------------------------------------------


class Trouble:
    """What is wrong with the copies of a ledger, and what reading an entry must give therefore."""

    def __init__(self, writer: LedgerWriter, bookies: Bookies, rng: random.Random, count: int) -> None:
        self.metadata = writer.metadata
        self.down = [name for name in bookies if rng.random() < 0.15]
        self.copies: dict[int, list[type[MagnetarError] | None]] = {}
        holes, damages = rng.choice([0, 0.05, 0.5]), rng.choice([0, 0.05, 0.3])
        for entry_id in range(count):
            ensemble = self.metadata.ensemble_of(entry_id).bookies
            for position in self.metadata.striping.write_set(entry_id):
                name, key = ensemble[position], (writer.ledger_id, entry_id)
                state: type[MagnetarError] | None = None
                if rng.random() < holes:
                    del bookies[name].entries[key]
                    state = EntryNotFound
                elif rng.random() < damages:
                    bookies[name].entries[key] = bookies[name].entries[key][:-1] + b"?"
                    state = EntryDamaged
                self.copies.setdefault(entry_id, []).append(BookieUnavailable if name in self.down else state)
        for name in self.down:
            bookies[name].fail(BookieUnavailable("down"))

    def error(self, entry_id: int) -> type[MagnetarError] | None:
        """None: it can be read."""
        states = self.copies[entry_id]
        for kind in (None, BookieUnavailable, EntryDamaged):
            if kind in states:
                return kind
        return EntryNotFound


async def read_up_to_the_end(
    reader: LedgerReader, trouble: Trouble, first: int, last: int, limit: int
) -> None:
    """In as many reads as it takes; every read is looked at."""
    while first <= last:
        wrong = [entry_id for entry_id in range(first, last + 1) if trouble.error(entry_id)]
        expected = trouble.error(wrong[0]) if wrong else None
        if expected and (not limit or wrong[0] == first):  # with a limit, what comes before it is given first
            with pytest.raises(expected):
                await reader.read(first, last, max_bytes=limit)
            return
        entries = await reader.read(first, last, max_bytes=limit)
        assert numbers(entries) == list(range(first, first + len(entries)))
        assert entries
        assert not wrong or first + len(entries) <= wrong[0]
        assert not limit or len(entries) == 1 or sum(map(len, entries)) <= limit
        assert limit or first + len(entries) == last + 1
        first += len(entries)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_any_range_with_any_holes_and_any_limit_is_as_entry_by_entry(seed: int) -> None:
    async def play() -> None:
        rng = random.Random(seed)
        bookies = Bookies(*NAMES)
        count = rng.randint(1, 60)
        largest = rng.choice([10, 300])
        writer = await closed(
            bookies, rng.choice(SHAPES), count, lambda number: len(str(number)) + rng.randint(0, largest)
        )
        trouble = Trouble(writer, bookies, rng, count)
        reader = await bookies.client(HASTY).open(writer.ledger_id, recover=False)
        for _ in range(3):
            first = rng.randrange(count)
            last = rng.randint(first, count - 1)
            await read_up_to_the_end(reader, trouble, first, last, rng.choice([0, 1, 100, 1000, 10**6]))

    asyncio.run(play())


@pytest.mark.parametrize("shape", [(3, 2, 2), (5, 3, 2)])
async def test_rule_14_a_damaged_entry_is_never_absent(shape: tuple[int, int, int]) -> None:
    bookies = Bookies(*NAMES)
    writer = await closed(bookies, shape, 100)
    reader = await bookies.client(HASTY).open(writer.ledger_id, recover=False)
    damaged = 0
    for bookie in bookies.values():
        if (entry := bookie.entries.get((writer.ledger_id, 50))) is not None:
            bookie.entries[writer.ledger_id, 50] = entry[:-1] + b"?"
            damaged += 1
            if damaged < shape[1]:
                assert numbers(await reader.read(0, 99)) == list(range(100))
    assert numbers(await reader.read(0, 99, max_bytes=10**6)) == list(range(50))
    with pytest.raises(EntryDamaged):
        await reader.read(50, 99)
    assert numbers(await reader.read(51, 99)) == list(range(51, 100))


# --- how many requests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "asked"), [((3, 2, 2), 2), ((4, 2, 2), 2), ((5, 3, 2), 2), ((6, 2, 2), 3), ((3, 1, 1), 3)]
)
async def test_a_range_is_one_request_for_each_of_few_bookies(
    shape: tuple[int, int, int], asked: int
) -> None:
    bookies = Bookies(*NAMES)
    writer = await closed(bookies, shape, 500)
    reader = await bookies.client(HASTY).open(writer.ledger_id, recover=False)
    assert numbers(await reader.read(3, 499)) == list(range(3, 500))
    assert list(reads(bookies).values()) == [1] * asked
    for bookie in bookies.values():
        bookie.calls.clear()
    # Few entries that one bookie has all of.
    assert numbers(await reader.read(7, 6 + shape[1])) == list(range(7, 7 + shape[1]))
    assert sum(reads(bookies).values()) == 1


async def test_a_byte_limit_is_met_without_reading_much_more_than_it() -> None:
    bookies = Bookies(*NAMES)
    rng = random.Random(5)
    writer = await closed(bookies, (3, 2, 2), 1000, lambda _: rng.randint(4, 1000))
    answered = 0
    right = FakeBookie.read

    async def read(self: FakeBookie, *arguments: Any, **options: Any) -> Any:
        nonlocal answered
        entries, confirmed = await right(self, *arguments, **options)
        answered += sum(map(len, entries))
        return entries, confirmed

    reader = await bookies.client(HASTY).open(writer.ledger_id, recover=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeBookie, "read", read)
        position = got = rounds = 0
        while position < 1000:
            entries = await reader.read(position, 999, max_bytes=50_000)
            position += len(entries)
            got += sum(map(len, entries))
            rounds += 1
    assert answered < 1.3 * got
    assert rounds < 1.4 * got / 50_000


async def test_entries_larger_than_the_limit_are_read_one_by_one() -> None:
    bookies = Bookies(*NAMES)
    writer = await closed(bookies, (3, 2, 2), 12, lambda _: 10_000)
    reader = await bookies.client(HASTY).open(writer.ledger_id, recover=False)
    for number in range(12):
        assert numbers(await reader.read(number, 11, max_bytes=9_000)) == [number]
    assert sum(reads(bookies).values()) == 12


# --- bookies that are down, slow or do not know --------------------------------------------------------------------------


async def test_a_bookie_that_is_down_costs_one_failure() -> None:
    bookies = Bookies(*NAMES)
    writer = await closed(bookies, (3, 2, 2), 300)
    for name in writer.metadata.last_ensemble.bookies:
        reader = await bookies.client(HASTY).open(writer.ledger_id, recover=False)
        bookies[name].fail(BookieUnavailable("down"))
        for first in range(0, 300, 100):
            assert numbers(await reader.read(first, first + 99)) == list(range(first, first + 100))
        assert reads(bookies).get(name, 0) <= 1, "asked last from then on"
        bookies[name].fail(None)
        for bookie in bookies.values():
            bookie.calls.clear()


async def test_with_too_many_down_the_error_says_so_and_what_can_be_read_is() -> None:
    bookies = Bookies(*NAMES)
    writer = await closed(bookies, (4, 2, 2), 40)
    reader = await bookies.client(HASTY).open(writer.ledger_id, recover=False)
    ensemble = writer.metadata.last_ensemble.bookies
    for position in (1, 2):  # the write set of entries 4k + 1
        bookies[ensemble[position]].fail(BookieUnavailable("down"))
    assert numbers(await reader.read(0, 39, max_bytes=10_000)) == [0]
    with pytest.raises(BookieUnavailable):
        await reader.read(1, 39, max_bytes=10_000)
    assert numbers(await reader.read(2, 39, max_bytes=10_000)) == [2, 3, 4]


async def test_the_first_answer_counts_even_if_it_is_that_of_a_slow_bookie() -> None:
    bookies = Bookies(*NAMES)
    writer = await closed(bookies, (3, 2, 2), 30)
    reader = await bookies.client(HASTY).open(writer.ledger_id, recover=False)
    for bookie in bookies.values():
        bookie.hold()
    before = len(asyncio.all_tasks())
    reading = asyncio.create_task(reader.read(0, 29))
    await asyncio.sleep(0.1)
    asked = reads(bookies)
    assert len(asked) == 3, "everybody, after speculative_read_s"
    for name in writer.metadata.last_ensemble.bookies:
        bookies[name].release()
    assert numbers(await asyncio.wait_for(reading, 2)) == list(range(30))
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == before


async def test_a_cancelled_read_leaves_nothing_behind() -> None:
    bookies = Bookies(*NAMES)
    writer = await closed(bookies, (5, 3, 2), 30)
    reader = await bookies.client(HASTY).open(writer.ledger_id, recover=False)
    for bookie in bookies.values():
        bookie.hold()
    before = len(asyncio.all_tasks())
    reading = asyncio.create_task(reader.read(0, 29))
    await asyncio.sleep(0.05)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert len(asyncio.all_tasks()) == before


async def test_a_deleted_ledger_says_so() -> None:
    bookies = Bookies(*NAMES)
    writer = await closed(bookies, (3, 2, 2), 30)
    reader = await bookies.client(HASTY).open(writer.ledger_id, recover=False)
    for bookie in bookies.values():
        bookie.fail(LedgerNotFound("deleted"))
    with pytest.raises(LedgerNotFound):
        await reader.read(0, 29)


async def test_ranges_across_ensembles_come_from_each() -> None:
    bookies = Bookies(*NAMES)
    client = bookies.client(HASTY)
    writer = await client.create(ensemble_size=3, write_quorum=2, ack_quorum=2)
    confirmed = Confirmations()
    for number in range(90):
        if number in (31, 62):
            bookies[writer.metadata.last_ensemble.bookies[number % 3]].fail(BookieUnavailable("down"))
        writer.append(b"%d" % number, confirmed)
        await confirmed.count(number + 1)
    for bookie in bookies.values():
        bookie.fail(None)
    await writer.close()
    assert len(writer.metadata.ensembles) == 3
    reader = await client.open(writer.ledger_id, recover=False)
    for limit in (0, 1000):
        position = 5
        while position < 90:
            entries = await reader.read(position, 89, max_bytes=limit)
            assert numbers(entries) == list(range(position, position + len(entries)))
            position += len(entries)
