"""The interface of placement policies: a new ensemble, and replacements, from the bookies known at that moment."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.directory import Labels


@dataclass(frozen=True, slots=True)
class Candidates:
    """Bookies to choose from, with the labels and the free space that they reported."""

    names: Sequence[str]  # writable ones, sorted, each once
    labels: Callable[[str], Labels]  # of any bookie, of an ensemble's others as well
    free_bytes: Callable[[str], int]  # 0: not known


class Placement(Protocol):
    """A policy. Both raise NotEnoughBookies, saying what is missing; neither keeps candidates for later."""

    def ensemble(self, striping: Striping, candidates: Candidates, rng: random.Random) -> tuple[str, ...]:
        """The bookies of a new ledger, in the order of their positions."""
        ...

    def replacements(
        self,
        striping: Striping,
        positions: Sequence[int],
        ensemble: Sequence[str],
        candidates: Candidates,
        exclude: Sequence[str],
        rng: random.Random,
    ) -> dict[int, str]:
        """A bookie for each of the positions of the ensemble, none of them in `exclude`."""
        ...

    def complies(self, striping: Striping, ensemble: Sequence[str], candidates: Candidates) -> bool:
        """Whether an ensemble is what the policy would choose today, or as good. Of lost bookies the last labels count."""
        ...


def enough_for(striping: Striping, names: Sequence[str]) -> str:
    """What is missing for a new ledger, "" if nothing is."""
    if len(names) >= striping.ensemble_size:
        return ""
    return (
        f"a new ledger needs ensemble_size={striping.ensemble_size} writable bookies, {len(names)} are known "
        f"({', '.join(names)}); start more bookies or lower ensemble_size"
    )
