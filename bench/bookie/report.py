"""Tables and the JSON file."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.bookie.goals import GOALS
from bench.bookie.run import LEDGERS, PACED_RATE, SIZES, Round
from bench.figures import Gathered
from bench.rounds import name_of, print_machine


def print_tables(rounds: list[Round], console: Console) -> None:
    """All but the targets."""
    _print_adds(rounds, console)
    _print_reads(rounds, console)
    _print_paced(rounds, console)
    _print_machine(rounds, console)


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _over(rounds: list[Round], part: str, key: str, figure: str) -> list[float]:
    return [found.details[part][key][figure] for found in rounds if key in found.details[part]]


def _print_adds(rounds: list[Round], console: Console) -> None:
    table = Table(title=f"Adds over TCP, medians of {len(rounds)}: entries/s, MB/s", title_justify="left")
    table.add_column("entries", no_wrap=True)
    for count in LEDGERS:
        table.add_column(f"{count:,} ledger{'s' if count > 1 else ''}", justify="right", no_wrap=True)
    table.add_column("4 x cache, 1", justify="right", no_wrap=True)
    table.add_column("4 x cache, 10,000", justify="right", no_wrap=True)
    table.add_column("journal group", justify="right", no_wrap=True)
    table.add_column("CPU us per add, one ledger", no_wrap=True)
    for size in SIZES:
        cells = []
        columns = [("absorb", count) for count in LEDGERS]
        columns += [("sustained", count) for count in (LEDGERS[0], LEDGERS[-1])]
        for part, key in [(part, f"{size}/{count}") for part, count in columns]:
            rates = _over(rounds, part, key, "adds_per_s")
            rate = _median(rates)
            cells.append(f"{rate:,.0f}  {rate * size / 1e6:,.0f}" if rates else "")
        key = f"{size}/1"
        group = _median([found.details["absorb"].get(key, {}).get("group_bytes", 0) for found in rounds])
        table.add_row(name_of(size), *cells, f"{group:,.0f} B", _cpu(rounds, key))
    if any(found.details["absorb"] or found.details["sustained"] for found in rounds):
        console.print(table)


def _cpu(rounds: list[Round], key: str) -> str:
    results = [found.details["absorb"][key] for found in rounds if key in found.details["absorb"]]
    if not results:
        return ""
    return "  ".join(
        f"{who.rpartition('-')[2]} {_median([one['cpu_s'].get(who, 0.0) / one['adds'] * 1e6 for one in results]):,.3g}"
        for who in results[0]["cpu_s"]
    )


def _print_reads(rounds: list[Round], console: Console) -> None:
    keys = list(dict.fromkeys(key for found in rounds for key in found.details["reads"]))
    table = Table(title="Reads over TCP", title_justify="left")
    for column in ("entries", "from", "order", "entries/s", "MB/s", "request p50 ms", "p99 ms"):
        table.add_column(
            column, no_wrap=True, justify="right" if "/s" in column or "ms" in column else "left"
        )
    for key in keys:
        size, state, order = key.split("/")
        table.add_row(
            name_of(int(size)),
            state,
            order,
            f"{_median(_over(rounds, 'reads', key, 'entries_per_s')):,.0f}",
            f"{_median(_over(rounds, 'reads', key, 'bytes_per_s')) / 1e6:,.0f}",
            f"{_median(_over(rounds, 'reads', key, 'p50_ms')):.2f}",
            f"{_median(_over(rounds, 'reads', key, 'p99_ms')):.2f}",
        )
    if keys:
        console.print(table)


def _print_paced(rounds: list[Round], console: Console) -> None:
    paced = [found.details["paced"] for found in rounds if "paced" in found.details]
    if not paced:
        return
    table = Table(title=f"{PACED_RATE:,} adds/s of 1 KB, from when each was due, ms", title_justify="left")
    for column in ("while", "p50", "p99", "p99.9", "maximum", "samples"):
        table.add_column(column, justify="left" if column == "while" else "right", no_wrap=True)
    for name in paced[0]:
        figures = [one[name] for one in paced if name in one]
        table.add_row(
            name,
            *(
                f"{_median([one[figure] for one in figures]):.3f}"
                for figure in ("p50", "p99", "p999", "maximum")
            ),
            f"{sum(one['samples'] for one in figures):,.0f}",
        )
    console.print(table)


def _print_machine(rounds: list[Round], console: Console) -> None:
    rows: list[tuple[str, str]] = []
    raw = [one for found in rounds for one in found.details["raw"]]
    for size in raw[0]["synced"] if raw else ():
        rates = [one["synced"][size] / 1e6 for one in raw]
        rows.append(
            (
                f"pwrite + fdatasync, {name_of(int(size))} each",
                f"{_median(rates):,.0f} MB/s, {min(rates):,.0f} to {max(rates):,.0f}",
            )
        )
    for name, label in (
        ("path", "TCP -> ring -> pwrite + fdatasync, no bookie"),
        ("cold_read", "cold sequential read"),
    ):
        if rates := [one[name] / 1e6 for one in raw]:
            rows.append((label, f"{_median(rates):,.0f} MB/s, {min(rates):,.0f} to {max(rates):,.0f}"))
    print_machine(rows, rounds, console)


def figures(rounds: list[Round]) -> dict[str, Any]:
    """What two runs are compared by: plain rates, times, CPU and memory; the targets are ratios of them."""
    gathered = Gathered()
    for found in rounds:
        for part, label in (("absorb", "adds"), ("sustained", "adds over 4 x the cache")):
            for key, result in found.details[part].items():
                size, _, ledgers = key.partition("/")
                name = f"{part}_{key}"
                text = (
                    f"{label}, {name_of(int(size))} to {int(ledgers):,} ledger{'s' if ledgers != '1' else ''}"
                )
                gathered.add(name, result["adds_per_s"], text, "adds/s", higher=True)
                cpu_s = sum(seconds for who, seconds in result["cpu_s"].items() if who != "client")
                if cpu_s:
                    cost = cpu_s / result["adds"] * 1e6
                    gathered.add(f"{name}_cpu", cost, f"{text}: CPU of the bookie", "us/add")
        for key, result in found.details["reads"].items():
            size, state, order = key.split("/")
            text = f"reads, {name_of(int(size))}, {state}, {order}"
            gathered.add(f"reads_{key}", result["entries_per_s"], text, "entries/s", higher=True)
        for state, one in found.details.get("paced", {}).items():
            for percentile in ("p50", "p99"):
                name = f"paced_{state}_{percentile}"
                gathered.add(name, one[percentile], f"paced adds, {state}, {percentile}", "ms")
        for name in ("replay", "replay_large"):
            if name in found.details:
                gathered.add(name, found.details[name]["seconds"], GOALS[name].label, "s")
        if highest := [one["highest_pss"] / 1e6 for one in found.details["sustained"].values()]:
            gathered.add("memory", max(highest), "memory, sustained adds", "MB")
    return gathered.document()
