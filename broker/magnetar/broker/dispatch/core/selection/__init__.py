"""Which consumer gets what: one module for each subscription type, behind one protocol.

To add a type: write its module, put it into SELECTORS. The dispatcher and the other types stay as they are, unless the type
decides by the keys of messages: then the dispatcher shares entries out (`key_shared`), and asks nobody to choose.
"""

from __future__ import annotations

from ....settings import BrokerSettings
from .failover import ExclusiveSelector, FailoverSelector
from .key_shared import KeySharedSelector
from .protocol import Choice, Selector
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


__all__ = ["SELECTORS", "Choice", "KeySharedSelector", "Selector", "new_selector"]
