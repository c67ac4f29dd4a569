"""Confirmed entries in memory, as the bytes that were stored: one byte budget for the broker.

Entries come in when they are confirmed, or when a consumer that is behind reads them, and leave when every active reader of
the topic is behind them, or when the budget is exceeded (oldest first). A topic without active readers caches nothing.
"""

from __future__ import annotations

from heapq import heappop, heappush

from magnetar.proto.entry import Entry

from ..cursors.core.acks import EntryKey

# The parsed table of an entry, per batch, and the objects around it.
_ROW_BYTES = 10
_OBJECT_BYTES = 400


class TailCache:
    """The broker's. Ledger ids are unique, so (ledger, entry) is a key over all topics."""

    __slots__ = ("_entries", "limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._entries: dict[EntryKey, Entry] = {}  # in insertion order

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: EntryKey) -> Entry | None:
        """The entry, if it is here."""
        return self._entries.get(key)

    def put(self, key: EntryKey, entry: Entry) -> None:
        """Adds an entry and makes room for it."""
        if key in self._entries:
            return
        self._entries[key] = entry
        self.used += _size(entry)
        while self.used > self.limit and len(self._entries) > 1:
            self.drop(next(iter(self._entries)))

    def drop(self, key: EntryKey) -> None:
        """Forgets the entry if it is here."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.used -= _size(entry)


class TopicCache:
    """One topic's share of the cache, in the order of the topic, to drop what no reader will ask for again."""

    __slots__ = ("_cache", "_keys")

    def __init__(self, cache: TailCache) -> None:
        self._cache = cache
        self._keys: list[EntryKey] = []  # a heap; may hold keys that the budget evicted

    def get(self, key: EntryKey) -> Entry | None:
        """The entry, if it is here."""
        return self._cache.get(key)

    def put(self, key: EntryKey, entry: Entry) -> None:
        """Adds an entry."""
        keys = self._keys
        if len(keys) > 1024 and len(keys) > 2 * len(self._cache):
            # A reader that stands still leaves keys of evicted entries behind; a sorted list is a heap.
            keys = self._keys = sorted(key for key in keys if self._cache.get(key) is not None)
        heappush(keys, key)
        self._cache.put(key, entry)

    def drop_before(self, key: EntryKey) -> None:
        """Every active reader is at `key` or past it."""
        keys = self._keys
        while keys and keys[0] < key:
            self._cache.drop(heappop(keys))

    def clear(self) -> None:
        """No reader is active any more."""
        for key in self._keys:
            self._cache.drop(key)
        self._keys = []


def _size(entry: Entry) -> int:
    batches: int = entry.batch_count
    return len(entry.data) + _ROW_BYTES * batches + _OBJECT_BYTES
