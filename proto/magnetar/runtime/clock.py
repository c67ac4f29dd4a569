"""The wall clock as a seam: publish times, retention and ages come from here, never from `time` directly.

Durations and deadlines do not: they come from `loop.time()`, which cannot jump.
"""

from __future__ import annotations

import time
from typing import Protocol

# Linux has a clock that counts suspended time as well.
_SLEEPLESS = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """Wall-clock time. May jump either way; the simulation's follows its virtual time."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch, UTC."""


class SystemClock:
    """The clock of this machine."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch, UTC."""
        return time.time_ns() // 1_000_000


def elapsed_s() -> float:
    """Seconds since some moment in the past, which never jump and go on while the machine sleeps.

    For a promise to another machine, whose time went on meanwhile: `loop.time()` stands still then, and within one turn.
    """
    return time.clock_gettime(_SLEEPLESS)
