"""Cursors with very many holes: stored in pieces, read back in pieces, and damaged in any of them (rules 26, 32, 34, 41)."""

import asyncio
import random
from typing import Any

import pytest

from magnetar.broker.cursors import cursor as cursor_module
from magnetar.broker.cursors.core.acks import AckState, Position
from magnetar.broker.cursors.cursor import Cursor
from magnetar.broker.cursors.entries import MAX_ROWS_PER_ENTRY
from magnetar.broker.cursors.pointer import PointerRecord
from magnetar.broker.log.durability import Durability
from magnetar.broker.settings import BrokerSettings
from magnetar.proto.errors import MagnetarError, NotEnoughBookies
from support.broker_kit import settle
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore

PATH = "/cursors/billing"
MESSAGES = 4  # of each entry


class OneLedger:
    """A topic of one open ledger."""

    def normalise(self, position: Position) -> Position:
        """As it is."""
        return position


class Stage:
    """What outlives a broker, and a cursor on it."""

    def __init__(self, **settings: Any) -> None:
        self.ledgers, self.metadata = FakeLedgers(), MemoryMetadataStore()
        self.settings = BrokerSettings(cursor_flush_interval_ms=60_000, **settings)

    def cursor(self) -> Cursor:
        """Of a broker that was just started."""
        state = AckState(OneLedger(), (1, 0, 0))
        return Cursor(
            PATH, state, self.metadata, self.ledgers, self.settings, refuse, Durability(1, 1, 1).of_ledger
        )

    async def with_holes(self, count: int, *, whole: bool = False) -> Cursor:
        """Every second entry acknowledged, but its first message unless `whole`; all of it in one snapshot."""
        cursor = self.cursor()
        await cursor.create(1)
        starts = [(2 * number + 1 << 20) + (not whole) for number in range(count)]
        cursor.state.merge((1, 0, 0), [(1, starts, [start | 0xFFFFF for start in starts])])
        cursor.redeliveries_changed()
        await cursor.flush()
        return cursor

    async def recovered(self) -> Cursor:
        """By the next broker; the one before was killed."""
        cursor = self.cursor()
        assert await cursor.recover(OneLedger())
        cursor.state.check()
        return cursor

    async def pointer(self) -> PointerRecord:
        stored = await self.metadata.get(PATH)
        assert stored is not None
        return PointerRecord.decode(stored.value, PATH)


def refuse(error: MagnetarError) -> None:
    raise AssertionError(error)


def acknowledged(cursor: Cursor) -> list[tuple[int, int]]:
    ranges = cursor.state.acked.by_ledger.get(1)
    return [] if ranges is None else list(ranges)


async def turns_of(work: Any) -> int:
    """How often something else had its turn meanwhile."""
    turns = 0
    task = asyncio.ensure_future(work)
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    await task
    return turns


@pytest.mark.parametrize("inline", [True, False])
async def test_200_000_holes_survive_in_small_entries_with_a_turn_of_the_loop_for_each(inline: bool) -> None:
    stage = Stage(max_inline_cursor_bytes=1 << 16 if inline else 1)
    cursor = await stage.with_holes(200_000)
    cursor.ack(1, 400_001, [0], [0], MESSAGES)
    cursor.ack(1, 7, [0], [0], MESSAGES)
    await cursor.flush()
    (ledger,) = stage.ledgers.ledgers.values()
    pieces = 200_000 // MAX_ROWS_PER_ENTRY
    assert (
        len(ledger.entries) == pieces + 2
    )  # a last one, in which the mark-delete position would be, and the delta
    assert max(map(len, ledger.entries)) < 32_000
    assert len(ledger.entries[-1]) < 100
    assert (len((await stage.pointer()).snapshot) > 1) == inline
    again = stage.cursor()
    assert await turns_of(again.recover(OneLedger())) > pieces
    assert again.recovered_from is None
    assert again.state.range_count == 200_001
    assert acknowledged(again) == acknowledged(cursor)


async def test_a_cursor_that_no_ledger_takes_goes_into_its_pointer_whole() -> None:
    stage = Stage()
    stage.ledgers.fail_create.extend([NotEnoughBookies("none")] * 2)
    cursor = await stage.with_holes(20_000, whole=True)
    assert not stage.ledgers.ledgers
    cursor.ack(1, 0, [0], [2], MESSAGES)
    await cursor.close()  # it is small, for its size: it moves into the pointer
    again = await stage.recovered()
    assert acknowledged(again) == acknowledged(cursor)
    assert again.state.mark_delete == (1, 0, 3)
    assert (await stage.pointer()).ledger_id == -1


@pytest.mark.parametrize("place", ["first piece", "a piece", "last piece", "a delta", "last entry", "all"])
async def test_what_is_damaged_costs_what_stands_in_it(place: str) -> None:
    """The ledger has three pieces, one without ranges, and three deltas; the pointer has the mark alone."""
    stage = Stage(max_inline_cursor_bytes=1)
    cursor = await stage.with_holes(3 * MAX_ROWS_PER_ENTRY, whole=True)
    end = 6 * MAX_ROWS_PER_ENTRY
    pieces = [
        set(range(2 * MAX_ROWS_PER_ENTRY * n + 1, 2 * MAX_ROWS_PER_ENTRY * (n + 1), 2)) for n in range(3)
    ]
    deltas = [{end + 10 * number} for number in range(3)]
    for delta in deltas:
        for entry in delta:
            cursor.ack(1, entry, [0], [MESSAGES - 1], MESSAGES)
        await cursor.flush()
    (ledger,) = stage.ledgers.ledgers
    contents = [*pieces, set(), *deltas]
    assert len(stage.ledgers.ledgers[ledger].entries) == len(contents)
    damaged = {"first piece": {0}, "a piece": {1}, "last piece": {2}, "a delta": {5}, "last entry": {6},
               "all": set(range(7))}[place]  # fmt: skip
    stage.ledgers.damaged = {(ledger, number) for number in damaged}
    again = await stage.recovered()
    assert again.recovered_from == (1, 0, 0)
    kept = set().union(*(entries for number, entries in enumerate(contents) if number not in damaged))
    entries = {entry for first, last in acknowledged(again) for entry in range(first >> 20, (last >> 20) + 1)}
    assert entries == kept
    # It goes on: what is acknowledged now is durable, in a ledger of its own.
    again.ack(1, 0, [0], [MESSAGES - 1], MESSAGES)
    await again.flush()
    stage.ledgers.damaged = set()
    last = await stage.recovered()
    assert acknowledged(last) == acknowledged(again)
    assert last.state.mark_delete == again.state.mark_delete


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_acknowledged_while_a_snapshot_is_written_is_not_lost(seed: int) -> None:
    """Receipts are for what came before the flush that they waited for, however the state moves between two pieces."""
    rng = random.Random(seed)
    stage = Stage(max_inline_cursor_bytes=1 << 20 if seed % 2 else 1, max_cursor_ledger_entries=1)
    cursor = await stage.with_holes(4 * MAX_ROWS_PER_ENTRY, whole=True)
    stage.ledgers.hold = True
    receipted: set[int] = set()

    def acknowledge(entries: list[int], before: tuple[int, ...] | range = ()) -> None:
        """The receipt is for `before` as well, which is in the state already."""
        for entry in entries:
            cursor.ack(1, entry, [0], [MESSAGES - 1], MESSAGES)
        entries += before

        def durable(error: MagnetarError | None) -> None:
            if error is None:
                receipted.update(entries)

        cursor.changed(durable)

    most = 8 * MAX_ROWS_PER_ENTRY
    acknowledge([most], before=range(1, most, 2))
    front = 0
    while True:
        stage.ledgers.confirm(1)
        await settle(30)
        if receipted:
            break
        if rng.random() < 0.7:  # the mark-delete position runs over ranges whose piece is still to be written
            acknowledge(list(range(front, front + 7 * MAX_ROWS_PER_ENTRY, 2)))
            front += 7 * MAX_ROWS_PER_ENTRY
        acknowledge([rng.randrange(most) for _ in range(3)])
    for writer in stage.ledgers.writers.values():  # what was not confirmed is lost in the crash
        del writer.ledger.entries[writer.last_add_confirmed + 1 :]
    again = await stage.recovered()
    for entry in receipted:
        assert not again.state.unacked(1, entry, 0, MESSAGES - 1), f"entry {entry} was receipted"
    assert again.state.mark_delete <= cursor.state.mark_delete
    await cursor.close(fenced=True)


@pytest.mark.parametrize("after_pieces", [0, 1, 3, 5])
async def test_a_seek_while_a_snapshot_is_written_takes_back_what_was_written(after_pieces: int) -> None:
    stage = Stage(max_inline_cursor_bytes=1, max_cursor_ledger_entries=1)  # each change is a snapshot
    cursor = await stage.with_holes(4 * MAX_ROWS_PER_ENTRY, whole=True)
    cursor.ack(1, 0, [0], [MESSAGES - 1], MESSAGES)
    stage.ledgers.hold = True
    flushed = asyncio.ensure_future(cursor.flush())
    for _ in range(after_pieces):
        await settle(10)
        stage.ledgers.confirm(1)
    await settle(10)
    cursor.reset((1, 0, 0))
    cursor.ack(1, 5, [0], [0], MESSAGES)
    while not flushed.done():
        stage.ledgers.confirm(1)
        await settle(10)
    # The receipt was for the acknowledgement before the seek: it is stored, or the seek is, and no mixture.
    crashed = await stage.recovered()
    first = (crashed.state.mark_delete, crashed.state.range_count)
    assert first in [((1, 2, 0), 4 * MAX_ROWS_PER_ENTRY - 1), ((1, 0, 0), 1)]


async def test_what_is_acknowledged_after_a_seek_stands_alone() -> None:
    stage = Stage(max_inline_cursor_bytes=1)
    cursor = await stage.with_holes(100, whole=True)
    cursor.reset((1, 0, 0))
    cursor.ack(1, 5, [0], [0], MESSAGES)
    await cursor.flush()
    again = await stage.recovered()
    assert again.state.mark_delete == (1, 0, 0)
    assert acknowledged(again) == [(5 << 20, 5 << 20)]
    assert len(stage.ledgers.ledgers) == 1, "what it left is deleted"


async def test_a_ledger_is_left_when_its_deltas_have_more_rows_than_reading_them_is_worth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cursor_module, "_MIN_DELTA_ROWS", 50)
    stage = Stage(max_inline_cursor_bytes=1)
    cursor = await stage.with_holes(100)
    entries = 0
    for number in range(300):
        cursor.ack(1, 1_000 + 2 * number, [0], [0], MESSAGES)
        await cursor.flush()
        await settle()  # the former ledger goes a moment later
        (ledger,) = stage.ledgers.ledgers.values()
        entries = max(entries, len(ledger.entries))
    assert 50 < entries < 120
    assert len(stage.ledgers.deleted) >= 3
    assert (await stage.recovered()).state.range_count == 400


async def test_a_wave_of_acknowledgements_is_several_entries_and_no_snapshot() -> None:
    """Not even 30,000 ranges at once make a snapshot of everything."""
    stage = Stage(max_inline_cursor_bytes=1)
    cursor = await stage.with_holes(1)
    (ledger,) = stage.ledgers.ledgers
    for number in range(30_000):
        cursor.ack(1, 1_000 + 2 * number, [1], [1], MESSAGES)
    await cursor.flush()
    assert list(stage.ledgers.ledgers) == [ledger]
    assert 8 <= len(stage.ledgers.ledgers[ledger].entries) <= 12
    assert (await stage.recovered()).state.range_count == 30_001
