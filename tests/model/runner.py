"""`make model`: every state of small worlds, and every planted defect; the way to a violation, and how to walk it again.

    python -m model.runner                      # the default set: exhausted within five minutes of CPU
    python -m model.runner --long               # larger worlds, each for so many seconds of CPU (--seconds)
    python -m model.runner --only NAME          # worlds and defects whose name contains this
    python -m model.runner --walk NAME --turns 0.3.1   # prints that way, step by step, with what is there after each
                                                       # PYTHONPATH=tests

Two processes, one world or defect each at a time (--jobs): one search does not get faster by more of them in Python, where a
state costs less than to send it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

import pytest

from magnetar.ledger.core import recovery

from .defects import PLANTED
from .explorer import Explored, Violation
from .invariants import INVARIANTS
from .reduced_world import ReducedWorld
from .search import Broken, search, walk
from .worlds import WORLDS, Named

_HOW = "PYTHONPATH=tests python -m model.runner --walk {name} --turns {turns}"


def main(arguments: list[str]) -> int:
    """Exit code 1: something was violated, missed, or (in the default set) not exhausted in time."""
    parser = argparse.ArgumentParser(prog="model.runner", description="model check of the ledger protocol")
    parser.add_argument("--only", default="", help="worlds and defects whose name contains this")
    parser.add_argument("--long", action="store_true", help="the long worlds instead of the default set")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="limit of each search, of CPU (default 300)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--walk", metavar="NAME", help="walk a way again in this world, or with this defect")
    parser.add_argument(
        "--turns", help="which step of each state, as a violation prints it (default: searched for)"
    )
    options = parser.parse_args(arguments)
    if options.walk:
        return _walk(options.walk, options.turns)
    worlds = [w.name for w in WORLDS if options.only in w.name and (w.long == options.long or options.only)]
    defects = [p.name for p in PLANTED if options.only in p.name and not options.long]
    if not worlds and not defects:
        parser.error(f"no world and no defect has {options.only!r} in its name")
    try:
        return 1 if _run(worlds, defects, options) else 0
    except BrokenProcessPool:
        print(
            "a search's process was killed, or ran out of memory; run what is missing with --only and --jobs 1"
        )
        return 1


def _run(worlds: list[str], defects: list[str], options: argparse.Namespace) -> int:
    bad = 0
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool:
        found = pool.map(_find, defects, [options.seconds] * len(defects)) if defects else iter(())
        if worlds:
            bad += _tell_worlds(
                worlds, pool.map(_explore, worlds, [options.seconds] * len(worlds)), options.long
            )
        if defects:
            bad += _tell_defects(defects, found)
    return bad


def _tell_worlds(names: list[str], results: Iterator[Explored | str], long: bool) -> int:
    print(
        f"{'world':34} {'what':48} {'states':>11} {'transitions':>12} {'depth':>6} {'CPU s':>6}  exhausted?"
    )
    bad, seconds = 0, 0.0
    for name, result in zip(names, results):
        world = _world(name)
        if isinstance(result, str):
            print(f"{name:34} VIOLATION {result}", flush=True)
            bad += 1
            continue
        seconds += result.seconds
        bad += not (result.exhausted or long or world.long)
        print(
            f"{name:34} {world.text:48} {result.states:11,} {result.transitions:12,} {result.depth:6} "
            f"{result.seconds:6.0f}  {'exhausted' if result.exhausted else 'NOT EXHAUSTED'}",
            flush=True,
        )
    print(
        "what: E/Qw/Qa, e entries, c clients (a writer, the others recover), crashes+losses at most. "
        "Depth of a search that was not exhausted: every shorter history was looked at."
    )
    print(f"{seconds:.0f} s of CPU. In every state {len(INVARIANTS)} invariants:")
    for invariant, text in INVARIANTS.items():
        print(f"  {invariant:16} {text}")
    return bad


def _tell_defects(names: list[str], results: Iterator[tuple[str, int, int, float]]) -> int:
    print(f"\n{'planted defect':52} {'steps':>5} {'states':>7} {'CPU s':>6}  found by")
    bad = 0
    for name, (reason, steps, states, seconds) in zip(names, results):
        bad += not reason
        print(f"{name:52} {steps:5} {states:7,} {seconds:6.1f}  {reason or 'NOT FOUND'}", flush=True)
    print(f"{len(names) - bad} of {len(names)} planted defects found; the way: --walk NAME")
    return bad


def _world(name: str) -> Named:
    return next(world for world in WORLDS if world.name == name)


@contextmanager
def _model(name: str) -> Iterator[ReducedWorld]:
    """Of that name, or with the planted defect of that name."""
    with pytest.MonkeyPatch.context() as patch:
        # One entry is looked for at a time: reads ahead of the end multiply states and show nothing new. All replicas at
        # once: that has every order of messages that asking one first has.
        patch.setattr(recovery, "WINDOW_ENTRIES", 1)
        patch.setattr(recovery, "ONE_REPLICA_FIRST", False)
        for planted in PLANTED:
            if planted.name == name:
                planted.plant(patch)
                yield ReducedWorld(planted.shape, core_checks=False)
                return
        yield ReducedWorld(_world(name).shape)


def _explore(name: str, seconds: float) -> Explored | str:
    with _model(name) as model:
        try:
            return search(model, max_seconds=seconds)
        except Violation as violation:
            turns = ".".join(map(str, violation.turns))
            return f"{violation}\nto walk it again: {_HOW.format(name=name, turns=turns or repr(''))}"


def _find(name: str, seconds: float) -> tuple[str, int, int, float]:
    """Reason ("": not found), steps, states seen, seconds of CPU."""
    began = time.process_time()
    with _model(name) as model:
        try:
            states = search(model, max_seconds=seconds).states
        except Violation as violation:
            return violation.reason, len(violation.path), violation.states, time.process_time() - began
    return "", 0, states, time.process_time() - began


def _walk(name: str, given: str | None) -> int:
    """Prints a way: the one given, or else the shortest to what a search finds."""
    with _model(name) as model:
        turns = [int(turn) for turn in (given or "").split(".") if turn]
        if given is None:
            try:
                search(model)
            except Violation as violation:
                turns = violation.turns
        state = model.start()
        step = 0
        print("(fenced: or no add of the writer can come to it any more)")
        try:
            for step, (text, state) in enumerate(walk(model, turns), 1):
                print(f"{step:3}. {text}\n       {model.picture(state)}")
                model.check(state)
            model.following(state)
        except Broken as broken:
            print(f"{step + 1:3}. {model.text(broken.action)}\nVIOLATION {broken}")
            return 1
        except AssertionError as error:
            print(f"VIOLATION {error}")
            return 1
    print("nothing is violated on this way")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
