"""When a disk will be full, by how its free space fell within the last hour.

>>> forecast = DiskForecast()
>>> for minute in range(11):
...     forecast.seen("/data", 60.0 * minute, 11_000_000 - 100_000 * minute)
>>> round(forecast.full_in_s("/data", limit=1_000_000))  # 9,000,000 bytes at 100,000 a minute
5400
"""

from __future__ import annotations

from collections import deque

_EVERY_S = 60.0
_MOST = 60  # looks that are kept, of each directory
_LEAST_S = 600.0  # watched for less, nothing is said


class DiskForecast:
    """Of all directories of a bookie, by path."""

    def __init__(self) -> None:
        self._looks: dict[str, deque[tuple[float, int]]] = {}

    def seen(self, path: str, now: float, free_bytes: int) -> None:
        """Called as often as one likes; `now` in seconds of a clock that never goes back."""
        looks = self._looks.setdefault(path, deque(maxlen=_MOST))
        if not looks or now - looks[-1][0] >= _EVERY_S:
            looks.append((now, free_bytes))

    def full_in_s(self, path: str, limit: int) -> float | None:
        """Seconds from the last look until `limit` bytes are free. None: not known, or it does not fill up."""
        looks = self._looks.get(path)
        if not looks or (passed := looks[-1][0] - looks[0][0]) < _LEAST_S:
            return None
        pace = (looks[0][1] - looks[-1][1]) / passed
        return max(looks[-1][1] - limit, 0) / pace if pace > 0 else None
