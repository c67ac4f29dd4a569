"""Metrics of a daemon (server only): a thin layer over prometheus_client.

Nothing is counted here, let alone per message: a room keeps plain integers, and hands over functions that read them when
somebody scrapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "magnetar_"
FamilyT = TypeVar("FamilyT", bound=Metric)


class Metrics:
    """All metrics of one daemon. Names are given without the prefix `magnetar_`; units last (`_bytes`, `_seconds`)."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def observe(
        self,
        name: str,
        help: str,
        read: Callable[[], float | Iterable[tuple[Sequence[str], float]]],
        *,
        labels: Sequence[str] = (),
        rising: bool = False,
    ) -> None:
        """Calls `read` at each scrape: a number, or with `labels` rows of (label values, number). `rising`: a counter."""

        def fill(family: GaugeMetricFamily | CounterMetricFamily) -> None:
            value = read()
            for label_values, number in [((), value)] if isinstance(value, (int, float)) else value:
                family.add_metric(list(label_values), number)

        family = CounterMetricFamily if rising else GaugeMetricFamily
        self._registry.register(_Observed(lambda: family(_PREFIX + name, help, labels=labels), fill))

    def distribution(
        self,
        name: str,
        help: str,
        read: Callable[[], Iterable[tuple[Sequence[str], Sequence[float], Sequence[int], float]]],
        *,
        labels: Sequence[str] = (),
    ) -> None:
        """A histogram that a room keeps: `read` gives rows of (label values, bounds, counts, sum) at each scrape.

        `counts[i]` are the values up to `bounds[i]` that are in no bucket before, the last one those above all bounds.
        """

        def fill(family: HistogramMetricFamily) -> None:
            for label_values, bounds, counts, total in read():
                names = [*map(floatToGoString, bounds), "+Inf"]
                # Prometheus counts each bucket with those below it.
                family.add_metric(
                    list(label_values), list(zip(names, accumulate(counts), strict=True)), total
                )

        self._registry.register(
            _Observed(lambda: HistogramMetricFamily(_PREFIX + name, help, labels=labels), fill)
        )

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)


class _Observed(Collector, Generic[FamilyT]):
    def __init__(self, make: Callable[[], FamilyT], fill: Callable[[FamilyT], None]) -> None:
        self._make = make
        self._fill = fill

    def describe(self) -> Iterable[Metric]:
        """The name only: registering must not read the figures."""
        return [self._make()]

    def collect(self) -> Iterable[Metric]:
        """One scrape."""
        family = self._make()
        self._fill(family)
        return [family]
