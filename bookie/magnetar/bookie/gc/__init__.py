"""Garbage collection: deleted ledgers, logs without live ledgers, compaction.

`decisions` says what to do with which log, `collector` does a round of it, `compactor` copies what is alive, `deletion`
writes tombstones, `existing_ledgers` asks metadata, `leftovers` drops what metadata gives to other bookies.
"""

from .assignments import Assignments, Unassigned
from .collector import Collected, Collector
from .compactor import Compactor
from .deletion import Deletion
from .existing_ledgers import ExistingLedgers, MetadataLedgers
from .parts import StorageParts

__all__ = [
    "Assignments",
    "Collected",
    "Collector",
    "Compactor",
    "Deletion",
    "ExistingLedgers",
    "MetadataLedgers",
    "StorageParts",
    "Unassigned",
]
