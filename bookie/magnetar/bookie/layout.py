"""Names on disk (FORMATS.md, "The data directory of a bookie").

DATA/LOCK           held by the daemon, its journal writers and its disk worker
DATA/cookie         identity, format version and the list of the directories below
DATA/mark           checkpoint mark: a vector with one position per journal directory
DATA/log-ids        numbers of entry logs that were given out
DATA/scrub          what was verified when
DATA/http-address   where the daemon answers `magnetar bookie ...` while it runs
JOURNAL/journal-<sequence, 16 hex digits>.log      sequences are unique over all journal directories
LEDGERS/entrylog-<log id, 8 hex digits>.log        log ids are unique over all ledger directories
JOURNAL/cookie, LEDGERS/cookie                     copies of the cookie, each with the directory's role and name
INDEX/              RocksDB

There may be several JOURNAL and LEDGERS directories, on disks of their own; DATA/journal, DATA/ledgers and DATA/index by
default. In cookie and mark a directory has a *name*: its path relative to DATA if it lies below, else its absolute path.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from .settings import BookieSettings

_JOURNAL = re.compile(r"journal-([0-9a-f]{16})\.log")
_ENTRY_LOG = re.compile(r"entrylog-([0-9a-f]{8})\.log")


def journal_path(directory: str, sequence: int) -> str:
    """Path of a journal file in a journal directory, which need not be one of the settings."""
    return os.path.join(directory, f"journal-{sequence:016x}.log")


@dataclass(frozen=True, slots=True)
class DataLayout:
    """Paths of one bookie. `journals` and `ledgers` are in the order of the settings; no number is stored on disk."""

    root: str
    journals: tuple[str, ...]
    ledgers: tuple[str, ...]
    index: str

    @classmethod
    def of(cls, settings: BookieSettings) -> DataLayout:
        """The directories of the settings."""
        default = cls.at(settings.data_directory)

        def resolved(directory: str) -> str:  # paths compare as text
            return default.directory(default.name_of(directory))

        return cls(
            default.root,
            tuple(map(resolved, settings.journal_directories)) or default.journals,
            tuple(map(resolved, settings.ledger_directories)) or default.ledgers,
            resolved(settings.index_directory) if settings.index_directory else default.index,
        )

    @classmethod
    def at(cls, root: str) -> DataLayout:
        """The default directories below `root`."""
        return cls(
            root,
            (os.path.join(root, "journal"),),
            (os.path.join(root, "ledgers"),),
            os.path.join(root, "index"),
        )

    @property
    def lock(self) -> str:
        """The lock file."""
        return os.path.join(self.root, "LOCK")

    @property
    def cookie(self) -> str:
        """The cookie."""
        return os.path.join(self.root, "cookie")

    @property
    def mark(self) -> str:
        """The checkpoint mark."""
        return os.path.join(self.root, "mark")

    @property
    def log_ids(self) -> str:
        """Numbers of entry logs that were given out."""
        return os.path.join(self.root, "log-ids")

    @property
    def scrub(self) -> str:
        """What the scrub has verified."""
        return os.path.join(self.root, "scrub")

    @property
    def http_address(self) -> str:
        """Where the daemon that was started last answers HTTP: "host:port"."""
        return os.path.join(self.root, "http-address")

    def name_of(self, directory: str) -> str:
        """What cookie and mark call a directory: a data directory that was moved as a whole keeps its names."""
        root, path = os.path.abspath(self.root), os.path.abspath(directory)
        if path.startswith(os.path.join(root, "")):
            return os.path.relpath(path, root)
        return path

    def directory(self, name: str) -> str:
        """Inverse of `name_of`."""
        return os.path.join(self.root, name)

    def journal_file(self, journal: int, sequence: int) -> str:
        """Path of a journal file in journal directory number `journal`."""
        return journal_path(self.journals[journal], sequence)

    def entry_log(self, directory: int, log_id: int) -> str:
        """Path of an entry log in ledger directory number `directory`."""
        return os.path.join(self.ledgers[directory], f"entrylog-{log_id:08x}.log")

    @staticmethod
    def journal_sequence(name: str) -> int | None:
        """Inverse of `journal_file` for a bare name; None for other files."""
        found = _JOURNAL.fullmatch(name)
        return int(found[1], 16) if found else None

    @staticmethod
    def entry_log_id(name: str) -> int | None:
        """Inverse of `entry_log` for a bare name; None for other files."""
        found = _ENTRY_LOG.fullmatch(name)
        return int(found[1], 16) if found else None
