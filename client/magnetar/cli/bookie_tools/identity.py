"""`magnetar bookie info`, `cookie` and `convert-to-read-only`."""

from __future__ import annotations

from typing import Any

from magnetar.bookie.directories import forget_ledger_directory, rename_directory
from magnetar.bookie.offline.identity import (
    DirectoryReport,
    accept_new_disks,
    describe_cookie,
)
from magnetar.bookie.offline.stopped import StoppedBookie
from magnetar.runtime.files import OsFiles

from ..terminal.session import EXIT_FAILED, EXIT_USAGE, confirm, fail, print_json, run
from ..wiring.metadata import system_rng
from .open import bookie_settings, number, print_table, with_stopped, with_tool
from .running import Tool
from .target import Target

_ROLE_COLUMNS = ("role", "directory", "files", "bytes", "in cookie", "in settings", "copy of the cookie")


def info(target: Target, *, as_json: bool) -> None:
    """Identity, directories, mark, sizes, read-only."""

    def work(tool: Tool) -> int:
        record = tool.info()
        if as_json:
            print_json(record)
        else:
            _print_info(record)
        return EXIT_FAILED if record["problem"] else 0

    with_tool(target, work)


def _print_info(record: dict[str, Any]) -> None:
    names = ("bookie_id", "instance", "cluster", "format_version", "data_directory", "index_directory")
    figures = [(name.replace("_", " "), str(record[name])) for name in names if record[name] != ""]
    for name, place in (record["mark"] or {}).items():
        figures.append((f"mark of {name}", f"file {place['sequence']:016x}, offset {place['offset']}"))
    figures.append(("entry logs", f"{record['entry_logs']:,} with {record['entry_log_bytes']:,} bytes"))
    figures.append(("disk", f"{record['free_bytes']:,} of {record['total_bytes']:,} bytes free"))
    figures.append(("read-only", record["read_only_reason"] or "no"))
    figures.append(("runs", "yes" if record["running"] else "no"))
    print_table("", ("", ""), figures)
    _print_directories(record["directories"])
    if record["problem"]:
        print(f"A START WOULD BE REFUSED: {record['problem']}")


def cookie(
    target: Target,
    *,
    check: bool,
    lost: str | None,
    moved: str | None,
    new_disks: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Shows it, after the change that was asked for; with `check` exit code 1 when a start would refuse the directories."""
    if sum(one is not None for one in (lost, moved, new_disks)) > 1:
        fail("--lost-directory, --moved-directory and --accept-new-disk exclude each other", EXIT_USAGE)
    if new_disks is not None:
        _accept_new_disks(target, new_disks, yes)
    old, equals, new = (moved or "").partition("=")
    if moved is not None and not (old and equals and new):
        fail(f"--moved-directory {moved!r} is not OLD=NEW", EXIT_USAGE)

    def show(record: dict[str, Any]) -> int:
        _show_cookie(record, as_json=as_json)
        return EXIT_FAILED if check and record["problem"] else 0

    def change(bookie: StoppedBookie) -> int:
        if lost is not None:
            confirm(f"What {lost} held is damage from now on. Declare it lost?", yes)
            return show(describe_cookie(bookie, forget_ledger_directory(bookie.files, bookie.layout, lost)))
        return show(describe_cookie(bookie, rename_directory(bookie.files, bookie.layout, old, new)))

    if lost is None and moved is None:
        with_tool(target, lambda tool: show(tool.cookie()))
    elif target.bookie is not None:
        fail("a change of the cookie needs the bookie stopped: it takes --data, not --bookie", EXIT_USAGE)
    else:
        with_stopped(target, change)


def _accept_new_disks(target: Target, bookie_id: str, yes: bool) -> None:
    settings = bookie_settings(target)
    if not bookie_id:
        fail("--accept-new-disk needs the id of the bookie that lost its disks", EXIT_USAGE)
    confirm(f"Are all disks of bookie {bookie_id} lost, and shall empty directories take their place?", yes)

    async def accept() -> None:
        await accept_new_disks(settings, OsFiles(), bookie_id, system_rng())

    run(accept())


def _show_cookie(record: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(record)
        return
    names = ("bookie_id", "instance", "cluster", "format_version")
    figures = [(name.replace("_", " "), str(record[name])) for name in names if record[name] != ""]
    if record["repairing"]:
        figures.append(("repair mode", "it replaces a lost bookie, and no broker has registered it yet"))
    print_table("", ("", ""), figures)
    _print_directories(record["directories"])
    problem = record["problem"]
    print(f"A START WOULD BE REFUSED: {problem}" if problem else "a start would take these directories")


def _print_directories(directories: list[dict[str, Any]]) -> None:
    """Journal and ledger directories."""
    rows = [
        (
            row.role,
            row.path,
            number(row.files) if row.exists else "missing",
            number(row.bytes) if row.exists else "",
            "lost" if row.lost else "yes" if row.known else "no",
            "yes" if row.in_settings else "no",
            row.copy,
        )
        for row in [DirectoryReport(**fields) for fields in directories]
    ]
    print_table("directories", _ROLE_COLUMNS, rows, right=(2, 3))


def convert_to_read_only(
    target: Target,
    *,
    undo: bool,
    reason: str,
    as_json: bool,
) -> None:
    """Sets or clears the marker; doing it twice is fine."""

    def work(tool: Tool) -> None:
        record = tool.convert_to_read_only(reason, undo=undo)
        if as_json:
            print_json(record)
            return
        since = "now" if tool.running else "from its next start on"
        if record["read_only"]:
            print(f"bookie {record['bookie_id']} is read-only {since}: {record['read_only_reason']}")
        else:
            print(f"bookie {record['bookie_id']} is writable {since}")

    with_tool(target, work)
