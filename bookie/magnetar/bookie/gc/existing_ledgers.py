"""Which ledgers were deleted: the seam between garbage collection and the metadata store, and the brake.

The order matters (rule 10): the caller lists the ledgers that it stores *before* it asks. A ledger is in the metadata before
its first entry is written, so one that was listed and is then not found has been deleted; asked the other way around, one
that was created between the two would look deleted.

    collector: [1, 2, 3] have entries here  ->  missing([1, 2, 3])  ->  metadata lists 1, 3  ->  was 2 really deleted? ->
    [2]

Nothing but an explicit answer counts: an error, a timeout, a name that this release does not know, the store of another
cluster all raise, and nothing is deleted.

The brake (rule 37) is what a metadata store that lost something must not be able to destroy:

    the store would give an id again that this bookie has held  ->  it was lost or is an old copy: nothing is deleted
    it misses more than `gc_max_deleted_ratio` of all ledgers   ->  so many are deleted, the rest in later rounds

A store that merely lost some records thus costs a small share of the ledgers before somebody reads the log. Deletions that
bookies are asked for directly are not affected: a round only finds what a bookie has missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from magnetar.metadata.ledgers import LEDGERS_PER_PAGE, StoredLedgers
from magnetar.metadata.paths import INSTANCE_PATH
from magnetar.metadata.store import MetadataStore
from magnetar.metadata.timed import TimedStore
from magnetar.proto.errors import DataDirectoryError

_log = logging.getLogger(__name__)
# A bookie with a few ledgers gets on, too.
LEAST_DELETED = 10


class ExistingLedgers(Protocol):
    """What garbage collection asks of metadata."""

    async def missing(self, ledger_ids: Sequence[int]) -> list[int]:
        """Those that were certainly deleted, in the order given. Raises MagnetarError when that is not known."""
        ...

    async def next_ledger_id(self) -> int:
        """The id that the next ledger would get. Raises MagnetarError when that is not known."""
        ...


class MetadataLedgers:
    """Over the metadata store: one list for each page of ledgers, then a second look at each that the list does not have.

    `cluster` is the store's instance as the bookie's cookie has it (0: not known, not checked): in a store that was emptied,
    or in another cluster's, every ledger would look deleted.
    """

    def __init__(self, metadata: MetadataStore, *, cluster: int = 0, timeout_s: float = 30.0) -> None:
        self._metadata = TimedStore(metadata, timeout_s)
        self._ledgers = StoredLedgers(self._metadata)
        self._cluster = cluster

    async def missing(self, ledger_ids: Sequence[int]) -> list[int]:
        """See ExistingLedgers. RequestTimeout when the store is silent; whatever it raises itself."""
        if self._cluster:
            await self._check_cluster()
        # Only asked, never iterated over.
        starts = frozenset(await self._ledgers.page_starts())
        deleted: list[int] = []
        start, existing = -1, frozenset[int]()
        for ledger_id in ledger_ids:
            if ledger_id - ledger_id % LEDGERS_PER_PAGE != start:
                start = ledger_id - ledger_id % LEDGERS_PER_PAGE
                existing = frozenset(await self._ledgers.page(start) if start in starts else ())
                await asyncio.sleep(0)
            if ledger_id not in existing and await self._ledgers.get(ledger_id) is None:
                deleted.append(ledger_id)
        return deleted

    async def next_ledger_id(self) -> int:
        """See ExistingLedgers, and `missing`."""
        return await self._ledgers.next_id()

    async def _check_cluster(self) -> None:
        node = await self._metadata.get(INSTANCE_PATH)
        found = 0 if node is None else int.from_bytes(node.value, "big")
        if found != self._cluster:
            raise DataDirectoryError(
                f"the metadata store has the instance {found:016x}, this bookie's cookie names {self._cluster:016x}; "
                "nothing is deleted by what another cluster's metadata says: connect the bookie to its own store",
                found=found,
                expected=self._cluster,
            )


async def deleted_ledgers(
    existing: ExistingLedgers, local: Sequence[int], held: int, max_ratio: float
) -> list[int]:
    """Those of the `local` ledgers that are to be deleted in this round. Raises MagnetarError when nothing is known.

    `held`: this bookie knows that all lower ids were used. `max_ratio`: of all ledgers, at most this part is deleted.
    """
    next_id = await existing.next_ledger_id()
    if next_id < held:
        raise DataDirectoryError(
            f"this bookie knows that the ledger ids below {held} were used, and the metadata store would give the id "
            f"{next_id} to its next ledger: it was restored from an older copy, or lost. Nothing is deleted by what it does "
            "not know; restore its newest copy",
            held=held,
            next_ledger_id=next_id,
        )
    missing = await existing.missing(local)
    most = max(LEAST_DELETED, int(len(local) * max_ratio))
    if len(missing) > most:
        _log.warning(
            "the metadata store does not list %d of the %d ledgers of this bookie; %d of them are deleted now, the others "
            "in later rounds (gc_max_deleted_ratio=%g). If these ledgers were not deleted on purpose, stop the bookie, and "
            "restore the metadata store",
            len(missing),
            len(local),
            most,
            max_ratio,
        )
    return missing[:most]
