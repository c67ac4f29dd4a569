"""The metrics of /metrics: figures that the rooms count anyway, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from magnetar.bookie import Bookie
from magnetar.bookie.entry_log import DirectoryState
from magnetar.bookie.status import RISING_FIGURES
from magnetar.broker import Broker
from magnetar.broker.service.topic_metrics import TOPIC_METRICS, topic_metrics
from magnetar.ledger.replication.auto_recovery import AutoRecovery
from magnetar.runtime.metrics import Family, Metrics


def service_metrics(
    broker: Broker | None, bookie: Bookie | None, repairs: AutoRecovery | None = None
) -> Metrics:
    """A registry over the figures of the parts that run here. Names ending in _total rise."""
    metrics = Metrics()
    if repairs is not None:
        _observe(metrics, "autorecovery", repairs.figures)
    if broker is not None:
        _observe(metrics, "broker", broker.figures)
        metrics.observe_all(
            {name: Family(*text) for name, text in TOPIC_METRICS.items()}, partial(topic_metrics, broker)
        )
    if bookie is not None:
        _observe(metrics, "bookie", bookie.stats, RISING_FIGURES)
        for number, shown in enumerate(bookie.histograms()):
            metrics.distribution(
                f"bookie_{shown.name}",
                f"bookie: {shown.help}",
                partial(_histograms, bookie, number),
                labels=[shown.label] if shown.label else (),
            )
        metrics.observe(
            "bookie_directory_state",
            "bookie: 0 writable, 1 full, 2 failed",
            partial(_directory_states, bookie),
            labels=["role", "path"],
        )
        metrics.observe(
            "bookie_directory_free_bytes",
            "bookie: free space of the file system that holds a directory",
            partial(_directory_space, bookie),
            labels=["role", "path"],
        )
    return metrics


Row = tuple[Sequence[str], Sequence[float], Sequence[int], float]
_STATES = {DirectoryState.WRITABLE: 0, DirectoryState.FULL: 1, DirectoryState.FAILED: 2}


def _histograms(bookie: Bookie, number: int) -> list[Row]:
    shown = bookie.histograms()[number]
    return [
        ([value] if shown.label else [], histogram.bounds, histogram.counts, histogram.total)
        for value, histogram in shown.by_label.items()
    ]


def _directory_states(bookie: Bookie) -> list[tuple[Sequence[str], float]]:
    return [([seen.role, seen.path], _STATES[seen.state]) for seen in bookie.disk_space.directories]


def _directory_space(bookie: Bookie) -> list[tuple[Sequence[str], float]]:
    return [([seen.role, seen.path], seen.free_bytes) for seen in bookie.disk_space.directories]


def _observe(
    metrics: Metrics,
    room: str,
    figures: Callable[[], Mapping[str, float]],
    counters: Collection[str] = (),
) -> None:
    names = {f"{room}_{name.removesuffix('_total')}": name for name in figures()}
    families = {
        shown: Family(
            f"{room}: {name.removesuffix('_total').replace('_', ' ')}",
            rising=name.endswith("_total") or name in counters,
        )
        for shown, name in names.items()
    }

    def read() -> Mapping[str, float]:
        found = figures()
        return {shown: float(found[name]) for shown, name in names.items()}

    metrics.observe_all(families, read)
