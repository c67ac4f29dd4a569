"""The read path: write cache -> read cache -> index -> entry log with read-ahead.

A bookie never says "no such entry" when it met damage (rule 8).
"""

from __future__ import annotations

from magnetar.proto.errors import EntryDamaged, EntryNotFound, LedgerNotFound

from .index import LocationIndex
from .ledgers import LedgerState, LedgerStates
from .read_cache import ReadCache
from .stored_entries import StoredEntries
from .write_cache import WriteCache

__all__ = ["Reads"]

_DEFAULT_READ_BYTES = 4 << 20
# The sizes of what is read stand in a frame's header, which has at most 64 KB.
_MAX_READ_ENTRIES = 8192


class Reads:
    """The read path of one bookie."""

    def __init__(
        self,
        ledgers: LedgerStates,
        index: LocationIndex,
        cache: WriteCache,
        read_cache: ReadCache,
        stored: StoredEntries,
    ) -> None:
        self._ledgers = ledgers
        self._index = index
        self._cache = cache
        self._read_cache = read_cache
        self._stored = stored

    async def read(self, ledger_id: int, first: int, last: int, max_bytes: int) -> tuple[list[bytes], int]:
        """See `Bookie.read`, which has fenced already."""
        state = self._peek(ledger_id)
        limit = max_bytes or _DEFAULT_READ_BYTES
        entries: list[bytes] = []
        size, entry_id = 0, first
        while entry_id <= last and len(entries) < _MAX_READ_ENTRIES:
            entry = self._cache.get(ledger_id, entry_id) or self._read_cache.get(ledger_id, entry_id)
            if entry is None:
                # Not the last one asked for, but what a sequential reader will ask for next.
                ahead = last > first or state.next_read == entry_id
                try:
                    entry = await self._stored.read(ledger_id, entry_id, ahead=ahead)
                except EntryDamaged:
                    if not entries:
                        raise
                    break
            if entry is None or (entries and size + len(entry) > limit):
                break
            entries.append(entry)
            size += len(entry)
            entry_id += 1
        if not entries:
            raise EntryNotFound(
                f"ledger {ledger_id} has no entry {first} on this bookie", ledger_id=ledger_id, entry_id=first
            )
        state.next_read = entry_id
        return entries, state.confirmed

    def last_confirmed(self, ledger_id: int) -> tuple[int, int]:
        """(highest last add confirmed, last entry) known here. LedgerNotFound if never written nor fenced here."""
        state = self._peek(ledger_id)
        if not state.known:
            raise LedgerNotFound(f"ledger {ledger_id} was never written on this bookie", ledger_id=ledger_id)
        return state.confirmed, state.last_entry

    def _peek(self, ledger_id: int) -> LedgerState:
        """The state, without keeping one for a ledger that nobody wrote: reads must not fill the memory."""
        state = self._ledgers.by_id.get(ledger_id)
        if state is None:
            record = self._index.get_ledger(ledger_id)
            state = LedgerState(None) if record is None else self._ledgers.load(ledger_id)
        return state
