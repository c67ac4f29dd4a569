"""The metrics of /metrics: figures that the rooms count anyway, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from magnetar.bookie import Bookie
from magnetar.bookie.entry_log.ledger_directory import DirectoryState
from magnetar.bookie.status import RISING_FIGURES, bookie_figures, bookie_histograms
from magnetar.broker import Broker
from magnetar.broker.service.topic_metrics import PULSAR_METRICS, TOPIC_METRICS, topic_metrics
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
        families = {name: Family(*text) for name, text in TOPIC_METRICS.items()}
        families |= {name: Family(*metric[:3], prefix="") for name, metric in PULSAR_METRICS.items()}
        metrics.observe_all(families, partial(topic_metrics, broker))
    if bookie is not None:
        _observe(metrics, "bookie", partial(bookie_figures, bookie), RISING_FIGURES)
        for number, shown in enumerate(bookie_histograms(bookie)):
            metrics.distribution(
                f"bookie_{shown.name}",
                _help("bookie", shown.help, f"bookie_{shown.name}", rising=True),
                partial(_histograms, bookie, number),
                labels=[shown.label] if shown.label else (),
            )
        metrics.observe(
            "bookie_directory_state",
            "State of a directory of this bookie, now: 0 writable, 1 full, 2 failed",
            partial(_directory_states, bookie),
            labels=["role", "path"],
        )
        metrics.observe(
            "bookie_directory_free_bytes",
            "Bytes that are free on the file system that holds a directory of this bookie, some seconds ago",
            partial(_directory_space, bookie),
            labels=["role", "path"],
        )
    return metrics


Row = tuple[Sequence[str], Sequence[float], Sequence[int], float]
_STATES = {DirectoryState.WRITABLE: 0, DirectoryState.FULL: 1, DirectoryState.FAILED: 2}


def _histograms(bookie: Bookie, number: int) -> list[Row]:
    shown = bookie_histograms(bookie)[number]
    return [
        ([value] if shown.label else [], histogram.bounds, histogram.counts, histogram.total)
        for value, histogram in shown.by_label.items()
    ]


def _directory_states(bookie: Bookie) -> list[tuple[Sequence[str], float]]:
    return [([seen.role, seen.path], _STATES[seen.state]) for seen in bookie.disk_space.directories]


def _directory_space(bookie: Bookie) -> list[tuple[Sequence[str], float]]:
    return [([seen.role, seen.path], seen.free_bytes) for seen in bookie.disk_space.directories]


# Where the name does not say what is counted.
_WORDS = {
    "messages_in_total": "messages that producers sent",
    "bytes_in_total": "bytes of the batches that producers sent",
    "entries_in_total": "entries that were appended for producers",
    "send_runs_total": "reads from a connection that brought a producer's messages",
    "messages_out_total": "messages that were delivered",
    "bytes_out_total": "bytes that were delivered",
    "deliveries_total": "deliveries, each of an entry or a part of it",
    "entry_reads_total": "entries that were read for consumers from ledgers, not from memory",
    "entry_read_bytes_total": "bytes that were read for consumers from ledgers, not from memory",
    "shared_reads_total": "reads of ledgers that joined the same one of another subscription",
    "ledger_read_bytes_total": "bytes that such shared reads fetched from bookies",
    "unreadable_entries": "entries that consumers wait for and that cannot be read",
    "skipped_entries_total": "entries that were given up, since they cannot be read",
    "dropped_messages_total": "messages that left a non-persistent topic before a subscription had them",
    "non_persistent_bytes": "bytes of the newest messages of non-persistent topics",
    "dispatch_failures_total": "turns of a dispatcher that a defect ended",
    "published_batches_total": "batches of staged ledgers that were published together",
    "degraded_topics": "topics that write fewer copies than their policy says",
    "degraded_ledgers_total": "ledgers that were begun with fewer copies than asked for",
    "bookie_failures_total": "failures of bookies that reads and adds met",
    "quarantines_overridden_total": "bookies that were used in quarantine, since there were too few others",
    "balancer_spread": "share of a core of the busiest broker less the idlest one's, in the last round",
    "balancer_mean_load": "mean share of a core of the brokers, in the last round",
    "audit_ledgers": "ledgers that the last pass of the auditor saw",
    "audit_unreadable_ledgers": "ledgers whose record the last pass of the auditor could not read",
    "lost_entries_total": "entries of which no good copy was found",
    "damage_reports": "ledgers of bookies with damage that waits to be healed",
    "write_cache_hits": "reads of an entry that the write cache answered",
    "read_cache_hits": "reads of an entry that the read cache answered",
    "journal_stalled_ms": "for how long adds have waited and nothing became durable",
    "scrub_oldest_s": "how long ago what waits longest for the scrub was verified",
    "compaction_bytes": "bytes that compactions wrote to new logs",
}
_SCOPES = {
    "broker": "over all topics of this broker",
    "bookie": "over all directories of this bookie",
    "autorecovery": "of the auditor and the repairs of this process",
}
_UNITS = {"_ms": " (milliseconds)", "_s": " (seconds)", "_seconds": " (seconds)"}


def _help(room: str, words: str, name: str, *, rising: bool) -> str:
    """What is measured, its unit, over what, and since when."""
    unit = next((shown for suffix, shown in _UNITS.items() if name.endswith(suffix)), "")
    for suffix in _UNITS:
        words = words.removesuffix(suffix.replace("_", " "))
    since = "since the process began" if rising else "now"
    return f"{words[0].upper()}{words[1:]}{unit}, {_SCOPES[room]}, {since}"


def _observe(
    metrics: Metrics,
    room: str,
    figures: Callable[[], Mapping[str, float]],
    counters: Collection[str] = (),
) -> None:
    names = {f"{room}_{name.removesuffix('_total')}": name for name in figures()}
    families = {
        shown: Family(
            _help(
                room, _WORDS.get(name, name.removesuffix("_total").replace("_", " ")), shown, rising=rising
            ),
            rising=rising,
        )
        for shown, name in names.items()
        for rising in [name.endswith("_total") or name in counters]
    }

    def read() -> Mapping[str, float]:
        found = figures()
        return {shown: float(found[name]) for shown, name in names.items()}

    metrics.observe_all(families, read)
