"""Quorum arithmetic: which bookies hold an entry, when it is confirmed, when enough have said how far a ledger goes.

E bookies make the ensemble, an entry is written to Qw of them (its write set, round robin) and confirmed by Qa answers:

>>> striping = Striping(5, 3, 2)
>>> striping.write_set(4)
(4, 0, 1)
>>> bin(striping.mask(4))
'0b10011'
"""

from __future__ import annotations

from collections.abc import Iterable

from magnetar.proto.errors import EntryNotFound, InvalidSetting, LedgerNotFound, QuorumLost, error_name
from magnetar.proto.ledger_entry import NO_ENTRY
from magnetar.proto.quorums import MAX_ENSEMBLE_SIZE, quorum_problem
from magnetar.proto.stripe import EVERY_ENTRY, Stripe

# "I know, and I have nothing" is knowledge; every other failure leaves the bookie unknown.
_KNOWN_CODES = frozenset((0, EntryNotFound.code, LedgerNotFound.code))


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


class LastConfirmedQuorum:
    """Collects what the last ensemble of an open ledger says of its last-add-confirmed (rule 13).

    >>> quorum = LastConfirmedQuorum(Striping(3, 3, 2), ("a", "b", "c"))
    >>> quorum.answered("b", 7, 0); quorum.covered
    False
    >>> quorum.answered("a", 5, 0); quorum.covered, quorum.last_add_confirmed
    (True, 7)
    """

    def __init__(self, striping: Striping, bookies: tuple[str, ...]) -> None:
        self._striping = striping
        self._bookies = bookies
        self._known = 0  # bits of positions
        self._unknown: dict[str, int] = {}  # bookie -> error code
        self.last_add_confirmed = NO_ENTRY  # highest one in the answers

    def answered(self, bookie: str, last_add_confirmed: int, code: int) -> None:
        """Takes one bookie's answer; of one that is not in the ensemble it is an answer to an earlier question."""
        if bookie not in self._bookies:
            return
        if code not in _KNOWN_CODES:
            self._unknown[bookie] = code
            return
        self._unknown.pop(bookie, None)
        self._known |= 1 << self._bookies.index(bookie)
        if code == 0:
            self.last_add_confirmed = max(self.last_add_confirmed, last_add_confirmed)

    @property
    def covered(self) -> bool:
        """Whether enough have answered."""
        return self._striping.covered(self._known)

    @property
    def complete(self) -> bool:
        """Whether all have answered."""
        return self._known.bit_count() + len(self._unknown) >= len(self._bookies)

    @property
    def silent(self) -> tuple[str, ...]:
        """Bookies that have not answered, or not with what they know."""
        return tuple(b for position, b in enumerate(self._bookies) if not self._known & 1 << position)

    def lost(self, ledger_id: int) -> QuorumLost:
        """The error when all have answered and that does not cover the ensemble."""
        failed = ", ".join(f"{bookie} ({error_name(code)})" for bookie, code in self._unknown.items())
        return QuorumLost(
            f"the end of ledger {ledger_id} is not known: too few of its bookies answered, {failed} did not; bring them "
            f"back and try again; `magnetar cluster recover-ledger {ledger_id}` shows what is known",
            ledger_id=ledger_id,
        )
