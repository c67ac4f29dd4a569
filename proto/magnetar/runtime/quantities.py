"""Sizes and durations as people write them in settings.

>>> parse_size("64MB"), parse_size("1.5 GiB"), parse_size("512")
(64000000, 1610612736, 512)
>>> parse_duration_s("250ms"), parse_duration_s("1h 30m"), parse_duration_s("10")
(0.25, 5400.0, 10.0)
"""

from __future__ import annotations

import re

__all__ = ["format_size", "parse_duration_s", "parse_size"]

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "k": 1024,
    "m": 1024**2,
    "g": 1024**3,
    "t": 1024**4,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
}
_DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)\s*")


def parse_size(text: str) -> int:
    """Bytes. "64MB" is decimal, "64MiB" and "64M" are binary. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError(f"not a size: {text!r}")
    return (
        int(float(match[1]) * _SIZE_UNITS[match[2]])
        if "." in match[1]
        else int(match[1]) * _SIZE_UNITS[match[2]]
    )


def parse_duration_s(text: str) -> float:
    """Seconds; a bare number is seconds. Raises ValueError."""
    text = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    position, total = 0, 0.0
    while position < len(text):
        match = _DURATION.match(text, position)
        if match is None or match[2] not in _DURATION_UNITS:
            raise ValueError(f"not a duration: {text!r}")
        total += float(match[1]) * _DURATION_UNITS[match[2]]
        position = match.end()
    if not text:
        raise ValueError("not a duration: ''")
    return total


def format_size(count: int) -> str:
    """The shortest exact binary form: 67108864 is "64MiB"."""
    for unit, factor in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if count and count % factor == 0:
            return f"{count // factor}{unit}"
    return str(count)
