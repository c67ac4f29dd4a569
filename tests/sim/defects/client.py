"""Defects of what writers and recoveries share: connections and placement."""

from __future__ import annotations

from typing import Any

from magnetar.ledger.bookie_connection import _Link
from magnetar.ledger.core.events import BookiesChosen
from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.ledger.placement.chooser import BookieChooser
from sim.defects.registry import defect


@defect
def hung_bookie_never_fails() -> None:
    """Rule 21: silence for longer than the add timeout is not a failure."""

    def ticked(self: Any) -> None:
        self._timer = None

    _Link._ticked = ticked  # type: ignore[method-assign]


@defect
def memory_grows_while_a_bookie_is_slow() -> None:
    """Pulsar #14861: with Qa < Qw adds are confirmed without the slow bookie, and wait for it without a bound."""
    link: Any = _Link
    begin = link.__init__

    def unbounded(self: Any, channel: Any) -> None:
        begin(self, channel)
        self._limit = 1 << 62

    link.__init__ = unbounded


@defect
def replacement_is_in_the_ensemble_already() -> None:
    """BookKeeper #2615: an invalid ensemble, one bookie at two positions."""
    chooser: Any = BookieChooser
    replacements = chooser.replacements

    def careless(self: Any, ask: Any, striping: Any) -> Any:
        chosen = replacements(self, ask, striping)
        failing = {ask.exclude[position] for position in ask.positions}
        left = [bookie for bookie in ask.exclude[: striping.ensemble_size] if bookie not in failing]
        if left and isinstance(chosen, BookiesChosen):
            return BookiesChosen(dict.fromkeys(chosen.bookies, left[0]))
        return chosen

    chooser.replacements = careless
    LedgerMetadata.check = lambda self: None  # type: ignore[method-assign]  # which is there for this
