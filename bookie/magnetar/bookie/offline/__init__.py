"""Inspects and changes the directories of a stopped bookie, for `magnetar bookie SUBCOMMAND`.

Results are typed, and nothing is printed. `StoppedBookie.open` takes the bookie's lock; everything else takes a
StoppedBookie. Inspection changes nothing: no byte and no name below the bookie's directories, the lock file apart.
"""

from .entries import StoredEntry
from .entry_logs import LogBroken, LogEnd, LogHeader, LogLedger, LogRecord, find_log, walk_entry_log
from .identity import (
    DirectoryReport,
    accept_new_disks,
    check_identity,
    declare_lost,
    declare_moved,
    describe,
    describe_cookie,
    inspect_directories,
)
from .index_rebuild import rebuild
from .journals import (
    JournalDirectory,
    JournalFileReport,
    JournalGap,
    JournalRecord,
    journal_directories,
    read_mark,
    walk_journals,
)
from .stopped import BookieData, LogFile, StoppedBookie
from .verify import Finding, Verification, VerifiedPart, verify

__all__ = [
    "BookieData",
    "DirectoryReport",
    "Finding",
    "JournalDirectory",
    "JournalFileReport",
    "JournalGap",
    "JournalRecord",
    "LogBroken",
    "LogEnd",
    "LogFile",
    "LogHeader",
    "LogLedger",
    "LogRecord",
    "StoppedBookie",
    "StoredEntry",
    "Verification",
    "VerifiedPart",
    "accept_new_disks",
    "check_identity",
    "declare_lost",
    "declare_moved",
    "describe",
    "describe_cookie",
    "find_log",
    "inspect_directories",
    "journal_directories",
    "read_mark",
    "rebuild",
    "verify",
    "walk_entry_log",
    "walk_journals",
]
