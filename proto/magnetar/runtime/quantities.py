"""Sizes and durations as people write them in settings, and figures as they read them.

>>> parse_size("64MB"), parse_size("1.5 GiB"), parse_size("512")
(64000000, 1610612736, 512)
>>> parse_duration("250ms", "s"), parse_duration("1h 30m", "s"), parse_duration("10", "ms")
(0.25, 5400.0, 10.0)
>>> format_size(64 << 20), format_duration(5_400_000), format_duration(1_500)
('64MiB', '90m', '1500ms')
"""

from __future__ import annotations

import re

_SIZE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _SIZE_UNITS |= {f"{_letter}b": 1000**_power, _letter: 1024**_power, f"{_letter}ib": 1024**_power}
_DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = r"\d+(?:\.\d+)?"


def parse_size(text: str) -> int:
    """Bytes. "64MB" is decimal, "64MiB" and "64M" are binary. Raises ValueError."""
    match = re.fullmatch(rf"({_NUMBER})\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError(f"not a size: {text!r}")
    return int((float if "." in match[1] else int)(match[1]) * _SIZE_UNITS[match[2]])


def parse_duration(text: str, unit: str) -> float:
    """In `unit`, which is also that of a bare number. Raises ValueError."""
    plain = text.strip().lower()
    if re.fullmatch(_NUMBER, plain):
        return float(plain)
    parts = re.findall(rf"({_NUMBER})\s*([a-z]+)", plain)
    if not re.fullmatch(rf"({_NUMBER}\s*[a-z]+\s*)+", plain) or any(
        part[1] not in _DURATION_UNITS for part in parts
    ):
        raise ValueError(f"not a duration: {text!r}")
    return sum(float(number) * _DURATION_UNITS[name] for number, name in parts) / _DURATION_UNITS[unit]


def format_size(count: int) -> str:
    """The shortest exact binary form: 67108864 is "64MiB"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count and count % 1024**power == 0:
            return f"{count // 1024**power}{unit}"
    return str(count)


def format_duration(ms: int) -> str:
    """The shortest exact form in one unit: 5400000 is "90m"."""
    for size, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s")):
        if ms and ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"


def about(seconds: float) -> str:
    """A duration for people: `about(5400)` is "90 min", `about(200_000)` is "2.3 days"."""
    for least, one, unit in ((172_800, 86_400, "days"), (10_800, 3_600, "h"), (180, 60, "min")):
        if seconds >= least:
            return f"{seconds / one:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:.0f} s"


def about_bytes(value: float) -> str:
    """A size for people: `about_bytes(67_779_665_920)` is "67.8 GB"."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if value >= 1000**power:
            return f"{value / 1000**power:.1f} {unit}"
    return f"{value:.0f} B"


def counted(count: int, one: str, more: str = "") -> str:
    """`1 message`, `2 messages`; `more` where the plural is not the singular with an s."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"
