"""Reading entries that have left the write cache: index, entry log, and read-ahead into the read cache.

A sequential reader pays for one index look-up and one read per `read_ahead_entries`, since a flush puts the entries of
a ledger side by side. An entry that is read alone is read alone.
"""

from __future__ import annotations

from .entry_log import RECORD_HEADER_BYTES, EntryLogs
from .index import Location, LocationIndex
from .read_cache import ReadCache
from .settings import BookieSettings
from .write_cache import WriteCache

__all__ = ["StoredEntries"]


class StoredEntries:
    """See the module."""

    def __init__(
        self,
        cache: WriteCache,
        read_cache: ReadCache,
        index: LocationIndex,
        logs: EntryLogs,
        settings: BookieSettings,
    ) -> None:
        self._cache = cache
        self._read_cache = read_cache
        self._index = index
        self._logs = logs
        self._settings = settings

    async def read(self, ledger_id: int, entry_id: int, *, ahead: bool) -> bytes | None:
        """The entry from its log, None if the index has none. Raises EntryDamaged, or StorageFailed from the index.

        With `ahead`, what follows it in the log goes to the read cache.
        """
        wanted = self._neighbours(ledger_id, entry_id, self._settings.read_ahead_entries if ahead else 1)
        if not wanted:
            return None
        discards = self._read_cache.discards
        entries = await self._logs.read(ledger_id, wanted)
        # A recovery may have replaced some of them while the disk was read.
        if discards == self._read_cache.discards:
            for (number, _), entry in zip(wanted, entries, strict=False):
                # What waits to be flushed is newer, and this copy would outlive it here.
                if self._cache.get(ledger_id, number) is None:
                    self._read_cache.put(ledger_id, number, entry)
        return self._cache.get(ledger_id, entry_id) or entries[0]

    def _neighbours(self, ledger_id: int, entry_id: int, count: int) -> list[tuple[int, Location]]:
        """The entry's location and those of the entries whose records follow it immediately, bounded in bytes."""
        if count <= 1:
            location = self._index.get(ledger_id, entry_id)
            return [] if location is None else [(entry_id, location)]
        found = self._index.get_range(ledger_id, entry_id, count)
        if not found or found[0][0] != entry_id:
            return []
        wanted = [found[0]]
        log_id, start, length = found[0][1]
        following = start + RECORD_HEADER_BYTES + length
        for number, location in found[1:]:
            end = location.offset + RECORD_HEADER_BYTES + location.length
            if location.log_id != log_id or location.offset != following:
                break
            if end - start > self._settings.read_ahead_bytes:
                break
            wanted.append((number, location))
            following = end
        return wanted
