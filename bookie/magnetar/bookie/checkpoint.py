"""The checkpoint: entries move from the write cache to entry logs and index, then the mark, then journals are released.

In this order (rule 2): take the mark, swap the cache, append to entry logs, sync them, flush the location index, flush the
ledger index, persist the mark, release journals. The mark is the durable position of the journal at the moment of the swap;
since an entry is in the write cache before it is in the journal (rule 1), everything before the mark is in what was swapped.

A flush without a new mark (replay under memory pressure) never moves the mark (rule 3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .disk_worker import DiskWorker
from .entry_log import EntryLogs
from .index import BATCH_ENTRIES, LedgerRecord, LocationIndex
from .journal.journal import JournalPosition
from .layout import DataLayout
from .mark import encode_mark, mark_moves_forward
from .write_cache import Half, WriteCache

__all__ = ["Checkpointer"]


class _Work(NamedTuple):
    mark: list[JournalPosition] | None
    half: Half
    ledgers: list[tuple[int, LedgerRecord]]


class Checkpointer:
    """Runs one checkpoint at a time.

    `take_ledgers` returns what changed since it was last called, `settle` is told that all of it is in the index.
    """

    def __init__(
        self,
        cache: WriteCache,
        logs: EntryLogs,
        index: LocationIndex,
        worker: DiskWorker,
        layout: DataLayout,
        mark: list[JournalPosition],
        take_ledgers: Callable[[], list[tuple[int, LedgerRecord]]],
        settle: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._logs = logs
        self._index = index
        self._worker = worker
        self._layout = layout
        self._take_ledgers = take_ledgers
        self._settle = settle
        self._lock = asyncio.Lock()
        # What a full disk stopped; tried again before anything else.
        self._unfinished: _Work | None = None
        self.mark = mark
        self.finished = 0

    async def run(
        self, take_mark: Callable[[], list[JournalPosition]] | None
    ) -> list[JournalPosition] | None:
        """Flushes everything added before the call; returns the mark if it was moved.

        `take_mark` None flushes without moving the mark. Raises DiskFull (nothing is lost, call again) or StorageFailed.
        """
        async with self._lock:
            moved: list[JournalPosition] | None = None
            if self._unfinished is not None:
                moved = await self._work(self._unfinished)
            # No await between taking the mark, the half and the ledgers: they describe the same moment.
            mark = take_mark() if take_mark is not None else None
            work = _Work(mark, self._cache.swap(), self._take_ledgers())
            return await self._work(work) or moved

    async def _work(self, work: _Work) -> list[JournalPosition] | None:
        self._unfinished = work
        if work.half.entries:
            locations = await self._logs.append(work.half)
            await self._logs.sync()
            for start in range(0, len(locations), BATCH_ENTRIES):
                self._index.put_locations(locations[start : start + BATCH_ENTRIES])
                await asyncio.sleep(0)
            await self._index.flush_locations()
        self._cache.drop_flushing()
        if work.ledgers:
            for start in range(0, len(work.ledgers), BATCH_ENTRIES):
                self._index.put_ledgers(work.ledgers[start : start + BATCH_ENTRIES])
                await asyncio.sleep(0)
            await self._index.flush_ledgers()
        moved = None
        if work.mark is not None:
            moved = await self.move_mark(work.mark)
        self._unfinished = None
        self._settle()
        self.finished += 1
        return moved

    async def move_mark(self, mark: Sequence[JournalPosition]) -> list[JournalPosition] | None:
        """Persists the mark if it moves forward, and returns it then. Durable when it returns."""
        if list(mark) == self.mark or not mark_moves_forward(self.mark, mark):
            return None
        await self._worker.replace(self._layout.mark, encode_mark(mark))
        self.mark = list(mark)
        return self.mark

    @property
    def stopped_by_full_disk(self) -> bool:
        """True while a flush waits for space."""
        return self._unfinished is not None and not self._lock.locked()
