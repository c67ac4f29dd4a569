"""`magnetar bookie journal dump` and `entrylog dump`: every record of a file, and what is wrong with it.

A line a record, as they are read: a journal of a gigabyte is never held. With --json every line is an object whose "kind"
says what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from ..terminal.session import EXIT_FAILED, print_json
from ..terminal.tables import Table, show
from .target import JsonLines, Meter, Target, figures, number, table, tool

journal_app = typer.Typer(no_args_is_help=True, help="The journals: what a start would replay.")
entrylog_app = typer.Typer(no_args_is_help=True, help="The entry logs: where entries stay.")

Row = dict[str, Any]
_LEDGERS_SHOWN = 20


@tool(journal_app, "dump", json=JsonLines)
async def journal_dump(
    target: Target,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="One journal file; all without it.", show_default=False)
    ] = "",
    journal: Annotated[
        int | None, typer.Option("--journal", min=0, help="Only this journal directory.", metavar="N")
    ] = None,
    from_mark: Annotated[bool, typer.Option("--from-mark", help="Only what a start would replay.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Files and gaps, no records.")] = False,
    as_json: bool = False,
) -> None:
    """The mark, every file, its records, and what a start makes of each gap: clean end, torn tail or damage."""
    async with target.any() as bookie:
        with Meter(quiet=as_json or not summary) as meter:
            rows = bookie.rows("journal", meter, journal=journal, file=file, from_mark=from_mark)
            _print(
                rows, lambda row: [_JOURNAL_LINES[row["kind"]](row)], meter, summary=summary, as_json=as_json
            )


@tool(entrylog_app, "dump", json=JsonLines)
async def entrylog_dump(
    target: Target,
    log: Annotated[
        str, typer.Argument(metavar="LOG", help="A log id (hexadecimal, as in its name) or a path.")
    ],
    summary: Annotated[bool, typer.Option("--summary", help="Statistics and damage, no records.")] = False,
    as_json: bool = False,
) -> None:
    """Header, records with whether the index points to them, damage, footer, bytes by ledger."""
    async with target.any() as bookie:
        with Meter(quiet=as_json or not summary) as meter:
            _print(
                bookie.rows("entrylog", meter, log=log), _log_lines, meter, summary=summary, as_json=as_json
            )


def _print(
    rows: Iterable[Row],
    shown: Callable[[Row], list[str | Table]],
    meter: Meter,
    *,
    summary: bool,
    as_json: bool,
) -> None:
    """Exit code 1 when there is damage."""
    damaged = False
    for row in rows:
        damaged = (
            damaged or bool(row.get("damage")) or row.get("torn") is False or row.get("state") == "missing"
        )
        if summary and row["kind"] == "record":
            continue
        if as_json:
            print_json(row)
            continue
        if row["kind"] == "statistics":
            meter.close()
        show(*shown(row))
    if damaged:
        raise SystemExit(EXIT_FAILED)


def _directory_line(row: Row) -> str:
    mark = row["mark"]
    where = (
        f"mark: file {mark['sequence']:016x}, offset {mark['offset']}, its file begins at offset {mark['base']}"
        if mark is not None
        else "no mark: a start replays nothing of it"
    )
    extra = "" if row["in_settings"] else "; the settings do not name it"
    return f"journal {row['number']}  {row['path']}  ({where}{extra})"


def _file_line(row: Row) -> str:
    begins = f", begins at offset {row['base']}" if row["base"] >= 0 else ""
    return f"  file {row['path']}  {row['bytes']:,} bytes, {row['state']}{begins}"


def _gap_line(row: Row) -> str:
    behind = (
        f"; good records go on at offset {row['resumes_at']}, one of them written when all before offset "
        f"{row['later_synced_to']} was synced"
        if row["resumes_at"] >= 0
        else ""
    )
    verdict = row["verdict"].upper() if row["damage"] else row["verdict"]
    return f"    {verdict} at byte {row['position']}, offset {row['offset']}{behind}"


def _record_line(row: Row) -> str:
    subject = ""
    if row["ledger_id"] >= 0:
        entry = f":{row['entry_id']}" if row["entry_id"] >= 0 else ""
        confirmed = f" LAC {row['last_add_confirmed']}" if row["type"] in ("ADD", "LAST_CONFIRMED") else ""
        subject = f"{row['ledger_id']}{entry}{confirmed}  "
    below = "  below mark" if row["below_mark"] else ""
    return (
        f"    {row['position']:>12}  offset {row['offset']:<12} synced_to {row['synced_to']:<12} "
        f"{row['type']:<14} {subject}{row['payload_bytes']} bytes{below}"
    )


_JOURNAL_LINES = {"journal": _directory_line, "file": _file_line, "gap": _gap_line, "record": _record_line}


def _log_lines(row: Row) -> list[str | Table]:
    return _statistics(row) if row["kind"] == "statistics" else [_log_line(row)]


def _log_line(row: Row) -> str:
    if row["kind"] == "header":
        damage = f"  DAMAGED: {row['damage']}" if row["damage"] else ""
        return f"entry log {row['log_id']:08x}  {row['path']}  {row['bytes']:,} bytes{damage}"
    ledger, entry, position = row["ledger_id"], row["entry_id"], row["position"]
    if row["kind"] == "broken":
        claim = f", its first bytes say {ledger}:{entry}" if ledger >= 0 else ""
        live = f", the index has {row['live']} entries there" if row["live"] else ""
        what = "torn tail" if row["torn"] else "DAMAGE"
        return f"  {what} at byte {position}, {row['bytes']} bytes{claim}{live}"
    if row["type"] != "entry":
        subject = f"{ledger} " if row["type"] == "state" else ""
        return f"  {position:>12}  {row['type']:<7} {subject}{row['content']}".rstrip()
    live = {True: "live", False: "not live", None: ""}[row["live"]]
    return f"  {position:>12}  {ledger}:{entry}  {row['bytes']} bytes  {live}".rstrip()


def _statistics(row: Row) -> list[str | Table]:
    footer = {True: "good", False: "DAMAGED", None: "none: the log was not closed"}[row["footer"]]
    largest = sorted(row["ledgers"], key=lambda ledger: -ledger["bytes"])
    rows = [
        (str(ledger["ledger_id"]), *(number(ledger[name]) for name in ("records", "bytes", "live")))
        for ledger in largest[:_LEDGERS_SHOWN]
    ]
    more = f" (largest {_LEDGERS_SHOWN} of {len(largest)})" if len(largest) > _LEDGERS_SHOWN else ""
    return [
        figures(
            ("records", number(row["records"])),
            ("bytes of records", number(row["record_bytes"])),
            ("entries that the index has here", number(row["live"])),
            ("bytes of those", number(row["live_bytes"])),
            ("footer", footer),
            ("damaged ranges", number(row["damaged"])),
            ("torn bytes", number(row["torn_bytes"])),
            ("damage", row["damage"]),
        ),
        table(f"ledgers{more}", ("ledger", "records", "bytes", "live"), rows, right=(0, 1, 2, 3)),
    ]
