"""The table that the modules beside this one fill."""

from __future__ import annotations

from collections.abc import Callable

DEFECTS: dict[str, Callable[[], None]] = {}


def defect(function: Callable[[], None]) -> Callable[[], None]:
    """Registers what plants a defect, under its name."""
    DEFECTS[function.__name__] = function
    return function


def plant(name: str) -> None:
    """Plants one of DEFECTS in this process."""
    DEFECTS[name]()
