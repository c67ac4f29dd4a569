"""What was delivered and is not acknowledged, what is to be delivered again, and how often it was delivered before.

    delivered --> pending_acks of a consumer --acknowledged--> nowhere
                        | nacked, or handed out and the consumer left: its redelivery count rises
                        | the consumer left, and had it in its queue: the count stays
                        v
                  replay queue: READY (a heap by position) <--due-- DELAYED (a heap by time)
                                                           <--released-- SET ASIDE (by a type that decides by keys)

A message is in one place at most. Messages that were acknowledged meanwhile may linger in the replay queue: whoever takes
them out asks the cursor. A type without individual acknowledgements tracks no pending acknowledgements of first
deliveries: when the read position goes back, `counts` remembers from where.

Redelivery counts stand where the messages are: beside a pending acknowledgement, and in the replay queue. `counts` has those
above 0 once more, for the cursor to store, and for whoever meets a message at the read position again: after a restart, or
when consumers of another type come.

A consumer whose pending acknowledgements reach `max_per_consumer` is blocked until it has come down to half of that; all of
them are while the subscription is over `max_per_subscription`, again until half (Pulsar: maxUnackedMessagesPerConsumer and
maxUnackedMessagesPerSubscription; 0 switches a cap off). Types without individual acknowledgements have no caps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice, pairwise
from typing import Protocol

from magnetar.proto.ranges import Range, RangeSet, complement, count_members, intersection

from ...cursors.core.acks import EntryKey, Position
from ...cursors.core.redeliveries import CountedRange, DeliveredRanges, RedeliveryCounts
from .consumer import Consumer

_EVERYTHING = 1 << 32  # more messages than an entry has
_NEVER = 1 << 62  # the due time of what waits for an event, not for a time
# In the count of a pending acknowledgement: the consumer has reported that its program has the message.
_HANDED_OUT = 1 << 32


class Observer(Protocol):
    """Learns where the messages are: what a subscription type needs that decides by their keys."""

    def on_delivered(
        self, consumer: Consumer, key: EntryKey, starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        """These ranges are pending at the consumer now."""

    def on_settled(self, key: EntryKey, starts: Sequence[int], ends: Sequence[int]) -> None:
        """They are no longer pending."""

    def on_queued(self, key: EntryKey, starts: Sequence[int], ends: Sequence[int]) -> None:
        """They are in the replay queue now."""

    def on_unqueued(self, key: EntryKey, starts: Sequence[int], ends: Sequence[int]) -> None:
        """They are no longer in the replay queue."""

    def check(self) -> None:
        """Asserts the invariants."""

    def check_set_aside(self, keys: Iterable[EntryKey]) -> None:
        """Asserts that each entry that is set aside waits for something."""


class RedeliveryTracker:
    """See the module docstring."""

    __slots__ = (
        "_delayed",
        "_due",
        "_ready",
        "blocked_on_unacked_messages",
        "counts",
        "individual_acks",
        "max_per_consumer",
        "max_per_subscription",
        "observer",
        "replay",
        "replay_messages",
        "unacked_messages",
    )

    def __init__(self, counts: RedeliveryCounts, max_per_consumer: int, max_per_subscription: int) -> None:
        self.counts = counts  # the cursor's
        self.max_per_consumer = max_per_consumer
        self.max_per_subscription = max_per_subscription
        self.individual_acks = False  # of the type that the consumers have now
        self.observer: Observer | None = None
        self.unacked_messages = 0  # of all consumers together
        self.blocked_on_unacked_messages = False
        self.replay: dict[EntryKey, DeliveredRanges] = {}
        self.replay_messages = 0  # the members of `replay`
        # Every key of `replay` is in `_ready`, or in `_due`: then it is in `_delayed`, or its time is _NEVER and it was set
        # aside. `_ready` and `_delayed` may hold others, too.
        self._ready: list[EntryKey] = []
        self._delayed: list[tuple[int, EntryKey]] = []
        self._due: dict[EntryKey, int] = {}

    # --- pending acknowledgements ------------------------------------------------------------------------------------

    def set_caps(
        self, max_per_consumer: int, max_per_subscription: int, consumers: Iterable[Consumer]
    ) -> None:
        """From now on; who is over its cap gets nothing until half of that."""
        self.max_per_consumer, self.max_per_subscription = max_per_consumer, max_per_subscription
        if self.individual_acks:
            for one in consumers:
                one.blocked_on_unacked_messages = _blocks(
                    one.unacked_messages, max_per_consumer, one.blocked_on_unacked_messages
                )
            self.blocked_on_unacked_messages = _blocks(
                self.unacked_messages, max_per_subscription, self.blocked_on_unacked_messages
            )

    def room(self, consumer: Consumer) -> int:
        """Messages that the consumer may get before a cap is reached."""
        room = _EVERYTHING
        if self.max_per_consumer:
            room = self.max_per_consumer - consumer.unacked_messages
        if self.max_per_subscription:
            room = min(room, self.max_per_subscription - self.unacked_messages)
        return max(room, 1)

    def delivered(
        self, consumer: Consumer, key: EntryKey, taken: list[Range], messages: int, count: int
    ) -> None:
        """These are pending at the consumer now."""
        pending = consumer.pending_acks.get(key)
        if pending is None:
            pending = consumer.pending_acks[key] = DeliveredRanges()
        if self.observer is None:
            for first, last in taken:
                pending.add(first, last, count)
        else:
            starts, ends = [first for first, _ in taken], [last for _, last in taken]
            pending.add_all(starts, ends, count)
            self.observer.on_delivered(consumer, key, starts, ends)
        consumer.unacked_messages += messages
        self.unacked_messages += messages
        if self.individual_acks:
            if 0 < self.max_per_consumer <= consumer.unacked_messages:
                consumer.blocked_on_unacked_messages = True
            if 0 < self.max_per_subscription <= self.unacked_messages:
                self.blocked_on_unacked_messages = True

    def settle(self, consumer: Consumer, key: EntryKey, first: int, last: int) -> list[CountedRange]:
        """Takes first..last of an entry out of what the consumer holds; returns what was there."""
        pending = consumer.pending_acks.get(key)
        if pending is None:
            return []
        taken = pending.take(first, last)
        if not pending:
            del consumer.pending_acks[key]
        if self.observer is not None:
            self.observer.on_settled(key, *columns(taken))
        self._released(consumer, count_messages(taken))
        return [(start, end, count & ~_HANDED_OUT) for start, end, count in taken]

    def handed_out(
        self, consumer: Consumer, key: EntryKey, first: int, last: int, *, taken_back: bool
    ) -> None:
        """What of first..last is pending at the consumer was handed out, or (`taken_back`) was not."""
        pending = consumer.pending_acks.get(key)
        if pending is not None:
            mark = 0 if taken_back else _HANDED_OUT
            for start, end, count in pending.take(first, last):
                pending.add(start, end, count & ~_HANDED_OUT | mark)

    def settle_all(
        self, consumer: Consumer, key: EntryKey, firsts: Sequence[int], lasts: Sequence[int]
    ) -> int:
        """`settle` for ranges that are sorted and disjoint; returns how many of their messages were there."""
        pending = consumer.pending_acks.get(key)
        if pending is None:
            return 0
        starts, ends = pending.take_all(firsts, lasts)
        if not pending:
            del consumer.pending_acks[key]
        if self.observer is not None:
            self.observer.on_settled(key, starts, ends)
        messages = count_members(starts, ends)
        self._released(consumer, messages)
        return messages

    def settle_through(self, consumer: Consumer, key: EntryKey, last: int) -> None:
        """Takes out everything up to and with a message."""
        for other in [other for other in consumer.pending_acks if other <= key]:
            self.settle(consumer, other, 0, last if other == key else _EVERYTHING)

    def settle_before(self, consumers: Iterable[Consumer], position: Position) -> list[EntryKey]:
        """Takes out all that lies before a position, pending or in the replay queue; entries that left the queue by it."""
        key, last = position[:2], position[2] - 1
        for consumer in consumers:
            self.settle_through(consumer, key, last)
        before = [other for other in self.replay if other <= key]
        for other in before:
            self.take_replay(other, 0, last if other == key else _EVERYTHING)
        return [other for other in before if other not in self.replay]

    def left(self, consumer: Consumer) -> None:
        """The consumer left, or the subscription ends; what is not tracked comes again when the read position goes back."""
        if self.individual_acks:
            self.give_back(consumer, nacked=False)
        else:
            self.forget(consumer)

    def give_back(self, consumer: Consumer, *, nacked: bool) -> None:
        """Everything that the consumer holds is to be delivered again; it counts if it was nacked or handed out."""
        for key, pending in consumer.pending_acks.items():
            for mark, members in pending.by_count.items():
                count = mark & ~_HANDED_OUT
                if not nacked and mark == count:
                    self.add_replays(key, members.starts, members.ends, count)
                    continue
                for first, last in members:
                    self.add_redelivery(key, first, last, count + 1)
        self.forget(consumer)

    def forget(self, consumer: Consumer) -> None:
        """The consumer holds nothing any more: it left, or the cursor or the read position was moved."""
        if self.observer is not None:
            for key, pending in consumer.pending_acks.items():
                self.observer.on_settled(key, *columns(pending.rows()))
        consumer.pending_acks.clear()
        self._released(consumer, consumer.unacked_messages)

    def _released(self, consumer: Consumer, messages: int) -> None:
        consumer.unacked_messages -= messages
        self.unacked_messages -= messages
        if consumer.unacked_messages <= self.max_per_consumer // 2:
            consumer.blocked_on_unacked_messages = False
        if self.unacked_messages <= self.max_per_subscription // 2:
            self.blocked_on_unacked_messages = False

    # --- the replay queue --------------------------------------------------------------------------------------------

    def add_redelivery(self, key: EntryKey, first: int, last: int, count: int) -> None:
        """Messages that were delivered `count` times are to be delivered again."""
        self.counts.set(key, first, last, count)
        self.add_replays(key, (first,), (last,), count)

    def add_replays(self, key: EntryKey, starts: Sequence[int], ends: Sequence[int], count: int) -> None:
        """Sorted, disjoint ranges are to be delivered again, or not with those around them; at once, without `delay`."""
        ranges = self.replay.get(key)
        if ranges is None:
            ranges = self.replay[key] = DeliveredRanges()
            self._push(key)
        else:
            self.release((key,))
        known_starts, known_ends = ranges.take_all(starts, ends)
        self.replay_messages += count_members(starts, ends) - count_members(known_starts, known_ends)
        ranges.add_all(starts, ends, count)
        if self.observer is not None:
            self.observer.on_queued(key, starts, ends)
            self.observer.on_unqueued(key, known_starts, known_ends)

    def take_replay(self, key: EntryKey, first: int, last: int) -> int:
        """Takes messages out of the queue; returns how many of them were there."""
        return self.take_replays(key, (first,), (last,))

    def take_replays(self, key: EntryKey, firsts: Sequence[int], lasts: Sequence[int]) -> int:
        """`take_replay` for ranges that are sorted and disjoint."""
        ranges = self.replay.get(key)
        if ranges is None:
            return 0
        starts, ends = ranges.take_all(firsts, lasts)
        messages = count_members(starts, ends)
        self.replay_messages -= messages
        if not ranges:
            del self.replay[key]
            self._due.pop(key, None)
        if self.observer is not None:
            self.observer.on_unqueued(key, starts, ends)
        return messages

    def drop_acked(self, key: EntryKey, acked: RangeSet) -> None:
        """Takes what was acknowledged out of the queue."""
        for members in list(self.replay[key].by_count.values()):
            lingering = intersection(members, acked)
            if lingering:
                self.take_replays(key, lingering.starts, lingering.ends)

    def next_replay(self) -> EntryKey | None:
        """The lowest entry that is to be delivered again now."""
        ready = self._ready
        while ready:
            key = ready[0]
            if key in self.replay and key not in self._due:
                return key
            heappop(ready)
        return None

    def upcoming(self, count: int) -> list[EntryKey]:
        """The next few entries after `next_replay`, itself the first of them."""
        # The n-th smallest of a heap stands in one of its first n levels.
        top = nsmallest(count, islice(self._ready, (1 << count) - 1))
        return [key for key in dict.fromkeys(top) if key in self.replay and key not in self._due]

    def delay(self, key: EntryKey, due_ms: int) -> None:
        """The entry is not to be delivered again before that time."""
        if key in self.replay:
            self._due[key] = due_ms
            heappush(self._delayed, (due_ms, key))

    def set_aside(self, key: EntryKey) -> None:
        """The entry is not to be delivered again before `release`."""
        if key in self.replay:
            self._due[key] = _NEVER

    def release(self, keys: Iterable[EntryKey]) -> None:
        """These were set aside, or are not in the queue any more."""
        for key in keys:
            if self._due.get(key) == _NEVER:
                del self._due[key]
                self._push(key)

    def delayed_before(self, key: EntryKey) -> dict[EntryKey, int]:
        """Lower entries that wait for a time, with that time."""
        if self.next_due_ms is None:
            return {}
        return {other: due for other, due in self._due.items() if other < key and due != _NEVER}

    @property
    def all_set_aside(self) -> bool:
        """True if nothing of the queue is to be delivered before `release`."""
        return all(self._due.get(key) == _NEVER for key in self.replay)

    def timer_due(self, now_ms: int) -> list[EntryKey]:
        """Entries whose time has come are ready; returns them."""
        delayed, ready = self._delayed, []
        while delayed and delayed[0][0] <= now_ms:
            due_ms, key = heappop(delayed)
            if self._due.get(key) == due_ms:
                del self._due[key]
                self._push(key)
                ready.append(key)
        return ready

    @property
    def next_due_ms(self) -> int | None:
        """When `timer_due` has something to do."""
        delayed = self._delayed
        while delayed and self._due.get(delayed[0][1]) != delayed[0][0]:
            heappop(delayed)
        return delayed[0][0] if delayed else None

    def _push(self, key: EntryKey) -> None:
        heappush(self._ready, key)
        if len(self._ready) > 64 + 2 * len(self.replay):
            self._ready = [key for key in self.replay if key not in self._due]
            heapify(self._ready)

    # --- going back --------------------------------------------------------------------------------------------------

    def keep_replay_counts(self) -> None:
        """The read position went back, which counted what waits in the queue: it was not delivered since it came there."""
        for key, ranges in self.replay.items():
            for first, last, count in ranges.rows():
                self.counts.set(key, first, last, count)

    def nack_by_position(
        self, consumers: Iterable[Consumer], key: EntryKey, first: int, last: int, *, counted: bool
    ) -> None:
        """A nack where first deliveries are not tracked; each message rises by one (`counted`) from what is known of it."""
        waiting = self.replay.get(key)
        known = [] if waiting is None else [(max(a, first), min(b, last)) for a, b in all_of(waiting)]
        for consumer in consumers:
            for start, end, count in self.settle(consumer, key, first, last):
                self.add_redelivery(key, start, end, count + counted)
                known.append((start, end))
        known = sorted((start, end) for start, end in known if start <= end)
        for start, end, count in list(self.counts.split(key, complement(known, first, last))):
            self.add_redelivery(key, start, end, count + counted)

    def clear_replay(self) -> None:
        """Nothing is to be delivered again."""
        if self.observer is not None:
            for key, ranges in self.replay.items():
                self.observer.on_unqueued(key, *columns(ranges.rows()))
        self.replay.clear()
        self.replay_messages = 0
        self._ready.clear()
        self._delayed.clear()
        self._due.clear()

    def check(self, consumers: Iterable[Consumer]) -> None:
        """Asserts the invariants; tests call it after every event."""
        owned: dict[EntryKey, list[Range]] = {}
        total = 0
        for consumer in consumers:
            messages = 0
            for key, pending in consumer.pending_acks.items():
                assert pending, f"{consumer.name} keeps an empty entry {key}"
                messages += pending.members
                owned.setdefault(key, []).extend(all_of(pending))
            assert messages == consumer.unacked_messages, (consumer.name, messages, consumer.unacked_messages)
            cap = self.max_per_consumer
            if self.individual_acks and cap:
                assert consumer.blocked_on_unacked_messages or messages < cap
                assert not consumer.blocked_on_unacked_messages or messages > cap // 2
            total += messages
        assert total == self.unacked_messages
        cap = self.max_per_subscription
        if self.individual_acks and cap:
            assert self.blocked_on_unacked_messages or total < cap
            assert not self.blocked_on_unacked_messages or total > cap // 2
        ready = set(self._ready)
        for key, ranges in self.replay.items():
            assert ranges
            assert key in self._due or key in ready
            owned.setdefault(key, []).extend(all_of(ranges))
        assert self.replay_messages == sum(ranges.members for ranges in self.replay.values())
        delayed = set(self._delayed)
        assert all(
            key in self.replay and ((due, key) in delayed or due == _NEVER) for key, due in self._due.items()
        )
        for key, parts in owned.items():
            parts.sort()
            assert all(left[1] < right[0] for left, right in pairwise(parts)), (key, parts)
        self.counts.check()
        if self.observer is not None:
            self.observer.check()
            self.observer.check_set_aside(key for key, due in self._due.items() if due == _NEVER)


def _blocks(unacked: int, cap: int, blocked: bool) -> bool:
    return cap > 0 and (unacked >= cap or (blocked and unacked > cap // 2))


def count_messages(rows: list[CountedRange]) -> int:
    """Messages in the rows, of which there is one as a rule: a generator would cost more than the sum."""
    messages = 0
    for first, last, _ in rows:
        messages += last - first + 1
    return messages


def columns(rows: list[CountedRange]) -> tuple[list[int], list[int]]:
    """Where the ranges start, and where they end."""
    return [first for first, _, _ in rows], [last for _, last, _ in rows]


def all_of(ranges: DeliveredRanges) -> list[Range]:
    """The ranges, whatever their count."""
    return [part for members in ranges.by_count.values() for part in members]
