"""The journal: records, the devices that make them durable, and recovery."""

from .device import JournalDevice
from .inline import InlineJournalDevice
from .journal import Journal, JournalPosition

__all__ = ["InlineJournalDevice", "Journal", "JournalDevice", "JournalPosition"]
