"""`make bench-bookie`: a bookie over TCP with fsync on, beside the raw disk of the same minute.

python -m bench bookie                  three interleaved rounds, medians
python -m bench bookie --quick          one short round
python -m bench bookie --only a,d       (a) adds  (b) reads  (c) replay  (d) p99 while flushing and compacting  (e) memory
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.bookie.goals import GOALS
from bench.bookie.report import figures, print_tables
from bench.bookie.run import ENTRY, WORKLOADS, Round
from bench.rounds import Report, run_rounds


def main(arguments: Sequence[str]) -> int:
    """Runs everything and returns 0."""
    report = Report(print_tables, GOALS, figures, {"entry_bytes_of_targets": ENTRY})
    return run_rounds("bookie", __doc__, WORKLOADS, arguments, Round, report)
