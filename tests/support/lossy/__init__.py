"""A bookie whose journal writers lose what they have not synced when they are killed."""

import os
import random
from dataclasses import replace

from magnetar.bookie.components import BookieComponents, os_components
from magnetar.bookie.device import RingJournalDevice
from magnetar.bookie.journal.device import JournalDevice
from magnetar.bookie.settings import BookieSettings
from magnetar.runtime.files import FileLock
from support.lossy import writer_process

LOSSY_WRITER = writer_process.__file__


def lossy_components(rng: random.Random) -> BookieComponents:
    """`os_components` with such journal writers."""

    def make_device(settings: BookieSettings, directory: str, lock: FileLock) -> JournalDevice:
        return RingJournalDevice(
            os.path.join(directory, "journal-%016x.log"),
            ring_bytes=settings.journal_ring_bytes,
            lock_fd=lock.fileno(),
            writer=LOSSY_WRITER,
        )

    return replace(os_components(rng), make_journal_device=make_device)
