"""LedgerWriter: the asyncio shell around `core.writer`, and around `core.deferred` in front of it for deferred sync."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from magnetar.proto.commands import ADD_ACCEPTED
from magnetar.proto.errors import EntriesNotForced, EntryNotFound, FinalError, LedgerFenced, MagnetarError
from magnetar.proto.ledger_entry import NO_ENTRY
from magnetar.runtime.tasks import TaskSet

from .components import LedgerComponents
from .core.deferred import DeferredSync
from .core.degrade import DEGRADED_PROPERTY, asked_for
from .core.events import (
    Accepted,
    AddFailed,
    ChooseBookies,
    CloseRequested,
    Confirm,
    Detached,
    Event,
    ExplicitLacWritten,
    Failed,
    Finished,
    ForceAdds,
    ForceRequested,
    IdleTick,
    Instruction,
    LedgerDeleted,
    MetadataFailed,
    PendingAdd,
    ReadMetadata,
    RetryDue,
    RetryLater,
    SendAdds,
    WriteExplicitLac,
    WriteMetadata,
)
from .core.metadata import LedgerMetadata
from .core.outstanding_adds import MAX_ADD_TIMEOUTS
from .core.writer import WriterCore, WriterState
from .replicas import Replicas

_log = logging.getLogger(__name__)

# Before adds that a busy bookie refused are sent to it again.
RETRY_PAUSE_S = 0.5

# entry id, whole ledger entry, None or why it was not confirmed.
ConfirmCallback = Callable[[int, bytes, MagnetarError | None], None]


class LedgerWriter:
    """The one writer of an open ledger. Made by LedgerClient.create.

    With deferred sync an entry is *accepted* when its ack quorum has it, and *confirmed* when its ack quorum has it durably:
    after `force`, or when the bookies sync by themselves (`journal_deferred_sync_s`). `append` says which callback comes
    when. `last_add_confirmed`, readers and recoveries only count durable entries. Without deferred sync bookies answer only
    when an entry is durable.
    """

    def __init__(
        self,
        components: LedgerComponents,
        ledger_id: int,
        metadata: LedgerMetadata,
        version: int,
        forget: Callable[[LedgerWriter], None],
        *,
        explicit_lac: bool = True,
        deferred_sync: bool = False,
        accepted: Callable[[int], None] | None = None,
    ) -> None:
        """`deferred_sync`, `accepted`: see `LedgerClient.create`."""
        self.ledger_id = ledger_id
        self._components = components
        self._core = WriterCore(ledger_id, metadata, version)
        self._deferred: DeferredSync | None = None
        if deferred_sync or accepted is not None:
            self._deferred = DeferredSync(self._core, components.settings.max_unforced_bytes)
        self._accepted = accepted
        self._machine: WriterCore | DeferredSync = self._deferred or self._core  # takes the events
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._add = components.transport.add
        self._tasks = TaskSet(f"ledger {ledger_id}")
        # Calls of `force`, in order: the entry that must be confirmed, and the future of the caller.
        self._forces: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._closing: asyncio.Future[LedgerMetadata] | None = None
        self._lac_interval_s = components.settings.explicit_lac_interval_s if explicit_lac else 0.0
        self._lac_delay_s = self._lac_interval_s  # doubles while a bookie does not take the explicit LAC
        self._lac_timer: asyncio.TimerHandle | None = None
        self._lac_seen = NO_ENTRY  # last_add_pushed when the timer fired last
        self._retry_timer: asyncio.TimerHandle | None = None
        self._replicas = Replicas(components, ledger_id)
        # While busy bookies are retried: last_add_confirmed, and since when it has not moved.
        self._stalled_since: tuple[int, float] | None = None
        # The striping that was asked for, if there were too few bookies for it; None: the ledger has it.
        self._full_striping = asked_for(metadata.properties.get(DEGRADED_PROPERTY, ""))
        # `_replaceable` was found out for these writable bookies and suspects.
        self._writable: Sequence[str] | None = None
        self._suspects: tuple[str, ...] = ()
        self._replaceable = False

    @property
    def degraded(self) -> bool:
        """Whether the ledger has fewer bookies than were asked for (`minimum_write_quorum`)."""
        return self._full_striping is not None

    @property
    def replaceable(self) -> bool:
        """Whether a better ledger could be made now: the owner should close this one and make the next.

        That is so if this one is degraded and there are bookies for a full one, or if one of its bookies is being drained
        and there are others. Cheap enough for every append: it looks again only when writable or suspected bookies change.
        """
        bookies = self._components.bookies
        writable, suspects = bookies.writable(), self._components.health.suspects()
        if writable is not self._writable or suspects != self._suspects:
            self._writable, self._suspects = writable, suspects
            metadata = self.metadata
            wanted = self._full_striping
            if wanted is None and any(map(bookies.draining, metadata.last_ensemble.bookies)):
                wanted = metadata.striping
            chooser = self._components.chooser.of(metadata.properties)
            self._replaceable = wanted is not None and chooser.can_place(wanted)
        return self._replaceable

    @property
    def last_add_pushed(self) -> int:
        """Entry id of the last append, confirmed or not; -1 for none. After a failure equal to last_add_confirmed."""
        return self._core.last_add_pushed

    @property
    def last_add_confirmed(self) -> int:
        """Last entry that is durable on its ack quorum, as all before it are; -1 for none."""
        return self._core.last_add_confirmed

    @property
    def deferred_sync(self) -> bool:
        """Whether appends are answered before they are durable."""
        return self._deferred is not None

    @property
    def last_add_accepted(self) -> int:
        """Last entry that was accepted, as all before it were; -1 for none. After a failure equal to last_add_confirmed."""
        return self.last_add_confirmed if self._deferred is None else self._deferred.last_add_accepted

    @property
    def unforced_bytes(self) -> int:
        """Bytes of the entries that were answered and are not durable yet, headers included."""
        return 0 if self._deferred is None else self._deferred.accepted_bytes

    @property
    def length(self) -> int:
        """Payload bytes up to last_add_pushed."""
        return self._core.length

    @property
    def outstanding_bytes(self) -> int:
        """Bytes of the entries that are not confirmed yet, headers included."""
        return self._core.outstanding_bytes

    @property
    def under_replicated(self) -> int:
        """Adds that busy bookies refused and that their ack quorum confirmed: copies that the repair has to make."""
        return self._core.busy.under_replicated

    @property
    def metadata(self) -> LedgerMetadata:
        """The ledger's metadata as last written or read by this writer."""
        return self._core.metadata

    def append(self, payload: bytes, confirmed: ConfirmCallback) -> int:
        """Appends an entry and returns its id at once; `confirmed` is called when the ack quorum has it durably.

        With deferred sync, and without `accepted`, it is called when the ack quorum has accepted the entry; while
        max_unforced_bytes of such entries wait for a sync, later ones are answered once earlier ones are durable.

        The calls come in entry order and never from within `append`. After a failure (LedgerFenced, LedgerClosed,
        NotEnoughBookies, ...) the entry has no id: -1 is returned, and the error comes in a later turn of the loop.
        """
        core = self._core
        if core.error is not None or core.close_requested:
            self._loop.call_soon(confirmed, NO_ENTRY, b"", core.refusal())
            return NO_ENTRY
        entry, bookies = core.append(payload, confirmed)
        entry_id, added = core.last_add_pushed, self._added
        for bookie in bookies:
            self._add(
                bookie,
                entry,
                self.ledger_id,
                entry_id,
                recovery=False,
                done=added,
                deferred=self._deferred is not None,
            )
        return entry_id

    async def force(self) -> None:
        """Returns when all entries appended before are durable on their ack quorums and `last_add_confirmed` says so.

        Without deferred sync this only waits, because bookies sync every add. Raises what the writer failed with; then only
        the end of the ledger, once it is closed or recovered, shows how many of the entries are stored.
        """
        core = self._core
        if core.error is not None:
            raise core.error
        if core.last_add_pushed > core.last_add_confirmed:
            forced: asyncio.Future[None] = self._loop.create_future()
            self._forces.append((core.last_add_pushed, forced))
            if self._deferred is not None:  # every add of an ordinary ledger is synced already
                self._handle(ForceRequested())
            await forced

    async def close(self) -> LedgerMetadata:
        """Forces what is outstanding and waits for it, then closes by compare-and-set; returns the final metadata.

        After a failure it closes at last_add_confirmed; EntriesNotForced if that loses entries that had been answered.
        LedgerFenced if another owner closed it at another entry or is recovering it; after FinalError and other errors of
        the metadata store, call it again. May be called more than once.
        """
        future = self._closing
        if future is None:
            future = self._closing = self._loop.create_future()
            # The caller may be cancelled; then nothing retrieves the error.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._handle(CloseRequested())
        return await asyncio.shield(future)

    async def read(self, first: int, last: int, *, max_bytes: int = 0) -> list[bytes]:
        """Verified ledger entries first..last; see LedgerReader.read. EntryNotFound past last_add_confirmed."""
        if not 0 <= first <= last or first > self.last_add_confirmed:
            raise EntryNotFound(
                f"ledger {self.ledger_id} has no entries {first}..{last} yet: confirmed up to {self.last_add_confirmed}"
            )
        last = min(last, self.last_add_confirmed)
        return await self._replicas.read(self._core.metadata, first, last, max_bytes)

    def detach(self) -> None:
        """Leaves the ledger as it is, open: stops timers and tasks and calls no callback any more (as a crash would).

        A `close` that is under way, or comes later, ends with AlreadyClosed; so do appends.
        """
        self._stop_timer()
        self._tasks.cancel()
        self._handle(Detached())
        self._end_forces(self._core.error)
        self._forget(self)

    def ledger_deleted(self) -> None:
        """Called when its client deleted the ledger: outstanding adds fail with LedgerNotFound, and nothing more is sent."""
        self._stop_timer()
        self._handle(LedgerDeleted())
        self._forget(self)

    async def ended(self) -> None:
        """Waits for the tasks that `detach` cancelled."""
        await self._tasks.wait()

    # --- answers -----------------------------------------------------------------------------------------------------

    @property
    def _added(self) -> Callable[[str, int, int, int], None]:
        """Bound for every append, which takes 0.1 µs: bound once, it would keep the writer from being freed."""
        return self._on_added if self._deferred is None else self._on_deferred_answer

    def _on_added(self, bookie: str, _ledger_id: int, entry_id: int, code: int) -> None:
        if code:
            self._add_failed(bookie, entry_id, code)
            return
        core = self._core
        confirmed = core.stored(bookie, entry_id)
        if confirmed:
            self._confirm(core.last_add_confirmed + 1 - len(confirmed), confirmed, None)
            if core.state is WriterState.DRAINING:
                self._run(core.drained())

    def _on_deferred_answer(self, bookie: str, _ledger_id: int, entry_id: int, code: int) -> None:
        core, deferred = self._core, self._deferred
        assert deferred is not None
        if code == ADD_ACCEPTED:
            if answered := deferred.accepted(bookie, entry_id):
                self._answer(answered)
            return
        if code:
            self._add_failed(bookie, entry_id, code)
            return
        confirmed = deferred.stored(bookie, entry_id)
        if confirmed:
            self._confirm(core.last_add_confirmed + 1 - len(confirmed), confirmed, None)
        if answered := deferred.take():
            self._answer(answered)
        elif confirmed and deferred.wants_force:
            self._handle(ForceRequested())
        if confirmed and core.state is WriterState.DRAINING:
            self._run(core.drained())

    def _add_failed(self, bookie: str, entry_id: int, code: int) -> None:
        self._components.health.failed(bookie, code)
        self._handle(AddFailed(bookie, entry_id, code))

    def _confirm(self, entry_id: int, adds: Sequence[PendingAdd], error: MagnetarError | None) -> None:
        for add in adds:
            try:
                add.context(entry_id, add.entry, error)
            except Exception as failure:
                self._callback_failed(failure)
            entry_id += 1
        if self._forces:
            self._end_forces(error)
        if self._lac_timer is None and self._lac_interval_s and error is None:
            self._lac_timer = self._loop.call_later(self._lac_delay_s / 2, self._idle_tick)

    def _callback_failed(self, failure: Exception) -> None:
        message = f"a confirm callback of ledger {self.ledger_id} failed"
        self._loop.call_exception_handler({"message": message, "exception": failure})

    def _answer(self, adds: Sequence[PendingAdd]) -> None:
        """These entries are accepted: reports them to the owner that gave `accepted`, or else calls their callbacks.

        A callback that is called here is not called again when the entry is confirmed, or fails.
        """
        deferred = self._deferred
        assert deferred is not None
        if self._accepted is not None:
            self._accepted(deferred.last_add_accepted)
            adds = ()
        for entry_id, add in enumerate(adds, deferred.last_add_accepted + 1 - len(adds)):
            confirmed, add.context = add.context, _already_notified
            try:
                confirmed(entry_id, add.entry, None)
            except Exception as failure:
                self._callback_failed(failure)
        if deferred.wants_force:
            self._handle(ForceRequested())

    def _end_forces(self, error: MagnetarError | None) -> None:
        """Ends the calls of `force` whose entries are confirmed; with an error all of them, by raising it."""
        forces, confirmed = self._forces, self._core.last_add_confirmed
        while forces and (error is not None or forces[0][0] <= confirmed):
            _, forced = forces.popleft()
            if not forced.done():  # the caller was not cancelled
                if error is None:
                    forced.set_result(None)
                else:
                    forced.set_exception(error)

    def _handle(self, event: Event) -> None:
        self._run(self._machine.handle(event))

    def _run(self, instructions: list[Instruction]) -> None:
        """Carries out instructions, and those that follow from events which these cause at once."""
        queue = deque(instructions)
        while queue:
            match queue.popleft():
                case SendAdds(bookie, adds):
                    for entry_id, entry in adds:
                        self._add(bookie, entry, self.ledger_id, entry_id, recovery=False, done=self._added)
                case Confirm(first, adds, error):
                    self._confirm(first, adds, error)
                case Accepted(_, adds):
                    self._answer(adds)
                case ForceAdds(bookies):
                    for bookie in bookies:
                        self._components.transport.force(bookie, self.ledger_id)
                case ChooseBookies() as ask:
                    chosen = self._components.chooser.replacements(ask)
                    queue.extend(self._machine.handle(chosen))
                case RetryLater():
                    self._retry_later()
                case WriteMetadata(metadata, version):
                    self._start(self._write_metadata(metadata, version))
                case ReadMetadata():
                    self._start(self._read_metadata())
                case WriteExplicitLac(bookies, last_add_confirmed):
                    self._start(self._write_explicit_lac(bookies, last_add_confirmed))
                case Finished(metadata):
                    self._finished(metadata)
                case Failed(error):
                    self._close_failed(error)
                case instruction:
                    raise AssertionError(f"not an instruction of a writer: {instruction}")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.begin(work, ended=self._work_ended)

    def _work_ended(self, task: asyncio.Task[None]) -> None:
        """A defect in a task fails the writer: adds and `close` would otherwise wait for its answer for ever."""
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            _log.error("the writer of ledger %d fails by a defect", self.ledger_id, exc_info=failure)
            if self._core.state is not WriterState.CLOSED:
                error = FinalError(f"the writer of ledger {self.ledger_id} has failed: {failure!r}")
                self._handle(MetadataFailed(error))

    async def _write_metadata(self, metadata: LedgerMetadata, version: int) -> None:
        self._handle(await self._components.records.write(self.ledger_id, metadata, version))

    async def _read_metadata(self) -> None:
        self._handle(await self._components.records.find(self.ledger_id))

    def _finished(self, metadata: LedgerMetadata) -> None:
        self._stop_timer()
        self._forget(self)
        deferred = self._deferred
        # An owner that gave `accepted` still has the entries, and so loses none.
        if deferred is not None and deferred.dropped and self._accepted is None:
            self._close_failed(
                EntriesNotForced(
                    f"ledger {self.ledger_id} is closed at entry {metadata.last_entry}; {deferred.dropped} entries behind "
                    f"it were accepted and not forced when its writer failed: {self._core.error}",
                    ledger_id=self.ledger_id,
                    last_entry=metadata.last_entry,
                )
            )
        elif self._closing is not None and not self._closing.done():
            self._closing.set_result(metadata)

    def _close_failed(self, error: MagnetarError) -> None:
        if self._closing is not None and not self._closing.done():
            self._closing.set_exception(error)
        self._closing = None  # `close` may be called again

    # --- busy bookies ------------------------------------------------------------------------------------------------

    def _retry_later(self) -> None:
        if self._retry_timer is None:
            self._retry_timer = self._loop.call_later(RETRY_PAUSE_S, self._retry)

    def _retry(self) -> None:
        self._retry_timer = None
        now, confirmed = self._loop.time(), self._core.last_add_confirmed
        if not self._core.pending:
            self._stalled_since = None
        elif self._stalled_since is None or self._stalled_since[0] != confirmed:
            self._stalled_since = (confirmed, now)
        since = now if self._stalled_since is None else self._stalled_since[1]
        expired = now - since > MAX_ADD_TIMEOUTS * self._components.settings.add_timeout_s
        self._handle(RetryDue(expired))

    # --- explicit LAC (rule 19) --------------------------------------------------------------------------------------

    def _idle_tick(self) -> None:
        """Writes the explicit LAC after half an interval without an append, and so within an interval after the last one.

        While entries are appended they carry the LAC themselves, so that nothing is written here.
        """
        self._lac_timer = None
        core = self._core
        seen, self._lac_seen = self._lac_seen, core.last_add_pushed
        if seen != self._lac_seen or (
            core.pending and core.sending and not self._machine.idle_last_confirmed
        ):
            self._lac_timer = self._loop.call_later(self._lac_delay_s / 2, self._idle_tick)
        else:
            self._handle(IdleTick())

    async def _write_explicit_lac(self, bookies: tuple[str, ...], last_add_confirmed: int) -> None:
        write = self._components.transport.write_last_confirmed
        results = await asyncio.gather(
            *(write(bookie, self.ledger_id, last_add_confirmed) for bookie in bookies), return_exceptions=True
        )
        if not any(isinstance(result, BaseException) for result in results):
            self._lac_delay_s = self._lac_interval_s
            self._handle(ExplicitLacWritten(last_add_confirmed))
        elif not any(isinstance(result, LedgerFenced) for result in results):  # which it stays: no retry
            maximum = self._components.settings.explicit_lac_backoff_max_s
            self._lac_delay_s = max(self._lac_interval_s, min(self._lac_delay_s * 2, maximum))
            if self._lac_timer is None and self._machine.idle_last_confirmed:
                self._lac_timer = self._loop.call_later(self._lac_delay_s, self._idle_tick)

    def _stop_timer(self) -> None:
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
        self._lac_interval_s = 0
        if self._lac_timer is not None:
            self._lac_timer.cancel()
            self._lac_timer = None


def _already_notified(_entry_id: int, _entry: bytes, _error: MagnetarError | None) -> None:
    """The callback of an entry that was answered when it was accepted."""
