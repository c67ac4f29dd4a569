"""Tables and the JSON file."""

from __future__ import annotations

import json
import platform
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.bookie.run import name_of
from bench.figures import Gathered
from bench.ledger.goals import GOALS
from bench.ledger.run import TAIL_RATE, Round, client_us
from bench.probes import QUIET_SHARE


def print_report(rounds: list[Round], console: Console) -> dict[str, Any]:
    """Prints everything; returns what the JSON file says at its top."""
    _print_appends(rounds, console)
    _print_reads(rounds, console)
    _print_tails(rounds, console)
    _print_machine(rounds, console)
    return _print_goals(rounds, console)


def _results(rounds: list[Round], part: str) -> dict[str, list[dict[str, Any]]]:
    """By key, one for each round."""
    keys = dict.fromkeys(key for found in rounds for key in found.details[part])
    return {key: [found.details[part][key] for found in rounds if key in found.details[part]] for key in keys}


def _median(results: list[dict[str, Any]], figure: str) -> float:
    return float(statistics.median(result[figure] for result in results))


def _print_appends(rounds: list[Round], console: Console) -> None:
    title = (
        f"Appends over loopback, medians of {len(rounds)}; CPU per append by process, of all bookies together"
    )
    table = Table(title=title, title_justify="left")
    for column in ("entries", "E/Qw/Qa", "load"):
        table.add_column(column, no_wrap=True)
    for column in ("appends/s", "MB/s", "p50 ms", "p99 ms"):
        table.add_column(column, justify="right", no_wrap=True)
    found = _results(rounds, "appends")
    roles = dict.fromkeys(role for results in found.values() for role in results[0]["cpu_s"])
    for role in roles:
        table.add_column(f"CPU us: {role}", justify="right")
    for key, results in found.items():
        size, quorums, load = (
            key.partition("/")[0],
            key.partition("/")[2].rpartition("/")[0],
            key.rpartition("/")[2],
        )
        cpu = [
            statistics.median(result["cpu_s"].get(role, 0.0) / result["appends"] * 1e6 for result in results)
            for role in roles
        ]
        table.add_row(
            name_of(int(size)),
            quorums,
            load,
            f"{_median(results, 'appends_per_s'):,.0f}",
            f"{_median(results, 'bytes_per_s') / 1e6:,.1f}",
            f"{_median(results, 'p50_ms'):.3f}",
            f"{_median(results, 'p99_ms'):.3f}",
            *(f"{us:,.1f}" for us in cpu),
        )
    if found:
        console.print(table)


def _print_reads(rounds: list[Round], console: Console) -> None:
    table = Table(title="A whole ledger read in order, 1 MB at a time", title_justify="left")
    for column in ("entries", "E/Qw/Qa"):
        table.add_column(column, no_wrap=True)
    for column in ("entries/s", "MB/s", "client CPU us per entry"):
        table.add_column(column, justify="right", no_wrap=True)
    found = _results(rounds, "reads")
    for key, results in found.items():
        size, _, quorums = key.partition("/")
        us = statistics.median(result["cpu_s"]["client"] / result["entries"] * 1e6 for result in results)
        table.add_row(
            name_of(int(size)),
            quorums,
            f"{_median(results, 'entries_per_s'):,.0f}",
            f"{_median(results, 'bytes_per_s') / 1e6:,.1f}",
            f"{us:,.1f}",
        )
    if found:
        console.print(table)


def _print_tails(rounds: list[Round], console: Console) -> None:
    table = Table(
        title=f"A tail at {TAIL_RATE:,} appends/s of 1 KB, from when each was due", title_justify="left"
    )
    table.add_column("E/Qw/Qa", no_wrap=True)
    for column in ("p50 ms", "p99 ms", "CPU us of both clients per entry"):
        table.add_column(column, justify="right", no_wrap=True)
    found = _results(rounds, "tail")
    for quorums, results in found.items():
        us = statistics.median(result["cpu_s"]["client"] / result["entries"] * 1e6 for result in results)
        table.add_row(
            quorums, f"{_median(results, 'p50_ms'):.3f}", f"{_median(results, 'p99_ms'):.3f}", f"{us:,.0f}"
        )
    if found:
        console.print(table)


def _print_machine(rounds: list[Round], console: Console) -> None:
    table = Table(title="The machine, in the same rounds", title_justify="left", show_header=False)
    p50, p99 = (statistics.median(found.details["ring"][name] for found in rounds) for name in ("p50", "p99"))
    table.add_row("TCP -> ring -> fdatasync -> back, one at a time", f"p50 {p50:.3f} ms, p99 {p99:.3f} ms")
    path = statistics.median(found.details["path_bytes_per_s"] for found in rounds)
    table.add_row("TCP -> ring -> pwrite + fdatasync, one copy, no bookie", f"{path / 1e6:,.0f} MB/s")
    calibrations = sorted(one for found in rounds for one in found.calibrations_ms)
    idle = [share for found in rounds for share in found.idle_shares]
    table.add_row(
        "calibration loop",
        f"median {statistics.median(calibrations):.1f} ms, {calibrations[0]:.1f} to {calibrations[-1]:.1f}",
    )
    table.add_row("idle share", f"median {statistics.median(idle):.2f}, lowest {min(idle):.2f}")
    console.print(table)
    if busy := sum(share < QUIET_SHARE for share in idle):
        console.print(
            f"The machine was busy with other things before {busy} of {len(idle)} workloads; rates and p99 suffer most.",
            style="bold yellow",
        )


def _print_goals(rounds: list[Round], console: Console) -> dict[str, Any]:
    table = Table(title="Targets", title_justify="left")
    for column in ("target", "median", "lowest", "highest", "asked", "reached"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("target", "reached") else "right")
    summary: dict[str, Any] = {}
    for name, goal in GOALS.items():
        samples = [found.figures[name] for found in rounds if name in found.figures]
        if not samples:
            continue
        value = statistics.median(samples)
        reached = None if goal.limit is None else value <= goal.limit
        table.add_row(
            goal.label,
            f"{value:.2f} {goal.unit}",
            f"{min(samples):.2f}",
            f"{max(samples):.2f}",
            "" if goal.limit is None else f"at most {goal.limit:g} {goal.unit}",
            "" if reached is None else "[green]yes[/]" if reached else "[bold red]NO[/]",
        )
        summary[name] = {"median": value, "unit": goal.unit, "rounds": samples, "reached": reached}
    console.print(table)
    return summary


def figures(rounds: list[Round]) -> dict[str, Any]:
    """What two runs are compared by: plain rates, times and CPU."""
    gathered = Gathered()
    for found in rounds:
        for key, result in found.details["appends"].items():
            size, _, rest = key.partition("/")
            quorums, _, load = rest.rpartition("/")
            text = f"appends, {name_of(int(size))}, {quorums}, {load}"
            if load == "full":
                gathered.add(f"appends_{key}", result["appends_per_s"], text, "appends/s", higher=True)
            else:
                gathered.add(f"appends_{key}_p50", result["p50_ms"], f"{text}: p50", "ms")
            for who, us in (("client", client_us(result)), ("bookies", bookies_us(result))):
                if us:
                    gathered.add(f"appends_{key}_cpu_{who}", us, f"{text}: CPU of the {who}", "us/append")
        for quorums, result in found.details["recovery"].items():
            gathered.add(f"recovery_{quorums}", result["seconds"], f"recovery, {quorums}", "s")
        for key, result in found.details["reads"].items():
            size, _, quorums = key.partition("/")
            text = f"reads, {name_of(int(size))}, {quorums}"
            gathered.add(f"reads_{key}", result["entries_per_s"], text, "entries/s", higher=True)
        for quorums, result in found.details["tail"].items():
            gathered.add(f"tail_{quorums}", result["p50_ms"], f"tail, {quorums}: p50", "ms")
    return gathered.document()


def bookies_us(result: dict[str, Any]) -> float:
    """Microseconds of CPU of all bookies together per append."""
    seconds = sum(cpu_s for who, cpu_s in result["cpu_s"].items() if who != "client")
    return float(seconds / result["appends"] * 1e6)


def write_json(path: Path, rounds: list[Round], summary: dict[str, Any]) -> None:
    """Everything that was measured."""
    document = {
        "machine": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
        },
        "targets": summary,
        "figures": figures(rounds),
        "others": 1.0 - min((share for found in rounds for share in found.idle_shares), default=1.0),
        "rounds": [found.details | {"figures": found.figures} for found in rounds],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")
