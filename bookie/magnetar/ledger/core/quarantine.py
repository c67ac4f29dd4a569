"""Bookies that failed often are left out of placement for a while.

    (well) ──`errors` failures within `window_s`──> quarantined ──after `duration_s`──> (well, nothing held against it)

A connection that breaks fails every add on it at once: failures of one second are one. Out of placement means new ledgers
and replacements; such a bookie is still read from, and written to where it is in an ensemble.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

_ONE_FAILURE_S = 1.0


class Quarantine:
    """Times in seconds of one monotonic clock. `errors` 0: never."""

    def __init__(self, errors: int, window_s: float, duration_s: float) -> None:
        self._errors = errors
        self._window_s = window_s
        self._duration_s = duration_s
        self._failures: dict[str, deque[float]] = {}  # of the last window, oldest first, at most `errors`
        self._until: dict[str, float] = {}  # bookies out of placement, in the order in which it ends

    def failed(self, bookie: str, now: float) -> bool:
        """Counts a failure; True if the bookie is quarantined from now on."""
        self._expire(now)
        if not self._errors or bookie in self._until:
            return False
        failures = self._failures.setdefault(bookie, deque(maxlen=self._errors))
        if failures and now - failures[-1] < _ONE_FAILURE_S:
            return False
        failures.append(now)
        if len(failures) < self._errors or now - failures[0] > self._window_s:
            return False
        del self._failures[bookie]
        self._until[bookie] = now + self._duration_s
        return True

    def quarantined(self, now: float) -> dict[str, float]:
        """Bookies that are out of placement, and until when; the first to come back first."""
        self._expire(now)
        return dict(self._until)

    def count(self, now: float) -> int:
        """How many are out of placement; changes nothing."""
        return sum(1 for until in list(self._until.values()) if until > now)

    def offers(self, writable: Sequence[str], now: float) -> Iterator[tuple[str, ...]]:
        """What placement may choose from: the healthy bookies; if these are too few, one quarantined bookie more at a time.

        So a quarantine never leaves a ledger without an ensemble that there is.
        """
        self._expire(now)
        out = [bookie for bookie in self._until if bookie in writable]
        for readmitted in range(len(out) + 1):
            missing = dict.fromkeys(out[readmitted:])
            yield tuple(bookie for bookie in writable if bookie not in missing)

    def _expire(self, now: float) -> None:
        for bookie in [bookie for bookie, until in self._until.items() if until <= now]:
            del self._until[bookie]
        for bookie in [b for b, failures in self._failures.items() if now - failures[-1] > self._window_s]:
            del self._failures[bookie]

    def check(self) -> None:
        """Asserts the invariants."""
        assert list(self._until.values()) == sorted(self._until.values())
        assert not any(bookie in self._until for bookie in self._failures)
        assert all(0 < len(failures) <= self._errors for failures in self._failures.values())
