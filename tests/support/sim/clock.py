"""The wall clock of a simulated machine: follows the virtual time of the loop, until somebody sets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.sim.loop import SimLoop
    from support.sim.process import SimProcess

EPOCH_MS = 1_700_000_000_000  # an ordinary day, so that times look like times
SET_EVERY_S = 2.0  # on average
# A time that is measured by the wall clock, as the retention of tombstones is, must be longer than twice this.
MOST_MS = 1_500_000


class SimClock:
    """Implements magnetar.runtime.clock.Clock. `skew_ms` gives a process a clock that is off."""

    def __init__(self, loop: SimLoop, *, skew_ms: int = 0) -> None:
        self._loop = loop
        self.skew_ms = skew_ms

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        return EPOCH_MS + self.skew_ms + int(self._loop.now * 1000)

    def set_now_and_then(self, process: SimProcess) -> None:
        """An operator or a time server sets it while the process lives: mostly by little, also back."""
        loop = self._loop
        if not process.alive:
            return
        self.skew_ms = int(loop.rng.choice((0, 0, 50, 3_000, MOST_MS)) * loop.rng.uniform(-1.0, 1.0))
        loop.trace.fault("clock_set", process.name, self.skew_ms)
        loop.call_outside(loop.rng.expovariate(1 / SET_EVERY_S), self.set_now_and_then, process)
