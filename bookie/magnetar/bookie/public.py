"""The public names of magnetar.bookie."""

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
