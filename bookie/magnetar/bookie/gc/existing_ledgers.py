"""Which ledgers were deleted: the seam between garbage collection and the metadata store.

The order matters (rule 10): the caller lists the ledgers that it stores *before* it asks. A ledger is in the metadata before
its first entry is written, so one that was listed and is then not found has been deleted; asked the other way around, one
that was created between the two would look deleted.

    collector: [1, 2, 3] have entries here  ->  missing([1, 2, 3])  ->  metadata lists 1, 3, 7  ->  was 2 really deleted? ->
    [2]

Nothing but an explicit answer counts: an error, a timeout, a name that this release does not know, the store of another
cluster all raise, and nothing is deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from magnetar.metadata.paths import INSTANCE_PATH, LEDGERS_PATH, ledger_of_name, ledger_path
from magnetar.metadata.store import MetadataStore
from magnetar.proto.errors import DataDirectoryError, FinalError, RequestTimeout

__all__ = ["ExistingLedgers", "MetadataLedgers"]

# 500 names are parsed and looked up in 0.2 ms of the loop.
_SLICE = 500


class ExistingLedgers(Protocol):
    """What garbage collection asks of metadata."""

    async def missing(self, ledger_ids: Sequence[int]) -> list[int]:
        """Those that were certainly deleted, in the order given. Raises MagnetarError when that is not known."""
        ...


class MetadataLedgers:
    """Over the metadata store: one listing for all, then a second look at each that the listing does not have.

    `cluster` is the store's instance as the bookie's cookie has it (0: not known, not checked): in a store that was emptied,
    or in another cluster's, every ledger would look deleted.
    """

    def __init__(self, metadata: MetadataStore, *, cluster: int = 0, timeout_s: float = 30.0) -> None:
        self._metadata = metadata
        self._cluster = cluster
        self._timeout_s = timeout_s

    async def missing(self, ledger_ids: Sequence[int]) -> list[int]:
        """See ExistingLedgers. RequestTimeout when the store is silent; whatever it raises itself."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._missing(ledger_ids)
        except TimeoutError:
            raise RequestTimeout(
                f"the metadata store did not list its ledgers within {self._timeout_s:g} s; no ledger is taken for deleted"
            ) from None

    async def _missing(self, ledger_ids: Sequence[int]) -> list[int]:
        if self._cluster:
            await self._check_cluster()
        names = await self._metadata.children(LEDGERS_PATH)
        existing: set[int] = set()  # only asked, never iterated over
        for start in range(0, len(names), _SLICE):
            existing.update(_ledger(name) for name in names[start : start + _SLICE])
            await asyncio.sleep(0)
        deleted: list[int] = []
        for number, ledger_id in enumerate(ledger_ids):
            if ledger_id not in existing and await self._metadata.get(ledger_path(ledger_id)) is None:
                deleted.append(ledger_id)
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
        return deleted

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


def _ledger(name: str) -> int:
    ledger_id = ledger_of_name(name)
    if ledger_id is None:
        raise FinalError(
            f"{LEDGERS_PATH}/{name} is not a name that this release gives to a ledger; nothing is deleted "
            "by metadata that a later release wrote: upgrade this bookie"
        )
    return ledger_id
