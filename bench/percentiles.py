"""Percentiles of latencies, in milliseconds."""

from collections.abc import Iterable
from typing import NamedTuple


class Percentiles(NamedTuple):
    """Milliseconds."""

    p50: float
    p99: float
    p999: float
    maximum: float


def percentiles(seconds: Iterable[float]) -> Percentiles:
    """Of at least one latency in seconds; the nearest rank, so every figure is one that was measured."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return Percentiles(
        *(round(ordered[min(last, int(len(ordered) * share))] * 1e3, 4) for share in (0.5, 0.99, 0.999, 1.0))
    )
