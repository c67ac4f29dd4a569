"""The state that a bookie reports: to peers (BookieInfo), in its metrics, and in /health."""

from __future__ import annotations

import time
from typing import Any

from magnetar.runtime.quantities import about, about_bytes

from .engine import Bookie
from .entry_log.ledger_directory import DirectoryState
from .metrics import Distribution

_FORECAST_S = 86_400.0  # a disk that will be full sooner is named

# Figures of the parts that only rise: counters.
RISING_FIGURES = frozenset(
    """
    write_cache_hits write_cache_misses read_cache_hits read_cache_misses entries_added bytes_added entries_read bytes_read
    checkpoints flushes flush_bytes flush_entries flushes_without_space replayed_records
    gc_rounds gc_rounds_without_metadata gc_deleted_ledgers gc_deleted_logs gc_reclaimed_bytes gc_forgotten_tombstones
    gc_dropped_leftovers
    compaction_minor_runs compaction_major_runs compaction_logs compaction_bytes compaction_ms compaction_given_up
    scrub_bytes scrub_units scrub_paused_ms damage_found damage_healed damage_unrecorded
    journal_syncs journal_bytes journal_records journal_groups journal_rolls adds_refused
    """.split()
)


def bookie_info(bookie: Bookie) -> dict[str, Any]:
    """The map of BookieInfo. Disks as the disk watch saw them last, some seconds ago."""
    directories = bookie.disk_space.directories
    disks = {
        seen.device: (seen.free_bytes, seen.total_bytes) for seen in directories if seen.role == "ledgers"
    }
    load = bookie.load
    return {
        "bookie_id": bookie.cookie.bookie_id,
        "instance": f"{bookie.cookie.instance:016x}",
        "cluster": f"{bookie.cookie.cluster:016x}" if bookie.cookie.cluster else "",
        "rack": bookie.settings.rack,
        "zone": bookie.settings.zone,
        "group": bookie.settings.group,
        "read_only": bookie.read_only,
        "read_only_reason": bookie.disk_space.reason,
        "unsafe_no_sync": not bookie.settings.journal_sync_data,
        "journal_stalled_s": round(bookie.journals.stalled()[0], 3),
        "free_bytes": sum(free for free, _ in disks.values()),
        "total_bytes": sum(total for _, total in disks.values()),
        "directories": [
            {
                "path": seen.path,
                "role": seen.role,
                "state": str(seen.state),
                "free_bytes": seen.free_bytes,
                "total_bytes": seen.total_bytes,
            }
            for seen in directories
        ],
        "load": {
            "adds_per_s": round(load.adds_per_s, 1),
            "add_bytes_per_s": round(load.add_bytes_per_s, 1),
            "reads_per_s": round(load.reads_per_s, 1),
            "read_bytes_per_s": round(load.read_bytes_per_s, 1),
            "write_cache_ratio": round(bookie.cache.size / bookie.settings.write_cache_bytes, 3),
            "waiting_adds": bookie.adds.waiting,
            "long_polls": len(bookie.waiters),
        },
    }


def bookie_problems(bookie: Bookie) -> dict[str, str]:
    """What an operator should know although the bookie works. A failure, which ends it, is not among them."""
    problems: dict[str, str] = {}
    if not bookie.settings.journal_sync_data:
        problems["unsafe_no_sync"] = (
            "journal_sync_data is off: a power failure loses acknowledged entries; for tests only"
        )
    stalled_s, journal = bookie.journals.stalled()
    if stalled_s >= bookie.settings.journal_stall_s:
        problems["journal_stalled"] = (
            f"nothing became durable in {journal} for {stalled_s:.1f} s while adds wait "
            f"(journal_stall_s={bookie.settings.journal_stall_s:g}): its disk or its writer hangs; look at the disk, or "
            "stop this bookie so that others take over"
        )
    for path, silent_s in bookie.components.disk_worker.silent_directories().items():
        if silent_s >= bookie.settings.journal_stall_s:
            problems[f"disk of {path}"] = (
                f"it has not answered for {silent_s:.0f} s: what is read there fails or waits; look at the disk"
            )
    if bookie.read_only:
        problems["read_only"] = bookie.disk_space.reason
    for seen in bookie.disk_space.directories:
        free = f"{about_bytes(seen.free_bytes)} free of {about_bytes(seen.total_bytes)}"
        if seen.state is DirectoryState.FAILED:
            problems[f"directory {seen.path}"] = (
                "a write or sync failed: nothing is written there, what it held alone is damaged; replace the disk"
            )
        elif seen.state is DirectoryState.FULL:
            problems[f"directory {seen.path}"] = f"full: {free}"
        elif seen.nearly_full:
            problems[f"directory {seen.path}"] = f"nearly full: {free}"
        full_in_s = bookie.disk_space.full_in_s(seen) if seen.state is DirectoryState.WRITABLE else None
        if full_in_s is not None and full_in_s < _FORECAST_S:
            at = time.strftime("%H:%M", time.gmtime(bookie.components.clock.now_ms() / 1000 + full_in_s))
            problems[f"space of {seen.path}"] = (
                f"full in about {about(full_in_s)}, at {at} UTC, at the pace of the last hour"
            )
    damage = bookie.damage.figures()
    if damage["damaged_entries"]:
        problems["damage"] = (
            f"{damage['damaged_entries']} entries of {damage['damaged_ledgers']} ledgers are damaged here; "
            "other replicas serve them until they are repaired"
        )
    for path, reason in bookie.damage.files().items():
        problems[f"file {path}"] = f"damaged: {reason}"
    return problems


def bookie_figures(bookie: Bookie) -> dict[str, int]:
    """All figures of the parts, by the names of metrics (without `magnetar_bookie_`); sizes in bytes."""
    flushes = bookie.checkpointer.figures
    states = bookie.logs.directory_states
    return {
        "write_cache_bytes": bookie.cache.size,
        "write_cache_hits": bookie.reads.write_cache_hits,
        "write_cache_misses": bookie.reads.write_cache_misses,
        "read_cache_bytes": bookie.read_cache.size,
        "read_cache_hits": bookie.read_cache.hits,
        "read_cache_misses": bookie.read_cache.misses,
        "entries_added": bookie.cache.entries_added,
        "bytes_added": bookie.cache.bytes_added,
        "entries_read": bookie.reads.entries_read,
        "bytes_read": bookie.reads.bytes_read,
        "read_budget_taken_bytes": bookie.reads.budget.taken,
        "read_budget_waiting": bookie.reads.budget.waiting,
        "waiting_adds": bookie.adds.waiting,
        "adds_refused": bookie.adds.refused,
        "long_polls": len(bookie.waiters),
        "ledgers_in_memory": len(bookie.ledgers.by_id),
        "checkpoints": bookie.checkpointer.finished,
        "flushes": flushes.flushes,
        "flush_entries": flushes.entries,
        "flush_bytes": flushes.bytes,
        "flushes_without_space": flushes.failed_for_space,
        "replayed_records": bookie.replayed_records,
        "read_only": int(bookie.read_only),
        "unsafe_no_sync": int(not bookie.settings.journal_sync_data),
        "entry_logs": len(bookie.logs.logs()),
        "ledger_directories_writable": states.count(DirectoryState.WRITABLE),
        "ledger_directories_full": states.count(DirectoryState.FULL),
        "ledger_directories_failed": states.count(DirectoryState.FAILED),
        **bookie.journals.stats(),
        **bookie.collector.stats(),
        **bookie.scrubber.figures(),
        **bookie.damage.figures(),
    }


def bookie_histograms(bookie: Bookie) -> list[Distribution]:
    """Distributions, in seconds unless the name says otherwise."""
    return [
        *bookie.journals.histograms(),
        Distribution(
            "read_seconds",
            "reads by the slowest place that they needed",
            "source",
            dict(bookie.reads.latency_s),
        ),
        Distribution(
            "flush_seconds", "flushes of the write cache", "", {"": bookie.checkpointer.figures.seconds}
        ),
    ]
