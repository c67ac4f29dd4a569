"""The cookie: the identity of a bookie, the format of its data, and the list of its directories.

It is a sealed file (`sealed_file`). DATA/cookie is the one that counts. Every journal and ledger directory carries a copy
that names its role and itself, so that a disk that is missing, empty, swapped or another bookie's shows at a start
(`directories`). The content of a directory without a readable cookie is never overwritten (rule 9).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from magnetar.proto.errors import DataDirectoryError
from magnetar.runtime.files import Files

from .layout import DataLayout
from .sealed_file import open_sealed, seal

# Of everything in the directories.
FORMAT_VERSION = 1
MAX_INCARNATIONS = 256
DATA_ROLE = "data"
JOURNAL_ROLE = "journal"
LEDGERS_ROLE = "ledgers"
_MAGIC = b"MAGNETAR-BOOKIE\n"


class CookieDirectory(NamedTuple):
    """A ledger directory of a bookie, by its name (`DataLayout.name_of`)."""

    name: str
    # Declared lost by an operator: what was in it is damage. The next start takes the directory as new, or forgets it.
    lost: bool = False


class Cookie(NamedTuple):
    """Identity of a bookie. In the copy in a journal or ledger directory the lists are empty."""

    # 64 random bits: the seed of every journal incarnation.
    instance: int
    bookie_id: str
    # Instance of the metadata store that this bookie's ledgers are listed in; 0: not known yet.
    cluster: int = 0
    # DATA_ROLE; in a copy the role of its directory, and the directory's name.
    role: str = DATA_ROLE
    directory: str = ""
    # Names of the directories that may hold something, those that the settings left out last among them.
    journal_directories: tuple[str, ...] = ()
    ledger_directories: tuple[CookieDirectory, ...] = ()
    # Rule 9: this bookie replaces one that lost its disks, and the metadata store has not registered it yet.
    repairing: bool = False
    # How often the bookie was ready to serve, and 64 random bits for each of the latest MAX_INCARNATIONS times, in order: an
    # older copy of the directories, started again, has others (rule 35).
    starts: int = 0
    incarnations: tuple[int, ...] = ()
    # Ids below it were used, by ledgers that the bookie held before its last start or that the metadata store had when a
    # ledger client introduced itself (rule 36).
    next_ledger_id: int = 0
    # A ledger directory was declared lost, now or long ago: without an index it is not known what it held (rule 8).
    lost_logs: bool = False


def encode_cookie(cookie: Cookie) -> bytes:
    """The file's bytes."""
    return seal(_MAGIC, FORMAT_VERSION, cookie._asdict())


def decode_cookie(data: bytes, path: str) -> Cookie:
    """Raises DataDirectoryError when the bytes are damaged or of another format version."""
    return open_sealed(
        data,
        _MAGIC,
        FORMAT_VERSION,
        _from_fields,
        name="the cookie",
        path=path,
        cure="restore it from a backup of this directory, or start with another data directory",
    )


def _from_fields(fields: dict[str, Any]) -> Cookie:
    return Cookie(
        instance=int(fields["instance"]),
        bookie_id=str(fields["bookie_id"]),
        cluster=int(fields["cluster"]),
        role=str(fields["role"]),
        directory=str(fields["directory"]),
        journal_directories=tuple(map(str, fields["journal_directories"])),
        ledger_directories=tuple(
            CookieDirectory(str(name), bool(lost)) for name, lost in fields["ledger_directories"]
        ),
        repairing=bool(fields["repairing"]),
        starts=int(fields["starts"]),
        incarnations=tuple(map(int, fields["incarnations"])),
        next_ledger_id=int(fields["next_ledger_id"]),
        lost_logs=bool(fields["lost_logs"]),
    )


def copy_for(cookie: Cookie, role: str, name: str) -> Cookie:
    """The copy for directory `name`."""
    return Cookie(cookie.instance, cookie.bookie_id, cookie.cluster, role, name)


def read_cookie(files: Files, layout: DataLayout) -> Cookie | None:
    """The cookie of DATA, None if there is none. DataDirectoryError when it is damaged or that of another directory."""
    if not files.exists(layout.cookie):
        return None
    cookie = decode_cookie(files.read(layout.cookie), layout.cookie)
    if cookie.role != DATA_ROLE:
        raise DataDirectoryError(
            f"{layout.root} is the {cookie.role} directory {cookie.directory!r} of bookie {cookie.bookie_id!r}, not a "
            "data directory; correct data_directory, or mount the disks where they were",
            path=layout.root,
        )
    return cookie


def write_cookie(files: Files, layout: DataLayout, cookie: Cookie) -> Cookie:
    """Replaces the cookie of DATA, and returns it. Durable when it returns."""
    files.write_atomically(layout.cookie, encode_cookie(cookie))
    return cookie
