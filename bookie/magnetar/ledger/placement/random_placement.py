"""Random placement: all writable bookies are alike, or weighted by their free space."""

from __future__ import annotations

import random
from collections.abc import Sequence

from magnetar.ledger.core.quorum import Striping
from magnetar.proto.errors import NotEnoughBookies

from .policy import Candidates, enough_for
from .weighting import Weighting


class RandomPlacement:
    """A Placement that knows no labels."""

    def __init__(self, weighting: Weighting | None = None) -> None:
        self._weighting = weighting or Weighting()

    def ensemble(self, striping: Striping, candidates: Candidates, rng: random.Random) -> tuple[str, ...]:
        if missing := enough_for(striping, candidates.names):
            raise NotEnoughBookies(missing)
        return tuple(self._draw(striping.ensemble_size, candidates.names, candidates, rng))

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
        return dict(zip(positions, self._draw(len(positions), left, candidates, rng)))

    def complies(self, striping: Striping, ensemble: Sequence[str], candidates: Candidates) -> bool:
        """See Placement: always."""
        return True

    def _draw(
        self, count: int, names: Sequence[str], candidates: Candidates, rng: random.Random
    ) -> list[str]:
        if not self._weighting.by_free_bytes:
            return rng.sample(list(names), count)
        return self._weighting.order(names, candidates, rng)[:count]


def left_to_choose(positions: Sequence[int], candidates: Candidates, exclude: Sequence[str]) -> list[str]:
    """The candidates that are not excluded; NotEnoughBookies if they are fewer than the positions."""
    left = [bookie for bookie in candidates.names if bookie not in exclude]
    if len(left) < len(positions):
        raise NotEnoughBookies(
            f"{len(left)} of the {len(candidates.names)} writable bookies are left to choose from"
        )
    return left
