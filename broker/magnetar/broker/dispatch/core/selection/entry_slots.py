"""The slots of an entry's messages, and whose they are: found once for an entry, not at each look at it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, repeat
from typing import NamedTuple

from magnetar.proto.batch_extensions import entry_chunks
from magnetar.proto.entry import Entry
from magnetar.proto.entry_messages import entry_key_hashes
from magnetar.proto.ranges import RangeSet

from ....cursors.core.redeliveries import CountedRange
from ..consumer import Consumer
from .hash_ranges import Owners, slots_of


class Group(NamedTuple):
    """What an entry has for one owner: all of it, whatever was delivered or acknowledged meanwhile."""

    ranges: RangeSet
    slots: dict[int, None]


class EntrySlots:
    """See the module docstring. Of an entry some of whose messages are in flight or in the replay queue.

    Run i of messages, which ends before index ends[i], is of slots[i]. held: messages in flight or in the replay queue.
    waits_for: what may release all that waits of the entry, while it is known.
    """

    __slots__ = ("_groups", "_owners", "_single", "chunks", "ends", "held", "slots", "waits_for")

    def __init__(self, entry: Entry) -> None:
        self.ends, hashes = entry_key_hashes(entry)
        self.slots = slots_of(hashes)
        self.chunks = entry_chunks(entry)
        self.held = 0
        self.waits_for: dict[Consumer | int | None, None] | None = None
        # Every message is a run: what unbatched producers send.
        self._single = len(self.slots) == entry.message_count
        self._groups: dict[Consumer | None, Group] = {}
        self._owners = -1  # the version of the owners that `_groups` is of

    def runs(self, first: int, last: int) -> Iterable[CountedRange]:
        """First message, last message and slot of each run in first..last."""
        ends, slots = self.ends, self.slots
        at = bisect_right(ends, first)
        while first <= last:
            end = min(ends[at] - 1, last)
            yield first, end, slots[at]
            first = end + 1
            at += 1

    def counted(self, starts: Sequence[int], ends: Sequence[int]) -> Iterable[tuple[int, int]]:
        """The slot of each run in ranges, and how many messages of it lie there."""
        if self._single:
            slots = self.slots
            parts = [slots[first : last + 1] for first, last in zip(starts, ends)]
            return zip(chain.from_iterable(parts), repeat(1))
        return [
            (slot, last - first + 1) for row in zip(starts, ends) for first, last, slot in self.runs(*row)
        ]

    def groups(self, owners: Owners) -> dict[Consumer | None, Group]:
        """What the entry has for each owner; 0.1 us a run when the owners have changed."""
        if self._owners == owners.version:
            return self._groups
        groups = self._groups = {}
        for slot in dict.fromkeys(self.slots):
            owner = owners[slot]
            group = groups.get(owner)
            if group is None:
                group = groups[owner] = Group(RangeSet(), {})
            group.slots[slot] = None
        first, last_owner, last_ends = 0, None, list[int]()
        for end, owner in zip(self.ends, map(owners.__getitem__, self.slots)):
            if owner is last_owner and last_ends:
                last_ends[-1] = end - 1
            else:
                ranges = groups[owner].ranges
                ranges.starts.append(first)
                ranges.ends.append(end - 1)
                last_owner, last_ends = owner, ranges.ends
            first = end
        self._owners = owners.version
        return groups

    def is_of(self, owners: Owners) -> bool:
        """True if nothing has changed since `groups` was asked for."""
        return self._owners == owners.version

    def run_count(self, ranges: RangeSet) -> int:
        """In how many runs the messages are."""
        if self._single:
            return ranges.members
        ends = self.ends
        return sum([bisect_right(ends, last) - bisect_right(ends, first) + 1 for first, last in ranges])

    def first_messages(self, ranges: RangeSet, messages: int) -> RangeSet:
        """So many messages of the ranges, and what they have of the run in which the last of these lies."""
        sums = list(accumulate([last - first + 1 for first, last in ranges]))
        at = bisect_left(sums, messages)
        if at == len(sums):
            return ranges
        last = ranges.ends[at] - (sums[at] - messages)
        return self._up_to(ranges, at, last)

    def first_runs(self, ranges: RangeSet, runs: int) -> RangeSet:
        """What the ranges have of the first so many runs in which they have something."""
        if self._single:
            return self.first_messages(ranges, runs)
        if len(self.slots) <= runs:
            return ranges
        ends = self.ends
        for at, (first, last) in enumerate(ranges):
            run = bisect_right(ends, first)
            count = bisect_right(ends, last) - run + 1
            if count >= runs:
                return self._up_to(ranges, at, ends[run + runs - 1] - 1)
            runs -= count
        return ranges

    def _up_to(self, ranges: RangeSet, at: int, last: int) -> RangeSet:
        """The ranges up to the end of the run of message `last`, which is in range `at`."""
        last = min(self.ends[bisect_right(self.ends, last)] - 1, ranges.ends[at])
        found = RangeSet()
        found.starts, found.ends = ranges.starts[: at + 1], ranges.ends[:at]
        found.ends.append(last)
        return found
