"""A topic's log: a list of ledgers in metadata, of which the last one may be open and is written by this broker alone.

States, and what moves them (one place each):

    IDLE      no open ledger; a topic that nobody publishes to costs none
      --> ROLLING   `wake` when there is something to append
    ROLLING   the old ledger, if any, is being closed (and waited for); then the next one is created, if one is needed
      --> WRITING   compare-and-set of the list succeeded; pending entries were resubmitted in order
      --> IDLE      nothing is to be appended; the list says that the old ledger is closed
      --> FENCED    another owner: version conflict, or a fenced ledger
    WRITING   `append` is taken while `accepting`
      --> ROLLING   an append failed (rule 24); a roll-over is due (`rollover`) or wanted by `edit`, and nothing is pending
      --> FENCED    the ledger was fenced, or bookies take no entry of that size
    FENCED, CLOSED  final

Rule 23: opening recovers and closes the last ledger and then writes the list by compare-and-set, even if nothing changed:
a former owner that is still alive finds the conflict. Rule 24: entries that failed are appended to the next ledger only
after the old one is closed; what the closed ledger is found to hold counts as confirmed and is not appended again;
callbacks of a ledger that was left are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from magnetar.metadata import MetadataStore
from magnetar.proto.entry import rebase_entry
from magnetar.proto.errors import (
    LedgerFenced,
    MagnetarError,
    MessageLost,
    MessageTooLarge,
    TopicBusy,
    TopicNotServed,
    VersionConflict,
)
from magnetar.proto.ids import TopicName
from magnetar.runtime.clock import Clock
from magnetar.runtime.tasks import TaskSet

from ..cursors.core.acks import AckState, Position
from ..cursors.cursor import Cursor
from ..resources.stores import Ledgers, Reads
from ..resources.tasks import finish
from ..settings import BrokerSettings
from .archives import ArchiveReader
from .durability import Durability, Flusher
from .ledger_change import LedgerChange
from .ledger_list import LedgerList
from .open_ledger import LedgerEvents, OpenLedger, State, measure
from .pending import PendingEntries, PendingEntry
from .readers import LedgerReaders
from .records import LedgerInfo, cursor_path
from .rollover import rollover_due
from .shared_reads import SharedReads

_log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
MAX_ENTRIES_PER_READ = 1024
# What is deleted at once, while the list cannot change otherwise and a topic that rolls over waits.
MAX_LEDGERS_PER_TRIMMING = 1_000


class ManagedLedger(Generic[T]):
    """See the module docstring. Use `open`; `close` when done."""

    def __init__(
        self,
        name: TopicName,
        metadata: MetadataStore,
        ledgers: Ledgers,
        archives: ArchiveReader,
        shared_reads: SharedReads,
        settings: BrokerSettings,
        clock: Clock,
        events: LedgerEvents[T],
        durability: Callable[[], Durability],
    ) -> None:
        """`durability`: of the next ledger, by the policies in force; raises MagnetarError while they are not known."""
        self.name = name
        self._metadata = metadata
        self._ledgers = ledgers
        self._archives = archives
        self._shared_reads = shared_reads
        self._settings = settings
        self._clock = clock
        self.events = events
        self.durability = durability
        self.state = State.IDLE
        self.list = LedgerList(name, metadata)
        self._change_of_ledger = LedgerChange(
            str(name), settings.ledger_change_spread_ms, durability, self._end
        )
        self._list_lock = asyncio.Lock()  # one change of the list at a time
        self.open_ledger: OpenLedger | None = None
        self._pending: PendingEntries[T] = PendingEntries()
        self._flusher = Flusher(
            settings.flush_interval_ms,
            settings.max_outstanding_bytes,
            lambda: self._pending.receipted_bytes,
            lambda: None if self.open_ledger is None else self.open_ledger.writer,
        )
        self._due = False  # limits were reached: no more appends to this ledger
        self._wanted = False  # there is something to append: the roll-over must not end in IDLE
        self._pause_ms = settings.retry_initial_ms  # doubles until an entry is confirmed
        # At most one is rolling over; one before it may still be deleting what it let go of.
        self._rolls = TaskSet(f"rolling over of topic {self.name}")
        self._readers = LedgerReaders(ledgers)
        self._in_turn = 0  # callers of `append_in_turn` that wait for room
        self._waiting: list[asyncio.Future[None]] = []  # for a change of the state, or of what is pending
        self._fenced: MagnetarError | None = None
        self._time_ms = 0  # of the latest message

    # --- opening -----------------------------------------------------------------------------------------------------

    async def open(self, *, create: bool) -> bool:
        """Takes the topic over (rule 23). False: it was made. TopicNotFound unless `create`; TopicBusy on a conflict."""
        existed = await self.list.load(create_ms=self._clock.now_ms() if create else None)
        if not existed or self.list.record.deleting:
            return existed
        if self.list.ledgers and not self.list.ledgers[-1].closed:
            await self._recover(self.list.ledgers[-1])
        record = self.list.record
        # A compaction that did not come to its end left a ledger, or only the intention of one.
        abandoned = [record.compacting] if record.compacting >= 0 else []
        try:
            await self.list.commit(delete=abandoned, compacting=-1)
        except VersionConflict as conflict:
            raise TopicBusy(f"topic {self.name} is being taken over by another broker") from conflict
        await self.list.sweep()
        newest = [*self.list.archived_ledgers[-1:], *self.list.ledgers[-1:]]
        self._time_ms = max((info.last_append_ms for info in newest), default=0)
        await self._readers.delete_trimmed(self.list)
        return True

    async def _recover(self, info: LedgerInfo) -> None:
        reader = await self._ledgers.open(info.stored_id, recover=True)
        await measure(info, reader, reader.last_add_confirmed)
        self._finish(info, reader.last_add_confirmed + 1)

    def _finish(self, info: LedgerInfo, entries: int) -> None:
        info.entries = entries
        info.closed = True
        self.list.record.next_index = info.first_index + info.messages

    # --- appending ---------------------------------------------------------------------------------------------------

    @property
    def accepting(self) -> bool:
        """True if `append` may be called: a ledger is open, its pipeline is not full, and nobody waits `append_in_turn`."""
        return self._has_room and not self._in_turn

    @property
    def _has_room(self) -> bool:
        return (
            self.state is State.WRITING
            and not self._due
            and self._pending.room(
                self._settings.max_outstanding_entries, self._settings.max_outstanding_bytes
            )
        )

    @property
    def outstanding_bytes(self) -> int:
        """Appended and not confirmed."""
        return self._pending.outstanding_bytes

    @property
    def unflushed_bytes(self) -> int:
        """flush=async: acknowledged, and not durable yet."""
        return self._pending.receipted_bytes

    @property
    def next_position(self) -> tuple[int, int]:
        """Ledger and entry: what is appended from now on comes at this place or behind it."""
        ledger_id, entries, _ = self.list.end
        return (ledger_id, entries) if self.open_ledger is None else (ledger_id, entries + len(self._pending))

    @property
    def next_message(self) -> int:
        """Index in the ledger of the next message: `first_index` of the entry to append now."""
        assert self.open_ledger is not None
        return self.open_ledger.next_message

    def wake(self) -> None:
        """There is something to append: an idle topic opens its next ledger; `events.ready` comes when it is open."""
        if self.state in (State.IDLE, State.ROLLING):
            self._wanted = True
            self._roll()

    def now_ms(self) -> int:
        """The time of what becomes part of the topic now: the wall clock, but never before that of an earlier message."""
        self._time_ms = max(self._time_ms, self._clock.now_ms())
        return self._time_ms

    def append(self, payload: bytes, messages: int, append_time_ms: int, context: T) -> None:
        """Appends an encoded entry. Confirmed in order by `events.confirmed`, or failed as a whole by `events.fenced`."""
        self._append(PendingEntry(payload, messages, append_time_ms, context))

    async def append_in_turn(
        self, encode: Callable[[int, int], bytes], messages: int, context: T
    ) -> tuple[int, int]:
        """Appends an entry ahead of those who look at `accepting`; returns its ledger and entry once it is confirmed.

        `encode` gets `first_index` and the append time in ms since the epoch. Raises TopicNotServed: whether the entry was
        appended is not known then.
        """
        self._in_turn += 1
        try:
            while not self._has_room:
                self.check_served()
                self.wake()
                await self._change()
            now = self.now_ms()
            place: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
            self._append(PendingEntry(encode(self.next_message, now), messages, now, context, place))
        finally:
            self._in_turn -= 1
            self.events.ready()
        return await place

    def _append(self, pending: PendingEntry[T]) -> None:
        self._pending.add(pending)
        self._submit(pending)

    def _submit(self, pending: PendingEntry[T]) -> None:
        ledger = self.open_ledger
        assert ledger is not None
        ledger.next_message += pending.messages
        pending.entry_id = ledger.writer.append(pending.payload, ledger.confirmed)
        if self._rollover_due(ledger):
            self._due = True
        elif ledger.writer.replaceable and not ledger.leaving:
            self._change_of_ledger.soon(ledger)

    def _rollover_due(self, ledger: OpenLedger) -> bool:
        entries = ledger.info.entries + len(self._pending)
        age_ms = (asyncio.get_running_loop().time() - ledger.opened_at) * 1000
        return rollover_due(self._settings, entries, ledger.writer.length, age_ms)

    def _accepted(self, last_entry: int) -> None:
        """flush=async: ack_quorum bookies have the entries of the open ledger up to this one in memory."""
        ledger = self.open_ledger
        if ledger is None or not ledger.live:
            return
        for pending in self._pending.receipt(last_entry):
            self.events.accepted(ledger.info.ledger_id, pending.entry_id, pending.context)
        if self._due:
            self._flusher.force()
        else:
            self._flusher.receipted()
        self._changed()

    def _entry_done(
        self, ledger: OpenLedger, entry_id: int, entry: bytes | None, error: MagnetarError | None
    ) -> None:
        if error is not None:
            ledger.live = False
            if isinstance(error, LedgerFenced):
                self.fence(error)
            elif isinstance(error, MessageTooLarge):  # in the next ledger as well
                self.fence(TopicNotServed(f"topic {self.name} cannot be written: {error}"))
            else:
                _log.warning("topic %s: ledger %d failed: %s", self.name, ledger.info.ledger_id, error)
                self.events.delayed(error)
                self._roll()
            return
        self._confirm(ledger.info, entry_id, entry)
        if self._due and not self._pending:
            self._roll()
        self._changed()

    def _confirm(self, info: LedgerInfo, entry_id: int, entry: bytes | None) -> None:
        pending = self._pending.take()
        assert pending.entry_id == entry_id
        self._pause_ms = self._settings.retry_initial_ms
        info.entries = entry_id + 1
        info.messages += pending.messages
        info.size += len(pending.payload)
        info.last_append_ms = pending.append_time_ms
        if not info.first_append_ms:
            info.first_append_ms = pending.append_time_ms
        if pending.place is not None and not pending.place.done():
            pending.place.set_result((info.ledger_id, entry_id))
        self.events.confirmed(info.ledger_id, entry_id, entry, pending.context)

    async def _change(self) -> None:
        """Returns when the state, or what is pending, is to be looked at again."""
        self._waiting.append(asyncio.get_running_loop().create_future())
        await self._waiting[-1]

    def _changed(self) -> None:
        while self._waiting:
            waiting = self._waiting.pop()
            if not waiting.done():
                waiting.set_result(None)

    # --- the next ledger ---------------------------------------------------------------------------------------------

    def _roll(self) -> None:
        if self.state in (State.IDLE, State.WRITING):
            self.state = State.ROLLING
            self._changed()
            self._rolls.begin(self._next_ledger())

    def roll_if_due(self) -> bool:
        """Maintenance: a ledger that holds something and is due is closed, once nothing is pending. True if one is."""
        ledger = self.open_ledger
        if self.state is not State.WRITING or ledger is None or not ledger.info.entries:
            return False
        if self._rollover_due(ledger):
            self._end(ledger)
        else:
            self._change_of_ledger.soon(ledger)
        return self._due

    def durability_changed(self) -> None:
        """Perhaps another ledger would suit better: if so it begins soon, at this topic's own moment."""
        if self.open_ledger is not None:
            self._change_of_ledger.soon(self.open_ledger)

    def look_at_durability(self) -> None:
        """The same, at once: of one topic alone."""
        if self.open_ledger is not None:
            self._change_of_ledger.now(self.open_ledger)

    def _end(self, ledger: OpenLedger) -> None:
        """The ledger is left once nothing is pending."""
        if ledger is not self.open_ledger or self.state is not State.WRITING:
            return
        self._due = True
        if self._pending:
            self._flusher.force()
        else:
            self._roll()

    async def _next_ledger(self) -> None:
        failed = self.open_ledger
        if failed is not None and not failed.live and not failed.info.entries:
            # It took nothing: the next one may fail as fast, and leave a ledger each time.
            await self._pause()
        while True:
            try:
                async with self._list_lock:
                    if self.open_ledger is not None:
                        await self._close_open_ledger()
                        if not self._pending and not self._wanted:
                            await self.list.commit()
                    if self._pending or self._wanted:
                        await self._open_next_ledger()
                break
            except (VersionConflict, LedgerFenced) as error:
                self.fence(error)
                return
            except MagnetarError as error:
                _log.warning("topic %s: no next ledger yet: %s", self.name, error)
                self.events.delayed(error)
            except Exception as error:  # a defect here must not leave publishers waiting for ever
                _log.exception("topic %s: rolling over failed", self.name)
                self.fence(TopicNotServed(f"topic {self.name} failed here: {error!r}"))
                return
            await self._pause()
        if self.state is not State.ROLLING:  # fenced meanwhile
            return
        self._due = self._wanted = False
        if self.open_ledger is None:
            self.state = State.IDLE
        else:
            self.state = State.WRITING
            self._resubmit()
        self._changed()
        self.events.rolled()
        self.events.ready()
        async with self._list_lock:
            await self._readers.delete_trimmed(self.list)

    async def _pause(self) -> None:
        pause_ms, self._pause_ms = self._pause_ms, min(self._pause_ms * 2, self._settings.retry_max_ms)
        await asyncio.sleep(pause_ms / 1000)

    # --- changes of the list from outside ----------------------------------------------------------------------------

    async def edit(self, change: Callable[[], Coroutine[Any, Any, R]], *, closed: bool = False) -> R:
        """Runs `change`, which commits to the list, while nothing else changes it; then deletes what was trimmed.

        `closed`: and while no ledger is open. The open one is closed once what is pending is confirmed, and appending goes
        on in the next one; those who wait meanwhile share one closing. Once `change` has begun it is done, and the list is
        as it says, even if the caller is cancelled: somebody else waits for the outcome. Raises what `change` raised, or
        TopicNotServed; a conflict fences.
        """
        while True:
            async with self._list_lock:
                self.check_served()
                try:
                    if not closed or await self._close_drained():
                        result = await finish(change())
                        await self._readers.delete_trimmed(self.list)
                        return result
                except (VersionConflict, LedgerFenced) as conflict:
                    self.fence(conflict)
                    self.check_served()
                    raise
            await self._pause()

    async def _close_drained(self) -> bool:
        """True if no ledger is open any more. False: it cannot be closed yet, try again."""
        await asyncio.sleep(0)  # those who were called just now because there is room have their turn
        self._due = True
        while self.state is State.WRITING and self._pending:
            self._flusher.force()
            await self._change()
        self.check_served()
        self._roll()  # goes on when this edit, and those that wait already, are done
        try:
            await self._close_open_ledger()
        except (VersionConflict, LedgerFenced):
            raise
        except MagnetarError as error:
            _log.warning("topic %s: its ledger is not closed yet: %s", self.name, error)
            return False
        self.check_served()
        return True

    def check_served(self) -> None:
        """Raises TopicNotServed."""
        if self._fenced is not None:
            raise TopicNotServed(self._fenced.message)
        if self.state is State.CLOSED:
            raise TopicNotServed(f"topic {self.name} is not served here any more; look it up again")

    # --- closing the old ledger, opening the new one ------------------------------------------------------------------

    async def _close_open_ledger(self) -> None:
        ledger = self.open_ledger
        if ledger is None:
            return
        ledger.live = False
        info = ledger.info
        last = await ledger.close(self._ledgers)
        while self._pending and 0 <= self._pending.first.entry_id <= last:
            self._confirm(info, self._pending.first.entry_id, None)
        for pending in self._pending:
            pending.entry_id = -1
        if last + 1 != info.entries:  # it holds entries that were given up here
            await measure(info, await self._ledgers.open(info.stored_id, recover=False), last)
        self._finish(info, last + 1)
        self.open_ledger = None

    async def _open_next_ledger(self) -> None:
        durability = self.durability()
        writer = await self._ledgers.create(
            **durability.of_ledger(),
            properties={"kind": "topic", "topic": str(self.name)},
            explicit_lac=False,
            accepted=self._accepted if durability.flush == "async" else None,
        )
        info = LedgerInfo(writer.ledger_id, self.list.record.next_index)
        try:
            await self.list.commit(append=[info])
        except BaseException as error:
            writer.detach()
            if isinstance(error, VersionConflict):
                # After any other failure the stored list may name the new ledger: then it stays.
                with contextlib.suppress(MagnetarError):
                    await self._ledgers.delete(writer.ledger_id)
            raise
        opened_at = asyncio.get_running_loop().time()
        self.open_ledger = OpenLedger(writer, info, durability, opened_at, self._entry_done)

    def _resubmit(self) -> None:
        """Rule 24: what the old ledger does not hold goes to the next one, in order, numbered anew."""
        ledger = self.open_ledger
        assert ledger is not None
        for pending in self._pending:
            pending.payload = rebase_entry(pending.payload, ledger.next_message)
            self._submit(pending)

    def fence(self, cause: MagnetarError) -> None:
        """For good: another broker owns the topic, as a ledger or a cursor found. Nothing pending will be confirmed."""
        if self.state in (State.FENCED, State.CLOSED):
            return
        self.state = State.FENCED
        if self.open_ledger is not None:
            self.open_ledger.live = False
        _log.warning("topic %s: fenced: %s", self.name, cause)
        if not isinstance(cause, TopicNotServed):
            cause = TopicNotServed(f"topic {self.name} was taken over: {cause}")
        self._fenced = cause
        self._changed()
        self.events.fenced(cause)

    def abandon(self) -> list[T]:
        """What is pending will not be confirmed. Returns the contexts, for those who wait for it."""
        if self.open_ledger is not None:
            self.open_ledger.live = False
        return self._pending.abandon(self.name)

    async def close(self) -> None:
        """Waits for a roll-over, closes the open ledger and records it. Pending entries must have been confirmed."""
        fenced = self.state in (State.FENCED, State.CLOSED)
        await self._stop_rolling()
        await self._flusher.stop()
        self.state = State.CLOSED
        self._changed()
        async with self._list_lock:
            if self.open_ledger is not None and fenced:
                self.open_ledger.writer.detach()  # the ledger is another owner's
            elif self.open_ledger is not None:
                try:
                    await self._close_open_ledger()
                    await self.list.commit()
                except MagnetarError as error:  # the next owner recovers it
                    _log.warning("topic %s: closing its ledger failed: %s", self.name, error)

    async def _stop_rolling(self) -> None:
        await self._rolls.close()
        await self._readers.close()

    def cursor(self, subscription: str | None, position: Position = (0, 0, 0)) -> Cursor:
        """A cursor of this log, to be created at the position, recovered or deleted; None: a reader's, not durable."""
        return Cursor(
            None if subscription is None else cursor_path(self.name, subscription),
            AckState(self.list, position),
            self._metadata,
            self._ledgers,
            self._settings,
            self.fence,
            lambda: self.durability().of_ledger(),
        )

    # --- reading ---------------------------------------------------------------------------------------

    async def read(self, ledger_id: int, first: int, *, max_bytes: int) -> list[bytes]:
        """Confirmed ledger entries from `first` on, at least one. Raises MessageLost if they were trimmed.

        Those of an archived ledger come from its files, and fail as `ArchiveReader.read` says.
        """
        info = self.list.info(ledger_id)
        if info is None or first >= info.entries:
            raise MessageLost(
                f"entry {first} of ledger {ledger_id} does not belong to topic {self.name} any more"
            )
        last = min(info.entries, first + MAX_ENTRIES_PER_READ) - 1
        archived = self.list.archived(ledger_id)
        if archived is not None:
            return await self._archives.read(str(self.name), archived, first, last, max_bytes=max_bytes)

        async def fetch(first: int, last: int) -> list[bytes]:
            ledger = self.open_ledger
            handle: Reads
            if ledger is not None and ledger.info is info:
                handle = ledger.writer
            else:
                handle = await self._readers.reader(info.stored_id)
            return await handle.read(first, last, max_bytes=max_bytes)

        return await self._shared_reads.read(
            info.stored_id, first, last, fetch, max_bytes=max_bytes, entry_bytes=info.size // info.entries
        )

    async def read_stored(self, stored_id: int, entry: int) -> bytes:
        """One entry of a ledger that belongs to the topic and is not in its list."""
        reader = await self._readers.reader(stored_id)
        return (await reader.read(entry, entry))[0]

    # --- deleting ----------------------------------------------------------------------------------------------------

    async def mark_deleting(self) -> None:
        """From here on the topic does not exist, even if a crash comes before `delete` is done."""
        async with self._list_lock:
            compacted = self.list.record.compacted_ledgers()
            await self.list.commit(deleting=True, delete=compacted, compaction=None, compacting=-1)

    async def delete(self) -> None:
        """Deletes the ledgers of a topic marked as deleting, then its metadata; may be repeated after a crash."""
        async with self._list_lock:
            while True:
                await self._readers.delete_trimmed(self.list)
                if self.list.record.trimmed:
                    raise TopicBusy(
                        f"topic {self.name}: {len(self.list.record.trimmed)} ledgers could not be deleted; delete it again"
                    )
                if not self.list.ledgers:
                    break
                await self.list.commit(trim=min(len(self.list.ledgers), MAX_LEDGERS_PER_TRIMMING))
            await self.list.delete()


__all__ = ["LedgerEvents", "ManagedLedger", "State"]
