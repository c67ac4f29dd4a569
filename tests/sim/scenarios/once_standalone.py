"""The service of `standalone`, whose topics have deduplication: each message is stored once (sim.once)."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

from magnetar.broker.topics import log_state
from sim import storm
from sim.once import OnceHistory, OnceLoad, deduplicated
from sim.scenarios.standalone import EXPECTED_FAULTS as FAULTS
from sim.scenarios.standalone import SETTINGS, StandaloneBackend
from support.sim import Trace

EXPECTED_FAULTS = (*FAULTS, "program_ended", "duplicate")
DEDUPLICATED = replace(SETTINGS, broker=deduplicated(SETTINGS.broker))


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""
    with (
        patch.object(log_state, "_MIN_CHANGED_BYTES", 200),  # see once
        patch.object(storm, "History", OnceHistory),
        patch.object(storm, "Load", OnceLoad),
    ):
        return storm.play_storm(seed, trace, lambda loop: StandaloneBackend(loop, DEDUPLICATED))
