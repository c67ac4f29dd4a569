"""Unknown ledgers (rules 8, 9) become known again: once this bookie has all that the records give it, it may deny the rest.

A bookie that took the place of a lost one, or whose index was rebuilt from damaged logs, answers "unknown" for every ledger
below its watermark, and for each ledger that is marked. Repairs bring the entries back; nobody but the records can say that
nothing is missing any more. So a round reads them:

    every ledger below the watermark whose record names this bookie    closed, and all its entries are here: known
                                                                       else: marked one by one, with its fence
    a checkpoint, so that the marks are durable
    the watermark goes
    every marked ledger     closed, and all its entries are here, or no record of it names this bookie: the mark goes

Why nothing is denied that should be here. A ledger that is closed and complete needs no further entry. An open one stays
marked until it is closed, so no recovery takes a denial of this bookie for one. A ledger whose record does not name this
bookie gets it into its record by an ensemble change, which is written before entries are sent, or by a repair or a recovery,
which sends entries first and to the bookie as it is now. A ledger that has no record yet has no entries.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from magnetar.proto.ranges import RangeSet

from ..fencing import Fencing
from ..index import ALL_LEDGERS
from .assignments import Assigned, Assignments
from .parts import StorageParts

_log = logging.getLogger(__name__)


class UnknownLedgers:
    """One pass; the collector runs it beside `leftovers`."""

    def __init__(
        self,
        parts: StorageParts,
        assignments: Assignments,
        fencing: Fencing,
        checkpoint: Callable[[], Awaitable[None]],
    ) -> None:
        self._parts = parts
        self._assignments = assignments
        self._fencing = fencing
        self._checkpoint = checkpoint

    async def settle(self, marked: Sequence[int]) -> int:
        """`marked`: ledgers that are. Returns how many are not any more. Raises MagnetarError: then nothing is believed."""
        ledgers = self._parts.ledgers
        below = ledgers.incomplete_below
        # ALL_LEDGERS: no ledger client has said yet which ids are of later ledgers.
        if 0 < below < ALL_LEDGERS:
            lacking = [found.ledger_id async for found in self._lacking(below)]
            await self._fencing.mark_unknown(lacking)
            await self._checkpoint()
            ledgers.end_incomplete(below)
            _log.info(
                "of the ledgers below %d this bookie has all that their records give it, but for %d, which stay unknown "
                "until they are closed and repaired",
                below,
                len(lacking),
            )
            marked = [*marked, *lacking]
        settled = [ledger_id for ledger_id in dict.fromkeys(marked) if await self._is_settled(ledger_id)]
        await self._fencing.mark_repaired(settled)
        if settled:
            _log.info("%d ledgers that were unknown are complete again", len(settled))
        return len(settled)

    async def _lacking(self, below: int) -> AsyncIterator[Assigned]:
        async for assigned in self._assignments.assigned_below(below):
            if not await self._is_whole(assigned):
                yield assigned

    async def _is_settled(self, ledger_id: int) -> bool:
        assigned = await self._assignments.assigned(ledger_id)
        # Without a record it was deleted, and garbage collection finds that out.
        return assigned is not None and await self._is_whole(assigned)

    async def _is_whole(self, assigned: Assigned) -> bool:
        """What is not in the index yet counts as missing: the next round finds it."""
        if not assigned.closed:
            return False
        entries = RangeSet()
        after = -1
        while rows := self._parts.index.list_locations(assigned.ledger_id, after):
            for entry_id, _ in rows:
                entries.add(entry_id, entry_id)
            after = rows[-1][0]
            await asyncio.sleep(0)
        return assigned.whole(list(entries)) and not self._parts.damage.has_any(assigned.ledger_id)
