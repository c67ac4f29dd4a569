"""`make bench-spark`: topics through Spark beside a Python data source that does nothing, on two cores, fsync on.

python -m bench spark                  three rounds after one that warms up, medians
python -m bench spark --quick          one short round after one that warms up
python -m bench spark --only a,c       (a) batch read  (b) stream read  (c) batch write  (d) stream write  (e) archive
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.arguments import OUT, console, parse
from bench.spark.run import VALUE_BYTES, WORKLOADS, Pipeline, Sizes

# Share of the ceiling that is asked of a batch read.
GOAL = 0.60


def main(arguments: Sequence[str]) -> int:
    """Runs everything and returns 0; a missed target is no error of the program."""
    given = parse("python -m bench spark", __doc__, WORKLOADS, arguments, rounds=3)
    screen = console()

    def say(text: str) -> None:
        screen.print(text)

    OUT.mkdir(exist_ok=True)
    sizes = Sizes(given.quick)
    with Pipeline(OUT / f"scratch-{time.time_ns()}", sizes, given.settle, say) as pipeline:
        rounds = []
        for number in range(given.rounds + 1):
            say(f"round {number}" if number else "to warm up")
            rounds.append(pipeline.round(given.wanted))
    summary = print_report(rounds[1:], sizes.rows, screen)
    path = given.json or OUT / time.strftime("bench-spark-%Y%m%d-%H%M%S.json")
    path.write_text(
        json.dumps(
            {
                "rows": sizes.rows,
                "summary": summary,
                "rounds": rounds[1:],
            },
            indent=1,
        )
    )
    say(f"all figures: {path}")
    return 0


def print_report(rounds: list[dict[str, Any]], rows: int, screen: Console) -> dict[str, dict[str, float]]:
    """The table; returns its figures."""
    table = Table(
        title=f"{rows:,} messages of {VALUE_BYTES} B, medians of {len(rounds)}; batch reads are asked for {GOAL:.2f}",
        title_justify="left",
    )
    table.add_column("workload", no_wrap=True)
    for column in (
        "rows/s",
        "MB/s",
        "ceiling rows/s",
        "share (lowest..highest)",
        "daemon CPU us/row",
        "idle before",
    ):
        table.add_column(column, justify="right")
    summary: dict[str, dict[str, float]] = {}
    for name in rounds[0]:
        found = [one[name] for one in rounds]
        seconds = statistics.median(one["ours"]["seconds"] for one in found)
        ceiling = statistics.median(one["ceiling"]["seconds"] for one in found)
        shares = [one["share"] for one in found]
        cpu = statistics.median(sum(one["ours"]["cpu_s"].values()) for one in found) / rows * 1e6
        idle = min(one["idle_share"] for one in found)
        summary[name] = {
            "rows_per_s": rows / seconds,
            "mb_per_s": rows * VALUE_BYTES / seconds / 1e6,
            "ceiling_rows_per_s": rows / ceiling,
            "share": statistics.median(shares),
            "daemon_cpu_us": cpu,
            "idle_share": idle,
        }
        table.add_row(
            name,
            f"{rows / seconds:,.0f}",
            f"{rows * VALUE_BYTES / seconds / 1e6:,.0f}",
            f"{rows / ceiling:,.0f}",
            f"{statistics.median(shares):.2f} ({min(shares):.2f}..{max(shares):.2f})",
            f"{cpu:.2f}",
            f"{idle:.2f}",
        )
    screen.print(table)
    return summary
