"""Which fault comes when: from a seed, and nothing else. Pure.

`dice` chooses the victim among those that there are when the fault comes: 0 <= dice < 1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple


class Fault(NamedTuple):
    """`at_s`: from the beginning of the load on, or when the one before it has healed, if that is later."""

    at_s: float
    kind: str
    dice: float
    lasts: float  # 0 <= lasts < 1: between the shortest and the longest time that the kind may take


def schedule(seed: int, kinds: Sequence[str], seconds: float, every_s: float) -> list[Fault]:
    """One fault every `every_s` seconds, give or take a third. All kinds come once before one comes again."""
    rng = random.Random(f"faults {seed}")
    faults: list[Fault] = []
    bag: list[str] = []
    for number in range(1, max(2, int(seconds / every_s))):
        if not bag:
            bag = rng.sample(list(kinds), len(kinds))
        jitter = rng.uniform(-every_s / 3, every_s / 3)
        faults.append(Fault(number * every_s + jitter, bag.pop(), rng.random(), rng.random()))
    return faults


def seconds_for_all(kinds: int, every_s: float) -> float:
    """How long a schedule is that has each of so many kinds once."""
    return (kinds + 1) * every_s
