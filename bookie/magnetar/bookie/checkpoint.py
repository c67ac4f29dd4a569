"""The checkpoint: entries move from the write cache to entry logs and index, then the mark, then journals are released.

In this order (rule 2): take the mark, swap the cache, append to entry logs, sync them, flush the location index, flush the
ledger index, persist the mark, release journals. The mark is the durable position of the journal at the moment of the swap;
since an entry is in the write cache before it is in the journal (rule 1), everything before the mark is in what was swapped.

A flush without a new mark (replay under memory pressure) never moves the mark (rule 3).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from magnetar.proto.errors import DiskFull, StorageFailed

from .disk_worker import DiskWorker
from .entry_log import STATE_ENTRY, EntryLogs
from .index import BATCH_ENTRIES, LedgerRecord, LocationIndex
from .layout import DataLayout
from .ledgers import DirtyLedgers
from .mark import Mark, encode_mark, mark_moves_forward
from .metrics import Histogram
from .write_cache import ENTRY_OVERHEAD_BYTES, Half, WriteCache

__all__ = ["Checkpointer", "FlushFigures"]


class _Work(NamedTuple):
    mark: Mark | None
    half: Half
    ledgers: DirtyLedgers


class FlushFigures:
    """Of all flushes since the start that had something to write."""

    def __init__(self) -> None:
        self.flushes = 0
        self.failed_for_space = 0
        self.entries = 0
        self.bytes = 0
        self.seconds = Histogram()


class Checkpointer:
    """Runs one checkpoint at a time, in a task of its own: a caller that is cancelled does not cut one short.

    (A sync whose outcome nobody hears would have to be taken for failed, rule 4.)
    `take_ledgers` returns what changed since it was last called, `settle` is told that all of it is in the index.
    """

    def __init__(
        self,
        cache: WriteCache,
        logs: EntryLogs,
        index: LocationIndex,
        worker: DiskWorker,
        layout: DataLayout,
        mark: Mark,
        take_ledgers: Callable[[], DirtyLedgers],
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
        self._running: asyncio.Task[Mark | None] | None = None
        self._failed: BaseException | None = None
        # What was begun and did not end; after a full disk it is tried again before anything else.
        self._unfinished: _Work | None = None
        # From a full disk until a flush succeeds: not for the moment of each attempt.
        self.stopped_by_full_disk = False
        self.mark = mark
        self.finished = 0
        self.figures = FlushFigures()

    async def run(self, take_mark: Callable[[], Mark] | None) -> Mark | None:
        """Flushes everything added before the call; returns the mark if it was moved.

        `take_mark` None flushes without moving the mark. Raises DiskFull (nothing is lost, call again) or StorageFailed.
        """
        async with self.exclusive():
            if self._failed is not None:
                raise StorageFailed(f"an earlier flush failed: {self._failed}")
            self._running = asyncio.get_running_loop().create_task(self._run(take_mark), name="bookie flush")
            self._running.add_done_callback(self._ended)
            return await asyncio.shield(self._running)

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Nothing is flushed, and no mark moves, inside. Waits out a flush in progress (rule 11)."""
        async with self._lock:
            # One whose caller went away is still at work.
            while self._running is not None and not self._running.done():
                await asyncio.wait([self._running])
            yield

    def _ended(self, task: asyncio.Task[Mark | None]) -> None:
        """A failure whose caller went away must not be tried again by the next one (rule 4)."""
        if (
            not task.cancelled()
            and (error := task.exception()) is not None
            and not isinstance(error, DiskFull)
        ):
            self._failed = error

    async def _run(self, take_mark: Callable[[], Mark] | None) -> Mark | None:
        moved: Mark | None = None
        if self._unfinished is not None:
            moved = await self._work(self._unfinished)
        # No await between taking the mark, the half and the ledgers: they describe the same moment.
        mark = take_mark() if take_mark is not None else None
        work = _Work(mark, self._cache.swap(), self._take_ledgers())
        return await self._work(work) or moved

    async def _work(self, work: _Work) -> Mark | None:
        self._unfinished = work
        try:
            moved = await self._finish(work)
        except DiskFull:
            self.figures.failed_for_space += 1
            self.stopped_by_full_disk = True
            raise
        self._unfinished = None
        self.stopped_by_full_disk = False
        self._settle()
        self.finished += 1
        await work.half.release()
        return moved

    async def _finish(self, work: _Work) -> Mark | None:
        """May be called again after DiskFull: what it wrote then is garbage, or says the same."""
        states = await work.ledgers.for_entry_logs()
        if work.half.entries or states:
            await self._flush(work.half, states)
        self._cache.drop_flushing()
        if work.ledgers:
            for batch in work.ledgers.batches(BATCH_ENTRIES):
                self._index.put_ledgers(batch)
                await asyncio.sleep(0)
            await self._index.flush_ledgers()
        return None if work.mark is None else await self.move_mark(work.mark)

    async def _flush(self, half: Half, states: Sequence[tuple[int, LedgerRecord]]) -> None:
        """Everything is durable in entry logs, and its locations in the index, when it returns."""
        figures, loop = self.figures, asyncio.get_running_loop()
        begun = loop.time()
        placed = await self._logs.append(half, states)
        while await self._logs.sync():
            # A directory failed; the half is still in memory, and goes to the others.
            placed = await self._logs.append(half, states)
        placed.reverse()  # each slice is let go of when it is done
        while placed:
            locations = [row for row in placed.pop().locations() if row[1] != STATE_ENTRY]
            while placed and len(locations) + len(placed[-1].records) <= BATCH_ENTRIES:
                locations += [row for row in placed.pop().locations() if row[1] != STATE_ENTRY]
            self._index.put_locations(locations)
            await asyncio.sleep(0)
        await self._index.flush_locations()
        figures.flushes += 1
        figures.entries += half.entries
        figures.bytes += half.size - half.entries * ENTRY_OVERHEAD_BYTES
        figures.seconds.observe(loop.time() - begun)

    async def close(self) -> None:
        """Waits for a flush whose caller went away; for a bookie that has failed it is cut short."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
            if not self._running.cancelled():
                self._running.exception()
            self._running = None

    async def move_mark(self, mark: Mark, *, directories_change: bool = False) -> Mark | None:
        """Persists the mark if it moves forward, and returns it then. Durable when it returns.

        `directories_change`: only at a start, when everything that the old mark needs was replayed and flushed.
        """
        if mark == self.mark or not mark_moves_forward(
            self.mark, mark, directories_change=directories_change
        ):
            return None
        await self._worker.replace(self._layout.mark, encode_mark(mark))
        self.mark = mark
        return mark

    @property
    def flushing(self) -> bool:
        """True while something is being flushed."""
        return self._running is not None and not self._running.done()
