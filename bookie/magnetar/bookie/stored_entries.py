"""Reading entries that have left the write cache: index, entry log, and read-ahead into the read cache.

What is read at once is a *run*: entries of a ledger whose records follow each other in one log, since a flush puts the
entries of a ledger side by side. A run costs one range of the index and one read of the disk. A sequential reader of few
entries gets `read_ahead_entries` in its run; an entry that is read alone is read alone.

A run never holds an entry that stands in the write cache: that copy is newer (a recovery digests an entry anew), and the
one in the log must neither be served nor be kept.
"""

from __future__ import annotations

from magnetar.proto.errors import EntryDamaged, StorageFailed

from .entry_log import RECORD_HEADER_BYTES, EntryLogs
from .index import Location, LocationIndex
from .read_budget import ReadGrant
from .read_cache import ReadCache
from .scrub import Damage
from .scrub.index_files import REBUILD
from .settings import BookieSettings
from .write_cache import WriteCache

__all__ = ["StoredEntries"]

# How often the index is asked again when a log is gone: each time a compaction must have moved the entry meanwhile.
_ATTEMPTS = 5
# Entries asked of the index at once: a short answer must not pay for a long range.
_INDEX_STEP = 100
_MAX_RUN_ENTRIES = 1000


class StoredEntries:
    """See the module."""

    def __init__(
        self,
        cache: WriteCache,
        read_cache: ReadCache,
        index: LocationIndex,
        logs: EntryLogs,
        damage: Damage,
        settings: BookieSettings,
    ) -> None:
        self._cache = cache
        self._read_cache = read_cache
        self._index = index
        self._logs = logs
        self._damage = damage
        self._settings = settings
        self._ahead_bytes = min(settings.read_ahead_bytes, settings.read_cache_bytes // 4)

    async def read(
        self, ledger_id: int, first: int, last: int, max_bytes: int, ahead: bool, grant: ReadGrant
    ) -> list[bytes]:
        """Entries from `first` on, as many as one run has, up to `last` and `max_bytes` (but at least one).

        None at all if the index has no `first`, or (only when `grant` holds something) the budget has no room now. Raises
        EntryDamaged, or StorageFailed from the index. With `ahead`, what follows goes to the read cache.
        """
        for attempt in range(_ATTEMPTS):
            try:
                wanted = self._run(ledger_id, first, last, max_bytes, ahead)
            except StorageFailed as error:
                self._damage.report_file("index", f"{error}; {REBUILD}")
                raise
            if not wanted:
                return []
            size = wanted[-1][1].offset + wanted[-1][1].length - wanted[0][1].offset
            if not attempt and not grant.take_now(size) and not await grant.take(size):
                return []
            discards = self._read_cache.discards
            try:
                entries = await self._read_run(ledger_id, wanted)
            except EntryDamaged as error:
                if error.details.get("missing_log") and self._index.get(ledger_id, first) != wanted[0][1]:
                    continue  # a compaction moved it; the log is not damaged, it is gone
                self._damage.report(ledger_id, first, where="read", reason=error.message)
                raise
            return self._keep(ledger_id, first, last, max_bytes, entries, discards)
        raise EntryDamaged(
            f"entry {first} of ledger {ledger_id} could not be read: its entry log was replaced {_ATTEMPTS} times",
            ledger_id=ledger_id,
            entry_id=first,
        )

    async def _read_run(self, ledger_id: int, wanted: list[tuple[int, Location]]) -> list[bytes]:
        """A page that the disk cannot read is damage of what stands in it, and not of all that is read with it."""
        try:
            return await self._logs.read(ledger_id, wanted)
        except EntryDamaged:
            if len(wanted) == 1:
                raise
            return await self._logs.read(ledger_id, wanted[:1])

    def _keep(
        self, ledger_id: int, first: int, last: int, max_bytes: int, entries: list[bytes], discards: int
    ) -> list[bytes]:
        """Puts the run into the read cache and returns what was asked for."""
        newest = self._cache.get(ledger_id, first)
        if newest is not None:  # written anew while the disk was read
            return [newest]
        if self._cache.holds(ledger_id):
            get = self._cache.get
            for place in range(1, len(entries)):
                if get(ledger_id, first + place) is not None:
                    del entries[place:]
                    break
        # A recovery may have replaced some of them, and a flush may have ended, while the disk was read. This read may
        # still be answered with what was there when it began; a later one may not.
        if discards == self._read_cache.discards:
            self._read_cache.put(ledger_id, first, entries)
        if len(entries) > last - first + 1:
            entries = entries[: last - first + 1]
        if len(entries) == 1:
            return entries
        size = 0
        for place, entry in enumerate(entries):
            size += len(entry)
            if size > max_bytes and place:
                return entries[:place]
        return entries

    def _run(
        self, ledger_id: int, first: int, last: int, max_bytes: int, ahead: bool
    ) -> list[tuple[int, Location]]:
        """The locations of a run from `first` on; more than was asked for if `ahead`."""
        if first == last and not ahead:
            location = self._index.get(ledger_id, first)
            return [] if location is None else [(first, location)]
        settings = self._settings
        least = settings.read_ahead_entries if ahead else 1
        most = min(max(last - first + 1, least), _MAX_RUN_ENTRIES)
        cached = self._cache.get if self._cache.holds(ledger_id) else None
        wanted: list[tuple[int, Location]] = []
        log_id = start = following = 0
        while len(wanted) < most:
            step = min(_INDEX_STEP, most - len(wanted))
            found = self._index.get_range(ledger_id, first + len(wanted), step)
            for number, location in found:
                if not wanted:
                    log_id, start = location.log_id, location.offset
                elif location.log_id != log_id or location.offset != following:
                    return wanted
                if number != first + len(wanted) or (cached and cached(ledger_id, number) is not None):
                    return wanted
                following = location.offset + RECORD_HEADER_BYTES + location.length
                size = following - start
                if wanted and size > settings.read_ahead_bytes:
                    return wanted
                # What is ahead must find room in the read cache.
                if (number > last or size > max_bytes + RECORD_HEADER_BYTES * len(wanted)) and (
                    len(wanted) >= least or size > self._ahead_bytes
                ):
                    return wanted or [(number, location)]
                wanted.append((number, location))
            if len(found) < step:
                break
        return wanted
