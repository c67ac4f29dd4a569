"""`magnetar bookie journal dump` and `entrylog dump`: every record of a file, and what is wrong with it.

A line a record, as they are read: a journal of a gigabyte is never held. With --json every line is an object whose "kind"
says what it is.
"""

from __future__ import annotations

from typing import Any

from magnetar.bookie.offline.entry_logs import LogBroken, LogEnd, LogHeader, LogRecord
from magnetar.bookie.offline.journals import JournalDirectory, JournalFileReport, JournalGap, JournalRecord

from .bookie_target import Target
from .bookie_tools_open import Meter, number, print_table, with_tool
from .bookie_tools_running import Tool
from .session import EXIT_FAILED, print_json

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
            for item in tool.journal(journal, file, from_mark, meter):
                damaged = damaged or (isinstance(item, JournalGap) and item.is_damage)
                damaged = damaged or (isinstance(item, JournalFileReport) and item.state == "missing")
                if summary and isinstance(item, JournalRecord):
                    continue
                if as_json:
                    print_json(_journal_record(item))
                else:
                    print(_journal_line(item))
        return EXIT_FAILED if damaged else 0

    with_tool(target, work)


def _journal_line(item: JournalDirectory | JournalFileReport | JournalRecord | JournalGap) -> str:
    if isinstance(item, JournalDirectory):
        mark = item.mark
        where = (
            f"mark: file {mark.sequence:016x}, offset {mark.offset}, its file begins at offset {mark.base}"
            if mark is not None
            else "no mark: a start replays nothing of it"
        )
        extra = "" if item.in_settings else "; the settings do not name it"
        return f"journal {item.number}  {item.path}  ({where}{extra})"
    if isinstance(item, JournalFileReport):
        begins = f", begins at offset {item.base}" if item.base >= 0 else ""
        return f"  file {item.path}  {item.bytes:,} bytes, {item.state}{begins}"
    if isinstance(item, JournalGap):
        behind = (
            f"; good records go on at offset {item.resumes_at}, one of them written when all before offset "
            f"{item.later_synced_to} was synced"
            if item.resumes_at >= 0
            else ""
        )
        verdict = item.verdict.upper() if item.is_damage else item.verdict
        return f"    {verdict} at byte {item.position}, offset {item.offset}{behind}"
    below = "  below mark" if item.below_mark else ""
    return (
        f"    {item.position:>12}  offset {item.offset:<12} synced_to {item.synced_to:<12} "
        f"{item.type:<14} {_subject(item)}{item.payload_bytes} bytes{below}"
    )


def _subject(item: JournalRecord) -> str:
    if item.ledger_id < 0:
        return ""
    entry = f":{item.entry_id}" if item.entry_id >= 0 else ""
    confirmed = f" LAC {item.last_add_confirmed}" if item.type in ("ADD", "LAST_CONFIRMED") else ""
    return f"{item.ledger_id}{entry}{confirmed}  "


def _journal_record(
    item: JournalDirectory | JournalFileReport | JournalRecord | JournalGap,
) -> dict[str, Any]:
    """The line of --json."""
    if isinstance(item, JournalDirectory):
        mark = item.mark._asdict() if item.mark is not None else None
        return {"kind": "journal"} | item._asdict() | {"mark": mark}
    if isinstance(item, JournalFileReport):
        return {"kind": "file"} | item._asdict()
    if isinstance(item, JournalGap):
        return {"kind": "gap"} | item._asdict() | {"damage": item.is_damage}
    fields = item._asdict()
    del fields["change"]  # its ids and times are fields of their own
    return {"kind": "record"} | fields


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
            for item in tool.entry_log(log, meter):
                damaged = damaged or (isinstance(item, LogHeader | LogEnd) and bool(item.damage))
                damaged = damaged or (isinstance(item, LogBroken) and not item.torn)
                if summary and isinstance(item, LogRecord):
                    continue
                if as_json:
                    print_json(_log_record(item))
                elif isinstance(item, LogEnd):
                    meter.close()
                    _print_end(item)
                else:
                    print(_log_line(item))
        return EXIT_FAILED if damaged else 0

    with_tool(target, work)


def _log_line(item: LogHeader | LogRecord | LogBroken) -> str:
    if isinstance(item, LogHeader):
        damage = f"  DAMAGED: {item.damage}" if item.damage else ""
        return f"entry log {item.log_id:08x}  {item.path}  {item.bytes:,} bytes{damage}"
    if isinstance(item, LogBroken):
        claim = f", its first bytes say {item.ledger_id}:{item.entry_id}" if item.ledger_id >= 0 else ""
        live = f", the index has {item.live} entries there" if item.live else ""
        what = "torn tail" if item.torn else "DAMAGE"
        return f"  {what} at byte {item.position}, {item.bytes} bytes{claim}{live}"
    if item.type != "entry":
        subject = f"{item.ledger_id} " if item.type == "state" else ""
        return f"  {item.position:>12}  {item.type:<7} {subject}{item.content}".rstrip()
    live = {True: "live", False: "not live", None: ""}[item.live]
    return f"  {item.position:>12}  {item.ledger_id}:{item.entry_id}  {item.bytes} bytes  {live}".rstrip()


def _log_record(item: LogHeader | LogRecord | LogBroken | LogEnd) -> dict[str, Any]:
    """The line of --json."""
    kinds = {LogHeader: "header", LogRecord: "record", LogBroken: "broken", LogEnd: "statistics"}
    fields = item._asdict()
    if isinstance(item, LogEnd):
        fields["ledgers"] = [row._asdict() for row in item.ledgers.values()]
    return {"kind": kinds[type(item)]} | fields


def _print_end(item: LogEnd) -> None:
    footer = {True: "good", False: "DAMAGED", None: "none: the log was not closed"}[item.footer]
    print_table(
        "",
        ("", ""),
        [
            ("records", number(item.records)),
            ("bytes of records", number(item.record_bytes)),
            ("entries that the index has here", number(item.live)),
            ("bytes of those", number(item.live_bytes)),
            ("footer", footer),
            ("damaged ranges", number(item.damaged)),
            ("torn bytes", number(item.torn_bytes)),
            *([("damage", item.damage)] if item.damage else []),
        ],
    )
    largest = sorted(item.ledgers.values(), key=lambda row: -row.bytes)
    rows = [
        (str(row.ledger_id), number(row.records), number(row.bytes), number(row.live))
        for row in largest[:_LEDGERS_SHOWN]
    ]
    more = f" (largest {_LEDGERS_SHOWN} of {len(largest)})" if len(largest) > _LEDGERS_SHOWN else ""
    print_table(f"ledgers{more}", ("ledger", "records", "bytes", "live"), rows, right=(0, 1, 2, 3))
