"""Ledger descriptors: the state of each ledger in memory (fence, last add confirmed, last entry).

States are loaded from the ledger index on first use and written back by the next checkpoint after a change; clean ones are
forgotten when there are too many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice

from magnetar.proto.errors import MagnetarError, TooManyRequests
from magnetar.proto.ledger_entry import NO_ENTRY

from .index import ALL_LEDGERS, LedgerRecord, LocationIndex

_Waiting = asyncio.Future[bool]


class Waiters:
    """Long polls: requests that wait until a ledger's last add confirmed rises. At most `limit` wait at a time.

    A waiter is woken once. A ledger without waiters costs nothing: an add that raises the last add confirmed looks at
    `by_ledger`, which is empty most of the time, and no further.
    """

    def __init__(self, limit: int) -> None:
        # Always the same dictionary; it has the waiters of each ledger, in order of arrival.
        self.by_ledger: dict[int, dict[_Waiting, None]] = {}
        self._limit = limit
        self._count = 0

    def __len__(self) -> int:
        return self._count

    async def wait(self, ledger_id: int, deadline: float) -> bool:
        """Until `wake`; False when the loop's time reached `deadline` before. TooManyRequests, or why it stops."""
        if self._count >= self._limit:
            raise TooManyRequests(
                f"{self._count} long polls wait at this bookie already (max_long_polls); poll again later"
            )
        loop = asyncio.get_running_loop()
        waiting: _Waiting = loop.create_future()
        timer = loop.call_at(deadline, _time_is_over, waiting)
        self._count += 1
        self.by_ledger.setdefault(ledger_id, {})[waiting] = None
        try:
            return await waiting
        finally:
            timer.cancel()
            self._count -= 1
            others = self.by_ledger.get(ledger_id)
            if others is not None:
                others.pop(waiting, None)
                if not others:
                    del self.by_ledger[ledger_id]

    def wake(self, ledger_id: int) -> None:
        """Wakes the waiters of a ledger; they run in a later turn of the loop."""
        for waiting in self.by_ledger.pop(ledger_id, {}):
            if not waiting.done():
                waiting.set_result(True)

    def fail_all(self, error: MagnetarError) -> None:
        """Fails all waiters."""
        for ledger_id in list(self.by_ledger):
            for waiting in self.by_ledger.pop(ledger_id):
                if not waiting.done():
                    # One of its own for each, since raising one adds a traceback to it.
                    waiting.set_exception(type(error)(error.message))


def _time_is_over(waiting: _Waiting) -> None:
    if not waiting.done():
        waiting.set_result(False)


_MAX_STATES = 50_000
_SLICE_LEDGERS = 1000
_FORGOTTEN_AT_ONCE = 1000
# An id that is further above all that were used is no ledger's: it says nothing about which ids were used. Between two
# introductions of a ledger client, which brings the store's own figure, nobody draws four thousand million ids: at 1000 a
# second that takes seven weeks.
_PLAUSIBLE_STEP = 1 << 32
_NOTHING = LedgerRecord()
# Its fence may be lost as well as its entries.
_UNKNOWN = LedgerRecord(fenced=True, unknown=True)


class DirtyLedgers:
    """Ledger states that changed: whole for the index, and in part (fence, explicit LAC, tombstone) for entry logs.

    Records are made when they are asked for. They may then say more than when the checkpoint began, which does no harm:
    nothing in them is ever taken back, and a ledger that has changed since is in the next checkpoint as well.
    """

    def __init__(self, states: dict[int, LedgerDescriptor]) -> None:
        self._states = states
        self._changed: list[tuple[int, LedgerRecord]] | None = None

    def __len__(self) -> int:
        return len(self._states)

    async def for_entry_logs(self) -> list[tuple[int, LedgerRecord]]:
        """State that no entry carries.

        Entry logs store it too, so that the index can be rebuilt from them. Same result each call.
        """
        if self._changed is None:
            self._changed = []
            for number, (ledger_id, state) in enumerate(self._states.items(), 1):
                # Nearly all ledgers have no such state.
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


class LedgerDescriptor:
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
        record = record or (_UNKNOWN if unknown else _NOTHING)
        # Set at once when a fence is asked for; the answer waits for `fence_durable`.
        self.fenced = record.fenced
        self.explicit_lac = record.explicit_lac
        # The durable part of `explicit_lac`, which runs ahead while the journal syncs. Only this is acknowledged to a
        # writer.
        self.durable_explicit_lac = record.explicit_lac
        self.last_entry = record.last_entry
        self.last_add_confirmed = record.last_add_confirmed
        # Not 0: deleted at that time. Nothing of it is served, and no add brings it back (rule 7).
        self.deleted_at_ms = record.deleted_at_ms
        # Entries may have been lost here: a missing one is never said not to exist (rule 8).
        self.unknown = record.unknown
        # Number of the checkpoint that will write it, if it changed; an older number: it did not change since.
        self.dirty = 0
        # State that was written to entry logs since this object was loaded; after a load it is written once more.
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


class LedgerDescriptors:
    """All states in memory, by ledger id. They wake the `waiters` of a ledger whose last add confirmed rises."""

    def __init__(self, index: LocationIndex, waiters: Waiters, used_below: int = 0) -> None:
        """The ids below `used_below` were used, as the cookie says."""
        self._index = index
        # Ledgers with a lower id that the index does not know may have had entries here (rules 8 and 9).
        self._incomplete_below = index.incomplete_below()
        # Ids below it were used, as far as is known here: all that this bookie ever held, and more (`introduction`).
        self.next_ledger_id = used_below
        while (last := index.last_ledger(self.next_ledger_id + _PLAUSIBLE_STEP)) >= self.next_ledger_id:
            self.next_ledger_id = last + 1
        self._waiters = waiters
        self._watched = waiters.by_ledger
        self.by_id: dict[int, LedgerDescriptor] = {}
        # Clean states are forgotten at this number.
        self._full_at = _MAX_STATES
        self._dirty: dict[int, LedgerDescriptor] = {}
        # Number of the next checkpoint.
        self._generation = 1
        # Taken by a checkpoint that has not ended: the index may still have the older state.
        self._taken: dict[int, LedgerDescriptor] = {}

    def load(self, ledger_id: int) -> LedgerDescriptor:
        """The state, from the index if it is not in memory."""
        state = self.by_id.get(ledger_id)
        if state is None:
            unknown = ledger_id < self._incomplete_below
            state = LedgerDescriptor(self._index.get_ledger(ledger_id), unknown=unknown)
            if len(self.by_id) >= self._full_at:
                self._forget()
            self.by_id[ledger_id] = state
        return state

    async def warm(self, ledger_id: int) -> None:
        """`load` and `peek` will wait for no disk. RequestTimeout: it does not answer."""
        if ledger_id not in self.by_id:
            await self._index.warm_ledger(ledger_id)

    def note_entry(
        self, state: LedgerDescriptor, ledger_id: int, entry_id: int, last_add_confirmed: int
    ) -> None:
        """Updates the state for an entry that goes to the write cache."""
        state.known = True
        if entry_id > state.last_entry:
            state.last_entry = entry_id
        if last_add_confirmed > state.last_add_confirmed:
            state.last_add_confirmed = last_add_confirmed
            if self._watched:
                self._waiters.wake(ledger_id)
        if state.dirty != self._generation:
            self.mark_dirty(state, ledger_id)

    def peek(self, ledger_id: int) -> LedgerDescriptor:
        """The state, without storing one for a ledger that nobody wrote: reads must not fill the memory."""
        state = self.by_id.get(ledger_id)
        if state is None:
            record = self._index.get_ledger(ledger_id)
            if record is not None:
                return self.load(ledger_id)
            state = LedgerDescriptor(None, unknown=ledger_id < self._incomplete_below)
        return state

    def complete_from(self, ledger_id: int) -> None:
        """Ledgers from this id on are made while the bookie is there: of these it knows all. Durable when it returns.

        Called often; only the first time after the index became incomplete counts. Blocks for some ms then.
        """
        if self._incomplete_below != ALL_LEDGERS:
            return
        self._index.set_incomplete(ledger_id)
        self._incomplete_below = ledger_id
        for loaded in [
            number for number, state in self.by_id.items() if number >= ledger_id and not state.known
        ]:
            del self.by_id[loaded]

    @property
    def incomplete_below(self) -> int:
        """Ledgers with lower ids that the index does not know may have had entries here; see LocationIndex."""
        return self._incomplete_below

    def end_incomplete(self, below: int) -> None:
        """Whatever may be missing of ledgers below it is marked ledger by ledger, durably. Durable; blocks for some ms."""
        assert below == self._incomplete_below
        self._index.set_incomplete(0)
        self._incomplete_below = 0
        for loaded in [number for number, state in self.by_id.items() if not state.known]:
            del self.by_id[loaded]

    def unsaved(self) -> list[int]:
        """Ledgers whose latest state may not be in the index yet."""
        return list(self._taken | self._dirty)

    def wake(self, ledger_id: int) -> None:
        """Wakes the long polls of the ledger: it was fenced or deleted, or its explicit LAC rose."""
        self._waiters.wake(ledger_id)

    def mark_dirty(self, state: LedgerDescriptor, ledger_id: int) -> None:
        """The next checkpoint writes it."""
        state.known = True
        if self.next_ledger_id <= ledger_id < self.next_ledger_id + _PLAUSIBLE_STEP:
            self.next_ledger_id = ledger_id + 1
        state.dirty = self._generation
        self._dirty[ledger_id] = state

    def rewrite_state(self, ledger_id: int) -> None:
        """The log with this ledger's state record was deleted: the next checkpoint writes the record again."""
        state = self.load(ledger_id)
        state.logged = LedgerRecord()
        self.mark_dirty(state, ledger_id)

    def take_dirty(self) -> DirtyLedgers:
        """States that changed since the last call; they may change further until they are written. 20 ns a ledger."""
        dirty, self._dirty = self._dirty, {}
        self._generation += 1
        self._taken = {**self._taken, **dirty} if self._taken else dirty
        return DirtyLedgers(dirty)

    def note_saved(self) -> None:
        """A checkpoint has ended: the index has all states that `take_dirty` returned."""
        self._taken = {}

    def is_saved(self, ledger_id: int) -> bool:
        """Whether the index has the latest state, and the mark lies behind the journal records that it came from."""
        return ledger_id not in self._dirty and ledger_id not in self._taken

    def forget(self, ledger_id: int) -> None:
        """Forgets a deleted ledger after `tombstone_retention_s`. Its state must be saved."""
        assert self.is_saved(ledger_id)
        self.by_id.pop(ledger_id, None)

    def _forget(self) -> None:
        """Looks at the oldest states: drops those that are saved and have no pending fence. 1 ms."""
        for ledger_id in list(islice(self.by_id, _FORGOTTEN_AT_ONCE)):
            state = self.by_id.pop(ledger_id)
            if state.fence_durable is not None or not self.is_saved(ledger_id):
                self.by_id[ledger_id] = state  # at the end: next time others are looked at
        # When nearly all of them changed since the last checkpoint, not each new one must look through them again.
        self._full_at = max(_MAX_STATES, len(self.by_id) + _FORGOTTEN_AT_ONCE // 2)
