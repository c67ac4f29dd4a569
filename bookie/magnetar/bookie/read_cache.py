"""The read cache: entries read from entry logs, most of them ahead of the reader. One byte budget, oldest use first out.

Entries are bytes objects of their own (never views), so what is counted is what is pinned.
"""

from __future__ import annotations

from collections import OrderedDict

from .write_cache import ENTRY_OVERHEAD_BYTES

__all__ = ["ReadCache"]


class ReadCache:
    """Bounded by `capacity_bytes`."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._entries: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self.size = 0
        self.hits = 0
        self.misses = 0
        # Entries written anew so far: what was read from the disk before the last one may be stale.
        self.discards = 0

    def get(self, ledger_id: int, entry_id: int) -> bytes | None:
        """The entry, or None."""
        key = (ledger_id, entry_id)
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self._entries.move_to_end(key)
        self.hits += 1
        return entry

    def put(self, ledger_id: int, entry_id: int, entry: bytes) -> None:
        """Adds an entry and evicts what no longer fits."""
        key = (ledger_id, entry_id)
        old = self._entries.pop(key, None)
        if old is not None:
            self.size -= len(old) + ENTRY_OVERHEAD_BYTES
        self._entries[key] = entry
        self.size += len(entry) + ENTRY_OVERHEAD_BYTES
        while self.size > self._capacity and self._entries:
            _, evicted = self._entries.popitem(last=False)
            self.size -= len(evicted) + ENTRY_OVERHEAD_BYTES

    def discard(self, ledger_id: int, entry_id: int) -> None:
        """Forgets an entry that was written anew."""
        self.discards += 1
        old = self._entries.pop((ledger_id, entry_id), None)
        if old is not None:
            self.size -= len(old) + ENTRY_OVERHEAD_BYTES
