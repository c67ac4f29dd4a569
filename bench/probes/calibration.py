"""How much of the machine others leave to us: fixed Python work, and shares of all cores before and during a workload."""

import os
import resource
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


class Others:
    """The share of all cores that other processes have used since this was made: 0.0 on a machine that is ours alone.

    Ours are this process and its descendants that have ended and were waited for, so ask when the workload's processes have
    ended. What the kernel does for nobody in particular (writing back dirty pages) and what the host takes away count as
    others: about 0.02 while a disk is written to.
    """

    def __init__(self) -> None:
        self._idle, self._all = _jiffies()
        self._ours = _our_cpu_s()
        self._began = time.perf_counter()

    def share(self) -> float:
        """From 0.0 to 1.0."""
        idle, everything = _jiffies()
        passed = everything - self._all
        if not passed:
            return 0.0
        busy = (passed - idle + self._idle) / passed
        cores = os.cpu_count() or 1
        ours = (_our_cpu_s() - self._ours) / (cores * (time.perf_counter() - self._began))
        return min(1.0, max(0.0, busy - ours))


def _our_cpu_s() -> float:
    """Seconds of CPU of this process and of every descendant that was waited for."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def _jiffies() -> tuple[int, int]:
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)
