"""A planted defect: the standalone service with a journal that acknowledges before it syncs. It must be caught."""

from __future__ import annotations

import dataclasses

from sim.scenarios.standalone import SETTINGS, StandaloneBackend
from sim.storm import play_storm
from support.sim import Trace

EXPECTED_FAULTS = ()
UNSYNCED = dataclasses.replace(SETTINGS, bookie=dataclasses.replace(SETTINGS.bookie, journal_sync_data=False))


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""
    return play_storm(seed, trace, lambda loop: StandaloneBackend(loop, UNSYNCED))
