"""What a round can collect: which ledgers are deleted, and how much of each closed log is alive.

A ledger is *deleted* when it has a tombstone, or when it has neither state nor locations: then its tombstone was forgotten.
Every other ledger is alive until metadata says otherwise, one that was only fenced here included.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence

from magnetar.proto.errors import MagnetarError
from magnetar.runtime.clock import Clock

from ..checkpoint import Checkpointer
from ..entry_log.entry_logs import EntryLogs, LogInfo
from ..entry_log.ledger_directory import DirectoryState
from ..entry_log.log_reader import LogStatistics
from ..fencing import Fencing
from ..index import BATCH_ENTRIES, Location, LocationIndex
from ..index.locations import ledger_pages
from ..ledgers import LedgerDescriptors
from .compactor import IndexFailed, raising
from .decisions import LogUsage

_log = logging.getLogger(__name__)
# Look-ups in the index in one turn of the loop, 4 us each.
_SLICE = 200
# Lists of a ledger's locations in one turn, 20 us each.
_PURGED_SLICE = 50
# A ledger with no more locations loses them one by one: thousands of range tombstones would make all look-ups slow.
_ONE_BY_ONE = 100


class Survey:
    """Lasts from round to round; each begins with `list_ledgers` and `purge`."""

    def __init__(
        self,
        logs: EntryLogs,
        index: LocationIndex,
        ledgers: LedgerDescriptors,
        checkpointer: Checkpointer,
        fencing: Fencing,
        clock: Clock,
        *,
        bytes_per_s: int,
        tombstone_retention_s: float,
    ) -> None:
        # Bytes that are alive in a log, where the scrub has measured them; None: not known.
        self.measured_live_bytes: Callable[[int], int | None] = _not_measured
        # Ledgers with a tombstone, as of this round, by id.
        self.deleted: dict[int, None] = {}
        # Ledgers that are marked as unknown (rule 9), as of this round.
        self.unknown: list[int] = []
        # Ledgers that exist and of which nothing but their state was left here, when that was looked at.
        self.emptied: Mapping[int, None] = {}
        self._logs = logs
        self._index = index
        self._ledgers = ledgers
        self._checkpointer = checkpointer
        self._fencing = fencing
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._tombstone_retention_s = tombstone_retention_s
        # Deleted ledgers whose locations this process has removed from the index.
        self._purged: set[int] = set()
        # Deleted ledgers in each closed log.
        self._deleted_in: dict[int, list[int]] = {}
        # Ledgers that were not deleted when the round began, rising. 8 bytes each: there may be a million.
        self._alive = array("Q")
        # The others that were asked for in this round.
        self._known_deleted: dict[int, bool] = {}

    async def list_ledgers(self) -> Sequence[int]:
        """Begins a round; returns the ledgers that are not deleted, by id.

        Those whose tombstone is not durable yet are among them: their entries must not go before it is.
        """
        by_id, pending = self._ledgers.by_id, self._fencing.pending_tombstones
        self.deleted = {}
        self.unknown = []
        self._known_deleted = {}
        alive = self._alive = array("Q")
        for rows in ledger_pages(self._index):
            for ledger_id, record in rows:
                state = by_id.get(ledger_id)
                if (record if state is None else state).deleted_at_ms and ledger_id not in pending:
                    self.deleted[ledger_id] = None
                else:
                    alive.append(ledger_id)
                    if record.unknown if state is None else state.unknown:
                        self.unknown.append(ledger_id)
            await asyncio.sleep(0)
        return alive

    async def purge(self) -> None:
        """Removes the locations of deleted ledgers from the index, durably. No flush may run. Raises IndexFailed."""
        index = self._index
        purged = [ledger_id for ledger_id in self.deleted if ledger_id not in self._purged]
        rows: list[tuple[int, int, Location, Location | None]] = []
        for number, ledger_id in enumerate(purged):
            await index.warm_locations(ledger_id, 0, _ONE_BY_ONE)
            found = index.list_locations(ledger_id, count=_ONE_BY_ONE + 1)
            if len(found) > _ONE_BY_ONE:
                with raising(IndexFailed):
                    index.delete_locations(ledger_id)
            else:
                rows += [(ledger_id, entry_id, location, None) for entry_id, location in found]
            if len(rows) >= BATCH_ENTRIES - _ONE_BY_ONE or number == len(purged) - 1:
                with raising(IndexFailed):
                    index.replace_locations(rows)
                rows = []
            if not number % _PURGED_SLICE:
                await asyncio.sleep(0)
        if purged:
            with raising(IndexFailed):
                await index.flush_locations()
        # A flush that waits for space still holds entries, and will add their locations to the index.
        if not self._checkpointer.stopped_by_full_disk:
            self._purged.update(purged)

    def is_deleted(self, ledger_id: int) -> bool:
        """Whether the ledger is deleted; see the module. 1 us; 8 us once in a round if the index did not list it."""
        if ledger_id in self.deleted:
            return True
        place = bisect_left(self._alive, ledger_id)
        if place < len(self._alive) and self._alive[place] == ledger_id:
            return False
        known = self._known_deleted.get(ledger_id)
        if known is None:
            known = self._known_deleted[ledger_id] = (
                ledger_id not in self._ledgers.by_id
                and self._index.get_ledger(ledger_id) is None
                and not self._has_locations(ledger_id)
            )
        return known

    async def usages(self, closed: Sequence[LogInfo]) -> list[LogUsage]:
        """Of the closed logs that may be touched."""
        states = self._logs.directory_states
        found: list[LogUsage] = []
        self._deleted_in = {}
        for info in closed:
            if states[info.directory] is DirectoryState.FAILED:
                continue
            try:
                statistics = await self._logs.statistics(info.log_id, bytes_per_s=self._bytes_per_s)
            except MagnetarError as error:
                _log.warning(
                    "entry log %08x is left alone, it cannot be looked through: %s", info.log_id, error
                )
                continue
            found.append(await self._usage(info, statistics))
        return found

    async def _usage(self, info: LogInfo, statistics: LogStatistics) -> LogUsage:
        """What of a log is alive: in slices, since it may have LOG_LEDGERS ledgers."""
        live = live_ledgers = 0
        deleted: list[int] = []
        for number, (ledger_id, size) in enumerate(statistics.ledgers.items()):
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            if ledger_id in self.deleted:
                deleted.append(ledger_id)
            elif not self.is_deleted(ledger_id):
                live_ledgers += 1
                # Entries that came back since have locations again.
                if ledger_id not in self.emptied or self._has_locations(ledger_id):
                    live += size
        measured = self.measured_live_bytes(info.log_id)
        if measured is not None:
            live = min(live, measured)
        if not live and live_ledgers:
            live = 1  # only a compaction can tell that nothing of a live ledger is needed
        self._deleted_in[info.log_id] = deleted
        return LogUsage(info.log_id, info.directory, info.bytes, live, statistics.whole, live_ledgers)

    def logs_deleted(self, log_ids: Collection[int]) -> None:
        """Rewrites the tombstones that were stored in these logs, while another log still has entries of their ledgers.

        They matter to a rebuild of the index from the logs; the index itself has them.
        """
        went: dict[int, None] = {}
        for log_id in log_ids:
            went.update(dict.fromkeys(self._deleted_in.pop(log_id, [])))
        for others in self._deleted_in.values():
            for ledger_id in others:
                if ledger_id in went:
                    del went[ledger_id]
                    self._ledgers.rewrite_state(ledger_id)

    async def forget_tombstones(self) -> int:
        """Forgets tombstones older than `tombstone_retention_s`. No flush may run. Raises IndexFailed.

        A tombstone stays until the mark lies behind the journals with adds of the ledger: a replay would revive it. That of
        the highest ledger stays: by it the bookie knows which ids were used (rule 36).
        """
        index, ledgers = self._index, self._ledgers
        latest = self._clock.now_ms() - round(self._tombstone_retention_s * 1000)
        forgotten = 0
        for number, ledger_id in enumerate(self.deleted):
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            record = index.get_ledger(ledger_id)
            if (
                record is not None
                and 0 < record.deleted_at_ms <= latest
                and ledger_id in self._purged
                and ledger_id != ledgers.next_ledger_id - 1
                and ledgers.is_saved(ledger_id)
            ):
                with raising(IndexFailed):
                    index.delete_ledger(ledger_id)
                ledgers.forget(ledger_id)
                self._purged.discard(ledger_id)
                forgotten += 1
        if forgotten:
            with raising(IndexFailed):
                await index.flush_ledgers()
        return forgotten

    def _has_locations(self, ledger_id: int) -> bool:
        return bool(self._index.list_locations(ledger_id, count=1))


def _not_measured(log_id: int) -> int | None:
    return None
