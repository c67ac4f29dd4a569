"""Where new ledgers and replacements go. A seam: rack- and zone-aware policies see the same two questions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from magnetar.proto.errors import NotEnoughBookies

from .core.quorum import Striping


class Placement(Protocol):
    """A policy. Both raise NotEnoughBookies."""

    def ensemble(self, striping: Striping, writable: Sequence[str], rng: random.Random) -> tuple[str, ...]:
        """The bookies of a new ledger, in the order of their positions."""
        ...

    def replacements(
        self,
        positions: Sequence[int],
        ensemble: Sequence[str],
        writable: Sequence[str],
        exclude: Sequence[str],
        rng: random.Random,
    ) -> dict[int, str]:
        """A bookie for each position of the ensemble, none of them in `exclude`."""
        ...


class RandomPlacement:
    """Every writable bookie is as good as another."""

    def ensemble(self, striping: Striping, writable: Sequence[str], rng: random.Random) -> tuple[str, ...]:
        """See Placement."""
        if len(writable) < striping.ensemble_size:
            raise NotEnoughBookies(
                f"a new ledger needs ensemble_size={striping.ensemble_size} writable bookies, {len(writable)} are known "
                f"({', '.join(writable)}); start more bookies or lower ensemble_size"
            )
        return tuple(rng.sample(list(writable), striping.ensemble_size))

    def replacements(
        self,
        positions: Sequence[int],
        ensemble: Sequence[str],
        writable: Sequence[str],
        exclude: Sequence[str],
        rng: random.Random,
    ) -> dict[int, str]:
        """See Placement."""
        candidates = [bookie for bookie in writable if bookie not in exclude]
        if len(candidates) < len(positions):
            raise NotEnoughBookies(
                f"{len(candidates)} of the {len(writable)} writable bookies are left to choose from"
            )
        return dict(zip(positions, rng.sample(candidates, len(positions))))
