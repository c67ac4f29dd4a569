"""The cluster of `once`, whose topics get policies and lose them: publish rates, retention, deduplication (sim.policies)."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

from sim.cluster import brokers, storm
from sim.policies import SET, PolicyLoad, WatchedMetadata, noted_holds
from sim.scenarios import once
from support.sim import Trace

EXPECTED_FAULTS = (
    *once.EXPECTED_FAULTS,
    *(f"{name}_{how}" for name in SET for how in ("set", "removed")),
    "trimmed",
    "held",
)


class TopicLoad(PolicyLoad, once.TopicLoad):
    """Of one topic of the cluster."""


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner. Nobody has leases here: else nothing is trimmed for 15 minutes after each take-over."""
    with (
        noted_holds(trace),
        patch.object(
            brokers, "BROKER", replace(brokers.BROKER, max_lease_ms=300, maintenance_interval_s=0.5)
        ),
        patch.object(storm, "ClusterMetadata", WatchedMetadata),
        patch.object(once, "TopicLoad", TopicLoad),
    ):
        return once.play(seed, trace)
