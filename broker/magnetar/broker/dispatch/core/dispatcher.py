"""Dispatch of one subscription, without I/O: each event is a method, instructions come out of `poll`, one after another.

`poll` delivers until something stops it; `stop` says what, and each `Stop` names the event that goes on. What is to be
delivered again goes before what is new. The parts:

    EntrySource         where the bytes of an entry come from
    RedeliveryTracker   what is pending, what is to be delivered again
    DelayIndex          of the topic: what waits for its delivery time; and DueQueue, whose time has come since
    Selector            who gets it, by subscription type

and the cursor's AckState, which the core only reads. Times are milliseconds of one monotonic clock, which the
shell reads. Whether a consumer is writable may depend on the delivery before.
`poll` runs for every entry: about 4 us for the delivery of a whole one, most of it `cut` and lookups in the topic.
"""

from __future__ import annotations

from typing import Protocol

from magnetar.proto.entry import ENTRY_DELAYED, Entry
from magnetar.proto.errors import MagnetarError
from magnetar.proto.ids import MAX_MESSAGES_PER_ENTRY
from magnetar.proto.ranges import Range, RangeSet, complement

from ...cursors.core.acks import AckRange, EntryKey, EntryRanges, Position, number_of
from ...cursors.core.redeliveries import DeliveredRanges, RedeliveryCounts
from ...log.records import LedgerInfo
from ...resources.budget import ByteBudget
from ...resources.rates import Throttle
from ...settings import BrokerSettings
from . import entry_source
from .consumer import UNLIMITED_BYTES, Consumer, Delivery
from .delay_index import DelayIndex, Run
from .due_queue import DueQueue
from .entry_source import NOT_RECOVERABLE, Acks, DispatchCounters, EntrySource, TopicLog
from .instructions import (
    ActiveChanged,
    EndReached,
    Instruction,
    PassEntry,
    PassMessages,
    Pause,
    Stop,
    TurnOver,
    WakeAt,
)
from .message_counts import MessageCounts
from .redelivery_tracker import RedeliveryTracker
from .selection import Selector, new_selector
from .selection.protocol import Mixed, Older
from .slices import cut


class Delays(Protocol):
    """What a topic knows of delivery times, for the types whose messages are acknowledged one by one."""

    @property
    def index(self) -> DelayIndex | None:
        """None: nothing waits."""

    @property
    def whole(self) -> bool:
        """False while the index is being read back: then entries that may have something delayed have to wait."""


MAX_STEPS = 256  # of one `poll` that deliver nothing, before the loop has its turn


class DispatchCore:
    """See the module docstring."""

    def __init__(
        self,
        log: TopicLog,
        state: Acks,
        counts: RedeliveryCounts,
        settings: BrokerSettings,
        read_budget: ByteBudget,
        counters: DispatchCounters,
        delays: Delays,
        *,
        durable: bool,
    ) -> None:
        self._log = log
        self._state = state
        self._settings = settings
        self._counters = counters
        self._delays = delays
        self.redelivered_messages = 0
        self._delivered_before = 0, 0  # messages and bytes, to consumers that have left
        self._durable = durable
        self._out: list[Instruction] = []  # a few: decided, not yet polled
        self.consumers: list[Consumer] = []
        self.type = ""  # of the consumers that there are, or were last
        self._selector: Selector | None = None  # None until the first consumer
        self.source = EntrySource(log, settings, read_budget, counters, self._out)
        self.tracker = RedeliveryTracker(
            counts, settings.max_unacked_messages_per_consumer, settings.max_unacked_messages_per_subscription
        )
        self.throttle: Throttle | None = None  # None: as fast as consumers take it
        self.due = DueQueue()  # what was withheld before the read position, and is not any more
        # Everything before it was delivered, acknowledged or withheld; what comes back from there is in one of the queues.
        self.read_position: Position = log.normalise(state.mark_delete)
        self.message_counts = MessageCounts()  # acknowledgements need them
        self.paused: dict[Pause, None] = {}
        self._timer_ms: int | None = None  # the last WakeAt that is not due yet
        self.stop = Stop.NO_CONSUMER  # of the last `poll` that returned None
        self._closed = False

    def look_at(self, log: TopicLog, state: Acks) -> None:
        """While there are no consumers: from now on these say what the topic has and what is acknowledged of it."""
        assert not self.consumers
        self._log, self._state = log, state
        self.source.look_at(log)
        self._start_at(log.normalise(state.mark_delete))

    @property
    def active(self) -> Consumer | None:
        """Exclusive, failover: the consumer that gets everything."""
        return None if self._selector is None else self._selector.active

    def first_owed(self, consumer: Consumer) -> Position | None:
        """The first message that was delivered to a consumer and is not acknowledged."""
        if self.tracker.individual_acks:
            if not consumer.pending_acks:
                return None
            key = min(consumer.pending_acks)
            return (*key, min(ranges.starts[0] for ranges in consumer.pending_acks[key].by_count.values()))
        mark = self._log.normalise(self._state.mark_delete)
        held = consumer.delivered_messages and self.active in (None, consumer) and mark < self.read_position
        return mark if held else None

    def is_to_come(self, end: Position, but: Consumer | None) -> bool:
        """True if something before `end` is still to be delivered, now or again, or held by a consumer, `but` by this one.

        None: what is held does not count, whoever has it.
        What waits for its delivery time does not count: it is all due at the same time as what its consumer has of it.
        """
        due, replay = self.due, self.tracker.replay
        return bool(
            self._out
            or self._log.normalise(max(self.read_position, self._state.mark_delete)) < end
            or any((*key, 0) < end for key in replay)
            or (
                but
                and any(
                    (*key, 0) < end for one in self.consumers if one is not but for key in one.pending_acks
                )
            )
            or due
            or due.next_due_ms is not None
            or (self.tracker.individual_acks and not self._delays.whole)
        )

    def to_notify(self, key: EntryKey) -> list[tuple[Consumer, MagnetarError, bool]]:
        """Consumers that wait for an unreadable entry and are to be notified now: why, and whether it is lost."""
        failure = self.source.failures.get(key)
        if failure is None or not failure.unreadable:
            return []
        lost, active = isinstance(failure.error, NOT_RECOVERABLE), self.active
        waiting = self.consumers if active is None else [active]
        found = [consumer for consumer in waiting if failure.notified.get(consumer) is not lost]
        failure.notified.update(dict.fromkeys(found, lost))
        return [(consumer, failure.error, lost) for consumer in found]

    @property
    def draining_slots(self) -> dict[str, int]:
        """Key_shared: how many slots wait, by the name of the consumer that they wait for."""
        return {} if self._selector is None else self._selector.draining

    # --- events: `poll` is to be called after each -------------------------------------------------------------------

    def granted(self, consumer: Consumer, messages: int, size: int) -> None:
        """FLOW."""
        consumer.grant(messages, size)
        self._changed(consumer)

    def writable(self, consumer: Consumer) -> None:
        """The port of this consumer is writable again."""
        self._changed(consumer)

    def read_done(self, read_id: int, entries: list[bytes], now_ms: int) -> None:
        """Ledger entries from the first one that was asked for on, at least one."""
        self.source.read_done(read_id, entries, now_ms, self._comes_again)
        self.source.release_before(self.read_position, self._comes_again)
        self._set_timer()

    def read_failed(self, read_id: int, error: MagnetarError, now_ms: int) -> None:
        """The first entry that was asked for could not be read."""
        skipped = self.source.read_failed(read_id, error, now_ms, self._comes_again)
        if skipped is not None:
            self._settle_elsewhere(skipped, 0, MAX_MESSAGES_PER_ENTRY - 1)
        self.source.release_before(self.read_position, self._comes_again)
        self._set_timer()

    def limit(self, throttle: Throttle | None, max_per_consumer: int, max_per_subscription: int) -> None:
        """What holds from now on: the rates, and the caps of the tracker."""
        if self.throttle is not None:
            self.throttle.rest()
        self.throttle = throttle
        self.tracker.set_caps(max_per_consumer, max_per_subscription, self.consumers)
        for consumer in self.consumers:
            self._changed(consumer)

    def ledgers_changed(self) -> None:
        """The topic's ledger list has changed, and the cursor with it."""
        self.message_counts.drop_below(self._state.mark_delete)

    def pause(self, reason: Pause) -> None:
        """Nothing is delivered until this pause is over."""
        self.paused[reason] = None

    def resume(self, reason: Pause) -> None:
        """The pause is over."""
        self.paused.pop(reason, None)

    def timer_due(self, now_ms: int) -> None:
        """The time of the last `WakeAt` has come."""
        self._timer_ms = None
        self.source.timer_due(now_ms, [*self.tracker.timer_due(now_ms), *self.due.timer_due(now_ms)])
        if self._selector is not None and self._selector.timer_due(now_ms):
            self._rewind(counted=False)
        self._set_timer()

    def handed_out(self, consumer: Consumer, rows: list[AckRange], *, taken_back: bool) -> None:
        """The consumer gives these to its program now, or (`taken_back`) has not done so after all."""
        for ledger, entry_id, first, last in rows:
            self.tracker.handed_out(consumer, (ledger, entry_id), first, last, taken_back=taken_back)

    def released(self, runs: list[Run]) -> None:
        """The delivery time of these has come, in this order; what the read position has not passed it meets by itself."""
        if not self.tracker.individual_acks:  # nothing was withheld
            return
        mark, read = self._log.normalise(self._state.mark_delete), self.read_position
        if not self.consumers:
            self._start_at(mark)
            return
        begin, end = (mark[0], number_of(mark)), (read[0], number_of(read))
        self.due.add(
            [
                (ledger, number, min(messages, end[1] - number) if ledger == end[0] else messages)
                for ledger, number, messages in runs
                if begin < (ledger, number + messages) and (ledger, number) < end
            ]
        )

    def delays_known(self) -> None:
        """`Delays.whole` is true now."""

    def _comes_again(self, key: EntryKey) -> bool:
        """The entry is to be read though the read position is behind it."""
        return key in self.tracker.replay or key in self.due.wanted

    def _changed(self, consumer: Consumer) -> None:
        if not consumer.closed and self._selector is not None:
            self._selector.changed(consumer)

    def added(self, consumer: Consumer, type: str, now_ms: int) -> None:
        """A consumer without permits; the first one chooses the type."""
        if type != self.type:
            assert not self.consumers
            if self._selector is not None:
                self._start_at(self._log.normalise(self._state.mark_delete))
            self.type = type
            selector = self._selector = new_selector(type, self._settings)
            self.tracker.individual_acks = selector.individual_acks
            self.tracker.observer = selector.observer
        assert self._selector is not None
        self.consumers.append(consumer)
        active = self.active
        if self._selector.added(consumer, now_ms):
            self._rewind(counted=False)
        self._report_active(active)
        self._set_timer()

    @property
    def delivered(self) -> tuple[int, int]:
        """Messages and bytes, to all consumers that there were."""
        messages, size = self._delivered_before
        return (
            messages + sum(one.delivered_messages for one in self.consumers),
            size + sum(one.delivered_bytes for one in self.consumers),
        )

    def left(self, consumer: Consumer) -> None:
        """What it had not acknowledged is delivered again; what it had handed out counts."""
        assert self._selector is not None
        self.consumers.remove(consumer)
        messages, size = self._delivered_before
        self._delivered_before = messages + consumer.delivered_messages, size + consumer.delivered_bytes
        consumer.closed = True
        active = self.active
        rewind = self._selector.left(consumer)
        self.tracker.left(consumer)
        if rewind:
            self._rewind(counted=False)
        self._report_active(active)
        if not self.consumers:
            self.source.clear()
            if self.due or self.due.next_due_ms is not None:
                self._start_at(self._log.normalise(self._state.mark_delete))

    def _report_active(self, before: Consumer | None) -> None:
        active = self.active
        if active is not before and self._selector is not None and self._selector.several:
            if before is not None and not before.closed:
                self._out.append(ActiveChanged(before, False))
            if active is not None:
                self._out.append(ActiveChanged(active, True))

    def _rewind(self, *, counted: bool) -> None:
        """Goes back to the mark-delete position: what is not acknowledged is delivered again, in order."""
        mark = self._log.normalise(self._state.mark_delete)
        if counted and mark < self.read_position:
            self.tracker.counts.rewound(self.read_position, mark)
            self.tracker.keep_replay_counts()
        self._start_at(mark)

    def _start_at(self, position: Position) -> None:
        """Whatever was delivered or waited to be is forgotten."""
        for consumer in self.consumers:
            self.tracker.forget(consumer)
            self._changed(consumer)
        for failure in self.source.failures.values():
            failure.notified.clear()  # whoever comes to it once more is notified once more
        self.tracker.clear_replay()
        if self._selector is not None:
            self._selector.left_queue(self.tracker.replay)
        self.due.clear()
        self.source.forget_replays()
        self.source.clear()
        self.read_position = position

    def reset(self, epoch: int) -> None:
        """Rule 30: a seek has moved the cursor, and pending acknowledgements end.

        Permits stay: the consumer grants again what it drops.
        """
        self.message_counts.clear()
        for consumer in self.consumers:
            consumer.epoch = epoch
        self._start_at(self._log.normalise(self._state.mark_delete))

    def skipped(self) -> None:
        """Rule 30: the mark-delete position has moved on, and nobody has to acknowledge any more what lies before it."""
        for key in self.tracker.settle_before(self.consumers, self._state.mark_delete):
            self.source.replayed(key)
        if self._selector is not None:
            self._selector.left_queue(self.tracker.replay)
        self.message_counts.drop_below(self._state.mark_delete)
        for consumer in self.consumers:
            self._changed(consumer)

    def acknowledged(
        self, consumer: Consumer, ranges: list[EntryRanges], added: list[int], *, cumulative: bool
    ) -> None:
        """The cursor has taken these ranges, or (`cumulative`) all up to the end of the only one.

        `added[i]`: how many messages of `ranges[i]` were not acknowledged before.
        """
        tracker = self.tracker
        if tracker.counts.by_entry and not cumulative:
            for ledger, entry_id, firsts, lasts in ranges:
                for first, last in zip(firsts, lasts):
                    tracker.counts.forget((ledger, entry_id), first, last)
        if cumulative:
            ledger, entry_id, _, lasts = ranges[0]
            for holder in self.consumers:
                if holder.pending_acks:
                    tracker.settle_through(holder, (ledger, entry_id), lasts[0])
        elif tracker.unacked_messages or tracker.replay:
            for (ledger, entry_id, firsts, lasts), count in zip(ranges, added):
                key = (ledger, entry_id)
                if count > tracker.settle_all(consumer, key, firsts, lasts):
                    for first, last in zip(firsts, lasts):
                        self._settle_elsewhere(key, first, last)
        self._changed(consumer)
        self.message_counts.drop_below(self._state.mark_delete)

    def losing(self, info: LedgerInfo) -> int:
        """The first ledger of a non-persistent topic is about to leave. Counts its messages that are still to be delivered.

        An event `skipped` follows. All of its entries are in memory.
        """
        ledger, state = info.ledger_id, self._state
        again = [key for key in self.tracker.replay if key[0] == ledger]
        waiting = [found for key in again if (found := self._waiting(key)) is not None]
        lost = sum(last - first + 1 for found in waiting for first, last, _ in found.rows())
        position = self._log.normalise(max(self.read_position, state.mark_delete))
        for entry_id in range(position[1], info.entries) if position[0] == ledger else ():
            entry, first = self._log.cached((ledger, entry_id)), position[2] if entry_id == position[1] else 0
            assert entry is not None
            if not state.range_count:  # as a rule: then the rest of the ledger need not be looked at
                lost += info.messages - entry.first_index - first
                break
            left = state.unacked(ledger, entry_id, first, entry.message_count - 1)
            lost += sum(end - begin + 1 for begin, end in left)
        self._counters.dropped(lost)
        return lost

    def _settle_elsewhere(self, key: EntryKey, first: int, last: int) -> None:
        """Somebody acknowledged what was given to another consumer, or is to be delivered again: it had it before."""
        if self.tracker.take_replay(key, first, last) and key not in self.tracker.replay:
            self.source.replayed(key)
        for consumer in self.consumers:
            if key in consumer.pending_acks and self.tracker.settle(consumer, key, first, last):
                self._changed(consumer)

    def _give_back_all(self, consumer: Consumer, epoch: int, *, counted: bool) -> None:
        """What is on its way to the consumer is of an older epoch: it comes again."""
        consumer.epoch = max(consumer.epoch, epoch)
        if self.tracker.individual_acks:
            self.tracker.give_back(consumer, nacked=counted)
        elif self.active in (None, consumer):  # another one has nothing
            self._rewind(counted=counted)

    def nacked(
        self, consumer: Consumer, rows: list[AckRange], *, counted: bool = True, epoch: int = 0
    ) -> None:
        """A negative acknowledgement; without rows of everything that the consumer holds, and its epoch rises.

        `counted`: redelivery counts rise; else without rows those of what was handed out.
        """
        if rows:
            consumer.redelivers += 1
        else:
            self._give_back_all(consumer, epoch, counted=counted)
        tracker = self.tracker
        individual = tracker.individual_acks
        for ledger, entry_id, first, last in rows:
            key = (ledger, entry_id)
            if individual:
                for start, end, count in tracker.settle(consumer, key, first, last):
                    if counted:
                        tracker.add_redelivery(key, start, end, count + 1)
                    else:
                        tracker.add_replays(key, (start,), (end,), count)
                continue
            # What was never delivered cannot be delivered again.
            last = min(last, (self.message_counts.get(key) or MAX_MESSAGES_PER_ENTRY) - 1)
            if key == self.read_position[:2]:
                last = min(last, self.read_position[2] - 1)
            if key <= self.read_position[:2] and self._log.is_confirmed(*key):
                for start, end in self._state.unacked(*key, max(first, 0), last):
                    tracker.nack_by_position(self.consumers, key, start, end, counted=counted)
        cap = tracker.max_per_subscription
        if not individual and tracker.replay_messages > cap > 0:
            # A pile that only a peer bounds: from the mark-delete position on it costs nothing to remember.
            self._rewind(counted=True)
        self._changed(consumer)

    def _set_timer(self) -> None:
        takeover_ms = None if self._selector is None else self._selector.next_due_ms
        for due_ms in (self.tracker.next_due_ms, self.due.next_due_ms, self.source.next_due_ms, takeover_ms):
            if due_ms is not None and (self._timer_ms is None or due_ms < self._timer_ms):
                self._timer_ms = due_ms
                self._out.append(WakeAt(due_ms))

    def close(self) -> None:
        """The subscription ends: the consumers leave, as far as counts go, which are stored after this."""
        self._closed = True
        for consumer in self.consumers:
            consumer.closed = True
            self.tracker.left(consumer)
        self.consumers.clear()
        self.due.clear()
        self.source.close()

    # --- deliveries --------------------------------------------------------------------------------------------------

    def poll(self) -> Instruction | None:
        """The next instruction; None when there is nothing to do until the event that `stop` names."""
        out = self._out
        for _ in range(MAX_STEPS):
            if out:
                return out.pop(0)
            selector, tracker = self._selector, self.tracker
            if self.paused or self._closed:
                self.stop = Stop.CLOSED if self._closed else Stop.PAUSED
                return None
            if selector is None or tracker.blocked_on_unacked_messages or not selector.ready:
                self.stop = Stop.NO_CONSUMER
                return None
            if selector.turn_over:
                selector.turn_over = False
                break
            if self.throttle is not None and not self.throttle.open:
                self.stop = Stop.THROTTLED
                return None
            if tracker.replay:
                if selector.sets_aside:
                    tracker.release(selector.released())
                if self._deliver_again(selector):
                    continue
            if self.due and self._deliver_due(selector):
                continue
            if not self._deliver_new(selector) and not out:
                return None
        return TurnOver()

    def _deliver_new(self, selector: Selector) -> bool:
        """One step at the read position, which is a delivery as a rule. False (and `stop`) if it cannot go on."""
        log, state = self._log, self._state
        # What is known only in part may be forgotten, and read again when its time has come: nothing is passed by it.
        delays = self._delays.index if selector.individual_acks and self._delays.whole else None
        position = log.normalise(max(self.read_position, state.mark_delete))
        ledger, entry_id, index = position
        if not index:
            unacked = state.skip_whole(ledger, entry_id)
            if unacked != entry_id:
                self._move_to((ledger, unacked, 0))
                return True
        if delays and (following := delays.pass_withheld(ledger, entry_id)) != entry_id:
            self._move_to((ledger, following, 0))
            return True
        if position != self.read_position:
            self._move_to(position)
        if not log.is_confirmed(ledger, entry_id):
            self.stop = Stop.NO_ENTRIES
            if log.ended:
                self._tell_end(position)
            return False
        if state.range_count >= self._settings.max_cursor_ranges:
            self.stop = Stop.TOO_MANY_RANGES
            return False
        if 0 < self.tracker.replay_messages >= selector.look_ahead_messages:
            self.stop = Stop.LOOK_AHEAD
            return False
        key = (ledger, entry_id)
        entry = self.source.get(key)
        if entry is None:
            self.stop = self.source.want(key)
            if self.stop is Stop.READ_FAILED:
                self._set_timer()
            return False
        message_count = entry.message_count
        wanted = state.unacked(ledger, entry_id, index, message_count - 1)
        if not wanted:
            if (
                index >= message_count
            ):  # the cursor was put past the end of an entry whose size was not known then
                self._out.append(PassEntry(key))
            self._move_to((ledger, entry_id + 1, 0))
            return True
        if entry.flags & ENTRY_DELAYED and selector.individual_acks:
            if not self._delays.whole:
                self.stop = Stop.DELAYS
                return False
            if delays and not (wanted := delays.visible(key, wanted)):
                self._move_to((ledger, entry_id + 1, 0))
                return True
        following = self._share_out_new(selector, key, entry, wanted)
        self._move_to(
            (ledger, entry_id, following) if following < message_count else (ledger, entry_id + 1, 0)
        )
        if self.source.next_key is not None:
            if delays:
                ledger, entry_id = self.source.next_key
                self.source.next_key = ledger, delays.pass_withheld(ledger, entry_id)
            self.source.read_ahead(self.read_position)
        return True

    def _share_out_new(self, selector: Selector, key: EntryKey, entry: Entry, wanted: list[Range]) -> int:
        """`_share_out` of what was not delivered since the read position went back."""
        counts = self.tracker.counts
        count, mixed = 0, None
        if counts.by_entry or counts.rewinds:
            count, wanted, mixed = counts.of(key, wanted)
        return self._share_out(selector, key, entry, wanted, count, mixed, None)

    def _deliver_due(self, selector: Selector) -> bool:
        """One step of what is due behind the read position: False if it waits for a read, or for what was set aside."""
        due, source = self.due, self.source
        if 0 < self.tracker.replay_messages >= selector.look_ahead_messages:
            return False
        key, ranges = due.first
        confirmed = self._log.is_confirmed(*key)
        wanted = [part for row in ranges if confirmed for part in self._state.unacked(*key, *row)]
        following = ranges[-1][1] + 1
        if wanted:
            entry = source.get(key)
            if entry is None:
                due_ms = source.paused_until(key)
                if due_ms is None:
                    source.want_replays(due.upcoming(entry_source.MAX_REPLAY_READS))
                    return False
                due.park(due_ms)
                self._set_timer()
                return True
            end = self._share_out_new(selector, key, entry, wanted)
            following = end if end <= wanted[-1][1] else following
        due.take(following)
        if key not in self.tracker.replay and not (due and due.first[0] == key):
            source.replayed(key)
        return True

    def _tell_end(self, end: Position) -> None:
        """Nothing is left at the read position, for good. Each consumer to which nothing can come any more is told once.

        What it holds itself it may still give back, and it is told again then (`Consumer.redelivers`); what others hold may
        come to it when they leave.
        """
        tracker = self.tracker
        if tracker.replay:
            return
        mark, index = self._log.normalise(self._state.mark_delete), self._delays.index
        if tracker.individual_acks and (
            (index and index.messages_from(mark[0], number_of(mark)))
            or not self._delays.whole
            or self.due
            or self.due.next_due_ms is not None
        ):
            return  # something comes later
        all_acknowledged = mark >= end
        for consumer in self.consumers:
            state = (consumer.epoch, consumer.redelivers)
            if consumer.told_end == state:
                continue
            if tracker.individual_acks:
                last = tracker.unacked_messages == consumer.unacked_messages
            else:
                last = self.active in (None, consumer) or all_acknowledged
            if last:
                consumer.told_end = state
                self._out.append(EndReached(consumer, *state))

    def _move_to(self, position: Position) -> None:
        self.read_position = position
        source = self.source
        if source.ahead or source.failures:
            source.release_before(position, self._comes_again)

    def _deliver_again(self, selector: Selector) -> bool:
        """One step of the replay queue: False if it waits for a read or a time."""
        tracker = self.tracker
        key = tracker.next_replay()
        if key is None:
            return False
        older = {} if selector.observer is None else tracker.delayed_before(key)
        if not older and selector.waits_still(key):
            tracker.set_aside(key)
            return True
        waiting = self._waiting(key)
        if waiting is not None:
            entry = self.source.get(key)
            if entry is None:
                return self._want_replay(key)
            if waiting.span[1] >= entry.message_count:  # a nack may name more than there is
                tracker.take_replay(key, entry.message_count, MAX_MESSAGES_PER_ENTRY)
            if waiting:
                count, members = waiting.lowest()
                mixed = waiting if len(waiting.by_count) > 1 else None
                self._share_out(selector, key, entry, list(members), count, mixed, older)
                if older and tracker.next_replay() == key:
                    tracker.delay(key, max(older.values()))
                    self._set_timer()
        if key not in tracker.replay:
            self.source.replayed(key)
        return True

    def _waiting(self, key: EntryKey) -> DeliveredRanges | None:
        """What of an entry is to be delivered again; what was acknowledged or trimmed meanwhile leaves the queue."""
        waiting = self.tracker.replay[key]
        if not self._log.is_confirmed(*key):
            self.tracker.take_replay(key, 0, MAX_MESSAGES_PER_ENTRY)
            return None
        first, last = waiting.span
        wanted = self._state.unacked(*key, first, last)
        if wanted != [(first, last)]:
            self.tracker.drop_acked(key, RangeSet.of(complement(wanted, first, last)))
        return waiting or None

    def _want_replay(self, key: EntryKey) -> bool:
        """An entry of the replay queue is not in memory: True if others go on, False if its read is waited for."""
        due_ms = self.source.paused_until(key)
        if due_ms is not None:
            self.tracker.delay(key, due_ms)
            self._set_timer()
            return True
        self.source.want_replays(self.tracker.upcoming(entry_source.MAX_REPLAY_READS))
        return False

    def _share_out(
        self,
        selector: Selector,
        key: EntryKey,
        entry: Entry,
        wanted: list[Range],
        count: int,
        mixed: Mixed,
        older: Older,
    ) -> int:
        """Delivers what can be delivered of an entry. Returns the index at which the read position goes on.

        What is left over is in the replay queue then; but where one consumer gets all that it can have of what there is, and
        nobody else gets anything, the rest stays at the read position. See `Selector.share_out`.
        """
        tracker, again = self.tracker, older is not None
        shares, left_over, following = selector.share_out(key, entry, wanted, count, mixed, older)
        if selector.passed:
            self._out.append(PassMessages(key, selector.passed, entry.message_count))
            selector.passed = ()
        sets_aside = selector.sets_aside
        # What an earlier part of the entry waits for is not known here: then it waits for its turn.
        part = sets_aside and not again and key in tracker.replay
        alone = len(shares) == 1 and not left_over
        cut_short: list[Consumer] = []
        delivered, throttle = False, self.throttle
        for consumer, mine, limit, redeliveries in shares:
            end = 0
            # An earlier share of this entry may have been all that it, or the subscription, can take.
            if not delivered or (
                consumer.ready
                and consumer not in cut_short
                and not tracker.blocked_on_unacked_messages
                and (throttle is None or throttle.open)
            ):
                taken = self._deliver(consumer, key, entry, mine, limit, redeliveries, again=again)
                end, delivered = taken[-1][1] + 1, True
                if again:
                    tracker.take_replays(key, [first for first, _ in taken], [last for _, last in taken])
            if end <= mine[-1][1]:
                if sets_aside:
                    cut_short.append(consumer)
                if alone and not again:
                    following = end
                elif not again:
                    left_over = [*left_over, (redeliveries, RangeSet.of(mine).split(end)[1])]
        for redeliveries, left in left_over:
            tracker.add_replays(key, left.starts, left.ends, redeliveries)
        if sets_aside and key in tracker.replay and (again or left_over):
            self.source.keep(key, entry)
            if not part and selector.set_aside(key, cut_short):
                tracker.set_aside(key)
        return following

    def _deliver(
        self,
        consumer: Consumer,
        key: EntryKey,
        entry: Entry,
        wanted: list[Range],
        limit: int,
        redeliveries: int,
        *,
        again: bool,
    ) -> list[Range]:
        """Delivers as much of `wanted` as the consumer may get, at most `limit` messages as a rule, and returns that."""
        tracker, throttle = self.tracker, self.throttle
        if tracker.individual_acks and limit > (room := tracker.room(consumer)):
            limit = room
        most_bytes = consumer.byte_permits if consumer.byte_limited else UNLIMITED_BYTES
        if throttle is not None:
            limit = min(limit, throttle.room(counts_bytes=False))
            most_bytes = min(most_bytes, throttle.room(counts_bytes=True))
        first_batch, last_batch, taken, messages, size, end = cut(entry, wanted, limit, most_bytes)
        if throttle is not None:
            throttle.spend(messages, size)
        first, last = entry.batch_start_index(first_batch), end - 1
        hidden = [] if taken[0] == (first, last) else complement(taken, first, last)
        consumer.available_permits -= messages
        consumer.byte_permits -= size
        consumer.delivered_messages += messages
        consumer.delivered_bytes += size
        if redeliveries:
            self.redelivered_messages += messages
            consumer.redelivered_messages += messages
        self._counters.delivered(messages, size)
        if tracker.individual_acks or again:
            tracker.delivered(consumer, key, taken, messages, redeliveries)
        if self._durable or tracker.individual_acks:
            self.message_counts.remember(key, entry.message_count)
        row = (consumer, consumer.epoch, *key, entry, first_batch, last_batch, redeliveries, hidden)
        self._out.append(tuple.__new__(Delivery, row))  # at half the cost of Delivery(...)
        return taken

    # --- invariants --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event and every delivery."""
        self.tracker.check(self.consumers)
        self.due.check()
        assert self.consumers or not self.due
        self.source.check(self.read_position, wanted=bool(self.consumers))
        self.message_counts.check()
        takeover_ms = None if self._selector is None else self._selector.next_due_ms
        times = (self.tracker.next_due_ms, self.due.next_due_ms, self.source.next_due_ms, takeover_ms)
        due = [due for due in times if due is not None]
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
                takeover = self._selector is not None and self._selector.next_due_ms is not None
                wanted = self.consumers
                if self._selector is not None and self._selector.active is not None:
                    wanted = [self._selector.active]
                assert blocked or takeover or not any(consumer.ready for consumer in wanted)
            case Stop.NO_ENTRIES:
                assert not self._log.is_confirmed(*position[:2])
            case Stop.READING:
                assert source.reading
            case Stop.DELAYS:
                assert not self._delays.whole
            case Stop.THROTTLED:
                assert self.throttle is not None
                assert not self.throttle.open
            case Stop.READ_FAILED:
                assert source.failures[position[:2]].waiting
            case Stop.LOOK_AHEAD:
                assert self._selector is not None
                assert self.tracker.replay_messages >= self._selector.look_ahead_messages
            case Stop.TOO_MANY_RANGES:
                assert self._state.range_count >= self._settings.max_cursor_ranges
        if stop in (Stop.CLOSED, Stop.PAUSED, Stop.NO_CONSUMER, Stop.THROTTLED):
            return
        selector = self._selector
        if self.due and not (selector and 0 < self.tracker.replay_messages >= selector.look_ahead_messages):
            assert source.replay_reads or source.is_reading(self.due.first[0]), "what is due stalls"
        if self.tracker.replay:
            reading = source.replay_reads or source.reading
            waiting = self.tracker.next_due_ms is not None or self.tracker.all_set_aside
            assert reading or waiting, "replay stalls"
