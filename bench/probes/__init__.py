"""What the machine can do without Magnetar: the limits that every figure is held against, measured in the same rounds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.probes import disk
from bench.probes.calibration import QUIET_SHARE, calibrate, settle

__all__ = ["QUIET_SHARE", "calibrate", "disk_probes", "ring_probe", "settle", "socket_probe"]


def socket_probe(seconds: float, count: int) -> dict[str, float]:
    """A bare echo: bytes_per_s, and p50_ms and p99_ms of `count` round trips."""
    return _run("bench.probes.echo", str(seconds), str(count))


def ring_probe(directory: Path, count: int) -> dict[str, float]:
    """Bare TCP + ring + fdatasync: p50, p99, p999 and maximum in milliseconds of `count` records, one at a time."""
    return _run("bench.probes.ring", str(directory), str(count))


def disk_probes(directory: Path, groups: dict[str, int], seconds: float) -> dict[str, Any]:
    """A cold read, and synced writes of the group size that each workload's journal had."""
    path = directory / "disk-probe"
    try:
        disk.zero_filled(path)
        found: dict[str, Any] = {"cold_read_bytes_per_s": disk.cold_read_bytes_per_s(path)}
        found["groups"] = {
            name: disk.synced_writes(path, size, seconds)._asdict() for name, size in sorted(groups.items())
        }
        return found
    finally:
        path.unlink(missing_ok=True)


def _run(module: str, *arguments: str) -> dict[str, float]:
    """A probe's client is a process of its own, as a workload's is."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, check=True, timeout=120
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found
