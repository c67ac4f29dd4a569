"""The timer of `core.outstanding_adds`, and the end of the adds: what the shells of every transport share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .core.outstanding_adds import TICKS_PER_TIMEOUT, OutstandingAdds


class AddClock:
    """Calls `tick` from `start` on, `TICKS_PER_TIMEOUT` times in an add timeout, until it returns False."""

    __slots__ = ("_adds", "_interval_s", "_loop", "_tick", "_timer", "running")

    def __init__(self, adds: OutstandingAdds, add_timeout_s: float, tick: Callable[[], bool]) -> None:
        self.running = False
        self._adds = adds
        self._interval_s = add_timeout_s / TICKS_PER_TIMEOUT
        self._loop = asyncio.get_running_loop()
        self._tick = tick
        self._timer: asyncio.TimerHandle | None = None  # while `running`

    def start(self) -> None:
        """Only while it is not running."""
        self.running = True
        self._timer = self._loop.call_later(self._interval_s, self._fired)

    def end(self, bookie: str, code: int) -> None:
        """Stops, and fails all adds with `code`. An error in one callback does not stop the others."""
        self._stop()
        for ledger_id, entry_id, done in self._adds.fail():
            try:
                done(bookie, ledger_id, entry_id, code)
            except Exception as error:
                message = f"the callback of an add to bookie {bookie} failed"
                self._loop.call_exception_handler({"message": message, "exception": error})

    def _stop(self) -> None:
        self.running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fired(self) -> None:
        if self._tick() and self.running:
            self.start()
        else:
            self._stop()
