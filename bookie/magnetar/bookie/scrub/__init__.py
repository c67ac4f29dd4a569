"""Looking for damage before somebody needs the bytes: the scrub, what it found, and who is asked to repair it."""

from .damage import Damage, DamagedRange, RepairQueue

__all__ = ["Damage", "DamagedRange", "RepairQueue"]
