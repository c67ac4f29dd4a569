"""The wall clock as a seam: publish times, retention and ages come from here, never from `time` directly.

Durations and deadlines do not: they come from `loop.time()`, which cannot jump.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Wall-clock time. May jump either way; the simulation's follows its virtual time."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch, UTC."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch, UTC."""
        return time.time_ns() // 1_000_000
