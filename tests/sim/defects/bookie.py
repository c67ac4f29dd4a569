"""Defects of the bookie."""

from __future__ import annotations

from typing import Any

from magnetar.bookie import Bookie, replay
from magnetar.bookie.adds import Adds
from magnetar.bookie.checkpoint import Checkpointer, _Work
from magnetar.bookie.entry_log.entry_logs import EntryLogs
from magnetar.bookie.fencing import Fencing
from magnetar.bookie.gc.compactor import Compactor
from magnetar.bookie.gc.existing_ledgers import MetadataLedgers
from magnetar.bookie.gc.survey import Survey
from magnetar.bookie.journal.records import RecordType
from magnetar.bookie.reads import Reads
from magnetar.bookie.replay import _Target
from magnetar.proto.errors import (
    BookieReadOnly,
    EntryDamaged,
    EntryNotFound,
    LedgerFenced,
    MagnetarError,
)
from sim.defects.registry import defect
from support.inline_devices import InlineJournalDevice

_adds: Any = Adds
_fencing: Any = Fencing
_checkpointer: Any = Checkpointer
_replay: Any = _Target
_replays: Any = replay


@defect
def acks_before_the_sync() -> None:
    """Rule 4."""
    device: Any = InlineJournalDevice
    begin = device.__init__

    def unsynced(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **{**options, "sync_data": False})

    device.__init__ = unsynced


@defect
def fence_is_not_durable() -> None:
    """BP-46: a fence is in memory only, and lost after a restart."""

    async def fence(self: Any, ledger_id: int) -> None:
        state = self._ledgers.load(ledger_id)
        state.fenced = state.known = True
        self._ledgers.wake(ledger_id)

    _fencing.fence = fence


@defect
def normal_adds_pass_the_fence() -> None:
    """Rule 7."""
    admit = _adds._admit
    _adds._admit = lambda self, entry, recovery, *more: admit(self, entry, True, *more)


@defect
def recovery_adds_do_not_pass_the_fence() -> None:
    """Rule 7, the other way around."""
    admit = _adds._admit
    _adds._admit = lambda self, entry, recovery, *more: admit(self, entry, False, *more)


@defect
def explicit_lac_is_not_durable() -> None:
    """Rule 19: an explicit LAC is in memory only."""

    async def tell(self: Any, ledger_id: int, last_add_confirmed: int) -> None:
        state = self._ledgers.load(ledger_id)
        if state.fenced:
            raise LedgerFenced("fenced")
        state.explicit_lac = max(state.explicit_lac, last_add_confirmed)
        self._ledgers.wake(ledger_id)

    _fencing.write_last_confirmed = tell


@defect
def damage_is_answered_as_absence() -> None:
    """BookKeeper #2908: a damaged log becomes "no such entry"."""
    reads: Any = Reads
    read = reads.read

    async def denying(self: Any, ledger_id: int, first: int, *more: Any) -> Any:
        try:
            return await read(self, ledger_id, first, *more)
        except EntryDamaged:
            raise EntryNotFound(f"no entry {first}") from None

    reads.read = denying


@defect
def mark_before_the_flush() -> None:
    """BookKeeper #659, rule 2: the mark moves, and journals go, before what they hold is in entry logs."""
    work = _checkpointer._work

    async def early(self: Any, todo: _Work) -> Any:
        if todo.mark is None:
            return await work(self, todo)
        moved = await self.move_mark(todo.mark)
        await work(self, todo._replace(mark=None))
        return moved

    _checkpointer._work = early


@defect
def mark_is_taken_after_the_flush() -> None:
    """Rule 2: the mark is ahead by what was added during the flush."""

    async def run(self: Any, take_mark: Any) -> Any:
        await self._work(_Work(None, self._cache.swap(), self._ledgers.take_dirty()))
        return await self.move_mark(take_mark()) if take_mark is not None else None

    _checkpointer._run = run


@defect
def entry_logs_are_not_synced() -> None:
    """Rule 2: the mark moves when the entry logs are written."""

    async def sync(self: Any) -> list[int]:
        self._appended_to = {}
        return []

    EntryLogs.sync = sync  # type: ignore[method-assign]


@defect
def garbage_collection_takes_silence_for_deletion() -> None:
    """Rule 10: ledgers that the metadata service did not list are deleted."""
    missing = MetadataLedgers.missing

    async def eager(self: Any, ledger_ids: Any) -> list[int]:
        try:
            return await missing(self, ledger_ids)
        except MagnetarError:
            return list(ledger_ids)

    MetadataLedgers.missing = eager  # type: ignore[method-assign]


@defect
def read_only_bookie_does_not_fence() -> None:
    """BookKeeper #208, rule 12: a bookie that takes no adds refuses to fence."""
    bookie: Any = Bookie
    fence = bookie.fence

    async def refusing(self: Any, ledger_id: int) -> None:
        if self.read_only:
            raise BookieReadOnly("no fence is taken")
        await fence(self, ledger_id)

    bookie.fence = refusing


@defect
def deletion_forgets_the_fence() -> None:
    """BookKeeper #4462, rule 7: a stale writer brings a ledger back that was fenced and then deleted."""
    write_tombstone = _fencing._write_tombstone

    def forgetting(self: Any, ledger_id: int) -> None:
        write_tombstone(self, ledger_id)
        state = self._ledgers.load(ledger_id)
        state.fenced = False
        state.deleted_at_ms = 0

    _fencing._write_tombstone = forgetting


@defect
def entries_are_not_replayed() -> None:
    """BP-46: what only the journal held is lost with a crash, and the bookie does not know that it had it."""
    apply = _replay.apply

    def forgetting(self: Any, record: Any) -> Any:
        return record.type == RecordType.ADD or apply(self, record)

    _replay.apply = forgetting


@defect
def fences_are_not_replayed() -> None:
    """BP-46: fences that no checkpoint covers yet are lost with a crash."""
    apply = _replay.apply

    def forgetting(self: Any, record: Any) -> Any:
        return record.type == RecordType.FENCE or apply(self, record)

    _replay.apply = forgetting


@defect
def compaction_deletes_before_the_index_is_synced() -> None:
    """BookKeeper #1534, rule 11."""

    async def flush_index(self: Any) -> None:
        pass

    Compactor.flush_index = flush_index  # type: ignore[method-assign]


@defect
def only_one_ledger_directory_is_synced() -> None:
    """Rule 2, with several ledger directories: a flush that went to two of them syncs the first."""
    sync = EntryLogs.sync

    async def of_the_first(self: Any) -> list[int]:
        usable = self._usable
        self._usable = lambda: usable()[:1]
        try:
            return await sync(self)
        finally:
            del self._usable

    EntryLogs.sync = of_the_first  # type: ignore[method-assign]


@defect
def only_one_journal_is_replayed() -> None:
    """Rule 5, with several journal directories: a ledger of the second has lost what no checkpoint covered."""
    replay_journals = _replays.replay_journals

    async def replay_the_first(
        files: Any, directory: str, instance: int, position: Any, apply: Any, make_room: Any
    ) -> Any:
        if directory.endswith("-b"):
            apply = bool  # takes the record, and does nothing with it
        return await replay_journals(files, directory, instance, position, apply, make_room)

    _replays.replay_journals = replay_the_first


@defect
def tombstones_end_at_once() -> None:
    """Rule 7: a deleted ledger is forgotten by the next collection, and a stale writer brings it back."""
    forget = Survey.forget_tombstones

    async def at_once(self: Any) -> int:
        self._tombstone_retention_s = 0.0
        return await forget(self)

    Survey.forget_tombstones = at_once  # type: ignore[method-assign]
