"""Cookie and directories of a stopped bookie: what is there, and whether a start would accept it."""

from __future__ import annotations

import os
import random
from typing import NamedTuple

from magnetar.proto.errors import MagnetarError
from magnetar.runtime.files import Files, file_size

from ..cookie import JOURNAL_ROLE, LEDGERS_ROLE, Cookie, decode_cookie
from ..directories import (
    data_names,
    forget_ledger_directory,
    open_data_directory,
    rename_directory,
    replace_cookie,
)
from ..layout import DataLayout
from ..settings import BookieSettings
from .look_only import LookOnlyFiles
from .stopped import StoppedBookie, lock_stopped

__all__ = [
    "DirectoryReport",
    "accept_new_disks",
    "check_identity",
    "declare_lost",
    "declare_moved",
    "inspect_directories",
]


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


def inspect_directories(bookie: StoppedBookie, cookie: Cookie) -> list[DirectoryReport]:
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


def _copy(bookie: StoppedBookie, cookie: Cookie, role: str, name: str, path: str) -> str:
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


def check_identity(bookie: StoppedBookie) -> str:
    """Why a start would refuse cookie or directories; empty: it would not. Changes nothing."""
    try:
        open_data_directory(
            LookOnlyFiles(bookie.files), bookie.layout, bookie.settings.bookie_id, random.Random(0)
        )
    except MagnetarError as error:
        return error.message
    return ""


def declare_lost(bookie: StoppedBookie, directory: str) -> Cookie:
    """Declares a ledger directory lost for good; see `directories.forget_ledger_directory`. DataDirectoryError. Durable."""
    return forget_ledger_directory(bookie.files, bookie.layout, directory)


def declare_moved(bookie: StoppedBookie, old: str, new: str) -> Cookie:
    """What was `old` is mounted at `new`; see `directories.rename_directory`. DataDirectoryError. Durable."""
    return rename_directory(bookie.files, bookie.layout, old, new)


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
