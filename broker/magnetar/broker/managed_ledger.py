"""A topic's log: a list of ledgers in metadata, of which the last one may be open and is written by this broker alone.

States, and what moves them (one place each):

    IDLE      no open ledger; a topic that nobody publishes to costs no ledger
      --> ROLLING   `wake` when there is something to append
    ROLLING   the old ledger, if any, is being closed (and waited for), the next one created and recorded
      --> WRITING   compare-and-set of the list succeeded; pending entries were resubmitted in order
      --> FENCED    another owner: version conflict, or a fenced ledger
    WRITING   `append` is taken while `accepting`
      --> ROLLING   an append failed (rule 24), or limits were reached and nothing is pending any more
      --> FENCED    the ledger was fenced
    FENCED, CLOSED  final

Rule 23: opening recovers and closes the last ledger and then writes the list by compare-and-set, even if nothing changed:
a former owner that is still alive finds the conflict. Rule 24: entries that failed are appended to the next ledger only
after the old one is closed; what the closed ledger is found to hold counts as confirmed and is not appended again;
callbacks of a ledger that was left are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from magnetar.proto.entry import Entry, rebase_entry
from magnetar.proto.errors import (
    LedgerFenced,
    MagnetarError,
    MessageLost,
    NotFoundInStore,
    TopicBusy,
    TopicNotFound,
    TopicNotServed,
    VersionConflict,
)
from magnetar.proto.ids import TopicName
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES, decode_ledger_entry_header

from .core.acks import Position
from .records import LedgerInfo, TopicRecord, topic_path
from .settings import BrokerSettings
from .stores import Ledgers, Metadata, Reader, Reads, Writer

_log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_OPEN_READERS = 8
MAX_ENTRIES_PER_READ = 1024


class Clock(Protocol):
    """The wall clock (`magnetar.runtime.clock.Clock`)."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""


class State(enum.Enum):
    """See the module docstring."""

    IDLE = "idle"
    ROLLING = "rolling"
    WRITING = "writing"
    FENCED = "fenced"
    CLOSED = "closed"


class LedgerEvents(NamedTuple, Generic[T]):
    """What the topic is told. `confirmed` gets (ledger, entry, stored bytes or None, what was given to `append`)."""

    confirmed: Callable[[int, int, bytes | None, T], None]
    ready: Callable[[], None]  # appending is possible (again)
    rolled: Callable[[], None]  # the ledger list changed
    fenced: Callable[[MagnetarError], None]


class _Pending(Generic[T]):
    """An entry that is appended and not confirmed."""

    __slots__ = ("append_time_ms", "context", "entry_id", "messages", "payload")

    def __init__(self, payload: bytes, messages: int, append_time_ms: int, context: T) -> None:
        self.payload = payload
        self.messages = messages
        self.append_time_ms = append_time_ms
        self.context = context
        self.entry_id = -1


class _Segment(Generic[T]):
    """The open ledger. `live` False: it was left, and whatever it still reports is ignored (rule 24)."""

    __slots__ = ("info", "live", "next_message", "opened_ms", "owner", "writer")

    def __init__(self, owner: ManagedLedger[T], writer: Writer, info: LedgerInfo, opened_ms: int) -> None:
        self.owner = owner
        self.writer = writer
        self.info = info
        self.opened_ms = opened_ms
        self.live = True
        self.next_message = 0  # index in the ledger of the next message appended

    def confirmed(self, entry_id: int, entry: bytes, error: MagnetarError | None) -> None:
        """`ConfirmCallback` of every append."""
        if self.live:
            self.owner._entry_done(self, entry_id, entry, error)


class ManagedLedger(Generic[T]):
    """See the module docstring. Use `open`; `close` when done."""

    def __init__(
        self,
        name: TopicName,
        metadata: Metadata,
        ledgers: Ledgers,
        settings: BrokerSettings,
        clock: Clock,
        events: LedgerEvents[T],
    ) -> None:
        self.name = name
        self.path = topic_path(name)
        self._metadata = metadata
        self._ledgers = ledgers
        self._settings = settings
        self._clock = clock
        self._events = events
        self.state = State.IDLE
        self.record = TopicRecord()
        self._version = -1
        self._store_lock = asyncio.Lock()
        self._by_id: dict[int, LedgerInfo] = {}
        self._ids: list[int] = []  # sorted, as the record's list is
        self._segment: _Segment[T] | None = None
        # Appended and not confirmed, in order; all of them belong to the current segment, or wait for the next one.
        self._pending: deque[_Pending[T]] = deque()
        self.outstanding_bytes = 0
        self._due = False  # limits were reached: no more appends to this ledger
        self._roll_task: asyncio.Task[None] | None = None
        self._readers: dict[int, Reader] = {}
        self._opening: dict[int, asyncio.Task[Reader]] = {}

    # --- opening -----------------------------------------------------------------------------------------------------

    async def open(self, *, create: bool) -> None:
        """Takes the topic over (rule 23). Raises TopicNotFound unless it exists or `create`; TopicBusy on a conflict."""
        stored = await self._metadata.get(self.path)
        if stored is None:
            if not create:
                raise TopicNotFound(
                    f"topic {self.name} does not exist; create it, or switch auto_create_topics on"
                )
            self.record.created_ms = self._clock.now_ms()
            self._version = await self._metadata.create(self.path, self.record.encode())
            return
        self._version = stored.version
        self.record = TopicRecord.decode(stored.value, self.path)
        for info in self.record.ledgers:
            if not info.closed:
                await self._recover(info)
        self._drop_empty()
        self._index()
        try:
            await self._store()
        except VersionConflict as conflict:
            raise TopicBusy(f"topic {self.name} is being taken over by another broker") from conflict
        await self._delete_trimmed()

    async def _recover(self, info: LedgerInfo) -> None:
        reader = await self._ledgers.open(info.ledger_id, recover=True)
        last = reader.last_add_confirmed
        if last >= 0:
            (data,) = (await reader.read(last, last))[:1]
            entry = Entry(data, LEDGER_ENTRY_HEADER_BYTES)
            info.size = decode_ledger_entry_header(data).length
            info.messages = entry.first_index + entry.message_count
            info.last_append_ms = entry.append_time_ms
            (data,) = (await reader.read(0, 0))[:1]
            info.first_append_ms = Entry(data, LEDGER_ENTRY_HEADER_BYTES).append_time_ms
        self._finish(info, last + 1)

    def _finish(self, info: LedgerInfo, entries: int) -> None:
        info.entries = entries
        info.closed = True
        self.record.next_index = info.first_index + info.messages

    def _drop_empty(self) -> None:
        empty = [info.ledger_id for info in self.record.ledgers if info.closed and not info.entries]
        if empty:
            self.record.trimmed += empty
            self.record.ledgers = [info for info in self.record.ledgers if info.ledger_id not in empty]

    def _index(self) -> None:
        self._by_id = {info.ledger_id: info for info in self.record.ledgers}
        self._ids = sorted(self._by_id)

    async def _store(self) -> None:
        """Compare-and-set of the record. An outcome that is not known is settled by reading back."""
        value = self.record.encode()
        try:
            self._version = await self._metadata.put(self.path, value, version=self._version)
        except (VersionConflict, NotFoundInStore) as conflict:
            raise VersionConflict(f"topic {self.name} was changed by another owner") from conflict
        except MagnetarError:
            stored = await self._metadata.get(self.path)
            if stored is None or stored.value != value:
                raise
            self._version = stored.version

    async def _delete_trimmed(self) -> None:
        """Deletes what the stored list no longer names; what fails is tried again at the next change or opening."""
        for ledger_id in list(self.record.trimmed):
            self._readers.pop(ledger_id, None)
            try:
                await self._ledgers.delete(ledger_id)
            except MagnetarError as error:
                _log.warning("topic %s: ledger %d is not deleted yet: %s", self.name, ledger_id, error)
            else:
                self.record.trimmed.remove(ledger_id)

    # --- appending ---------------------------------------------------------------------------------------------------

    @property
    def accepting(self) -> bool:
        """True if `append` may be called: a ledger is open and its pipeline is not full."""
        return (
            self.state is State.WRITING
            and not self._due
            and len(self._pending) < self._settings.max_outstanding_entries
            and self.outstanding_bytes < self._settings.max_outstanding_bytes
        )

    @property
    def next_message(self) -> int:
        """Index in the ledger of the next message: `first_index` of the entry to append now."""
        assert self._segment is not None
        return self._segment.next_message

    @property
    def pending_entries(self) -> int:
        """Entries appended and not confirmed."""
        return len(self._pending)

    def wake(self) -> None:
        """There is something to append: an idle topic opens its next ledger; `events.ready` comes when it is open."""
        if self.state is State.IDLE:
            self._roll()

    def append(self, payload: bytes, messages: int, append_time_ms: int, context: T) -> None:
        """Appends an encoded entry. Confirmed in order by `events.confirmed`, or failed as a whole by `events.fenced`."""
        pending = _Pending(payload, messages, append_time_ms, context)
        self._pending.append(pending)
        self.outstanding_bytes += len(payload)
        self._submit(pending)

    def _submit(self, pending: _Pending[T]) -> None:
        segment = self._segment
        assert segment is not None
        segment.next_message += pending.messages
        pending.entry_id = segment.writer.append(pending.payload, segment.confirmed)
        settings = self._settings
        if (
            pending.entry_id + 1 >= settings.max_ledger_entries
            or segment.writer.length >= settings.max_ledger_bytes
            or pending.append_time_ms - segment.opened_ms >= settings.max_ledger_age_ms
        ):
            self._due = True

    def _entry_done(
        self, segment: _Segment[T], entry_id: int, entry: bytes | None, error: MagnetarError | None
    ) -> None:
        if error is not None:
            segment.live = False
            if isinstance(error, LedgerFenced):
                self._fence(error)
            else:
                _log.warning("topic %s: ledger %d failed: %s", self.name, segment.info.ledger_id, error)
                self._roll()
            return
        self._confirm(segment.info, entry_id, entry)
        if self._due and not self._pending:
            self._roll()

    def _confirm(self, info: LedgerInfo, entry_id: int, entry: bytes | None) -> None:
        pending = self._pending.popleft()
        assert pending.entry_id == entry_id
        self.outstanding_bytes -= len(pending.payload)
        info.entries = entry_id + 1
        info.messages += pending.messages
        info.size += len(pending.payload)
        info.last_append_ms = pending.append_time_ms
        if not info.first_append_ms:
            info.first_append_ms = pending.append_time_ms
        self._events.confirmed(info.ledger_id, entry_id, entry, pending.context)

    # --- the next ledger ---------------------------------------------------------------------------------------------

    def _roll(self) -> None:
        if self.state in (State.IDLE, State.WRITING):
            self.state = State.ROLLING
            self._roll_task = asyncio.get_running_loop().create_task(self._next_ledger())

    def roll_if_older(self, age_ms: int) -> bool:
        """Maintenance: a ledger of that age which holds something is closed once nothing is pending."""
        segment = self._segment
        if self.state is not State.WRITING or segment is None or not segment.info.entries:
            return False
        if self._clock.now_ms() - segment.opened_ms < age_ms:
            return False
        self._due = True
        if not self._pending:
            self._roll()
        return True

    async def _next_ledger(self) -> None:
        delay_ms = self._settings.retry_initial_ms
        while True:
            try:
                async with self._store_lock:
                    await self._close_segment()
                    await self._open_segment()
                break
            except (VersionConflict, LedgerFenced) as error:
                self._fence(error)
                return
            except MagnetarError as error:
                _log.warning("topic %s: no next ledger yet: %s", self.name, error)
            except Exception as error:  # a defect here must not leave publishers waiting for ever
                _log.exception("topic %s: rolling over failed", self.name)
                self._fence(TopicNotServed(f"topic {self.name} failed here: {error!r}"))
                return
            await asyncio.sleep(delay_ms / 1000)
            delay_ms = min(delay_ms * 2, self._settings.retry_max_ms)
        self._due = False
        self.state = State.WRITING
        self._resubmit()
        self._roll_task = None
        self._events.rolled()
        self._events.ready()
        await self._delete_trimmed()

    async def _close_segment(self) -> None:
        segment = self._segment
        if segment is None:
            return
        segment.live = False
        info = segment.info
        try:
            await segment.writer.close()
            last = segment.writer.last_add_confirmed
        except LedgerFenced:
            raise
        except MagnetarError as error:
            # Not closed by us: settle its end the way a new owner would.
            _log.warning("topic %s: ledger %d is closed by recovery: %s", self.name, info.ledger_id, error)
            last = (await self._ledgers.open(info.ledger_id, recover=True)).last_add_confirmed
        while self._pending and 0 <= self._pending[0].entry_id <= last:
            self._confirm(info, self._pending[0].entry_id, None)
        for pending in self._pending:
            pending.entry_id = -1
        self._finish(info, last + 1)
        self._segment = None

    async def _open_segment(self) -> None:
        settings = self._settings
        writer = await self._ledgers.create(
            ensemble_size=settings.ensemble_size,
            write_quorum=settings.write_quorum,
            ack_quorum=settings.ack_quorum,
            properties={"kind": "topic", "topic": str(self.name)},
        )
        info = LedgerInfo(writer.ledger_id, self.record.next_index)
        before = list(self.record.ledgers)
        self.record.ledgers.append(info)
        self._drop_empty()
        try:
            await self._store()
        except BaseException:
            self.record.ledgers = before
            with contextlib.suppress(MagnetarError):
                await self._ledgers.delete(writer.ledger_id)
            raise
        self._segment = _Segment(self, writer, info, self._clock.now_ms())
        self._index()

    def _resubmit(self) -> None:
        """Rule 24: what the old ledger does not hold goes to the next one, in order, numbered anew."""
        segment = self._segment
        assert segment is not None
        for pending in self._pending:
            pending.payload = rebase_entry(pending.payload, segment.next_message)
            self._submit(pending)

    def _fence(self, cause: MagnetarError) -> None:
        """For good: another broker owns the topic. Nothing pending was confirmed, and nothing of it will be."""
        if self.state in (State.FENCED, State.CLOSED):
            return
        self.state = State.FENCED
        if self._segment is not None:
            self._segment.live = False
        _log.warning("topic %s: fenced: %s", self.name, cause)
        self._events.fenced(
            cause
            if isinstance(cause, TopicNotServed)
            else TopicNotServed(f"topic {self.name} was taken over: {cause}")
        )

    def abandon(self) -> list[T]:
        """What is pending will not be confirmed: the contexts, for those who have to be told."""
        if self._segment is not None:
            self._segment.live = False
        abandoned = [pending.context for pending in self._pending]
        self._pending.clear()
        self.outstanding_bytes = 0
        return abandoned

    def fence(self, cause: MagnetarError) -> None:
        """From outside: a cursor met another owner."""
        self._fence(cause)

    async def close(self) -> None:
        """Waits for a roll-over, closes the open ledger and records it. Pending entries must have been confirmed."""
        if self.state in (State.FENCED, State.CLOSED):
            await self._stop_rolling()
            self.state = State.CLOSED
            return
        await self._stop_rolling()
        self.state = State.CLOSED
        async with self._store_lock:
            if self._segment is not None:
                try:
                    await self._close_segment()
                    self._drop_empty()
                    await self._store()
                except MagnetarError as error:  # the next owner recovers it
                    _log.warning("topic %s: closing its ledger failed: %s", self.name, error)

    async def _stop_rolling(self) -> None:
        task = self._roll_task
        if task is not None and not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for opening in list(self._opening.values()):
            opening.cancel()

    # --- positions and reading ---------------------------------------------------------------------------------------

    @property
    def end(self) -> Position:
        """After the last confirmed message."""
        if not self.record.ledgers:
            return (self.record.trimmed[-1] + 1, 0, 0) if self.record.trimmed else (0, 0, 0)
        info = self.record.ledgers[-1]
        return (info.ledger_id, info.entries, 0)

    @property
    def start(self) -> Position:
        """The first message that is still kept."""
        return (self._ids[0], 0, 0) if self._ids else self.end

    @property
    def message_count(self) -> int:
        """Topic-wide index after the last confirmed message."""
        if not self.record.ledgers:
            return self.record.next_index
        info = self.record.ledgers[-1]
        return info.first_index + info.messages

    def info(self, ledger_id: int) -> LedgerInfo | None:
        """The ledger, if it belongs to the topic."""
        return self._by_id.get(ledger_id)

    def normalise(self, position: Position) -> Position:
        """See `core.acks.Topology`."""
        info = self._by_id.get(position[0])
        if info is not None and (not info.closed or position[1] < info.entries):
            return position
        at = bisect_right(self._ids, position[0])
        while at < len(self._ids):
            info = self._by_id[self._ids[at]]
            if info.entries or not info.closed:
                return (info.ledger_id, 0, 0)
            at += 1
        return position

    def is_confirmed(self, ledger_id: int, entry_id: int) -> bool:
        """True if the entry may be dispatched (rule 25)."""
        info = self._by_id.get(ledger_id)
        return info is not None and entry_id < info.entries

    async def read(self, ledger_id: int, first: int, *, max_bytes: int) -> list[bytes]:
        """Confirmed ledger entries from `first` on, at least one. Raises MessageLost if they were trimmed."""
        info = self._by_id.get(ledger_id)
        if info is None or first >= info.entries:
            raise MessageLost(
                f"entry {first} of ledger {ledger_id} does not belong to topic {self.name} any more"
            )
        last = min(info.entries, first + MAX_ENTRIES_PER_READ) - 1
        segment = self._segment
        handle: Reads
        if segment is not None and segment.info is info:
            handle = segment.writer
        else:
            handle = await self._reader(ledger_id)
        return await handle.read(first, last, max_bytes=max_bytes)

    async def _reader(self, ledger_id: int) -> Reader:
        reader = self._readers.get(ledger_id)
        if reader is not None:
            return reader
        task = self._opening.get(ledger_id)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._open_reader(ledger_id))
            self._opening[ledger_id] = task
            task.add_done_callback(lambda _: self._opening.pop(ledger_id, None))
        reader = await asyncio.shield(task)
        if len(self._readers) >= MAX_OPEN_READERS:
            del self._readers[next(iter(self._readers))]
        self._readers[ledger_id] = reader
        return reader

    async def _open_reader(self, ledger_id: int) -> Reader:
        return await self._ledgers.open(ledger_id, recover=False)

    # --- trimming ----------------------------------------------------------------------------------------------------

    async def trim(self, before: Position) -> int:
        """Deletes closed ledgers that lie wholly before `before`; returns how many. Metadata first (rule 25)."""
        ledger_id = self.normalise(before)[0]
        if self.state in (State.FENCED, State.CLOSED) or not any(
            info.closed and (info.ledger_id < ledger_id or before >= (info.ledger_id, info.entries, 0))
            for info in self.record.ledgers
        ):
            return 0
        async with self._store_lock:
            before_list, before_trimmed = list(self.record.ledgers), list(self.record.trimmed)
            gone = [
                info.ledger_id
                for info in self.record.ledgers
                if info.closed and (info.ledger_id < ledger_id or before >= (info.ledger_id, info.entries, 0))
            ]
            self.record.ledgers = [info for info in self.record.ledgers if info.ledger_id not in gone]
            self.record.trimmed += gone
            try:
                await self._store()
            except VersionConflict as conflict:
                self._fence(conflict)
                return 0
            except MagnetarError as error:
                self.record.ledgers, self.record.trimmed = before_list, before_trimmed
                _log.warning("topic %s: not trimmed yet: %s", self.name, error)
                return 0
            self._index()
            self._events.rolled()
            await self._delete_trimmed()
        return len(gone)

    async def mark_deleting(self) -> None:
        """From here on the topic is gone, even if a crash comes before `delete` is done."""
        async with self._store_lock:
            self.record.trimmed += [info.ledger_id for info in self.record.ledgers]
            self.record.ledgers = []
            self.record.deleting = True
            self._index()
            await self._store()

    async def delete(self) -> None:
        """Deletes the ledgers of a topic marked as deleting, then its metadata; may be repeated after a crash."""
        async with self._store_lock:
            await self._delete_trimmed()
            if self.record.trimmed:
                raise TopicBusy(
                    f"topic {self.name}: {len(self.record.trimmed)} ledgers could not be deleted; delete it again"
                )
            await self._metadata.delete(self.path, version=self._version)


__all__ = ["Clock", "LedgerEvents", "ManagedLedger", "State"]
