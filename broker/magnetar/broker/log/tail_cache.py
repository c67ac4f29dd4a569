"""Confirmed entries in memory, as the bytes that were stored: one byte budget for the broker.

Entries come in when they are confirmed, and leave when every active reader of the topic is past them, or when the budget
is exceeded (oldest first). A topic without active readers caches nothing.

A reader that is far behind does not hold entries for itself: when the topic has more here than the window, what only such
readers have not passed leaves, but for the newest bytes of the window. They read from the bookies until they come into the
window; from then on they are readers of the cache again.

    behind the cache      in the cache                                  at the tail
    reader A              reader B             the newest bytes         reader C
    |                     |................................................|     kept: from B on, and the window
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from magnetar.proto.entry import Entry

from ..cursors.core.acks import EntryKey

# The parsed table of an entry, per batch, and the objects around it.
_ROW_BYTES = 10
_OBJECT_BYTES = 400
# A topic looks for entries that nobody holds whenever it has grown by this share of the window.
_LOOKS_PER_WINDOW = 4


class TailCache:
    """The cache of all topics of a broker. Ledger ids are unique, so (ledger, entry) is a key over all topics."""

    __slots__ = ("_order", "limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._order: OrderedDict[EntryKey, TopicCache] = OrderedDict()  # who has the entry; oldest first

    def __len__(self) -> int:
        return len(self._order)

    def added(self, key: EntryKey, topic: TopicCache, size: int) -> None:
        """A topic has an entry more; makes room for it."""
        self._order[key] = topic
        self.used += size
        while self.used > self.limit and len(self._order) > 1:
            oldest, owner = next(iter(self._order.items()))
            owner.drop(oldest)

    def dropped(self, key: EntryKey, size: int) -> None:
        """A topic has an entry less."""
        del self._order[key]
        self.used -= size


class TopicCache:
    """One topic's share of the cache."""

    __slots__ = ("_cache", "_entries", "_look_at", "_window", "used")

    def __init__(self, cache: TailCache, window: int) -> None:
        """`window`: bytes that are kept for readers that come from behind."""
        self._cache = cache
        self._entries: OrderedDict[EntryKey, Entry] = OrderedDict()  # in the order of the topic
        self._window = self._look_at = window
        self.used = 0

    def get(self, key: EntryKey) -> Entry | None:
        """The entry, if it is here."""
        return self._entries.get(key)

    def put(self, key: EntryKey, entry: Entry) -> None:
        """Adds an entry that follows all that are here."""
        size = entry_size(entry)
        self._entries[key] = entry
        self.used += size
        self._cache.added(key, self, size)

    def drop(self, key: EntryKey) -> None:
        """Forgets an entry that is here."""
        size = entry_size(self._entries.pop(key))
        self.used -= size
        self._cache.dropped(key, size)

    def drop_before(self, key: EntryKey | None, *, but: int = 0) -> None:
        """Every reader that counts is at `key` or past it; None: there is none. The newest `but` bytes stay."""
        entries = self._entries
        while self.used > but:
            first = next(iter(entries))
            if key is not None and first >= key:
                return
            self.drop(first)

    def drop_what_nobody_holds(self, slowest_from: Callable[[EntryKey], EntryKey | None]) -> None:
        """For every round of additions. `slowest_from(key)`: the slowest of the readers that are at `key` or past it."""
        if self.used > self._look_at:
            self.drop_before(slowest_from(next(iter(self._entries))), but=self._window)
            self._look_at = max(self.used, self._window) + self._window // _LOOKS_PER_WINDOW
        elif self.used <= self._window:
            self._look_at = self._window

    def clear(self) -> None:
        """No reader is active any more."""
        self.drop_before(None)


def entry_size(entry: Entry) -> int:
    """Bytes of memory."""
    batches: int = entry.batch_count
    return len(entry.data) + _ROW_BYTES * batches + _OBJECT_BYTES
