"""Broker: managed ledgers, cursors, topics, subscriptions, dispatch, and the listener of the native protocol.

The names are those of `public`, which is imported when the first of them is asked for: a command that needs one record of
this room does not pay for all of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .public import *  # noqa: F403 - the table of names stands there
else:

    def __getattr__(name: str) -> object:
        return getattr(import_module(".public", __name__), name)
