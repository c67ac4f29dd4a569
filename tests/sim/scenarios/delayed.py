"""The service of `standalone` with delayed messages: never early, and in the calm hardly late (sim.delayed)."""

from __future__ import annotations

from unittest.mock import patch

from sim import storm
from sim.delayed import Clocks, DelayedHistory, DelayedLoad, noted_clocks
from sim.scenarios.standalone import EXPECTED_FAULTS, StandaloneBackend
from support.sim import SimLoop, Trace

__all__ = ["EXPECTED_FAULTS", "play"]


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""

    def backend(loop: SimLoop) -> StandaloneBackend:
        DelayedHistory.clocks = Clocks(loop, "daemon")
        return StandaloneBackend(loop)

    with (
        noted_clocks(),
        patch.object(storm, "History", DelayedHistory),
        patch.object(storm, "Load", DelayedLoad),
    ):
        return storm.play_storm(seed, trace, backend)
