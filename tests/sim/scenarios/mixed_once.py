"""The cluster of `mixed`, whose topics have deduplication: each message is stored once (sim.once), whoever sent it.

Go's batches are not among them: they say which their first message is and not how many there are, so whoever goes on behind
the last sequence id of one sends the others again, with Pulsar as well.
"""

from __future__ import annotations

from unittest.mock import patch

from magnetar.broker.topics import log_state
from sim.cluster import brokers
from sim.once import OnceHistory, deduplicated
from sim.pulsar import MixedLoad
from sim.scenarios import cluster, mixed, once
from support.sim import Trace

EXPECTED_FAULTS = (*once.EXPECTED_FAULTS,)


class TopicLoad(MixedLoad, once.TopicLoad):
    """Of one topic of the cluster, with messages in chunks among the others."""

    sequence_ids = ("first and last", "last")
    tail_of_pulsar = 0.0  # Pulsar's readers may miss a message in chunks when they come back


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""
    with (
        patch.object(log_state, "_MIN_CHANGED_BYTES", 200),
        patch.object(brokers, "BROKER", deduplicated(brokers.BROKER)),
        patch.object(cluster, "History", OnceHistory),
    ):
        return mixed.play_with(TopicLoad, seed, trace)
