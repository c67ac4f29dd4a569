"""Which entries of a closed ledger are not a bookie's: what its garbage collection asks before it drops leftovers.

The rules that make this safe beside repairs are in `magnetar.bookie.gc.leftovers`, whose seam `Assignments` this is; `cli`
wires them. Only a closed ledger is looked at: the ensembles of an open one, and what its recovery has copied, are still to
be written into its record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.ledger.metadata_wait import metadata_in_time
from magnetar.metadata.ledgers import LedgerManager
from magnetar.metadata.store import Versioned
from magnetar.proto.errors import NotFoundInStore, VersionConflict

from .core.fragments import fragments_of

__all__ = ["StoredAssignments", "UnassignedEntries", "ranges_of_others"]

_NO_END = (1 << 63) - 1


class UnassignedEntries(NamedTuple):
    """Ranges of entries that the record gives to other bookies, both ends included. `record`: value and version."""

    ledger_id: int
    ranges: Sequence[tuple[int, int]]
    record: tuple[bytes, int]


class StoredAssignments:
    """By the records in metadata, for one bookie."""

    def __init__(self, ledgers: LedgerManager, bookie: str, timeout_s: float = 10.0) -> None:
        self._ledgers = ledgers
        self._bookie = bookie
        self._timeout_s = timeout_s

    async def unassigned(self, ledger_id: int) -> UnassignedEntries | None:
        """None: the ledger is not closed, does not exist, or is all this bookie's. Raises what the store raises."""
        node = await self._read(ledger_id)
        if node is None:
            return None  # deleted: garbage collection finds out by itself, and writes a tombstone
        metadata = LedgerMetadata.decode(node.value, ledger_id)
        ranges = ranges_of_others(metadata, self._bookie) if metadata.closed else []
        return UnassignedEntries(ledger_id, ranges, (node.value, node.version)) if ranges else None

    async def ours(self, ledger_id: int) -> Callable[[int], bool]:
        """By the write sets of a closed ledger; any entry of another one may be. Raises what the store raises."""
        node = await self._read(ledger_id)
        metadata = None if node is None else LedgerMetadata.decode(node.value, ledger_id)

        def ours(entry_id: int) -> bool:
            if metadata is None or not metadata.closed:
                return True
            bookies = metadata.ensemble_of(entry_id).bookies
            write_set = metadata.striping.write_set(entry_id)
            return entry_id <= metadata.last_entry and self._bookie in (bookies[at] for at in write_set)

        return ours

    async def _read(self, ledger_id: int) -> Versioned | None:
        return await metadata_in_time(self._ledgers.get(ledger_id), self._timeout_s, "whose entries are here")

    async def confirm(self, found: UnassignedEntries) -> bool:
        """Writes the record as it is under a new version: a repair that read the old one cannot write it any more."""
        value, version = found.record
        put = self._ledgers.put(found.ledger_id, value, version=version)
        try:
            await metadata_in_time(put, self._timeout_s, "dropping entries of other bookies")
        except (VersionConflict, NotFoundInStore):
            return False
        return True


def ranges_of_others(metadata: LedgerMetadata, bookie: str) -> list[tuple[int, int]]:
    """Entries of fragments that do not name the bookie. What a closed ledger has no entries for counts as well.

    >>> from magnetar.ledger.core.quorum import Striping
    >>> open_ledger = LedgerMetadata.create(Striping(2, 2, 2), ("a", "b"), 0, {}).with_ensemble(10, ("c", "b"))
    >>> ranges_of_others(open_ledger.close(19, 100), "a") == [(10, 9223372036854775807)]
    True
    """
    fragments = fragments_of(metadata)
    ends = [fragment.first - 1 for fragment in fragments[1:]] + [_NO_END]
    return [
        (fragment.first, end)
        for fragment, end in zip(fragments, ends, strict=True)
        if bookie not in fragment.bookies
    ]
