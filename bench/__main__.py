"""`make bench`: workloads (a) to (h) against a real service on loopback with fsync on, beside what the machine can do.

python -m bench                  five interleaved rounds, medians; about five minutes on a quiet machine
python -m bench --quick          one short round
python -m bench --only a,d       some workloads
python -m bench bookie           the storage daemon alone (bench/bookie)
python -m bench ledger           the ledger client against three bookies (bench/ledger)
python -m bench spark            the data pipeline on Spark (bench/spark)
python -m bench admin            the administration of many namespaces and topics over HTTP (bench/admin.py)
python -m bench chunks           a message of 1 GB: the peak memory of each process on its way (bench/chunks.py)
python -m bench delays           delayed messages, in memory: 200,000 a second, a million over a year (bench/delays.py)
python -m bench dispatch         the broker's dispatch with many subscriptions and consumers, in memory (bench/dispatch.py)
python -m bench slow_disk        the turns of a service's loop on a slow disk (bench/slow_disk.py)
python -m bench failover         brokers that are killed, stopped and drained: how long topics wait (bench/failover.py)
python -m bench instructions     instructions of the service for a message beside another revision (bench/instructions.py)
python -m bench many_partitions  thousands of partitions, and of producers on one topic (bench/many_partitions.py)
python -m bench partitions       a topic of several partitions beside one that has none (bench/partitions.py)
python -m bench pulsar FOLDER    Pulsar's own pulsar-perf, beside a real Pulsar: `make bench-pulsar` (bench/pulsar.py)
python -m bench replicated       three bookies, one broker and three: rates, CPU a message by role (bench/replicated.py)
python -m bench startup          CPU and memory of a start beside another revision (bench/startup.py)
python -m bench subscriptions    consumers of every type, fail-over, many topics (bench/subscriptions.py)
python -m bench compare          the working tree beside another revision (bench/compare)
"""

import importlib
import sys
import time
from collections.abc import Sequence

from bench.arguments import OUT, console, parse
from bench.report import print_report, write_json
from bench.run import Round, Sizes, check_wire

WORKLOADS = "abcdefghi"


def main() -> int:
    """Runs everything and returns 0; a figure below its floor is no error of the program."""
    given = parse("python -m bench", __doc__, WORKLOADS, sys.argv[1:], rounds=5)
    screen = console()

    def say(text: str) -> None:
        screen.print(text)

    OUT.mkdir(exist_ok=True)
    scratch = OUT / f"scratch-{time.time_ns()}"
    wire = check_wire(scratch) if "a" in given.wanted and given.limits else {}
    if wire:
        say(
            f"wire check: {wire['messages']} messages of (a) were {wire['batches']} batches in {wire['frames']} frames"
        )
    rounds: list[Round] = []
    for number in range(given.rounds):
        say(f"round {number + 1}")
        found = Round(scratch, Sizes(given.quick), given.wanted, given.settle, say, limits=given.limits)
        found.run()
        rounds.append(found)
    summary = print_report(rounds, screen)
    path = given.json or OUT / time.strftime("bench-%Y%m%d-%H%M%S.json")
    write_json(path, rounds, summary, wire)
    say(f"all figures: {path}")
    return 0


PACKAGES = ("bookie", "ledger", "spark", "compare")
MODULES = (
    "admin",
    "chunks",
    "delays",
    "dispatch",
    "failover",
    "instructions",
    "many_partitions",
    "partitions",
    "pulsar",
    "replicated",
    "slow_disk",
    "startup",
    "subscriptions",
)


def run_part(name: str, arguments: Sequence[str]) -> int:
    """Imports what this part needs and no other's: PySpark, or what an older revision of the product lacks."""
    part = importlib.import_module(f"bench.{name}.main" if name in PACKAGES else f"bench.{name}")
    code: int = part.main(arguments)
    return code


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in (*PACKAGES, *MODULES):
        sys.exit(run_part(sys.argv[1], sys.argv[2:]))
    sys.exit(main())
