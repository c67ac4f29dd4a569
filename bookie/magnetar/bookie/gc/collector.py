"""Garbage collection: runs rounds on schedule or by request.

    1  list the local ledgers, *then* ask metadata which of them were deleted (rule 10); as far as the brake lets them
       pass, each of these gets a tombstone
       at an interval: drop entries that metadata gives to other bookies (`assignments`)
       ledgers that are unknown here: are they complete by now (`assignments`)?
    2  while no flush runs (rule 11): remove the locations of deleted ledgers from the index, durably; list the closed logs
    3  statistics of those logs (`survey`) -> which to delete, which to compact (`decisions`)
    4  delete logs without a live ledger
    5  compact logs (`compactor`), the emptiest first, as far as their copies fit
    6  forget tombstones that are older than `tombstone_retention_s`

When metadata cannot be read, step 1 deletes nothing. Ledgers that were deleted before are still collected.

A round runs in the task of the collector, whoever asked for it. Only a stop of the bookie interrupts one, and that is one of
the crashes which `Compactor` survives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from magnetar.proto.errors import DiskFull, MagnetarError, ServiceNotReady, StorageFailed

from ..checkpoint import Checkpointer
from ..entry_log.entry_logs import EntryLogs
from ..entry_log.ledger_directory import DirectoryState
from ..fencing import Fencing
from ..ledgers import LedgerDescriptors
from ..settings import BookieSettings
from .assignments import Leftovers, UnknownLedgers
from .compactor import Compactor, IndexFailed, IndexUnreadable, OutputFailed, SourceDamaged
from .decisions import CompactionBatch, History, Plan, fits, plan_round
from .existing_ledgers import ExistingLedgers, deleted_ledgers
from .survey import Survey

_log = logging.getLogger(__name__)
# Rounds while a disk is nearly full: metadata may list fewer ledgers by then.
_PRESSED_INTERVAL_S = 60.0


class Collected(NamedTuple):
    """What a round did."""

    deleted_ledgers: int = 0
    deleted_logs: int = 0
    compacted_logs: int = 0
    reclaimed_bytes: int = 0
    # Metadata could not be asked, so no ledger was taken for deleted.
    skipped: bool = False


# Since the start. `compaction_bytes` were written to new logs.
_FIGURES = (
    "gc_rounds",
    "gc_rounds_without_metadata",
    "gc_deleted_logs",
    "gc_reclaimed_bytes",
    "gc_forgotten_tombstones",
    "compaction_minor_runs",
    "compaction_major_runs",
    "compaction_logs",
    "compaction_bytes",
    "compaction_ms",
    "compaction_given_up",
)


class Collector:
    """Garbage collection of one bookie. `fail` is the bookie's fail-stop."""

    def __init__(
        self,
        settings: BookieSettings,
        logs: EntryLogs,
        ledgers: LedgerDescriptors,
        checkpointer: Checkpointer,
        fencing: Fencing,
        survey: Survey,
        compactor: Compactor,
        fail: Callable[[MagnetarError], None],
        existing: ExistingLedgers | None,
        leftovers: Leftovers | None,
        unknown: UnknownLedgers | None,
    ) -> None:
        """Without `existing`, `leftovers` or `unknown` a round leaves out what these are for."""
        self.figures = dict.fromkeys(_FIGURES, 0)
        self.survey = survey
        self.existing = existing
        self._settings = settings
        self._logs = logs
        self._ledgers = ledgers
        self._checkpointer = checkpointer
        self._fencing = fencing
        self._compactor = compactor
        self._leftovers = leftovers
        self._unknown = unknown
        self._leftovers_at = 0.0  # loop time of the last pass; 0: none since the start
        self._fail = fail
        self._history = History()
        # Copies that have their final name and have not replaced their sources yet, made by this process or one that
        # crashed.
        self._unfinished_compactions: list[int] = []
        # Logs with damaged live entries: not tried again before the next major compaction.
        self._damaged_logs: dict[int, str] = {}
        self._pressed: frozenset[int] = frozenset()
        self._wanted = asyncio.Event()
        # Callers that wait for a round that has not begun.
        self._asked: list[asyncio.Future[Collected]] = []
        self._ended = False

    def open(self) -> None:
        """Looks for what a crash left. After `EntryLogs.open`."""
        self._unfinished_compactions = self._compactor.open()

    # --- when --------------------------------------------------------------------------------------------------------

    async def collect(self) -> Collected:
        """A round now, with a major compaction whatever its schedule says."""
        if self._ended:
            raise ServiceNotReady("this bookie is stopping")
        asked: asyncio.Future[Collected] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        self._wanted.set()
        return await asked

    def note_space(self, nearly_full: Iterable[int]) -> None:
        """Which ledger directories are nearly full, as the disk watch sees it. One more of them begins a round at once."""
        pressed = frozenset(nearly_full)
        if pressed - self._pressed and self._settings.gc_interval_s:
            self._wanted.set()
        self._pressed = pressed

    async def run(self) -> None:
        """Rounds until it is cancelled. Ends by itself only after `fail`."""
        asked: list[asyncio.Future[Collected]] = []
        try:
            try:
                await self._finish_compactions()
            except MagnetarError as error:
                _log.error("an interrupted compaction cannot be finished yet: %s", error)
            while True:
                await self._wait()
                self._wanted.clear()
                asked, self._asked = self._asked, []
                await self._answer(asked)
        except IndexFailed as failed:
            self._fail(failed.error)
        finally:
            self._asked += asked
            self.stop()

    def stop(self) -> None:
        """No further round begins: who has asked for one, or will, gets ServiceNotReady."""
        self._ended = True
        for waiting in self._asked:
            if not waiting.done():
                waiting.set_exception(ServiceNotReady("this bookie is stopping"))
                waiting.exception()

    async def _wait(self) -> None:
        interval = self._settings.gc_interval_s
        if interval and self._pressed:
            interval = min(interval, _PRESSED_INTERVAL_S)
        # Not `wait_for`: in 3.11 it forgets a cancellation that comes with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval or None):
                await self._wanted.wait()

    async def _answer(self, asked: list[asyncio.Future[Collected]]) -> None:
        outcome: MagnetarError | None = None
        collected = Collected()
        try:
            collected = await self.round(forced=bool(asked))
        except MagnetarError as error:
            outcome = error
        except IndexUnreadable as unreadable:
            outcome = unreadable.error
        if outcome is not None:
            _log.error("a round of garbage collection ended early: %s", outcome)
        for waiting in asked:
            if waiting.done():
                continue
            if outcome is None:
                waiting.set_result(collected)
            else:
                waiting.set_exception(outcome)

    # --- one round ---------------------------------------------------------------------------------------------------

    async def round(self, *, forced: bool = False) -> Collected:
        """See the module. IndexFailed: the bookie must stop; anything else: the next round tries again."""
        figures, begun = self.figures, asyncio.get_running_loop().time()
        before = self._done_so_far()
        figures["gc_rounds"] += 1
        await self._finish_compactions()
        asked = await self._delete_missing()
        await self._drop_leftovers(forced)
        await self._settle_unknown()
        async with self._checkpointer.exclusive():
            await self.survey.purge()
            closed = [info for info in self._logs.logs() if not info.current]
        usages = await self.survey.usages(closed)
        plan = plan_round(usages, self._settings, self._history, begun, forced=forced, pressed=self._pressed)
        for log in plan.delete:
            # The index does not name it any more, durably, since step 2.
            await self._compactor.delete([log.log_id])
            figures["gc_deleted_logs"] += 1
            figures["gc_reclaimed_bytes"] += log.bytes
            self.survey.logs_deleted([log.log_id])
        if await self._compact(plan):
            minor_s = begun if plan.minor else self._history.minor_s
            self._history = History(minor_s, begun if plan.major else self._history.major_s)
        async with self._checkpointer.exclusive():
            figures["gc_forgotten_tombstones"] += await self.survey.forget_tombstones()
        after = self._done_so_far()
        done = Collected._make([*(now - then for now, then in zip(after, before, strict=True))])
        if any(done):
            _log.info(
                "garbage collection: %d ledgers and %d logs deleted, %d logs compacted, %d bytes reclaimed",
                *done[:4],
            )
        return done._replace(skipped=not asked)

    def _done_so_far(self) -> Collected:
        figures = self.figures
        return Collected(
            self._fencing.deleted,
            figures["gc_deleted_logs"],
            figures["compaction_logs"],
            figures["gc_reclaimed_bytes"],
        )

    async def _finish_compactions(self) -> None:
        logs = self._logs
        for log_id in list(self._unfinished_compactions):
            # In a failed directory the next start finishes it; until then rounds do not touch the logs there.
            directory = logs.directory_of(log_id)
            if directory is None or logs.directory_states[directory] is not DirectoryState.FAILED:
                await self._compactor.finish(log_id)
                self._unfinished_compactions.remove(log_id)

    async def _delete_missing(self) -> bool:
        """Step 1. False if metadata could not be asked."""
        # Listed before metadata is read: a ledger that is created now must not look deleted (rule 10).
        alive = await self.survey.list_ledgers()
        if self.existing is None or not alive:
            return True
        try:
            missing = await deleted_ledgers(
                self.existing, alive, self._ledgers.next_ledger_id, self._settings.gc_max_deleted_ratio
            )
        except MagnetarError as error:
            self.figures["gc_rounds_without_metadata"] += 1
            _log.warning("no ledger is deleted in this round of garbage collection: %s", error)
            return False
        await self._fencing.delete(missing)
        self.survey.deleted.update(dict.fromkeys(missing))
        return True

    async def _drop_leftovers(self, forced: bool) -> None:
        leftovers, interval = self._leftovers, self._settings.leftover_interval_s
        now = asyncio.get_running_loop().time()
        due = not self._leftovers_at or now - self._leftovers_at >= interval
        if leftovers is None or not interval or not (forced or due):
            return
        try:
            dropped = await leftovers.drop(await self.survey.list_ledgers())
        except MagnetarError as error:
            _log.warning("which entries are other bookies' by now is not known: %s", error)
            return
        self._leftovers_at = now
        self.survey.emptied = leftovers.emptied
        if dropped:
            await self._compactor.flush_index()
            _log.info("%d entries that are other bookies' by now were dropped", dropped)

    async def _settle_unknown(self) -> None:
        if self._unknown is None:
            return
        try:
            await self._unknown.settle(self.survey.unknown)
        except MagnetarError as error:
            _log.warning("ledgers that are unknown here stay so: %s", error)

    # --- compaction --------------------------------------------------------------------------------------------------

    async def _compact(self, plan: Plan) -> bool:
        """Step 5. False if something was left for want of space, so that the next round tries again."""
        if plan.major:
            self._damaged_logs.clear()
        if plan.compact:
            self.figures["compaction_major_runs"] += plan.major
            self.figures["compaction_minor_runs"] += plan.minor and not plan.major
        complete = True
        full: dict[int, None] = {}
        batches = deque(plan.compact)
        while batches:
            batch = batches.popleft()
            batch = batch._replace(
                sources=tuple(log for log in batch.sources if log.log_id not in self._damaged_logs)
            )
            if not batch.sources:
                continue
            if self._logs.directory_states[batch.directory] is DirectoryState.FAILED:
                continue  # since the round was planned
            if batch.directory in full or not self._fits(batch):
                if batch.directory not in full and len(batch.sources) > 1:  # one by one they may fit
                    batches.extendleft(batch._replace(sources=(log,)) for log in reversed(batch.sources))
                else:
                    complete = False
                continue
            try:
                await self._compact_batch(batch)
            except OutputFailed as failed:
                self.figures["compaction_given_up"] += 1
                full[batch.directory] = None
                complete = False
                self._output_failed(batch, failed.error)
            except SourceDamaged as damaged:
                self.figures["compaction_given_up"] += 1
                self._damaged_logs[damaged.log_id] = str(damaged)
                batches.appendleft(batch)  # what is left of it
                _log.error("entry log %08x %s; the log is not deleted", damaged.log_id, damaged)
        return complete

    async def _compact_batch(self, batch: CompactionBatch) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        copied = await self._compactor.copy(batch, self.survey.is_deleted)
        sources = [log.log_id for log in batch.sources]
        if copied.log_id:
            self._unfinished_compactions.append(copied.log_id)
            await self._finish_compactions()
            sources = [log_id for log_id in sources if self._logs.path_of(log_id) is None]
        else:
            await self._compactor.flush_index()
            await self._compactor.delete(sources)
        figures = self.figures
        figures["compaction_logs"] += len(sources)
        figures["compaction_bytes"] += copied.bytes
        figures["gc_reclaimed_bytes"] += max(0, batch.bytes - copied.bytes) if sources else 0
        figures["compaction_ms"] += round((loop.time() - begun) * 1000)
        self.survey.logs_deleted(sources)

    def _fits(self, batch: CompactionBatch) -> bool:
        """Whether the copy leaves what flushes need; under pressure that is little, for it gives more back."""
        settings = self._settings
        free, total = self._logs.space_of(batch.directory)
        if batch.directory in self._pressed:
            reserve = (settings.disk_minimum_free_bytes + settings.write_cache_bytes) // 2
        else:
            reserve = max(
                settings.disk_minimum_free_bytes, round(total * (1 - settings.disk_read_only_ratio))
            )
        return fits(batch, free, reserve)

    def _output_failed(self, batch: CompactionBatch, error: MagnetarError) -> None:
        _log.warning("a compaction was given up: %s", error)
        if error.details.get("whole_bookie"):
            self._fail(error)
            return
        if isinstance(error, StorageFailed) and not isinstance(error, DiskFull):
            try:
                self._logs.fail_directory(batch.directory, error)
            except MagnetarError as last:
                self._fail(last)

    def stats(self) -> dict[str, int]:
        """For metrics."""
        return self.figures | {
            "gc_deleted_ledgers": self._fencing.deleted,
            "gc_dropped_leftovers": 0 if self._leftovers is None else self._leftovers.dropped_entries,
            "compaction_damaged_logs": len(self._damaged_logs),
        }
