"""`magnetar bookie journal dump` and `entrylog dump`: every record of a file, and what is wrong with it.

A line a record, as they are read: a journal of a gigabyte is never held. With --json every line is an object whose "kind"
says what it is.
"""

from __future__ import annotations

from ..terminal.session import EXIT_FAILED, print_json
from .open import Meter, number, print_table, with_tool
from .running import Row, Tool
from .target import Target

_LEDGERS_SHOWN = 20


def journal(
    target: Target,
    *,
    file: str,
    journal: int | None,
    from_mark: bool,
    summary: bool,
    as_json: bool,
) -> None:
    """Exit code 1 when there is damage."""

    def work(tool: Tool) -> int:
        damaged = False
        with Meter(quiet=as_json or not summary) as meter:
            for row in tool.journal(journal, file, from_mark, meter):
                damaged = damaged or bool(row.get("damage")) or row.get("state") == "missing"
                if summary and row["kind"] == "record":
                    continue
                if as_json:
                    print_json(row)
                else:
                    print(_JOURNAL_LINES[row["kind"]](row))
        return EXIT_FAILED if damaged else 0

    with_tool(target, work)


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


def entry_log(
    target: Target,
    *,
    log: str,
    summary: bool,
    as_json: bool,
) -> None:
    """Exit code 1 when there is damage."""

    def work(tool: Tool) -> int:
        damaged = False
        with Meter(quiet=as_json or not summary) as meter:
            for row in tool.entry_log(log, meter):
                damaged = damaged or bool(row.get("damage")) or row.get("torn") is False
                if summary and row["kind"] == "record":
                    continue
                if as_json:
                    print_json(row)
                elif row["kind"] == "statistics":
                    meter.close()
                    _print_end(row)
                else:
                    print(_log_line(row))
        return EXIT_FAILED if damaged else 0

    with_tool(target, work)


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


def _print_end(row: Row) -> None:
    footer = {True: "good", False: "DAMAGED", None: "none: the log was not closed"}[row["footer"]]
    print_table(
        "",
        ("", ""),
        [
            ("records", number(row["records"])),
            ("bytes of records", number(row["record_bytes"])),
            ("entries that the index has here", number(row["live"])),
            ("bytes of those", number(row["live_bytes"])),
            ("footer", footer),
            ("damaged ranges", number(row["damaged"])),
            ("torn bytes", number(row["torn_bytes"])),
            *([("damage", row["damage"])] if row["damage"] else []),
        ],
    )
    largest = sorted(row["ledgers"], key=lambda ledger: -ledger["bytes"])
    rows = [
        (str(ledger["ledger_id"]), *(number(ledger[name]) for name in ("records", "bytes", "live")))
        for ledger in largest[:_LEDGERS_SHOWN]
    ]
    more = f" (largest {_LEDGERS_SHOWN} of {len(largest)})" if len(largest) > _LEDGERS_SHOWN else ""
    print_table(f"ledgers{more}", ("ledger", "records", "bytes", "live"), rows, right=(0, 1, 2, 3))
