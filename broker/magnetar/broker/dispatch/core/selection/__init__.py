"""Which consumer gets what: one module for each subscription type, behind one protocol.

To add a type: write its module, put it into SELECTORS. The dispatcher and the other types stay as they are.
"""

from __future__ import annotations

from ....settings import BrokerSettings
from .failover import ExclusiveSelector, FailoverSelector
from .key_shared import KeySharedSelector
from .protocol import Selector
from .shared import SharedSelector

SELECTORS: dict[str, type[Selector]] = {
    "exclusive": ExclusiveSelector,
    "failover": FailoverSelector,
    "shared": SharedSelector,
    "key_shared": KeySharedSelector,
}


def new_selector(type: str, settings: BrokerSettings) -> Selector:
    """The selector of a subscription type, one of SELECTORS."""
    if type == "failover":
        return FailoverSelector(settings.failover_delay_ms)
    return SELECTORS[type]()


__all__ = ["SELECTORS", "Selector", "new_selector"]
