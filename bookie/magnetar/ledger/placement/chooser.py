"""Asks the placement policy on behalf of the ledger client: which bookies it may choose from, and how many it needs."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from magnetar.ledger.core.degrade import degraded_striping, describe
from magnetar.ledger.core.events import BookiesChosen, ChooseBookies, NoBookies
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.directory import BookieDirectory
from magnetar.ledger.health import BookieHealth
from magnetar.proto.errors import MagnetarError, NotEnoughBookies

from .policy import Candidates, Placement

_log = logging.getLogger(__name__)

# Bookies whose refusal an error names.
_MOST_NAMED = 5
T = TypeVar("T")


class NewEnsemble(NamedTuple):
    """Of a new ledger. `degraded`: smaller than it was asked for."""

    striping: Striping
    bookies: tuple[str, ...]
    degraded: bool


class BookieChooser:
    """`minimum_write_quorum`: see `core.degrade`; 0 refuses when there are too few."""

    def __init__(
        self,
        bookies: BookieDirectory,
        placement: Placement,
        health: BookieHealth,
        minimum_write_quorum: int,
        rng: random.Random,
        expect: Callable[[str], None],
    ) -> None:
        """`expect` is called with each bookie that a ledger will be written to."""
        self._bookies = bookies
        self._expect = expect
        self._placement = placement
        self._health = health
        self._minimum = minimum_write_quorum
        self._rng = rng
        self._degraded = False  # the last new ledger was
        self._degraded_ledgers = 0

    def ensemble(self, asked: Striping) -> NewEnsemble:
        """For a new ledger. NotEnoughBookies."""
        writable = self._bookies.writable()
        striping = degraded_striping(asked, len(writable), self._minimum) or asked
        degraded = striping is not asked
        if len(writable) < striping.ensemble_size and self._minimum:
            raise NotEnoughBookies(
                f"{len(writable)} writable bookies are known ({', '.join(writable)}): too few for "
                f"ensemble_size={asked.ensemble_size}, and fewer than minimum_write_quorum={self._minimum}; start more"
                + self._refusals()
            )
        bookies = self._ask(lambda candidates: self._placement.ensemble(striping, candidates, self._rng))
        if degraded:
            self._degraded_ledgers += 1
            if not self._degraded:
                _log.warning(
                    "only %d bookies are writable (%s): new ledgers are %s instead of %s (E/Qw/Qa; minimum_write_quorum=%d)",
                    len(writable),
                    ", ".join(writable),
                    describe(striping),
                    describe(asked),
                    self._minimum,
                )
        elif self._degraded:
            _log.info("there are bookies enough again: new ledgers are %s (E/Qw/Qa)", describe(asked))
        self._degraded = degraded
        for bookie in bookies:
            self._expect(bookie)
        return NewEnsemble(striping, bookies, degraded)

    def can_place(self, striping: Striping) -> bool:
        """Whether a new ledger of this size could be made now. Draws nothing from the generator of the others."""
        if len(self._bookies.writable()) < striping.ensemble_size:
            return False
        try:
            self._ask(lambda candidates: self._placement.ensemble(striping, candidates, random.Random(0)))
        except MagnetarError:
            return False
        return True

    def replacements(self, ask: ChooseBookies, striping: Striping) -> BookiesChosen | NoBookies:
        """What a core asks for; `exclude` begins with the ensemble, by position."""
        ensemble = ask.exclude[: striping.ensemble_size]
        try:
            chosen = self._ask(
                lambda candidates: self._placement.replacements(
                    striping, ask.positions, ensemble, candidates, ask.exclude, self._rng
                )
            )
        except MagnetarError as error:
            return NoBookies(error.message)
        for bookie in chosen.values():
            self._expect(bookie)
        return BookiesChosen(chosen)

    def complies(self, striping: Striping, ensemble: Sequence[str]) -> bool:
        """Whether an ensemble is as the policy wants it, by the bookies that are writable now."""
        bookies = self._bookies
        candidates = Candidates(bookies.writable(), bookies.labels, bookies.free_bytes)
        return self._placement.complies(striping, ensemble, candidates)

    def figures(self) -> dict[str, int]:
        """For /metrics."""
        return {
            "bookies_writable": len(self._bookies.writable()),
            "degraded_ledgers_total": self._degraded_ledgers,
        }

    def _ask(self, question: Callable[[Candidates], T]) -> T:
        """Over the bookies that are well; where these are too few, over suspects and those in quarantine too."""
        bookies = self._bookies
        refusal: NotEnoughBookies | None = None
        for names in self._health.offers(bookies.writable()):
            try:
                return question(Candidates(names, bookies.labels, bookies.free_bytes))
            except NotEnoughBookies as error:
                refusal = error
        assert refusal is not None, "there is an offer at least"
        raise NotEnoughBookies(refusal.message + self._refusals())

    def _refusals(self) -> str:
        refusals = list(self._bookies.refusals().items())
        named = [f"; bookie {bookie} takes no entries: {reason}" for bookie, reason in refusals[:_MOST_NAMED]]
        more = len(refusals) - len(named)
        return "".join(named) + (f"; nor do {more} more" if more else "")
