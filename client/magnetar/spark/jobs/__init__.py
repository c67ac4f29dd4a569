"""Jobs of the data pipeline: functions over a SparkSession, and `magnetar spark JOB` for each of them.

| job | what it does |
|---|---|
| `compact` | keeps the last value of each key, in a new topic or as Parquet |
| `audit` | reads every replica of every closed ledger and compares them |
| `archive` | closed ledgers to Parquet files with a manifest; `read_archive` gives them back as a table |
| `replay` | a range of topics, or of an archive, into another topic |
| `rollup` | windowed counts and sizes per topic and key: a streaming example to copy |

Each returns a small result object and raises MagnetarError with one clear message for what it is asked wrongly.
"""

from .archive import ArchiveResult, LedgerManifest, archive, read_archive
from .audit import AuditResult, audit
from .compact import CompactResult, compact
from .replay import ReplayResult, replay
from .rollup import rollup, start_rollup

__all__ = [
    "ArchiveResult",
    "AuditResult",
    "CompactResult",
    "LedgerManifest",
    "ReplayResult",
    "archive",
    "audit",
    "compact",
    "read_archive",
    "replay",
    "rollup",
    "start_rollup",
]
