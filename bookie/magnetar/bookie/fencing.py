"""What is written about a ledger besides its entries: fences, explicit last-add-confirmeds, tombstones.

A **tombstone** outlives the data (rule 7). A deleted ledger is refused to every writer, recoveries included, and is not
found by readers, from the moment of the call. The tombstone is durable by the journal when `delete` returns; the next
checkpoint puts it into the index and writes a state record. Journals that still hold adds of the ledger are replayed
without them (`replay`). The data go later, in a round of garbage collection: first from the index, then with their logs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from magnetar.proto.errors import LedgerFenced, error_from_wire
from magnetar.runtime.clock import Clock

from .journal import Journals
from .journal.journal import DurableCallback
from .ledgers import LedgerDescriptors
from .read_cache import ReadCache
from .scrub import Damage
from .write_cache import WriteCache

_SLICE_LEDGERS = 100
_Durable = asyncio.Future[None]


class Fencing:
    """See the module."""

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
        # Tombstones that are not durable, shared by concurrent deletions of one ledger. One that failed stays: the bookie
        # stops, and until then nothing may rely on it.
        self.pending_tombstones: dict[int, _Durable] = {}

    async def fence(self, ledger_id: int) -> None:
        """From now on only recovery adds pass. Durable when it returns, for unknown ledgers as well (rule 6)."""
        await self._ledgers.warm(ledger_id)
        state = self._ledgers.load(ledger_id)
        if not state.fenced:
            state.fenced = True
            self._ledgers.mark_dirty(state, ledger_id)
            self._ledgers.wake(ledger_id)

            def settled(_durable: bool) -> None:
                state.fence_durable = None

            done, state.fence_durable = _answer("the fence", settled)
            self._journals.of(ledger_id).fence(ledger_id, done)
        if state.fence_durable is not None:
            # Shielded: one fencer that gives up must not cancel the others.
            await asyncio.shield(state.fence_durable)

    async def mark_unknown(self, ledger_ids: Sequence[int]) -> None:
        """Rule 9: entries of these ledgers may have been lost here, so they are fenced, and a missing one is never denied.

        The fences are durable when it returns, the rest with the next checkpoint.
        """
        for start in range(0, len(ledger_ids), _SLICE_LEDGERS):
            ids = ledger_ids[start : start + _SLICE_LEDGERS]
            await asyncio.gather(*[self.fence(ledger_id) for ledger_id in ids])
            for ledger_id in ids:
                state = self._ledgers.load(ledger_id)
                state.unknown = True
                self._ledgers.mark_dirty(state, ledger_id)

    async def mark_repaired(self, ledger_ids: Sequence[int]) -> None:
        """Every entry of these ledgers that this bookie should have is here again. Durable with the next checkpoint."""
        for number, ledger_id in enumerate(ledger_ids, 1):
            if self._ledgers.peek(ledger_id).unknown:
                state = self._ledgers.load(ledger_id)
                state.unknown = False
                self._ledgers.mark_dirty(state, ledger_id)
            if not number % _SLICE_LEDGERS:
                await asyncio.sleep(0)

    async def write_last_confirmed(self, ledger_id: int, last_add_confirmed: int) -> None:
        """Explicit LAC of an idle writer. Durable when it returns; LedgerFenced if the ledger is fenced."""
        await self._ledgers.warm(ledger_id)
        state = self._ledgers.load(ledger_id)
        if state.fenced:
            raise LedgerFenced(f"ledger {ledger_id} was fenced by a recovery", ledger_id=ledger_id)
        if last_add_confirmed <= state.durable_explicit_lac:
            return

        def settled(durable: bool) -> None:
            if durable:
                state.durable_explicit_lac = max(state.durable_explicit_lac, last_add_confirmed)

        done, durable = _answer("the last add confirmed", settled)
        self._journals.of(ledger_id).last_confirmed(ledger_id, last_add_confirmed, done)
        # In memory first, as an entry is in the write cache before it is in the journal: a checkpoint may pass the record.
        state.explicit_lac = max(state.explicit_lac, last_add_confirmed)
        self._ledgers.mark_dirty(state, ledger_id)
        self._ledgers.wake(ledger_id)
        await durable

    async def delete(self, ledger_ids: Sequence[int]) -> None:
        """Writes tombstones, also for ledgers that were never seen here.

        Durable when it returns. StorageFailed: fail-stop.
        """
        waiting: list[_Durable] = []
        for number, ledger_id in enumerate(ledger_ids, 1):
            await self._ledgers.warm(ledger_id)
            self._write_tombstone(ledger_id)
            if (durable := self.pending_tombstones.get(ledger_id)) is not None:
                waiting.append(durable)
            if not number % _SLICE_LEDGERS:
                await asyncio.sleep(0)
        for durable in waiting:
            # Shielded: one caller that gives up must not cancel the others.
            await asyncio.shield(durable)

    def apply_tombstone(self, ledger_id: int, deleted_at_ms: int) -> None:
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
        self.apply_tombstone(ledger_id, deleted_at_ms)
        self._read_cache.discard_ledger(ledger_id)
        self._damage.deleted(ledger_id)
        self._ledgers.wake(ledger_id)

        def settled(written: bool) -> None:
            if written:
                self.deleted += 1
                del self.pending_tombstones[ledger_id]
            if state.fence_durable is durable:
                state.fence_durable = None

        done, durable = _answer("the tombstone", settled)
        self.pending_tombstones[ledger_id] = durable
        if state.fence_durable is None:
            # The tombstone is a fence as well: a fence request is answered once the tombstone is durable (rule 6).
            state.fence_durable = durable
        self._journals.of(ledger_id).delete(ledger_id, deleted_at_ms, done)


def _answer(what: str, settled: Callable[[bool], None]) -> tuple[DurableCallback, _Durable]:
    """A callback for a journal record, and what becomes of it: `settled` hears first whether the record is durable."""
    durable: _Durable = asyncio.get_running_loop().create_future()

    def done(_ledger_id: int, _number: int, code: int) -> None:
        settled(not code)
        if durable.done():  # its only caller was cancelled
            return
        if code:
            durable.set_exception(error_from_wire(code, 0, f"{what} could not be written"))
            durable.exception()  # marks it as retrieved: every caller may have been cancelled
        else:
            durable.set_result(None)

    return done, durable
