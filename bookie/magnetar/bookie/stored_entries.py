"""Reads entries that are not in the write cache any more: index, entry log, and read-ahead into the read cache.

What one read fetches is a *run*: entries of a ledger whose records follow each other in one log, since a flush puts the
entries of a ledger side by side. A run costs one look at the index and one read of the disk. A sequential reader of few
entries gets `read_ahead_entries` in its run; an entry that is read alone is read alone. A stripe that leaves out some of
the stored entries is read with small gaps, which cost a copy of some us and are not verified.

A run never holds an entry that is in the write cache: that copy is newer (a recovery digests an entry anew), and the
one in the log must neither be served nor cached.
"""

from __future__ import annotations

from collections.abc import Sequence

from magnetar.proto.errors import EntryDamaged, StorageFailed
from magnetar.proto.stripe import Stripe

from .entry_log.entry_logs import EntryLogs
from .entry_log.records import RECORD_HEADER_BYTES
from .index import Location, LocationIndex
from .read_budget import ReadGrant
from .read_cache import ReadCache
from .scrub import Damage
from .settings import BookieSettings
from .write_cache import WriteCache

# How often the index is asked again when a log does not exist: each time a compaction has moved the entry meanwhile.
_ATTEMPTS = 5
# Entries asked of the index at once: a short answer must not pay for a long range.
_INDEX_STEP = 100
_MAX_RUN_ENTRIES = 1000
# Between two records of a run: less than another read of the page cache would cost.
_MAX_GAP_BYTES = 16 << 10
_MAX_ID = (1 << 63) - 1


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
        self, ledger_id: int, ids: Sequence[int], max_bytes: int, ahead: Stripe | None, grant: ReadGrant
    ) -> list[bytes]:
        """The first of these entries, as many as one run has, up to `max_bytes` (but at least one).

        None at all if the index has not the first, or (only when `grant` holds something) the budget has no room now. Raises
        EntryDamaged, RequestTimeout if the disk is silent, or StorageFailed from the index. What follows in the stripe
        `ahead` goes to the read cache.
        """
        first = ids[0]
        for attempt in range(_ATTEMPTS):
            try:
                wanted = await self._run(ledger_id, ids, max_bytes, ahead)
            except StorageFailed as error:
                self._damage.report_file("index", str(error))
                raise
            if not wanted:
                return []
            size = wanted[-1][1].offset + wanted[-1][1].length - wanted[0][1].offset
            if not attempt and not grant.take_now(size) and not await grant.take(size):
                return []
            discards = self._read_cache.discards
            try:
                entries = await self._read_run(ledger_id, wanted, grant)
            except EntryDamaged as error:
                if error.details.get("missing_log") and self._index.get(ledger_id, first) != wanted[0][1]:
                    continue  # the log was deleted because a compaction moved the entry
                self._damage.report(ledger_id, first, where="read", reason=error.message)
                raise
            return self._keep(ledger_id, wanted, len(ids), max_bytes, entries, discards)
        raise EntryDamaged(
            f"entry {first} of ledger {ledger_id} could not be read: its entry log was replaced {_ATTEMPTS} times",
            ledger_id=ledger_id,
            entry_id=first,
        )

    async def _read_run(
        self, ledger_id: int, wanted: list[tuple[int, Location]], grant: ReadGrant
    ) -> list[bytes]:
        """A page that the disk cannot read damages the entries in it, not all entries that are read with it."""
        try:
            return await self._logs.reader.read(ledger_id, wanted, grant)
        except EntryDamaged:
            if len(wanted) == 1:
                raise
            return await self._logs.reader.read(ledger_id, wanted[:1], grant)

    def _keep(
        self,
        ledger_id: int,
        wanted: list[tuple[int, Location]],
        count: int,
        max_bytes: int,
        entries: list[bytes],
        discards: int,
    ) -> list[bytes]:
        """Puts the run into the read cache and returns the `count` entries that were asked for, if they fit."""
        newest = self._cache.get(ledger_id, wanted[0][0])
        if newest is not None:  # written anew while the disk was read
            return [newest]
        ids = [entry_id for entry_id, _ in wanted[: len(entries)]]
        if self._cache.holds(ledger_id):
            get = self._cache.get
            for place in range(1, len(entries)):
                if get(ledger_id, ids[place]) is not None:
                    del entries[place:], ids[place:]
                    break
        # A recovery may have replaced some of them, and a flush may have ended, while the disk was read. This read may
        # still be answered with what was there when it began; a later one may not.
        if discards == self._read_cache.discards:
            self._read_cache.put(ledger_id, ids, entries)
        if len(entries) > count:
            entries = entries[:count]
        if len(entries) == 1:
            return entries
        size = 0
        for place, entry in enumerate(entries):
            size += len(entry)
            if size > max_bytes and place:
                return entries[:place]
        return entries

    async def _run(
        self, ledger_id: int, ids: Sequence[int], max_bytes: int, ahead: Stripe | None
    ) -> list[tuple[int, Location]]:
        """The locations of a run from the first id on; more than was asked for if `ahead`."""
        if len(ids) == 1 and not ahead:
            location = await self._index.find(ledger_id, ids[0])
            return [] if location is None else [(ids[0], location)]
        settings, last = self._settings, ids[-1]
        least = settings.read_ahead_entries if ahead else 1
        if ahead and len(ids) < least:
            ids = ahead.ids(ids[0], _MAX_ID, least)
        most = min(len(ids), _MAX_RUN_ENTRIES)
        await self._index.warm_locations(ledger_id, ids[0], ids[most - 1])
        # From here on in one turn of the loop.
        cached = self._cache.get if self._cache.holds(ledger_id) else None
        wanted: list[tuple[int, Location]] = []
        log_id = start = following = size = 0
        while len(wanted) < most:
            step = min(_INDEX_STEP, most - len(wanted))
            found = self._index.get_each(ledger_id, ids[len(wanted) : len(wanted) + step])
            for number, location in found:
                if not wanted:
                    log_id, start = location.log_id, location.offset
                elif location.log_id != log_id or not 0 <= location.offset - following <= _MAX_GAP_BYTES:
                    return wanted
                if number != ids[len(wanted)] or (cached and cached(ledger_id, number) is not None):
                    return wanted
                following = location.offset + RECORD_HEADER_BYTES + location.length
                size += location.length
                if wanted and following - start > settings.read_ahead_bytes:
                    return wanted
                # What is ahead must find room in the read cache.
                if (number > last or size > max_bytes) and (len(wanted) >= least or size > self._ahead_bytes):
                    return wanted or [(number, location)]
                wanted.append((number, location))
            if len(found) < step:
                break
        return wanted
