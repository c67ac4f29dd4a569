"""What the benchmarks of single rooms share: rounds of workloads, targets, their tables, the JSON file."""

from __future__ import annotations

import json
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.table import Table

from bench.arguments import OUT, console, parse
from bench.probes import QUIET_SHARE, calibrate, settle

Say = Callable[[str], None]


class Goal(NamedTuple):
    """`limit` must be reached (`higher`) or not be passed; None: for comparison only."""

    label: str
    unit: str
    limit: float | None
    higher: bool = True


class Round:
    """`figures` by the names of the goals, `details` for tables and the JSON file."""

    def __init__(
        self, directory: Path, wanted: Collection[str], settle_s: float, say: Say, details: Mapping[str, Any]
    ) -> None:
        """`settle_s`: how long to wait for a quiet machine before each workload."""
        self.directory = directory
        self.wanted = wanted
        self.settle_s = settle_s
        self.say = say
        self.figures: dict[str, float] = {}
        self.details: dict[str, Any] = {**details}
        self.idle_shares: list[float] = []
        self.calibrations_ms: list[float] = []

    def run(self) -> None:
        """Everything that is wanted."""
        self.directory.mkdir(parents=True)
        try:
            self.work()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)
        self.details["idle_shares"] = self.idle_shares
        self.details["calibrations_ms"] = self.calibrations_ms

    def work(self) -> None:
        """The workloads that are wanted."""
        raise NotImplementedError

    def quiet(self) -> None:
        """Waits for a quiet machine, and remembers how quiet it was."""
        self.idle_shares.append(settle(self.settle_s))
        self.calibrations_ms.append(calibrate())


R = TypeVar("R", bound=Round)


class Report(NamedTuple):
    """How a benchmark shows its rounds."""

    tables: Callable[[Any, Console], None]
    goals: Mapping[str, Goal]
    figures: Callable[[Any], dict[str, Any]]  # what two runs are compared by
    more: Mapping[str, Any] = {}  # for the JSON file


def run_rounds(
    name: str,
    doc: str | None,
    workloads: str,
    arguments: Sequence[str],
    new_round: Callable[[Path, bool, Collection[str], float, Say, int], R],
    report: Report,
) -> int:
    """Runs everything, prints tables, writes the JSON file, returns 0: a missed target is no error of the program.

    `new_round` gets a folder, whether to be quick, what is wanted, seconds to wait for quiet, and the round's number.
    """
    given = parse(f"python -m bench {name}", doc, workloads, arguments, rounds=3)
    screen = console()

    def say(text: str) -> None:
        screen.print(text)

    OUT.mkdir(exist_ok=True)
    rounds: list[R] = []
    for number in range(given.rounds):
        say(f"round {number + 1}")
        scratch = OUT / f"scratch-{time.time_ns()}"
        found = new_round(scratch, given.quick, given.wanted, given.settle, say, number)
        found.run()
        rounds.append(found)
    report.tables(rounds, screen)
    document = {
        "machine": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
        },
        **report.more,
        "targets": print_goals(report.goals, rounds, screen),
        "figures": report.figures(rounds),
        "others": 1.0 - min((share for found in rounds for share in found.idle_shares), default=1.0),
        "rounds": [found.details | {"figures": found.figures} for found in rounds],
    }
    path: Path = given.json or OUT / time.strftime(f"bench-{name}-%Y%m%d-%H%M%S.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")
    say(f"all figures: {path}")
    return 0


def print_machine(rows: Sequence[tuple[str, str]], rounds: Sequence[Round], console: Console) -> None:
    """What the machine could do in the same rounds, and how quiet it was."""
    table = Table(title="The machine, in the same rounds", title_justify="left", show_header=False)
    for row in rows:
        table.add_row(*row)
    calibrations = sorted(one for found in rounds for one in found.calibrations_ms)
    idle = [share for found in rounds for share in found.idle_shares]
    if idle:
        table.add_row(
            "calibration loop",
            f"median {statistics.median(calibrations):.1f} ms, {calibrations[0]:.1f} to {calibrations[-1]:.1f}",
        )
        table.add_row("idle share", f"median {statistics.median(idle):.2f}, lowest {min(idle):.2f}")
    console.print(table)
    if busy := sum(share < QUIET_SHARE for share in idle):
        console.print(
            f"The machine was busy with other things before {busy} of {len(idle)} workloads: syncs wait for a processor "
            "then; rates of small groups and p99 suffer most.",
            style="bold yellow",
        )


def print_goals(goals: Mapping[str, Goal], rounds: Sequence[Round], console: Console) -> dict[str, Any]:
    """The targets; returns what the JSON file says of them."""
    table = Table(title="Targets", title_justify="left")
    for column in ("target", "median", "lowest", "highest", "asked", "reached"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("target", "reached") else "right")
    summary: dict[str, Any] = {}
    for name, goal in goals.items():
        samples = [found.figures[name] for found in rounds if name in found.figures]
        if not samples:
            continue
        value = statistics.median(samples)
        reached: bool | None = None
        asked = ""
        if goal.limit is not None:
            reached = value >= goal.limit if goal.higher else value <= goal.limit
            asked = f"{'at least' if goal.higher else 'at most'} {goal.limit:g} {goal.unit}"
        table.add_row(
            goal.label,
            f"{value:.2f} {goal.unit}",
            f"{min(samples):.2f}",
            f"{max(samples):.2f}",
            asked,
            "" if reached is None else "[green]yes[/]" if reached else "[bold red]NO[/]",
        )
        summary[name] = {"median": value, "unit": goal.unit, "rounds": samples, "reached": reached}
    console.print(table)
    return summary


def name_of(size: int) -> str:
    """Of an entry."""
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB" if size >= 1024 else f"{size} B"
