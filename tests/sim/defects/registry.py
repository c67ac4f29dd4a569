"""The table that the modules beside this one fill."""

from __future__ import annotations

from collections.abc import Callable

DEFECTS: dict[str, Callable[[], None]] = {}  # of the scenario ledgers
REPAIR_DEFECTS: dict[str, Callable[[], None]] = {}  # of the scenario repair


def defect(function: Callable[[], None]) -> Callable[[], None]:
    """Registers what plants a defect, under its name."""
    DEFECTS[function.__name__] = function
    return function


def repair_defect(function: Callable[[], None]) -> Callable[[], None]:
    """The same for the scenario repair."""
    REPAIR_DEFECTS[function.__name__] = function
    return function


def defects_of(scenario: str) -> list[str]:
    """Names of the defects that a scenario is to notice."""
    return list(REPAIR_DEFECTS if scenario == "repair" else DEFECTS)


def plant(name: str) -> None:
    """Plants one of them in this process."""
    (REPAIR_DEFECTS | DEFECTS)[name]()
