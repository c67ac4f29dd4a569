"""The asyncio shell around `core.recovery`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

from magnetar.proto.errors import MagnetarError
from magnetar.runtime.tasks import TaskSet

from .components import LedgerComponents
from .core.events import (
    AddFailed,
    AddStored,
    ChooseBookies,
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
from .recovery_reads import RecoveryReads

# Before a bookie that had too much to do gets entries again.
RETRY_PAUSE_S = 0.1


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
        self._reads = RecoveryReads(components, ledger_id, self._core, self._handle, self._fail)
        self._answered: list[Event] = []  # adds, in this turn of the loop
        self._retry_timer: asyncio.TimerHandle | None = None
        # Loop time since which bookies have too much to do and none has stored an entry.
        self._stuck_since: float | None = None
        self._added = self._on_added  # one bound method for all adds

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
                            bookie, entry, self._ledger_id, entry_id, recovery=True, done=self._added
                        )
                case ReadEntries() as read:
                    self._reads.ask(read)
                case ReadLastConfirmed(bookie):
                    self._start(self._read_last_confirmed(bookie))
                case RetryLater():
                    self._retry_later()
                case ChooseBookies() as ask:
                    chooser = self._components.chooser.of(self._core.metadata.properties)
                    chosen = chooser.replacements(ask, self._core.metadata.striping)
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
            self._components.transport.expect(bookie)
        except MagnetarError as error:
            self._components.health.failed(bookie, error.code)
            event = LastConfirmedRead(bookie, -1, error.code)
        self._handle(event)

    async def _write_metadata(self, metadata: LedgerMetadata, version: int) -> None:
        self._handle(await self._components.write_metadata(self._ledger_id, metadata, version))
