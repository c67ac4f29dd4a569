"""Quorum arithmetic: which bookies hold an entry, when it is confirmed, when enough of them have answered.

E bookies make the ensemble, an entry is written to Qw of them (its write set, round robin) and confirmed by Qa answers:

>>> striping = Striping(5, 3, 2)
>>> striping.write_set(4)
(4, 0, 1)
>>> bin(striping.mask(4))
'0b10011'
"""

from __future__ import annotations

from collections.abc import Iterable

from magnetar.proto.errors import InvalidSetting
from magnetar.proto.quorums import MAX_ENSEMBLE_SIZE, quorum_problem
from magnetar.proto.stripe import EVERY_ENTRY, Stripe


def check_quorums(ensemble_size: int, write_quorum: int, ack_quorum: int) -> None:
    """Raises InvalidSetting unless 1 <= Qa <= Qw <= E <= 64."""
    if problem := quorum_problem(ensemble_size, write_quorum, ack_quorum):
        raise InvalidSetting(
            f"ensemble_size={ensemble_size}, write_quorum={write_quorum}, ack_quorum={ack_quorum} do not fit "
            f"(1 <= ack_quorum <= write_quorum <= ensemble_size <= {MAX_ENSEMBLE_SIZE}): {problem}"
        )


class Striping:
    """Positions in the ensemble by entry id. Tables of E rows, because this is asked for every entry."""

    __slots__ = ("ack_quorum", "cycle", "ensemble_size", "masks", "write_quorum", "write_sets")

    def __init__(self, ensemble_size: int, write_quorum: int, ack_quorum: int) -> None:
        check_quorums(ensemble_size, write_quorum, ack_quorum)
        self.ensemble_size = ensemble_size
        self.write_quorum = write_quorum
        self.ack_quorum = ack_quorum
        # What one bookie has of a ledger repeats every so many entries; 1: each bookie has every entry.
        self.cycle = 1 if ensemble_size == write_quorum else ensemble_size
        # Row `entry id % E` of both: the write set as positions, and as a bit mask over positions.
        self.write_sets: tuple[tuple[int, ...], ...] = tuple(
            tuple((start + step) % ensemble_size for step in range(write_quorum))
            for start in range(ensemble_size)
        )
        self.masks: tuple[int, ...] = tuple(
            sum(1 << position for position in write_set) for write_set in self.write_sets
        )

    def write_set(self, entry_id: int) -> tuple[int, ...]:
        """Positions that store the entry, the first one being where readers ask first."""
        return self.write_sets[entry_id % self.ensemble_size]

    def mask(self, entry_id: int) -> int:
        """The write set as bits."""
        return self.masks[entry_id % self.ensemble_size]

    def stripe_of(self, positions: Iterable[int]) -> Stripe:
        """The entries that one of the positions stores, at least.

        >>> Striping(3, 2, 2).stripe_of([1])  # entries 0, 1, 3, 4, 6, 7...
        Stripe(cycle=3, residues=3)
        """
        if self.cycle == 1:
            return EVERY_ENTRY
        wanted = sum(1 << position for position in positions)
        return Stripe(
            self.cycle, sum(1 << residue for residue, mask in enumerate(self.masks) if mask & wanted)
        )

    @property
    def negatives_for_absence(self) -> int:
        """Explicit "no such entry" answers that prove that the entry was never confirmed (rule 14)."""
        return self.write_quorum - self.ack_quorum + 1

    def covered(self, known: int) -> bool:
        """Whether the positions in `known` (bits) leave no write set with Qa positions that are not (rule 13).

        Then every entry that was confirmed, or can still be, has been seen by a known one.
        """
        return all((mask & ~known).bit_count() < self.ack_quorum for mask in self.masks)
