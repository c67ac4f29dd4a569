"""Planted defects of the storage path, one at a time: the check of test_every_disk_call must catch each of them.

A defect that it did not catch would mean that the check proves less than it says. Each is what somebody might really write.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import xxhash

from magnetar.bookie import replay as replay_module
from magnetar.bookie import startup
from magnetar.bookie.checkpoint import Checkpointer
from magnetar.bookie.disk_worker import InlineDiskWorker
from magnetar.bookie.engine import Bookie
from magnetar.bookie.entry_log import STATE_ENTRY, EntryLogs, LogWriter
from magnetar.bookie.gc import Collector, Compactor, Deletion
from magnetar.bookie.index import Location
from magnetar.bookie.journal import Journals, records, recovery
from magnetar.bookie.journal import journal as journal_module
from magnetar.bookie.journal.inline import InlineJournalDevice
from magnetar.bookie.journal.journal import Journal
from magnetar.bookie.journal.recovery import Verdict
from magnetar.bookie.ledgers import LedgerStates
from magnetar.bookie.mark import encode_mark
from magnetar.bookie.write_cache import WriteCache
from magnetar.proto.errors import RequestTimeout, StorageFailed
from magnetar.runtime.files import File
from support.sim import SimFiles, SimulationFailed
from support.storage_check import Broken, ListedLedgers, Machine
from support.storage_index import CountedIndex
from support.storage_workload import (
    RACE,
    WIDE_CASE,
    count_calls,
    crash_and_verify,
    fail_and_verify,
    outlive,
    workload,
)

Patch = pytest.MonkeyPatch
# 20 s of the wide workload; all but a few defects are found within 50.
MOST_CHECKS = 1000


def crashes() -> Iterator[Callable[[], Any]]:
    """Crash points of several seeds, single and double."""
    for seed in range(6):
        for call in range(count_calls(seed)):
            for power in (True, False):
                yield partial(crash_and_verify, seed, call, power=power)
            yield partial(crash_and_verify, seed, call, power=call % 2 > 0, again=call * 7 % 55)


def faults() -> Iterator[Callable[[], Any]]:
    """A failing call."""
    for seed in range(2):
        for call in range(count_calls(seed, outlive())):
            yield partial(fail_and_verify, seed, call, errno.EIO, power=True)


def calls_of(seed: int, kind: str, path: str) -> list[int]:
    """Numbers of the calls of one kind in the workload."""
    with Machine(seed) as machine:
        found: list[int] = []
        real = machine.disk.call

        def spy(call: str, where: str, detail: object = "") -> None:
            if call == kind and path in where:
                found.append(machine.disk.calls)
            real(call, where, detail)

        machine.disk.call = spy  # type: ignore[method-assign, assignment]
        machine.start(workload, close=True)
        return found


def torn_groups() -> Iterator[Callable[[], Any]]:
    """Power losses between the write and the sync of a group."""
    for seed in range(8):
        for call in calls_of(seed, "sync", "/journal-"):
            yield partial(crash_and_verify, seed, call, power=True)


def unsynced_names() -> Iterator[Callable[[], Any]]:
    """Kills between a rename and the sync of its directory, and a power loss in the recovery."""
    for seed in range(3):
        for call in calls_of(seed, "sync_directory", ""):
            for again in (4, 6, 8):
                yield partial(crash_and_verify, seed, call, power=False, again=again)


def caught_after(checks: Iterator[Callable[[], Any]]) -> int:
    """Checks until the first that fails; they are spread, as neighbours tell the same."""
    try:
        every = list(checks)
    except Broken as error:  # the workload finds it even without a crash
        print(f"without a crash: {str(error)[:200]}")
        return 1
    step = 101
    while len(every) % step == 0:
        every.pop()
    for tried in range(min(len(every), MOST_CHECKS)):
        try:
            every[tried * step % len(every)]()
        except (Broken, SimulationFailed) as error:
            print(f"after {tried + 1} checks: {str(error)[:200]}")
            return tried + 1
    raise AssertionError(f"the planted defect passed {min(len(every), MOST_CHECKS)} checks")


def mark_before_flush(patch: Patch) -> None:
    """Rule 2: the mark is persisted before what it covers is durable."""
    real = Checkpointer._work

    async def work(self: Checkpointer, item: Any) -> Any:
        moved = await self.move_mark(item.mark) if item.mark is not None else None
        return await real(self, item) or moved

    patch.setattr(Checkpointer, "_work", work)


def journal_released_before_the_flush(patch: Patch) -> None:
    """Rule 2: old journals are let go of when the checkpoint begins."""
    real = Checkpointer.run

    async def run(self: Checkpointer, take_mark: Any) -> Any:
        if take_mark is not None:
            take_mark.__self__.release(take_mark())
        return await real(self, take_mark)

    patch.setattr(Checkpointer, "run", run)


def index_not_flushed(patch: Patch) -> None:
    """Rule 2: the location index is written, but its flush is forgotten."""

    async def nothing(self: CountedIndex) -> None:
        return

    patch.setattr(CountedIndex, "flush_locations", nothing)


def ledger_index_not_flushed(patch: Patch) -> None:
    """Rule 2, BP-46: a fence goes with the journal that held it."""

    async def nothing(self: CountedIndex) -> None:
        return

    patch.setattr(CountedIndex, "flush_ledgers", nothing)


def entry_log_not_synced(patch: Patch) -> None:
    """Rule 2: the flush ends in the page cache."""

    async def nothing(self: EntryLogs) -> None:
        return

    patch.setattr(EntryLogs, "sync", nothing)


def acknowledged_before_the_sync(patch: Patch) -> None:
    """Rule 4: the journal's bytes are written, but not synced, when they are reported durable."""

    def write(self: InlineJournalDevice, parts: list[bytes]) -> None:
        real_sync = self._sync_data
        self._sync_data = False
        try:
            real_write(self, parts)
        finally:
            self._sync_data = real_sync

    real_write = InlineJournalDevice._write
    patch.setattr(InlineJournalDevice, "_write", write)


def mark_ahead_of_the_journal(patch: Patch) -> None:
    """Rule 1: the mark is taken when it is written, long after the cache was swapped."""

    real_run, real_work = Checkpointer.run, Checkpointer._work
    late: list[Any] = []

    async def run(self: Checkpointer, take_mark: Any) -> Any:
        late.append(take_mark)
        return await real_run(self, take_mark)

    async def work(self: Checkpointer, item: Any) -> Any:
        await real_work(self, item._replace(mark=None))
        return await self.move_mark(late[-1]()) if item.mark is not None and late[-1] is not None else None

    patch.setattr(Checkpointer, "run", run)
    patch.setattr(Checkpointer, "_work", work)


def fence_not_journaled(patch: Patch) -> None:
    """Rule 6, BP-46: the fence is answered from memory."""

    def fence(self: Journal, ledger_id: int, done: Any) -> None:
        asyncio.get_running_loop().call_soon(done, ledger_id, -1, 0)

    patch.setattr(Journal, "fence", fence)


def fence_not_replayed(patch: Patch) -> None:
    """Rule 6: replay puts the entries back and forgets the fence."""
    real = LedgerStates.mark_dirty
    replaying = startup.replay

    async def replay(bookie: Any, mark: Any) -> Any:
        def unfenced(self: LedgerStates, state: Any, ledger_id: int) -> None:
            state.fenced = False
            real(self, state, ledger_id)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(LedgerStates, "mark_dirty", unfenced)
            return await replaying(bookie, mark)

    patch.setattr(startup, "replay", replay)


def directories_not_synced(patch: Patch) -> None:
    """Rule 12a."""
    patch.setattr(SimFiles, "sync_directory", lambda self, path: None)


def names_not_settled(patch: Patch) -> None:
    """Rule 12a: a start trusts names that only the page cache has."""
    patch.setattr(startup, "_settle_names", lambda files, root: None)


def torn_tail_is_damage(patch: Patch) -> None:
    """Rule 5: a power loss in the middle of a group would need an operator."""
    real = recovery.judge

    def judge(gap: Any, **known: Any) -> Verdict:
        verdict = real(gap, **known)
        return Verdict.DAMAGE if verdict is Verdict.TORN_TAIL and gap.resumes_at is not None else verdict

    patch.setattr(recovery, "judge", judge)


def incarnation_never_changes(patch: Patch) -> None:
    """Rule 5: what a recycled file holds of its earlier life counts."""
    for module in (records, recovery, journal_module, startup):
        patch.setattr(module, "incarnation_of", lambda instance, sequence: 7)


def journal_not_flushed_after_replay(patch: Patch) -> None:
    """Rule 5: the mark moves to the new journal while what was replayed is in memory only."""
    real_run = Checkpointer.run

    async def run(self: Checkpointer, take_mark: Any) -> Any:
        return await real_run(self, take_mark) if take_mark is not None else None

    patch.setattr(Checkpointer, "run", run)


def prepared_in_the_page_cache(patch: Patch) -> None:
    """Rule 12a: a recycled journal is used before its new name is durable."""

    async def prepare(
        self: InlineDiskWorker, path: str, size: int, source: str = "", *, hurry: bool = False
    ) -> None:
        if source:
            self._files.rename(source, path)
        file: File = self._files.open(path, create=True)
        file.zero_fill(file.size(), max(0, size - file.size()))
        file.close()

    patch.setattr(InlineDiskWorker, "prepare", prepare)


def last_confirmed_not_replayed(patch: Patch) -> None:
    """An explicit LAC is in the journal, and stays there."""
    patch.setattr(
        replay_module, "LAST_CONFIRMED", type("Blind", (), {"unpack": lambda self, data: (1, -1)})()
    )


def replay_in_front_of_the_newer_copy(patch: Patch) -> None:
    """An entry that is there already is kept, so a recovery's copy is lost."""
    real = WriteCache.put

    def put(self: WriteCache, ledger_id: int, entry_id: int, entry: bytes) -> None:
        if self.get(ledger_id, entry_id) is None:
            real(self, ledger_id, entry_id, entry)

    patch.setattr(WriteCache, "put", put)


BY_CRASHES = [
    mark_before_flush,
    journal_released_before_the_flush,
    index_not_flushed,
    ledger_index_not_flushed,
    entry_log_not_synced,
    acknowledged_before_the_sync,
    mark_ahead_of_the_journal,
    fence_not_journaled,
    fence_not_replayed,
    directories_not_synced,
    incarnation_never_changes,
    journal_not_flushed_after_replay,
    prepared_in_the_page_cache,
    last_confirmed_not_replayed,
    replay_in_front_of_the_newer_copy,
]


@pytest.mark.parametrize("defect", BY_CRASHES, ids=lambda defect: defect.__name__)
def test_a_crash_finds(defect: Callable[[Patch], None], monkeypatch: Patch) -> None:
    defect(monkeypatch)
    caught_after(crashes())


def test_a_power_loss_in_a_group_finds_torn_tails_taken_for_damage(monkeypatch: Patch) -> None:
    torn_tail_is_damage(monkeypatch)
    caught_after(torn_groups())


def test_a_power_loss_after_a_kill_finds_names_not_settled(monkeypatch: Patch) -> None:
    names_not_settled(monkeypatch)
    caught_after(unsynced_names())


def wide_crashes() -> Iterator[Callable[[], Any]]:
    """Crash points of the wide workload, single and double."""
    for seed in range(6):
        for call in range(count_calls(seed, WIDE_CASE)):
            for power in (True, False):
                yield partial(crash_and_verify, seed, call, power=power, case=WIDE_CASE)
            yield partial(crash_and_verify, seed, call, power=True, again=call * 7 % 95, case=WIDE_CASE)


def races() -> Iterator[Callable[[], Any]]:
    """Nobody dies."""
    for seed in range(20):
        yield partial(crash_and_verify, seed, 10_000, power=True, case=RACE)


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
        kept = self._parts
        self._parts = self.survey._parts = replace(kept, checkpointer=barrier)
        try:
            return await real(self, forced=forced)
        finally:
            self._parts = self.survey._parts = kept

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
                (at.ledger_id, at.entry_id, at, Location(log_id, at.offset, at.length))
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
        existing = self._parts.existing
        assert isinstance(existing, ListedLedgers)
        listed = existing.listed()
        await asyncio.sleep(0.2)
        alive = [*await self.survey.list_ledgers()]
        await self._deletion.delete([ledger_id for ledger_id in alive if ledger_id not in listed])
        return True

    patch.setattr(Collector, "_delete_missing", delete_missing)


def tombstone_not_durable(patch: Patch) -> None:
    """Rule 7: a deletion is answered from memory."""

    def delete(self: Journal, ledger_id: int, deleted_at_ms: int, done: Any) -> None:
        asyncio.get_running_loop().call_soon(done, ledger_id, -1, 0)

    patch.setattr(Journal, "delete", delete)


def tombstone_not_replayed(patch: Patch) -> None:
    """Rule 7: replay puts the entries back, and forgets that their ledger was deleted."""
    real = startup.replay

    async def replay(bookie: Any, *more: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Deletion, "replay", lambda self, ledger_id, deleted_at_ms: None)
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
    compaction_puts_its_places_over_newer_ones,
    metadata_error_read_as_deleted,
    metadata_listed_before_the_local_ledgers,
    tombstone_not_durable,
    tombstone_not_replayed,
    last_confirmed_not_journaled,
    mark_goes_back,
    one_mark_for_all_journals,
    mark_of_the_other_journals_ahead,
]


@pytest.mark.parametrize("defect", BY_WIDE_CRASHES, ids=lambda defect: defect.__name__)
def test_a_crash_of_the_wide_workload_finds(defect: Callable[[Patch], None], monkeypatch: Patch) -> None:
    defect(monkeypatch)
    caught_after(wide_crashes())


def test_a_flush_beside_a_compaction_finds_the_missing_barrier(monkeypatch: Patch) -> None:
    compaction_without_the_barrier(monkeypatch)
    caught_after(races())


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


def failure_of_a_checkpoint_is_ignored(patch: Patch) -> None:
    """Rule 4: logged, and tried again."""
    real = Bookie.fail

    def fail(self: Bookie, error: Any) -> None:
        if self.journals.all[0]._failed is not None:
            real(self, error)

    patch.setattr(Bookie, "fail", fail)


def failed_sync_is_taken_for_done(patch: Patch) -> None:
    """Rule 4: the journal's error is swallowed."""
    real = InlineJournalDevice._write

    def write(self: InlineJournalDevice, parts: list[bytes]) -> None:
        try:
            real(self, parts)
        except StorageFailed:
            return

    patch.setattr(InlineJournalDevice, "_write", write)


@pytest.mark.parametrize(
    "defect",
    [failure_of_a_checkpoint_is_ignored, failed_sync_is_taken_for_done],
    ids=lambda defect: defect.__name__,
)
def test_a_fault_finds(defect: Callable[[Patch], None], monkeypatch: Patch) -> None:
    defect(monkeypatch)
    caught_after(faults())


def test_the_checksum_depends_on_the_incarnation() -> None:
    """A copy of a record of another life, with the incarnation written over, is no record."""
    payload = b"an entry of an earlier life"
    header = bytearray(records.encode_record_header(11, 0, 0, 2, payload))
    header[8:16] = (12).to_bytes(8, "big")
    data = bytes(header) + payload
    unseeded = xxhash.xxh3_64_intdigest(data[8:])
    assert int.from_bytes(data[:8], "big") != unseeded
    (gap,) = records.scan_journal(lambda at, n: data[at : at + n], len(data), 12, 0)
    assert isinstance(gap, records.Gap)
    assert gap.resumes_at is None
