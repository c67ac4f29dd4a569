"""Deleting ledgers: a tombstone first, which outlives the data (rule 7).

A deleted ledger is refused to every writer, recoveries included, and is not found by readers, from the moment of the call.
The tombstone is durable by the journal when `delete` returns; the next checkpoint puts it into the index and writes a state
record. Journals that still hold adds of the ledger are replayed without them (`startup`). The data go later, in a round of
garbage collection: first from the index, then with their logs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from magnetar.proto.errors import error_from_wire
from magnetar.runtime.clock import Clock

from ..journal import Journals
from ..ledgers import LedgerDescriptors
from ..read_cache import ReadCache
from ..scrub.damage import Damage
from ..write_cache import WriteCache

# Records that go to the journal in one turn of the loop.
_SLICE = 200


class Deletion:
    """Writes the tombstones of one bookie."""

    def __init__(
        self,
        ledgers: LedgerDescriptors,
        journals: Journals,
        cache: WriteCache,
        read_cache: ReadCache,
        damage: Damage,
        clock: Clock,
    ) -> None:
        # Ledgers deleted since the start.
        self.deleted = 0
        self._ledgers = ledgers
        self._journals = journals
        self._cache = cache
        self._read_cache = read_cache
        self._damage = damage
        self._clock = clock
        # Tombstones on their way to the journal, shared by concurrent deletions of one ledger.
        self._in_flight: dict[int, asyncio.Future[None]] = {}

    async def delete(self, ledger_ids: Sequence[int]) -> None:
        """Writes tombstones, also for ledgers that were never seen here.

        Durable when it returns. StorageFailed: fail-stop.
        """
        waiting: list[asyncio.Future[None]] = []
        for start in range(0, len(ledger_ids), _SLICE):
            for ledger_id in ledger_ids[start : start + _SLICE]:
                await self._ledgers.warm(ledger_id)
                self._write_tombstone(ledger_id)
                if (durable := self._in_flight.get(ledger_id)) is not None:
                    waiting.append(durable)
            await asyncio.sleep(0)
        for durable in waiting:
            # Shielded: one caller that gives up must not cancel the others.
            await asyncio.shield(durable)

    def apply(self, ledger_id: int, deleted_at_ms: int) -> None:
        """Applies a tombstone in memory, a new one or one from a replayed journal; the next flush puts it into the index."""
        state = self._ledgers.load(ledger_id)
        state.deleted_at_ms = max(state.deleted_at_ms, deleted_at_ms)
        state.fenced = True
        self._ledgers.mark_dirty(state, ledger_id)
        # Its entries in the memtable that is being flushed still reach an entry log, as garbage.
        self._cache.discard_ledger(ledger_id)

    def _write_tombstone(self, ledger_id: int) -> None:
        state = self._ledgers.load(ledger_id)
        if state.deleted_at_ms:
            return
        deleted_at_ms = max(1, self._clock.now_ms())
        self.apply(ledger_id, deleted_at_ms)
        self._read_cache.discard_ledger(ledger_id)
        self._damage.deleted(ledger_id)
        self._ledgers.wake(ledger_id)
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._in_flight[ledger_id] = durable
        if state.fence_durable is None:
            # The tombstone is a fence as well: a fence request is answered once the tombstone is durable (rule 6).
            state.fence_durable = durable

        def done(_ledger_id: int, _number: int, code: int) -> None:
            del self._in_flight[ledger_id]
            if state.fence_durable is durable:
                state.fence_durable = None
            if code:
                durable.set_exception(error_from_wire(code, 0, "the tombstone could not be written"))
                durable.exception()  # marks it as retrieved: the caller may have been cancelled
            else:
                self.deleted += 1
                durable.set_result(None)

        self._journals.of(ledger_id).delete(ledger_id, deleted_at_ms, done)
