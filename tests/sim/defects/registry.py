"""The table that the modules beside this one fill."""

from __future__ import annotations

from collections.abc import Callable

DEFECTS: dict[str, Callable[[], None]] = {}  # of the scenario ledgers
REPAIR_DEFECTS: dict[str, Callable[[], None]] = {}  # of the scenario repair
STANDALONE_DEFECTS: dict[str, Callable[[], None]] = {}  # of the scenario standalone
CLUSTER_DEFECTS: dict[str, Callable[[], None]] = {}  # of the scenario cluster
ONCE_DEFECTS: dict[str, Callable[[], None]] = {}  # of the scenarios once and once_standalone
EXCLUSIVE_DEFECTS: dict[str, Callable[[], None]] = {}  # of the scenario exclusive
DELAYED_DEFECTS: dict[str, Callable[[], None]] = {}  # of the scenario delayed
_OF_SCENARIO = {
    "repair": REPAIR_DEFECTS,
    "standalone": STANDALONE_DEFECTS,
    "cluster": CLUSTER_DEFECTS,
    "once": ONCE_DEFECTS,
    "once_standalone": ONCE_DEFECTS,
    "exclusive": EXCLUSIVE_DEFECTS,
    "delayed": DELAYED_DEFECTS,
}


def defect(function: Callable[[], None]) -> Callable[[], None]:
    """Registers what plants a defect, under its name."""
    DEFECTS[function.__name__] = function
    return function


def repair_defect(function: Callable[[], None]) -> Callable[[], None]:
    """The same for the scenario repair."""
    REPAIR_DEFECTS[function.__name__] = function
    return function


def standalone_defect(function: Callable[[], None]) -> Callable[[], None]:
    """The same for the scenario standalone."""
    STANDALONE_DEFECTS[function.__name__] = function
    return function


def cluster_defect(function: Callable[[], None]) -> Callable[[], None]:
    """The same for the scenario cluster."""
    CLUSTER_DEFECTS[function.__name__] = function
    return function


def once_defect(function: Callable[[], None]) -> Callable[[], None]:
    """The same for the scenarios once and once_standalone."""
    ONCE_DEFECTS[function.__name__] = function
    return function


def exclusive_defect(function: Callable[[], None]) -> Callable[[], None]:
    """The same for the scenario exclusive."""
    EXCLUSIVE_DEFECTS[function.__name__] = function
    return function


def delayed_defect(function: Callable[[], None]) -> Callable[[], None]:
    """The same for the scenario delayed."""
    DELAYED_DEFECTS[function.__name__] = function
    return function


def defects_of(scenario: str) -> list[str]:
    """Names of the defects that a scenario is to notice."""
    return list(_OF_SCENARIO.get(scenario, DEFECTS))


def plant(name: str) -> None:
    """Plants one of them in this process."""
    next(defects[name] for defects in (*_OF_SCENARIO.values(), DEFECTS) if name in defects)()
