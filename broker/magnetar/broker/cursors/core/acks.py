"""Acknowledgement state of one subscription: a mark-delete position and what is acknowledged beyond it.

A position is (ledger, entry, index). The mark-delete position is *exclusive*: the first message that is not known to be
acknowledged together with everything before it. Beyond it whole entries are ranges of entry ids per ledger, and entries
acknowledged in part have ranges of indexes. Knowing that an entry is complete takes its message count, which comes with
every acknowledgement; knowing which entry follows the last one of a ledger takes the topic's ledger list, behind
`Topology`.

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

from typing import Protocol

import msgspec

from .ranges import IndexRanges, Range

Position = tuple[int, int, int]
EntryKey = tuple[int, int]

FORMAT = 1


class Snapshot(msgspec.Struct, tag_field="format", tag=FORMAT):
    """An `AckState` and the redelivery counts beside it as they are stored (FORMATS.md).

    Ranges are [first, last, first, last, ...], counted ones [first, last, count, ...].
    """

    mark_delete: Position
    entries: list[tuple[int, list[int]]]  # by ledger
    partial: list[tuple[int, int, list[int]]]  # by ledger and entry
    redeliveries: list[tuple[int, int, list[int]]]  # by ledger and entry
    rewinds: list[Position]


class Topology(Protocol):
    """What the ledger list of the topic tells."""

    def normalise(self, position: Position) -> Position:
        """`position`, or the start of the ledger that follows if its ledger ends before it or is gone."""


class AckState:
    """See the module docstring. One door for every change: `ack`, `ack_through`, `reset`.

    Invariants (`check`): nothing is recorded below the mark-delete position, no entry is both whole and in part, the
    entry at the mark-delete position is not whole, and its recorded part does not begin at the mark-delete index.
    """

    __slots__ = ("_partial_ranges", "_topology", "entries", "mark_delete", "partial")

    def __init__(self, topology: Topology, mark_delete: Position) -> None:
        self._topology = topology
        self.mark_delete = mark_delete
        self.entries: dict[int, IndexRanges] = {}  # ledger -> entries acknowledged as a whole
        self.partial: dict[EntryKey, IndexRanges] = {}  # entry -> acknowledged indexes, never all of them
        self._partial_ranges = 0  # over all of `partial`

    @property
    def range_count(self) -> int:
        """Ranges kept beyond the mark-delete position: what memory and snapshots pay for."""
        return sum(map(len, self.entries.values())) + self._partial_ranges

    def ack(self, ledger: int, entry: int, first: int, last: int, message_count: int) -> int:
        """Acknowledges first..last of an entry that has `message_count` messages; returns how many were new."""
        mark_ledger, mark_entry, mark_index = self.mark_delete
        lowest = 0
        key = (ledger, entry)
        if key <= (mark_ledger, mark_entry):
            if key < (mark_ledger, mark_entry):
                return 0
            lowest = mark_index
            first = max(first, lowest)
        last = min(last, message_count - 1)
        if first > last or self.is_whole(ledger, entry):
            return 0
        ranges = self.partial.get(key)
        if ranges is None:
            added = last - first + 1
            if first > lowest or last < message_count - 1:
                ranges = self.partial[key] = IndexRanges()
                ranges.add(first, last)
                self._partial_ranges += 1
        else:
            self._partial_ranges -= len(ranges)
            added = ranges.add(first, last)
            if ranges.covers(lowest, message_count - 1):
                del self.partial[key]
                ranges = None
            else:
                self._partial_ranges += len(ranges)
        if ranges is None:
            self.entries.setdefault(ledger, IndexRanges()).add(entry, entry)
        self._advance()
        return added

    def ack_through(self, ledger: int, entry: int, index: int, message_count: int) -> bool:
        """Acknowledges everything up to and with `index`; False if that was known. `message_count` 0: not known."""
        part = self.partial.get((ledger, entry))
        # The rest of the entry may be acknowledged already. Here its end is known; `_advance` could only move behind its
        # last message, a position that nothing that follows would ever join on to.
        rest = part is not None and index + 1 < message_count and part.covers(index + 1, message_count - 1)
        whole = rest or index + 1 == message_count
        return self.move_to((ledger, entry + 1, 0) if whole else (ledger, entry, index + 1))

    def move_to(self, target: Position) -> bool:
        """Everything before `target` is acknowledged. Never goes back."""
        if target <= self.mark_delete:
            return False
        self.mark_delete = target
        self._drop_below(partial=True)
        self._advance()
        return True

    def reset(self, position: Position) -> None:
        """Forgets everything and starts at `position`: a seek, forwards or back."""
        self.entries.clear()
        self.partial.clear()
        self._partial_ranges = 0
        self.mark_delete = self._topology.normalise(position)

    def follow(self, topology: Topology) -> None:
        """What follows what is another matter from now on."""
        self._topology = topology
        self._advance()

    def renormalise(self) -> None:
        """Called when the ledger list changed: a mark-delete position at the end of a ledger may now move on."""
        self._advance()

    def is_whole(self, ledger: int, entry: int) -> bool:
        """True if the entry lies beyond the mark-delete position and is acknowledged as a whole."""
        ranges = self.entries.get(ledger)
        return ranges is not None and ranges.end_of(entry) is not None

    def unacked(self, ledger: int, entry: int, first: int, last: int) -> list[Range]:
        """What of first..last is not acknowledged."""
        mark_ledger, mark_entry, mark_index = self.mark_delete
        if (ledger, entry) <= (mark_ledger, mark_entry):
            if (ledger, entry) < (mark_ledger, mark_entry):
                return []
            first = max(first, mark_index)
        if first > last or (self.entries and self.is_whole(ledger, entry)):
            return []
        ranges = self.partial.get((ledger, entry)) if self.partial else None
        return [(first, last)] if ranges is None else ranges.gaps(first, last)

    def skip_whole(self, ledger: int, entry: int) -> int:
        """The first entry from `entry` on that is not acknowledged as a whole: readers jump over ranges."""
        ranges = self.entries.get(ledger)
        end = None if ranges is None else ranges.end_of(entry)
        return entry if end is None else end + 1

    def _advance(self) -> None:
        """Moves the mark-delete position over everything that follows it and is acknowledged."""
        while True:
            position = self._topology.normalise(self.mark_delete)
            # Moving over whole entries leaves no partial one behind. What the topology passes over may be one: in a ledger
            # that was trimmed under a reader, or in what a compaction left out.
            passed_over = position != self.mark_delete
            ledger, entry, index = position
            ranges = self.entries.get(ledger)
            end = ranges.end_of(entry) if ranges is not None else None
            if end is not None:
                position = (ledger, end + 1, 0)
            else:
                part = self.partial.get((ledger, entry))
                if part is not None and part.starts[0] <= index:
                    position = (ledger, entry, max(part.ends[0] + 1, index))
            if position == self.mark_delete:
                return
            self.mark_delete = position
            self._drop_below(partial=passed_over)

    def _drop_below(self, *, partial: bool) -> None:
        """Forgets what is recorded below the mark-delete position."""
        ledger, entry, index = self.mark_delete
        if self.entries:
            for other in [other for other in self.entries if other < ledger]:
                del self.entries[other]
            ranges = self.entries.get(ledger)
            if ranges is not None:
                if entry and ranges.starts[0] < entry:
                    ranges.remove(0, entry - 1)
                if not ranges:
                    del self.entries[ledger]
        if self.partial:
            if partial:
                for key in [key for key in self.partial if key < (ledger, entry)]:
                    self._partial_ranges -= len(self.partial.pop(key))
            part = self.partial.get((ledger, entry))
            if part is not None and index and part.starts[0] < index:
                self._partial_ranges -= len(part)
                part.remove(0, index - 1)
                self._partial_ranges += len(part)
                if not part:
                    del self.partial[ledger, entry]

    def snapshot(self) -> Snapshot:
        """What `restore` takes back; redelivery counts are not known here."""
        return Snapshot(
            self.mark_delete,
            [(ledger, _flat(ranges)) for ledger, ranges in sorted(self.entries.items())],
            [(*key, _flat(ranges)) for key, ranges in sorted(self.partial.items())],
            [],
            [],
        )

    @classmethod
    def restore(cls, topology: Topology, snapshot: Snapshot) -> AckState:
        """Inverse of `snapshot`."""
        state = cls(topology, snapshot.mark_delete)
        for ledger, flat in snapshot.entries:
            state.entries[ledger] = _ranges(flat)
        for ledger, entry, flat in snapshot.partial:
            state.partial[ledger, entry] = _ranges(flat)
            state._partial_ranges += len(flat) // 2
        state._advance()
        return state

    def check(self) -> None:
        """Asserts the invariants; tests call it after every change."""
        ledger, entry, index = self.mark_delete
        for other, ranges in self.entries.items():
            ranges.check()
            assert ranges
            assert (other, ranges.starts[0]) >= (ledger, entry)
        for key, ranges in self.partial.items():
            ranges.check()
            assert ranges
            assert key >= (ledger, entry)
            assert not self.is_whole(*key)
        assert not self.is_whole(ledger, entry)
        assert self._partial_ranges == sum(map(len, self.partial.values()))
        part = self.partial.get((ledger, entry))
        assert part is None or part.starts[0] > index


def _flat(ranges: IndexRanges) -> list[int]:
    return [bound for pair in ranges for bound in pair]


def _ranges(flat: list[int]) -> IndexRanges:
    ranges = IndexRanges()
    ranges.starts, ranges.ends = list(flat[::2]), list(flat[1::2])
    return ranges
