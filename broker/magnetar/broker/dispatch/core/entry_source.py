"""Entries for dispatch: from the topic's tail cache, else read from its ledgers, ahead of the read position.

    wanted --in the tail cache--> given
       |
       `--> READING --done--> HELD until the read position has passed it, or until it is delivered again --> released
               | failed       (both count against the broker's read budget, as what is set aside does)
               v
            FAILED --back-off--> READING ...  after `max_entry_read_attempts`: UNREADABLE, which is reported once
                                                  |
                                                  |--> tried again at the longest pause, for ever (policy `stop`, and
                                                  |    every error that may pass)
                                                  `--> skipped (policy `skip`, and the data is not there any more)

Two kinds of reads are in flight side by side, so that neither holds up the other: one *catch-up* read from the read position
on (where the next one begins is known when it ends), and up to MAX_REPLAY_READS reads of single entries that are to be
delivered again. An answer that nobody waits for any more is dropped, and what it would have cost with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from magnetar.proto.entry import Entry
from magnetar.proto.errors import (
    EntryDamaged,
    EntryNotFound,
    LedgerNotFound,
    MagnetarError,
    MalformedFrame,
    MessageLost,
)
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from magnetar.proto.ranges import Range

from ...cursors.core.acks import EntryKey, Position
from ...resources.budget import ByteBudget
from ...settings import BrokerSettings
from .consumer import Consumer
from .instructions import CancelReads, Instruction, Read, ReportUnreadable, SkipEntry, Stop

MAX_REPLAY_READS = 8
# The pause is multiplied by 1 + failed entries // this number: a lost ledger with many of them is not retried too often.
FAILED_ENTRIES_PER_PAUSE = 64
SMALL_READ_BYTES = 64 * 1024  # when the budget of all readers is full
# The data is not there, and no later attempt will find it. All other errors may pass.
NOT_RECOVERABLE = (EntryDamaged, EntryNotFound, LedgerNotFound, MalformedFrame, MessageLost)


class TopicLog(Protocol):
    """What dispatch looks up in the topic: nothing that waits."""

    def normalise(self, position: Position) -> Position:
        """See `cursors.core.acks.Topology`."""

    @property
    def ended(self) -> bool:
        """True if nothing follows what is confirmed: the topic is terminated."""

    def is_confirmed(self, ledger_id: int, entry_id: int) -> bool:
        """True if the entry may be dispatched (rule 25)."""

    def cached(self, key: EntryKey) -> Entry | None:
        """The entry if the tail cache has it."""


class Acks(Protocol):
    """What dispatch asks of a cursor's `AckState`, or of what stands in its place (`compaction.view`)."""

    @property
    def mark_delete(self) -> Position:
        """Everything before it is acknowledged."""

    @property
    def range_count(self) -> int:
        """Ranges acknowledged beyond it."""

    def skip_whole(self, ledger: int, entry: int) -> int:
        """The first entry from `entry` on that is not acknowledged as a whole."""

    def unacked(self, ledger: int, entry: int, first: int, last: int) -> list[Range]:
        """What of these messages is to be delivered."""


@dataclass(slots=True, eq=False)
class DispatchCounters:
    """Sums over a topic, which count for its broker as well; counted per delivery and per read."""

    broker: DispatchCounters | None = None
    deliveries: int = 0
    messages_out: int = 0
    bytes_out: int = 0
    reads: int = 0  # entries that were read
    read_bytes: int = 0
    unreadable_entries: int = 0  # now: a gauge
    skipped_entries: int = 0
    dropped_messages: int = 0  # of non-persistent topics: they left the ring before a subscription had them
    failures: int = 0  # runs of a dispatcher that a defect ended

    def delivered(self, messages: int, size: int) -> None:
        """A delivery of so many messages and bytes."""
        self.deliveries += 1
        self.messages_out += messages
        self.bytes_out += size
        if self.broker is not None:
            self.broker.delivered(messages, size)

    def read(self, size: int) -> None:
        """An entry of so many bytes."""
        self.reads += 1
        self.read_bytes += size
        if self.broker is not None:
            self.broker.read(size)

    def unreadable(self, more: int) -> None:
        """So many more entries cannot be read now."""
        self.unreadable_entries += more
        if self.broker is not None:
            self.broker.unreadable(more)

    def skipped(self) -> None:
        """An entry was given up."""
        self.skipped_entries += 1
        if self.broker is not None:
            self.broker.skipped()

    def dropped(self, messages: int) -> None:
        """So many left a non-persistent topic before they were delivered."""
        self.dropped_messages += messages
        if self.broker is not None:
            self.broker.dropped(messages)

    def failed(self) -> None:
        """A defect ended a run of a dispatcher."""
        self.failures += 1
        if self.broker is not None:
            self.broker.failed()


@dataclass(slots=True)
class ReadFailure:
    """An entry that could not be read."""

    attempts: int
    due_ms: int
    waiting: bool  # until due_ms
    unreadable: bool  # reported; delivery goes on without it, or stands still at it
    error: MagnetarError
    # Consumers that were notified of it, and whether as of something lost.
    notified: dict[Consumer, bool] = field(default_factory=dict)


class EntrySource:
    """See the module docstring. Instructions are appended to `out`."""

    __slots__ = (
        "_catch_up",
        "_counters",
        "_failed_ahead",
        "_log",
        "_next_read_id",
        "_out",
        "_reads",
        "_replayed",
        "_set_aside",
        "_settings",
        "ahead",
        "ahead_bytes",
        "budget",
        "failures",
        "held_bytes",
        "next_key",
    )

    def __init__(
        self,
        log: TopicLog,
        settings: BrokerSettings,
        budget: ByteBudget,
        counters: DispatchCounters,
        out: list[Instruction],
    ) -> None:
        self._log = log
        self._settings = settings
        self._counters = counters
        self._out = out
        self.budget = budget
        self.ahead: dict[EntryKey, Entry] = {}  # read for the read position, in order, not passed yet
        self._replayed: dict[EntryKey, Entry] = {}  # read to be delivered again; at most MAX_REPLAY_READS
        self._set_aside: dict[EntryKey, Entry] = {}  # to be delivered again, and were in memory; see `keep`
        self.ahead_bytes = 0  # of `ahead`; above half of read_ahead_bytes no read is started
        self.held_bytes = 0  # of all three: charged to `budget`, as what reads in flight may bring is
        self._reads: dict[int, Read] = {}  # in flight
        self._next_read_id = 0
        self._catch_up: int | None = None  # the one of `_reads` that is from the read position on
        self.next_key: EntryKey | None = (
            None  # where the next catch-up read begins; then `read_ahead` may start it
        )
        self.failures: dict[EntryKey, ReadFailure] = {}
        self._failed_ahead: dict[EntryKey, None] = {}  # of `failures`: those that a catch-up read met; few

    def look_at(self, log: TopicLog) -> None:
        self._log = log

    def get(self, key: EntryKey) -> Entry | None:
        """The entry, if it is in memory."""
        entry = self._log.cached(key)
        if entry is None:
            entry = self.ahead.get(key)
            if entry is None and self._replayed:
                entry = self._replayed.get(key)
            if entry is None and self._set_aside:
                entry = self._set_aside.get(key)
        return entry

    def keep(self, key: EntryKey, entry: Entry) -> None:
        """The entry waits in the replay queue: it is not read again, as far as read_ahead_bytes and the budget allow."""
        if key not in self._set_aside and not self.budget.full:
            size = len(entry.data)
            if self.held_bytes + size <= self._settings.read_ahead_bytes:
                self._set_aside[key] = entry
                self.held_bytes += size
                self.budget.charge(size)

    # --- reading -----------------------------------------------------------------------------------------------------

    def want(self, key: EntryKey) -> Stop:
        """The entry at the read position is not in memory; says what dispatch waits for now."""
        if self._catch_up is None:
            if self.paused_until(key) is not None:
                self._failed_ahead[key] = None
                return Stop.READ_FAILED
            self._start_catch_up(key)
        return Stop.READING

    def read_ahead(self, read_position: Position) -> None:
        """Starts the next catch-up read while there is still something to dispatch from the last one."""
        key = self.next_key
        if key is None or self._catch_up is not None:
            return
        if self.ahead_bytes > self._settings.read_ahead_bytes // 2 or self.budget.full:
            return
        if key <= read_position[:2] or not self._log.is_confirmed(*key) or self.get(key) is not None:
            self.next_key = None
        elif key not in self.failures:
            self._start_catch_up(key)

    def want_replays(self, keys: Sequence[EntryKey]) -> None:
        """Entries that are to be delivered again, in order; as many as may be are read at once.

        The first one is what delivery waits for: if every slot is taken, the one that was read for the highest position is
        given up for it. Reads in flight are not cancelled.
        """
        reading = {read.key for read in self._reads.values()}
        for key in keys:
            if key in reading or self.get(key) is not None:
                continue
            if self.paused_until(key) is not None:
                continue
            if self.replay_reads + len(self._replayed) >= MAX_REPLAY_READS:
                if key != keys[0] or not self._replayed:
                    return
                self._release(self._replayed.pop(max(self._replayed)))
            self._start(key, 1)  # just this entry

    def _start_catch_up(self, key: EntryKey) -> None:
        full = self.budget.full
        self._catch_up = self._start(key, SMALL_READ_BYTES if full else self._settings.read_bytes)

    def _start(self, key: EntryKey, max_bytes: int) -> int:
        self._next_read_id += 1
        read = Read(self._next_read_id, key, max_bytes)
        self._reads[read.read_id] = read
        self.budget.charge(max_bytes)
        self._out.append(read)
        return read.read_id

    def read_done(
        self, read_id: int, entries: list[bytes], now_ms: int, comes_again: Callable[[EntryKey], bool]
    ) -> None:
        """Takes what was read; of a read of what comes again only what still does."""
        read = self._reads.get(read_id)
        if read is None:
            return
        ledger, first = read.key
        held = self.ahead if read_id == self._catch_up else self._replayed
        furthest = next(reversed(self.ahead), read.key)
        for number, data in enumerate(entries):
            key = (ledger, first + number)
            try:
                entry = Entry(data, LEDGER_ENTRY_HEADER_BYTES)
            except MalformedFrame as error:
                if number == 0:
                    self.read_failed(read_id, error, now_ms, comes_again)
                    return
                entries = entries[:number]  # the next read begins, and fails, with it
                break
            if held is self.ahead or comes_again(key):
                self._hold(held, key, entry)
            self._recovered(key)
        self._ended(read_id)
        if read_id == self._catch_up:
            self._catch_up = None
            self.next_key = (ledger, first + len(entries))
            if furthest > read.key:  # what is due now was passed by when that was read
                self.ahead = dict(sorted(self.ahead.items()))

    def _ended(self, read_id: int) -> Read | None:
        """The read is in flight no more; None if it was not."""
        read = self._reads.pop(read_id, None)
        if read is not None:
            self.budget.release(read.max_bytes)
        return read

    def _hold(self, held: dict[EntryKey, Entry], key: EntryKey, entry: Entry) -> None:
        if key not in held:
            size = len(entry.data)
            held[key] = entry
            if held is self.ahead:
                self.ahead_bytes += size
            self.held_bytes += size
            self.budget.charge(size)
            self._counters.read(size)

    def read_failed(
        self, read_id: int, error: MagnetarError, now_ms: int, comes_again: Callable[[EntryKey], bool]
    ) -> EntryKey | None:
        """Records the failure and schedules the next attempt; returns the entry if it is lost, and the policy is to skip it.

        Ignored if the entry was to come again, and is not any more.
        """
        read = self._ended(read_id)
        if read is None:
            return None
        key = read.key
        ahead = read_id == self._catch_up
        if ahead:
            self._catch_up = None
        elif not comes_again(key):
            return None
        if isinstance(error, MessageLost) and not self._log.is_confirmed(*key):
            return None  # trimmed while it was wanted: positions move on by themselves
        settings = self._settings
        failure = self.failures.get(key)
        if failure is None:
            failure = self.failures[key] = ReadFailure(0, 0, False, False, error)
        if ahead:
            self._failed_ahead[key] = None
        failure.attempts += 1
        failure.error = error
        if failure.attempts >= settings.max_entry_read_attempts:
            if settings.unreadable_entry_policy == "skip" and isinstance(error, NOT_RECOVERABLE):
                self._recovered(key)
                self._out.append(SkipEntry(key, error))
                return key
            if not failure.unreadable:
                failure.unreadable = True
                self._counters.unreadable(1)
                self._out.append(ReportUnreadable(key, error))
        pause = min(settings.retry_initial_ms << min(failure.attempts - 1, 20), settings.retry_max_ms)
        failure.due_ms = now_ms + pause * (1 + len(self.failures) // FAILED_ENTRIES_PER_PAUSE)
        failure.waiting = True
        return None

    def timer_due(self, now_ms: int, ready: Iterable[EntryKey]) -> None:
        """Entries whose pause is over may be read again: `ready` to be delivered again, others at the read position."""
        for key in (*ready, *self._failed_ahead):
            failure = self.failures.get(key)
            if failure is not None and failure.due_ms <= now_ms:
                failure.waiting = False

    @property
    def next_due_ms(self) -> int | None:
        """When the pause of an entry at the read position is over."""
        failures = [self.failures[key] for key in self._failed_ahead]
        return min((failure.due_ms for failure in failures if failure.waiting), default=None)

    def _recovered(self, key: EntryKey) -> None:
        """Of an entry that was read or is not needed any more; withdraws its report."""
        failure = self.failures.pop(key, None) if self.failures else None
        self._failed_ahead.pop(key, None)
        if failure is not None and failure.unreadable:
            self._counters.unreadable(-1)
            self._out.append(ReportUnreadable(key, None))

    # --- letting go --------------------------------------------------------------------------------------------------

    def release_before(self, position: Position, comes_again: Callable[[EntryKey], bool]) -> None:
        """The read position is there: what lies before it and does not come again is not wanted any more."""
        ahead = self.ahead
        while ahead:
            key = next(iter(ahead))
            if key >= position[:2]:
                break
            entry = ahead.pop(key)
            self.ahead_bytes -= len(entry.data)
            self._release(entry)
        for key in [key for key in self._failed_ahead if key < position[:2]]:
            del self._failed_ahead[key]
            if not comes_again(key):
                self._recovered(key)

    def replayed(self, key: EntryKey) -> None:
        """The entry has left the replay queue: delivered, acknowledged, skipped or trimmed."""
        for held in (self._replayed, self._set_aside):
            entry = held.pop(key, None)
            if entry is not None:
                self._release(entry)
        self._recovered(key)

    def _release(self, entry: Entry) -> None:
        self.held_bytes -= len(entry.data)
        self.budget.release(len(entry.data))

    def clear(self) -> None:
        """Nothing of what was wanted is wanted any more."""
        for held in (self.ahead, self._replayed, self._set_aside):
            for entry in held.values():
                self._release(entry)
            held.clear()
        self.ahead_bytes = 0
        if self._reads:
            self._out.append(CancelReads(list(self._reads)))
            for read_id in list(self._reads):
                self._ended(read_id)
        self._catch_up = self.next_key = None

    def forget_replays(self) -> None:
        """The replay queue was emptied: failures that it met begin anew if the read position meets them."""
        for key in [key for key in self.failures if key not in self._failed_ahead]:
            self._recovered(key)

    def close(self) -> None:
        """Nothing is wanted ever again."""
        self.clear()
        for key in list(self.failures):
            self._recovered(key)

    @property
    def unreadable(self) -> dict[EntryKey, ReadFailure]:
        """Entries that delivery waits for, or goes on without until they can be read."""
        return {key: failure for key, failure in self.failures.items() if failure.unreadable}

    @property
    def reading(self) -> bool:
        """True if the read that the read position waits for is in flight."""
        return self._catch_up is not None

    def paused_until(self, key: EntryKey) -> int | None:
        """When the entry, whose read failed, may be read again, in ms; None: now."""
        failure = self.failures.get(key)
        return failure.due_ms if failure is not None and failure.waiting else None

    def is_reading(self, key: EntryKey) -> bool:
        """True if a read that begins with the entry is in flight, for whatever it was started."""
        return any(read.key == key for read in self._reads.values())

    @property
    def replay_reads(self) -> int:
        """Reads in flight for what is to be delivered again."""
        return len(self._reads) - (self._catch_up is not None)

    @property
    def charged_bytes(self) -> int:
        """Of this subscription in `budget`."""
        return self.held_bytes + sum(read.max_bytes for read in self._reads.values())

    def check(self, read_position: Position, *, wanted: bool) -> None:
        """Asserts the invariants; tests call it after every event. `wanted`: there are consumers."""
        assert list(self.ahead) == sorted(self.ahead)
        assert self.ahead_bytes == sum(len(entry.data) for entry in self.ahead.values())
        others = (*self._replayed.values(), *self._set_aside.values())
        assert self.held_bytes == self.ahead_bytes + sum(len(entry.data) for entry in others)
        assert self._catch_up is None or self._catch_up in self._reads
        assert self.replay_reads + len(self._replayed) <= MAX_REPLAY_READS
        assert set(self._failed_ahead) <= set(self.failures)
        if not wanted:
            assert not self.charged_bytes
