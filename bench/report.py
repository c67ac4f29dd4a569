"""The table and the JSON file."""

from __future__ import annotations

import json
import platform
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.limits import GOALS, LIMITS, verdict
from bench.run import Round

_COLOURS = {"stretch": "green", "floor": "yellow", "BELOW": "bold red"}


def medians(rounds: list[Round]) -> dict[str, float]:
    """Of each figure over the rounds."""
    names = [name for name in GOALS if any(name in found.figures for found in rounds)]
    return {
        name: statistics.median(found.figures[name] for found in rounds if name in found.figures)
        for name in names
    }


def median_probes(rounds: list[Round]) -> dict[str, float]:
    """Of each plain number."""
    probes = [found.details["probes"] for found in rounds]
    return {
        name: statistics.median(found[name] for found in probes)
        for name, value in probes[0].items()
        if isinstance(value, float | int)
    }


def median_cpu(rounds: list[Round], name: str) -> dict[str, float]:
    """Microseconds per message by process; empty for figures that are not of a workload."""
    found = [costs for each in rounds if (costs := each.details.get(name, {}).get("cpu_us_per_message"))]
    return {who: statistics.median(costs[who] for costs in found) for who in found[0]} if found else {}


def ratio(name: str, value: float, probes: dict[str, float]) -> tuple[str, float]:
    """Which limit, and the figure as a multiple of it."""
    if name not in LIMITS:
        return "", 0.0
    probe, unit = LIMITS[name]
    limit = probes.get(probe, 0.0)
    return probe, value * unit / limit if limit else 0.0


def print_report(rounds: list[Round], console: Console) -> dict[str, Any]:
    """Prints tables; returns what the JSON file says at its top."""
    values, probes = medians(rounds), median_probes(rounds)
    table = Table(title=f"Magnetar, medians of {len(rounds)}", title_justify="left")
    for column in ("workload", "figure", "floor / stretch", "reached", "x limit", "limit"):
        table.add_column(column, justify="left" if column in ("workload", "limit", "reached") else "right")
    summary: dict[str, Any] = {}
    for name, value in values.items():
        goal = GOALS[name]
        reached = verdict(name, value, probes)
        limit, multiple = ratio(name, value, probes)
        marks = f"{_short(goal.floor)} / {_short(goal.stretch)}" if goal.floor else ""
        if goal.relative_to:
            marks += " x probe"
        table.add_row(
            goal.label,
            f"{_short(value)} {goal.unit}",
            marks,
            f"[{_COLOURS[reached]}]{reached}[/]" if reached else "",
            f"{multiple:.2f}" if multiple else "",
            limit,
        )
        summary[name] = {
            "median": value,
            "unit": goal.unit,
            "rounds": [found.figures[name] for found in rounds if name in found.figures],
            "floor": goal.floor,
            "stretch": goal.stretch,
            "reached": reached,
            "limit": limit,
            "ratio_to_limit": multiple,
            "cpu_us_per_message": median_cpu(rounds, name),
        }
    console.print(table)
    _print_cpu(rounds, console)
    _print_probes(rounds, probes, console)
    return {"figures": summary, "probes": probes}


def _print_cpu(rounds: list[Round], console: Console) -> None:
    table = Table(title="CPU microseconds per message", title_justify="left")
    table.add_column("workload")
    table.add_column("by process")
    for name in GOALS:
        cpu = median_cpu(rounds, name)
        if cpu and name not in ("d_p99", "d_p999", "e_p99"):
            table.add_row(name, "  ".join(f"{who} {cost:.2f}" for who, cost in cpu.items()))
    if table.row_count:
        console.print(table)


def _print_probes(rounds: list[Round], probes: dict[str, float], console: Console) -> None:
    table = Table(title="Limits of this machine, in the same run", title_justify="left", show_header=False)
    table.add_row("calibration loop", f"{probes['calibration']:.1f} million rounds/s")
    table.add_row("bare echo over TCP", f"{probes['echo_messages']:,.0f} frames of 150 B/s")
    table.add_row(
        "TCP + ring + fdatasync, one at a time",
        f"p50 {probes['ring_p50']:.3f}  p99 {probes['ring_p99']:.3f}  p99.9 {probes['ring_p999']:.3f} ms",
    )
    table.add_row("cold sequential read", f"{probes['disk_read_bytes'] / 1e6:,.0f} MB/s")
    for name, found in rounds[-1].details["probes"].items():
        if isinstance(found, dict):
            table.add_row(
                f"pwrite + fdatasync of {found['group_bytes']:,} B ({name.removeprefix('disk_')})",
                f"{found['bytes_per_s'] / 1e6:,.0f} MB/s, p50 {found['p50_ms']:.3f} ms",
            )
    console.print(table)


def _short(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.2f}M"
    if value >= 1e4:
        return f"{value / 1e3:,.0f}k"
    return f"{value:,.3g}"


def write_json(path: Path, rounds: list[Round], summary: dict[str, Any], wire: dict[str, Any]) -> None:
    """Everything that was measured."""
    document = {
        "machine": {"python": platform.python_version(), "system": platform.platform()},
        "wire_check": wire,
        **summary,
        "rounds": [found.details for found in rounds],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")
