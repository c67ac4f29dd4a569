"""The reads of one recovery: entries that the core wants from one bookie, one after another, are one request.

A request answers the entries up to the first one that the bookie does not have or that does not fit. What lies behind is
not absent (rule 14): it is asked for again, and only the first entry of a request is ever a negative, when the bookie says
so. Requests go out by entry, lowest first, at most `_MAX_READS` at a time to one bookie, and none beyond `_MAX_HELD_BYTES`
of entries that were found and wait to be added again, except for the entry that everything waits for: so a recovery needs
bounded memory, whatever the size of entries, and neither blocks itself nor is blocked by a bookie that hangs.
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

from .components import LedgerComponents
from .core.events import BookieSlow, EntryRead, Event
from .core.recovery import RecoveryCore

_MAX_READS = 12
_MAX_READ_BYTES = 1 << 20  # of one answer, unless its first entry is larger
_MAX_HELD_BYTES = 32 << 20
_SILENT = (BookieUnavailable, ConnectionLost, RequestTimeout)


class RecoveryReads:
    """`wanted` collects, `flush` sends; `tell` hears what comes back."""

    def __init__(
        self,
        components: LedgerComponents,
        ledger_id: int,
        core: RecoveryCore,
        tell: Callable[[Event], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._transport = components.transport
        self._health = components.health
        self._slow_s = components.settings.speculative_read_s
        self._ledger_id = ledger_id
        self._core = core
        self._tell = tell
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, tuple[int, int]] = {}  # bookie -> run that is being collected
        self._runs: dict[str, list[tuple[int, int]]] = {}  # bookie -> a heap of (first, last)
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._asked: dict[str, int] = {}  # bookie -> how many of _tasks are its

    def wanted(self, bookie: str, entry_id: int) -> None:
        """One more entry to read."""
        run = self._open.get(bookie)
        if run is not None and run[1] + 1 == entry_id:
            self._open[bookie] = (run[0], entry_id)
            return
        if run is not None:
            self._rest(bookie, *run)
        self._open[bookie] = (entry_id, entry_id)

    def flush(self) -> None:
        """Sends what may be sent now. To be called after every event: each may make room."""
        if self._open:
            for bookie, run in self._open.items():
                self._rest(bookie, *run)
            self._open.clear()
        core = self._core
        for bookie, runs in self._runs.items():
            while runs and self._asked.get(bookie, 0) < _MAX_READS:
                first, last = runs[0]
                if not core.wants(first):  # found meanwhile, or past the end
                    heapq.heappop(runs)
                    self._rest(bookie, first + 1, last)
                elif core.held_bytes > _MAX_HELD_BYTES and first > core.first_unfinished:
                    break
                else:
                    heapq.heappop(runs)
                    self._start(bookie, first, last)

    def _start(self, bookie: str, first: int, last: int) -> None:
        task = self._loop.create_task(self._read(bookie, first, last), name=f"recovery read at {bookie}")
        self._tasks[task] = bookie
        self._asked[bookie] = self._asked.get(bookie, 0) + 1
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Cancels what is under way."""
        self._runs.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._asked[self._tasks.pop(task)] -= 1
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._failed(error)  # a bug; better told than waited for
        else:
            self.flush()

    async def _read(self, bookie: str, first: int, last: int) -> None:
        timer = None
        if self._slow_s:
            timer = self._loop.call_later(self._slow_s, self._tell, BookieSlow(bookie))
        try:
            result = await self._transport.read(
                bookie, self._ledger_id, first, last, max_bytes=_MAX_READ_BYTES, fence=True
            )
            entries = result.entries[: last - first + 1]
        except _SILENT as error:
            self._health.failed(bookie, error.code)
            for entry_id in range(first, last + 1):
                self._tell(EntryRead(bookie, entry_id, b"", 0, error.code))
            return
        except MagnetarError as error:
            self._rest(bookie, first + 1, last)
            self._tell(EntryRead(bookie, first, b"", 0, error.code))
            return
        finally:
            if timer is not None:
                timer.cancel()
        self._rest(bookie, first + max(1, len(entries)), last)
        for entry_id, entry in enumerate(entries or [b""], first):
            self._tell(self._verified(bookie, entry_id, entry))

    def _rest(self, bookie: str, first: int, last: int) -> None:
        if first <= last:
            heapq.heappush(self._runs.setdefault(bookie, []), (first, last))

    def _verified(self, bookie: str, entry_id: int, entry: bytes) -> EntryRead:
        try:
            header = verify_ledger_entry(entry)
        except EntryDamaged as error:
            return EntryRead(bookie, entry_id, b"", 0, error.code)
        if (header.ledger_id, header.entry_id) != (self._ledger_id, entry_id):
            return EntryRead(bookie, entry_id, b"", 0, EntryDamaged.code)
        return EntryRead(bookie, entry_id, entry, header.length, 0)
