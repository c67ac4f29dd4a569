"""Rack-aware and zone-aware placement: the copies of an entry are not all behind one switch, or in one building.

Rack-aware: every write set (Qw neighbours in the round-robin ring) spans at least `placement_minimum_racks` racks, as far
as there are so many. A rack is named by zone and rack: `r1` of zone `a` is not `r1` of zone `b`. Zone-aware: every write set
spans min(Qw, zones) zones. A replacement keeps that for the write sets that it belongs to.

With `placement_strict` an ensemble that cannot be spread is refused, and so is a cluster with fewer racks or zones than the
minimum. Without it the policy takes what comes nearest, fewer labels first, then as many as a greedy choice finds, and says
so once.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.core.ring import arrange, spread_out
from magnetar.ledger.directory import Labels
from magnetar.ledger.settings import LedgerSettings
from magnetar.proto.errors import NotEnoughBookies

from .policy import Candidates, enough_for
from .random_placement import left_to_choose
from .weighting import Weighting

_log = logging.getLogger(__name__)


class Kind(NamedTuple):
    """What a policy spreads over."""

    name: str  # rack, zone: the value of `placement`, the setting of the bookie
    label: Callable[[Labels], str]  # "" if it is not known
    all_of_them: bool  # over as many as there are, or over the minimum only


RACK = Kind("rack", lambda labels: f"{labels.zone}/{labels.rack}" if labels.rack else "", False)
ZONE = Kind("zone", lambda labels: labels.zone, True)


class SpreadPlacement:
    """A Placement by labels. `minimum`: racks or zones that a write set spans if it has so many copies."""

    def __init__(self, kind: Kind, *, minimum: int, strict: bool, weighting: Weighting | None = None) -> None:
        self._kind = kind
        self._minimum = minimum
        self._strict = strict
        self._weighting = weighting or Weighting()
        self._fallen_back = False  # said so already, since it last was as it should be

    @classmethod
    def of(cls, settings: LedgerSettings, weighting: Weighting) -> SpreadPlacement:
        """As `placement` says, which is rack or zone."""
        kind = RACK if settings.placement == RACK.name else ZONE
        minimum = settings.placement_minimum_racks if kind is RACK else settings.placement_minimum_zones
        return cls(kind, minimum=minimum, strict=settings.placement_strict, weighting=weighting)

    def ensemble(self, striping: Striping, candidates: Candidates, rng: random.Random) -> tuple[str, ...]:
        if missing := enough_for(striping, candidates.names):
            raise NotEnoughBookies(missing)
        return self._arranged(striping, candidates, candidates.names, {}, rng)

    def replacements(
        self,
        striping: Striping,
        positions: Sequence[int],
        ensemble: Sequence[str],
        candidates: Candidates,
        exclude: Sequence[str],
        rng: random.Random,
    ) -> dict[int, str]:
        left = left_to_choose(positions, candidates, exclude)
        fixed = {
            position: (bookie, self._label(candidates, bookie))
            for position, bookie in enumerate(ensemble)
            if position not in positions
        }
        arranged = self._arranged(striping, candidates, left, fixed, rng)
        return {position: arranged[position] for position in positions}

    def complies(self, striping: Striping, ensemble: Sequence[str], candidates: Candidates) -> bool:
        """See Placement: every write set spans as many labels as there are among the bookies, or as are asked for."""
        quorum = striping.write_quorum
        known = dict.fromkeys(label for name in candidates.names if (label := self._label(candidates, name)))
        wanted = min(quorum, len(known)) if self._kind.all_of_them else min(quorum, self._minimum, len(known))
        labels = [self._label(candidates, bookie) for bookie in ensemble]
        return all(
            len(dict.fromkeys(labels[position] for position in write_set if labels[position])) >= wanted
            for write_set in striping.write_sets
        )

    def _label(self, candidates: Candidates, bookie: str) -> str:
        return self._kind.label(candidates.labels(bookie))

    def _arranged(
        self,
        striping: Striping,
        candidates: Candidates,
        names: Sequence[str],
        fixed: Mapping[int, tuple[str, str]],
        rng: random.Random,
    ) -> tuple[str, ...]:
        quorum = striping.write_quorum
        order = [
            (name, self._label(candidates, name)) for name in self._weighting.order(names, candidates, rng)
        ]
        known = dict.fromkeys(label for _, label in (*order, *fixed.values()) if label)
        wanted = min(quorum, len(known)) if self._kind.all_of_them else min(quorum, self._minimum, len(known))
        if self._strict:
            wanted = max(wanted, min(quorum, self._minimum))
            labelled = [(name, label) for name, label in order if label]
            found = None
            if len(labelled) + len(fixed) >= striping.ensemble_size:
                found = arrange(striping, labelled, wanted, fixed)
            if found is None:
                raise NotEnoughBookies(self._refusal(striping, order, wanted, bool(fixed)))
            return found
        for spread in range(wanted, 1, -1):
            found = arrange(striping, order, spread, fixed)
            if found is not None:
                self._spread_succeeded(striping, spread, order)
                return found
        self._spread_succeeded(striping, min(wanted, 1), order)
        return spread_out(striping, order, fixed)

    def _spread_succeeded(self, striping: Striping, spread: int, order: Sequence[tuple[str, str]]) -> None:
        """Says once that it does not, and once that it does again. `spread`: labels that every write set spans."""
        quorum = striping.write_quorum
        short = spread < min(quorum, self._minimum)
        if short and not self._fallen_back:
            _log.warning(
                "placement=%s: write sets of %d bookies cannot span %d %ss each, ledgers are placed as well as it goes; "
                "the bookies to choose from: %s (said once; placement_strict=true refuses instead)",
                self._kind.name,
                quorum,
                min(quorum, self._minimum),
                self._kind.name,
                _listed(order, self._kind.name),
            )
        elif self._fallen_back and not short:
            _log.info("placement=%s: write sets span enough %ss again", self._kind.name, self._kind.name)
        self._fallen_back = short

    def _refusal(
        self, striping: Striping, order: Sequence[tuple[str, str]], wanted: int, replacing: bool
    ) -> str:
        kind = self._kind.name
        what = "replacement" if replacing else f"ensemble of {striping.ensemble_size}"
        text = (
            f"placement={kind} with placement_strict=true finds no {what} in which every write set of "
            f"{striping.write_quorum} bookies spans {wanted} {kind}s; the bookies to choose from: {_listed(order, kind)}"
        )
        if any(not label for _, label in order):
            return f"{text}; give each bookie its {kind} in its settings ([bookie] {kind})"
        cure = f"; start bookies in more {kind}s"
        if striping.ensemble_size % striping.write_quorum:
            cure += ", make ensemble_size a multiple of write_quorum"
        return f"{text}{cure} or set placement_strict=false"


def _listed(order: Sequence[tuple[str, str]], kind: str) -> str:
    """`a: b1, b2; b: b3; no zone: b4`."""
    by_label: dict[str, list[str]] = {}
    for bookie, label in sorted(order, key=lambda item: (not item[1], item[1], item[0])):
        by_label.setdefault(label or f"no {kind}", []).append(bookie)
    return "; ".join(f"{label}: {', '.join(names)}" for label, names in by_label.items()) or "none"
