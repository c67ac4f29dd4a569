"""Planted defects: mistakes that others made in this protocol (CORRECTNESS.md), each a patch of the real code.

Nothing of this is in the shipped package. `plant(name)` changes classes of the running process; the runner does it in the
process that plays the one seed (`python -m sim.runner ledgers --defect NAME`).

A plant must be the mistake itself: one that breaks by its own fault (a signature that has changed) would be "caught" by
every seed. Classes with slots and private names are patched, so they are `Any`.
"""

from sim.defects import (  # noqa: F401  # each fills the table
    bookie,
    client,
    cluster,
    consuming,
    deduplication,
    delayed,
    exclusive,
    policies,
    pulsar,
    recovery,
    repair,
    terminated,
    writer,
)
from sim.defects.registry import (
    CLUSTER_DEFECTS,
    DEFECTS,
    EXCLUSIVE_DEFECTS,
    ONCE_DEFECTS,
    REPAIR_DEFECTS,
    STANDALONE_DEFECTS,
    defects_of,
    plant,
)

__all__ = [
    "CLUSTER_DEFECTS",
    "DEFECTS",
    "EXCLUSIVE_DEFECTS",
    "ONCE_DEFECTS",
    "REPAIR_DEFECTS",
    "STANDALONE_DEFECTS",
    "defects_of",
    "plant",
]
