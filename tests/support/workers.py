"""Which tests `pytest -n N` runs in the same worker process, and in which order the workers take them.

pytest-xdist hands out units of tests. A unit here is the largest of these that a test belongs to:

* the folders that use the session of `support.spark_kit`: one Java machine, 1.5 GB and 5 to 25 s of start, for the run;
* a module, whose tests share imports and module-wide services;
* a single test, in the folders of long searches, where one module is minutes.

A worker takes the next unit when it is almost done with its last. Collection order is the order of `tests/`, so the long
units of crash/ and integration/ come early and the short ones of unit/ fill up the end; Spark comes first of all, and then
the long ones of unit/.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

__all__ = ["UnitScheduling", "starts_early", "unit_of"]

SPARK = ("tests/integration/spark/", "tests/integration/spark_jobs/")
LONG_UNITS = ("tests/unit/sim/test_runner.py", "tests/unit/support/test_second_try.py")
SINGLE = ("tests/crash/", "tests/sim/", "tests/model/")


def unit_of(nodeid: str) -> str:
    """The name of the unit that a test belongs to."""
    if nodeid.startswith(SPARK):
        return "spark"
    return nodeid if nodeid.startswith(SINGLE) else nodeid.partition("::")[0]


def starts_early(nodeid: str) -> bool:
    """True for the tests that every run begins with."""
    return nodeid.startswith((*SPARK, *LONG_UNITS))


class UnitScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out the units of `unit_of` in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def _reschedule(self, node: WorkerController) -> None:
        if node in self.registered_collections:  # one that replaces another may still be collecting
            super()._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """A worker has ended. Returns the test that it died in, if it did; the rest of its units is for the others.

        The inherited method gives that test to the next worker, and hands out units with nothing left to run, for whose
        end the run then waits.
        """
        units = self.assigned_work.pop(node)
        left = {name: unit for name, unit in units.items() if not all(unit.values())}
        if not left:
            return None
        died_in: str = next(nodeid for unit in left.values() for nodeid, done in unit.items() if not done)
        left[unit_of(died_in)][died_in] = True
        self.workqueue.update({name: unit for name, unit in left.items() if not all(unit.values())})
        for other in self.nodes:
            self._reschedule(other)
        return died_in
