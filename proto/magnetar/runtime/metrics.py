"""Metrics of a daemon (server only): a thin layer over prometheus_client.

Nothing is counted here, let alone per message: a room keeps plain integers, and hands over functions that read them when
somebody scrapes. A scrape of many rows takes its turns with what else the loop has to do.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "magnetar_"
# A number, or with labels rows of (label values, number).
Read = float | Iterable[tuple[Sequence[str], float]]


class Family(NamedTuple):
    """What a metric says: `help` with its unit. `rising`: a counter. `prefix`: of its name."""

    help: str
    labels: Sequence[str] = ()
    rising: bool = False
    prefix: str = _PREFIX


class Metrics:
    """All metrics of one daemon. Names are given without the prefix `magnetar_`; units last (`_bytes`, `_seconds`)."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        # Each makes the families of one reading.
        self._readings: list[Callable[[], Awaitable[list[Any]]]] = []

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

    def observe_all(
        self,
        families: Mapping[str, Family],
        read: Callable[[], Mapping[str, Read] | Awaitable[Mapping[str, Read]]],
    ) -> None:
        """Several metrics of one `read` at each scrape, by name; it may be a coroutine function."""

        async def collect() -> list[Any]:
            reading = read()
            found = await reading if inspect.isawaitable(reading) else reading
            made = []
            for name, (help, labels, rising, prefix) in families.items():
                family = (CounterMetricFamily if rising else GaugeMetricFamily)(
                    prefix + name, help, labels=labels
                )
                value = found[name]
                for label_values, number in [((), value)] if isinstance(value, (int, float)) else value:
                    family.add_metric(list(label_values), number)
                made.append(family)
                await asyncio.sleep(0)
            return made

        self._readings.append(collect)

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

        async def collect() -> list[Any]:
            family = HistogramMetricFamily(_PREFIX + name, help, labels=labels)
            for label_values, bounds, counts, total in read():
                names = [*map(floatToGoString, bounds), "+Inf"]
                # Prometheus counts each bucket with those below it.
                family.add_metric(
                    list(label_values), list(zip(names, accumulate(counts), strict=True)), total
                )
            return [family]

        self._readings.append(collect)

    async def render(self) -> bytes:
        """The text that Prometheus scrapes; each metric takes two turns of the loop of its own."""
        parts = [generate_latest(self._registry)]
        for collect in self._readings:
            for family in await collect():
                parts.append(generate_latest(_Collected([family])))
                await asyncio.sleep(0)
        return b"".join(parts)


class _Collected(NamedTuple):
    """What prometheus_client takes for a collector."""

    families: list[Any]

    def collect(self) -> list[Any]:
        """The families, without reading anything."""
        return self.families
