"""A pass over the records of all ledgers: queues those whose copies are missing, must move, or break placement.

It reads pages of ids and a few records at a time, so its memory does not depend on the number of ledgers, and it gives the
loop a turn after each of these groups (2 ms). What cannot be decoded is counted and logged, and costs itself only.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import NamedTuple

from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.metadata.ledgers import StoredLedgers, ledger_path
from magnetar.metadata.store import Versioned
from magnetar.proto.errors import InvalidArgument, MagnetarError
from magnetar.runtime.clock import Clock

from .core.fragments import fragments_of
from .core.request import Reason, Request
from .queue import RepairQueue

_log = logging.getLogger(__name__)
# Records that are read together: over a network the time of one, in the embedded store 10 us each.
_READS = 50
_MAX_LOGGED = 20


class PassFound(NamedTuple):
    """What a pass has done so far."""

    ledgers: int = 0
    queued: int = 0
    unreadable: int = 0


class LedgerAudit:
    """Runs passes; `found` is the one that runs or ran last."""

    def __init__(self, ledgers: StoredLedgers, queue: RepairQueue, clock: Clock) -> None:
        self.found = PassFound()
        self._ledgers = ledgers
        self._queue = queue
        self._clock = clock

    async def run(
        self,
        replaced: Mapping[str, Reason],
        *,
        registered: Callable[[], Mapping[str, None]] | None = None,
        violates: Callable[[LedgerMetadata], bool] | None = None,
    ) -> PassFound:
        """Queues the ledgers that name one of the bookies `replaced`, for the reason given.

        With `registered` also those that name a bookie that is not; with `violates` also those that break placement.
        Raises what the store raises: the pass is to be repeated then, and queues nothing twice.
        """
        self.found = PassFound()
        # A record names its bookies in plain bytes: most of a million need not be decoded to see that they name another.
        names = tuple(bookie.encode() for bookie in replaced)
        decode_all = registered is not None or violates is not None
        for start in await self._ledgers.page_starts():
            page = await self._ledgers.page(start)
            await asyncio.sleep(0)
            for at in range(0, len(page), _READS):
                some = page[at : at + _READS]
                records = await asyncio.gather(*map(self._ledgers.get, some))
                for ledger_id, node in zip(some, records, strict=True):
                    if node is None or not (decode_all or any(name in node.value for name in names)):
                        continue  # deleted meanwhile, or of no interest
                    await self._look(ledger_id, node, replaced, registered, violates)
                self.found = self.found._replace(ledgers=self.found.ledgers + len(some))
                await asyncio.sleep(0)
        return self.found

    async def _look(
        self,
        ledger_id: int,
        node: Versioned,
        replaced: Mapping[str, Reason],
        registered: Callable[[], Mapping[str, None]] | None,
        violates: Callable[[LedgerMetadata], bool] | None,
    ) -> None:
        try:
            metadata = LedgerMetadata.decode(node.value, ledger_id)
        except MagnetarError as error:
            self._unreadable(ledger_id, error)
            return
        there = None if registered is None else registered()
        request = request_for(metadata, replaced, there, violates is not None and violates(metadata))
        if request is not None:
            request_now = Request(request.bookies, request.placement, self._clock.now_ms())
            try:
                if await self._queue.add(ledger_id, request_now):
                    self.found = self.found._replace(queued=self.found.queued + 1)
            except InvalidArgument as error:  # its node of the queue: other ledgers go on
                self._unreadable(ledger_id, error)

    def _unreadable(self, ledger_id: int, error: MagnetarError) -> None:
        if self.found.unreadable < _MAX_LOGGED:
            _log.error("%s: the ledger cannot be audited: %s", ledger_path(ledger_id), error)
        self.found = self.found._replace(unreadable=self.found.unreadable + 1)


def request_for(
    metadata: LedgerMetadata,
    replaced: Mapping[str, Reason],
    registered: Mapping[str, None] | None,
    violates: bool,
) -> Request | None:
    """What has to be asked for this ledger; None: nothing. `registered`: of a full check."""
    bookies: dict[str, Reason] = {}
    fragments = fragments_of(metadata)
    if registered is not None:
        # A writer replaces a bookie that fails from LAC+1 on: up to there it may lack entries that Qa others have.
        for fragment, following in itertools.pairwise(fragments):
            for bookie in fragment.bookies:
                if bookie not in following.bookies and bookie in registered:
                    bookies[bookie] = Reason.CHECK
    for fragment in fragments:
        for bookie in fragment.bookies:
            reason = replaced.get(bookie)
            if reason is None and registered is not None and bookie not in registered:
                reason = Reason.LOST
            # A fragment without entries lacks nothing; only a drained bookie must leave it.
            if reason is not None and not (fragment.empty and reason is not Reason.DRAINING):
                bookies[bookie] = reason
    return Request(bookies, violates) if bookies or violates else None


async def records_naming(
    ledgers: StoredLedgers, bookies: Collection[str], *, decode_all: bool = False
) -> AsyncIterator[tuple[int, LedgerMetadata | InvalidArgument]]:
    """Ids and records of the ledgers that name one of the bookies, ids rising.

    A record that cannot be read counts as naming them: in its place is an error with its path. `decode_all` finds also
    those whose bytes do not show a name of a bookie.
    """
    names = tuple(bookie.encode() for bookie in bookies)
    async for page in ledgers.pages():
        for at in range(0, len(page), _READS):
            some = page[at : at + _READS]
            nodes = await asyncio.gather(*(ledgers.get(ledger_id) for ledger_id in some))
            for ledger_id, node in zip(some, nodes, strict=True):
                if node is None or not (decode_all or any(name in node.value for name in names)):
                    continue
                try:
                    metadata = LedgerMetadata.decode(node.value, ledger_id)
                except MagnetarError as error:
                    yield ledger_id, InvalidArgument(f"{ledger_path(ledger_id)} cannot be read: {error}")
                    continue
                if any(bookie in ensemble.bookies for ensemble in metadata.ensembles for bookie in bookies):
                    yield ledger_id, metadata
            await asyncio.sleep(0)
