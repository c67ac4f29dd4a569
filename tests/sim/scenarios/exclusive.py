"""The cluster of `cluster`, whose topics have exclusive producers that take them from each other (sim.exclusive)."""

from __future__ import annotations

from unittest.mock import patch

from sim.exclusive import ExclusiveHistory, ExclusiveLoad
from sim.scenarios import cluster
from support.sim import Trace

EXPECTED_FAULTS = (*cluster.EXPECTED_FAULTS, "fenced", "refused_as_others_are_there", "gave_up_waiting")


class TopicLoad(ExclusiveLoad, cluster.TopicLoad):
    """Of one topic of the cluster."""


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""
    with (
        patch.object(cluster, "History", ExclusiveHistory),
        patch.object(cluster, "TopicLoad", TopicLoad),
    ):
        return cluster.play(seed, trace)
