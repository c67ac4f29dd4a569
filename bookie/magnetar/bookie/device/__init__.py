"""The work outside the event loop: the processes journal writer and disk worker, each with its side in the daemon."""

from .disk_worker import ProcessDiskWorker
from .ring import RingJournalDevice

__all__ = ["ProcessDiskWorker", "RingJournalDevice"]
