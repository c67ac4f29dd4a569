"""Metrics of a daemon (server only): a thin layer over prometheus_client.

Nothing is counted per message. Either a counter is raised once per batch, or, cheaper still, a room keeps plain integers
and hands over functions that read them when somebody scrapes (`observe`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

__all__ = ["CONTENT_TYPE", "LATENCY_BUCKETS_S", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# From a page-cache hit to a stuck disk.
LATENCY_BUCKETS_S = (
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
    1.0,
    5.0,
)
_PREFIX = "magnetar_"


class Metrics:
    """All metrics of one daemon. Names are given without the prefix `magnetar_`; units last (`_bytes`, `_seconds`)."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        """0.4 us to raise: once per batch. Keep the result of `.labels(...)`, looking it up costs more."""
        return Counter(_PREFIX + name, help, labels, registry=self._registry)

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        """A value that goes up and down."""
        return Gauge(_PREFIX + name, help, labels, registry=self._registry)

    def histogram(
        self,
        name: str,
        help: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = LATENCY_BUCKETS_S,
    ) -> Histogram:
        """A distribution, in seconds unless the name says otherwise."""
        return Histogram(_PREFIX + name, help, labels, buckets=buckets, registry=self._registry)

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
        self._registry.register(_Observed(_PREFIX + name, help, read, tuple(labels), rising))

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
        self._registry.register(_Distribution(_PREFIX + name, help, read, tuple(labels)))

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)


class _Observed(Collector):
    def __init__(
        self,
        name: str,
        help: str,
        read: Callable[[], float | Iterable[tuple[Sequence[str], float]]],
        labels: tuple[str, ...],
        rising: bool,
    ) -> None:
        self._name = name
        self._help = help
        self._read = read
        self._labels = labels
        self._family = CounterMetricFamily if rising else GaugeMetricFamily

    def describe(self) -> Iterable[Metric]:
        """The name only: registering must not call `read`."""
        return [self._family(self._name, self._help, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        """One scrape."""
        family = self._family(self._name, self._help, labels=self._labels)
        value = self._read()
        if isinstance(value, (int, float)):
            family.add_metric([], value)
        else:
            for label_values, number in value:
                family.add_metric(list(label_values), number)
        return [family]


class _Distribution(Collector):
    def __init__(
        self,
        name: str,
        help: str,
        read: Callable[[], Iterable[tuple[Sequence[str], Sequence[float], Sequence[int], float]]],
        labels: tuple[str, ...],
    ) -> None:
        self._name = name
        self._help = help
        self._read = read
        self._labels = labels

    def describe(self) -> Iterable[Metric]:
        """The name only: registering must not call `read`."""
        return [HistogramMetricFamily(self._name, self._help, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        """One scrape. Prometheus counts each bucket with those below it."""
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for label_values, bounds, counts, total in self._read():
            names = [*map(floatToGoString, bounds), "+Inf"]
            family.add_metric(list(label_values), list(zip(names, accumulate(counts), strict=True)), total)
        return [family]
