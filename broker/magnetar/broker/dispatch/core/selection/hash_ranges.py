"""Which consumer of a Key_Shared subscription owns which key hashes: 65,536 slots, from the upper half of a key's hash.

*auto-split*: consistent hashing. Every consumer stands at POINTS places of the ring of slots and owns those up to the next
place, so one that comes or goes changes the owner of its own share only. *sticky*: a consumer names the ranges that it owns;
what nobody names waits until somebody does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from xxhash import xxh3_64_intdigest

from magnetar.proto.errors import ConsumerBusy, InvalidArgument

from ....cursors.core.ranges import Range
from ..consumer import Consumer

SLOTS = 65_536
SLOT_SHIFT = 16  # of a key hash of 32 bits
POINTS = 100


def owners_of(consumers: Sequence[Consumer]) -> list[Consumer | None]:
    """The owner of each slot. All consumers are sticky, or none is (`check_hash_ranges`)."""
    owners: list[Consumer | None] = [None] * SLOTS
    if not consumers:
        return owners
    if consumers[0].hash_ranges:
        for consumer in consumers:
            for first, last in consumer.hash_ranges:
                owners[first : last + 1] = [consumer] * (last + 1 - first)
        return owners
    ring: dict[int, Consumer] = {}
    for consumer in consumers:
        for point in range(POINTS):
            # Where two meet, the one that came first stays: the other has enough places.
            ring.setdefault(xxh3_64_intdigest(f"{consumer.name}\n{point}".encode()) % SLOTS, consumer)
    places = sorted(ring)
    for place, following in pairwise(places):
        owners[place:following] = [ring[place]] * (following - place)
    highest, lowest = places[-1], places[0]
    owners[highest:] = [ring[highest]] * (SLOTS - highest)
    owners[:lowest] = [ring[highest]] * lowest
    return owners


def check_hash_ranges(ranges: Sequence[Range], consumers: Sequence[Consumer]) -> None:
    """Raises InvalidArgument or ConsumerBusy unless a consumer with these ranges may join the others."""
    for first, last in ranges:
        if not 0 <= first <= last < SLOTS:
            raise InvalidArgument(
                f"a hash range lies within 0 to {SLOTS - 1}, first to last; not {first} to {last}"
            )
    for (_, last), (first, _) in pairwise(sorted(ranges)):
        if first <= last:
            raise InvalidArgument(f"the hash ranges of a consumer must not overlap; two of them hold {first}")
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
                        f"consumer {other.name!r} owns the hash range {start} to {end}, which overlaps {first} to {last}"
                    )
