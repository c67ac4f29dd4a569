"""`magnetar bookie verify` and `magnetar bookie index rebuild`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict

from magnetar.bookie.offline.index_rebuild import RebuildReport
from magnetar.bookie.offline.index_rebuild import rebuild as rebuild_index
from magnetar.bookie.offline.stopped import StoppedBookie

from ..terminal.session import EXIT_FAILED, confirm, print_json
from ..terminal.tables import counted
from .open import Meter, number, print_table, with_stopped, with_tool
from .running import Row, Tool
from .target import Target

# Rows of the table; --json prints all findings that were recorded.
_FINDINGS_SHOWN = 50


def verify(target: Target, *, as_json: bool) -> None:
    """Exit code 0: sound, 1: damage."""

    def work(tool: Tool) -> int:
        with Meter(quiet=as_json) as meter:
            result = tool.verify(meter)
        if as_json:
            print_json(result)
        else:
            _print(str(tool.info()["data_directory"]), result)
            if tool.running:
                print("it runs: this is what its scrub has verified so far")
        return 0 if result["sound"] else EXIT_FAILED

    with_tool(target, work)


def _print(root: str, result: Row) -> None:
    checks = [
        (
            check["part"],
            _short(root, check["path"]),
            number(check["records"]),
            number(check["bytes"]) if check["bytes"] else "",
            check["verdict"],
            check["note"],
        )
        for check in result["checks"]
    ]
    print_table("", ("part", "file", "records", "bytes", "verdict", ""), checks, right=(2, 3))
    found = result["damage_found"]
    if result["findings"]:
        shown = [
            (
                finding["part"],
                _short(root, finding["path"]),
                "" if finding["position"] < 0 else str(finding["position"]),
                _entry(finding["ledger_id"], finding["entry_id"]),
                finding["text"],
            )
            for finding in result["findings"][:_FINDINGS_SHOWN]
        ]
        print_table("damage", ("part", "file", "byte", "entry", ""), shown, right=(2,))
        if found > len(shown):
            print(f"and {found - len(shown):,} more; --json lists the first 10,000")
    if result["sound"]:
        print("sound")
    elif found:
        print(f"NOT SOUND: {counted(found, 'finding', 'findings')}")
    else:
        print("NOT SOUND: a part could not be checked")


def _short(root: str, path: str) -> str:
    inside = os.path.relpath(path, root) if path else ""
    return path if inside.startswith("..") else inside


def _entry(ledger_id: int, entry_id: int) -> str:
    if ledger_id < 0:
        return ""
    return f"{ledger_id}:{entry_id}" if entry_id >= 0 else f"{ledger_id}"


def rebuild(
    target: Target,
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """The exit code is 0 also when damage was met: it is in the report, and the bookie reports it when it is read."""

    async def work(bookie: StoppedBookie) -> int:
        if not dry_run:
            _ask(bookie, yes)
        with Meter(quiet=as_json) as meter:
            report = await rebuild_index(bookie, dry_run=dry_run, progress=meter)
        if as_json:
            record = asdict(report)
            record["damaged"] = [found._asdict() for found in report.damaged]
            print_json({"dry_run": dry_run} | record)
        else:
            _print_report(bookie, report, dry_run)
        return 0

    with_stopped(target, work)


def _ask(bookie: StoppedBookie, yes: bool) -> None:
    count = len(bookie.logs())
    confirm(
        f"Make {bookie.layout.index} anew from {count:,} entry logs? The old one stays beside it.",
        yes,
        refusal="this replaces the index: say --yes",
    )


def _print_report(bookie: StoppedBookie, report: RebuildReport, dry_run: bool) -> None:
    root = bookie.layout.root
    damaged = f"{len(report.damaged):,} ranges with {report.damaged_bytes:,} bytes" if report.damaged else ""
    figures = [
        ("entry logs", f"{report.logs:,} with {report.bytes:,} bytes"),
        ("entries", number(report.entries)),
        ("ledgers", number(report.ledgers)),
        ("state records", number(report.states)),
        ("older copies", number(report.duplicates) if report.duplicates else ""),
        ("torn tails", f"{report.torn_bytes:,} bytes" if report.torn_bytes else ""),
        ("damaged", damaged),
        ("entries that are damaged", number(report.kept_places) if report.kept_places else ""),
        ("incomplete ledgers", _some(report.unknown_ledgers)),
        ("the old index", report.old_index_fault),
    ]
    print_table("", ("", ""), [row for row in figures if row[1]])
    for path, error in report.unreadable.items():
        print(f"{_short(root, path)} cannot be read: {error}")
    for found in report.damaged[:_FINDINGS_SHOWN]:
        print(f"{_short(root, found.path)} is damaged at byte {found.offset}, {found.length:,} bytes")
    if report.incomplete:
        print(
            "entries may be lost that nobody can name: this bookie will not say of any entry that it does not exist"
        )
    if dry_run:
        print("nothing was changed")
    elif report.old_index:
        print(f"the index is made anew; the old one is {report.old_index}: delete it when all is well")
    else:
        print("the index is made anew")


def _some(ledgers: Sequence[int]) -> str:
    shown = " ".join(map(str, ledgers[:20]))
    return f"{shown} and {len(ledgers) - 20:,} more" if len(ledgers) > 20 else shown
