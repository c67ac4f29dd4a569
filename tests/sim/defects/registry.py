"""The table that the modules beside this one fill."""

from __future__ import annotations

from collections.abc import Callable

Defects = dict[str, Callable[[], None]]

DEFECTS: Defects = {}  # of the scenario ledgers
REPAIR_DEFECTS: Defects = {}  # of the scenario repair
STANDALONE_DEFECTS: Defects = {}  # of the scenario standalone
CLUSTER_DEFECTS: Defects = {}  # of the scenario cluster
ONCE_DEFECTS: Defects = {}  # of the scenarios once and once_standalone
EXCLUSIVE_DEFECTS: Defects = {}  # of the scenario exclusive
DELAYED_DEFECTS: Defects = {}  # of the scenario delayed
TERMINATED_DEFECTS: Defects = {}  # of the scenario terminated
POLICIES_DEFECTS: Defects = {}  # of the scenario once_policies
MIXED_DEFECTS: Defects = {}  # of the scenario mixed
MIXED_ONCE_DEFECTS: Defects = {}  # of the scenario mixed_once
_OF_SCENARIO = {
    "repair": REPAIR_DEFECTS,
    "standalone": STANDALONE_DEFECTS,
    "cluster": CLUSTER_DEFECTS,
    "once": ONCE_DEFECTS,
    "once_standalone": ONCE_DEFECTS,
    "exclusive": EXCLUSIVE_DEFECTS,
    "delayed": DELAYED_DEFECTS,
    "terminated": TERMINATED_DEFECTS,
    "once_policies": POLICIES_DEFECTS,
    "mixed": MIXED_DEFECTS,
    "mixed_once": MIXED_ONCE_DEFECTS,
}


def _registering(defects: Defects) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A decorator that registers what plants a defect, under its name."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        defects[function.__name__] = function
        return function

    return register


defect = _registering(DEFECTS)
repair_defect = _registering(REPAIR_DEFECTS)
standalone_defect = _registering(STANDALONE_DEFECTS)
cluster_defect = _registering(CLUSTER_DEFECTS)
once_defect = _registering(ONCE_DEFECTS)
exclusive_defect = _registering(EXCLUSIVE_DEFECTS)
delayed_defect = _registering(DELAYED_DEFECTS)
terminated_defect = _registering(TERMINATED_DEFECTS)
policies_defect = _registering(POLICIES_DEFECTS)
mixed_defect = _registering(MIXED_DEFECTS)
mixed_once_defect = _registering(MIXED_ONCE_DEFECTS)


def defects_of(scenario: str) -> list[str]:
    """Names of the defects that a scenario is to notice."""
    return list(_OF_SCENARIO.get(scenario, DEFECTS))


def plant(name: str) -> None:
    """Plants one of them in this process."""
    next(defects[name] for defects in (*_OF_SCENARIO.values(), DEFECTS) if name in defects)()
