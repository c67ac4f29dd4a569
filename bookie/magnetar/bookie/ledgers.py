"""What the bookie knows of each ledger in memory: fence, last add confirmed, last entry.

States are loaded from the ledger index on first use and written back by the next checkpoint after a change; clean ones are
forgotten when there are too many.
"""

from __future__ import annotations

import asyncio

from magnetar.proto.ledger_entry import NO_ENTRY

from .index import LedgerRecord, LocationIndex

__all__ = ["LedgerState", "LedgerStates"]

_MAX_STATES = 50_000


class LedgerState:
    """One ledger. `known`: something was written here for it, or it was fenced here."""

    __slots__ = (
        "dirty",
        "durable_explicit_lac",
        "explicit_lac",
        "fence_durable",
        "fenced",
        "known",
        "last_add_confirmed",
        "last_entry",
        "next_read",
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
        self.dirty = False
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
        return LedgerRecord(self.fenced, self.explicit_lac, self.last_entry, self.last_add_confirmed)


class LedgerStates:
    """All states in memory, by ledger id."""

    def __init__(self, index: LocationIndex) -> None:
        self._index = index
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
        if not state.dirty:
            self.mark_dirty(state, ledger_id)

    def mark_dirty(self, state: LedgerState, ledger_id: int) -> None:
        """The next checkpoint writes it."""
        state.known = state.dirty = True
        self._dirty[ledger_id] = state

    def take_dirty(self) -> list[tuple[int, LedgerRecord]]:
        """What changed since the last call, as it is now."""
        dirty, self._dirty = self._dirty, {}
        self._taken.update(dirty)
        records: list[tuple[int, LedgerRecord]] = []
        for ledger_id, state in dirty.items():
            state.dirty = False
            records.append((ledger_id, state.record()))
        return records

    def settle(self) -> None:
        """A checkpoint ended: all that was taken is in the index."""
        self._taken.clear()

    def _forget(self) -> None:
        """Drops the older half of what neither changed nor is waited for."""
        for ledger_id in list(self.by_id)[: _MAX_STATES // 2]:
            state = self.by_id[ledger_id]
            if not state.dirty and state.fence_durable is None and ledger_id not in self._taken:
                del self.by_id[ledger_id]
