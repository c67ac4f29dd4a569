"""The wall clock of the simulation: follows the virtual time of the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.sim.loop import SimLoop

EPOCH_MS = 1_700_000_000_000  # an ordinary day, so that times look like times


class SimClock:
    """Implements magnetar.runtime.clock.Clock. `skew_ms` lets a test give a process a clock that is off."""

    def __init__(self, loop: SimLoop, *, skew_ms: int = 0) -> None:
        self._loop = loop
        self.skew_ms = skew_ms

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        return EPOCH_MS + self.skew_ms + int(self._loop.now * 1000)
