"""Decides which entry logs a round deletes or compacts: pure arithmetic over their statistics.

A log whose ledgers are all deleted is deleted. One that is mostly garbage is compacted: what is alive is copied to a new
log.

    minor  below 0.2 alive, every hour     gets most for least work
    major  below 0.5 alive, every day      writes at most as much as it frees
    ahead of schedule (major)              in a directory that is nearly full, and when an operator asks

Example: logs of 1 GB with 0, 100, 300 and 900 MB alive. Every round deletes the first; an hourly one copies 100 MB for 1 GB
of space; a daily one copies the 100 and the 300 MB into one new log; nothing ever touches the last one.

The emptiest logs come first: they free most per byte written, which also makes room for those that follow. How many bytes
are alive is estimated by ledger (an entry that was written twice counts twice), unless the scrub has measured it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from ..entry_log.records import LOG_LEDGERS
from ..settings import BookieSettings

# They are deleted when the whole copy is done: what a crash or a full disk makes vain must stay bounded.
MAX_SOURCES = 16
# What a copy takes besides the records: header, and footer with a row for each of its ledgers.
_COPY_OVERHEAD_BYTES = 2 << 20


class LogUsage(NamedTuple):
    """One closed log. `live_bytes`: of records whose ledger is not deleted."""

    log_id: int
    directory: int
    bytes: int
    live_bytes: int
    # False: a part of it cannot be read, so what is in there is not known. Only a compaction, which looks at the index for
    # every byte of it, may delete such a log.
    whole: bool = True
    # That are not deleted.
    live_ledgers: int = 0

    @property
    def live_ratio(self) -> float:
        """Part of the file that is alive."""
        return self.live_bytes / self.bytes if self.bytes else 0.0


class History(NamedTuple):
    """Loop times of the last compactions of each kind; -inf: never since the start, so it is due."""

    minor_s: float = -math.inf
    major_s: float = -math.inf


class CompactionBatch(NamedTuple):
    """Logs of one directory that are compacted into one."""

    directory: int
    sources: tuple[LogUsage, ...]

    @property
    def live_bytes(self) -> int:
        """About what will be written."""
        return sum(log.live_bytes for log in self.sources)

    @property
    def bytes(self) -> int:
        """What the sources take now."""
        return sum(log.bytes for log in self.sources)


class Plan(NamedTuple):
    """What to do, in this order. `minor`, `major`: these count as done for all directories."""

    delete: tuple[LogUsage, ...]
    compact: tuple[CompactionBatch, ...]
    minor: bool
    major: bool


def plan_round(
    logs: Sequence[LogUsage],
    settings: BookieSettings,
    history: History,
    now_s: float,
    *,
    forced: bool = False,
    pressed: AbstractSet[int] = frozenset(),
) -> Plan:
    """`pressed`: directories that are nearly full. Logs may come in any order.

    A threshold or an interval of 0 turns that compaction off; a forced round minds the first alone.
    """
    minor = _due(
        settings.minor_compaction_threshold,
        settings.minor_compaction_interval_s,
        now_s - history.minor_s,
        forced,
    )
    major = _due(
        settings.major_compaction_threshold,
        settings.major_compaction_interval_s,
        now_s - history.major_s,
        forced,
    )
    threshold = (
        settings.major_compaction_threshold
        if major
        else settings.minor_compaction_threshold
        if minor
        else 0.0
    )
    pressed_threshold = (
        settings.major_compaction_threshold if settings.major_compaction_interval_s else threshold
    )
    delete: list[LogUsage] = []
    sparse: dict[int, list[LogUsage]] = {}
    for log in sorted(logs, key=lambda log: (log.live_ratio, log.log_id)):
        limit = max(threshold, pressed_threshold) if log.directory in pressed else threshold
        if not log.live_bytes and log.whole:
            delete.append(log)
        elif log.live_ratio < limit:
            sparse.setdefault(log.directory, []).append(log)
    batches = [
        batch
        for directory in sorted(sparse)
        for batch in _batches(directory, sparse[directory], settings.entry_log_bytes)
    ]
    # A stable sort: of one directory they stay in order.
    batches.sort(key=lambda batch: batch.live_bytes / max(1, batch.bytes))
    return Plan(tuple(delete), tuple(batches), minor or major, major)


def fits(batch: CompactionBatch, free_bytes: int, reserve_bytes: int) -> bool:
    """Whether the copy can be written without eating into what flushes need. The sources are deleted after it only."""
    return batch.live_bytes + _COPY_OVERHEAD_BYTES + reserve_bytes <= free_bytes


def _due(threshold: float, interval_s: float, since_s: float, forced: bool) -> bool:
    return bool(threshold) and (forced or (interval_s > 0 and since_s >= interval_s))


def _batches(directory: int, logs: Sequence[LogUsage], log_bytes: int) -> list[CompactionBatch]:
    """Sources are put together into one copy up to `log_bytes`, and up to LOG_LEDGERS ledgers."""
    found: list[CompactionBatch] = []
    sources: list[LogUsage] = []
    size = ledgers = 0
    for log in logs:
        full = size + log.live_bytes > log_bytes or ledgers + log.live_ledgers > LOG_LEDGERS
        if sources and (full or len(sources) == MAX_SOURCES):
            found.append(CompactionBatch(directory, tuple(sources)))
            sources, size, ledgers = [], 0, 0
        sources.append(log)
        size += log.live_bytes
        ledgers += log.live_ledgers
    if sources:
        found.append(CompactionBatch(directory, tuple(sources)))
    return found
