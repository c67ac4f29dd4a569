"""Which messages a compacted ledger has, and where: in memory while somebody reads it, some 30 bytes for each row.

Rows are numbered in the order of the topic. Invariant: the keys of rows, (ledger, entry), rise.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from magnetar.proto.ranges import Range

from ...cursors.core.acks import EntryKey
from .rows import TableRow, pairs


class CompactedIndex:
    """Made by `add_chunk` for one chunk after another. Look-ups are binary searches, 1 us."""

    def __init__(self) -> None:
        self._ledgers = array("q")  # position ids that have rows, rising
        self._ledger_starts = array("q")  # number of the first row of each
        self._entries = array("q")  # of each row
        self._sizes = array("I")
        self._chunks = array("q")  # ids of the chunks' entries, rising
        self._chunk_starts = array("q")  # number of the first row of each chunk
        self._bounds = array("I")  # flat ranges of all rows
        self._bound_ends = array("q")  # where those of each row end
        self._tombstones: dict[int, list[int]] = {}  # by row; few
        # Runs of rows of which tombstones alone are left: their first rows, and the rows behind them.
        self._only_tombstones, self._next_values = array("q"), array("q")

    def __len__(self) -> int:
        return len(self._entries)

    def add_chunk(self, chunk: int, table: Iterable[TableRow]) -> None:
        """Rows behind all that are known, in the entry `chunk` of the compacted ledger."""
        self._chunks.append(chunk)
        self._chunk_starts.append(len(self))
        for ledger, entry, size, messages, tombstones in table:
            if not self._ledgers or self._ledgers[-1] != ledger:
                self._ledgers.append(ledger)
                self._ledger_starts.append(len(self))
            if tombstones:
                self._tombstones[len(self)] = tombstones
                if tombstones == messages:
                    if not self._next_values or self._next_values[-1] != len(self):
                        self._only_tombstones.append(len(self))
                        self._next_values.append(len(self))
                    self._next_values[-1] += 1
            self._entries.append(entry)
            self._sizes.append(size)
            self._bounds.extend(messages)
            self._bound_ends.append(len(self._bounds))

    def find(self, key: EntryKey) -> int:
        """The first row at `key` or behind it; `len` if there is none."""
        ledger, entry = key
        at = bisect_left(self._ledgers, ledger)
        if at == len(self._ledgers):
            return len(self)
        first, last = self._rows_of(at)
        if self._ledgers[at] > ledger:
            return first
        return bisect_left(self._entries, entry, first, last)

    def _rows_of(self, at: int) -> tuple[int, int]:
        starts = self._ledger_starts
        return starts[at], starts[at + 1] if at + 1 < len(starts) else len(self)

    def row(self, key: EntryKey) -> int | None:
        """The row of this entry, if anything of it is left."""
        row = self.find(key)
        return row if row < len(self) and self.key(row) == key else None

    def has_ledger(self, ledger: int) -> bool:
        """True if anything of the ledger is left."""
        at = bisect_left(self._ledgers, ledger)
        return at < len(self._ledgers) and self._ledgers[at] == ledger

    def key(self, row: int) -> EntryKey:
        """The entry of the topic that the row is of."""
        return self._ledgers[bisect_right(self._ledger_starts, row) - 1], self._entries[row]

    def left(self, row: int) -> list[Range]:
        """The messages of the row that are left, those without a value among them."""
        begin, end = self._bounds_of(row)
        return pairs(self._bounds[begin:end])

    def _bounds_of(self, row: int) -> tuple[int, int]:
        return self._bound_ends[row - 1] if row else 0, self._bound_ends[row]

    def next_left(self, row: int, first: int) -> int | None:
        """The first message of the row that is left, from `first` on."""
        begin, end = self._bounds_of(row)
        at = bisect_left(self._bounds, first, begin, end)
        if at == end:
            return None
        return first if (at - begin) % 2 else self._bounds[at]

    def next_value(self, row: int) -> int:
        """The first row, from this one on, of which more than tombstones is left; `len` if there is none."""
        run = bisect_right(self._only_tombstones, row) - 1
        return max(row, self._next_values[run]) if run >= 0 else row

    def tombstones_of(self, row: int) -> list[Range]:
        """The messages of the row that are left and have no value."""
        return pairs(self._tombstones.get(row, ()))

    def chunk(self, row: int) -> tuple[int, int, list[int]]:
        """The chunk that has the row: its entry, its first row, the sizes of its rows."""
        at = bisect_right(self._chunk_starts, row) - 1
        starts = self._chunk_starts
        end = starts[at + 1] if at + 1 < len(starts) else len(self)
        return self._chunks[at], starts[at], list(self._sizes[starts[at] : end])
