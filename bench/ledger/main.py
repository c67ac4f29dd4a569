"""`make bench-ledger`: the ledger client against three bookie processes on loopback with fsync on.

python -m bench ledger                  three rounds, medians
python -m bench ledger --quick          one short round
python -m bench ledger --only a,b       (a) appends  (b) recovery  (c) reads  (d) tails
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.ledger.report import print_report, write_json
from bench.ledger.run import WORKLOADS, Round, Sizes

OUT = Path(__file__).parents[1] / "out"
WIDTH = 160  # of what goes into a file


def main(arguments: Sequence[str]) -> int:
    """Runs everything and returns 0; a missed target is no error of the program."""
    parser = argparse.ArgumentParser(
        prog="python -m bench ledger",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how many rounds (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one round with less of everything")
    parser.add_argument(
        "--only", default=",".join(WORKLOADS), metavar="a,b,...", help="some of the workloads"
    )
    parser.add_argument(
        "--settle",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long to wait for a quiet machine before each workload (default: 5)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where the figures go (default: bench/out/)"
    )
    given = parser.parse_args(arguments)
    wanted = [name.strip() for name in given.only.split(",")]
    if unknown := [name for name in wanted if name not in WORKLOADS or len(name) != 1]:
        parser.error(f"no such workload: {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)

    def say(text: str) -> None:
        console.print(text)

    OUT.mkdir(exist_ok=True)
    rounds: list[Round] = []
    for number in range(1 if given.quick else given.rounds):
        say(f"round {number + 1}")
        found = Round(OUT / f"scratch-{time.time_ns()}", Sizes(given.quick), wanted, given.settle, say)
        found.run()
        rounds.append(found)
    summary = print_report(rounds, console)
    path = given.json or OUT / time.strftime("bench-ledger-%Y%m%d-%H%M%S.json")
    write_json(path, rounds, summary)
    say(f"all figures: {path}")
    return 0
