"""Lists of the ledgers of this bookie, and of the entries of one ledger, page by page.

The index has what was flushed; the rest is in the write cache and in the ledger descriptors. Pages are put together in
slices of the loop: what changes meanwhile may or may not be in them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from magnetar.proto.errors import LedgerNotFound, UnknownLedgerState
from magnetar.proto.ranges import RangeSet

from .index import LedgerRecord, LocationIndex
from .index.locations import locations_of_ledger
from .ledgers import LedgerDescriptor, LedgerDescriptors
from .write_cache import WriteCache

_MAX_LEDGERS = 10_000
_MAX_RANGES = 10_000
# Locations looked at for one page, and in one slice of the loop (0.4 ms).
_MAX_SCANNED = 100_000
_SLICE = 1000
_MAX_ID = (1 << 63) - 1


class StoredLedger(NamedTuple):
    """A ledger of this bookie; `last_entry` and `last_add_confirmed` are -1 for none."""

    ledger_id: int
    fenced: bool
    deleted: bool
    last_entry: int
    last_add_confirmed: int


class LedgerSummary(NamedTuple):
    """All that is here of one ledger. Ids are -1 for none; bytes are those of the entries with their 40-byte headers."""

    ledger_id: int
    # "open", "fenced" or "deleted" (a tombstone); "unknown": entries are here, but no record of the ledger.
    state: str
    # The disk of a part of it was lost: a missing entry is not said not to exist (rule 8).
    unknown: bool
    deleted_at_ms: int
    last_entry: int
    last_add_confirmed: int
    explicit_lac: int
    # In entry logs, by the index.
    entries: int
    bytes: int
    # Of those that only journals and write cache have: the next checkpoint puts them into entry logs.
    journaled_entries: int
    journaled_bytes: int
    # Ids of the entry logs that hold a part of it.
    logs: list[int]
    # (first, last) of what is here, entry logs and write cache together.
    ranges: list[tuple[int, int]]


class Listing:
    """Makes the lists of one bookie."""

    def __init__(self, ledgers: LedgerDescriptors, index: LocationIndex, cache: WriteCache) -> None:
        self._ledgers = ledgers
        self._index = index
        self._cache = cache

    def ledgers(self, after: int, count: int) -> tuple[list[StoredLedger], bool]:
        """At most `count` ledgers with an id above `after`, by id; and whether there are more."""
        count = min(max(count, 1), _MAX_LEDGERS)
        found = dict(self._index.list_ledgers(after, count + 1))
        last = max(found) if len(found) > count else None
        ids = dict.fromkeys(found)
        for ledger_id in self._ledgers.unsaved():
            if ledger_id > after and (last is None or ledger_id < last):
                ids[ledger_id] = None
        page = sorted(ids)
        listed: list[StoredLedger] = []
        for ledger_id in page[:count]:
            state = self._ledgers.by_id.get(ledger_id) or LedgerDescriptor(found.get(ledger_id))
            deleted = state.deleted_at_ms != 0
            listed.append(StoredLedger(ledger_id, state.fenced, deleted, state.last_entry, state.confirmed))
        return listed, len(page) > count

    async def entries(self, ledger_id: int, first: int, count: int) -> tuple[list[tuple[int, int]], int]:
        """At most `count` ranges of entries from `first` on, and the entry of the next page; -1: that was all.

        LedgerNotFound if nothing was ever written for the ledger, or it is deleted; UnknownLedgerState if that is not known.
        """
        state = self._ledgers.peek(ledger_id)
        if not state.known and state.unknown:
            raise UnknownLedgerState(
                f"this bookie may have lost ledger {ledger_id} and was not repaired yet", ledger_id=ledger_id
            )
        if not state.known or state.deleted_at_ms:
            raise LedgerNotFound(f"ledger {ledger_id} is not on this bookie", ledger_id=ledger_id)
        count = min(max(count, 1), _MAX_RANGES)
        cached = [number for number in self._cache.entry_ids(ledger_id) if number >= first]
        cached.reverse()  # ascending from the end
        found_ids = RangeSet()
        after, scanned = first - 1, 0
        while True:
            found = self._index.list_locations(ledger_id, after, _SLICE)
            scanned += len(found)
            whole = len(found) < _SLICE
            for number, _ in found:
                found_ids.add(number, number)
            after = found[-1][0] if found else after
            while cached and (whole or cached[-1] <= after):
                found_ids.add(cached[-1], cached.pop())
            if whole or len(found_ids) > count or scanned >= _MAX_SCANNED:
                break
            await asyncio.sleep(0)
        ranges = list(found_ids)
        if len(ranges) > count:
            return ranges[:count], ranges[count][0]
        return ranges, -1 if whole else after + 1

    def next_ledger(self, after: int, unsaved: Sequence[int]) -> int | None:
        """The lowest ledger above `after` that anything is known of. `unsaved`: sorted, what memory has beside the index."""
        located = self._index.walk((after, _MAX_ID) if after >= 0 else None, 1)
        ids = [row[0] for row in located] + [row[0] for row in self._index.list_ledgers(after, 1)]
        ids += unsaved[bisect_right(unsaved, after) :][:1]
        return min(ids, default=None)

    async def summary(self, ledger_id: int) -> LedgerSummary:
        """All that is here of a ledger, a deleted one as well. LedgerNotFound when nothing is known of it."""
        ids, size, logs = RangeSet(), 0, dict[int, None]()
        for number, (entry_id, location) in enumerate(locations_of_ledger(self._index, ledger_id), 1):
            ids.add(entry_id, entry_id)
            size += location.length
            logs[location.log_id] = None
            if not number % _SLICE:
                await asyncio.sleep(0)
        entries, cached_bytes = ids.members, 0
        for entry_id in self._cache.entry_ids(ledger_id):
            if ids.add(entry_id, entry_id):
                cached_bytes += len(self._cache.get(ledger_id, entry_id) or b"")
        state = self._ledgers.by_id.get(ledger_id) or LedgerDescriptor(self._index.get_ledger(ledger_id))
        if not state.known and not ids:
            raise LedgerNotFound(
                f"nothing is known of ledger {ledger_id} here; `magnetar bookie ledgers` lists what is",
                ledger_id=ledger_id,
            )
        known = state.record() if state.known else LedgerRecord()
        name = "deleted" if known.deleted_at_ms else "fenced" if known.fenced else "open"
        return LedgerSummary(
            ledger_id,
            name if state.known else "unknown",
            known.unknown,
            known.deleted_at_ms,
            known.last_entry,
            known.last_add_confirmed,
            known.explicit_lac,
            entries,
            size,
            ids.members - entries,
            cached_bytes,
            sorted(logs),
            list(ids),
        )
