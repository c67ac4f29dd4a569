"""The components that are injected into a bookie; the simulation and tests have others."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from magnetar.runtime.clock import Clock, SystemClock
from magnetar.runtime.files import FileLock, Files, OsFiles

from .device import ProcessDiskWorker, RingJournalDevice
from .disk_worker import DiskWorker
from .gc.assignments import Assignments
from .gc.existing_ledgers import ExistingLedgers
from .index import LocationIndex, RocksLocationIndex
from .journal.device import JournalDevice
from .scrub.damage import RepairQueue
from .settings import BookieSettings


@dataclass(frozen=True, slots=True)
class BookieComponents:
    """The injected components of one opening of a bookie, which starts and closes the disk worker."""

    files: Files
    rng: random.Random
    disk_worker: DiskWorker
    # Makes the device of one journal directory, from settings, directory and the lock that its process inherits.
    make_journal_device: Callable[[BookieSettings, str, FileLock], JournalDevice]
    open_index: Callable[[str], LocationIndex]
    # Whether an index was ever created at a path; True for an index in memory.
    index_exists: Callable[[str], bool] = lambda path: True
    # Instance of the metadata store that lists this bookie's ledgers; 0: not known.
    cluster: int = 0
    # Wall clock, for what has a retention time.
    clock: Clock = field(default_factory=SystemClock)
    # Says which ledgers were deleted from the metadata; None: ledgers are deleted by request only.
    existing_ledgers: ExistingLedgers | None = None
    # Says which entries here are other bookies' by now, so that they are dropped; None: they stay.
    assignments: Assignments | None = None
    # Gets damaged entries, to have them repaired; None: they only show in logs and figures.
    repair_queue: RepairQueue | None = None


def os_components(rng: random.Random) -> BookieComponents:
    """The real disk, a journal writer process, a disk worker process, RocksDB."""

    def make_device(settings: BookieSettings, directory: str, lock: FileLock) -> JournalDevice:
        return RingJournalDevice(
            os.path.join(directory.replace("%", "%%"), "journal-%016x.log"),
            ring_bytes=settings.journal_ring_bytes,
            lock_fd=lock.fileno(),
            sync_data=settings.journal_sync_data,
        )

    files = OsFiles()

    def index_exists(path: str) -> bool:
        # RocksDB makes this file durable before it opens a new database, and never deletes it.
        return files.exists(os.path.join(path, "CURRENT"))

    return BookieComponents(files, rng, ProcessDiskWorker(), make_device, RocksLocationIndex, index_exists)
