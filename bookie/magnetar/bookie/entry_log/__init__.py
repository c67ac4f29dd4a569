"""Entry logs: the files that hold entries for good. A flush appends to them; afterwards they are only read.

A log is never appended to by a later start: a start writes to a new one. Bit rot is EntryDamaged, never "no such entry"
(rule 8).
"""

from .entry_logs import EntryLogs, LogInfo
from .ledger_directory import DirectoryState
from .log_scans import LogStatistics
from .log_writer import LogWriter
from .records import (
    LOG_HEADER_BYTES,
    RECORD_HEADER_BYTES,
    STATE_ENTRY,
    Footer,
    Scanned,
    decode_footer,
    encode_footer,
    encode_log_header,
    encode_record_header,
    record_entry,
)
from .scan import LogScan, scan_log

__all__ = [
    "LOG_HEADER_BYTES",
    "RECORD_HEADER_BYTES",
    "STATE_ENTRY",
    "DirectoryState",
    "EntryLogs",
    "Footer",
    "LogInfo",
    "LogScan",
    "LogStatistics",
    "LogWriter",
    "Scanned",
    "decode_footer",
    "encode_footer",
    "encode_log_header",
    "encode_record_header",
    "record_entry",
    "scan_log",
]
