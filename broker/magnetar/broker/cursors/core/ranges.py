"""Sets of whole numbers as sorted, disjoint, inclusive ranges: what cursors, pending acks and redeliveries are made of.

`IndexRanges` is for a few ranges, `RangeBlocks` for any number of them, `LedgerRanges` has the latter for each ledger.

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
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import lt

# Of one block of `RangeBlocks`, and twice as many at most: a splice in lists of that length takes less than the bisection.
BLOCK_RANGES = 512
# Many ranges are added or removed at once where no more than so many times their number are already there.
BULK_FACTOR = 8
BULK_RANGES = 4  # and not fewer

Range = tuple[int, int]
CountedRange = tuple[int, int, int]  # first, last, how often they were delivered before
RangesOfLedger = tuple[int, list[int], list[int]]  # ledger, where each range starts, where it ends


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

    @classmethod
    def of(cls, rows: Sequence[Range]) -> IndexRanges:
        """Of ranges that are sorted and do not touch each other."""
        found = cls()
        found.starts, found.ends = [first for first, _ in rows], [last for _, last in rows]
        return found

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
        return count_members(self.starts, self.ends)

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

    def add_all(self, firsts: Sequence[int], lasts: Sequence[int]) -> int:
        """`add` for many ranges, sorted and disjoint: 0.15 us for each of them and of those among which they lie."""
        starts, ends = self.starts, self.ends
        low = bisect_left(ends, firsts[0] - 1)
        high = bisect_right(starts, lasts[-1] + 1)
        if len(firsts) >= BULK_RANGES and high - low <= BULK_FACTOR * len(firsts):
            # Two sorted lists after each other are merged in C. If nothing overlaps, each start has the end at its place.
            merged_starts = sorted([*starts[low:high], *firsts])
            merged_ends = sorted([*ends[low:high], *lasts])
            if all(map(lt, merged_ends, merged_starts[1:])):
                touching = {end + 1 for end in merged_ends}.intersection(merged_starts)
                if touching:
                    merged_starts = [start for start in merged_starts if start not in touching]
                    merged_ends = [end for end in merged_ends if end + 1 not in touching]
                starts[low:high], ends[low:high] = merged_starts, merged_ends
                return count_members(firsts, lasts)
        return sum(map(self.add, firsts, lasts))

    def remove_if_there(self, firsts: Sequence[int], lasts: Sequence[int]) -> bool:
        """Takes many ranges out, sorted and disjoint: 0.2 us for each of them and of those among which they lie.

        False, and nothing has changed, if they are a few, or not all of their numbers are there.
        """
        starts, ends = self.starts, self.ends
        low = bisect_left(ends, firsts[0])
        high = bisect_right(starts, lasts[-1])
        if len(firsts) < BULK_RANGES or high - low > BULK_FACTOR * len(firsts):
            return False
        # Where a range begins, or the place behind its end: what both sets have vanishes in their difference.
        borders = {*starts[low:high], *[end + 1 for end in ends[low:high]]}
        borders.symmetric_difference_update({*firsts}.symmetric_difference([last + 1 for last in lasts]))
        ordered = sorted(borders)
        left_starts, left_ends = ordered[::2], [border - 1 for border in ordered[1::2]]
        removed = count_members(starts[low:high], ends[low:high]) - count_members(left_starts, left_ends)
        if removed != count_members(firsts, lasts):
            return False
        starts[low:high], ends[low:high] = left_starts, left_ends
        return True

    def split(self, number: int) -> tuple[IndexRanges, IndexRanges]:
        """What lies below a number, and the rest."""
        low, high = IndexRanges(), IndexRanges()
        at = bisect_left(self.ends, number)
        low.starts, low.ends = self.starts[:at], self.ends[:at]
        high.starts, high.ends = self.starts[at:], self.ends[at:]
        if high and high.starts[0] < number:
            low.starts.append(high.starts[0])
            low.ends.append(number - 1)
            high.starts[0] = number
        return low, high

    def without(self, others: IndexRanges) -> IndexRanges:
        """The rest, when ranges that are in the set are taken out."""
        left = IndexRanges()
        left.starts, left.ends = self.starts[:], self.ends[:]
        if others and not left.remove_if_there(others.starts, others.ends):
            for first, last in others:
                left.remove(first, last)
        return left

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


def count_members(starts: Sequence[int], ends: Sequence[int]) -> int:
    """How many numbers are in disjoint ranges."""
    return sum(ends) - sum(starts) + len(starts)


def first_members(ranges: list[Range], members: int) -> list[Range]:
    """So many of the numbers in sorted ranges, the lowest ones; all of them if there are fewer."""
    found: list[Range] = []
    for first, last in ranges:
        if last - first + 1 >= members:
            found.append((first, first + members - 1))
            break
        found.append((first, last))
        members -= last - first + 1
    return found


def intersection(ranges: IndexRanges, others: IndexRanges) -> IndexRanges:
    """What both have: 0.1 us for each of their ranges, or 0.6 us for each of `ranges` if these are far fewer."""
    if len(others) > BULK_FACTOR * len(ranges):
        return IndexRanges.of([part for first, last in ranges for part in others.within(first, last)])
    # Two sorted lists after each other are merged in C. When k + 2 ranges have begun and k have ended, two overlap.
    starts, ends = sorted([*ranges.starts, *others.starts]), sorted([*ranges.ends, *others.ends])
    return IndexRanges.of([part for part in zip(islice(starts, 1, None), ends) if part[0] <= part[1]])


def intersects(ranges: IndexRanges, others: IndexRanges) -> bool:
    """True if something is in both; `ranges` should be the one with fewer of them."""
    starts, ends, count = others.starts, others.ends, len(others)
    for first, last in ranges:
        at = bisect_left(ends, first)
        if at < count and starts[at] <= last:
            return True
    return False


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


class RangeBlocks:
    """The same set as `IndexRanges`, in blocks of them: a change costs as much with 200,000 ranges as with 500.

    Invariant: one block after another, the ranges are those of an IndexRanges; no block is empty.
    """

    __slots__ = ("_blocks", "_ends", "count")

    def __init__(self) -> None:
        self._blocks: list[IndexRanges] = []
        self._ends: list[int] = []  # the last number of each block
        self.count = 0  # of ranges

    def __len__(self) -> int:
        """The number of ranges, not of members."""
        return self.count

    def __iter__(self) -> Iterator[Range]:
        return (found for block in self._blocks for found in block)

    def add(self, first: int, last: int) -> int:
        """Adds first..last and returns how many of them were not there before."""
        blocks, ends = self._blocks, self._ends
        at = bisect_left(ends, first - 1)  # the first block that is not wholly before `first`, with a gap
        if at == len(blocks):
            if not blocks or len(blocks[-1]) >= BLOCK_RANGES:
                blocks.append(IndexRanges())
                ends.append(last)
            at = len(blocks) - 1
        elif at + 1 < len(blocks) and blocks[at + 1].starts[0] <= last + 1:
            self._join(at, last)
        block = blocks[at]
        before = len(block)
        added = block.add(first, last)
        self.count += len(block) - before
        ends[at] = block.ends[-1]
        if len(block) > 2 * BLOCK_RANGES:
            self._split(at)
        return added

    def add_all(self, firsts: Sequence[int], lasts: Sequence[int]) -> int:
        """`add` for many ranges, sorted and disjoint."""
        blocks, last = self._blocks, lasts[-1]
        at = bisect_left(self._ends, firsts[0] - 1)
        if at == len(blocks):
            if not blocks or len(blocks[-1]) >= BLOCK_RANGES:
                blocks.append(IndexRanges())
                self._ends.append(last)
            at = len(blocks) - 1
        following = at + 1
        while following < len(blocks) and blocks[following].starts[0] <= last + 1:
            following += 1
        if (following - at - 1) * BLOCK_RANGES > BULK_FACTOR * len(firsts):
            return sum(map(self.add, firsts, lasts))
        if following > at + 1:
            self._join(at, last)
        block = blocks[at]
        before = len(block)
        added = block.add_all(firsts, lasts)
        self.count += len(block) - before
        self._ends[at] = block.ends[-1]
        if len(block) > 2 * BLOCK_RANGES:
            self._split(at)
        return added

    def _join(self, at: int, last: int) -> None:
        """The block, and those that follow it and touch what ends at `last`, become one."""
        blocks = self._blocks
        end = at + 1
        joined = blocks[at]
        while end < len(blocks) and blocks[end].starts[0] <= last + 1:
            joined.starts += blocks[end].starts
            joined.ends += blocks[end].ends
            end += 1
        del blocks[at + 1 : end]
        del self._ends[at:end]
        self._ends.insert(at, joined.ends[-1])

    def _split(self, at: int) -> None:
        block, half = self._blocks[at], BLOCK_RANGES
        parts: list[IndexRanges] = []
        for low in range(0, len(block), half):
            parts.append(IndexRanges())
            parts[-1].starts, parts[-1].ends = block.starts[low : low + half], block.ends[low : low + half]
        self._blocks[at : at + 1] = parts
        self._ends[at : at + 1] = [part.ends[-1] for part in parts]

    def update(self, starts: list[int], ends: list[int]) -> None:
        """Adds ranges that are sorted and do not touch each other.

        Many at once if they lie behind all that are there, or are there (a snapshot that the pointer has as well).
        """
        if len(starts) < BLOCK_RANGES or (self._ends and starts[0] <= self._ends[-1] + 1):
            if self.part(starts[0], len(starts)) == (starts, ends):
                return
            for first, last in zip(starts, ends):
                self.add(first, last)
            return
        block = IndexRanges()
        block.starts, block.ends = starts, ends
        self._blocks.append(block)
        self._ends.append(ends[-1])
        self.count += len(starts)
        self._split(len(self._blocks) - 1)

    def remove_below(self, number: int) -> None:
        """Takes everything below `number` out."""
        blocks, ends = self._blocks, self._ends
        if not ends or blocks[0].starts[0] >= number:
            return
        at = bisect_left(ends, number)
        self.count -= sum(map(len, blocks[:at]))
        del blocks[:at], ends[:at]
        if blocks and blocks[0].starts[0] < number:
            before = len(blocks[0])
            blocks[0].remove(blocks[0].starts[0], number - 1)
            self.count += len(blocks[0]) - before

    def end_of(self, member: int) -> int | None:
        """The last number of the range that holds `member`, None if none does."""
        at = bisect_left(self._ends, member)
        return None if at == len(self._ends) else self._blocks[at].end_of(member)

    def gaps(self, first: int, last: int) -> list[Range]:
        """The parts of first..last that are not in the set."""
        at = bisect_left(self._ends, first)
        found: list[Range] = []
        while at < len(self._blocks) and self._blocks[at].starts[0] <= last:
            found += self._blocks[at].within(first, last)
            at += 1
        return complement(found, first, last)

    def part(self, number: int, most: int) -> tuple[list[int], list[int]]:
        """Where ranges start and end, of `most` at most: the first ones that end at `number` or behind it."""
        starts: list[int] = []
        ends: list[int] = []
        at = bisect_left(self._ends, number)
        while at < len(self._blocks) and len(starts) < most:
            block = self._blocks[at]
            low = bisect_left(block.ends, number)
            high = low + most - len(starts)
            starts += block.starts[low:high]
            ends += block.ends[low:high]
            at += 1
        return starts, ends

    def check(self) -> None:
        """Asserts the invariants; tests call it after every operation."""
        whole = IndexRanges()
        for block in self._blocks:
            assert 0 < len(block) <= 2 * BLOCK_RANGES
            whole.starts += block.starts
            whole.ends += block.ends
        whole.check()
        assert self._ends == [block.ends[-1] for block in self._blocks]
        assert self.count == len(whole)


class LedgerRanges:
    """Ranges of numbers by ledger."""

    __slots__ = ("by_ledger", "count")

    def __init__(self) -> None:
        self.by_ledger: dict[int, RangeBlocks] = {}  # none is empty
        self.count = 0  # of ranges, over all ledgers

    def __bool__(self) -> bool:
        return bool(self.by_ledger)

    def add(self, ledger: int, first: int, last: int) -> int:
        """Adds first..last and returns how many of them were not there before."""
        ranges = self.by_ledger.get(ledger)
        if ranges is None:
            ranges = self.by_ledger[ledger] = RangeBlocks()
        before = ranges.count
        added = ranges.add(first, last)
        self.count += ranges.count - before
        return added

    def add_all(self, ledger: int, firsts: Sequence[int], lasts: Sequence[int]) -> int:
        """`add` for many ranges, sorted and disjoint."""
        if len(firsts) == 1:
            return self.add(ledger, firsts[0], lasts[0])
        ranges = self.by_ledger.get(ledger)
        if ranges is None:
            ranges = self.by_ledger[ledger] = RangeBlocks()
        before = ranges.count
        added = ranges.add_all(firsts, lasts)
        self.count += ranges.count - before
        return added

    def update(self, ledger: int, starts: list[int], ends: list[int]) -> None:
        """Adds ranges that are sorted and do not touch each other."""
        if starts:
            ranges = self.by_ledger.setdefault(ledger, RangeBlocks())
            before = ranges.count
            ranges.update(starts, ends)
            self.count += ranges.count - before

    def remove_below(self, ledger: int, number: int) -> None:
        """Takes what a ledger has below `number` out."""
        ranges = self.by_ledger.get(ledger)
        if ranges is not None:
            before = ranges.count
            ranges.remove_below(number)
            self.count += ranges.count - before
            if not ranges:
                del self.by_ledger[ledger]

    def remove_ledgers_below(self, ledger: int) -> None:
        """Takes everything of earlier ledgers out."""
        for other in [other for other in self.by_ledger if other < ledger]:
            self.count -= self.by_ledger.pop(other).count

    def clear(self) -> None:
        """Takes everything out."""
        self.by_ledger.clear()
        self.count = 0

    def pieces(self, most: int) -> Iterator[list[RangesOfLedger]]:
        """Everything in pieces of at most `most` ranges, in order; at least one piece, the last one may be empty.

        Ranges may be added and removed while the caller pauses between two pieces: what was there before the first piece and
        is there still when the last one has come is in one of them.
        """
        rows: list[RangesOfLedger] = []
        room = most
        for ledger in sorted(self.by_ledger):
            number = 0
            while (ranges := self.by_ledger.get(ledger)) is not None:
                starts, ends = ranges.part(number, room)
                if not starts:
                    break
                rows.append((ledger, starts, ends))
                number = ends[-1] + 1
                room -= len(starts)
                if not room:
                    yield rows
                    rows, room = [], most
        yield rows

    def check(self) -> None:
        """Asserts the invariants."""
        for ranges in self.by_ledger.values():
            ranges.check()
            assert ranges
        assert self.count == sum(map(len, self.by_ledger.values()))


class DeliveredRanges:
    """Messages of one entry that were delivered or wait for redelivery, by how often they were delivered before.

    A message is in at most one range, so that it is owed to one consumer only.
    """

    __slots__ = ("by_count",)

    def __init__(self) -> None:
        # Redelivery count -> messages. One key in practice: a nack makes a second.
        self.by_count: dict[int, IndexRanges] = {}

    @classmethod
    def of(cls, rows: Iterable[CountedRange]) -> DeliveredRanges:
        """Of rows that are sorted and disjoint."""
        found = cls()
        for first, last, count in rows:
            found.by_count.setdefault(count, IndexRanges()).add(first, last)
        return found

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

    def add_all(self, firsts: Sequence[int], lasts: Sequence[int], count: int) -> None:
        """`add` for ranges that are sorted and disjoint, of messages that are not recorded."""
        ranges = self.by_count.get(count)
        if ranges is None:
            ranges = self.by_count[count] = IndexRanges()
        ranges.add_all(firsts, lasts)

    def take_all(self, firsts: Sequence[int], lasts: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """`take` for many ranges, sorted and disjoint; where what was recorded starts and ends, in any order."""
        if all(ranges.ends[-1] < firsts[0] for ranges in self.by_count.values()):
            return [], []
        for count, ranges in self.by_count.items():
            if ranges.remove_if_there(firsts, lasts):
                if not ranges:
                    del self.by_count[count]
                return firsts, lasts
        taken = [part for first, last in zip(firsts, lasts) for part in self.take(first, last)]
        return [first for first, _, _ in taken], [last for _, last, _ in taken]

    def rows(self) -> list[CountedRange]:
        """Everything that is recorded, as (first, last, count), sorted."""
        return sorted((start, end, count) for count, ranges in self.by_count.items() for start, end in ranges)

    @property
    def span(self) -> Range:
        """The lowest and the highest message."""
        starts = [ranges.starts[0] for ranges in self.by_count.values()]
        return min(starts), max([ranges.ends[-1] for ranges in self.by_count.values()])

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
