"""Leftovers: entries of ledgers that exist, but whose record gives them to other bookies.

They come from repairs: this bookie was away while its entries were copied elsewhere, or a repair that copied entries here
was given up. Their locations are removed from the index, and compaction gives the space back. The ledger's state stays, its
fence above all: a stale writer must be refused here as long as the ledger exists (rule 7).

A repair may be copying entries here at this very moment, and name this bookie in the record when it is done; dropping them
then would lose a replica (BookKeeper #4668). The order of the steps excludes that, without a lock:

    1  list the closed entry logs                            what is copied from now on lands in other ones
    2  read the record: closed, and the entries are not ours
    3  raise the version of the record (compare-and-set)     a repair that read it before 3 fails, and copies again
    4  remove locations in the logs of step 1, if they still name the same place

A repair that read the record before step 3 cannot write it after 3. One that reads it after 3 copies after 1, so its copies
are not in the logs of step 1, and stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from magnetar.proto.errors import MagnetarError

from ..index import BATCH_ENTRIES, Location
from .assignments import Assignments, Unassigned
from .compactor import IndexFailed, raising
from .parts import StorageParts

_log = logging.getLogger(__name__)
_SLICE = 50


class Leftovers:
    """One pass over the ledgers of a bookie, see the module."""

    def __init__(self, parts: StorageParts, assignments: Assignments) -> None:
        self.dropped_entries = 0
        # Ledgers of which nothing is left here but their state, as of the last pass.
        self.emptied: dict[int, None] = {}
        self._parts = parts
        self._assignments = assignments

    async def drop(self, ledger_ids: Sequence[int]) -> int:
        """Returns how many entries were dropped; the index is not flushed yet. Raises MagnetarError, IndexFailed."""
        before = self.dropped_entries
        # Step 1. Log ids are never used twice, so these name the same bytes for ever.
        closed = frozenset(info.log_id for info in self._parts.logs.logs() if not info.current)
        for number, ledger_id in enumerate(ledger_ids):
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            try:
                found = await self._assignments.unassigned(ledger_id)
                if found is None:
                    self.emptied.pop(ledger_id, None)
                elif await self._has_some(found, closed) and await self._assignments.confirm(found):
                    await self._drop(found, closed)
            except MagnetarError as error:
                if error.retryable:
                    raise
                _log.warning("whose entries of ledger %d are here is not known: %s", ledger_id, error)
                continue
            if found is not None and not self._parts.index.list_locations(ledger_id, count=1):
                self.emptied[ledger_id] = None
        return self.dropped_entries - before

    def _locations(
        self, found: Unassigned, closed: frozenset[int]
    ) -> Iterator[list[tuple[int, int, Location, Location | None]]]:
        """What is to be dropped, in batches for `replace_locations`; an empty one gives the loop a turn."""
        for first, last in found.ranges:
            after = first - 1
            while rows := self._parts.index.list_locations(found.ledger_id, after, BATCH_ENTRIES):
                after = rows[-1][0]
                yield [
                    (found.ledger_id, entry_id, location, None)
                    for entry_id, location in rows
                    if location.log_id in closed and entry_id <= last
                ]
                if after >= last:
                    break

    async def _has_some(self, found: Unassigned, closed: frozenset[int]) -> bool:
        """Whether there is anything to drop; looked at before the record is touched."""
        for batch in self._locations(found, closed):
            if batch:
                return True
            await asyncio.sleep(0)
        return False

    async def _drop(self, found: Unassigned, closed: frozenset[int]) -> None:
        for batch in self._locations(found, closed):
            with raising(IndexFailed):
                self.dropped_entries += self._parts.index.replace_locations(batch)
            await asyncio.sleep(0)
