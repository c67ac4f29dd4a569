"""Figures of a partitioned topic: those of its partitions together.

    numbers     the sum             {"backlog_messages": 3} and {"backlog_messages": 4} --> {"backlog_messages": 7}
    flags       true if one is      {"degraded": False} and {"degraded": True}          --> {"degraded": True}
    names       by name             producers and consumers that are connected to several partitions are one
    subscriptions, by name          those of all partitions
    texts       those that there are, once each

What says something about one log, such as positions and ledgers, is in the figures of the partitions only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

# Of one log.
_OF_PARTITIONS = {
    "epoch", "horizon", "ledgers", "mark_delete", "next_index", "open_ledger", "partitions", "recovered_from",
    "retained_by", "topic", "topic_epoch", "trimmed_until", "unreadable_entries",
}  # fmt: skip
# Of several states of a compaction: the first one that there is.
_COMPACTION = ("failed", "running", "done", "never")


def together(topic: str, partitions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `topic_stats` says of a whole topic: `partitions` has the figures of each."""
    found = _sum_of_maps(partitions)
    found.pop("state", None)
    if "compaction" in found:
        found["compaction"] = compactions([one["compaction"] for one in partitions])
    return {"topic": topic, **found, "partitions": list(partitions)}


def compactions(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The states of the compactions of several partitions as one."""
    state = next((one for one in _COMPACTION if any(found["state"] == one for found in states)), "never")
    compacted_ms = max(found["compacted_ms"] for found in states)
    return {**_sum_of_maps(states), "state": state, "compacted_ms": compacted_ms}


def _sum_of_maps(maps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for one in maps for name in one)
    return {
        name: _sum(name, [one[name] for one in maps if one.get(name) is not None])
        for name in names
        if name not in _OF_PARTITIONS
    }


def _sum(name: str, values: Sequence[Any]) -> Any:
    first = values[0] if values else None
    if isinstance(first, dict):
        return _sum_of_maps(values)
    if isinstance(first, bool):
        return any(values)
    if isinstance(first, int | float):
        return max(values) if name == "priority_level" else sum(values)
    if isinstance(first, list):
        return _by_name(row for rows in values for row in rows)
    return "; ".join(dict.fromkeys(str(one) for one in values if one))


def _by_name(rows: Iterable[Any]) -> list[Any]:
    """Maps by their name; of all else each once."""
    named: dict[Any, list[Any]] = {}
    for row in rows:
        named.setdefault(row["name"] if isinstance(row, dict) else row, []).append(row)
    return [
        {**_sum_of_maps(those), "name": name} if isinstance(those[0], dict) else name
        for name, those in named.items()
    ]
