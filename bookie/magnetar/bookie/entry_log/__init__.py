"""Entry logs: the files that hold entries for good. A flush appends to them; afterwards they are only read.

A log is never appended to by a later start: a start writes to a new one. Bit rot is EntryDamaged, never "no such entry"
(rule 8).
"""

from .entry_logs import EntryLogs, LogInfo
from .ledger_directory import DirectoryState
from .log_scans import LogStatistics
from .log_writer import LogWriter
from .records import RECORD_HEADER_BYTES, STATE_ENTRY, Scanned

__all__ = [
    "RECORD_HEADER_BYTES",
    "STATE_ENTRY",
    "DirectoryState",
    "EntryLogs",
    "LogInfo",
    "LogStatistics",
    "LogWriter",
    "Scanned",
]
