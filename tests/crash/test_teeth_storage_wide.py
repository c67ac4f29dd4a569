"""Planted defects of several directories, deletion, garbage collection and the index: see test_teeth_storage.py."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import pytest

from magnetar.bookie import replay as replay_module
from magnetar.bookie import startup
from magnetar.bookie.checkpoint import Checkpointer
from magnetar.bookie.entry_log.entry_logs import EntryLogs
from magnetar.bookie.entry_log.log_writer import LogWriter
from magnetar.bookie.entry_log.records import STATE_ENTRY
from magnetar.bookie.fencing import Fencing
from magnetar.bookie.gc.collector import Collector
from magnetar.bookie.gc.compactor import Compactor
from magnetar.bookie.index import Location
from magnetar.bookie.journal import Journals
from magnetar.bookie.journal.journal import Journal
from magnetar.bookie.ledgers import DirtyLedgers
from magnetar.bookie.mark import encode_mark
from magnetar.proto.errors import RequestTimeout
from support.storage_check import ListedLedgers
from support.storage_index import CountedIndex
from support.storage_teeth import (
    Patch,
    acknowledged_before_the_sync,
    caught_after,
    journal_released_before_the_flush,
    mark_before_flush,
)
from support.storage_workload import (
    ADDS_BESIDE,
    RACE,
    UNEVEN,
    WIDE_CASE,
    Case,
    count_calls,
    crash_and_verify,
    fail_and_verify,
    outlive,
    rebuild_and_verify,
)


def wide_crashes() -> Iterator[Callable[[], Any]]:
    """Crash points of the wide workload, single and double."""
    for seed in range(6):
        for call in range(count_calls(seed, WIDE_CASE)):
            for power in (True, False):
                yield partial(crash_and_verify, seed, call, power=power, case=WIDE_CASE)
            yield partial(crash_and_verify, seed, call, power=True, again=call * 7 % 95, case=WIDE_CASE)


def races(case: Case) -> Iterator[Callable[[], Any]]:
    """Nobody dies."""
    for seed in range(20):
        yield partial(crash_and_verify, seed, 10_000, power=True, case=case)


def wide_faults() -> Iterator[Callable[[], Any]]:
    """A failing call of the wide workload."""
    for seed in range(4):
        for call in range(count_calls(seed, outlive(WIDE_CASE))):
            yield partial(fail_and_verify, seed, call, errno.EIO, power=True, case=WIDE_CASE)


def compaction_without_the_barrier(patch: Patch) -> None:
    """Rule 11: a round does not wait out the flush in progress, whose logs the index does not know yet."""
    real = Collector.round

    async def round_without(self: Collector, *, forced: bool = False) -> Any:
        @contextlib.asynccontextmanager
        async def at_once() -> AsyncIterator[None]:
            yield

        barrier = type("NoBarrier", (), {"exclusive": staticmethod(at_once), "stopped_by_full_disk": False})()
        kept = self._checkpointer
        self._checkpointer = self.survey._checkpointer = barrier
        try:
            return await real(self, forced=forced)
        finally:
            self._checkpointer = self.survey._checkpointer = kept

    patch.setattr(Collector, "round", round_without)


def copy_not_synced(patch: Patch) -> None:
    """Rule 11: the index is told of the copy, and the old log deleted, while the copy is in the page cache."""
    real = LogWriter.sync

    async def sync(self: LogWriter) -> None:
        if not self.path.endswith(".compacting"):
            await real(self)

    patch.setattr(LogWriter, "sync", sync)


def old_log_deleted_before_the_index_is_flushed(patch: Patch) -> None:
    """Rule 11, #1534."""

    async def nothing(self: Compactor) -> None:
        return

    patch.setattr(Compactor, "flush_index", nothing)


def compaction_puts_its_places_over_newer_ones(patch: Patch) -> None:
    """An entry that was added again while its log was compacted gets its old bytes back."""

    def replace_locations(self: CountedIndex, moved: Any) -> int:
        self.put_locations([(ledger, entry, new) for ledger, entry, _, new in moved])
        return len(moved)

    async def point_to(self: Compactor, log_id: int, sources: Any) -> bool:
        async for scanned in self._logs.scan(log_id):
            moved = [
                (at.ledger_id, at.entry_id, here := Location(log_id, at.offset, at.length), here)
                for at in scanned
                if at.data is not None and at.entry_id < STATE_ENTRY - 1
            ]
            self._index.replace_locations(moved)
        await self.flush_index()
        return True

    patch.setattr(CountedIndex, "replace_locations", replace_locations)
    patch.setattr(Compactor, "_point_to", point_to)


def metadata_error_read_as_deleted(patch: Patch) -> None:
    """Rule 10."""
    real = ListedLedgers.missing

    async def missing(self: ListedLedgers, ledger_ids: Any) -> list[int]:
        try:
            return await real(self, ledger_ids)
        except RequestTimeout:
            return list(ledger_ids)

    patch.setattr(ListedLedgers, "missing", missing)


def metadata_listed_before_the_local_ledgers(patch: Patch) -> None:
    """Rule 10: a ledger that is created in between looks deleted."""

    async def delete_missing(self: Collector) -> bool:
        existing = self.existing
        assert isinstance(existing, ListedLedgers)
        listed = existing.listed()
        await asyncio.sleep(0.2)
        alive = [*await self.survey.list_ledgers()]
        await self._fencing.delete([ledger_id for ledger_id in alive if ledger_id not in listed])
        return True

    patch.setattr(Collector, "_delete_missing", delete_missing)


def tombstone_not_durable(patch: Patch) -> None:
    """Rule 7: a deletion is answered from memory."""

    def delete(self: Journal, ledger_id: int, deleted_at_ms: int, done: Any) -> None:
        asyncio.get_running_loop().call_soon(done, ledger_id, -1, 0)

    patch.setattr(Journal, "delete", delete)


def tombstone_not_replayed(patch: Patch) -> None:
    """Rule 7: replay puts the entries back, and forgets that their ledger was deleted."""
    real = replay_module.replay

    async def replay(bookie: Any, *more: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Fencing, "apply_tombstone", lambda self, ledger_id, deleted_at_ms: None)
            return await real(bookie, *more)

    patch.setattr(startup, "replay", replay)


def last_confirmed_not_journaled(patch: Patch) -> None:
    """Rule 19: an explicit LAC is answered from memory."""

    def last_confirmed(self: Journal, ledger_id: int, confirmed: int, done: Any) -> None:
        asyncio.get_running_loop().call_soon(done, ledger_id, confirmed, 0)

    patch.setattr(Journal, "last_confirmed", last_confirmed)


def mark_goes_back(patch: Patch) -> None:
    """Rule 3: a checkpoint that took its mark earlier writes it later."""
    real = Checkpointer.move_mark
    earlier: list[Any] = []

    async def move_mark(self: Checkpointer, mark: Any, **options: Any) -> Any:
        moved = await real(self, mark, **options)
        if moved is not None:
            earlier.append(moved)
            if len(earlier) % 3 == 0:
                await self._worker.replace(self._layout.mark, encode_mark(earlier[-2]))
        return moved

    patch.setattr(Checkpointer, "move_mark", move_mark)


def one_mark_for_all_journals(patch: Patch) -> None:
    """Rule 3, #3329: marks are ordered as if there were one journal, and each lets go of what lies before the highest."""
    real = Journal.release

    def release(self: Journals, mark: Any) -> None:
        highest = max(mark.values())
        for journal in self.all:
            real(journal, highest)

    patch.setattr(Journals, "release", release)


def mark_of_the_other_journals_ahead(patch: Patch) -> None:
    """Rule 3, #4740: a checkpoint covers the first journal; the others' positions are taken when the mark is written."""
    real_positions, real_move = Journals.durable_positions, Checkpointer.move_mark
    journals: list[Journals] = []

    def durable_positions(self: Journals) -> Any:
        journals.append(self)
        return real_positions(self)

    async def move_mark(self: Checkpointer, mark: Any, **options: Any) -> Any:
        if journals and [*mark] == [*journals[-1].by_name]:
            first = next(iter(mark))
            mark = real_positions(journals[-1]) | {first: mark[first]}
        return await real_move(self, mark, **options)

    patch.setattr(Journals, "durable_positions", durable_positions)
    patch.setattr(Checkpointer, "move_mark", move_mark)


BY_WIDE_CRASHES = [
    mark_before_flush,
    journal_released_before_the_flush,
    acknowledged_before_the_sync,
    copy_not_synced,
    old_log_deleted_before_the_index_is_flushed,
    metadata_error_read_as_deleted,
    metadata_listed_before_the_local_ledgers,
    tombstone_not_durable,
    tombstone_not_replayed,
    last_confirmed_not_journaled,
    mark_goes_back,
    mark_of_the_other_journals_ahead,
]


@pytest.mark.parametrize("defect", BY_WIDE_CRASHES, ids=lambda defect: defect.__name__)
def test_a_crash_of_the_wide_workload_finds(defect: Callable[[Patch], None], monkeypatch: Patch) -> None:
    defect(monkeypatch)
    caught_after(wide_crashes())


def test_a_crash_beside_a_busy_journal_finds(monkeypatch: Patch) -> None:
    one_mark_for_all_journals(monkeypatch)
    caught_after(
        partial(crash_and_verify, seed, call, power=power, case=UNEVEN)
        for seed in range(3)
        for call in range(count_calls(seed, UNEVEN))
        for power in (True, False)
    )


def rebuilds() -> Iterator[Callable[[], Any]]:
    """The index is lost with a crash of the wide workload."""
    for seed in range(4):
        for call in range(count_calls(seed, WIDE_CASE)):
            yield partial(rebuild_and_verify, seed, call, power=True, case=WIDE_CASE)


def state_records_not_written(patch: Patch) -> None:
    """Fence, explicit LAC and tombstone stand in the index alone."""

    async def nothing(self: DirtyLedgers) -> list[Any]:
        return []

    patch.setattr(DirtyLedgers, "for_entry_logs", nothing)


def state_records_not_compacted(patch: Patch) -> None:
    """A compaction copies entries, and the state of their ledger goes with the old log."""
    real = Compactor._copy_slice

    async def copy_slice(self: Compactor, log_id: int, scanned: Any, *more: Any) -> None:
        await real(self, log_id, [record for record in scanned if record.entry_id != STATE_ENTRY], *more)

    patch.setattr(Compactor, "_copy_slice", copy_slice)


@pytest.mark.parametrize(
    "defect", [state_records_not_written, state_records_not_compacted], ids=lambda defect: defect.__name__
)
def test_a_lost_index_finds(defect: Callable[[Patch], None], monkeypatch: Patch) -> None:
    defect(monkeypatch)
    caught_after(rebuilds())


def test_a_flush_beside_a_compaction_finds_the_missing_barrier(monkeypatch: Patch) -> None:
    compaction_without_the_barrier(monkeypatch)
    caught_after(races(RACE))


def test_adds_beside_a_compaction_find_old_places_put_over_newer_ones(monkeypatch: Patch) -> None:
    compaction_puts_its_places_over_newer_ones(monkeypatch)
    caught_after(races(ADDS_BESIDE))


def failed_directory_is_not_written_elsewhere(patch: Patch) -> None:
    """A ledger directory failed while a flush was on its way: what was appended to it is not appended to the others."""
    real = EntryLogs.sync

    async def sync(self: EntryLogs) -> list[int]:
        await real(self)
        return []

    patch.setattr(EntryLogs, "sync", sync)


def test_a_fault_of_the_wide_workload_finds_what_is_not_written_elsewhere(monkeypatch: Patch) -> None:
    failed_directory_is_not_written_elsewhere(monkeypatch)
    caught_after(wide_faults())
