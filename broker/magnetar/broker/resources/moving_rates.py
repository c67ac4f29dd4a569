"""How fast counters rise, for people: over the last ten seconds or a little more, for whoever asks in between."""

from __future__ import annotations

WINDOW_S = 10.0


class MovingRates:
    """Of counters that are always given in the same order.

    >>> rates = MovingRates(2)
    >>> rates.look(0.0, (0, 0)), rates.look(10.0, (50, 7_000)), rates.look(15.0, (900, 9_000))
    (None, None, None)
    >>> rates.per_second
    (5.0, 700.0)
    """

    __slots__ = ("_at", "_before", "_quiet_s", "per_second")

    def __init__(self, counters: int) -> None:
        self.per_second: tuple[float, ...] = (0.0,) * counters
        self._quiet_s = 0.0  # for how long no counter had risen when it was looked last
        self._before: tuple[int, ...] = ()
        self._at = -WINDOW_S

    def quiet_s(self, counters: tuple[int, ...]) -> float:
        """For how long no counter had risen when it was looked last, nor has since."""
        return self._quiet_s if counters == self._before else 0.0

    def due(self, now: float) -> bool:
        """Whether `look` would do anything."""
        return now - self._at >= WINDOW_S

    def look(self, now: float, counters: tuple[int, ...]) -> None:
        """Called every few seconds; `now` in seconds of a clock that never goes back."""
        if not self.due(now):
            return
        passed = now - self._at
        if self._before:
            self.per_second = tuple(
                round((new - old) / passed, 3) for new, old in zip(counters, self._before, strict=True)
            )
        self._quiet_s = self._quiet_s + passed if counters == self._before else 0.0
        self._before, self._at = counters, now
