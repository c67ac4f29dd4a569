"""Swarm testing: what a seed makes of a run. Each kind of fault is there or not, and has a rate of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from sim.ledgers.metadata import Chances

QUORUMS = (
    (1, 1, 1),
    (2, 2, 2),
    (3, 2, 2),
    (3, 2, 2),
    (3, 3, 2),
    (3, 3, 2),
    (3, 2, 1),
    (3, 3, 3),
    (2, 2, 1),
    (4, 3, 2),
)
MAX_MACHINES = 5
FAULTS = (
    "crash_process",
    "crash_power",
    "crash_at_call",
    "outage",
    "pause_bookie",
    "pause_client",
    "one_way",
    "cut",
    "partition",
    "no_space",
    "disk_error",
    "bit_flip",
    "slow_disk",
    "session",
)
ENDS = ("close", "crash", "pause", "isolate", "takeover", "detach", "gap", "gap")


@dataclass(frozen=True)
class Plan:
    """Seconds are virtual."""

    quorums: tuple[int, int, int]  # E, Qw, Qa
    machines: int
    victims: int  # machines whose logs may be damaged; at most Qa - 1
    faults: tuple[str, ...]
    weights: tuple[float, ...]
    mean_gap_s: float  # between faults
    storm_s: float
    chains: int  # writers with their successors
    ends: tuple[str, ...]  # how writers end, with repetitions
    turn_s: tuple[float, float]  # how long a writer writes
    mean_burst_gap_s: float
    explicit_lac_s: float
    latency_s: tuple[float, float]
    late_packets: tuple[float, float]
    chances: Chances = field(default_factory=Chances)


def draw(rng: random.Random) -> Plan:
    """The plan of a seed."""
    quorums = rng.choice(QUORUMS)
    machines = min(MAX_MACHINES, max(3, quorums[0] + rng.choice((0, 1, 1, 2))))
    victims = max(0, min(quorums[2] - 1, machines - quorums[0])) if rng.random() < 0.6 else 0
    faults = tuple(name for name in FAULTS if rng.random() < 0.55) or ("crash_power",)
    chances = Chances(
        lost_request=rng.choice((0.0, 0.01, 0.04)),
        lost_answer=rng.choice((0.0, 0.02, 0.06)),
        slow=rng.choice((0.0, 0.1)),
    )
    return Plan(
        quorums,
        machines,
        victims,
        faults,
        tuple(rng.uniform(0.3, 3.0) for _ in faults),
        mean_gap_s=rng.choice((0.1, 0.2, 0.4, 0.8)),
        storm_s=rng.uniform(3.0, 6.0),
        chains=rng.choice((1, 2)),
        ends=tuple(rng.choice(ENDS) for _ in range(4)),
        turn_s=rng.choice(((0.05, 0.4), (0.2, 1.2), (0.5, 2.5))),
        mean_burst_gap_s=rng.choice((0.01, 0.03, 0.08)),
        explicit_lac_s=rng.choice((0.03, 0.1, 0.3)),
        latency_s=rng.choice(((30e-6, 400e-6), (100e-6, 3e-3), (1e-3, 20e-3))),
        late_packets=rng.choice(((0.0, 0.02), (0.01, 0.02), (0.05, 0.1))),
        chances=chances,
    )
