"""Acknowledgement state of one subscription: a mark-delete position and what is acknowledged beyond it.

A position is (ledger, entry, index). The mark-delete position is *exclusive*: everything before it is
acknowledged, and the message at it is not known to be. What is acknowledged beyond it are ranges of numbers in each ledger:

    number of a message           entry << INDEX_BITS | index
    last message of an entry      acknowledged together with all numbers that the entry does not use

so that entries acknowledged as a whole, parts of entries, and what lies across their borders are ranges of one kind:

    acknowledged of entry 3 (4 messages): 2 to 3; of entry 4: all; of entry 5: 0    -->    one range, from 3:2 to 5:0

Knowing that a message is the last of its entry takes the entry's message count, which comes with every acknowledgement;
knowing which entry follows the last one of a ledger takes the topic's ledger list, behind `Topology`.

>>> class OneLedger:
...     def normalise(self, position): return position
>>> state = AckState(OneLedger(), (5, 0, 0))
>>> state.ack(5, 1, 0, 9, 10)            # the second entry, whole: a range beyond the mark-delete position
10
>>> state.ack(5, 0, 0, 2, 4), state.mark_delete
(3, (5, 0, 3))
>>> state.ack(5, 0, 3, 3, 4), state.mark_delete
(1, (5, 2, 0))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from magnetar.proto.ids import MAX_MESSAGES_PER_ENTRY
from magnetar.proto.ranges import Range

from .range_blocks import LedgerRanges, RangesOfLedger

Position = tuple[int, int, int]
EntryKey = tuple[int, int]
AckRange = tuple[int, int, int, int]  # ledger, entry, first index, last index

INDEX_BITS = 20
_LAST_INDEX = (1 << INDEX_BITS) - 1
assert MAX_MESSAGES_PER_ENTRY <= 1 << INDEX_BITS


class EntryRanges(NamedTuple):
    """Messages of one entry: range i is from firsts[i] to lasts[i]; sorted, disjoint, none is empty."""

    ledger: int
    entry: int
    firsts: list[int]
    lasts: list[int]


def by_entry(rows: Iterable[AckRange]) -> list[EntryRanges]:
    """The rows in their order; adjacent rows of one entry become one item as long as they ascend. 0.1 us a row.

    No row may be empty.
    """
    found: list[EntryRanges] = []
    firsts: list[int] = []
    lasts: list[int] = []
    last_ledger = last_entry = last_index = -1
    for ledger, entry, first, last in rows:
        if entry == last_entry and first > last_index and ledger == last_ledger:
            firsts.append(first)
            lasts.append(last)
        else:
            firsts, lasts = [first], [last]
            found.append(EntryRanges(ledger, entry, firsts, lasts))
            last_ledger, last_entry = ledger, entry
        last_index = last
    return found


class Topology(Protocol):
    """What follows what: the ledger list of the topic, or what a compaction has left of it (`compaction.view`)."""

    def normalise(self, position: Position) -> Position:
        """`position`, or the first one after it at which there is, or will be, a message to be delivered.

        For a ledger list that is the start of the next ledger if the ledger of `position` ends before it or was deleted.
        """


def number_of(position: Position) -> int:
    """The number of a position in its ledger; the position may be behind the last message of an entry."""
    return (position[1] << INDEX_BITS) + position[2]


def acked_numbers(entry: int, first: int, last: int, message_count: int) -> Range:
    """The range of numbers that acknowledging messages first..last of an entry adds; see the module docstring."""
    base = entry << INDEX_BITS
    return base + first, base + (last if last + 1 < message_count else _LAST_INDEX)


def numbers_of(
    entry: int, firsts: Sequence[int], lasts: Sequence[int], message_count: int
) -> tuple[list[int], list[int]]:
    """`acked_numbers` for sorted ranges of one entry: where the ranges of numbers start, and where they end."""
    base = entry << INDEX_BITS
    starts, ends = [base + first for first in firsts], [base + last for last in lasts]
    ends[-1] = acked_numbers(entry, firsts[-1], lasts[-1], message_count)[1]
    return starts, ends


class AckState:
    """See the module docstring.

    Invariant (`check`): every range in `acked` starts beyond the mark-delete position.
    """

    __slots__ = ("_topology", "acked", "mark_delete")

    def __init__(self, topology: Topology, mark_delete: Position) -> None:
        self._topology = topology
        self.mark_delete = mark_delete
        self.acked = LedgerRanges()  # numbers of messages acknowledged beyond the mark-delete position

    @property
    def range_count(self) -> int:
        """Ranges kept beyond the mark-delete position: what memory (80 bytes each) and snapshots pay for."""
        return self.acked.count

    def ack(self, ledger: int, entry: int, first: int, last: int, message_count: int) -> int:
        """Acknowledges first..last of an entry that has `message_count` messages; returns how many were new."""
        mark_ledger, mark_entry, mark_index = self.mark_delete
        if (ledger, entry) <= (mark_ledger, mark_entry):
            if (ledger, entry) < (mark_ledger, mark_entry):
                return 0
            first = max(first, mark_index)
        last = min(last, message_count - 1)
        if first > last:
            return 0
        start, end = acked_numbers(entry, first, last, message_count)
        ranges = self.acked.by_ledger.get(ledger)
        if ranges is None and (ledger, entry, first) == self.mark_delete:  # in order, and nothing lies beyond
            self._move((ledger, (end + 1) >> INDEX_BITS, (end + 1) & _LAST_INDEX))
            self._advance()
            return last - first + 1
        # Numbers that the entry does not use do not count; `add` counts them if the last message of the entry is new.
        unused = end - start - (last - first)
        if unused and ranges is not None and ranges.end_of(end) is not None:
            unused = 0
        added = self.acked.add(ledger, start, end) - unused
        self._advance()
        return added

    def ack_all(
        self, ledger: int, entry: int, firsts: Sequence[int], lasts: Sequence[int], message_count: int
    ) -> int:
        """`ack` for sorted, disjoint ranges of one entry; 0.2 us each if there are many, and all are new."""
        if len(firsts) == 1 or (ledger, entry, firsts[0]) < self.mark_delete or lasts[-1] >= message_count:
            rows = zip(firsts, lasts)
            return sum([self.ack(ledger, entry, first, last, message_count) for first, last in rows])
        starts, ends = numbers_of(entry, firsts, lasts, message_count)
        ranges = self.acked.by_ledger.get(ledger)
        unused = ends[-1] - starts[-1] - (lasts[-1] - firsts[-1])  # as in `ack`
        if unused and ranges is not None and ranges.end_of(ends[-1]) is not None:
            unused = 0
        added = self.acked.add_all(ledger, starts, ends) - unused
        self._advance()
        return added

    def ack_through(self, ledger: int, entry: int, index: int, message_count: int) -> bool:
        """Acknowledges everything up to and including `index`; False if all of it was. `message_count` 0: not known."""
        whole = index + 1 == message_count
        return self.move_to((ledger, entry + 1, 0) if whole else (ledger, entry, index + 1))

    def move_to(self, target: Position) -> bool:
        """Acknowledges everything before `target`; False if all of it was. The mark-delete position never goes back."""
        if target <= self.mark_delete:
            return False
        self._move(target)
        self._advance()
        return True

    def merge(self, mark_delete: Position, rows: Iterable[RangesOfLedger]) -> None:
        """Adds the stored state of a cursor: its mark-delete position, and sorted, disjoint ranges of numbers by ledger."""
        if mark_delete > self.mark_delete:
            self._move(mark_delete)
        mark_ledger = self.mark_delete[0]
        for ledger, starts, ends in rows:
            if ledger >= mark_ledger:
                self.acked.update(ledger, starts, ends)
        self.acked.remove_below(mark_ledger, number_of(self.mark_delete))
        self._advance()

    def reset(self, position: Position) -> None:
        """Forgets all acknowledgements and starts at `position`: a seek, forward or backward."""
        self.acked.clear()
        self.mark_delete = self._topology.normalise(position)

    def follow(self, topology: Topology) -> None:
        """Uses this topology from now on: the subscription reads another compacted view, or the ledgers themselves."""
        self._topology = topology
        self._advance()

    def renormalise(self) -> None:
        """Called when the ledger list changed: a mark-delete position at the end of a ledger may now move on."""
        self._advance()

    def unacked(self, ledger: int, entry: int, first: int, last: int) -> list[Range]:
        """The parts of first..last that are not acknowledged."""
        mark_ledger, mark_entry, mark_index = self.mark_delete
        if (ledger, entry) <= (mark_ledger, mark_entry):
            if (ledger, entry) < (mark_ledger, mark_entry):
                return []
            first = max(first, mark_index)
        if first > last:
            return []
        ranges = self.acked.by_ledger.get(ledger) if self.acked.by_ledger else None
        if ranges is None:
            return [(first, last)]
        base = entry << INDEX_BITS
        return [(start - base, end - base) for start, end in ranges.gaps(base + first, base + last)]

    def skip_whole(self, ledger: int, entry: int) -> int:
        """The first entry from `entry` on that is not wholly acknowledged, so that dispatch can skip the others at once."""
        ranges = self.acked.by_ledger.get(ledger)
        end = None if ranges is None else ranges.end_of(entry << INDEX_BITS)
        return entry if end is None else (end + 1) >> INDEX_BITS

    def _advance(self) -> None:
        """Moves the mark-delete position over the acknowledged messages that follow it."""
        while True:
            position = self._topology.normalise(self.mark_delete)
            ranges = self.acked.by_ledger.get(position[0])
            end = None if ranges is None else ranges.end_of(number_of(position))
            if end is not None:
                position = (position[0], (end + 1) >> INDEX_BITS, (end + 1) & _LAST_INDEX)
            if position == self.mark_delete:
                return
            self._move(position)

    def _move(self, position: Position) -> None:
        """Sets the mark-delete position and drops the ranges below it."""
        before, self.mark_delete = self.mark_delete, position
        if self.acked:
            if position[0] != before[0]:
                self.acked.remove_ledgers_below(position[0])
            self.acked.remove_below(position[0], number_of(position))

    def check(self) -> None:
        """Asserts the invariants; tests call it after every change."""
        self.acked.check()
        ledger = self.mark_delete[0]
        assert all(other >= ledger for other in self.acked.by_ledger)
        if ledger in self.acked.by_ledger:
            (start,), _ = self.acked.by_ledger[ledger].part(0, 1)
            assert start > number_of(self.mark_delete)
