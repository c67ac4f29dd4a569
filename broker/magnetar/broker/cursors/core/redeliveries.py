"""How often the unacknowledged messages of a subscription were delivered before, as its cursor stores it.

A message's redelivery count is the sum of two parts, so that a rewind costs one position and not a row for each message:

    rewinds    positions from which the read position was rewound: a message below n of them was delivered n times
    by_entry   what was counted message by message (nacks, consumers that left after they had handed messages to the
               program), without what `rewinds` counts already

A message whose second part is 0 has no row. If the broker is killed while a consumer has a message, the last delivery may
not be counted.

>>> counts = RedeliveryCounts()
>>> counts.set((5, 0), 2, 3, 1)                 # messages 2 and 3 of an entry were nacked
>>> counts.rewound((5, 0, 3), (5, 0, 0))        # later 0 to 2 are delivered once more, for another reason
>>> [counts.at((5, 0, index)) for index in (0, 2, 3)]     # each with the last index for which that count holds
[(1, 1), (2, 2), (1, 3)]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from magnetar.proto.ranges import Range, RangeSet

from .acks import EntryKey, Position

# Rewinds of an exclusive subscription that are counted. After more of them without an acknowledgement, redelivery counts are
# too low; nothing else depends on them.
MAX_REWINDS = 1000
# Ranges in `by_entry`: 50 bytes of memory and 7 of a snapshot each where an entry has many, 630 and 9 where it has one.
# Above that the rows with the lowest counts are dropped, and their messages count as never delivered when these counts are
# next asked for: after a restart or a rewind, but not for what waits in the replay queue, which has its own counts.
MAX_ROWS = 50_000
MAX_LOOKED_AT = 100  # entries, by `most`
_EVERYTHING = 1 << 32  # more messages than an entry has

CountedRange = tuple[int, int, int]  # first, last, how often they were delivered before
RedeliveryRow = tuple[int, int, int, int, int]  # ledger, entry, first, last, count beyond `rewinds`


class DeliveredRanges:
    """Messages of one entry by how often they were delivered before: of a cursor, a consumer (pending) or the replay queue.

    A message is in at most one range, so that it has one count.
    """

    __slots__ = ("by_count",)

    def __init__(self) -> None:
        # Redelivery count -> messages; in pending acknowledgements the count has a flag of `redelivery_tracker` as well.
        # Mostly one key: after a nack there are two.
        self.by_count: dict[int, RangeSet] = {}

    @classmethod
    def of(cls, rows: Iterable[CountedRange]) -> DeliveredRanges:
        """Made from sorted, disjoint rows."""
        found = cls()
        for first, last, count in rows:
            found.by_count.setdefault(count, RangeSet()).add(first, last)
        return found

    def __bool__(self) -> bool:
        return bool(self.by_count)

    def add(self, first: int, last: int, count: int) -> None:
        """Records first..last, whatever was recorded of them before."""
        if self.by_count:
            self.take(first, last)
        self.by_count.setdefault(count, RangeSet()).add(first, last)

    def take(self, first: int, last: int) -> list[CountedRange]:
        """Removes what is recorded of first..last and returns it, as (first, last, count)."""
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
        """`add` for sorted, disjoint ranges, none of whose messages is recorded yet."""
        ranges = self.by_count.get(count)
        if ranges is None:
            ranges = self.by_count[count] = RangeSet()
        ranges.add_all(firsts, lasts)

    def take_all(self, firsts: Sequence[int], lasts: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """`take` for sorted, disjoint ranges; returns the starts and ends of what was recorded of them, in any order."""
        if len(self.by_count) == 1:  # mostly so, and mostly all that is recorded is taken, or one range
            (ranges,) = self.by_count.values()
            if ranges.starts == firsts and ranges.ends == lasts:
                self.by_count.clear()
                return firsts, lasts
            if len(firsts) == 1 and ranges.covers(firsts[0], lasts[0]):
                ranges.remove(firsts[0], lasts[0])
                if not ranges:
                    self.by_count.clear()
                return firsts, lasts
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
        found = self.by_count.values()
        if len(found) == 1:
            (ranges,) = found
            return ranges.starts[0], ranges.ends[-1]
        return min([ranges.starts[0] for ranges in found]), max([ranges.ends[-1] for ranges in found])

    def lowest(self) -> tuple[int, RangeSet]:
        """The count of the lowest message, and all ranges with that count."""
        items = self.by_count.items()
        return next(iter(items)) if len(items) == 1 else min(items, key=lambda item: item[1].starts[0])

    def at(self, member: int) -> tuple[int, int | None]:
        """The count of a message (0 if it is not recorded), and the last message up to which it holds; None: to the end."""
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
        """How many ranges are recorded."""
        return sum(map(len, self.by_count.values()))


class RedeliveryCounts:
    """See the module docstring."""

    __slots__ = ("by_entry", "changed_rows", "rewinds", "rewinds_changed", "rows")

    def __init__(self) -> None:
        self.rewinds: list[Position] = []  # sorted
        self.by_entry: dict[EntryKey, DeliveredRanges] = {}  # counts above 0
        self.rows = 0  # ranges in `by_entry`
        # What changed since `clear_changes`, in order: for the cursor ledger.
        self.changed_rows: list[RedeliveryRow] = []
        self.rewinds_changed = False

    @property
    def changed(self) -> bool:
        """True if there is something to be stored."""
        return self.rewinds_changed or bool(self.changed_rows)

    def at(self, position: Position) -> tuple[int, int]:
        """The redelivery count of a message, and the last index of its entry for which that holds."""
        count, last = self._rewound_at(position)
        ranges = self.by_entry.get(position[:2])
        if ranges is not None:
            counted, end = ranges.at(position[2])
            count += counted
            if end is not None:
                last = min(last, end)
        return count, last

    def most(self, mark_delete: Position) -> tuple[int, EntryKey, int]:
        """The highest count that a short look finds, and the message that has it. The two parts of a count are not added.

        Looks at the rewinds of the message at the mark-delete position, and at the first message of each count, from that
        position on, in the first MAX_LOOKED_AT entries of `by_entry`.
        """
        marked, index = mark_delete[:2], mark_delete[2]
        found = (self._rewound_at(mark_delete)[0], marked, index)
        for key, ranges in islice(self.by_entry.items(), MAX_LOOKED_AT):
            for count, members in ranges.by_count.items():
                low = index if key == marked else 0
                at = bisect_left(members.ends, low)
                if count > found[0] and key >= marked and at < len(members):
                    found = (count, key, max(members.starts[at], low))
        return found

    def split(self, key: EntryKey, ranges: Iterable[Range]) -> Iterator[CountedRange]:
        """Ranges of an entry with their counts, cut where the count changes."""
        for first, last in ranges:
            while first <= last:
                count, end = self.at((*key, first))
                yield first, min(end, last), count
                first = end + 1

    def of(self, key: EntryKey, ranges: list[Range]) -> tuple[int, list[Range], DeliveredRanges | None]:
        """The count of the first of these messages, those that have it, and all of them by count (None: all have it)."""
        rows = list(self.split(key, ranges))
        count = rows[0][2]
        if all(row[2] == count for row in rows):
            return count, ranges, None
        mixed = DeliveredRanges.of(rows)
        return count, list(mixed.by_count[count]), mixed

    def _rewound_at(self, position: Position) -> tuple[int, int]:
        """The part of the count that comes from `rewinds`, and the last index of the entry for which that holds."""
        at = bisect_right(self.rewinds, position)
        following = self.rewinds[at : at + 1]
        last = following[0][2] - 1 if following and following[0][:2] == position[:2] else _EVERYTHING
        return len(self.rewinds) - at, last

    # --- changes -----------------------------------------------------------------------------------------------------

    def set(self, key: EntryKey, first: int, last: int, count: int) -> None:
        """Sets the redelivery count of messages."""
        while first <= last:
            rewound, end = self._rewound_at((*key, first))
            end = min(end, last)
            self.set_row((*key, first, end, max(count - rewound, 0)))
            first = end + 1

    def set_row(self, row: RedeliveryRow) -> None:
        """Sets the part of the count that `by_entry` holds: a row as it is stored."""
        ledger, entry, first, last, count = row
        key = (ledger, entry)
        ranges = self.by_entry.get(key)
        if ranges is None:
            if not count:
                return
            ranges = self.by_entry[key] = DeliveredRanges()
        before = ranges.range_count
        ranges.take(first, last)
        if count:
            ranges.add(first, last, count)
        self._resized(key, ranges, before)
        self.changed_rows.append(row)
        if self.rows > MAX_ROWS:
            self._forget_lowest()

    def rewound(self, read_position: Position, mark_delete: Position) -> None:
        """The read position was rewound from there: everything unacknowledged below it is delivered once more."""
        self.rewinds = [position for position in self.rewinds if position > mark_delete][-MAX_REWINDS + 1 :]
        insort(self.rewinds, read_position)
        self.rewinds_changed = True

    def forget(self, key: EntryKey, first: int, last: int) -> None:
        """The messages are acknowledged: drops their counts. Nothing needs to be stored, as the acknowledgement is."""
        ranges = self.by_entry.get(key)
        if ranges is not None:
            before = ranges.range_count
            ranges.take(first, last)
            self._resized(key, ranges, before)

    def drop_below(self, mark_delete: Position) -> None:
        """Drops the counts of entries before the mark-delete position."""
        for key in [key for key in self.by_entry if key < mark_delete[:2]]:
            self.rows -= self.by_entry.pop(key).range_count

    def clear(self) -> None:
        """Drops all counts: after a seek they begin at 0."""
        self.by_entry.clear()
        self.rewinds.clear()
        self.rows = 0
        self.clear_changes()

    def clear_changes(self) -> None:
        """The caller has stored the changes or is about to; or they are not to be stored."""
        self.changed_rows = []
        self.rewinds_changed = False

    def _resized(self, key: EntryKey, ranges: DeliveredRanges, before: int) -> None:
        self.rows += ranges.range_count - before
        if not ranges:
            del self.by_entry[key]

    def _forget_lowest(self) -> None:
        """Drops the rows with the lowest counts until at most three quarters of MAX_ROWS are left."""
        while self.rows > MAX_ROWS * 3 // 4:
            lowest = min(count for ranges in self.by_entry.values() for count in ranges.by_count)
            for key, ranges in list(self.by_entry.items()):
                if lowest in ranges.by_count:
                    before = ranges.range_count
                    del ranges.by_count[lowest]
                    self._resized(key, ranges, before)
                    if self.rows <= MAX_ROWS * 3 // 4:
                        return

    # --- what is stored ----------------------------------------------------------------------------------------------

    def pieces(self, most: int) -> Iterator[list[RedeliveryRow]]:
        """Everything in `by_entry`, in pieces of at most `most` rows.

        Counts may change while the caller pauses between two pieces; `changed_rows` has these changes.
        """
        rows: list[RedeliveryRow] = []
        for key in list(self.by_entry):
            ranges = self.by_entry.get(key)
            if ranges is not None:
                rows += [(*key, *row) for row in ranges.rows()]
            while len(rows) >= most:
                yield rows[:most]
                rows = rows[most:]
        if rows:
            yield rows

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        assert self.rewinds == sorted(self.rewinds)
        assert len(self.rewinds) <= MAX_REWINDS
        assert self.rows == sum(ranges.range_count for ranges in self.by_entry.values()) <= MAX_ROWS
        assert all(ranges and min(ranges.by_count) > 0 for ranges in self.by_entry.values())
