"""Fences and explicit last-add-confirmeds: what is written about a ledger besides its entries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from magnetar.proto.errors import LedgerFenced, error_from_wire

from .journal import Journals
from .ledgers import LedgerDescriptors

_SLICE_LEDGERS = 100


class Fencing:
    """Fences and explicit LACs of one bookie."""

    def __init__(self, ledgers: LedgerDescriptors, journals: Journals) -> None:
        self._ledgers = ledgers
        self._journals = journals

    async def fence(self, ledger_id: int) -> None:
        """From now on only recovery adds pass. Durable when it returns, for unknown ledgers as well (rule 6)."""
        await self._ledgers.warm(ledger_id)
        state = self._ledgers.load(ledger_id)
        if not state.fenced:
            state.fenced = True
            self._ledgers.mark_dirty(state, ledger_id)
            self._ledgers.wake(ledger_id)
            durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            state.fence_durable = durable

            def done(_ledger_id: int, _number: int, code: int) -> None:
                state.fence_durable = None
                if code:
                    durable.set_exception(error_from_wire(code, 0, "the fence could not be written"))
                    durable.exception()  # marks it as retrieved: every caller may have been cancelled
                else:
                    durable.set_result(None)

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
        durable: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def done(_ledger_id: int, _number: int, code: int) -> None:
            if not code:
                state.durable_explicit_lac = max(state.durable_explicit_lac, last_add_confirmed)
            if not durable.done():
                durable.set_result(code)

        self._journals.of(ledger_id).last_confirmed(ledger_id, last_add_confirmed, done)
        # In memory first, as an entry is in the write cache before it is in the journal: a checkpoint may pass the record.
        state.explicit_lac = max(state.explicit_lac, last_add_confirmed)
        self._ledgers.mark_dirty(state, ledger_id)
        self._ledgers.wake(ledger_id)
        code = await durable
        if code:
            raise error_from_wire(code, 0, "the last add confirmed could not be written")
