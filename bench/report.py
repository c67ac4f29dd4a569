"""The table and the JSON file."""

from __future__ import annotations

import json
import platform
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.figures import Gathered
from bench.limits import GOALS, ratios, verdict
from bench.probes import QUIET_SHARE
from bench.run import Round
from bench.stalls import CONDITIONS, STALL_S, rows

_COLOURS = {"stretch": "green", "floor": "yellow", "BELOW": "bold red"}


def medians(rounds: list[Round]) -> dict[str, float]:
    """Of each figure over the rounds."""
    return {
        name: statistics.median(found.figures[name] for found in rounds if name in found.figures)
        for name in GOALS
        if any(name in found.figures for found in rounds)
    }


def median_probes(rounds: list[Round]) -> dict[str, float]:
    """Bytes per second of "socket", "cold read" and "disk X" (at workload X's group size), ms of "ring p50" and so on."""
    samples: dict[str, list[float]] = {}
    for found in rounds:
        probes = found.probes
        if found.limits:
            samples.setdefault("socket", []).append(probes["socket"]["bytes_per_s"])
            samples.setdefault("cold read", []).append(probes["disk"]["cold_read_bytes_per_s"])
            for workload, synced in probes["disk"]["groups"].items():
                samples.setdefault(f"disk {workload}", []).append(synced["bytes_per_s"])
        for percentile, value in probes.get("ring", {}).items():
            samples.setdefault(f"ring {percentile}", []).append(value)
    return {name: statistics.median(values) for name, values in samples.items()}


def print_report(rounds: list[Round], console: Console) -> dict[str, Any]:
    """Prints tables; returns what the JSON file says at its top."""
    values, probes = medians(rounds), median_probes(rounds)
    table = Table(title=f"Magnetar: medians of {len(rounds)}", title_justify="left")
    table.add_column("workload", no_wrap=True)
    for column in ("median", "lowest", "highest", "floor", "stretch"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("reached", no_wrap=True)
    table.add_column("others", justify="right", no_wrap=True)
    table.add_column("of what the machine can do", no_wrap=True)
    summary: dict[str, Any] = {}
    for name, value in values.items():
        goal = GOALS[name]
        samples = [found.figures[name] for found in rounds if name in found.figures]
        reached, limits = verdict(name, value), ratios(name, value, probes)
        others = statistics.median(found.others[name[0]] for found in rounds if name in found.figures)
        table.add_row(
            goal.label,
            f"{_short(value)} {goal.unit}",
            _short(min(samples)),
            _short(max(samples)),
            _short(goal.floor) if goal.floor else "",
            _short(goal.stretch) if goal.stretch else "",
            f"[{_COLOURS[reached]}]{reached}[/]" if reached else "",
            percent(others),
            ", ".join(f"{share:.2f} {limit}" for limit, share in limits.items()),
        )
        summary[name] = {"median": value, "unit": goal.unit, "rounds": samples, "reached": reached}
        summary[name] |= {
            "label": goal.label,
            "higher": goal.higher,
            "compared": goal.compared,
            "others": others,
        }
        summary[name] |= {"floor": goal.floor, "stretch": goal.stretch, "ratios": limits}
    console.print(table)
    cpu = _median_cpu(rounds)
    _print_cpu(cpu, console)
    _print_stalls(rounds, console)
    _print_probes(rounds, probes, console)
    return {"figures": summary | _cpu_figures(rounds), "cpu_us_per_message": cpu, "probes": probes}


def _median_cpu(rounds: list[Round]) -> dict[str, dict[str, float]]:
    """Microseconds per message, by workload and process."""
    found: dict[str, dict[str, float]] = {}
    for name in GOALS:
        samples = [one.details.get(name, {}).get("cpu_us_per_message") for one in rounds]
        costs = [sample for sample in samples if sample]
        if costs:
            found[name] = {who: statistics.median(cost.get(who, 0.0) for cost in costs) for who in costs[0]}
    return found


def _print_cpu(cpu: dict[str, dict[str, float]], console: Console) -> None:
    table = Table(title="CPU microseconds per message", title_justify="left", show_header=False)
    for name, costs in cpu.items():
        table.add_row(
            GOALS[name].label,
            f"{sum(costs.values()):,.2f}",
            "  ".join(f"{who} {cost:,.2f}" for who, cost in costs.items()),
        )
    if table.row_count:
        console.print(table)


def _cpu_figures(rounds: list[Round]) -> dict[str, dict[str, Any]]:
    """CPU by workload, of the service and of its client: of all figures it varies least from run to run."""
    gathered = Gathered()
    for name, goal in GOALS.items():
        for found in rounds:
            costs = dict(found.details.get(name, {}).get("cpu_us_per_message", {}))
            client = costs.pop("client", 0.0)
            workload = goal.label.partition(", p50")[0]
            for who, cost in (("service", sum(costs.values())), ("client", client)):
                if cost:
                    gathered.add(f"{name}_cpu_{who}", cost, f"{workload}: CPU of the {who}", "us/msg")
    return gathered.document()


def _print_stalls(rounds: list[Round], console: Console) -> None:
    """(e) beside the bare disk."""
    details = [found.details["e_p50"] for found in rounds if "e_p50" in found.details]
    if not details:
        return
    found = rows([one["conditions"] for one in details])
    table = Table(title="(e) beside a probe that writes as much, as often", title_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("p50 ms", "p99 ms", "p99.9 ms", "highest ms", "stalls", "samples"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, label in CONDITIONS.items():
        if name in found:
            one = found[name]
            times = (f"{one[key]:.3f}" for key in ("p50", "p99", "p999", "maximum"))
            table.add_row(label, *times, f"{one['stalls']:.0f}", f"{one['samples']:,.0f}")
    if "added" in found:
        table.add_row(
            "what the service adds then", *(f"{found['added'][key]:.3f}" for key in ("p50", "p99", "p999"))
        )
    console.print(table)
    pace = {
        who: [statistics.median(one["pace"][who][part] for one in details) for part in (0, 1)]
        for who in ("service", "probe")
    }
    console.print(
        f"A stall is a wait of {STALL_S * 1e3:.0f} ms or more. Beside the probe, {found['coinciding']['stalls']:.0f} of the "
        f"service's {found.get('service beside', {}).get('stalls', 0):.0f} stalls came with one of the bare disk. "
        f"The service wrote {pace['service'][0]:,.0f} groups/s of {pace['service'][1]:,.0f} B, the probe "
        f"{pace['probe'][0]:,.0f} of {pace['probe'][1]:,.0f} B (bench/stalls.py explains the rows)."
    )


def _print_probes(rounds: list[Round], probes: dict[str, float], console: Console) -> None:
    table = Table(title="The machine, in the same rounds", title_justify="left", show_header=False)
    calibrations = sorted(one for found in rounds for one in found.calibrations_ms)
    table.add_row(
        "calibration loop before each workload",
        f"median {statistics.median(calibrations):.1f} ms, {calibrations[0]:.1f} to {calibrations[-1]:.1f}",
    )
    idle = [share for found in rounds for share in found.idle_shares]
    table.add_row(
        "idle share before each workload", f"median {statistics.median(idle):.2f}, lowest {min(idle):.2f}"
    )
    if "ring p50" in probes:
        table.add_row(
            "TCP + ring + fdatasync, one at a time",
            f"p50 {probes['ring p50']:.3f}  p99 {probes['ring p99']:.3f}  p99.9 {probes['ring p999']:.3f} ms",
        )
    if rounds[-1].limits:
        table.add_row("bare echo over TCP", f"{probes['socket'] / 1e6:,.0f} MB/s")
        table.add_row("cold sequential read", f"{probes['cold read'] / 1e6:,.0f} MB/s")
        for workload, found in rounds[-1].probes["disk"]["groups"].items():
            table.add_row(
                f"pwrite + fdatasync, groups of ({workload})",
                f"{found['group_bytes']:,} B: {probes[f'disk {workload}'] / 1e6:,.1f} MB/s, p50 {found['p50_ms']:.3f} ms",
            )
    console.print(table)
    others = [share for found in rounds for share in found.others.values()]
    busy = sum(share > 1 - QUIET_SHARE for share in others)
    if busy:
        console.print(
            f"Others used more than {1 - QUIET_SHARE:.0%} of the cores during {busy} of {len(others)} workloads (column "
            '"others"): syncs wait for a processor then. Those figures say little about Magnetar.',
            style="bold yellow",
        )


def percent(others: float) -> str:
    """The share of the cores that others used, marked where it is more than a quiet machine's."""
    return f"[bold yellow]{others:.0%}[/]" if others > 1 - QUIET_SHARE else f"{others:.0%}"


def _short(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.2f}M"
    if value >= 1e4:
        return f"{value / 1e3:,.0f}k"
    return f"{value:,.3g}"


def write_json(path: Path, rounds: list[Round], summary: dict[str, Any], wire: dict[str, Any]) -> None:
    """Everything that was measured."""
    document = {
        "machine": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
        },
        "wire_check": wire,
        "others": max((share for found in rounds for share in found.others.values()), default=0.0),
        **summary,
        "rounds": [found.details for found in rounds],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")
