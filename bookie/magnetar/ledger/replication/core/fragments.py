"""Fragments of a ledger: runs of entries that are on one ensemble, and which of them a position holds.

>>> from magnetar.ledger.core.quorum import Striping
>>> residues_of(Striping(3, 2, 2), (1,))      # entries 0, 1, 3, 4, 6, 7... are on position 1
3
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from magnetar.ledger.core.metadata import Bookies, LedgerMetadata
from magnetar.ledger.core.quorum import Striping


class Fragment(NamedTuple):
    """Entries `first` to `last`, both included. `last` is None in the last fragment of a ledger that is not closed."""

    first: int
    last: int | None
    bookies: Bookies

    @property
    def empty(self) -> bool:
        """Whether it is certain that it has no entries, and never will."""
        return self.last is not None and self.last < self.first


def fragments_of(metadata: LedgerMetadata) -> list[Fragment]:
    """All fragments, in order of their entries. The last one of a closed ledger may be empty."""
    ends: list[int | None] = [ensemble.first_entry - 1 for ensemble in metadata.ensembles[1:]]
    ends.append(metadata.last_entry if metadata.closed else None)
    return [
        # A ledger can be closed below an ensemble that was recorded before: then entries end in an earlier one.
        Fragment(
            ensemble.first_entry,
            min(end, metadata.last_entry) if end is not None and metadata.closed else end,
            ensemble.bookies,
        )
        for ensemble, end in zip(metadata.ensembles, ends, strict=True)
    ]


def residues_of(striping: Striping, positions: Iterable[int]) -> int:
    """Bits of the residues `entry id % E` whose write sets have one of the positions."""
    wanted = sum(1 << position for position in positions)
    return sum(1 << residue for residue, mask in enumerate(striping.masks) if mask & wanted)
