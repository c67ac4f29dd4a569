"""Sets of whole numbers as sorted, disjoint, inclusive ranges: what cursors, pending acks and redeliveries are made of.

>>> ranges = IndexRanges()
>>> ranges.add(0, 9), ranges.add(20, 29), ranges.add(10, 19)
(10, 10, 10)
>>> list(ranges)
[(0, 29)]
>>> ranges.remove(5, 6)
2
>>> list(ranges), ranges.gaps(0, 31)
([(0, 4), (7, 29)], [(5, 6), (30, 31)])
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Range = tuple[int, int]
CountedRange = tuple[int, int, int]  # first, last, how often they were delivered before


class IndexRanges:
    """Disjoint inclusive ranges that do not touch each other, in two parallel sorted lists.

    Invariant: starts[i] <= ends[i] and ends[i] + 1 < starts[i + 1]. Every operation is a binary search plus a list splice.
    """

    __slots__ = ("ends", "starts")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        for first, last in ranges:
            self.add(first, last)

    def __len__(self) -> int:
        """The number of ranges, not of members."""
        return len(self.starts)

    def __iter__(self) -> Iterator[Range]:
        return zip(self.starts, self.ends)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IndexRanges):
            return NotImplemented
        return self.starts == other.starts and self.ends == other.ends

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"IndexRanges({list(self)})"

    @property
    def members(self) -> int:
        """How many numbers are in the set."""
        return sum(self.ends) - sum(self.starts) + len(self.starts)

    def add(self, first: int, last: int) -> int:
        """Adds first..last and returns how many of them were not there before."""
        starts, ends = self.starts, self.ends
        if not ends or first > ends[-1] + 1:
            starts.append(first)
            ends.append(last)
            return last - first + 1
        if first > ends[-1]:  # continues the last range: what in-order acknowledgement does
            added = last - ends[-1]
            ends[-1] = last
            return added
        # Ranges low..high-1 overlap or touch first..last; they become one.
        low = bisect_left(ends, first - 1)
        high = bisect_right(starts, last + 1)
        if low == high:
            starts.insert(low, first)
            ends.insert(low, last)
            return last - first + 1
        covered = sum(ends[low:high]) - sum(starts[low:high]) + high - low
        new_first, new_last = min(first, starts[low]), max(last, ends[high - 1])
        starts[low:high] = [new_first]
        ends[low:high] = [new_last]
        return new_last - new_first + 1 - covered

    def remove(self, first: int, last: int) -> int:
        """Takes first..last out and returns how many of them were there."""
        starts, ends = self.starts, self.ends
        low = bisect_left(ends, first)
        high = bisect_right(starts, last)
        if low >= high:
            return 0
        removed = sum(ends[low:high]) - sum(starts[low:high]) + high - low
        left: list[Range] = []
        if starts[low] < first:
            left.append((starts[low], first - 1))
        if ends[high - 1] > last:
            left.append((last + 1, ends[high - 1]))
        starts[low:high] = [start for start, _ in left]
        ends[low:high] = [end for _, end in left]
        return removed - sum(end - start + 1 for start, end in left)

    def covers(self, first: int, last: int) -> bool:
        """True if all of first..last are in the set."""
        at = bisect_right(self.starts, first) - 1
        return at >= 0 and self.ends[at] >= last

    def end_of(self, member: int) -> int | None:
        """The last number of the range that holds `member`, None if none does."""
        at = bisect_right(self.starts, member) - 1
        return self.ends[at] if at >= 0 and self.ends[at] >= member else None

    def within(self, first: int, last: int) -> list[Range]:
        """The parts of the ranges that lie in first..last."""
        starts, ends = self.starts, self.ends
        low = bisect_left(ends, first)
        high = bisect_right(starts, last)
        if low >= high:
            return []
        found = list(zip(starts[low:high], ends[low:high]))
        if found[0][0] < first:
            found[0] = (first, found[0][1])
        if found[-1][1] > last:
            found[-1] = (found[-1][0], last)
        return found

    def gaps(self, first: int, last: int) -> list[Range]:
        """The parts of first..last that are not in the set."""
        return complement(self.within(first, last), first, last)

    def check(self) -> None:
        """Asserts the invariant; tests call it after every operation."""
        assert len(self.starts) == len(self.ends)
        assert all(start <= end for start, end in self)
        assert all(end + 1 < start for end, start in zip(self.ends, self.starts[1:]))


def complement(ranges: Iterable[Range], first: int, last: int) -> list[Range]:
    """What `ranges` (sorted, disjoint, inside first..last) leave of first..last."""
    found: list[Range] = []
    for start, end in ranges:
        if start > first:
            found.append((first, start - 1))
        first = end + 1
    if first <= last:
        found.append((first, last))
    return found


class DeliveredRanges:
    """Messages of one entry that were delivered or wait for redelivery, by how often they were delivered before.

    A message is in at most one range, so that it is owed to one consumer only.
    """

    __slots__ = ("by_count",)

    def __init__(self) -> None:
        # Redelivery count -> messages. One key in practice: a nack makes a second.
        self.by_count: dict[int, IndexRanges] = {}

    def __bool__(self) -> bool:
        return bool(self.by_count)

    def add(self, first: int, last: int, count: int) -> None:
        """Records first..last, whatever was recorded of them before."""
        if self.by_count:
            self.take(first, last)
        self.by_count.setdefault(count, IndexRanges()).add(first, last)

    def take(self, first: int, last: int) -> list[CountedRange]:
        """Takes out what is recorded of first..last, as (first, last, count)."""
        taken: list[CountedRange] = []
        for count in list(self.by_count):
            ranges = self.by_count[count]
            found = ranges.within(first, last)
            if found:
                ranges.remove(first, last)
                taken += [(start, end, count) for start, end in found]
                if not ranges:
                    del self.by_count[count]
        return taken

    def rows(self) -> list[CountedRange]:
        """Everything that is recorded, as (first, last, count), sorted."""
        return sorted((start, end, count) for count, ranges in self.by_count.items() for start, end in ranges)

    def lowest(self) -> tuple[int, IndexRanges]:
        """The count, and its ranges, that hold the lowest message."""
        return min(self.by_count.items(), key=lambda item: item[1].starts[0])

    def at(self, member: int) -> tuple[int, int | None]:
        """The count of a message, 0 if it is not recorded, and the last one for which that holds; None: all that follow."""
        following: int | None = None
        for count, ranges in self.by_count.items():
            end = ranges.end_of(member)
            if end is not None:
                return count, end
            at = bisect_right(ranges.starts, member)
            if at < len(ranges) and (following is None or ranges.starts[at] < following):
                following = ranges.starts[at]
        return 0, None if following is None else following - 1

    @property
    def members(self) -> int:
        """How many messages are recorded."""
        return sum(ranges.members for ranges in self.by_count.values())

    @property
    def range_count(self) -> int:
        """In how many ranges they are."""
        return sum(map(len, self.by_count.values()))
