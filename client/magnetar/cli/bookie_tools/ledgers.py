"""`magnetar bookie ledgers`: what a running bookie has of each ledger."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from magnetar.bookie.listing import LedgerSummary

from ..terminal.session import print_json
from ..terminal.tables import counted
from .open import number, print_table, with_running
from .running import RunningTool
from .target import Target

_COLUMNS = ("ledger", "state", "entries", "bytes", "last entry", "LAC", "explicit LAC", "in journals", "logs")
# In the table; --ledger and --json show all.
_LOGS_SHOWN = 4


def ledgers(
    target: Target,
    *,
    ledger: int | None,
    as_json: bool,
) -> None:
    """Every ledger, a row or a line of JSON each; or one of them in detail."""

    def work(tool: RunningTool) -> None:
        found = tool.ledgers(ledger)
        if as_json:
            for summary in found:
                print_json(as_record(summary))
        elif ledger is not None:
            _print_detail(next(found))
        else:
            count = print_table("", _COLUMNS, map(_row, found), right=(0, 2, 3, 4, 5, 6, 7))
            print(counted(count, "ledger", "ledgers"))

    with_running(target, work)


def as_record(summary: LedgerSummary) -> dict[str, Any]:
    """The keys of --json."""
    return summary._asdict()


def _state(summary: LedgerSummary) -> str:
    return summary.state + (", incomplete" if summary.unknown and summary.state != "unknown" else "")


def _row(summary: LedgerSummary) -> tuple[str, ...]:
    logs = [f"{log_id:08x}" for log_id in summary.logs[:_LOGS_SHOWN]]
    if len(summary.logs) > _LOGS_SHOWN:
        logs.append(f"+{len(summary.logs) - _LOGS_SHOWN}")
    return (
        str(summary.ledger_id),
        _state(summary),
        number(summary.entries + summary.journaled_entries),
        number(summary.bytes + summary.journaled_bytes),
        number(summary.last_entry),
        number(summary.last_add_confirmed),
        number(summary.explicit_lac),
        number(summary.journaled_entries) if summary.journaled_entries else "",
        " ".join(logs),
    )


def _print_detail(summary: LedgerSummary) -> None:
    deleted = (
        datetime.fromtimestamp(summary.deleted_at_ms / 1000, UTC).isoformat() if summary.deleted_at_ms else ""
    )
    holes = [f"{last + 1}-{first - 1}" for (_, last), (first, _) in pairwise(summary.ranges)]
    figures = [
        ("ledger", str(summary.ledger_id)),
        ("state", _state(summary)),
        ("deleted", deleted),
        ("last entry", number(summary.last_entry)),
        ("last add confirmed", number(summary.last_add_confirmed)),
        ("explicit LAC", number(summary.explicit_lac)),
        ("entries in entry logs", number(summary.entries)),
        ("bytes in entry logs", number(summary.bytes)),
        ("entries in journals only", number(summary.journaled_entries or -1)),
        ("entry logs", " ".join(f"{log_id:08x}" for log_id in summary.logs)),
        ("entries", " ".join(_range(*found) for found in summary.ranges)),
        ("not here", " ".join(holes)),
    ]
    print_table("", ("", ""), [row for row in figures if row[1]])


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
