"""Which tests `pytest -n N` runs in the same worker process, and in which order the workers take them.

pytest-xdist hands out units of tests. A unit here is the largest of these that a test belongs to:

* the folders that use the session of `support.spark_kit`: one Java machine, 1.5 GB and 5 to 25 s of start, for the run;
* a module, whose tests share imports and module-wide services;
* a single test, in the folders of long searches, where one module is minutes.

A worker takes the next unit when it is almost done with its last. Collection order is the order of `tests/`, so the long
units of crash/ and integration/ come early and the short ones of unit/ fill up the end; Spark comes first of all.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

__all__ = ["UnitScheduling", "starts_early", "unit_of"]

SPARK = ("tests/integration/spark/", "tests/integration/spark_jobs/")
SINGLE = ("tests/crash/", "tests/sim/", "tests/model/")


def unit_of(nodeid: str) -> str:
    """The name of the unit that a test belongs to."""
    if nodeid.startswith(SPARK):
        return "spark"
    return nodeid if nodeid.startswith(SINGLE) else nodeid.partition("::")[0]


def starts_early(nodeid: str) -> bool:
    """True for the tests that every run begins with."""
    return nodeid.startswith(SPARK)


class UnitScheduling(LoadScopeScheduling):
    """Hands out the units of `unit_of` in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
