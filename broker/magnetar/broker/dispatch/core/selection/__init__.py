"""Which consumer gets what: one module for each subscription type, behind one protocol.

To add a type: write its module, put it into SELECTORS. The dispatcher and the other types stay as they are.
"""

from __future__ import annotations

from .exclusive import ExclusiveSelector
from .protocol import Choice, Selector
from .shared import SharedSelector

SELECTORS: dict[str, type[Selector]] = {"exclusive": ExclusiveSelector, "shared": SharedSelector}

__all__ = ["SELECTORS", "Choice", "Selector"]
