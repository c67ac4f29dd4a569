"""Cookie and directories of a stopped bookie: what is there, and whether a start would accept it."""

from __future__ import annotations

import os
import random
from typing import Any, NamedTuple

from magnetar.proto.errors import MagnetarError
from magnetar.runtime.files import Files, file_size

from ..cookie import FORMAT_VERSION, JOURNAL_ROLE, LEDGERS_ROLE, Cookie, decode_cookie
from ..directories import (
    check_data_directory,
    data_names,
    replace_cookie,
)
from ..disk_space import read_only_reason
from ..layout import DataLayout
from ..settings import BookieSettings
from .journals import read_mark
from .stopped import BookieData, lock_stopped


class DirectoryReport(NamedTuple):
    """A journal or ledger directory, known to the cookie or named by the settings.

    `copy`: "ours", "none", "damaged", or what another cookie there says. `files`: journals or entry logs in it.
    """

    role: str
    name: str
    path: str
    known: bool
    lost: bool
    in_settings: bool
    exists: bool
    copy: str
    files: int
    bytes: int


def inspect_directories(bookie: BookieData, cookie: Cookie) -> list[DirectoryReport]:
    """Journal directories first, in the order of the settings, then those that only the cookie knows."""
    layout = bookie.layout
    rows: list[DirectoryReport] = []
    lost = {row.name for row in cookie.ledger_directories if row.lost}
    for role, paths, known in (
        (JOURNAL_ROLE, layout.journals, list(cookie.journal_directories)),
        (LEDGERS_ROLE, layout.ledgers, [row.name for row in cookie.ledger_directories]),
    ):
        for name in dict.fromkeys([*map(layout.name_of, paths), *known]):
            path = layout.directory(name)
            exists = bookie.files.exists(path)
            names = data_names(bookie.files, path) if exists else []
            size = sum(file_size(bookie.files, os.path.join(path, one)) for one in names)
            rows.append(
                DirectoryReport(
                    role,
                    name,
                    path,
                    name in known,
                    role == LEDGERS_ROLE and name in lost,
                    path in paths,
                    exists,
                    _copy(bookie, cookie, role, name, path),
                    len(names),
                    size,
                )
            )
    return rows


def _copy(bookie: BookieData, cookie: Cookie, role: str, name: str, path: str) -> str:
    copy_path = os.path.join(path, "cookie")
    if not bookie.files.exists(copy_path):
        return "none"
    try:
        copy = decode_cookie(bookie.files.read(copy_path), copy_path)
    except MagnetarError:
        return "damaged"
    if (copy.instance, copy.role, copy.directory) == (cookie.instance, role, name):
        return "ours"
    if copy.instance != cookie.instance:
        return f"of bookie {copy.bookie_id}"
    return f"of {copy.role} directory {copy.directory}"


def describe(bookie: BookieData, *, running: bool) -> dict[str, Any]:
    """The first look: identity, directories (DirectoryReport), sizes, mark, read-only; `problem` is that of a start."""
    cookie, logs = bookie.cookie, bookie.logs()
    reason = read_only_reason(bookie.files, bookie.layout)
    free, total = bookie.files.free_bytes(bookie.layout.root)
    problem = check_identity(bookie)
    mark: dict[str, Any] | None = None
    try:
        mark = {name: place._asdict() for name, place in (read_mark(bookie) or {}).items()}
    except MagnetarError as error:
        problem = problem or error.message
    return _identity_of(cookie) | {
        "running": running,
        "data_directory": os.path.abspath(bookie.layout.root),
        "index_directory": bookie.layout.index,
        "directories": [row._asdict() for row in inspect_directories(bookie, cookie)],
        "mark": mark,
        "entry_logs": len(logs),
        "entry_log_bytes": sum(log.bytes for log in logs),
        "free_bytes": free,
        "total_bytes": total,
        "read_only": bool(reason),
        "read_only_reason": reason,
        "problem": problem,
    }


def describe_cookie(bookie: BookieData, cookie: Cookie) -> dict[str, Any]:
    """What the cookie says, and its directories; `problem`: why a start would refuse them, "" if it would not."""
    fields = cookie._asdict()
    del fields["incarnations"]  # hundreds of random numbers
    return (
        fields
        | _identity_of(cookie)
        | {
            "ledger_directories": [row._asdict() for row in cookie.ledger_directories],
            "directories": [row._asdict() for row in inspect_directories(bookie, cookie)],
            "problem": check_identity(bookie),
        }
    )


def _identity_of(cookie: Cookie) -> dict[str, Any]:
    return {
        "bookie_id": cookie.bookie_id,
        "instance": f"{cookie.instance:016x}",
        "cluster": f"{cookie.cluster:016x}" if cookie.cluster else "",
        "format_version": FORMAT_VERSION,
    }


def check_identity(bookie: BookieData) -> str:
    """Why a start would refuse cookie or directories; empty: it would not. Changes nothing."""
    try:
        check_data_directory(bookie.files, bookie.layout, bookie.settings.bookie_id, random.Random(0))
    except MagnetarError as error:
        return error.message
    return ""


async def accept_new_disks(
    settings: BookieSettings, files: Files, bookie_id: str, rng: random.Random
) -> Cookie:
    """Empty directories take the place of all that bookie `bookie_id` lost: it starts in repair mode (rule 9). Durable.

    DataDirectoryError when anything is left in them, or a bookie runs there.
    """
    layout = DataLayout.of(settings)
    files.make_directory(layout.root)
    lock = await lock_stopped(files, layout)
    try:
        return replace_cookie(files, layout, bookie_id, rng)
    finally:
        lock.release()
