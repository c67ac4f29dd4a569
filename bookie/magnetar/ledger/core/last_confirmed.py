"""Reading the last-add-confirmed of an open ledger from its last ensemble (rule 13)."""

from __future__ import annotations

from magnetar.proto.errors import EntryNotFound, LedgerNotFound, QuorumLost, error_name
from magnetar.proto.ledger_entry import NO_ENTRY

from .metadata import Bookies
from .quorum import Striping

# "I know, and I have nothing" is knowledge; every other failure leaves the bookie unknown.
_KNOWN_CODES = frozenset((0, EntryNotFound.code, LedgerNotFound.code))


class LastConfirmedQuorum:
    """Collects the answers of an ensemble.

    >>> quorum = LastConfirmedQuorum(Striping(3, 3, 2), ("a", "b", "c"))
    >>> quorum.answered("b", 7, 0); quorum.covered
    False
    >>> quorum.answered("a", 5, 0); quorum.covered, quorum.last_add_confirmed
    (True, 7)
    """

    def __init__(self, striping: Striping, bookies: Bookies) -> None:
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
