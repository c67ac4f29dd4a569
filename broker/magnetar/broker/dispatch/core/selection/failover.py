"""Failover: several consumers are attached, one of them is active and gets everything, in order. Exclusive: one is attached.

    active: the consumer of the highest priority (the lowest number), of equal ones the one that came first

    of a partition: of equal ones the one whose turn it is, in the order of their names, by the number of the partition. So
                    consumers of a whole topic have as many partitions each. One that leaves changes nothing for the others

    a consumer of higher priority joins --> it is active; dispatch pauses for `takeover_delay_ms`, in which acknowledgements
                                            of the one before arrive, and goes back to the mark-delete position
    the active consumer leaves          --> the next one is active at once, from the mark-delete position on

An exclusive consumer that names `hash_ranges` gets messages whose slots are among them, and the others are passed: whole
batches, but for those whose messages have different keys.

So a takeover delivers again what was not acknowledged when it happened, and nothing else (Pulsar:
activeConsumerFailoverDelayTimeMillis).
"""

from __future__ import annotations

from typing import ClassVar

from magnetar.proto.entry import Entry
from magnetar.proto.entry_messages import entry_key_hashes
from magnetar.proto.ids import NO_PARTITION
from magnetar.proto.ranges import Range, RangeSet, intersection

from ....cursors.core.acks import EntryKey
from ..consumer import Consumer
from .hash_ranges import slots_of
from .protocol import Mixed, Older, Selector, SharedOut


class FailoverSelector(Selector):
    """See `Selector`."""

    individual_acks: ClassVar[bool] = False
    several: ClassVar[bool] = True

    def __init__(self, takeover_delay_ms: int = 0) -> None:
        self._takeover_delay_ms = takeover_delay_ms
        self._consumers: list[Consumer] = []  # as they joined
        self.active: Consumer | None = None
        self.next_due_ms: int | None = None  # a takeover is under way until then

    def added(self, consumer: Consumer, now_ms: int) -> bool:
        self._consumers.append(consumer)
        if self._elect(consumer) and len(self._consumers) > 1:
            self.next_due_ms = now_ms + self._takeover_delay_ms
        return False

    def left(self, consumer: Consumer) -> bool:
        self._consumers.remove(consumer)
        if not self._elect():
            return False
        self.next_due_ms = None
        return True

    def timer_due(self, now_ms: int) -> bool:
        """See `Selector`: the takeover ends."""
        if self.next_due_ms is None or now_ms < self.next_due_ms:
            return False
        self.next_due_ms = None
        return True

    def _elect(self, newcomer: Consumer | None = None) -> bool:
        """True if another consumer is active now."""
        before = self.active
        highest = min((consumer.priority_level for consumer in self._consumers), default=0)
        equals = [consumer for consumer in self._consumers if consumer.priority_level == highest]
        if not equals:
            self.active = None
        elif (partition := equals[0].partition) == NO_PARTITION:
            self.active = equals[0]
        else:
            in_turn = sorted(equals, key=lambda consumer: consumer.name)[partition % len(equals)]
            if before not in equals or in_turn is newcomer:
                self.active = in_turn
        return self.active is not before

    def changed(self, consumer: Consumer) -> None:
        """See `Selector`: `ready` looks at the active consumer each time."""

    @property
    def ready(self) -> bool:
        active = self.active
        return active is not None and self.next_due_ms is None and active.ready

    def share_out(
        self, key: EntryKey, entry: Entry, wanted: list[Range], count: int, mixed: Mixed, older: Older
    ) -> SharedOut:
        active = self.active
        assert active is not None
        following = entry.message_count
        if mixed is not None and older is None:  # in order: up to the first message of another count
            others = [ranges.starts[0] for other, ranges in mixed.by_count.items() if other != count]
            following = min(others)
            wanted = list(RangeSet.of(wanted).split(following)[0])
        return ((active, wanted, active.available_permits, count),), (), following


class ExclusiveSelector(FailoverSelector):
    """See `Selector`: the one consumer is active, which nobody has to be told."""

    several: ClassVar[bool] = False
    hash_ranges: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        # Of the entry that was looked at last: whose ranges, which entry, its messages that are in them.
        self._in_ranges: tuple[Consumer, EntryKey, RangeSet] | None = None

    def share_out(
        self, key: EntryKey, entry: Entry, wanted: list[Range], count: int, mixed: Mixed, older: Older
    ) -> SharedOut:
        """See `Selector`: what is in its ranges, if it names some."""
        shares, left_over, following = super().share_out(key, entry, wanted, count, mixed, older)
        ((active, wanted, permits, _),) = shares
        if not active.hash_ranges:
            return shares, left_over, following
        if self._in_ranges is None or self._in_ranges[:2] != (active, key):
            self._in_ranges = active, key, _in_ranges(entry, RangeSet(active.hash_ranges))
        mine = intersection(RangeSet.of(wanted), self._in_ranges[2])
        self.passed = list(RangeSet.of(wanted).without(mine))
        return ((active, list(mine), permits, count),) if mine else (), left_over, following


def _in_ranges(entry: Entry, slots: RangeSet) -> RangeSet:
    """The messages of an entry with these slots: 0.3 us a batch."""
    found, first = RangeSet(), 0
    ends, key_hashes = entry_key_hashes(entry)
    for end, slot in zip(ends, slots_of(key_hashes)):
        if slots.covers(slot, slot):
            found.add(first, end - 1)
        first = end
    return found
