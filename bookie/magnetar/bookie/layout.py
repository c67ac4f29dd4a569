"""Names in the data directory (FORMATS.md, "The data directory"). One journal and one ledger directory so far.

DATA/LOCK           held by the daemon, its journal writer and its disk worker
DATA/cookie         identity and format version
DATA/mark           checkpoint mark: a vector with one position per journal directory
DATA/journal/journal-<sequence, 16 hex digits>.log
DATA/ledgers/entrylog-<log id, 8 hex digits>.log
DATA/index/         RocksDB
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

__all__ = ["DataLayout"]

_JOURNAL = re.compile(r"journal-([0-9a-f]{16})\.log")
_ENTRY_LOG = re.compile(r"entrylog-([0-9a-f]{8})\.log")


@dataclass(frozen=True, slots=True)
class DataLayout:
    """Paths below one data directory."""

    root: str

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
    def journal(self) -> str:
        """The journal directory."""
        return os.path.join(self.root, "journal")

    @property
    def ledgers(self) -> str:
        """The ledger directory, with the entry logs."""
        return os.path.join(self.root, "ledgers")

    @property
    def index(self) -> str:
        """The RocksDB directory."""
        return os.path.join(self.root, "index")

    def journal_file(self, sequence: int) -> str:
        """Path of a journal file."""
        return os.path.join(self.journal, f"journal-{sequence:016x}.log")

    @property
    def journal_template(self) -> str:
        """`journal_file` as a %-template of the sequence, for the writer process."""
        return os.path.join(self.journal.replace("%", "%%"), "journal-%016x.log")

    def entry_log(self, log_id: int) -> str:
        """Path of an entry log."""
        return os.path.join(self.ledgers, f"entrylog-{log_id:08x}.log")

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
