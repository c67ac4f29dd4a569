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
from magnetar.runtime.tasks import begin

from .disk_worker import DiskWorker
from .entry_log.entry_logs import EntryLogs
from .entry_log.records import STATE_ENTRY
from .index import BATCH_ENTRIES, LedgerRecord, LocationIndex
from .layout import DataLayout
from .ledgers import DirtyLedgers, LedgerDescriptors
from .mark import Mark, encode_mark, mark_moves_forward
from .metrics import Histogram
from .write_cache import ENTRY_OVERHEAD_BYTES, MemTable, WriteCache


class _Work(NamedTuple):
    mark: Mark | None
    memtable: MemTable
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
    """

    def __init__(
        self,
        cache: WriteCache,
        logs: EntryLogs,
        index: LocationIndex,
        worker: DiskWorker,
        layout: DataLayout,
        mark: Mark,
        ledgers: LedgerDescriptors,
        kept_bytes: int,
    ) -> None:
        """`kept_bytes`: what the flushes of a replay leave free for the rest of the start, and for fences (rule 39)."""
        self._cache = cache
        self._logs = logs
        self._index = index
        self._worker = worker
        self._layout = layout
        self._ledgers = ledgers
        self._kept_bytes = kept_bytes
        self._lock = asyncio.Lock()
        self._running: asyncio.Task[Mark | None] | None = None
        self._failed: BaseException | None = None
        # A checkpoint that a full disk interrupted; it is tried again before anything else.
        self._unfinished: _Work | None = None
        # True from the first failure for want of space until a flush succeeds.
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
            self._running = begin(self._run(take_mark), "bookie flush", self._ended)
            return await asyncio.shield(self._running)

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Nothing is flushed, and no mark moves, inside. Waits out a flush in progress (rule 11)."""
        async with self._lock:
            # A flush whose caller was cancelled still runs.
            while self._running is not None and not self._running.done():
                await asyncio.wait([self._running])
            yield

    def _ended(self, task: asyncio.Task[Mark | None]) -> None:
        """Remembers a failure even if its caller was cancelled: the next caller must not try again (rule 4)."""
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
        # No await between taking the mark, the memtable and the ledgers: they describe the same moment.
        mark = take_mark() if take_mark is not None else None
        work = _Work(mark, self._cache.swap(), self._ledgers.take_dirty())
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
        self._ledgers.note_saved()
        self.finished += 1
        await work.memtable.release()
        return moved

    async def _finish(self, work: _Work) -> Mark | None:
        """May be called again after DiskFull: what it wrote then is garbage, or says the same."""
        if work.mark is None and not self.has_room(work.memtable):
            raise DiskFull(
                f"{work.memtable.size} bytes that were replayed wait in memory for space; free some"
            )
        states = await work.ledgers.for_entry_logs()
        if work.memtable.entries or states:
            await self._flush(work.memtable, states)
        self._cache.drop_flushing()
        if work.ledgers:
            for batch in work.ledgers.batches(BATCH_ENTRIES):
                self._index.put_ledgers(batch)
                await asyncio.sleep(0)
            await self._index.flush_ledgers()
        return None if work.mark is None else await self.move_mark(work.mark)

    def has_room(self, memtable: MemTable) -> bool:
        """Whether the flush of a replay takes no space that the start needs itself."""
        return not memtable.entries or self._logs.free_bytes() >= memtable.size + self._kept_bytes

    async def _flush(self, memtable: MemTable, states: Sequence[tuple[int, LedgerRecord]]) -> None:
        """Everything is durable in entry logs, and its locations in the index, when it returns."""
        figures, loop = self.figures, asyncio.get_running_loop()
        begun = loop.time()
        placed = await self._logs.append(memtable, states)
        while await self._logs.sync():
            # A directory failed. The memtable is still in memory and goes to the other directories.
            placed = await self._logs.append(memtable, states)
        placed.reverse()  # so that `pop` frees each slice as soon as it is indexed
        while placed:
            locations = [row for row in placed.pop().locations() if row[1] != STATE_ENTRY]
            while placed and len(locations) + len(placed[-1].records) <= BATCH_ENTRIES:
                locations += [row for row in placed.pop().locations() if row[1] != STATE_ENTRY]
            self._index.put_locations(locations)
            await asyncio.sleep(0)
        await self._index.flush_locations()
        figures.flushes += 1
        figures.entries += memtable.entries
        figures.bytes += memtable.size - memtable.entries * ENTRY_OVERHEAD_BYTES
        figures.seconds.observe(loop.time() - begun)

    async def close(self) -> None:
        """Cancels a flush whose caller was cancelled, and waits until it has ended."""
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
