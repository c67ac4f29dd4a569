"""What the bookie knows of each ledger in memory: fence, last add confirmed, last entry.

States are loaded from the ledger index on first use and written back by the next checkpoint after a change; clean ones are
forgotten when there are too many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice

from magnetar.proto.ledger_entry import NO_ENTRY

from .index import LedgerRecord, LocationIndex
from .waiters import Waiters

__all__ = ["DirtyLedgers", "LedgerState", "LedgerStates"]

_MAX_STATES = 50_000
_SLICE_LEDGERS = 1000
_NOTHING = LedgerRecord()


class DirtyLedgers:
    """What changed: all of it for the index, and what entry logs are told (fence, explicit LAC, tombstone).

    Records are made when they are asked for. They may then say more than when the checkpoint began, which does no harm:
    nothing in them is ever taken back, and a ledger that has changed since is in the next checkpoint as well.
    """

    def __init__(self, states: dict[int, LedgerState]) -> None:
        self._states = states
        self._changed: list[tuple[int, LedgerRecord]] | None = None

    def __len__(self) -> int:
        return len(self._states)

    async def for_entry_logs(self) -> list[tuple[int, LedgerRecord]]:
        """What no entry tells: entry logs hold it as well, so that the index can be built from them. The same each time."""
        if self._changed is None:
            self._changed = []
            for number, (ledger_id, state) in enumerate(self._states.items(), 1):
                # Of nearly all ledgers there is nothing to tell, and nothing was told.
                if state.fenced or state.explicit_lac >= 0 or state.deleted_at_ms or state.unknown:
                    beside = state.beside_entries()
                    if beside != state.logged:
                        state.logged = beside
                        self._changed.append((ledger_id, beside))
                if not number % _SLICE_LEDGERS:
                    await asyncio.sleep(0)
        return self._changed

    def batches(self, count: int) -> Iterator[list[tuple[int, LedgerRecord]]]:
        """All records, `count` at a time."""
        states = iter(self._states.items())
        while batch := [(ledger_id, state.record()) for ledger_id, state in islice(states, count)]:
            yield batch


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

    def __init__(self, record: LedgerRecord | None, *, unknown: bool = False) -> None:
        self.known = record is not None
        record = record or (_NOTHING if not unknown else LedgerRecord(unknown=True))
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
        # Number of the checkpoint that will write it, if it changed; an older number: it did not change since.
        self.dirty = 0
        # What the entry logs were told since the state is in memory; one that was not told before is told again.
        self.logged = _NOTHING
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

    def beside_entries(self) -> LedgerRecord:
        """Of `record`, what cannot be learnt from the entries."""
        return LedgerRecord(
            self.fenced, self.explicit_lac, deleted_at_ms=self.deleted_at_ms, unknown=self.unknown
        )


class LedgerStates:
    """All states in memory, by ledger id. `waiters` are told when a ledger's last add confirmed rises."""

    def __init__(self, index: LocationIndex, waiters: Waiters) -> None:
        self._index = index
        # A ledger that the index does not know may have had entries here.
        self._incomplete = index.incomplete()
        self._waiters = waiters
        self._watched = waiters.by_ledger
        self.by_id: dict[int, LedgerState] = {}
        # So many, and clean ones are forgotten.
        self._full_at = _MAX_STATES
        # Any ledger may have had entries here that were lost: nothing is said not to exist (rules 8 and 9).
        self.incomplete = False
        self._dirty: dict[int, LedgerState] = {}
        # Number of the next checkpoint.
        self._generation = 1
        # Taken by a checkpoint that has not ended: the index may still hold what was before.
        self._taken: dict[int, LedgerState] = {}

    def load(self, ledger_id: int) -> LedgerState:
        """The state, from the index if it is not in memory."""
        state = self.by_id.get(ledger_id)
        if state is None:
            state = LedgerState(self._index.get_ledger(ledger_id), unknown=self._incomplete)
            if len(self.by_id) >= self._full_at:
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
        if state.dirty != self._generation:
            self.mark_dirty(state, ledger_id)

    def peek(self, ledger_id: int) -> LedgerState:
        """The state, without keeping one for a ledger that nobody wrote: reads must not fill the memory."""
        state = self.by_id.get(ledger_id)
        if state is None:
            record = self._index.get_ledger(ledger_id)
            state = LedgerState(None, unknown=self._incomplete) if record is None else self.load(ledger_id)
        return state

    def unsaved(self) -> list[int]:
        """Ledgers of which the index may not know yet, or not all."""
        return list(self._taken | self._dirty)

    def wake(self, ledger_id: int) -> None:
        """Tells those who wait for news of the ledger: it was fenced or deleted, or its explicit LAC rose."""
        self._waiters.wake(ledger_id)

    def mark_dirty(self, state: LedgerState, ledger_id: int) -> None:
        """The next checkpoint writes it."""
        state.known = True
        state.dirty = self._generation
        self._dirty[ledger_id] = state

    def restate(self, ledger_id: int) -> None:
        """The log that held what entry logs say of this ledger's state is gone: the next checkpoint writes it again."""
        state = self.load(ledger_id)
        state.logged = LedgerRecord()
        self.mark_dirty(state, ledger_id)

    def take_dirty(self) -> DirtyLedgers:
        """What changed since the last call, at least as far as it is now. 20 ns a ledger."""
        dirty, self._dirty = self._dirty, {}
        self._generation += 1
        self._taken = {**self._taken, **dirty} if self._taken else dirty
        return DirtyLedgers(dirty)

    def settle(self) -> None:
        """A checkpoint ended: all that was taken is in the index."""
        self._taken = {}

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
            if state.fence_durable is None and self.settled(ledger_id):
                del self.by_id[ledger_id]
        # When nearly all of them changed since the last checkpoint, not each new one must look through them again.
        self._full_at = max(_MAX_STATES, len(self.by_id) + _MAX_STATES // 10)
