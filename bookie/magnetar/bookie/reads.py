"""The read path: write cache -> read cache -> index -> entry log with read-ahead; and long polls.

A bookie never answers "no such entry" when it met damage, or when it cannot know (rule 8). An answer ends before the first
requested entry that cannot be served, whatever the reason; only a request that begins with that entry gets the error. So an
entry that is missing from an answer is not denied by it; the same holds for stripes.
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
    UnknownLedgerState,
)
from magnetar.proto.stripe import EVERY_ENTRY, Stripe

from .ledgers import LedgerDescriptor, LedgerDescriptors, Waiters
from .metrics import Histogram
from .read_budget import ReadBudget, ReadGrant
from .read_cache import ReadCache
from .scrub import Damage
from .settings import BookieSettings
from .stored_entries import StoredEntries
from .write_cache import WriteCache

_DEFAULT_READ_BYTES = 4 << 20
# The sizes of the entries are in the header of the answer's frame, which has at most 64 KB.
_MAX_READ_ENTRIES = 8192


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
        stored: StoredEntries,
        damage: Damage,
        waiters: Waiters,
    ) -> None:
        self._settings = settings
        self._read_ahead = settings.read_ahead_entries
        self._ledgers = ledgers
        self._cache = cache
        self._read_cache = read_cache
        self._stored = stored
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
                        run = await self._stored.read(ledger_id, left, room, ahead, grant)
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
