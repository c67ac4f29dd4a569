"""`make bench`: workloads (a) to (h) against a real service on loopback with fsync on, beside what the machine can do.

python -m bench                  five interleaved rounds, medians; about five minutes on a quiet machine
python -m bench --quick          one short round
python -m bench --only a,d       some workloads
python -m bench bookie           the storage daemon alone (bench/bookie)
python -m bench ledger           the ledger client against three bookies (bench/ledger)
"""

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console

from bench.bookie.main import main as bench_bookie
from bench.ledger.main import main as bench_ledger
from bench.report import print_report, write_json
from bench.run import Round, Sizes, check_wire

OUT = Path(__file__).parent / "out"
WORKLOADS = "abcdefgh"
WIDTH = 160  # of what goes into a file


def main() -> int:
    """Runs everything and returns 0; a figure below its floor is no error of the program."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how many rounds (default: 5)")
    parser.add_argument("--quick", action="store_true", help="one round with a quarter of the messages")
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
    arguments = parser.parse_args()
    wanted = [name.strip() for name in arguments.only.split(",")]
    if unknown := [name for name in wanted if name not in WORKLOADS or len(name) != 1]:
        parser.error(f"no such workload: {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)

    def say(text: str) -> None:
        console.print(text)

    OUT.mkdir(exist_ok=True)
    scratch = OUT / f"scratch-{time.time_ns()}"
    wire = check_wire(scratch) if "a" in wanted else {}
    if wire:
        say(
            f"wire check: {wire['messages']} messages of (a) were {wire['batches']} batches in {wire['frames']} frames"
        )
    rounds: list[Round] = []
    for number in range(1 if arguments.quick else arguments.rounds):
        say(f"round {number + 1}")
        found = Round(scratch, Sizes(arguments.quick), wanted, arguments.settle, say)
        found.run()
        rounds.append(found)
    summary = print_report(rounds, console)
    path = arguments.json or OUT / time.strftime("bench-%Y%m%d-%H%M%S.json")
    write_json(path, rounds, summary, wire)
    say(f"all figures: {path}")
    return 0


_PARTS = {"bookie": bench_bookie, "ledger": bench_ledger}

if __name__ == "__main__":
    part = _PARTS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    sys.exit(main() if part is None else part(sys.argv[2:]))
