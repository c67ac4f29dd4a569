"""What follows from who has which entries of a ledger, as its record says: leftovers, and ledgers that are complete again.

**Leftovers** are entries of ledgers that exist, but whose record gives them to other bookies.

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

**Unknown ledgers** (rules 8, 9) become known again: once this bookie has all that the records give it, it may deny the rest.

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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

from magnetar.proto.errors import MagnetarError
from magnetar.proto.ranges import RangeSet

from ..entry_log.entry_logs import EntryLogs
from ..fencing import Fencing
from ..index import ALL_LEDGERS, BATCH_ENTRIES, Location, LocationIndex
from ..ledgers import LedgerDescriptors
from ..scrub import Damage
from .compactor import IndexFailed, raising

_log = logging.getLogger(__name__)
_SLICE = 50


class Unassigned(Protocol):
    """Entries of a closed ledger that are other bookies'."""

    @property
    def ledger_id(self) -> int: ...

    @property
    def ranges(self) -> Sequence[tuple[int, int]]:
        """Both ends included, rising."""
        ...


class Assigned(Protocol):
    """What a record gives this bookie."""

    @property
    def ledger_id(self) -> int: ...

    @property
    def closed(self) -> bool:
        """Its record gives nobody any further entry."""
        ...

    def gives(self, entry_id: int) -> bool:
        """Whether the entry is this bookie's; of an open ledger each may be."""
        ...

    def whole(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Of a closed ledger: whether these entries (both ends included, rising) are all that this bookie should have."""
        ...


class Assignments(Protocol):
    """What metadata says about who has which entries. Injected: the records are the ledger client's."""

    async def unassigned(self, ledger_id: int) -> Unassigned | None:
        """Reads the record. None: nothing is certain to be another bookie's. Raises MagnetarError if that is not known."""
        ...

    async def assigned(self, ledger_id: int) -> Assigned | None:
        """Of a ledger that exists; it may give this bookie nothing. Raises MagnetarError if that is not known."""
        ...

    def assigned_below(self, ledger_id: int) -> AsyncIterator[Assigned]:
        """Every ledger with a lower id whose record names this bookie. Raises MagnetarError if not all can be read."""
        ...

    async def confirm(self, found: Any) -> bool:
        """Of what `unassigned` returned: raises the version of the record; False if it has changed since it was read."""
        ...


class Leftovers:
    """One pass over the ledgers of a bookie at a time, see the module."""

    def __init__(self, logs: EntryLogs, index: LocationIndex, assignments: Assignments) -> None:
        self.dropped_entries = 0
        # Ledgers of which nothing is left here but their state, as of the last pass.
        self.emptied: dict[int, None] = {}
        self._logs = logs
        self._index = index
        self._assignments = assignments

    async def drop(self, ledger_ids: Sequence[int]) -> int:
        """Returns how many entries were dropped; the index is not flushed yet. Raises MagnetarError, IndexFailed."""
        before = self.dropped_entries
        # Step 1. Log ids are never used twice, so these name the same bytes for ever.
        closed = frozenset(info.log_id for info in self._logs.logs() if not info.current)
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
            if found is not None and not self._index.list_locations(ledger_id, count=1):
                self.emptied[ledger_id] = None
        return self.dropped_entries - before

    def _locations(
        self, found: Unassigned, closed: frozenset[int]
    ) -> Iterator[list[tuple[int, int, Location, Location | None]]]:
        """What is to be dropped, in batches for `replace_locations`; an empty one gives the loop a turn."""
        for first, last in found.ranges:
            after = first - 1
            while rows := self._index.list_locations(found.ledger_id, after, BATCH_ENTRIES):
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
                self.dropped_entries += self._index.replace_locations(batch)
            await asyncio.sleep(0)


class UnknownLedgers:
    """One pass; the collector runs it beside `leftovers`."""

    def __init__(
        self,
        ledgers: LedgerDescriptors,
        index: LocationIndex,
        damage: Damage,
        assignments: Assignments,
        fencing: Fencing,
        checkpoint: Callable[[], Awaitable[None]],
    ) -> None:
        self._ledgers = ledgers
        self._index = index
        self._damage = damage
        self._assignments = assignments
        self._fencing = fencing
        self._checkpoint = checkpoint

    async def settle(self, marked: Sequence[int]) -> int:
        """`marked`: ledgers that are. Returns how many are not any more. Raises MagnetarError: then nothing is believed."""
        ledgers = self._ledgers
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
        while rows := self._index.list_locations(assigned.ledger_id, after):
            for entry_id, _ in rows:
                entries.add(entry_id, entry_id)
            after = rows[-1][0]
            await asyncio.sleep(0)
        return assigned.whole(list(entries)) and not self._damage.has_any(assigned.ledger_id)
