"""The service of `standalone` with delayed messages: never early, and in the calm hardly late (sim.delayed)."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

from magnetar.broker.topics import delays
from sim import storm
from sim.delayed import Clocks, DelayedHistory, DelayedLoad
from sim.scenarios.standalone import EXPECTED_FAULTS, StandaloneBackend
from support.sim import SimClock, SimLoop, Trace

__all__ = ["EXPECTED_FAULTS", "play"]


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""

    def backend(loop: SimLoop) -> StandaloneBackend:
        clocks = DelayedHistory.clocks = Clocks(loop)
        patching.enter_context(patch.object(SimClock, "set_now_and_then", clocks.patch()))
        return StandaloneBackend(loop)

    with ExitStack() as patching:
        for where, name, value in (
            (storm, "History", DelayedHistory),
            (storm, "Load", DelayedLoad),
            (delays, "EVERY_ENTRIES", 6),  # so often that crashes come before, during and after them
            (delays, "INTERVAL_MS", 400),
        ):
            patching.enter_context(patch.object(where, name, value))
        return storm.play_storm(seed, trace, backend)
