"""The cluster of `ledgers` with writers that defer the sync, most of them: what was forced is never lost.

After a force the power may fail everywhere at once. What was only accepted may be lost or may survive, but all clients see
the same.
"""

from __future__ import annotations

from unittest.mock import patch

from sim.ledgers.cluster import Cluster
from sim.ledgers.deferred import DeferredWriter
from sim.scenarios import ledgers
from support.sim import Trace

EXPECTED_FAULTS = (*ledgers.EXPECTED_FAULTS, "outage_after_force")


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""
    with patch.object(Cluster, "writers", DeferredWriter):
        return ledgers.play(seed, trace)
