"""Planted defects of the storage path, one at a time: the check of test_every_disk_call must catch each of them.

A defect that it did not catch would mean that the check proves less than it says. Each is what somebody might really write.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import xxhash

from magnetar.bookie import replay as replay_module
from magnetar.bookie import startup
from magnetar.bookie.checkpoint import Checkpointer
from magnetar.bookie.engine import Bookie
from magnetar.bookie.entry_log.entry_logs import EntryLogs
from magnetar.bookie.journal import journal as journal_module
from magnetar.bookie.journal import records, recovery
from magnetar.bookie.journal.journal import Journal
from magnetar.bookie.journal.recovery import GapVerdict
from magnetar.bookie.ledgers import LedgerDescriptors
from magnetar.bookie.write_cache import WriteCache
from magnetar.proto.errors import StorageFailed
from magnetar.runtime.files import File
from support.inline_devices import InlineDiskWorker, InlineJournalDevice
from support.sim import SimFiles
from support.storage_check import Machine
from support.storage_index import CountedIndex
from support.storage_teeth import (
    Patch,
    acknowledged_before_the_sync,
    caught_after,
    journal_released_before_the_flush,
    mark_before_flush,
)
from support.storage_workload import (
    count_calls,
    crash_and_verify,
    fail_and_verify,
    outlive,
    workload,
)


def crashes() -> Iterator[Callable[[], Any]]:
    """Crash points of several seeds, single and double."""
    for seed in range(6):
        for call in range(count_calls(seed)):
            for power in (True, False):
                yield partial(crash_and_verify, seed, call, power=power)
            yield partial(crash_and_verify, seed, call, power=call % 2 > 0, again=call * 7 % 55)


def crashes_after_replay() -> Iterator[Callable[[], Any]]:
    """A kill, and a power loss at one of the later calls of the recovery."""
    for seed in range(6):
        for call in range(count_calls(seed)):
            yield partial(crash_and_verify, seed, call, power=call % 2 > 0, again=20 + call * 7 % 40)


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
    real = LedgerDescriptors.mark_dirty
    replaying = replay_module.replay

    async def replay(bookie: Any, mark: Any) -> Any:
        def unfenced(self: LedgerDescriptors, state: Any, ledger_id: int) -> None:
            state.fenced = False
            real(self, state, ledger_id)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(LedgerDescriptors, "mark_dirty", unfenced)
            return await replaying(bookie, mark)

    patch.setattr(startup, "replay", replay)


def directories_not_synced(patch: Patch) -> None:
    """Rule 12a."""
    patch.setattr(SimFiles, "sync_directory", lambda self, path: None)


def names_not_settled(patch: Patch) -> None:
    """Rule 12a: a start trusts names that only the page cache has."""
    patch.setattr(startup, "_sync_names", lambda files, root: None)


def torn_tail_is_damage(patch: Patch) -> None:
    """Rule 5: a power loss in the middle of a group would need an operator."""
    real = recovery.judge

    def judge(gap: Any, **known: Any) -> GapVerdict:
        verdict = real(gap, **known)
        return (
            GapVerdict.DAMAGE if verdict is GapVerdict.TORN_TAIL and gap.resumes_at is not None else verdict
        )

    patch.setattr(recovery, "judge", judge)


def incarnation_never_changes(patch: Patch) -> None:
    """Rule 5: what a recycled file holds of its earlier life counts."""
    for module in (records, recovery, journal_module):
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
    patch.setattr(records, "LAST_CONFIRMED", type("Blind", (), {"unpack": lambda self, data: (1, -1)})())


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
    prepared_in_the_page_cache,
    last_confirmed_not_replayed,
    replay_in_front_of_the_newer_copy,
]


@pytest.mark.parametrize("defect", BY_CRASHES, ids=lambda defect: defect.__name__)
def test_a_crash_finds(defect: Callable[[Patch], None], monkeypatch: Patch) -> None:
    defect(monkeypatch)
    caught_after(crashes())


def test_a_power_loss_after_a_replay_finds_a_journal_that_was_not_flushed(monkeypatch: Patch) -> None:
    journal_not_flushed_after_replay(monkeypatch)
    caught_after(crashes_after_replay())


def test_a_power_loss_in_a_group_finds_torn_tails_taken_for_damage(monkeypatch: Patch) -> None:
    torn_tail_is_damage(monkeypatch)
    caught_after(torn_groups())


def test_a_power_loss_after_a_kill_finds_names_not_settled(monkeypatch: Patch) -> None:
    names_not_settled(monkeypatch)
    caught_after(unsynced_names())


def failure_of_a_checkpoint_is_ignored(patch: Patch) -> None:
    """Rule 4: logged, and tried again."""
    real = Bookie.fail

    def fail(self: Bookie, error: Any) -> None:
        if self.journals.all[0].failure is not None:
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
