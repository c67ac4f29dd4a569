"""The placement policy: the bookies of a new ledger, and replacements, from the bookies known at that moment.

Random: all writable bookies are alike. Rack-aware and zone-aware: the copies of an entry are not all behind one switch, or
in one building. Rack-aware: every write set (Qw neighbours in the round-robin ring) spans at least
`placement_minimum_racks` racks, as far as there are so many. A rack is named by zone and rack: `r1` of zone `a` is not `r1`
of zone `b`. Zone-aware: every write set spans min(Qw, zones) zones. A replacement keeps that for the write sets that it
belongs to. Which bookies come first is decided by chance, or by chance in proportion to their free space.

With `placement_strict` an ensemble that cannot be spread is refused, and so is a cluster with fewer racks or zones than the
minimum. Without it the policy takes what comes nearest, fewer labels first, then as many as a greedy choice finds, and says
so once.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from magnetar.ledger.core.arrangement import arrange, spread_out
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.directory import Labels
from magnetar.ledger.settings import LedgerSettings
from magnetar.proto.errors import NotEnoughBookies

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Bookies to choose from, with the labels and the free space that they reported."""

    names: Sequence[str]  # writable ones, sorted, each once
    labels: Callable[[str], Labels]  # of any bookie, of an ensemble's others as well
    free_bytes: Callable[[str], int]  # 0: not known


class Kind(NamedTuple):
    """What a policy spreads over."""

    name: str  # random, rack, zone: the value of `placement`, and the setting of the bookie
    label: Callable[[Labels], str]  # "" if it is not known
    all_of_them: bool  # over as many as there are, or over the minimum only


RANDOM = Kind("random", lambda labels: "", False)
RACK = Kind("rack", lambda labels: f"{labels.zone}/{labels.rack}" if labels.rack else "", False)
ZONE = Kind("zone", lambda labels: labels.zone, True)


class Placement:
    """Chooses bookies by chance, and spreads their labels. Keeps no candidates for later.

    `minimum`: racks or zones that a write set spans if it has so many copies. `max_weight_ratio`: a bookie with much more
    free space than the median counts as having so many medians, no more (else a new, empty bookie would get all new ledgers,
    and be hot before it is full); 0: free space counts for nothing.
    """

    def __init__(
        self, kind: Kind, *, minimum: int = 0, strict: bool = False, max_weight_ratio: float = 0.0
    ) -> None:
        self._kind = kind
        self._minimum = minimum
        self._strict = strict
        self._max_weight_ratio = max_weight_ratio
        self._fallen_back = False  # said so already, since it last was as it should be

    @classmethod
    def of(cls, settings: LedgerSettings) -> Placement:
        """As the settings say."""
        kind, minimum = {
            "random": (RANDOM, 0),
            "rack": (RACK, settings.placement_minimum_racks),
            "zone": (ZONE, settings.placement_minimum_zones),
        }[settings.placement]
        ratio = settings.placement_max_weight_ratio if settings.placement_weighted else 0.0
        return cls(kind, minimum=minimum, strict=settings.placement_strict, max_weight_ratio=ratio)

    def ensemble(self, striping: Striping, candidates: Candidates, rng: random.Random) -> tuple[str, ...]:
        """The bookies of a new ledger, in the order of their positions. NotEnoughBookies says what is missing."""
        names = candidates.names
        if len(names) < striping.ensemble_size:
            raise NotEnoughBookies(
                f"a new ledger needs ensemble_size={striping.ensemble_size} writable bookies, {len(names)} are known "
                f"({', '.join(names)}); start more bookies or lower ensemble_size"
            )
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
        """A bookie for each of the positions of the ensemble, none of them in `exclude`. NotEnoughBookies."""
        left = [bookie for bookie in candidates.names if bookie not in exclude]
        if len(left) < len(positions):
            raise NotEnoughBookies(
                f"{len(left)} of the {len(candidates.names)} writable bookies are left to choose from"
            )
        fixed = {
            position: (bookie, self._label(candidates, bookie))
            for position, bookie in enumerate(ensemble)
            if position not in positions
        }
        arranged = self._arranged(striping, candidates, left, fixed, rng)
        return {position: arranged[position] for position in positions}

    def complies(self, striping: Striping, ensemble: Sequence[str], candidates: Candidates) -> bool:
        """Whether every write set spans as many labels as there are among the bookies, or as are asked for.

        Of lost bookies the last labels count.
        """
        wanted = self._wanted(striping, [self._label(candidates, name) for name in candidates.names])
        labels = [self._label(candidates, bookie) for bookie in ensemble]
        return all(
            len(dict.fromkeys(labels[position] for position in write_set if labels[position])) >= wanted
            for write_set in striping.write_sets
        )

    def _wanted(self, striping: Striping, labels: Sequence[str]) -> int:
        """Labels that each write set shall span, where bookies have these."""
        known = len(dict.fromkeys(label for label in labels if label))
        return min(striping.write_quorum, known if self._kind.all_of_them else min(self._minimum, known))

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
        order = [(name, self._label(candidates, name)) for name in self._drawn(names, candidates, rng)]
        wanted = self._wanted(striping, [label for _, label in (*order, *fixed.values())])
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

    def _drawn(self, names: Sequence[str], candidates: Candidates, rng: random.Random) -> list[str]:
        """All of `names`, drawn one after the other without putting back."""
        if not self._max_weight_ratio:
            return rng.sample(list(names), len(names))
        free_bytes = {name: candidates.free_bytes(name) for name in names}
        weights = capped_weights(free_bytes, self._max_weight_ratio)
        # Exponential variates with rate w: the first of them is each one's with probability w / sum of weights.
        drawn = [(-math.log(1.0 - rng.random()) / weights[name], name) for name in names]
        return [name for _, name in sorted(drawn)]

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


def capped_weights(free_bytes: Mapping[str, int], max_ratio: float) -> dict[str, float]:
    """Free bytes, at most `max_ratio` times their median; the median where they are not known (0). All above 0."""
    known = sorted(free for free in free_bytes.values() if free > 0)
    median = known[len(known) // 2] if known else 1
    return {name: min(free, median * max_ratio) if free > 0 else median for name, free in free_bytes.items()}
