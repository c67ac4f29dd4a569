"""Which consumer of a Key_Shared subscription owns which key hashes: 65,536 slots, the lower half of a key's hash, and 1
for 0, as Pulsar has it (`StickyKeyConsumerSelector`).

*auto-split*: consistent hashing. Every consumer stands at POINTS places of the ring of slots and owns those up to the next
place, so one that comes or goes changes the owner of its own share only. *sticky*: a consumer names the ranges that it owns;
what nobody names waits until somebody does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise

from xxhash import xxh3_64_intdigest

from magnetar.proto.errors import ConsumerBusy, InvalidArgument
from magnetar.proto.ranges import Range

from ..consumer import Consumer

SLOTS = 65_536
POINTS = 100
_PLACE_SHIFT = 48  # a place is a slot, and 48 bits that tell those in the same slot apart
_ARCS = 256
_ARC_SHIFT = 8  # of a slot


def slots_of(key_hashes: Sequence[int]) -> list[int]:
    """The slot of each key hash."""
    return [key_hash % SLOTS or 1 for key_hash in key_hashes]


class Owners(dict[int, Consumer | None]):
    """The owner of each slot, found when it is first asked for. All consumers are sticky, or none is (`check_hash_ranges`).

    A consumer that comes or goes costs 0.1 ms, however many others there are.
    """

    def __init__(self) -> None:
        # By place: whose it is, and the slots it may own from there on.
        self._ring: dict[int, tuple[Consumer, Range]] = {}
        self.version = 0  # rises with every change
        # The places of `_ring`, sorted, in arcs: one that comes or goes moves those of its own arc only.
        self._arcs: list[list[int]] = [[] for _ in range(_ARCS)]
        self._labels: set[str] = set()  # the names, or names with a number, whose places are taken
        self._pinned: dict[int, Consumer] = {}  # slots that stay with who has them
        self._places_of: dict[Consumer, tuple[str, list[int]]] = {}

    def add(self, consumer: Consumer) -> None:
        """The consumer joins."""
        label, number = consumer.name, 0
        while label in self._labels or not self._ring.keys().isdisjoint(parts := _parts(consumer, label)):
            number += 1  # there is another one of its name
            label = f"{consumer.name}\n{number}"
        self._labels.add(label)
        self._places_of[consumer] = label, list(parts)
        for place, part in parts.items():
            self._ring[place] = consumer, part
            insort(self._arcs[place >> _PLACE_SHIFT + _ARC_SHIFT], place)
        self._changed()

    def remove(self, consumer: Consumer) -> None:
        """The consumer leaves."""
        label, places = self._places_of.pop(consumer)
        self._pinned = {slot: other for slot, other in self._pinned.items() if other is not consumer}
        self._labels.remove(label)
        for place in places:
            arc = self._arcs[place >> _PLACE_SHIFT + _ARC_SHIFT]
            del self._ring[place], arc[bisect_left(arc, place)]
        self._changed()

    def pin(self, slot: int, consumer: Consumer) -> None:
        """The slot stays with its owner, whoever comes, until `unpin` or until it leaves."""
        if self[slot] is consumer:
            self._pinned[slot] = consumer

    def return_to(self, consumer: Consumer, slot: int) -> bool:
        """The slot stays with this consumer until `unpin` or until it leaves; True if it had another owner."""
        self._pinned[slot] = consumer
        if self[slot] is consumer:
            return False
        self[slot] = consumer
        self.version += 1
        return True

    def unpin(self, slot: int) -> bool:
        """True if the slot has another owner now."""
        consumer = self._pinned.pop(slot, None)
        if consumer is None:
            return False
        self.pop(slot, None)
        if self[slot] is consumer:
            return False
        self.version += 1
        return True

    def _changed(self) -> None:
        self.version += 1
        self.clear()

    def __missing__(self, slot: int) -> Consumer | None:
        owner = self._pinned.get(slot)
        if owner is None and self._ring:
            consumer, (first, last) = self._ring[self._place_of(slot)]
            owner = consumer if first <= slot <= last else None
        self[slot] = owner
        return owner

    def _place_of(self, slot: int) -> int:
        """The last place up to the end of the slot; below the first place it is the last one: a ring."""
        number = slot >> _ARC_SHIFT
        arc = self._arcs[number]
        at = bisect_left(arc, slot + 1 << _PLACE_SHIFT)
        while not at:
            number -= 1
            arc = self._arcs[number]
            at = len(arc)
        return arc[at - 1]


def _parts(consumer: Consumer, label: str) -> dict[int, Range]:
    """The places of a consumer, and the slots that it may own from each on."""
    if consumer.hash_ranges:
        return {part[0] << _PLACE_SHIFT: part for part in consumer.hash_ranges}
    points = [xxh3_64_intdigest(f"{label}\n{point}".encode()) for point in range(POINTS)]
    return {point % SLOTS << _PLACE_SHIFT | point >> 64 - _PLACE_SHIFT: (0, SLOTS - 1) for point in points}


def check_hash_ranges(ranges: Sequence[Range], consumers: Sequence[Consumer]) -> None:
    """Raises InvalidArgument or ConsumerBusy unless a consumer with these ranges may join the others.

    The details hold them, as `hash_ranges`, if it is them that are wrong or taken.
    """
    for first, last in ranges:
        if not 0 <= first <= last < SLOTS:
            raise InvalidArgument(
                f"a hash range lies within 0 to {SLOTS - 1}, first to last; not {first} to {last}",
                hash_ranges=ranges,
            )
    for (_, last), (first, _) in pairwise(sorted(ranges)):
        if first <= last:
            raise InvalidArgument(
                f"the hash ranges of a consumer must not overlap; two of them hold {first}",
                hash_ranges=ranges,
            )
    for other in consumers:
        if bool(other.hash_ranges) != bool(ranges):
            one, two = (
                ("names hash ranges", "does not") if other.hash_ranges else ("names no hash ranges", "does")
            )
            raise ConsumerBusy(
                f"consumer {other.name!r} {one} and the new one {two}: all consumers of a key_shared subscription share its "
                "keys in the same way"
            )
        for first, last in ranges:
            for start, end in other.hash_ranges:
                if first <= end and start <= last:
                    raise ConsumerBusy(
                        f"consumer {other.name!r} owns the hash range {start} to {end}, which overlaps {first} to {last}",
                        hash_ranges=ranges,
                    )
