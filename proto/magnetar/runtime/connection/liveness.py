"""Keep-alive, sans I/O: called once per ping interval, says whether to ping and whether the peer is lost.

A peer is lost when nothing came for two intervals although it was pinged, or when one frame stays unfinished for two
intervals with less than MIN_PROGRESS_BYTES arriving in each (a slow loris that has connected properly).

While reading is paused (backpressure) nothing can be heard, so silence proves nothing; a ping goes out each interval
instead, for the peer would otherwise hear nothing of us either: its pings lie unread on our side.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

MIN_PROGRESS_BYTES = 16 * 1024


class Observed(NamedTuple):
    """Counters of the connection at one tick; `Liveness` compares two of these."""

    reads: int  # calls of data_received since the connection began
    runs: int  # runs since the connection began
    unfinished_bytes: int  # held for a frame that is not complete
    reading_paused: bool


class Verdict(enum.Enum):
    """The result of a tick. FINE: nothing is to be done; PING: send one; SILENT, STALLED: close, and say so."""

    FINE = "fine"
    PING = "ping"
    SILENT = "was silent"
    STALLED = "left a frame unfinished"


class Liveness:
    """State between ticks. `interval_s` is the ping interval."""

    def __init__(self, interval_s: float, now: float, observed: Observed) -> None:
        self.interval_s = interval_s
        self._last_tick = now
        self._last = observed
        self._silent_ticks = 0
        self._stalled_ticks = 0

    def tick(self, now: float, observed: Observed) -> Verdict:
        """`now` is loop time in seconds."""
        delayed = now - self._last_tick > self.interval_s * 1.5
        last, self._last, self._last_tick = self._last, observed, now
        if observed.reading_paused or last.reading_paused:
            self._silent_ticks = self._stalled_ticks = 0
            return Verdict.PING
        if observed.reads == last.reads:
            # This process was stopped or its loop stuck: what came meanwhile may not have been read yet.
            if not delayed:
                self._silent_ticks += 1
            return Verdict.SILENT if self._silent_ticks >= 2 else Verdict.PING
        self._silent_ticks = 0
        progress = observed.runs != last.runs or (
            observed.unfinished_bytes - last.unfinished_bytes >= MIN_PROGRESS_BYTES
        )
        if progress or delayed or not (observed.unfinished_bytes and last.unfinished_bytes):
            self._stalled_ticks = 0
            return Verdict.FINE
        self._stalled_ticks += 1
        return Verdict.STALLED if self._stalled_ticks >= 2 else Verdict.FINE
