"""Asks the placement policy on behalf of the ledger client: which bookies it may choose from, and how many it needs.

A ledger may be confined to the bookies of a group, or prefer them: its properties say so.
"""

from __future__ import annotations

import copy
import itertools
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from magnetar.ledger.core.degrade import degraded_striping, describe
from magnetar.ledger.core.events import BookiesChosen, ChooseBookies, NoBookies
from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.directory import BookieDirectory
from magnetar.ledger.health import BookieHealth
from magnetar.proto.errors import InvalidArgument, MagnetarError, NotEnoughBookies
from magnetar.proto.policies import PlacementGroup

from .policy import Candidates, Placement

_log = logging.getLogger(__name__)

# Bookies that are replaced in one ensemble so that it complies; more would be nearly a new one, for which a new ledger is
# cheaper.
_MOST_MOVES = 2
# Bookies whose refusal an error names.
_MOST_NAMED = 5
# The key in a ledger's properties; its value is the text of a PlacementGroup.
BOOKIE_GROUP_PROPERTY = "bookie_group"
_ANY_BOOKIE = PlacementGroup("", strict=False)
T = TypeVar("T")


class NewEnsemble(NamedTuple):
    """Of a new ledger. `degraded`: smaller than it was asked for."""

    striping: Striping
    bookies: tuple[str, ...]
    degraded: bool


class BookieChooser:
    """Of one ledger client."""

    def __init__(
        self,
        bookies: BookieDirectory,
        placement: Placement,
        health: BookieHealth,
        rng: random.Random,
        reset_backoff: Callable[[str], None],
    ) -> None:
        """`reset_backoff` is called with each bookie that a ledger will be written to."""
        self._bookies = bookies
        self._reset_backoff = reset_backoff
        self._placement = placement
        self._health = health
        self._rng = rng
        self._degraded: dict[str, None] = {}  # what was asked for, where the last ledger like it was smaller
        self._counts = {"degraded_ledgers_total": 0}
        self._group = _ANY_BOOKIE

    def of(self, properties: Mapping[str, str]) -> BookieChooser:
        """The chooser for a ledger with these properties: on the bookies of its group."""
        try:
            group = PlacementGroup.parse(properties.get(BOOKIE_GROUP_PROPERTY, ""))
        except (
            InvalidArgument
        ):  # what nobody can have meant: a property is text that anybody may have written
            group = _ANY_BOOKIE
        if group == self._group:
            return self
        other = copy.copy(self)  # shares all that changes
        other._group = group
        return other

    def ensemble(self, asked: Striping, minimum_write_quorum: int) -> NewEnsemble:
        """For a new ledger; `minimum_write_quorum`: see `core.degrade`; 0 refuses if there are too few. NotEnoughBookies."""
        writable, well = self._allowed(), self._well()
        # Bookies that just failed count at once: the end of their sessions, by which they leave the list, comes later.
        striping = degraded_striping(asked, len(well), minimum_write_quorum) or asked
        degraded = striping is not asked
        if len(writable) < striping.ensemble_size and minimum_write_quorum:
            raise NotEnoughBookies(
                f"{len(writable)} writable bookies are known ({', '.join(writable)}): too few for "
                f"ensemble_size={asked.ensemble_size}, and fewer than minimum_write_quorum={minimum_write_quorum}; start "
                "more" + self._limits()
            )
        bookies = self._ask(lambda candidates: self._placement.ensemble(striping, candidates, self._rng))
        if degraded:
            self._counts["degraded_ledgers_total"] += 1
            if describe(asked) not in self._degraded:
                self._degraded[describe(asked)] = None
                _log.warning(
                    "only %d bookies are writable (%s): new ledgers are %s instead of %s (E/Qw/Qa; minimum_write_quorum=%d)",
                    len(well),
                    ", ".join(well),
                    describe(striping),
                    describe(asked),
                    minimum_write_quorum,
                )
        elif self._degraded and describe(asked) in self._degraded:
            del self._degraded[describe(asked)]
            _log.info("there are bookies enough again: new ledgers are %s (E/Qw/Qa)", describe(asked))
        for bookie in bookies:
            self._reset_backoff(bookie)
        return NewEnsemble(striping, bookies, degraded)

    def can_place(self, striping: Striping) -> bool:
        """Whether a new ledger of this size could be made now. Draws nothing from the generator of the others."""
        if len(self._well()) < striping.ensemble_size:
            return False
        try:
            self._ask(lambda candidates: self._placement.ensemble(striping, candidates, random.Random(0)))
        except MagnetarError:
            return False
        return True

    def check(self, asked: Striping, minimum_write_quorum: int) -> None:
        """NotEnoughBookies if there were too few for a new ledger even if all that are known took entries."""
        bookies = self._bookies
        known: Sequence[str] = sorted({*bookies.writable(), *bookies.refusals()})
        if self._group.strict:
            known = self._members(known)
        striping = degraded_striping(asked, len(known), minimum_write_quorum) or asked
        try:
            candidates = Candidates(known, bookies.labels, bookies.free_bytes)
            self._placement.ensemble(striping, candidates, random.Random(0))
        except NotEnoughBookies as error:
            raise NotEnoughBookies(error.message + self._limits()) from None

    def replacements(self, ask: ChooseBookies) -> BookiesChosen | NoBookies:
        """What a core asks for; `exclude` begins with the ensemble, by position."""
        chooser, striping = self.of(ask.metadata.properties), ask.metadata.striping
        ensemble = ask.exclude[: striping.ensemble_size]
        try:
            chosen = chooser._ask(
                lambda candidates: self._placement.replacements(
                    striping, ask.positions, ensemble, candidates, ask.exclude, self._rng
                )
            )
        except MagnetarError as error:
            return NoBookies(error.message)
        for bookie in chosen.values():
            self._reset_backoff(bookie)
        return BookiesChosen(chosen)

    def _complies(self, striping: Striping, ensemble: Sequence[str]) -> bool:
        """Whether an ensemble is as the policy wants it, by the bookies that are writable now."""
        bookies, names = self._bookies, self._allowed()
        if self._group.name:
            inside = self._members(names)
            if len(inside) >= striping.ensemble_size:
                names = inside
                if len(self._members(ensemble)) < len(ensemble):
                    return False
        return self._placement.complies(
            striping, ensemble, Candidates(names, bookies.labels, bookies.free_bytes)
        )

    def compliant_replacements(
        self, metadata: LedgerMetadata, ensemble: Sequence[str], exclude: Sequence[str]
    ) -> dict[int, str]:
        """New bookies by position, after which the ensemble complies; none if it does, or if no few of them make it so."""
        chooser, striping = self.of(metadata.properties), metadata.striping
        if chooser._complies(striping, ensemble):
            return {}
        for moves in range(1, _MOST_MOVES + 1):
            for positions in itertools.combinations(range(len(ensemble)), moves):
                chosen = self.replacements(ChooseBookies(positions, tuple(exclude), metadata))
                if isinstance(chosen, BookiesChosen):
                    changed = [chosen.bookies.get(place, bookie) for place, bookie in enumerate(ensemble)]
                    if chooser._complies(striping, changed):
                        return dict(chosen.bookies)
        return {}

    def breaks_placement(self, metadata: LedgerMetadata) -> bool:
        """Whether a fragment that no writer writes to breaks placement although a choice that complies exists."""
        return any(
            fragment.last is not None
            and not fragment.empty
            and bool(self.compliant_replacements(metadata, fragment.bookies, fragment.bookies))
            for fragment in metadata.fragments()
        )

    def figures(self) -> dict[str, int]:
        """For /metrics."""
        return {
            "bookies_writable": len(self._bookies.writable()),
            **self._counts,
        }

    def _ask(self, question: Callable[[Candidates], T]) -> T:
        """Over the bookies that are well; where these are too few, over suspects and those in quarantine too."""
        bookies = self._bookies
        refusal: NotEnoughBookies | None = None
        for names in self._health.offers(self._allowed()):
            for some in self._preferred(names):
                try:
                    return question(Candidates(some, bookies.labels, bookies.free_bytes))
                except NotEnoughBookies as error:
                    refusal = error
        assert refusal is not None, "there is an offer at least"
        raise NotEnoughBookies(refusal.message + self._limits())

    def _allowed(self) -> Sequence[str]:
        """Writable bookies that the ledger may be on."""
        writable = self._bookies.writable()
        return self._members(writable) if self._group.strict else writable

    def _members(self, names: Sequence[str]) -> Sequence[str]:
        """Those of `names` that belong to the group."""
        return [name for name in names if self._bookies.labels(name).group == self._group.name]

    def _well(self) -> Sequence[str]:
        """Of these, those that did not just fail."""
        suspects = self._health.suspects()
        return [bookie for bookie in self._allowed() if bookie not in suspects]

    def _preferred(self, names: Sequence[str]) -> list[Sequence[str]]:
        """Those of the group, if it is preferred, then all."""
        if not self._group.name or self._group.strict:
            return [names]
        return [self._members(names), names]

    def _limits(self) -> str:
        """Why other bookies do not count."""
        if not self._group.strict:
            return self._refusals()
        return (
            f"; bookie_group={self._group.name} allows only bookies with the setting [bookie] group={self._group.name}: "
            "start such bookies, or change the policy" + self._refusals()
        )

    def _refusals(self) -> str:
        refusals = list(self._bookies.refusals().items())
        named = [f"; bookie {bookie} takes no entries: {reason}" for bookie, reason in refusals[:_MOST_NAMED]]
        more = len(refusals) - len(named)
        return "".join(named) + (f"; nor do {more} more" if more else "")
