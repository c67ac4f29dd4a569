"""The subscriptions of one topic that have consumers: who waits for new entries, and the slowest read position.

Neither costs anything for a subscription that has nothing to do: whoever stopped at the last confirmed entry registers, and
only those are notified; the read positions are counted by entry, so that the slowest one is known without a look at all.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

from ..cursors.core.acks import EntryKey


class Reader(Protocol):
    """What dispatches for one subscription."""

    def run(self) -> None:
        """Goes on dispatching; never raises."""


class Readers:
    """See the module docstring."""

    __slots__ = ("_counts", "_order", "_positions", "_waiting", "on_slowest")

    def __init__(self, on_slowest: Callable[[EntryKey | None], None]) -> None:
        """`on_slowest(key)`: every reader is at this entry or past it; None: there are none."""
        self.on_slowest = on_slowest
        self._positions: dict[Reader, EntryKey] = {}
        self._counts: dict[EntryKey, int] = {}  # of readers at an entry
        self._order: list[EntryKey] = []  # a heap with the keys of `_counts`, and some that are in it no more
        self._waiting: dict[Reader, None] = {}

    def __len__(self) -> int:
        return len(self._positions)

    def moved(self, reader: Reader, key: EntryKey) -> None:
        """The reader joins, or its read position is at another entry now."""
        before = self._positions.get(reader)
        if before == key:
            return
        self._positions[reader] = key
        counts = self._counts
        if len(counts) == 1 and before is not None and counts[before] == 1:  # the only reader
            self._counts = {key: 1}
            self._order = [key]
            self.on_slowest(key)
            return
        at = counts.get(key)
        if at is None:
            heappush(self._order, key)
            at = 0
        counts[key] = at + 1
        if before is not None:
            self._uncount(before)

    def left(self, reader: Reader) -> None:
        """The subscription has no consumers any more."""
        self._waiting.pop(reader, None)
        before = self._positions.pop(reader, None)
        if before is not None:
            self._uncount(before)

    def _uncount(self, key: EntryKey) -> None:
        counts, order = self._counts, self._order
        if counts[key] > 1:
            counts[key] -= 1
            return
        del counts[key]
        if order[0] == key:
            while order and order[0] not in counts:
                heappop(order)
            self.on_slowest(order[0] if order else None)

    def wait(self, reader: Reader) -> None:
        """Runs `reader` once, when entries were confirmed."""
        self._waiting[reader] = None

    def notify(self) -> None:
        """Entries were confirmed."""
        waiting, self._waiting = self._waiting, {}
        for reader in waiting:
            reader.run()

    def check(self) -> None:
        """Asserts the invariants."""
        assert sum(self._counts.values()) == len(self._positions)
        assert set(self._counts) <= set(self._order)
        assert not self._counts or self._order[0] == min(self._counts) == min(self._positions.values())
