"""Jobs of the data pipeline: functions over a SparkSession, and `magnetar spark JOB` for each of them.

| job | what it does |
|---|---|
| `compact` | keeps the last value of each key, in a new topic or as Parquet |
| `audit` | reads every replica of every ledger, compares them, and reports what can be healed |
| `archive` | closed ledgers to Parquet files with a manifest; on request they leave the bookies and are read from there |
| `replay` | a range of topics, or of an archive, into another topic |
| `rollup` | windowed counts and sizes per topic and key: a streaming example to copy |

Each returns a small result object and raises MagnetarError with one clear message for what it is asked wrongly. `check_JOB`
with the same arguments raises that without a session, in the time of a few requests to the broker.
"""

from magnetar.archive.files import LedgerManifest

from .archive import ArchiveResult, archive, check_archive, read_archive
from .audit import AuditResult, audit, check_audit
from .compact import CompactResult, check_compact, compact
from .replay import ReplayResult, check_replay, replay
from .rollup import check_rollup, rollup, start_rollup
from .trim import KeptLedgers

__all__ = [
    "ArchiveResult",
    "AuditResult",
    "CompactResult",
    "KeptLedgers",
    "LedgerManifest",
    "ReplayResult",
    "archive",
    "audit",
    "check_archive",
    "check_audit",
    "check_compact",
    "check_replay",
    "check_rollup",
    "compact",
    "read_archive",
    "replay",
    "rollup",
    "start_rollup",
]
