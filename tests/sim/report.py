"""What one simulated run tells, as one line of JSON between the worker and the runner."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from support.sim import Trace

Scenario = Callable[[int, Trace], dict[str, int]]
"""Plays a seed, records into the trace, returns what was counted (load and results); raises when something is wrong."""


@dataclass
class Report:
    """The outcome of one seed."""

    seed: int
    error: str = ""  # empty: all invariants held
    trace_hash: str = ""
    events: int = 0
    seconds: float = 0.0  # real
    counts: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)

    def to_line(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Report:
        """Reads `to_line`."""
        return cls(**json.loads(line))
