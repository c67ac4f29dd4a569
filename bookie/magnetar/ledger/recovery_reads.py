"""The reads of one recovery, in the order of entries and a few at a time.

A request answers the entries of its stripe up to the first one that the bookie does not have or that does not fit. What lies
behind is not absent (rule 14), and what the stripe leaves out was not asked for: nothing is concluded for either. It is
asked for again, and only the first entry of a request is ever a negative, when the bookie says so. Requests go out by entry,
lowest first, at most `_MAX_READS` at a time to one bookie, and none beyond `_MAX_HELD_BYTES` of entries that were found and
wait to be added again, except for the entry that everything waits for: so a recovery needs bounded memory, whatever the size
of entries, and neither blocks itself nor is blocked by a bookie that hangs.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from magnetar.proto.errors import (
    BookieUnavailable,
    ConnectionLost,
    EntryDamaged,
    MagnetarError,
    RequestTimeout,
)
from magnetar.proto.ledger_entry import verify_ledger_entry
from magnetar.proto.stripe import Stripe
from magnetar.runtime.tasks import TaskSet

from .components import LedgerComponents
from .core.events import BookieSlow, EntriesRead, EntryRead, Event, ReadEntries
from .core.recovery import RecoveryCore

_MAX_READS = 12
_MAX_READ_BYTES = 1 << 20  # of one answer, unless its first entry is larger
_MAX_HELD_BYTES = 32 << 20
_SILENT = (BookieUnavailable, ConnectionLost, RequestTimeout)

# First and last entry, and the stripe, which has both.
_Run = tuple[int, int, Stripe]


class RecoveryReads:
    """`ask` takes reads, `flush` sends what may be sent; `handle` is called with the answers."""

    def __init__(
        self,
        components: LedgerComponents,
        ledger_id: int,
        core: RecoveryCore,
        handle: Callable[[Event], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._transport = components.transport
        self._health = components.health
        self._slow_s = components.settings.speculative_read_s
        self._ledger_id = ledger_id
        self._core = core
        self._handle = handle
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._runs: dict[str, list[_Run]] = {}  # bookie -> a heap
        self._tasks = TaskSet("recovery reads")
        self._asked: dict[str, int] = {}  # bookie -> how many of _tasks are of it

    def ask(self, read: ReadEntries) -> None:
        """Takes one more read, which waits for its turn."""
        runs = self._runs.setdefault(read.bookie, [])
        heapq.heappush(runs, (read.first, read.last, read.stripe))

    def flush(self) -> None:
        """Sends what may be sent now. To be called after every event: each may make room."""
        core = self._core
        for bookie, runs in self._runs.items():
            while runs and self._asked.get(bookie, 0) < _MAX_READS:
                run = runs[0]
                if not core.wants(run[0]):  # found meanwhile, or past the end
                    heapq.heappop(runs)
                    self._skip(bookie, run)
                elif core.held_bytes > _MAX_HELD_BYTES and run[0] > core.first_unfinished:
                    break
                else:
                    heapq.heappop(runs)
                    self._start(bookie, run)

    def _start(self, bookie: str, run: _Run) -> None:
        name = f"recovery read at {bookie}"
        self._tasks.begin(self._read(bookie, run), name, lambda task: self._ended(bookie, task))
        self._asked[bookie] = self._asked.get(bookie, 0) + 1

    async def close(self) -> None:
        """Cancels what is under way."""
        self._runs.clear()
        await self._tasks.close()

    def _ended(self, bookie: str, task: asyncio.Task[None]) -> None:
        self._asked[bookie] -= 1
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._failed(error)  # a bug: fails the recovery instead of leaving it waiting
        else:
            self.flush()

    async def _read(self, bookie: str, run: _Run) -> None:
        first, last, stripe = run
        timer = None
        if self._slow_s:
            timer = self._loop.call_later(self._slow_s, self._handle, BookieSlow(bookie))
        try:
            result = await self._transport.read(
                bookie, self._ledger_id, first, last, max_bytes=_MAX_READ_BYTES, fence=True, stripe=stripe
            )
        except _SILENT as error:
            self._health.failed(bookie, error.code)
            silent = [EntryRead(entry_id, b"", 0, error.code) for entry_id in stripe.ids(first, last)]
            self._handle(EntriesRead(bookie, silent))
            return
        except MagnetarError as error:
            self._rest(bookie, run, 1)
            self._handle(EntriesRead(bookie, [EntryRead(first, b"", 0, error.code)]))
            return
        finally:
            if timer is not None:
                timer.cancel()
        entries = result.entries or [b""]
        ids = stripe.ids(first, last, len(entries))
        self._rest(bookie, run, len(ids))
        answers = [self._verified(entry_id, entry) for entry_id, entry in zip(ids, entries)]
        self._handle(EntriesRead(bookie, answers))

    def _skip(self, bookie: str, run: _Run) -> None:
        """What lies behind the entries that are not wanted any more: most of a run, once another bookie had them."""
        first, last, stripe = run
        wants = self._core.wants
        while first <= last and not (stripe.holds(first) and wants(first)):
            first += 1
        if first <= last:
            heapq.heappush(self._runs[bookie], (first, last, stripe))

    def _rest(self, bookie: str, run: _Run, answered: int) -> None:
        """What lies behind so many of a run's entries."""
        first, last, stripe = run
        ids = stripe.ids(first, last, answered + 1)
        if len(ids) > answered:
            heapq.heappush(self._runs.setdefault(bookie, []), (ids[answered], last, stripe))

    def _verified(self, entry_id: int, entry: bytes) -> EntryRead:
        try:
            header = verify_ledger_entry(entry)
        except EntryDamaged as error:
            return EntryRead(entry_id, b"", 0, error.code)
        if (header.ledger_id, header.entry_id) != (self._ledger_id, entry_id):
            return EntryRead(entry_id, b"", 0, EntryDamaged.code)
        return EntryRead(entry_id, entry, header.length, 0)
