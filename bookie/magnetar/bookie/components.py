"""The seams of a bookie: what is injected, and the real set."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from magnetar.runtime.clock import Clock, SystemClock
from magnetar.runtime.files import FileLock, Files, OsFiles

from .device import ProcessDiskWorker, RingJournalDevice
from .disk_worker import DiskWorker, InlineDiskWorker
from .gc.existing_ledgers import ExistingLedgers
from .index import LocationIndex, RocksLocationIndex
from .journal.device import JournalDevice
from .journal.inline import InlineJournalDevice
from .layout import journal_path
from .scrub.damage import RepairQueue
from .settings import BookieSettings

__all__ = ["BookieComponents", "inline_components", "os_components"]


@dataclass(frozen=True, slots=True)
class BookieComponents:
    """One set serves one opening of a bookie: the disk worker is started and closed by it."""

    files: Files
    rng: random.Random
    disk_worker: DiskWorker
    # For one journal directory.
    make_journal_device: Callable[[BookieSettings, str, FileLock], JournalDevice]
    open_index: Callable[[str], LocationIndex]
    # Whether an index was ever made there. An index in memory always was.
    index_exists: Callable[[str], bool] = lambda path: True
    # Instance of the metadata store that lists this bookie's ledgers; 0: not known.
    cluster: int = 0
    # Wall clock, for what has a retention time.
    clock: Clock = field(default_factory=SystemClock)
    # Who knows which ledgers were deleted; None: only who asks for a deletion by name.
    existing_ledgers: ExistingLedgers | None = None
    # Who is asked to heal what is damaged; None: it only shows in logs and figures.
    repair_queue: RepairQueue | None = None


def os_components(rng: random.Random, *, writer_mode: str = "sync") -> BookieComponents:
    """The real disk, a journal writer process, a disk worker process, RocksDB.

    `writer_mode` "shadow" is for crash tests: see `RingJournalDevice`.
    """

    def make_device(settings: BookieSettings, directory: str, lock: FileLock) -> JournalDevice:
        return RingJournalDevice(
            os.path.join(directory.replace("%", "%%"), "journal-%016x.log"),
            ring_bytes=settings.journal_ring_bytes,
            lock_fd=lock.fileno(),
            mode=writer_mode if settings.journal_sync_data else "no-sync",
            alignment_bytes=settings.journal_alignment_bytes,
            group_max_wait_ms=settings.journal_group_max_wait_ms,
            group_max_bytes=settings.journal_group_max_bytes,
        )

    files = OsFiles()

    def index_exists(path: str) -> bool:
        # RocksDB makes it durable before it opens a new database, and never takes it away.
        return files.exists(os.path.join(path, "CURRENT"))

    return BookieComponents(files, rng, ProcessDiskWorker(), make_device, RocksLocationIndex, index_exists)


def inline_components(
    files: Files, rng: random.Random, open_index: Callable[[str], LocationIndex]
) -> BookieComponents:
    """Everything in the loop, over `files`: the simulation."""

    def make_device(settings: BookieSettings, directory: str, lock: FileLock) -> JournalDevice:
        return InlineJournalDevice(
            files,
            lambda sequence: journal_path(directory, sequence),
            capacity_bytes=settings.journal_ring_bytes,
            sync_data=settings.journal_sync_data,
            alignment_bytes=settings.journal_alignment_bytes,
            group_max_wait_ms=settings.journal_group_max_wait_ms,
            group_max_bytes=settings.journal_group_max_bytes,
        )

    return BookieComponents(files, rng, InlineDiskWorker(files), make_device, open_index)
