"""What a cursor has acknowledged beyond its mark-delete position: any number of ranges, by ledger."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from magnetar.proto.ranges import BULK_FACTOR, Range, RangeSet, complement

# Of one block of `RangeBlocks`, and twice as many at most: a splice in lists of that length takes less than the bisection.
BLOCK_RANGES = 512

RangesOfLedger = tuple[int, list[int], list[int]]  # ledger, where each range starts, where it ends


class RangeBlocks:
    """The same set as `RangeSet`, in blocks of them: a change costs as much with 200,000 ranges as with 500.

    Invariant: one block after another, the ranges are those of an RangeSet; no block is empty.
    """

    __slots__ = ("_blocks", "_ends", "count")

    def __init__(self) -> None:
        self._blocks: list[RangeSet] = []
        self._ends: list[int] = []  # the last number of each block
        self.count = 0  # of ranges

    def __len__(self) -> int:
        """The number of ranges, not of members."""
        return self.count

    def __iter__(self) -> Iterator[Range]:
        return (found for block in self._blocks for found in block)

    def add(self, first: int, last: int) -> int:
        """Adds first..last and returns how many of them were not there before."""
        at = self._block_before(first)
        if at + 1 < len(self._blocks) and self._blocks[at + 1].starts[0] <= last + 1:
            self._join(at, last)
        block = self._blocks[at]
        before = len(block)
        return self._added(at, before, block.add(first, last))

    def add_all(self, firsts: Sequence[int], lasts: Sequence[int]) -> int:
        """`add` for many ranges, sorted and disjoint."""
        blocks, last = self._blocks, lasts[-1]
        at = self._block_before(firsts[0])
        following = at + 1
        while following < len(blocks) and blocks[following].starts[0] <= last + 1:
            following += 1
        if (following - at - 1) * BLOCK_RANGES > BULK_FACTOR * len(firsts):
            return sum(map(self.add, firsts, lasts))
        if following > at + 1:
            self._join(at, last)
        before = len(blocks[at])
        return self._added(at, before, blocks[at].add_all(firsts, lasts))

    def _block_before(self, first: int) -> int:
        """The block to which a range that begins there belongs: the first one that is not wholly before it, with a gap."""
        blocks, ends = self._blocks, self._ends
        at = bisect_left(ends, first - 1)
        if at == len(blocks):
            if not blocks or len(blocks[-1]) >= BLOCK_RANGES:
                blocks.append(RangeSet())
                ends.append(first)
            at = len(blocks) - 1
        return at

    def _added(self, at: int, ranges_before: int, added: int) -> int:
        block = self._blocks[at]
        self.count += len(block) - ranges_before
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
        parts: list[RangeSet] = []
        for low in range(0, len(block), half):
            parts.append(RangeSet())
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
        block = RangeSet()
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
        whole = RangeSet()
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
