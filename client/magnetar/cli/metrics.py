"""What /metrics shows: figures that the rooms keep anyway, read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from magnetar.bookie import Bookie
from magnetar.broker import Broker
from magnetar.runtime.metrics import Metrics


def service_metrics(broker: Broker | None, bookie: Bookie | None) -> Metrics:
    """A registry over the figures of the parts that run here. Names ending in _total rise."""
    metrics = Metrics()
    if broker is not None:
        _observe(metrics, "broker", broker.figures)
    if bookie is not None:
        _observe(metrics, "bookie", bookie.stats)
    return metrics


def _observe(metrics: Metrics, room: str, figures: Callable[[], Mapping[str, float]]) -> None:
    def read(name: str) -> float:
        return float(figures()[name])

    for name, value in figures().items():
        if isinstance(value, int | float):
            rising = name.endswith("_total")
            text = f"{room}: {name.removesuffix('_total').replace('_', ' ')}"
            metrics.observe(f"{room}_{name.removesuffix('_total')}", text, partial(read, name), rising=rising)
