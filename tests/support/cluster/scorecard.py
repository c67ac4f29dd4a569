"""What the runs of a cluster say for the scorecard of CORRECTNESS.md: settings from the environment, rows, one table.

| variable | default | what |
|---|---|---|
| LONG | unset | 30 s for each run, times LONG; unset: the short form of the shortest runs alone, as in `make test` |
| MAGNETAR_SEED | 1 | decides every fault; run N of several takes seed + N |
| MAGNETAR_CRASH_RATE | 1000, in the short form 500 | messages a second |
| MAGNETAR_CRASH_BROKERS | 2 | in each cluster |
| MAGNETAR_CRASH_TOPICS | 100 | of scorecard 10; 1,000 in its long form |
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from rich.table import Table

from support.long_form import FACTOR, LONG

PROPERTY = "scorecard"
QUICK_S = 8.0
RUN_S = 30.0  # in the long form

SECONDS = RUN_S * FACTOR if LONG else QUICK_S
SEED = int(os.environ.get("MAGNETAR_SEED", "1"))
RATE = int(os.environ.get("MAGNETAR_CRASH_RATE", "1000" if LONG else "500"))
BROKERS = int(os.environ.get("MAGNETAR_CRASH_BROKERS", "2"))
TOPICS = int(os.environ.get("MAGNETAR_CRASH_TOPICS", "100"))
# A history is kept in memory, so longer runs are several rounds, with fresh topics in the same cluster.
ROUNDS = max(1, round(SECONDS / 60.0))
ROUND_S = SECONDS / ROUNDS
# What a machine that is busy with other things may add to a time before a test fails; the table shows the bare figures.
BUSY_S = 10.0

several_brokers = pytest.mark.skipif(BROKERS < 2, reason="needs several brokers: MAGNETAR_CRASH_BROKERS=2")


class Row(NamedTuple):
    """One line of the table. `met` is about the goal; the test itself fails of what is wrong, or far beyond it."""

    number: str
    check: str
    load: str
    result: str
    goal: str
    met: bool


Recorder = Callable[[Row], None]


def recorder(node: pytest.Item) -> Recorder:
    """Rows go with the report of their test, also from a worker process."""
    return lambda row: node.user_properties.append((PROPERTY, json.dumps(row)))


def rows_of(reports: Sequence[Any]) -> list[Row]:
    """Of the reports of a run."""
    found = [
        Row(*json.loads(value))
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == PROPERTY and report.when == "call"
    ]
    return sorted(found, key=lambda row: (int(row.number.split(",")[0]), row))


def table(rows: Sequence[Row]) -> Table:
    """For people."""
    made = Table(title=f"Scorecard of the cluster, seed {SEED}, {BROKERS} brokers")
    for heading in ("row", "check", "load and faults", "result", "goal", "met"):
        made.add_column(heading, overflow="fold")
    for row in rows:
        made.add_row(*row[:-1], "yes" if row.met else "no")
    return made
