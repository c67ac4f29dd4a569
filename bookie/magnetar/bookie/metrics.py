"""Figures of a bookie, as plain numbers: raised once per batch, read at each scrape. There is no metrics library here.

A part counts in integers of its own (`flushes_total += 1`); what needs a distribution keeps a `Histogram`.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

# From a page-cache hit to a stuck disk.
LATENCY_BOUNDS_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    5.0,
)
# Entries of a group, and the like.
SIZE_BOUNDS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)


class Histogram:
    """A histogram: `counts[i]` counts values up to `bounds[i]`, the last one values above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total: float = 0  # the sum of all values

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value that came `times` times. 0.2 us: once per batch, never per message."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """How many values came."""
        return sum(self.counts)


class Distribution(NamedTuple):
    """A metric made of histograms: one for each value of its label ("": it has none, and one histogram)."""

    name: str
    help: str
    label: str
    by_label: dict[str, Histogram]


class LoadMeter:
    """Rates over the last interval between two samples, which the disk watch takes every few seconds.

    `totals` returns how many entries and bytes were added, and how many were read, since the start.
    """

    def __init__(self, totals: Callable[[], tuple[int, int, int, int]]) -> None:
        self._totals = totals
        self._sampled_at = -1.0
        self._last = (0, 0, 0, 0)
        self.adds_per_s = self.add_bytes_per_s = self.reads_per_s = self.read_bytes_per_s = 0.0

    def sample(self) -> None:
        """Ends an interval. The first one begins with the first call: what a start replays is no load."""
        now, totals = asyncio.get_running_loop().time(), self._totals()
        elapsed = now - self._sampled_at
        if self._sampled_at >= 0 and elapsed > 0:
            rates = [(new - old) / elapsed for new, old in zip(totals, self._last, strict=True)]
            self.adds_per_s, self.add_bytes_per_s, self.reads_per_s, self.read_bytes_per_s = rates
        self._sampled_at, self._last = now, totals
