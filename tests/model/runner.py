"""`make model`: the scorecard's shape, the long ones, every planted defect; the way to a violation if there is one.

python -m model.runner [--only NAME] [--seconds N]    # PYTHONPATH=tests
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import pytest

from magnetar.ledger.core import recovery

from .defects import PLANTED
from .explorer import Violation
from .ledger_world import Shape
from .reduced_world import ReducedWorld
from .search import search

SHAPE = Shape(entries=2, recoverers=1, crashes=1, losses=2)
RACE = Shape(entries=1, recoverers=2, crashes=0, losses=1, writer_closes=False)
# By name; those that take longest last. The first is scorecard 6.
SHAPES = {
    "3-bookies-2-entries": SHAPE,
    "one-entry": replace(SHAPE, entries=1),
    "qa-1": replace(SHAPE, ack_quorum=1, losses=1),
    "no-spare-3-3-2": replace(SHAPE, ensemble_size=3, write_quorum=3, entries=1),
    "striped-3-2-2": replace(SHAPE, ensemble_size=3),
    "late-answers": replace(SHAPE, entries=1, losses=1, late_answers=True),
    "overtaking": replace(SHAPE, losses=1, crashes=0, overtaking=True),
    "repair": replace(SHAPE, losses=1, repairs=1),
    "two-recoverers": RACE,
    "two-recoverers-late-answers": replace(RACE, losses=0, late_answers=True),
    "two-recoverers-crash": replace(RACE, crashes=1),
    "4-bookies": replace(SHAPE, bookies=4, losses=1),
    "3-entries": replace(SHAPE, entries=3, losses=1),
    "no-spare-3-3-2-2-entries": replace(SHAPE, ensemble_size=3, write_quorum=3, losses=1),
}


def main(arguments: list[str]) -> int:
    """Exit code 1: something was violated, missed, or not exhausted in time."""
    parser = argparse.ArgumentParser(prog="model.runner", description="model check of the ledger protocol")
    parser.add_argument("--only", default="", help="shapes and defects whose name contains this")
    parser.add_argument("--seconds", type=float, default=3600.0, help="limit of each search")
    options = parser.parse_args(arguments)
    # One entry is looked for at a time: reads ahead of the end multiply states and show nothing new. All replicas at once:
    # that has every order of messages that asking one first has.
    recovery.WINDOW_ENTRIES = 1
    recovery.ONE_REPLICA_FIRST = False
    bad = 0
    for name, shape in SHAPES.items():
        if options.only in name:
            bad += _explore(name, shape, options.seconds)
    for planted in PLANTED:
        if options.only in planted.name:
            with pytest.MonkeyPatch.context() as patch:
                planted.plant(patch)
                bad += _find(planted.name, planted.shape, options.seconds)
    return 1 if bad else 0


def _explore(name: str, shape: Shape, seconds: float) -> bool:
    try:
        explored = search(ReducedWorld(shape), max_seconds=seconds)
    except Violation as violation:
        print(f"{name}: VIOLATION {violation}", flush=True)
        return True
    print(
        f"{name}: {'exhausted' if explored.exhausted else 'NOT EXHAUSTED'}, {explored.states:,} states, "
        f"{explored.transitions:,} transitions, depth {explored.depth}, {explored.seconds:.0f} s",
        flush=True,
    )
    return not explored.exhausted


def _find(name: str, shape: Shape, seconds: float) -> bool:
    try:
        search(ReducedWorld(shape, core_checks=False), max_seconds=seconds)
    except Violation as violation:
        print(f"planted {name}: found by {len(violation.path)} steps, {violation.reason}", flush=True)
        return False
    print(f"planted {name}: NOT FOUND", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
