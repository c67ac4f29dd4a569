"""The storage daemon: journal, write cache, entry logs, index, checkpoints, and the server in front of them.

bookie/ARCHITECTURE.md explains the room; FORMATS.md draws every file. The rules that this room obeys are numbers 1 to
12b of the project's correctness rules; their tests are named after them.
"""

from .components import BookieComponents, os_components
from .engine import Bookie
from .settings import BookieSettings
from .startup import open_bookie

__all__ = [
    "Bookie",
    "BookieComponents",
    "BookieSettings",
    "open_bookie",
    "os_components",
]
