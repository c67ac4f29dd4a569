"""Which entries of a closed ledger are a bookie's, and which are not: what its garbage collection asks.

It drops leftovers, and finds out when a bookie that lost something has all that it should have.

The rules that make this safe beside repairs are in `magnetar.bookie.gc.assignments`, whose seam `Assignments` this is; `cli`
wires them. Only a closed ledger is looked at: the ensembles of an open one, and what its recovery has copied, are still to
be written into its record.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import NotFoundInStore, VersionConflict

from .records import may_name, stored_records

_NO_END = (1 << 63) - 1


class UnassignedEntries(NamedTuple):
    """Ranges of entries that the record gives to other bookies, both ends included. `record`: value and version."""

    ledger_id: int
    ranges: Sequence[tuple[int, int]]
    record: tuple[bytes, int]


class AssignedEntries(NamedTuple):
    """What a record gives a bookie; see `magnetar.bookie.gc.assignments.Assigned`."""

    ledger_id: int
    metadata: LedgerMetadata
    bookie: str

    @property
    def closed(self) -> bool:
        """Whether the record is final."""
        return self.metadata.closed

    def gives(self, entry_id: int) -> bool:
        """By its write set; any entry of an open ledger may be the bookie's."""
        if not self.closed:
            return True
        bookies = self.metadata.ensemble_of(entry_id).bookies
        write_set = self.metadata.striping.write_set(entry_id)
        return entry_id <= self.metadata.last_entry and self.bookie in (bookies[at] for at in write_set)

    def whole(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Whether these entries are all that the record gives the bookie; False while it is open."""
        for fragment in self.metadata.fragments():
            if self.bookie not in fragment.bookies or fragment.empty:
                continue
            if fragment.last is None:
                return False
            stripe = self.metadata.striping.stripe_of((fragment.bookies.index(self.bookie),))
            following = fragment.first
            for first, last in (*ranges, (fragment.last + 1, fragment.last + 1)):
                if last < following:
                    continue
                until = min(first - 1, fragment.last)
                if any(map(stripe.holds, range(following, until + 1))):
                    return False
                following = max(following, last + 1)
                if following > fragment.last:
                    break
        return True


class StoredAssignments:
    """By the records in metadata, for one bookie. `bookie` may be set later than this is made, and before it is asked."""

    def __init__(self, ledgers: StoredLedgers, bookie: str) -> None:
        self._ledgers = ledgers
        self.bookie = bookie

    async def unassigned(self, ledger_id: int) -> UnassignedEntries | None:
        """None: the ledger is not closed, does not exist, or is all this bookie's. Raises what the store raises."""
        node = await self._ledgers.get(ledger_id)
        if node is None:
            return None  # deleted: garbage collection finds out by itself, and writes a tombstone
        metadata = LedgerMetadata.decode(node.value, ledger_id)
        ranges = ranges_of_others(metadata, self.bookie) if metadata.closed else []
        return UnassignedEntries(ledger_id, ranges, (node.value, node.version)) if ranges else None

    async def assigned(self, ledger_id: int) -> AssignedEntries | None:
        """None: there is no such ledger. Raises what the store raises."""
        node = await self._ledgers.get(ledger_id)
        if node is None:
            return None
        return AssignedEntries(ledger_id, LedgerMetadata.decode(node.value, ledger_id), self.bookie)

    async def assigned_below(self, ledger_id: int) -> AsyncIterator[AssignedEntries]:
        """Of the ledgers whose record names the bookie. Raises what the store raises, also for a record that is damaged."""
        names = (self.bookie.encode(),)
        async for group in stored_records(self._ledgers, below=ledger_id):
            for number, node in group:
                if may_name(node, names):
                    metadata = LedgerMetadata.decode(node.value, number)
                    if any(self.bookie in ensemble.bookies for ensemble in metadata.ensembles):
                        yield AssignedEntries(number, metadata, self.bookie)

    async def confirm(self, found: UnassignedEntries) -> bool:
        """Writes the record as it is under a new version: a repair that read the old one cannot write it any more."""
        value, version = found.record
        try:
            await self._ledgers.put(found.ledger_id, value, version=version)
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
    fragments = metadata.fragments()
    ends = [fragment.first - 1 for fragment in fragments[1:]] + [_NO_END]
    return [
        (fragment.first, end)
        for fragment, end in zip(fragments, ends, strict=True)
        if bookie not in fragment.bookies
    ]
