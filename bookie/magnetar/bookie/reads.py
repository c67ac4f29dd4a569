"""The read path: write cache -> read cache -> index -> entry log with read-ahead; and long polls.

A bookie never answers "no such entry" when it met damage, or when it cannot know (rule 8). An answer ends before the first
requested entry that cannot be served, whatever the reason; only a request that begins with that entry gets the error. So an
entry that is missing from an answer is not denied by it; the same holds for stripes.

What one read of an entry log fetches is a *run*: entries of a ledger whose records follow each other in one log, since a
flush puts the entries of a ledger side by side. A run costs one look at the index and one read of the disk. A sequential
reader of few entries gets `read_ahead_entries` in its run; an entry that is read alone is read alone. A stripe that
leaves out some of the stored entries is read with small gaps, which cost a copy of some us and are not verified.

A run never holds an entry that is in the write cache: that copy is newer (a recovery digests an entry anew), and the
one in the log must neither be served nor cached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from magnetar.proto.errors import (
    EntryDamaged,
    EntryNotFound,
    LedgerNotFound,
    MagnetarError,
    RequestTimeout,
    StorageFailed,
    UnknownLedgerState,
)
from magnetar.proto.stripe import EVERY_ENTRY, Stripe

from .entry_log.entry_logs import EntryLogs
from .entry_log.records import RECORD_HEADER_BYTES
from .index import Location, LocationIndex
from .ledgers import LedgerDescriptor, LedgerDescriptors, Waiters
from .metrics import Histogram
from .read_budget import ReadBudget, ReadGrant
from .read_cache import ReadCache
from .scrub import Damage
from .settings import BookieSettings
from .write_cache import WriteCache

_DEFAULT_READ_BYTES = 4 << 20
# The sizes of the entries are in the header of the answer's frame, which has at most 64 KB.
_MAX_READ_ENTRIES = 8192
# How often the index is asked again when a log does not exist: each time a compaction has moved the entry meanwhile.
_ATTEMPTS = 5
# Entries asked of the index at once: a short answer must not pay for a long range.
_INDEX_STEP = 100
_MAX_RUN_ENTRIES = 1000
# Between two records of a run: less than another read of the page cache would cost.
_MAX_GAP_BYTES = 16 << 10
_MAX_ID = (1 << 63) - 1


class LongPollResult(NamedTuple):
    """What a long poll came back with."""

    last_add_confirmed: int
    fenced: bool


class Reads:
    """The read path of one bookie."""

    def __init__(
        self,
        settings: BookieSettings,
        ledgers: LedgerDescriptors,
        cache: WriteCache,
        read_cache: ReadCache,
        index: LocationIndex,
        logs: EntryLogs,
        damage: Damage,
        waiters: Waiters,
    ) -> None:
        self._settings = settings
        self._read_ahead = settings.read_ahead_entries
        self._ledgers = ledgers
        self._cache = cache
        self._read_cache = read_cache
        self._index = index
        self._logs = logs
        self._ahead_bytes = min(settings.read_ahead_bytes, settings.read_cache_bytes // 4)
        self._damage = damage
        self._waiters = waiters
        self.budget = ReadBudget(settings.read_budget_bytes)
        # Figures: requests by the slowest place that they needed, entries and bytes served, and from the write cache.
        self.latency_s = {source: Histogram() for source in ("write_cache", "read_cache", "entry_log")}
        self._write_cache_counts = self.latency_s["write_cache"].counts
        self.entries_read = 0
        self.bytes_read = 0
        self.write_cache_hits = 0
        self.write_cache_misses = 0

    async def read(
        self, ledger_id: int, first: int, last: int, max_bytes: int, stripe: Stripe = EVERY_ENTRY
    ) -> tuple[list[bytes], int]:
        """See `Bookie.read`, which has fenced already and looked at the arguments."""
        state = self._ledgers.by_id.get(ledger_id)
        if state is None:
            await self._ledgers.warm(ledger_id)
            state = self._ledgers.peek(ledger_id)
        if state.deleted_at_ms:
            raise _deleted(ledger_id)
        if first == last and (entry := self._cache.get(ledger_id, first)) is not None:
            # What a tailing reader asks for most: 0.4 us less than the way below.
            self.write_cache_hits += 1
            self._write_cache_counts[0] += 1
            state.next_read = first + 1
            self.entries_read += 1
            self.bytes_read += len(entry)
            return [entry], state.confirmed
        limit = max_bytes or _DEFAULT_READ_BYTES
        ids = stripe.ids(first, last, _MAX_READ_ENTRIES)
        entries = self._cache.run(ledger_id, ids, limit)
        source = "write_cache"
        if not entries:
            self.write_cache_misses += 1
            entries = self._read_cache.run(ledger_id, ids, limit)
            source = "read_cache"
        else:
            self.write_cache_hits += len(entries)
        size = len(entries[0]) if len(entries) == 1 else sum(map(len, entries))
        if entries and (len(entries) == len(ids) or size >= limit):
            self.latency_s[source].counts[0] += 1  # it took some us: no clock is read for it
        else:
            loop = asyncio.get_running_loop()
            began = loop.time()
            if await self._read_on(state, ledger_id, ids, limit, entries, stripe):
                source = "entry_log"
            if not entries:
                raise self._not_there(state, ledger_id, first)
            size = sum(map(len, entries))
            self.latency_s[source].observe(loop.time() - began)
        state.next_read = ids[len(entries) - 1] + 1
        self.entries_read += len(entries)
        self.bytes_read += size
        return entries, state.confirmed

    async def _read_on(
        self,
        state: LedgerDescriptor,
        ledger_id: int,
        ids: Sequence[int],
        limit: int,
        entries: list[bytes],
        stripe: Stripe,
    ) -> bool:
        """Adds what one of the caches did not have at once. True if an entry log was read."""
        size = sum(map(len, entries))
        # Not of the last one asked for, but of what a sequential reader will ask for next.
        sequential = len(ids) > 1 or state.next_read == ids[0]
        ahead = stripe if sequential and len(ids) <= self._read_ahead else None
        grant: ReadGrant | None = None
        try:
            while size < limit and (left := ids[len(entries) :]):
                room = limit - size
                run: list[bytes] = []
                if entries:  # else nothing is in either cache
                    run = self._cache.run(ledger_id, left, room) or self._read_cache.run(
                        ledger_id, left, room
                    )
                if not run:
                    if grant is None:
                        grant = ReadGrant(self.budget)
                    else:
                        await asyncio.sleep(0)  # a run of 2 MiB was verified in this turn of the loop
                    try:
                        run = await self._read_stored(ledger_id, left, room, ahead, grant)
                    except (EntryDamaged, RequestTimeout):
                        if not entries:
                            raise
                        break  # a request that begins with it gets the error
                if not run or (entries and size + len(run[0]) > limit):
                    break
                entries += run
                size += sum(map(len, run))
        finally:
            if grant is not None:
                grant.give_back()
        if state.deleted_at_ms:  # meanwhile
            entries.clear()
        return grant is not None

    async def _read_stored(
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
                wanted = await self._locate(ledger_id, ids, max_bytes, ahead)
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

    async def _locate(
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

    async def last_confirmed(self, ledger_id: int) -> tuple[int, int]:
        """See `Bookie.read_last_confirmed`."""
        await self._ledgers.warm(ledger_id)
        state = self._existing(ledger_id)
        if state.unknown:
            # What it does know may lie below what it has answered before it lost its disk (rule 8).
            raise UnknownLedgerState(
                f"this bookie may have lost entries of ledger {ledger_id} and was not repaired yet; ask another replica",
                ledger_id=ledger_id,
            )
        if not state.known:
            raise LedgerNotFound(f"ledger {ledger_id} was never written on this bookie", ledger_id=ledger_id)
        return state.confirmed, state.last_entry

    async def wait_last_confirmed(
        self, ledger_id: int, last_add_confirmed: int, timeout_s: float
    ) -> LongPollResult:
        """See `Bookie.wait_last_confirmed`."""
        await self._ledgers.warm(ledger_id)
        longest = self._settings.long_poll_timeout_s
        deadline = asyncio.get_running_loop().time() + (min(timeout_s, longest) if timeout_s > 0 else longest)
        state = self._existing(ledger_id)
        while (
            state.confirmed <= last_add_confirmed
            and not state.fenced
            and await self._waiters.wait(ledger_id, deadline)
        ):
            state = self._existing(ledger_id)
        state = self._existing(ledger_id)
        return LongPollResult(state.confirmed, state.fenced)

    def _existing(self, ledger_id: int) -> LedgerDescriptor:
        state = self._ledgers.peek(ledger_id)
        if state.deleted_at_ms:
            raise _deleted(ledger_id)
        return state

    def _not_there(self, state: LedgerDescriptor, ledger_id: int, entry_id: int) -> MagnetarError:
        """Why nothing can be answered."""
        details = {"ledger_id": ledger_id, "entry_id": entry_id}
        name = f"entry {entry_id} of ledger {ledger_id}"
        if state.deleted_at_ms:
            return _deleted(ledger_id)
        if self._damage.covers(ledger_id, entry_id):
            return EntryDamaged(f"{name} is damaged on this bookie; read another replica", **details)
        if state.unknown:
            return UnknownLedgerState(
                f"this bookie may have lost {name} and was not repaired yet; read another replica", **details
            )
        return EntryNotFound(f"ledger {ledger_id} has no entry {entry_id} on this bookie", **details)


def _deleted(ledger_id: int) -> MagnetarError:
    return LedgerNotFound(f"ledger {ledger_id} was deleted from this bookie", ledger_id=ledger_id)
