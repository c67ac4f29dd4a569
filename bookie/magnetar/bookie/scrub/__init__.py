"""The scrub, which looks for damage before a reader meets it; what is damaged; the repair queue."""

from .damage import Damage

__all__ = ["Damage"]
