"""The cluster of `cluster`, whose topics have deduplication: each message is stored once (sim.once)."""

from __future__ import annotations

from unittest.mock import patch

from magnetar.broker.topics import log_state
from sim.cluster import brokers
from sim.once import OnceHistory, OnceLoad, deduplicated
from sim.scenarios import cluster
from support.sim import Trace

EXPECTED_FAULTS = (*cluster.EXPECTED_FAULTS, "program_ended", "duplicate")


class TopicLoad(OnceLoad, cluster.TopicLoad):
    """Of one topic of the cluster, with messages in chunks among the others."""

    paddings = (0, 10, 300, 9_000)


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""
    with (
        patch.object(
            log_state, "_MIN_CHANGED_BYTES", 200
        ),  # so that all is written anew beside a ledger with room
        patch.object(brokers, "BROKER", deduplicated(brokers.BROKER)),
        patch.object(cluster, "History", OnceHistory),
        patch.object(cluster, "TopicLoad", TopicLoad),
    ):
        return cluster.play(seed, trace)
