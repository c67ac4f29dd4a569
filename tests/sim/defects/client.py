"""Defects of what writers and recoveries share: connections and placement."""

from __future__ import annotations

import contextlib
from typing import Any

from magnetar.ledger.core.events import BookiesChosen
from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.ledger.core.outstanding_adds import OutstandingAdds, Waited
from magnetar.ledger.identities import StoredIdentities
from magnetar.ledger.placement.chooser import BookieChooser
from magnetar.metadata.identity import register_cookie, registered_cookie
from magnetar.proto.bookie_identity import NOT_KNOWN, BookieIdentity
from magnetar.proto.errors import MagnetarError
from sim.defects.registry import defect


@defect
def hung_bookie_never_fails() -> None:
    """Rule 21: silence for longer than the add timeout is not a failure."""

    OutstandingAdds.tick = lambda self: Waited.IN_TIME  # type: ignore[method-assign]


@defect
def bookies_are_not_asked_who_they_are() -> None:
    """Rule 35: who answers at a bookie's address is the bookie."""

    async def expected(self: Any, bookie: str) -> BookieIdentity:
        return NOT_KNOWN

    async def verify(self: Any, bookie: str, expected: Any, found: Any) -> bool:
        await registered(self._store, bookie, expected, found)
        return True

    async def registered(store: Any, bookie: str, expected: Any, found: Any) -> None:
        """So that the faults begin which need a bookie that was met."""
        with contextlib.suppress(MagnetarError):
            known = await registered_cookie(store, bookie)
            await register_cookie(store, bookie, known.identity, found)

    StoredIdentities.expected = expected  # type: ignore[method-assign]
    StoredIdentities.verify = verify  # type: ignore[method-assign]


@defect
def memory_grows_while_a_bookie_is_slow() -> None:
    """Pulsar #14861: with Qa < Qw adds are confirmed without the slow bookie, and wait for it without a bound."""
    adds: Any = OutstandingAdds
    begin = adds.__init__

    def unbounded(self: Any, limit_bytes: int) -> None:
        begin(self, 1 << 62)

    adds.__init__ = unbounded


@defect
def replacement_is_in_the_ensemble_already() -> None:
    """BookKeeper #2615: an invalid ensemble, one bookie at two positions."""
    chooser: Any = BookieChooser
    replacements = chooser.replacements

    def careless(self: Any, ask: Any) -> Any:
        chosen = replacements(self, ask)
        failing = {ask.exclude[position] for position in ask.positions}
        left = [bookie for bookie in ask.exclude[: ask.metadata.ensemble_size] if bookie not in failing]
        if left and isinstance(chosen, BookiesChosen):
            return BookiesChosen(dict.fromkeys(chosen.bookies, left[0]))
        return chosen

    chooser.replacements = careless
    LedgerMetadata.check = lambda self: None  # type: ignore[method-assign]  # which is there for this
