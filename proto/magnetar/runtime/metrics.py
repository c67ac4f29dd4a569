"""Metrics of a daemon (server only): a thin layer over prometheus_client.

Nothing is counted here, let alone per message: a room keeps plain integers, and hands over functions that read them when
somebody scrapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

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

__all__ = ["CONTENT_TYPE", "Family", "Metrics", "Read"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "magnetar_"
# A number, or with labels rows of (label values, number).
Read = float | Iterable[tuple[Sequence[str], float]]


class Family(NamedTuple):
    """What a metric says: `help` with its unit. `rising`: a counter."""

    help: str
    labels: Sequence[str] = ()
    rising: bool = False


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
        read: Callable[[], Read],
        *,
        labels: Sequence[str] = (),
        rising: bool = False,
    ) -> None:
        """Calls `read` at each scrape."""
        self.observe_all({name: Family(help, labels, rising)}, lambda: {name: read()})

    def observe_all(self, families: Mapping[str, Family], read: Callable[[], Mapping[str, Read]]) -> None:
        """Several metrics of one `read` at each scrape, by name."""

        def make() -> list[Any]:
            return [
                (CounterMetricFamily if rising else GaugeMetricFamily)(_PREFIX + name, help, labels=labels)
                for name, (help, labels, rising) in families.items()
            ]

        def fill(made: list[Any]) -> None:
            found = read()
            for name, family in zip(families, made, strict=True):
                value = found[name]
                for label_values, number in [((), value)] if isinstance(value, (int, float)) else value:
                    family.add_metric(list(label_values), number)

        self._registry.register(_Observed(make, fill))

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

        def fill(made: list[Any]) -> None:
            for label_values, bounds, counts, total in read():
                names = [*map(floatToGoString, bounds), "+Inf"]
                # Prometheus counts each bucket with those below it.
                made[0].add_metric(
                    list(label_values), list(zip(names, accumulate(counts), strict=True)), total
                )

        self._registry.register(
            _Observed(lambda: [HistogramMetricFamily(_PREFIX + name, help, labels=labels)], fill)
        )

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)


class _Observed(Collector):
    def __init__(self, make: Callable[[], list[Any]], fill: Callable[[list[Any]], None]) -> None:
        self._make = make
        self._fill = fill

    def describe(self) -> Iterable[Metric]:
        """The name only: registering must not read the figures."""
        return self._make()

    def collect(self) -> Iterable[Metric]:
        """One scrape."""
        families = self._make()
        self._fill(families)
        return families
