"""`make bench-bookie`: a bookie over TCP with fsync on, beside the raw disk of the same minute.

python -m bench bookie                  three interleaved rounds, medians
python -m bench bookie --quick          one short round
python -m bench bookie --only a,d       (a) adds  (b) reads  (c) replay  (d) p99 while flushing and compacting  (e) memory
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.arguments import OUT, console, parse
from bench.bookie.report import print_report, write_json
from bench.bookie.run import WORKLOADS, Round, Sizes


def main(arguments: Sequence[str]) -> int:
    """Runs everything and returns 0; a missed target is no error of the program."""
    given = parse("python -m bench bookie", __doc__, WORKLOADS, arguments, rounds=3)
    screen = console()

    def say(text: str) -> None:
        screen.print(text)

    OUT.mkdir(exist_ok=True)
    rounds: list[Round] = []
    for number in range(given.rounds):
        say(f"round {number + 1}")
        scratch = OUT / f"scratch-{time.time_ns()}"
        found = Round(scratch, Sizes(given.quick), given.wanted, given.settle, say, number=number)
        found.run()
        rounds.append(found)
    summary = print_report(rounds, screen)
    path = given.json or OUT / time.strftime("bench-bookie-%Y%m%d-%H%M%S.json")
    write_json(path, rounds, summary)
    say(f"all figures: {path}")
    return 0
