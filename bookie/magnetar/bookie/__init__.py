"""The storage daemon: journal, write cache, entry logs, index, checkpoints, and the server in front of them.

bookie/ARCHITECTURE.md explains the room; FORMATS.md draws every file. The rules that this room obeys are numbers 1 to
12b of the project's correctness rules; their tests are named after them.

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
