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
        # How many readers are at an entry; empty while there is one reader only, which is its own slowest.
        self._counts: dict[EntryKey, int] = {}
        self._order: list[EntryKey] = []  # a heap with the keys of `_counts`, and some that are in it no more
        self._waiting: dict[Reader, None] = {}

    def __len__(self) -> int:
        return len(self._positions)

    def moved(self, reader: Reader, key: EntryKey) -> None:
        """The reader joins, or its read position is at another entry now."""
        positions = self._positions
        before = positions.get(reader)
        if before == key:
            return
        positions[reader] = key
        if len(positions) == 1:
            self.on_slowest(key)
        elif before is not None:
            self._count(key)
            self._uncount(before)
        elif len(positions) == 2:
            for key in positions.values():
                self._count(key)
        else:
            self._count(key)

    def left(self, reader: Reader) -> None:
        """The subscription has no consumers any more."""
        self._waiting.pop(reader, None)
        before = self._positions.pop(reader, None)
        if before is None:
            return
        if len(self._positions) > 1:
            self._uncount(before)
            return
        self._counts.clear()
        self._order.clear()
        self.on_slowest(next(iter(self._positions.values()), None))

    def _count(self, key: EntryKey) -> None:
        if key not in self._counts:
            heappush(self._order, key)
        self._counts[key] = self._counts.get(key, 0) + 1

    def _uncount(self, key: EntryKey) -> None:
        counts, order = self._counts, self._order
        if counts[key] > 1:
            counts[key] -= 1
            return
        del counts[key]
        if order[0] == key:
            while order[0] not in counts:
                heappop(order)
            self.on_slowest(order[0])

    def slowest_from(self, key: EntryKey) -> EntryKey | None:
        """Where the slowest of those readers is that are at `key` or past it, None if none is. Looks at all of them."""
        return min((position for position in self._positions.values() if position >= key), default=None)

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
        counted = list(self._positions.values()) if len(self._positions) > 1 else []
        assert sorted(counted) == sorted(key for key, count in self._counts.items() for _ in range(count))
        assert set(counted) <= set(self._order)
        assert not counted or self._order[0] == min(counted)
