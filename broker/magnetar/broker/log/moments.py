"""When each of thousands does what all of them have to do, so that they do not do it at once."""

from __future__ import annotations

from zlib import crc32


def own_moment(name: str, spread_ms: int) -> float:
    """Seconds, less than the spread: of thousands of topics each has its own, and always the same.

    >>> 0 <= own_moment("persistent://public/default/orders", 30_000) < 30
    True
    """
    return crc32(name.encode()) % max(spread_ms, 1) / 1000
