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
    (4, 2, 2),
)
MAX_MACHINES = 6
LONGEST_STALE_S = 4.0
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
    "emptied",
    "swapped",
    "restored",
)
ENDS = ("close", "crash", "pause", "isolate", "takeover", "detach", "gap", "gap")


@dataclass(frozen=True)
class Storage:
    """How one bookie keeps its data."""

    group_wait_ms: float = 0.0  # how long its journals wait for company
    journals: int = 1
    ledger_directories: int = 1
    processes: bool = (
        False  # the disk worker and the journal writers work beside it, not in one step of its loop
    )
    scrub_s: float = 0.0  # everything is verified at this interval; 0: never
    tombstone_s: float = 3600.0  # how long a deleted ledger is remembered


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
    storage: tuple[Storage, ...]  # of each machine
    squeeze: float  # chance of a writer that two of its bookies fail it at once
    targeted: float  # chance of a recoverer to get a targeted fault
    close_after_failure: (
        float  # chance that an owner whose append failed closes the ledger; else it just ends
    )
    delete: float  # chance of a ledger to be deleted right after its end
    stale_s: float  # how long a writer lives on, at most, when its ledger was taken over
    latency_s: tuple[float, float]
    late_packets: tuple[float, float]
    chances: Chances = field(default_factory=Chances)


def draw(rng: random.Random) -> Plan:
    """The plan of a seed."""
    quorums = rng.choice(QUORUMS)
    machines = min(MAX_MACHINES, max(3, quorums[0] + rng.choice((0, 1, 2, 2, 3))))
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
        chains=rng.choice((1, 2, 3)),
        ends=tuple(rng.choice(ENDS) for _ in range(4)),
        turn_s=rng.choice(((0.05, 0.4), (0.1, 0.7), (0.3, 2.0))),
        mean_burst_gap_s=rng.choice((0.01, 0.03, 0.08)),
        explicit_lac_s=rng.choice((0.03, 0.1, 0.3)),
        storage=_storage(rng, machines),
        squeeze=rng.choice((0.1, 0.6, 1.0)),
        targeted=rng.choice((0.2, 0.6, 1.0)),
        close_after_failure=rng.choice((0.0, 0.5, 1.0)),
        delete=rng.choice((0.1, 0.2, 0.6)),
        stale_s=rng.choice((1.5, 1.5, LONGEST_STALE_S)),
        latency_s=rng.choice(((30e-6, 400e-6), (100e-6, 3e-3), (1e-3, 20e-3))),
        late_packets=rng.choice(((0.0, 0.02), (0.01, 0.02), (0.05, 0.1))),
        chances=chances,
    )


def _storage(rng: random.Random, machines: int) -> tuple[Storage, ...]:
    waits = (0.0,) if rng.random() < 0.5 else (0.0, 3.0, 12.0, 40.0)
    return tuple(
        Storage(
            group_wait_ms=rng.choice(waits),
            journals=rng.choice((1, 1, 2)),
            ledger_directories=rng.choice((1, 1, 2)),
            processes=rng.random() < 0.5,
            scrub_s=rng.choice((0.0, 0.0, 1.0)),
            tombstone_s=rng.choice((3600.0, LONGEST_STALE_S + 4.0)),
        )
        for _ in range(machines)
    )
