"""The asyncio shell around `core.recovery`; its reads go out in the order of entries, and a few at a time.

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
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from magnetar.proto.errors import (
    EntryDamaged,
    MagnetarError,
)
from magnetar.proto.ledger_entry import verify_ledger_entry
from magnetar.proto.stripe import Stripe
from magnetar.runtime.tasks import TaskSet

from .components import LedgerComponents
from .core.events import (
    AddFailed,
    AddStored,
    BookieSlow,
    ChooseBookies,
    EntriesRead,
    EntryRead,
    Event,
    Failed,
    Finished,
    Instruction,
    LastConfirmedRead,
    MetadataFound,
    ReadEntries,
    ReadLastConfirmed,
    RetryDue,
    RetryLater,
    SendAdds,
    WriteMetadata,
)
from .core.metadata import LedgerMetadata
from .core.outstanding_adds import MAX_ADD_TIMEOUTS
from .core.recovery import RecoveryCore
from .replicas import SILENT

# Before a bookie that had too much to do gets entries again.
RETRY_PAUSE_S = 0.1
_MAX_READS = 12
_MAX_READ_BYTES = 1 << 20  # of one answer, unless its first entry is larger
_MAX_HELD_BYTES = 32 << 20

# First and last entry, and the stripe, which has both.
_Run = tuple[int, int, Stripe]


async def recover(
    components: LedgerComponents, ledger_id: int, found: MetadataFound, accepted_end: int | None = None
) -> LedgerMetadata:
    """Fences, repairs and closes the ledger; returns its final metadata.

    QuorumLost, NotEnoughBookies: nothing was truncated, try again. LedgerNotFound if it was deleted meanwhile. With
    `accepted_end` see `core.recovery`; InvalidArgument when a bookie proves an entry behind it.
    """
    return await _Recovery(components, ledger_id, found, accepted_end).run()


class _Recovery:
    def __init__(
        self,
        components: LedgerComponents,
        ledger_id: int,
        found: MetadataFound,
        accepted_end: int | None,
    ) -> None:
        self._components = components
        self._ledger_id = ledger_id
        self._core = RecoveryCore(ledger_id, found.metadata, found.version, accepted_end=accepted_end)
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[LedgerMetadata] = self._loop.create_future()
        self._tasks = TaskSet(f"recovery of ledger {ledger_id}")
        self._reads = _Reads(components, ledger_id, self._core, self._handle, self._fail)
        self._answered: list[Event] = []  # adds, in this turn of the loop
        self._retry_timer: asyncio.TimerHandle | None = None
        # Loop time since which bookies have too much to do and none has stored an entry.
        self._stuck_since: float | None = None

    async def run(self) -> LedgerMetadata:
        self._carry_out(self._core.begin())
        try:
            return await self._done
        finally:
            if self._retry_timer is not None:
                self._retry_timer.cancel()
            await asyncio.gather(self._tasks.close(), self._reads.close(), return_exceptions=True)

    def _handle(self, event: Event) -> None:
        if not self._done.done():
            self._carry_out(self._core.handle(event))

    def _handle_events(self, events: Sequence[Event]) -> None:
        instructions: list[Instruction] = []
        for event in events:
            if self._done.done():
                return
            wanted = self._core.handle(event)
            instructions += wanted
            if any(isinstance(instruction, ChooseBookies) for instruction in wanted):
                # Answered before the next event: a second failure asks for bookies as well, and must know these.
                self._carry_out(instructions)
                instructions = []
        if not self._done.done():
            self._carry_out(instructions)

    def _carry_out(self, instructions: list[Instruction]) -> None:
        queue = deque(instructions)
        while queue:
            match queue.popleft():
                case SendAdds(bookie, adds):
                    for entry_id, entry in adds:
                        self._components.transport.add(
                            bookie, entry, self._ledger_id, entry_id, recovery=True, done=self._on_added
                        )
                case ReadEntries() as read:
                    self._reads.ask(read)
                case ReadLastConfirmed(bookie):
                    self._start(self._read_last_confirmed(bookie))
                case RetryLater():
                    self._retry_later()
                case ChooseBookies() as ask:
                    chosen = self._components.chooser.replacements(ask)
                    queue.extend(self._core.handle(chosen))
                case WriteMetadata(metadata, version):
                    self._start(self._write_metadata(metadata, version))
                case Finished(metadata):
                    self._done.set_result(metadata)
                case Failed(error):
                    self._done.set_exception(error)
                case instruction:
                    raise AssertionError(f"not an instruction of a recovery: {instruction}")
        if not self._done.done():
            self._reads.flush()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.begin(work, ended=self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)  # a bug: fails the recovery instead of leaving it waiting

    def _fail(self, error: BaseException) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    def _on_added(self, bookie: str, _ledger_id: int, entry_id: int, code: int) -> None:
        if not self._answered:
            # The answers of one turn, often hundreds of one journal sync, go to the core together.
            self._loop.call_soon(self._handle_answers)
        if code:
            self._components.health.failed(bookie, code)
            self._answered.append(AddFailed(bookie, entry_id, code))
        else:
            self._answered.append(AddStored(bookie, entry_id))

    def _handle_answers(self) -> None:
        events, self._answered = self._answered, []
        if any(isinstance(event, AddStored) for event in events):
            self._stuck_since = None
        self._handle_events(events)

    def _retry_later(self) -> None:
        if self._stuck_since is None:
            self._stuck_since = self._loop.time()
        if self._retry_timer is None:
            self._retry_timer = self._loop.call_later(RETRY_PAUSE_S, self._retry)

    def _retry(self) -> None:
        self._retry_timer = None
        now = self._loop.time()
        longest_s = MAX_ADD_TIMEOUTS * self._components.settings.add_timeout_s
        self._handle(RetryDue(now - (self._stuck_since or now) > longest_s))

    async def _read_last_confirmed(self, bookie: str) -> None:
        try:
            answer = await self._components.transport.read_last_confirmed(bookie, self._ledger_id, fence=True)
            event = LastConfirmedRead(bookie, answer.last_add_confirmed, 0)
            # Re-adds have a connection of their own, whose backoff says nothing about a bookie that has just answered.
            self._components.transport.reset_backoff(bookie)
        except MagnetarError as error:
            self._components.health.failed(bookie, error.code)
            event = LastConfirmedRead(bookie, -1, error.code)
        self._handle(event)

    async def _write_metadata(self, metadata: LedgerMetadata, version: int) -> None:
        self._handle(await self._components.records.write(self._ledger_id, metadata, version))


class _Reads:
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
        except SILENT as error:
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
