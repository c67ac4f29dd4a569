"""The journal: records, the devices that make them durable, and recovery."""

from .journal import Journal
from .journals import Journals

__all__ = ["Journal", "Journals"]
