"""The order in which bookies are preferred: by chance alone, or by chance in proportion to their free space."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .policy import Candidates


@dataclass(frozen=True, slots=True)
class Weighting:
    """`max_ratio`: a bookie with much more space than the median counts as having so many medians, no more.

    Else a new, empty bookie would get all new ledgers, and be hot before it is full.
    """

    by_free_bytes: bool = False
    max_ratio: float = 3.0

    def order(self, names: Sequence[str], candidates: Candidates, rng: random.Random) -> list[str]:
        """All of `names`, drawn one after the other without putting back."""
        if not self.by_free_bytes:
            return rng.sample(list(names), len(names))
        weights = capped_weights({name: candidates.free_bytes(name) for name in names}, self.max_ratio)
        # Exponential variates with rate w: the first of them is each one's with probability w / sum of weights.
        drawn = [(-math.log(1.0 - rng.random()) / weights[name], name) for name in names]
        return [name for _, name in sorted(drawn)]


def capped_weights(free_bytes: Mapping[str, int], max_ratio: float) -> dict[str, float]:
    """Free bytes, at most `max_ratio` times their median; the median where they are not known (0). All above 0."""
    known = sorted(free for free in free_bytes.values() if free > 0)
    median = known[len(known) // 2] if known else 1
    return {name: min(free, median * max_ratio) if free > 0 else median for name, free in free_bytes.items()}
