"""The parts of a bookie that garbage collection works on."""

from __future__ import annotations

from dataclasses import dataclass

from magnetar.runtime.clock import Clock
from magnetar.runtime.files import Files

from ..checkpoint import Checkpointer
from ..disk_worker import DiskWorker
from ..entry_log.entry_logs import EntryLogs
from ..index import LocationIndex
from ..layout import DataLayout
from ..ledgers import LedgerDescriptors
from ..scrub.damage import Damage
from ..settings import BookieSettings
from .assignments import Assignments
from .existing_ledgers import ExistingLedgers


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageParts:
    """All owned by the bookie."""

    settings: BookieSettings
    files: Files
    worker: DiskWorker
    clock: Clock
    layout: DataLayout
    logs: EntryLogs
    index: LocationIndex
    ledgers: LedgerDescriptors
    checkpointer: Checkpointer
    damage: Damage
    existing: ExistingLedgers | None
    assignments: Assignments | None
