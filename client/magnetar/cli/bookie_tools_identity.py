"""`magnetar bookie info`, `cookie` and `convert-to-read-only`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from magnetar.bookie.cookie import FORMAT_VERSION, Cookie
from magnetar.bookie.offline import (
    DirectoryReport,
    StoppedBookie,
    accept_new_disks,
    check_identity,
    declare_lost,
    declare_moved,
    inspect_directories,
    read_mark,
)
from magnetar.bookie.read_only import clear_read_only, marker_path, read_only_reason, set_read_only
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.files import OsFiles

from .admin import confirm
from .bookie_tools_open import bookie_settings, number, print_table, with_bookie
from .production import system_rng
from .session import EXIT_FAILED, EXIT_USAGE, fail, print_json, run

_ROLE_COLUMNS = ("role", "directory", "files", "bytes", "in cookie", "in settings", "copy of the cookie")


def info(data: str | None, config: str | None, assignments: Sequence[str] | None, *, as_json: bool) -> None:
    """Identity, directories, mark, sizes, read-only."""

    def work(bookie: StoppedBookie) -> int:
        cookie = bookie.cookie
        directories = inspect_directories(bookie, cookie)
        reason = read_only_reason(bookie.files, bookie.layout)
        free, total = bookie.files.free_bytes(bookie.layout.root)
        try:
            mark: dict[str, Any] | None = {
                name: place._asdict() for name, place in (read_mark(bookie) or {}).items()
            }
            problem = ""
        except MagnetarError as error:
            mark, problem = None, error.message
        problem = check_identity(bookie) or problem
        logs = bookie.logs()
        record = {
            "bookie_id": cookie.bookie_id,
            "instance": f"{cookie.instance:016x}",
            "cluster": f"{cookie.cluster:016x}" if cookie.cluster else "",
            "format_version": FORMAT_VERSION,
            "data_directory": os.path.abspath(bookie.layout.root),
            "index_directory": bookie.layout.index,
            "directories": [row._asdict() for row in directories],
            "mark": mark,
            "entry_logs": len(logs),
            "entry_log_bytes": sum(log.bytes for log in logs),
            "free_bytes": free,
            "total_bytes": total,
            "read_only": bool(reason),
            "read_only_reason": reason,
            "problem": problem,
        }
        if as_json:
            print_json(record)
        else:
            _print_info(record, directories)
        return EXIT_FAILED if problem else 0

    with_bookie(data, config, assignments, work)


def _print_info(record: dict[str, Any], directories: list[DirectoryReport]) -> None:
    names = ("bookie_id", "instance", "cluster", "format_version", "data_directory", "index_directory")
    figures = [(name.replace("_", " "), str(record[name])) for name in names if record[name] != ""]
    for name, place in (record["mark"] or {}).items():
        figures.append((f"mark of {name}", f"file {place['sequence']:016x}, offset {place['offset']}"))
    figures.append(("entry logs", f"{record['entry_logs']:,} with {record['entry_log_bytes']:,} bytes"))
    figures.append(("disk", f"{record['free_bytes']:,} of {record['total_bytes']:,} bytes free"))
    figures.append(("read-only", record["read_only_reason"] or "no"))
    print_table("", ("", ""), figures)
    print_directories(directories)
    if record["problem"]:
        print(f"A START WOULD BE REFUSED: {record['problem']}")


def cookie(
    data: str | None,
    config: str | None,
    assignments: Sequence[str] | None,
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
        _accept_new_disks(data, config, assignments, new_disks, yes)
    old, equals, new = (moved or "").partition("=")
    if moved is not None and not (old and equals and new):
        fail(f"--moved-directory {moved!r} is not OLD=NEW", EXIT_USAGE)

    def work(bookie: StoppedBookie) -> int:
        found = bookie.cookie
        if lost is not None:
            confirm(f"What {lost} held is damage from now on. Declare it lost?", yes)
            found = declare_lost(bookie, lost)
        elif moved is not None:
            found = declare_moved(bookie, old, new)
        problem = _show_cookie(bookie, found, as_json=as_json)
        return EXIT_FAILED if check and problem else 0

    with_bookie(data, config, assignments, work)


def _accept_new_disks(
    data: str | None, config: str | None, assignments: Sequence[str] | None, bookie_id: str, yes: bool
) -> None:
    settings = bookie_settings(data, config, assignments)
    if not bookie_id:
        fail("--accept-new-disk needs the id of the bookie that lost its disks", EXIT_USAGE)
    confirm(f"Are all disks of bookie {bookie_id} lost, and shall empty directories take their place?", yes)

    async def accept() -> None:
        await accept_new_disks(settings, OsFiles(), bookie_id, system_rng())

    run(accept())


def _show_cookie(bookie: StoppedBookie, found: Cookie, *, as_json: bool) -> str:
    """Returns why a start would refuse it; empty: it would not."""
    directories = inspect_directories(bookie, found)
    problem = check_identity(bookie)
    record = found._asdict()
    del record["incarnations"]  # hundreds of random numbers
    record |= {
        "format_version": FORMAT_VERSION,
        "instance": f"{found.instance:016x}",
        "cluster": f"{found.cluster:016x}" if found.cluster else "",
        "ledger_directories": [row._asdict() for row in found.ledger_directories],
        "directories": [row._asdict() for row in directories],
        "problem": problem,
    }
    if as_json:
        print_json(record)
        return problem
    names = ("bookie_id", "instance", "cluster", "format_version")
    figures = [(name.replace("_", " "), str(record[name])) for name in names if record[name] != ""]
    if found.repairing:
        figures.append(("repair mode", "it replaces a lost bookie, and no broker has registered it yet"))
    print_table("", ("", ""), figures)
    print_directories(directories)
    print(f"A START WOULD BE REFUSED: {problem}" if problem else "a start would take these directories")
    return problem


def print_directories(directories: list[DirectoryReport]) -> None:
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
        for row in directories
    ]
    print_table("directories", _ROLE_COLUMNS, rows, right=(2, 3))


def convert_to_read_only(
    data: str | None,
    config: str | None,
    assignments: Sequence[str] | None,
    *,
    undo: bool,
    reason: str,
    as_json: bool,
) -> None:
    """Sets or clears the marker; doing it twice is fine."""

    def work(bookie: StoppedBookie) -> None:
        cookie = bookie.cookie  # nothing is written into what is not a bookie's directory
        if undo:
            clear_read_only(bookie.files, bookie.layout)
        else:
            set_read_only(bookie.files, bookie.layout, reason)
        why = read_only_reason(bookie.files, bookie.layout)
        if as_json:
            print_json({"bookie_id": cookie.bookie_id, "read_only": bool(why), "read_only_reason": why})
        elif why:
            print(
                f"bookie {cookie.bookie_id} is read-only from its next start on: {why} ({marker_path(bookie.layout)})"
            )
        else:
            print(f"bookie {cookie.bookie_id} is writable from its next start on")

    with_bookie(data, config, assignments, work)
