"""The read cache: entries read from entry logs, many of them read ahead. It has a byte budget and evicts the oldest run.

What one read brought is a *run*: entries of a ledger, cached and evicted together, so that the bookkeeping costs 0.1 us an
entry. Eviction is in order of arrival, as in BookKeeper: a run is read ahead, read soon after, and then not needed any more.
Entries are bytes objects of their own (never views), so what is counted is what is pinned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .write_cache import ENTRY_OVERHEAD_BYTES

# What a run takes besides its entries.
_RUN_OVERHEAD_BYTES = 200


# Ledger, entries, size.
_Run = tuple[int, Sequence[int], int]


class ReadCache:
    """Bounded by `capacity_bytes`."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._ledgers: dict[int, dict[int, bytes]] = {}
        self._runs: deque[_Run] = deque()  # oldest first
        # Of all runs. An entry that is in two runs, or was discarded, is counted until its runs are evicted.
        self.size = 0
        self.hits = 0
        self.misses = 0
        # Number of entries that were written again: what was read from disk before the last one may be stale.
        self.discards = 0

    def run(self, ledger_id: int, ids: Sequence[int], max_bytes: int) -> list[bytes]:
        """These entries, up to the first that is not here and, but for the first, `max_bytes`."""
        found: list[bytes] = []
        ledger = self._ledgers.get(ledger_id)
        if ledger is not None and len(ids) == 1:
            entry = ledger.get(ids[0])
            if entry is not None:
                found.append(entry)
        elif ledger is not None:
            get, size = ledger.get, 0
            for number in ids:
                entry = get(number)
                if entry is None:
                    break
                size += len(entry)
                if size > max_bytes and found:
                    break
                found.append(entry)
        if found:
            self.hits += len(found)
        else:
            self.misses += 1
        return found

    def put(self, ledger_id: int, ids: Sequence[int], entries: Sequence[bytes]) -> None:
        """Adds a run, one entry for each id, and evicts what no longer fits."""
        count = len(entries)
        if not count:
            return
        size = len(entries[0]) if count == 1 else sum(map(len, entries))
        size += count * ENTRY_OVERHEAD_BYTES + _RUN_OVERHEAD_BYTES
        if size > self._capacity:
            return
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            ledger = self._ledgers[ledger_id] = {}
        if count == 1:
            ledger[ids[0]] = entries[0]
        else:
            ledger.update(zip(ids, entries))
        self._runs.append((ledger_id, ids, size))
        self.size += size
        while self.size > self._capacity:
            self._evict(self._runs.popleft())

    def _evict(self, run: _Run) -> None:
        ledger_id, ids, size = run
        self.size -= size
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            return
        # An entry that is in a younger run as well is evicted with the older one: a later read fetches it again.
        for number in ids:
            ledger.pop(number, None)
        if not ledger:
            del self._ledgers[ledger_id]

    def discard(self, ledger_id: int, entry_id: int) -> None:
        """Forgets an entry that was written anew."""
        self.discards += 1
        ledger = self._ledgers.get(ledger_id)
        if ledger is not None:
            ledger.pop(entry_id, None)

    def discard_ledger(self, ledger_id: int) -> None:
        """Forgets a ledger that was deleted."""
        self.discards += 1
        self._ledgers.pop(ledger_id, None)

    def clear(self) -> None:
        """Forgets everything."""
        self._ledgers.clear()
        self._runs.clear()
        self.size = 0
