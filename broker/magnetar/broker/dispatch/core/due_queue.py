"""Messages whose delivery time has come while the read position was behind them already, of one subscription.

They are delivered in the order of their times, before what is new, and were never delivered before. 24 bytes a run, and no
object; whether they were acknowledged or skipped meanwhile is looked at when their turn comes.

    released --> queue --delivered--> pending acknowledgements, or the replay queue for what nobody can have now
                   |  ^
                   |  `--the pause is over-- parked
                   `--the entry cannot be read--^
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush

from magnetar.proto.ranges import Range

from ...cursors.core.acks import INDEX_BITS, EntryKey
from .delay_index import Run

_MOST_AT_ONCE = 256  # runs of one entry behind each other that are delivered together
_LET_GO = 4_096  # runs that are done with, before their memory is given back


class DueQueue:
    """See the module docstring. False if nothing is ready: what is parked waits for a time."""

    __slots__ = ("_at", "_first", "_ledgers", "_numbers", "_parked", "_sizes", "wanted")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing of it is due here any more."""
        self._ledgers, self._numbers, self._sizes = array("Q"), array("Q"), array("Q")
        self._at = 0  # those before it are done with
        self._first: tuple[EntryKey, list[Range]] | None = None  # what is next, once it was looked at
        self._parked: list[
            tuple[int, EntryKey, list[Range]]
        ] = []  # a heap by the time when they are tried again
        # The entries that are next, as `upcoming` found them, without those that are done with since.
        self.wanted: dict[EntryKey, None] = {}

    def __bool__(self) -> bool:
        return self._at < len(self._numbers)

    def add(self, runs: Sequence[Run]) -> None:
        """Behind what is there."""
        self._ledgers.extend([ledger for ledger, _, _ in runs])
        self._numbers.extend([number for _, number, _ in runs])
        self._sizes.extend([messages for _, _, messages in runs])
        self._first = None

    def _key(self, at: int) -> EntryKey:
        return self._ledgers[at], self._numbers[at] >> INDEX_BITS

    @property
    def first(self) -> tuple[EntryKey, list[Range]]:
        """What is next of one entry, sorted."""
        if self._first is None:
            at, ranges = self._at, list[Range]()
            key = self._key(at)
            base = key[1] << INDEX_BITS
            for place in range(at, min(at + _MOST_AT_ONCE, len(self._numbers))):
                begin = self._numbers[place] - base
                if self._key(place) != key or (ranges and begin <= ranges[-1][1]):
                    break
                ranges.append((begin, begin + self._sizes[place] - 1))
            self._first = key, ranges
        return self._first

    def take(self, following: int) -> None:
        """Of `first`, the messages before this index are done with."""
        key, ranges = self.first
        done = bisect_right(ranges, following - 1, key=lambda one: one[1])
        self._at += done
        if done < len(ranges) and (taken := following - ranges[done][0]) > 0:
            self._numbers[self._at] += taken
            self._sizes[self._at] -= taken
        self._first = None
        if self._at >= min(_LET_GO, len(self._numbers)):
            for column in (self._ledgers, self._numbers, self._sizes):
                del column[: self._at]
            self._at = 0
        if not self or self.first[0] != key:
            self.wanted.pop(key, None)

    def upcoming(self, entries: int) -> list[EntryKey]:
        """The next few entries, in this order."""
        self.wanted = {}
        for at in range(self._at, min(self._at + _MOST_AT_ONCE, len(self._numbers))):
            self.wanted[self._key(at)] = None
            if len(self.wanted) == entries:
                break
        return list(self.wanted)

    # --- what cannot be read -----------------------------------------------------------------------------------------

    def park(self, due_ms: int) -> None:
        """`first` is to be tried again at this time."""
        key, ranges = self.first
        self.take(ranges[-1][1] + 1)
        heappush(self._parked, (due_ms, key, ranges))

    @property
    def next_due_ms(self) -> int | None:
        """When `timer_due` has something to do."""
        return self._parked[0][0] if self._parked else None

    def timer_due(self, now_ms: int) -> list[EntryKey]:
        """Those whose pause is over come first; returns their entries."""
        ready: dict[EntryKey, None] = {}
        runs: list[Run] = []
        while self._parked and self._parked[0][0] <= now_ms:
            _, (ledger, entry_id), ranges = heappop(self._parked)
            base = entry_id << INDEX_BITS
            ready[ledger, entry_id] = None
            runs += [(ledger, base + first, last - first + 1) for first, last in ranges]
        if runs:
            rest = list(zip(self._ledgers, self._numbers, self._sizes))[self._at :]
            parked, wanted = self._parked, self.wanted
            self.clear()
            self._parked, self.wanted = parked, wanted
            self.add([*runs, *rest])
        return list(ready)

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        assert len(self._ledgers) == len(self._numbers) == len(self._sizes)
        assert all(self._sizes[self._at :])
