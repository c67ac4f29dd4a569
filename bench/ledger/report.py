"""Tables and the JSON file."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.figures import Gathered
from bench.ledger.run import TAIL_RATE, Round, client_us
from bench.rounds import name_of, print_machine


def print_tables(rounds: list[Round], console: Console) -> None:
    """All but the targets."""
    _print_appends(rounds, console)
    _print_reads(rounds, console)
    _print_tails(rounds, console)
    _print_machine(rounds, console)


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
    p50, p99 = (statistics.median(found.details["ring"][name] for found in rounds) for name in ("p50", "p99"))
    path = statistics.median(found.details["path_bytes_per_s"] for found in rounds)
    rows = [
        ("TCP -> ring -> fdatasync -> back, one at a time", f"p50 {p50:.3f} ms, p99 {p99:.3f} ms"),
        ("TCP -> ring -> pwrite + fdatasync, one copy, no bookie", f"{path / 1e6:,.0f} MB/s"),
    ]
    print_machine(rows, rounds, console)


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
