"""The report of one simulated run, as one line of JSON from worker to runner; and the sum of all reports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from support.sim import Trace

Scenario = Callable[[int, Trace], dict[str, int]]
"""Plays a seed, records into the trace, returns what was counted (load and results); raises when something is wrong."""

SEEDS_FOR_FAULTS = 20  # from so many on, each expected fault must have fired


@dataclass
class Report:
    """The outcome of one seed."""

    seed: int
    error: str = ""  # empty: all invariants held
    trace_hash: str = ""
    events: int = 0
    seconds: float = 0.0  # real
    cpu_s: float = 0.0  # of the process that played it
    counts: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)

    def to_line(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Report:
        """Reads `to_line`."""
        return cls(**json.loads(line))


def replay_command(scenario: str, seed: int, defect: str = "") -> str:
    """What a person types to see it again."""
    planted = f" --defect {defect}" if defect else ""
    return f"PYTHONPATH=tests .venv/bin/python -m sim.runner {scenario}{planted} --seed {seed} --trace"


class Tally:
    """Sums over the seeds of a scenario. Its size does not grow with their number, only with that of failures."""

    def __init__(self, scenario: str) -> None:
        self.scenario = scenario
        self.seeds = 0
        self.runs = 0  # more than seeds when each is played twice
        self.events = 0
        self.cpu_s = 0.0
        self.slowest: tuple[float, int] = (0.0, 0)  # real seconds, seed
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.failures: dict[int, str] = {}  # seed -> what is wrong, with the command that replays it

    def add(self, reports: Sequence[Report]) -> str:
        """The runs of one seed. What is wrong with them, or nothing."""
        first = reports[0]
        self.seeds += 1
        self.runs += len(reports)
        self.events += first.events
        self.cpu_s += sum(report.cpu_s for report in reports)
        self.slowest = max(self.slowest, (max(report.seconds for report in reports), first.seed))
        self.counts.update(first.counts)
        self.faults.update(first.faults)
        failed = next((report for report in reports if report.error), None)
        if failed is not None:
            wrong = f"seed {first.seed} failed:\n{failed.error}"
        elif any(report.trace_hash != first.trace_hash for report in reports):
            hashes = " and ".join(f"{report.trace_hash} ({report.events} events)" for report in reports)
            wrong = f"seed {first.seed} is not deterministic: {hashes}"
        else:
            return ""
        self.failures[first.seed] = f"{wrong}\nreplay: {replay_command(self.scenario, first.seed)}"
        return self.failures[first.seed]

    def missing(self, expected: Sequence[str]) -> list[str]:
        """Faults of the scenario that never fired, as texts, when enough seeds were played to tell."""
        if self.seeds < SEEDS_FOR_FAULTS:
            return []
        return [f"the fault {name!r} never fired" for name in expected if not self.faults[name]]

    def text(self, seconds: float) -> str:
        """For people; `seconds` real ones since the beginning."""
        counts = "  ".join(f"{name}={number}" for name, number in sorted(self.counts.items()))
        faults = "  ".join(f"{name}={number}" for name, number in sorted(self.faults.items()))
        first = f"{self.scenario}: {self.seeds} seeds, {self.runs} runs in {seconds:.1f} s"
        longest, seed = self.slowest
        cost = (
            f"{self.cpu_s / max(self.runs, 1):.3f} s of CPU a run, the longest {longest:.1f} s (seed {seed})"
        )
        return f"{first}; {cost}\n  {counts}\n  faults: {faults}"

    def figures(self, seconds: float) -> dict[str, Any]:
        """For `--json`."""
        return {
            "scenario": self.scenario,
            "seeds": self.seeds,
            "runs": self.runs,
            "seconds": round(seconds, 1),
            "seeds_per_second": round(self.seeds / seconds, 3) if seconds else 0.0,
            "cpu_seconds": round(self.cpu_s, 1),
            "events": self.events,
            "slowest_seed": self.slowest[1],
            "slowest_seed_seconds": round(self.slowest[0], 2),
            "counts": dict(sorted(self.counts.items())),
            "faults": dict(sorted(self.faults.items())),
            "failures": {str(seed): text for seed, text in sorted(self.failures.items())},
        }
