"""Cookie and directories of a stopped bookie: what is there, and what a start would say to it."""

from __future__ import annotations

import os
import random
from typing import NamedTuple

from magnetar.proto.errors import DataDirectoryError, MagnetarError

from ..cookie import JOURNAL_ROLE, LEDGERS_ROLE, Cookie, decode_cookie
from ..directories import data_names, open_data_directory
from .look_only import LookOnlyFiles
from .stopped import StoppedBookie, file_size

__all__ = ["DirectoryState", "check_identity", "inspect_directories"]


class DirectoryState(NamedTuple):
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


def inspect_directories(bookie: StoppedBookie, cookie: Cookie) -> list[DirectoryState]:
    """Journal directories first, in the order of the settings, then those that only the cookie knows."""
    layout = bookie.layout
    rows: list[DirectoryState] = []
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
                DirectoryState(
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
    except DataDirectoryError as error:
        return error.message
    return ""
