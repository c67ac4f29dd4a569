"""How much of the machine the others leave to us: fixed Python work, and the idle share of all cores."""

import time
from pathlib import Path

STEPS = 60_000
IDLE_SAMPLE_S = 0.2
QUIET_SHARE = 0.85  # below, a figure says more about the neighbours than about what it measures


def calibrate() -> float:
    """Milliseconds for a fixed amount of bytecode, dictionary and bytes work (12 ms where this was written)."""
    began = time.perf_counter()
    table: dict[int, bytes] = {}
    for number in range(STEPS):
        key = number * 7919 & 1023
        table[key] = b"%d:%d" % (number, len(table.get(key, b"")))
    assert len(table) == 1024
    return (time.perf_counter() - began) * 1e3


def idle_share() -> float:
    """Share of all cores that nobody used for a moment: 1.0 on a quiet machine. Its syncs are slow when it is not."""
    idle_before, all_before = _jiffies()
    time.sleep(IDLE_SAMPLE_S)
    idle, everything = _jiffies()
    return (idle - idle_before) / max(1, everything - all_before)


def settle(seconds: float) -> float:
    """Waits until the machine is quiet, at most `seconds`; returns the idle share."""
    until = time.monotonic() + seconds
    while (share := idle_share()) < QUIET_SHARE and time.monotonic() < until:
        pass
    return share


def _jiffies() -> tuple[int, int]:
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)
