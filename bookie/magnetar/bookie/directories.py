"""Checks the directories at a start: accepts those that are certainly this bookie's, and refuses all others (rule 9).

For each journal and ledger directory, known to the cookie or named by the settings; the first row that matches holds. "Ours"
is a copy of this bookie's cookie with this role and name.

    | known      | in settings | copy      | holds data | what a start does                                      |
    |------------|-------------|-----------|------------|--------------------------------------------------------|
    | yes        | yes         | ours      | any        | takes it                                               |
    | yes, lost  | yes         | none      | no         | takes it as new: what was in it is damage              |
    | yes        | yes         | none      | any        | refused: an empty disk                                 |
    | any        | yes         | not ours  | any        | refused: swapped, moved, or another bookie's           |
    | no         | yes         | none/ours | no         | takes it as new                                        |
    | no         | yes         | none      | yes        | refused: whose data is it?                             |
    | no         | yes         | ours      | logs       | refused: it was declared lost, or taken out            |
    | yes, lost  | no          | any       | any        | forgets it: what was in it is damage                   |
    | ledgers    | no          | ours      | no         | forgets it                                             |
    | ledgers    | no          | any       | any        | refused: it has entries                                |
    | journal    | no          | any       | any        | replays what the mark needs of it, then forgets it     |

A new directory gets its copy before the cookie names it, and one that is forgotten loses it after: a crash in between
leaves a copy of ours and nothing else.
"""

from __future__ import annotations

import logging
import os
import random
from typing import NamedTuple

from magnetar.proto.errors import DataDirectoryError, MagnetarError
from magnetar.runtime.files import Files

from .cookie import (
    JOURNAL_ROLE,
    LEDGERS_ROLE,
    Cookie,
    CookieDirectory,
    copy_for,
    decode_cookie,
    encode_cookie,
    read_cookie,
    write_cookie,
)
from .layout import DataLayout
from .mark import decode_mark, encode_mark

_log = logging.getLogger(__name__)
_COPY = "cookie"
_SETTINGS = {JOURNAL_ROLE: "journal_directories", LEDGERS_ROLE: "ledger_directories"}


class Checked(NamedTuple):
    """What a start makes of cookie and directories that it accepts."""

    # As it will be, and as it was found; None: there is none yet.
    cookie: Cookie
    found: Cookie | None
    # Role and path of the directories that become this bookie's, and the names of those that it forgets.
    new: list[tuple[str, str]]
    emptied: list[str]


def check_data_directory(
    files: Files, layout: DataLayout, bookie_id: str, rng: random.Random, *, cluster: int = 0
) -> Checked:
    """Reads the cookie, or draws up a new one for empty directories, and checks every directory. Changes nothing.

    Raises DataDirectoryError for damage, for data without a cookie, for another bookie's or cluster's data, and for a
    directory that is missing, empty, swapped or left out.
    """
    found = cookie = read_cookie(files, layout)
    if cookie is None:
        _refuse_foreign_data(files, layout)
        instance = rng.getrandbits(64)
        cookie = Cookie(instance, bookie_id or f"bookie-{instance:016x}", cluster)
    if bookie_id and bookie_id != cookie.bookie_id:
        raise DataDirectoryError(
            f"{layout.root} belongs to bookie {cookie.bookie_id!r}, not to {bookie_id!r}; "
            "correct data_directory or bookie_id",
            path=layout.root,
        )
    if cluster and cookie.cluster and cluster != cookie.cluster:
        raise DataDirectoryError(
            f"{layout.root} belongs to another cluster ({cookie.cluster:016x}, the metadata store is "
            f"{cluster:016x}): the metadata store was emptied, or is not the one that lists this bookie's ledgers. Restore "
            "it, correct its address, or start with another data directory",
            path=layout.root,
        )
    named = [(JOURNAL_ROLE, path) for path in layout.journals]
    named += [(LEDGERS_ROLE, path) for path in layout.ledgers]
    new = [(role, path) for role, path in named if _is_new(files, layout, cookie, role, path)]
    journals = [layout.name_of(path) for path in layout.journals]
    ledgers = [layout.name_of(path) for path in layout.ledgers]
    # Journals that the settings leave out are forgotten when what they hold was replayed and flushed.
    left = [name for name in cookie.journal_directories if name not in journals]
    emptied = [row.name for row in cookie.ledger_directories if row.name not in ledgers and not row.lost]
    for name in emptied:
        _check_left_out(files, layout, cookie, name)
    checked = cookie._replace(
        cluster=cookie.cluster or cluster,
        journal_directories=(*journals, *left),
        ledger_directories=tuple(map(CookieDirectory, ledgers)),
    )
    return Checked(checked, found, new, emptied)


def open_data_directory(
    files: Files, layout: DataLayout, bookie_id: str, rng: random.Random, *, cluster: int = 0
) -> Cookie:
    """`check_data_directory`, and makes it so: the cookie, new directories with their copies. Durable when it returns."""
    cookie, found, new, emptied = check_data_directory(files, layout, bookie_id, rng, cluster=cluster)
    if found is None:
        write_cookie(files, layout, cookie._replace(journal_directories=(), ledger_directories=()))
    for role, path in new:
        name = layout.name_of(path)
        if CookieDirectory(name, lost=True) in (found or cookie).ledger_directories:
            _log.warning(
                "%s was declared lost: a new directory takes its place, what it held is damage", path
            )
        files.make_directory(path)
        files.write_atomically(os.path.join(path, _COPY), encode_cookie(copy_for(cookie, role, name)))
    if cookie != found:
        write_cookie(files, layout, cookie)
        for name in emptied:
            forget_copy(files, layout.directory(name))
    return cookie


def forget_ledger_directory(files: Files, layout: DataLayout, directory: str) -> Cookie:
    """Declares a ledger directory lost, on a stopped bookie: the next start takes it as new, or does without it.

    What only it held is damage from then on. Durable when it returns. DataDirectoryError when the cookie does not know
    it, and when it is there and certainly this bookie's: nothing is lost then.
    """
    cookie = _known_cookie(files, layout)
    name = layout.name_of(directory)
    if name not in [row.name for row in cookie.ledger_directories]:
        known = ", ".join(layout.directory(row.name) for row in cookie.ledger_directories)
        raise DataDirectoryError(
            f"{directory} is no ledger directory of bookie {cookie.bookie_id!r}; it has {known}",
            path=directory,
        )
    try:
        there = is_ours(files, layout, cookie, LEDGERS_ROLE, directory)
    except MagnetarError:  # its disk cannot be read, or its copy is damaged
        there = False
    if there:
        raise DataDirectoryError(
            f"{directory} is there and belongs to this bookie: nothing of it is lost. Empty it first if its disk shall be "
            "given up",
            path=directory,
        )
    rows = tuple(row._replace(lost=row.lost or row.name == name) for row in cookie.ledger_directories)
    return write_cookie(files, layout, cookie._replace(ledger_directories=rows, lost_logs=True))


def replace_cookie(
    files: Files, layout: DataLayout, bookie_id: str, rng: random.Random, *, cluster: int = 0
) -> Cookie:
    """Makes the cookie of a bookie that lost all of its disks, in empty directories: it will start in repair mode (rule 9).

    It takes the place of the lost one under the same `bookie_id`, and denies nothing until its ledgers are marked unknown or
    repaired. Durable when it returns. DataDirectoryError when there is a cookie or any data.
    """
    if read_cookie(files, layout) is not None:
        raise DataDirectoryError(
            f"{layout.cookie} is there: this bookie did not lose its disks. Declare a lost ledger directory lost, or empty "
            "the directories",
            path=layout.cookie,
        )
    files.make_directory(layout.root)
    _refuse_foreign_data(files, layout)
    cookie = Cookie(rng.getrandbits(64), bookie_id, cluster, repairing=True)
    return write_cookie(files, layout, cookie)


def rename_directory(files: Files, layout: DataLayout, old: str, new: str) -> Cookie:
    """Tells a stopped bookie that a journal or ledger directory of its is mounted elsewhere now. Durable when it returns.

    DataDirectoryError unless `new` carries the copy of this bookie for `old`.
    """
    cookie = _known_cookie(files, layout)
    old_name, new_name = layout.name_of(old), layout.name_of(new)
    copy = _read_copy(files, new)
    known = [*cookie.journal_directories, *[row.name for row in cookie.ledger_directories]]
    if (
        old_name not in known
        or copy is None
        or (copy.instance, copy.directory)
        not in (
            (cookie.instance, old_name),
            (cookie.instance, new_name),  # an attempt that was cut short
        )
    ):
        raise DataDirectoryError(f"{new} is not what was {old} of bookie {cookie.bookie_id!r}", path=new)
    if files.exists(layout.mark):
        mark = decode_mark(files.read(layout.mark), layout.mark)
        if old_name in mark:
            renamed = {new_name if name == old_name else name: at for name, at in mark.items()}
            files.write_atomically(layout.mark, encode_mark(renamed))
    path = os.path.join(new, _COPY)
    files.write_atomically(path, encode_cookie(copy._replace(directory=new_name)))
    journals = tuple(new_name if name == old_name else name for name in cookie.journal_directories)
    ledgers = tuple(
        row._replace(name=new_name) if row.name == old_name else row for row in cookie.ledger_directories
    )
    return write_cookie(
        files, layout, cookie._replace(journal_directories=journals, ledger_directories=ledgers)
    )


def _known_cookie(files: Files, layout: DataLayout) -> Cookie:
    cookie = read_cookie(files, layout)
    if cookie is None:
        raise DataDirectoryError(
            f"{layout.root} holds no bookie: there is no {layout.cookie}", path=layout.root
        )
    return cookie


def is_ours(files: Files, layout: DataLayout, cookie: Cookie, role: str, path: str) -> bool:
    """True if the directory carries this bookie's copy for this place."""
    copy = _read_copy(files, path)
    name = layout.name_of(path)
    return copy is not None and (copy.instance, copy.role, copy.directory) == (cookie.instance, role, name)


def data_names(files: Files, path: str) -> list[str]:
    """Journals and entry logs in a directory."""
    return [
        name
        for name in files.list(path)
        if DataLayout.journal_sequence(name) is not None or DataLayout.entry_log_id(name) is not None
    ]


def _read_copy(files: Files, path: str) -> Cookie | None:
    copy = os.path.join(path, _COPY)
    return decode_cookie(files.read(copy), copy) if files.exists(copy) else None


def forget_copy(files: Files, path: str) -> None:
    """The directory is nobody's from now on. Durable when it returns."""
    files.delete(os.path.join(path, _COPY))
    files.sync_directory(path)


def _refuse_foreign_data(files: Files, layout: DataLayout) -> None:
    """Raises unless the directories of a new bookie are empty."""
    found = [name for name in ("index", "mark") if _holds_something(files, layout.directory(name))]
    for path in (*layout.journals, *layout.ledgers):
        copy = _read_copy(files, path)
        if copy is not None:
            raise DataDirectoryError(
                f"{path} belongs to bookie {copy.bookie_id!r}, but {layout.root} holds no cookie; restore {layout.cookie} "
                "(is its disk mounted?), or start with other directories",
                path=path,
            )
        if files.exists(path) and data_names(files, path):
            found.append(path)
    if found:
        raise DataDirectoryError(
            f"{layout.root} holds data ({found[0]}) but no cookie; restore {layout.cookie}, "
            "or start with another data directory",
            path=layout.root,
        )


def _holds_something(files: Files, path: str) -> bool:
    if not files.exists(path):
        return False
    try:
        return bool(files.list(path))
    except DataDirectoryError:  # a file
        return True


def _is_new(files: Files, layout: DataLayout, cookie: Cookie, role: str, path: str) -> bool:
    """Checks a directory of the settings; True if a start takes it as new. See the module's table."""
    name = layout.name_of(path)
    known, lost = _known(cookie, role, name)
    copy = _read_copy(files, path)
    if copy is not None and (copy.instance, copy.role, copy.directory) != (cookie.instance, role, name):
        raise _not_ours(cookie, copy, role, path)
    missing = not files.exists(path)
    held = [] if missing else data_names(files, path)
    if copy is not None:
        if known or role == JOURNAL_ROLE or not held:
            return False
        raise DataDirectoryError(
            f"{path} holds entry logs of this bookie, but was declared lost or taken out; empty it, or leave it out of "
            f"{_SETTINGS[role]}",
            path=path,
        )
    if known and not lost:
        if missing:
            raise DataDirectoryError(
                f"{path} is missing although {layout.cookie} says that this bookie has data there; "
                f"restore the directory (is its disk mounted?){_cure(role)}",
                path=path,
            )
        raise DataDirectoryError(
            f"{path} is not the {role} directory that this bookie knows: its cookie is missing, as on an empty disk. "
            f"Mount the right disk or restore the directory{_cure(role)}",
            path=path,
        )
    if held:
        raise DataDirectoryError(
            f"{path} holds data ({held[0]}) that {layout.cookie} knows nothing of; correct {_SETTINGS[role]}, or empty it",
            path=path,
        )
    return True


def _known(cookie: Cookie, role: str, name: str) -> tuple[bool, bool]:
    if role == JOURNAL_ROLE:
        return name in cookie.journal_directories, False
    for row in cookie.ledger_directories:
        if row.name == name:
            return True, row.lost
    return False, False


def _cure(role: str) -> str:
    if role == LEDGERS_ROLE:
        return ", or declare it lost (magnetar bookie cookie --lost-directory): its entries are damage until repaired"
    return "; if it is lost, acknowledged entries are: replace the bookie (magnetar bookie cookie --accept-new-disk)"


def _not_ours(cookie: Cookie, copy: Cookie, role: str, path: str) -> DataDirectoryError:
    if copy.instance != cookie.instance:
        what = f"belongs to bookie {copy.bookie_id!r} (another one than this {cookie.bookie_id!r})"
    elif copy.role != role:
        what = f"is the {copy.role} directory {copy.directory!r} of this bookie, not a {role} directory"
    else:
        what = f"is what this bookie knows as {copy.directory!r}: disks were swapped or mounted elsewhere"
    return DataDirectoryError(
        f"{path} {what}; correct {_SETTINGS[role]}, mount the disks where they were, or tell where they are now "
        "(magnetar bookie cookie --moved-directory)",
        path=path,
    )


def _check_left_out(files: Files, layout: DataLayout, cookie: Cookie, name: str) -> None:
    """A ledger directory that the settings name no longer can be forgotten if it certainly holds nothing."""
    path = layout.directory(name)
    there = files.exists(path)
    if there and data_names(files, path):
        raise DataDirectoryError(
            f"ledger_directories no longer names {path}, which holds entries; name it again, or declare it lost "
            "(magnetar bookie cookie --lost-directory) and let its entries be repaired",
            path=path,
        )
    if not there or not is_ours(files, layout, cookie, LEDGERS_ROLE, path):
        raise DataDirectoryError(
            f"ledger_directories no longer names {path}, and it cannot be seen to be empty (is its disk mounted?); "
            "mount it, name it again, or declare it lost (magnetar bookie cookie --lost-directory)",
            path=path,
        )
