"""Dispatch of one subscription, without I/O: events in by `handle`, instructions out by `poll`, one after another.

`poll` delivers until something stops it; `stop` says what, and each `Stop` names the event that goes on. What is to be
delivered again goes before what is new. The three parts:

    EntrySource         where the bytes of an entry come from
    RedeliveryTracker   what is pending, what is to be delivered again
    Selector            who gets it, by subscription type

and the cursor's AckState, which the shell changes and the core only reads. The core sees each delivery through before the
next one is decided, so a shell sends it at once: whether the next consumer is writable may depend on it.

`poll` runs for every entry, and is written for that: about 4 us for the delivery of a whole entry, most of it `cut` and the
lookups in the topic.
"""

from __future__ import annotations

from magnetar.proto.entry import Entry
from magnetar.proto.ids import MAX_MESSAGES_PER_ENTRY

from ...cursors.core.acks import AckState, EntryKey, Position
from ...cursors.core.ranges import Range, complement
from ...resources.budget import ByteBudget
from ...settings import BrokerSettings
from . import entry_source
from .consumer import Consumer, Delivery
from .entry_source import DispatchCounters, EntrySource, TopicLog
from .events import (
    Acknowledged,
    AckRange,
    Closed,
    ConnectionWritable,
    ConsumerAdded,
    ConsumerLeft,
    CursorReset,
    Event,
    Instruction,
    LedgersChanged,
    Nacked,
    PassEntry,
    Pause,
    Paused,
    PermitsGranted,
    ReadDone,
    ReadFailed,
    Resumed,
    Stop,
    TimerDue,
    TurnOver,
    WakeAt,
)
from .redelivery_tracker import RedeliveryTracker
from .selection import SELECTORS, Selector
from .slices import cut

MAX_STEPS = 256  # of one `poll` that deliver nothing, before the loop has its turn
MAX_MESSAGE_COUNTS = 65_536


class DispatchCore:
    """See the module docstring."""

    def __init__(
        self,
        log: TopicLog,
        state: AckState,
        settings: BrokerSettings,
        read_budget: ByteBudget,
        counters: DispatchCounters,
        *,
        durable: bool,
    ) -> None:
        self._log = log
        self._state = state
        self._settings = settings
        self._counters = counters
        self._durable = durable
        self._out: list[Instruction] = []  # a few: decided, not yet polled
        self.consumers: list[Consumer] = []
        self.type = ""  # of the consumers that there are, or were last
        self._selector: Selector | None = None  # None until the first consumer
        self.source = EntrySource(log, settings, read_budget, counters, self._out)
        self.tracker = RedeliveryTracker(
            settings.max_unacked_messages_per_consumer, settings.max_unacked_messages_per_subscription
        )
        # Everything before it was delivered, or is acknowledged; what comes back from there is in the replay queue.
        self.read_position: Position = log.normalise(state.mark_delete)
        # Messages per entry that was delivered and is not known to be acknowledged: acknowledgements need it.
        self.message_counts: dict[EntryKey, int] = {}
        self.paused: dict[Pause, None] = {}
        self._timer_ms: int | None = None  # the last WakeAt that is not due yet
        self.stop = Stop.NO_CONSUMER  # of the last `poll` that returned None
        self._closed = False

    # --- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """The one mutator beside `poll`, which is to be called after it."""
        match event:
            case PermitsGranted():
                event.consumer.grant(event.messages, event.size)
                self._changed(event.consumer)
            case Acknowledged():
                self._acknowledged(event)
            case ConnectionWritable(consumer):
                self._changed(consumer)
            case ReadDone(read_id, entries, now_ms):
                self.source.read_done(read_id, entries, now_ms, self.tracker.replay)
                self.source.release_before(self.read_position, self.tracker.replay)
                self._set_timer()
            case ReadFailed(read_id, error, now_ms):
                self.source.read_failed(read_id, error, now_ms)
                self._set_timer()
            case Nacked(consumer, rows):
                self._nacked(consumer, rows)
            case ConsumerAdded(consumer, type):
                self._added(consumer, type)
            case ConsumerLeft(consumer):
                self._left(consumer)
            case LedgersChanged():
                self._forget_counts()
            case Paused(reason):
                self.paused[reason] = None
            case Resumed(reason):
                self.paused.pop(reason, None)
            case CursorReset(epoch):
                self._reset(epoch)
            case TimerDue(now_ms):
                self._timer_ms = None
                self.source.timer_due(now_ms, self.tracker.timer_due(now_ms))
                self._set_timer()
            case Closed():
                self._close()

    def _changed(self, consumer: Consumer) -> None:
        if not consumer.closed and self._selector is not None:
            self._selector.changed(consumer)

    def _added(self, consumer: Consumer, type: str) -> None:
        if type != self.type:
            assert not self.consumers
            if self._selector is not None:
                self._rewind()
            selector = SELECTORS[type]
            self.type = type
            self._selector = selector()
            self.tracker.individual_acks = selector.individual_acks
        assert self._selector is not None
        self.consumers.append(consumer)
        if self._selector.added(consumer):
            self._rewind()

    def _left(self, consumer: Consumer) -> None:
        assert self._selector is not None
        self.consumers.remove(consumer)
        consumer.closed = True
        rewind = self._selector.left(consumer)
        if self._selector.individual_acks:
            self.tracker.give_back(consumer)
        else:
            self.tracker.forget(consumer)
        if rewind:
            self._rewind()
        if not self.consumers:
            self.source.clear()

    def _rewind(self) -> None:
        """Goes back to the mark-delete position: what is not acknowledged is delivered again, in order."""
        mark = self._log.normalise(self._state.mark_delete)
        if mark < self.read_position:
            self.tracker.rewound(self.read_position, mark)
        self._start_at(mark)

    def _start_at(self, position: Position) -> None:
        """Whatever was delivered or waited to be is forgotten."""
        for consumer in self.consumers:
            self.tracker.forget(consumer)
            self._changed(consumer)
        self.tracker.clear_replay()
        self.source.forget_replays()
        self.source.clear()
        self.read_position = position

    def _reset(self, epoch: int) -> None:
        """Rule 30: pending acknowledgements end with what they were for.

        Permits stay: the consumer grants again what it drops, delivered before or under way.
        """
        self.tracker.rewinds.clear()
        self.message_counts.clear()
        for consumer in self.consumers:
            consumer.epoch = epoch
        self._start_at(self._log.normalise(self._state.mark_delete))

    def _acknowledged(self, event: Acknowledged) -> None:
        consumer, tracker = event.consumer, self.tracker
        if event.cumulative:
            ledger, entry_id, _, last = event.rows[0]
            if consumer.pending_acks:
                tracker.settle_through(consumer, (ledger, entry_id), last)
        elif tracker.unacked_messages or tracker.replay:
            for (ledger, entry_id, first, last), added in zip(event.rows, event.added):
                before = consumer.unacked_messages
                tracker.settle(consumer, (ledger, entry_id), first, last)
                if added > before - consumer.unacked_messages:
                    self._settle_elsewhere((ledger, entry_id), first, last)
        self._changed(consumer)
        self._forget_counts()

    def _settle_elsewhere(self, key: EntryKey, first: int, last: int) -> None:
        """Somebody acknowledged what was given to another consumer, or is to be delivered again: it had it before."""
        if self.tracker.take_replay(key, first, last) and key not in self.tracker.replay:
            self.source.replayed(key)
        for consumer in self.consumers:
            if key in consumer.pending_acks and self.tracker.settle(consumer, key, first, last):
                self._changed(consumer)

    def _forget_counts(self) -> None:
        """Of entries that the mark-delete position has passed."""
        counts = self.message_counts
        mark = self._state.mark_delete[:2]
        while counts:
            key = next(iter(counts))
            if key >= mark:
                break
            del counts[key]

    def _nacked(self, consumer: Consumer, rows: list[AckRange]) -> None:
        tracker = self.tracker
        individual = self._selector is not None and self._selector.individual_acks
        if not rows:
            if individual:
                tracker.give_back(consumer)
            else:
                self._rewind()
        for ledger, entry_id, first, last in rows:
            key = (ledger, entry_id)
            if individual:
                for start, end, count in tracker.settle(consumer, key, first, last):
                    tracker.add_replay(key, start, end, count + 1)
                continue
            # What was never delivered cannot be delivered again.
            last = min(last, self.message_counts.get(key, MAX_MESSAGES_PER_ENTRY) - 1)
            if key == self.read_position[:2]:
                last = min(last, self.read_position[2] - 1)
            if key <= self.read_position[:2] and self._log.is_confirmed(*key):
                for start, end in self._state.unacked(*key, max(first, 0), last):
                    tracker.nack_by_position(consumer, key, start, end)
        if (
            not individual
            and tracker.replay_messages > self._settings.max_unacked_messages_per_subscription > 0
        ):
            # A pile that only a peer bounds: from the mark-delete position on it costs nothing to remember.
            self._rewind()
        self._changed(consumer)

    def _set_timer(self) -> None:
        for due_ms in (self.tracker.next_due_ms, self.source.next_due_ms):
            if due_ms is not None and (self._timer_ms is None or due_ms < self._timer_ms):
                self._timer_ms = due_ms
                self._out.append(WakeAt(due_ms))

    def _close(self) -> None:
        self._closed = True
        for consumer in self.consumers:
            consumer.closed = True
            self.tracker.forget(consumer)
        self.consumers.clear()
        self.source.close()

    # --- deliveries --------------------------------------------------------------------------------------------------

    def poll(self) -> Instruction | None:
        """The next instruction; None when there is nothing to do until the event that `stop` names."""
        out = self._out
        for _ in range(MAX_STEPS):
            if out:
                return out.pop(0)
            selector = self._selector
            if self.paused or self._closed:
                self.stop = Stop.CLOSED if self._closed else Stop.PAUSED
                return None
            if selector is None or self.tracker.blocked_on_unacked_messages or not selector.ready:
                self.stop = Stop.NO_CONSUMER
                return None
            done = self._deliver_again(selector) if self.tracker.replay else False
            if done is False:
                done = self._deliver_new(selector)
            if done is True:
                continue
            if done is not False:
                return done
            if not out:
                return None
        return TurnOver()

    def _deliver_new(self, selector: Selector) -> Delivery | bool:
        """One step at the read position: a delivery, True if the position moved, False (and `stop`) if it cannot go on."""
        log, state = self._log, self._state
        position = log.normalise(max(self.read_position, state.mark_delete))
        ledger, entry_id, index = position
        if not index:
            unacked = state.skip_whole(ledger, entry_id)
            if unacked != entry_id:
                self._move_to((ledger, unacked, 0))
                return True
        if position != self.read_position:
            self._move_to(position)
        if not log.is_confirmed(ledger, entry_id):
            self.stop = Stop.NO_ENTRIES
            return False
        if state.range_count >= self._settings.max_cursor_ranges:
            self.stop = Stop.TOO_MANY_RANGES
            return False
        key = (ledger, entry_id)
        entry = self.source.get(key)
        if entry is None:
            self.stop = self.source.want(key)
            if self.stop is Stop.READ_FAILED:
                self._set_timer()
            return False
        count = entry.message_count
        wanted = state.unacked(ledger, entry_id, index, count - 1)
        if not wanted:
            if index >= count:  # the cursor was put past the end of an entry whose size was not known then
                self._out.append(PassEntry(key))
            self._move_to((ledger, entry_id + 1, 0))
            return True
        redeliveries = 0
        if self.tracker.rewinds:
            redeliveries, last = self.tracker.rewound_count((ledger, entry_id, wanted[0][0]))
            wanted = up_to(last, wanted)
        delivery, following = self._deliver(selector, key, entry, wanted, redeliveries, again=False)
        self._move_to((ledger, entry_id, following) if following < count else (ledger, entry_id + 1, 0))
        if self.source.next_key is not None:
            self.source.read_ahead(self.read_position)
        return delivery

    def _move_to(self, position: Position) -> None:
        self.read_position = position
        source = self.source
        if source.ahead or source.failures:
            source.release_before(position, self.tracker.replay)

    def _deliver_again(self, selector: Selector) -> Delivery | bool:
        """One step of the replay queue: a delivery, True if it got shorter, False if it waits for a read or a time."""
        tracker, state = self.tracker, self._state
        key = tracker.next_replay()
        if key is None:
            return False
        count, members = tracker.replay[key].lowest()
        end = members.ends[-1] + 1
        wanted: list[Range] = []
        if self._log.is_confirmed(*key):  # else it was trimmed meanwhile
            wanted = [part for first, last in members for part in state.unacked(*key, first, last)]
        delivery: Delivery | bool = True
        if wanted:
            entry = self.source.get(key)
            if entry is None:
                failure = self.source.failures.get(key)
                if failure is not None and failure.waiting:  # those behind it go on
                    tracker.delay(key, failure.due_ms)
                    self._set_timer()
                    return True
                self.source.want_replays(tracker.upcoming(entry_source.MAX_REPLAY_READS))
                return False
            wanted = up_to(entry.message_count - 1, wanted)  # a nack may name more than there is
            if wanted:
                delivery, end = self._deliver(selector, key, entry, wanted, count, again=True)
        tracker.replayed(key, count, end)
        if key not in tracker.replay:
            self.source.replayed(key)
        return delivery

    def _deliver(
        self,
        selector: Selector,
        key: EntryKey,
        entry: Entry,
        wanted: list[Range],
        redeliveries: int,
        *,
        again: bool,
    ) -> tuple[Delivery, int]:
        """As much of `wanted` as one consumer may get, and the index after it."""
        tracker = self.tracker
        consumer, wanted, limit = selector.choose(entry, wanted)
        if tracker.individual_acks and limit > (room := tracker.room(consumer)):
            limit = room
        first_batch, last_batch, taken, messages, size, following = cut(
            entry, wanted, limit, consumer.byte_room
        )
        first, last = entry.batch_start_index(first_batch), following - 1
        hidden = [] if taken[0] == (first, last) else complement(taken, first, last)
        consumer.available_permits -= messages
        consumer.byte_permits -= size
        consumer.delivered_messages += messages
        consumer.delivered_bytes += size
        counters = self._counters
        counters.deliveries += 1
        counters.messages_out += messages
        counters.bytes_out += size
        if tracker.individual_acks or again:
            tracker.delivered(consumer, key, taken, messages, redeliveries)
        if self._durable or tracker.individual_acks:
            self._remember_count(key, entry.message_count)
        return (
            Delivery(consumer, consumer.epoch, *key, entry, first_batch, last_batch, redeliveries, hidden),
            following,
        )

    def _remember_count(self, key: EntryKey, message_count: int) -> None:
        counts = self.message_counts
        if key not in counts:
            if len(counts) >= MAX_MESSAGE_COUNTS:
                del counts[next(iter(counts))]
            counts[key] = message_count

    # --- invariants --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event and every delivery."""
        self.tracker.check(self.consumers)
        self.source.check(self.read_position, wanted=bool(self.consumers))
        assert len(self.message_counts) <= MAX_MESSAGE_COUNTS
        due = [due for due in (self.tracker.next_due_ms, self.source.next_due_ms) if due is not None]
        assert not due or (self._timer_ms is not None and self._timer_ms <= min(due)), (
            "a time without a timer"
        )

    def check_stopped(self) -> None:
        """Asserts, when `poll` has just returned None, that what stopped it is there, and so is what goes on."""
        self.check()
        source, stop = self.source, self.stop
        position = self._log.normalise(max(self.read_position, self._state.mark_delete))
        match stop:
            case Stop.CLOSED:
                assert self._closed
            case Stop.PAUSED:
                assert self.paused
            case Stop.NO_CONSUMER:
                blocked = self.tracker.blocked_on_unacked_messages
                assert blocked or not any(consumer.ready for consumer in self.consumers)
            case Stop.NO_ENTRIES:
                assert not self._log.is_confirmed(*position[:2])
            case Stop.READING:
                assert source.reading
            case Stop.READ_FAILED:
                assert source.failures[position[:2]].waiting
            case Stop.TOO_MANY_RANGES:
                assert self._state.range_count >= self._settings.max_cursor_ranges
        if stop not in (Stop.CLOSED, Stop.PAUSED, Stop.NO_CONSUMER) and self.tracker.replay:
            reading = source.replay_reads or source.reading
            assert reading or self.tracker.next_due_ms is not None, "replay stalls"


def up_to(last: int, ranges: list[Range]) -> list[Range]:
    """The parts of sorted ranges that do not go beyond `last`."""
    if not ranges or ranges[-1][1] <= last:
        return ranges
    return [(start, min(end, last)) for start, end in ranges if start <= last]
