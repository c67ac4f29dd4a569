"""Appending to a topic's log: entries in order, confirmed in order, through one open ledger after another.

States, and what moves them (one place each):

    IDLE      no open ledger; a topic that nobody publishes to costs none
      --> ROLLING   `wake` when there is something to append
    ROLLING   the old ledger, if any, is being closed (and waited for); then the next one is created, if one is needed
      --> WRITING   compare-and-set of the list succeeded; pending entries were resubmitted in order
      --> IDLE      nothing is to be appended; the list says that the old ledger is closed
      --> FENCED    another owner: version conflict, or a fenced ledger
    WRITING   `append` is taken while `accepting`
      --> ROLLING   an append failed (rule 24); the ledger is left (`open_ledger`) or must be closed for an `edit_closed`,
                    and nothing is pending
      --> FENCED    the ledger was fenced, or bookies take no entry of that size
    FENCED, CLOSED  final

Rule 24: entries that failed are appended to the next ledger only after the old one is closed; what the closed ledger is
found to hold counts as confirmed and is not appended again; callbacks of a ledger that was left are ignored.

This is the seam between a topic and its storage: whatever is appended comes back as `events` say, in order, with what was
given to `append` (T). What a topic remembers of an entry, such as the sequence ids of its producers, belongs into that T.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from magnetar.proto.entry import rebase_entry
from magnetar.proto.errors import (
    LedgerFenced,
    MagnetarError,
    MessageTooLarge,
    TopicNotServed,
    VersionConflict,
)
from magnetar.runtime.clock import Clock
from magnetar.runtime.tasks import TaskSet

from ..cursors.core.acks import Position
from ..resources.stores import Ledgers
from ..settings import BrokerSettings
from .durability import Durability, Flusher
from .ledger_list import check_not_terminated
from .list_changes import ListChanges
from .open_ledger import OpenLedger, own_moment
from .pending import PendingEntries, PendingEntry
from .reading import LedgerReading, measure
from .records import LedgerInfo

_log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


class State(enum.Enum):
    """States of appending; the module docstring says what moves them."""

    IDLE = "idle"
    ROLLING = "rolling"
    WRITING = "writing"
    FENCED = "fenced"
    CLOSED = "closed"


class LedgerEvents(NamedTuple, Generic[T]):
    """What the topic hears. `confirmed` gets (ledger, entry, stored bytes or None, what was given to `append`)."""

    confirmed: Callable[[int, int, bytes | None, T], None]
    # With flush=async, before `confirmed`: (ledger, entry, what was given to `append`). Another ledger may confirm it.
    accepted: Callable[[int, int, T], None]
    ready: Callable[[], None]  # appending is possible (again)
    rolled: Callable[[], None]  # the ledger list changed
    fenced: Callable[[MagnetarError], None]
    delayed: Callable[[MagnetarError], None]  # what is pending waits for the next ledger, and why
    leaving: Callable[[LedgerInfo, Position], None]  # a segment of a `Ring` leaves: behind it is the position


class Appending(Generic[T]):
    """Appends to the log of one topic. `stop`, `end` and `close` it, in this order."""

    def __init__(
        self,
        changes: ListChanges,
        reading: LedgerReading,
        ledgers: Ledgers,
        settings: BrokerSettings,
        clock: Clock,
        events: LedgerEvents[T],
        durability: Callable[[], Durability],
        fence: Callable[[MagnetarError], None],
    ) -> None:
        """`durability`, `fence`: see `ManagedLedger`."""
        self._name = changes.list.name
        self._changes = changes
        self._list = changes.list
        self._reading = reading
        self._ledgers = ledgers
        self._settings = settings
        self._clock = clock
        self._events = events
        self._durability = durability
        self._fence = fence
        self.state = State.IDLE
        self.open_ledger: OpenLedger | None = None
        self._pending: PendingEntries[T] = PendingEntries()
        self._due = False  # limits were reached: no more appends to this ledger
        self._wanted = False  # there is something to append: the roll-over must not end in IDLE
        self._pause_ms = settings.retry_initial_ms  # doubles until an entry is confirmed
        # At most one is rolling over; one before it may still be deleting what it let go of.
        self._rolls = TaskSet(f"rolling over of topic {self._name}")
        self._in_turn = 0  # callers of `append_in_turn` that wait for room
        self._waiting: list[asyncio.Future[None]] = []  # for a change of the state, or of what is pending
        self._time_ms = 0  # of the latest message

    # --- entries -----------------------------------------------------------------------------------------------------

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

    def unconfirmed(self) -> Iterator[T]:
        """What was given with each entry that is not confirmed, in order."""
        return (pending.context for pending in self._pending)

    @property
    def newest(self) -> T | None:
        """What was given with the last entry that is not confirmed; None if all are."""
        return self._pending.last.context if self._pending else None

    @property
    def next_position(self) -> tuple[int, int]:
        """Ledger and entry: what is appended from now on comes at this place or behind it."""
        ledger_id, entries, _ = self._list.end
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

    def not_before(self, time_ms: int) -> None:
        """The topic has a message of this time."""
        self._time_ms = max(self._time_ms, time_ms)

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

        `encode` gets `first_index` and the append time in ms since the epoch. Raises TopicTerminated, and TopicNotServed:
        whether the entry was appended is not known then.
        """
        self._in_turn += 1
        try:
            while not self._has_room:
                self._changes.check_served()
                check_not_terminated(self._list)
                self.wake()
                await self._change()
            now = self.now_ms()
            place: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
            self._append(PendingEntry(encode(self.next_message, now), messages, now, context, place))
        finally:
            self._in_turn -= 1
            self._events.ready()
        return await place

    def _append(self, pending: PendingEntry[T]) -> None:
        self._pending.add(pending)
        self._submit(pending)

    def _submit(self, pending: PendingEntry[T]) -> None:
        ledger = self.open_ledger
        assert ledger is not None
        ledger.next_message += pending.messages
        pending.entry_id = ledger.writer.append(pending.payload, ledger.confirmed)
        if self._is_due(ledger):
            self._due = True
        elif ledger.writer.replaceable and not ledger.leaving:
            self._leave_soon(ledger)

    def _accepted(self, last_entry: int) -> None:
        """flush=async: ack_quorum bookies have the entries of the open ledger up to this one in memory."""
        ledger = self.open_ledger
        if ledger is None or not ledger.live:
            return
        for pending in self._pending.receipt(last_entry):
            self._events.accepted(ledger.info.ledger_id, pending.entry_id, pending.context)
        if self._due:
            ledger.flusher.force()
        else:
            ledger.flusher.receipted()
        self._changed()

    def _entry_done(
        self, ledger: OpenLedger, entry_id: int, entry: bytes | None, error: MagnetarError | None
    ) -> None:
        if error is not None:
            ledger.live = False
            if isinstance(error, LedgerFenced):
                self._fence(error)
            elif isinstance(error, MessageTooLarge):  # in the next ledger as well
                self._fence(TopicNotServed(f"topic {self._name} cannot be written: {error}"))
            else:
                _log.warning("topic %s: ledger %d failed: %s", self._name, ledger.info.ledger_id, error)
                self._events.delayed(error)
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
        self._events.confirmed(info.ledger_id, entry_id, entry, pending.context)

    async def _change(self) -> None:
        """Returns when the state, or what is pending, is to be looked at again."""
        self._waiting.append(asyncio.get_running_loop().create_future())
        await self._waiting[-1]

    def _changed(self) -> None:
        while self._waiting:
            waiting = self._waiting.pop()
            if not waiting.done():
                waiting.set_result(None)

    # --- leaving the open ledger -------------------------------------------------------------------------------------

    def roll_if_due(self) -> bool:
        """Maintenance: a ledger that holds something and is due is closed, once nothing is pending. True if one is."""
        ledger = self.open_ledger
        if self.state is not State.WRITING or ledger is None or not ledger.info.entries:
            return False
        if self._is_due(ledger):
            self._leave(ledger)
        else:
            self._leave_soon(ledger)
        return self._due

    def _is_due(self, ledger: OpenLedger) -> bool:
        return ledger.is_due(self._settings, len(self._pending), asyncio.get_running_loop().time())

    def durability_changed(self) -> None:
        """Perhaps another ledger would suit better: if so it begins soon, at this topic's own moment."""
        if self.open_ledger is not None:
            self._leave_soon(self.open_ledger)

    def look_at_durability(self) -> None:
        """The same, at once: of one topic alone."""
        if self.open_ledger is not None:
            self._leave_unless_it_suits(self.open_ledger)

    def _leave_soon(self, ledger: OpenLedger) -> None:
        """Looks whether the ledger suits; if not, it is left at this topic's moment."""
        if not ledger.leaving and not ledger.suits(self._durability):
            ledger.leaving = True
            delay_s = own_moment(str(self._name), self._settings.ledger_change_spread_ms)
            if delay_s:
                asyncio.get_running_loop().call_later(delay_s, self._leave_unless_it_suits, ledger)
            else:
                self._leave_unless_it_suits(ledger)

    def _leave_unless_it_suits(self, ledger: OpenLedger) -> None:
        ledger.leaving = False
        if ledger.live and not ledger.suits(self._durability):
            self._leave(ledger)

    def _leave(self, ledger: OpenLedger) -> None:
        """The ledger is left once nothing is pending."""
        if ledger is not self.open_ledger or self.state is not State.WRITING:
            return
        self._due = True
        if self._pending:
            ledger.flusher.force()
        else:
            self._roll()

    # --- the next ledger ---------------------------------------------------------------------------------------------

    def _roll(self) -> None:
        if self.state in (State.IDLE, State.WRITING):
            self.state = State.ROLLING
            self._changed()
            self._rolls.begin(self._next_ledger())

    async def _next_ledger(self) -> None:
        failed = self.open_ledger
        if failed is not None and not failed.live and not failed.info.entries:
            # It took nothing: the next one may fail as fast, and leave a ledger each time.
            await self._pause()
        while not await self._rolled_over():
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
        self._events.rolled()
        self._events.ready()
        await self._changes.delete_trimmed()

    async def _rolled_over(self) -> bool:
        """False: try again. True also if the topic is not served any more."""
        try:
            async with self._changes.alone():
                if self.open_ledger is not None:
                    await self._close_open_ledger()
                    if not self._pending and not self._wanted:
                        await self._list.commit()
                if self._pending or (self._wanted and not self._list.record.terminated):
                    await self._open_next_ledger()
        except MagnetarError as error:
            if self._changes.not_served is not None:
                return True
            _log.warning("topic %s: no next ledger yet: %s", self._name, error)
            self._events.delayed(error)
            return False
        except Exception as error:  # a defect here must not leave publishers waiting for ever
            _log.exception("topic %s: rolling over failed", self._name)
            self._fence(TopicNotServed(f"topic {self._name} failed here: {error!r}"))
        return True

    async def _pause(self) -> None:
        pause_ms, self._pause_ms = self._pause_ms, min(self._pause_ms * 2, self._settings.retry_max_ms)
        await asyncio.sleep(pause_ms / 1000)

    async def edit_closed(self, change: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """As `ListChanges.edit`, while no ledger is open.

        The open one is closed once what is pending is confirmed, and appending goes on in the next one; those who wait
        meanwhile share one closing.
        """
        while True:
            async with self._changes.alone():
                if await self._close_drained():
                    return await self._changes.finish(change)
            await self._pause()

    async def _close_drained(self) -> bool:
        """True if no ledger is open any more. False: it cannot be closed yet, try again."""
        await asyncio.sleep(0)  # those who were called just now because there is room have their turn
        self._due = True
        while self.state is State.WRITING and self._pending:
            if self.open_ledger is not None:
                self.open_ledger.flusher.force()
            await self._change()
        self._changes.check_served()
        self._roll()  # goes on when this edit, and those that wait already, are done
        try:
            await self._close_open_ledger()
        except (VersionConflict, LedgerFenced):
            raise
        except MagnetarError as error:
            _log.warning("topic %s: its ledger is not closed yet: %s", self._name, error)
            return False
        self._changes.check_served()
        return True

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
        self._list.end_last(last + 1)
        self.open_ledger = self._reading.writer = None

    async def _open_next_ledger(self) -> None:
        settings, durability = self._settings, self._durability()
        writer = await self._ledgers.create(
            **durability.of_ledger(),
            properties={"kind": "topic", "topic": str(self._name)},
            explicit_lac=False,
            accepted=self._accepted if durability.flush == "async" else None,
        )
        info = await self._changes.add(writer)
        flusher = Flusher(writer, self._pending, settings.flush_interval_ms, settings.max_outstanding_bytes)
        opened_at = asyncio.get_running_loop().time()
        self.open_ledger = OpenLedger(writer, info, durability, flusher, opened_at, self._entry_done)
        self._reading.writer = writer

    def _resubmit(self) -> None:
        """Rule 24: what the old ledger does not hold goes to the next one, in order, numbered anew."""
        ledger = self.open_ledger
        assert ledger is not None
        for pending in self._pending:
            pending.payload = rebase_entry(pending.payload, ledger.next_message)
            self._submit(pending)

    # --- ending ------------------------------------------------------------------------------------------------------

    def abandon(self) -> list[T]:
        """What is pending will not be confirmed. Returns the contexts, for those who wait for it."""
        if self.open_ledger is not None:
            self.open_ledger.live = False
        return self._pending.abandon(self._name)

    async def stop(self) -> None:
        """No roll-over is under way any more, and nothing is forced."""
        await self._rolls.close()
        if self.open_ledger is not None:
            await self.open_ledger.flusher.stop()

    def end(self, state: State) -> None:
        """FENCED or CLOSED: nothing is appended any more."""
        self.state = state
        if self.open_ledger is not None and state is State.FENCED:
            self.open_ledger.live = False
        self._changed()

    async def close(self, *, fenced: bool) -> None:
        """Closes the open ledger and records it, or lets go of it if it is another owner's."""
        async with self._changes.lock:
            if self.open_ledger is not None and fenced:
                self.open_ledger.writer.detach()
            elif self.open_ledger is not None:
                try:
                    await self._close_open_ledger()
                    await self._list.commit()
                except MagnetarError as error:  # the next owner recovers it
                    _log.warning("topic %s: closing its ledger failed: %s", self._name, error)
