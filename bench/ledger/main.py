"""`make bench-ledger`: the ledger client against three bookie processes on loopback with fsync on.

python -m bench ledger                  three rounds, medians
python -m bench ledger --quick          one short round
python -m bench ledger --only a,b       (a) appends  (b) recovery  (c) reads  (d) tails
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.ledger.goals import GOALS
from bench.ledger.report import figures, print_tables
from bench.ledger.run import WORKLOADS, Round
from bench.rounds import Report, run_rounds


def main(arguments: Sequence[str]) -> int:
    """Runs everything and returns 0."""
    report = Report(print_tables, GOALS, figures)
    return run_rounds("ledger", __doc__, WORKLOADS, arguments, Round, report)
