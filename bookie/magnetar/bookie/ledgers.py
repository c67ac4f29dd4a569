"""What the bookie knows of each ledger in memory: fence, last add confirmed, last entry.

States are loaded from the ledger index on first use and written back by the next checkpoint after a change; clean ones are
forgotten when there are too many.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from magnetar.proto.ledger_entry import NO_ENTRY

from .index import LedgerRecord, LocationIndex
from .waiters import Waiters

__all__ = ["DirtyLedgers", "LedgerState", "LedgerStates"]

_MAX_STATES = 50_000


class DirtyLedgers(NamedTuple):
    """What changed: all of it for the index, and what entry logs are told (fence, explicit LAC, tombstone)."""

    records: list[tuple[int, LedgerRecord]]
    states: list[tuple[int, LedgerRecord]]


class LedgerState:
    """One ledger. `known`: something was written here for it, or it was fenced here."""

    __slots__ = (
        "deleted_at_ms",
        "dirty",
        "durable_explicit_lac",
        "explicit_lac",
        "fence_durable",
        "fenced",
        "known",
        "last_add_confirmed",
        "last_entry",
        "logged",
        "next_read",
        "unknown",
    )

    def __init__(self, record: LedgerRecord | None) -> None:
        self.known = record is not None
        record = record or LedgerRecord()
        # Set at once when a fence is asked for; the answer waits for `fence_durable`.
        self.fenced = record.fenced
        self.explicit_lac = record.explicit_lac
        # What a writer may be told to be durable; `explicit_lac` runs ahead of it while the journal syncs.
        self.durable_explicit_lac = record.explicit_lac
        self.last_entry = record.last_entry
        self.last_add_confirmed = record.last_add_confirmed
        # Not 0: deleted at that time. Nothing of it is served, and no add brings it back (rule 7).
        self.deleted_at_ms = record.deleted_at_ms
        # Entries may have been lost here: a missing one is never said not to exist (rule 8).
        self.unknown = record.unknown
        self.dirty = False
        # What the entry logs were told since the state is in memory; one that was not told before is told again.
        self.logged = LedgerRecord()
        # Shared by concurrent fencers; None when the fence is durable, or was never asked for.
        self.fence_durable: asyncio.Future[None] | None = None
        # The entry after the last one read: a read of it is sequential and gets read-ahead.
        self.next_read = NO_ENTRY

    @property
    def confirmed(self) -> int:
        """Highest last add confirmed that this bookie heard of."""
        return max(self.explicit_lac, self.last_add_confirmed)

    def record(self) -> LedgerRecord:
        """What the ledger index keeps."""
        return LedgerRecord(
            self.fenced,
            self.explicit_lac,
            self.last_entry,
            self.last_add_confirmed,
            self.deleted_at_ms,
            self.unknown,
        )


class LedgerStates:
    """All states in memory, by ledger id. `waiters` are told when a ledger's last add confirmed rises."""

    def __init__(self, index: LocationIndex, waiters: Waiters) -> None:
        self._index = index
        self._waiters = waiters
        self._watched = waiters.by_ledger
        self.by_id: dict[int, LedgerState] = {}
        self._dirty: dict[int, LedgerState] = {}
        # Taken by a checkpoint that has not ended: the index may still hold what was before.
        self._taken: dict[int, LedgerState] = {}

    def load(self, ledger_id: int) -> LedgerState:
        """The state, from the index if it is not in memory."""
        state = self.by_id.get(ledger_id)
        if state is None:
            state = LedgerState(self._index.get_ledger(ledger_id))
            if len(self.by_id) >= _MAX_STATES:
                self._forget()
            self.by_id[ledger_id] = state
        return state

    def note_entry(self, state: LedgerState, ledger_id: int, entry_id: int, last_add_confirmed: int) -> None:
        """An entry goes to the write cache."""
        state.known = True
        if entry_id > state.last_entry:
            state.last_entry = entry_id
        if last_add_confirmed > state.last_add_confirmed:
            state.last_add_confirmed = last_add_confirmed
            if self._watched:
                self._waiters.wake(ledger_id)
        if not state.dirty:
            self.mark_dirty(state, ledger_id)

    def peek(self, ledger_id: int) -> LedgerState:
        """The state, without keeping one for a ledger that nobody wrote: reads must not fill the memory."""
        state = self.by_id.get(ledger_id)
        if state is None:
            record = self._index.get_ledger(ledger_id)
            state = LedgerState(None) if record is None else self.load(ledger_id)
        return state

    def unsaved(self) -> list[int]:
        """Ledgers of which the index may not know yet, or not all."""
        return list(self._taken | self._dirty)

    def wake(self, ledger_id: int) -> None:
        """Tells those who wait for news of the ledger: it was fenced or deleted, or its explicit LAC rose."""
        self._waiters.wake(ledger_id)

    def mark_dirty(self, state: LedgerState, ledger_id: int) -> None:
        """The next checkpoint writes it."""
        state.known = state.dirty = True
        self._dirty[ledger_id] = state

    def restate(self, ledger_id: int) -> None:
        """The log that held what entry logs say of this ledger's state is gone: the next checkpoint writes it again."""
        state = self.load(ledger_id)
        state.logged = LedgerRecord()
        self.mark_dirty(state, ledger_id)

    def take_dirty(self) -> DirtyLedgers:
        """What changed since the last call, as it is now."""
        dirty, self._dirty = self._dirty, {}
        self._taken.update(dirty)
        records: list[tuple[int, LedgerRecord]] = []
        states: list[tuple[int, LedgerRecord]] = []
        for ledger_id, state in dirty.items():
            state.dirty = False
            record = state.record()
            records.append((ledger_id, record))
            # What no entry tells: entry logs hold it as well, so that the index can be built from them.
            beside = record._replace(last_entry=NO_ENTRY, last_add_confirmed=NO_ENTRY)
            if beside != state.logged:
                state.logged = beside
                states.append((ledger_id, beside))
        return DirtyLedgers(records, states)

    def settle(self) -> None:
        """A checkpoint ended: all that was taken is in the index."""
        self._taken.clear()

    def settled(self, ledger_id: int) -> bool:
        """Whether the index knows all of the ledger, and the mark has passed the records that it came from."""
        return ledger_id not in self._dirty and ledger_id not in self._taken

    def forget(self, ledger_id: int) -> None:
        """Its tombstone has served its time. Only for a ledger that is settled."""
        assert self.settled(ledger_id)
        self.by_id.pop(ledger_id, None)

    def _forget(self) -> None:
        """Drops the older half of what neither changed nor is waited for."""
        for ledger_id in list(self.by_id)[: _MAX_STATES // 2]:
            state = self.by_id[ledger_id]
            if not state.dirty and state.fence_durable is None and ledger_id not in self._taken:
                del self.by_id[ledger_id]
