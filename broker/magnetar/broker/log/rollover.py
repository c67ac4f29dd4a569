"""When a topic's open ledger is left for the next one. Pure.

At `max_ledger_age_ms`; and when `max_ledger_entries` or `max_ledger_bytes` are reached, but not before `min_ledger_age_ms`,
unless the ledger holds HARD_LEDGER_LIMIT times as much. Each ledger costs metadata for as long as it exists, so a fast
publisher makes few large ones; a trickle makes one every four hours.
"""

from __future__ import annotations

from ..settings import HARD_LEDGER_LIMIT, BrokerSettings


def rollover_due(settings: BrokerSettings, entries: int, size: int, age_ms: float) -> bool:
    """`size`: payload bytes."""
    full = max(entries / settings.max_ledger_entries, size / settings.max_ledger_bytes)
    return (
        age_ms >= settings.max_ledger_age_ms
        or (full >= 1 and age_ms >= settings.min_ledger_age_ms)
        or full >= HARD_LEDGER_LIMIT
    )
