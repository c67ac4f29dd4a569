"""`make bench-ledger`: the ledger client against three bookie processes on loopback with fsync on.

python -m bench ledger                  three rounds, medians
python -m bench ledger --quick          one short round
python -m bench ledger --only a,b       (a) appends  (b) recovery  (c) reads  (d) tails
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.arguments import OUT, console, parse
from bench.ledger.report import print_report, write_json
from bench.ledger.run import WORKLOADS, Round, Sizes


def main(arguments: Sequence[str]) -> int:
    """Runs everything and returns 0; a missed target is no error of the program."""
    given = parse("python -m bench ledger", __doc__, WORKLOADS, arguments, rounds=3)
    screen = console()

    def say(text: str) -> None:
        screen.print(text)

    OUT.mkdir(exist_ok=True)
    rounds: list[Round] = []
    for number in range(given.rounds):
        say(f"round {number + 1}")
        found = Round(OUT / f"scratch-{time.time_ns()}", Sizes(given.quick), given.wanted, given.settle, say)
        found.run()
        rounds.append(found)
    summary = print_report(rounds, screen)
    path = given.json or OUT / time.strftime("bench-ledger-%Y%m%d-%H%M%S.json")
    write_json(path, rounds, summary)
    say(f"all figures: {path}")
    return 0
