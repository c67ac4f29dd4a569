"""The control run of `once`: the same storm and programs without deduplication.

That messages are stored twice is no failure here: `seeds_with_duplicates` counts the seeds that show it.
"""

from __future__ import annotations

from unittest.mock import patch

from sim.once import ControlHistory, ControlLoad
from sim.scenarios import cluster, once
from support.sim import Trace

EXPECTED_FAULTS = (*cluster.EXPECTED_FAULTS, "program_ended")


class TopicLoad(ControlLoad, once.TopicLoad):
    """Of one topic of the cluster."""


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""
    with patch.object(cluster, "History", ControlHistory), patch.object(cluster, "TopicLoad", TopicLoad):
        counts = cluster.play(seed, trace)
    return {**counts, "seeds_with_duplicates": int(counts["duplicates"] > 0)}
