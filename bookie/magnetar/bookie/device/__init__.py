"""What works outside the event loop: the journal writer and the disk worker, processes with their daemon's side."""

from .disk_worker import ProcessDiskWorker
from .ring import RingJournalDevice

__all__ = ["ProcessDiskWorker", "RingJournalDevice"]
