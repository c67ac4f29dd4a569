"""The cluster of `cluster`, whose programs speak two protocols: native ones and Pulsar's share topics and subscriptions.

See sim.pulsar. Everything that happens to brokers, bookies and ways between them is that of `cluster`.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import magnetar.broker.listeners.pulsar.protocol  # noqa: F401  # which no run is to import
from magnetar.broker.listeners.pulsar import connection
from sim.cluster import brokers
from sim.cluster.metadata import ClusterMetadata
from sim.cluster.storm import Cluster
from sim.pulsar import PORT, CheckedConsumer, CheckedProducer, MixedLoad, Truth
from sim.scenarios import cluster
from support.sim import SimLoop, Trace

EXPECTED_FAULTS = cluster.EXPECTED_FAULTS


class KnownCluster(Cluster):
    """What its metadata service knows is looked up by the checks within brokers."""

    metadata: ClusterMetadata

    def __init__(self, loop: SimLoop, plan: object) -> None:
        super().__init__(loop, plan)  # type: ignore[arg-type]
        truth = Truth(self.metadata)
        CheckedConsumer.truth = CheckedProducer.truth = MixedLoad.truth = truth


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""
    return play_with(MixedLoad, seed, trace)


def play_with(load: type[MixedLoad], seed: int, trace: Trace) -> dict[str, int]:
    """The same with programs of another kind."""
    with ExitStack() as stack:
        for where, name, what in (
            (brokers, "PULSAR_PORT", PORT),
            (connection, "Consumer", CheckedConsumer),
            (connection, "Producer", CheckedProducer),
            (cluster, "Cluster", KnownCluster),
            (cluster, "TopicLoad", load),
        ):
            stack.enter_context(patch.object(where, name, what))
        return cluster.play(seed, trace)
