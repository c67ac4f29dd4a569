"""The cluster of `once`, a part of whose messages has a delivery time: stored once, and by no clock of a broker early."""

from __future__ import annotations

from unittest.mock import patch

from sim.cluster.storm import Cluster, Plan
from sim.delayed import Clocks, DelayedHistory, DueLoad, noted_clocks
from sim.once import OnceHistory
from sim.scenarios import cluster, once
from support.sim import SimLoop, Trace

EXPECTED_FAULTS = once.EXPECTED_FAULTS


class OnceDelayedHistory(OnceHistory, DelayedHistory):
    """The rules of both."""


class TopicLoad(once.TopicLoad, DueLoad):
    """Of one topic of the cluster."""

    history: OnceDelayedHistory


class DelayedCluster(Cluster):
    """Whose brokers' clocks are noted."""

    def __init__(self, loop: SimLoop, plan: Plan) -> None:
        DelayedHistory.clocks = Clocks(loop, "k")
        super().__init__(loop, plan)


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""
    with (
        noted_clocks(),
        patch.object(cluster, "Cluster", DelayedCluster),
        patch.object(once, "OnceHistory", OnceDelayedHistory),
        patch.object(once, "TopicLoad", TopicLoad),
    ):
        return once.play(seed, trace)
