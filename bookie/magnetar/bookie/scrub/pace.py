"""The rate of the scrub: fast enough to verify everything in time, bounded, and zero while the bookie is busy.

The target is what is stored divided by 80% of the interval, at least 1 MiB/s, at most `scrub_bytes_per_s`. While the bookie
is busy the scrub waits, unless something was not verified for 90% of the interval: then it goes on at the bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_SHARE_OF_INTERVAL = 0.8
_BEHIND = 0.9
_FLOOR_BYTES_PER_S = 1 << 20
_BUSY_POLL_S = 0.1
# Shorter sleeps cost more than they spread.
_LEAST_SLEEP_S = 0.005


class Pace:
    """The rate limit of the scrub, which calls `spend` after each slice. `busy` is polled."""

    def __init__(self, interval_s: float, bytes_per_s: int, busy: Callable[[], bool]) -> None:
        self._interval_s = interval_s
        self._bound = float(bytes_per_s)
        self._busy = busy
        self._ahead_until = 0.0
        # Loop time from which on some file is verified too late unless the scrub runs at its full rate.
        self._behind_at = float("inf")
        self._needed: float = _FLOOR_BYTES_PER_S
        # Time spent waiting for a bookie that was busy.
        self.paused_s = 0.0

    def aim(self, total_bytes: int, oldest_age_s: float) -> None:
        """What is stored now, and how long ago the oldest of it was verified."""
        now = asyncio.get_running_loop().time()
        self._needed = max(total_bytes / (self._interval_s * _SHARE_OF_INTERVAL), _FLOOR_BYTES_PER_S)
        self._behind_at = now + _BEHIND * self._interval_s - oldest_age_s

    @property
    def behind(self) -> bool:
        """Whether the scrub is behind schedule: then neither the target rate nor a busy bookie slows it down."""
        return asyncio.get_running_loop().time() >= self._behind_at

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self._bound if self.behind else min(self._needed, self._bound)

    async def spend(self, size: int) -> None:
        """`size` bytes were verified: waits until the next ones may be. Gives the loop a turn in any case."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._ahead_until = max(self._ahead_until, now) + size / self.rate
        if self._ahead_until - now > _LEAST_SLEEP_S:
            await asyncio.sleep(self._ahead_until - now)
        else:
            await asyncio.sleep(0)
        while self._busy() and not self.behind:
            self.paused_s += _BUSY_POLL_S
            await asyncio.sleep(_BUSY_POLL_S)
