"""What a walk found, as the objects that `magnetar bookie ... --json` prints and a running bookie sends (WIRE.md)."""

from __future__ import annotations

from typing import Any, NamedTuple

from .entry_logs import LogBroken, LogEnd, LogHeader, LogRecord
from .journals import JournalDirectory, JournalFileReport, JournalGap, JournalRecord

_KINDS: dict[type[NamedTuple], str] = {
    JournalDirectory: "journal",
    JournalFileReport: "file",
    JournalGap: "gap",
    JournalRecord: "record",
    LogHeader: "header",
    LogRecord: "record",
    LogBroken: "broken",
    LogEnd: "statistics",
}


def row_of(item: Any) -> dict[str, Any]:
    """Its fields, and "kind", which says what it is."""
    row: dict[str, Any] = {"kind": _KINDS[type(item)]} | item._asdict()
    if isinstance(item, JournalDirectory):
        row["mark"] = item.mark._asdict() if item.mark is not None else None
    elif isinstance(item, JournalGap):
        row["damage"] = item.is_damage
    elif isinstance(item, JournalRecord):
        del row["change"]  # its ids and times are fields of their own
    elif isinstance(item, LogEnd):
        row["ledgers"] = [ledger._asdict() for ledger in item.ledgers.values()]
    return row
