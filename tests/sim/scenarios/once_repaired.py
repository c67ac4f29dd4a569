"""The cluster of `once` with five bookies, of which one or another is away for long, and processes that repair."""

from __future__ import annotations

from unittest.mock import patch

from sim.cluster.repairs import RepairedCluster
from sim.scenarios import cluster, once
from support.sim import Trace

EXPECTED_FAULTS = (*once.EXPECTED_FAULTS, "machine_away", "repair_kill", "replaced")


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""
    with patch.object(cluster, "Cluster", RepairedCluster):
        return once.play(seed, trace)
