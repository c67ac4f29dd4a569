"""What the machine can do without Magnetar: the limits that every figure is held against, measured in the same rounds."""

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.probes import disk
from bench.probes.calibration import QUIET_SHARE, Others, calibrate, settle

__all__ = [
    "QUIET_SHARE",
    "Others",
    "PacedProbe",
    "calibrate",
    "disk_probes",
    "ring_probe",
    "settle",
    "socket_probe",
]

PACED_FILE_BYTES = 64 << 20


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


class PacedProbe:
    """The bare disk at the pace of (e), in a process of its own, while the `with` block runs. See bench.probes.paced."""

    def __init__(self, directory: Path, *, windowed: bool) -> None:
        """`windowed`: only in the windows of bench.stalls."""
        self._path = directory / "paced-probe"
        self._windowed = windowed
        # Once the block has ended: when a write was due and how long it waited, seconds; groups, and their bytes.
        self.samples: list[tuple[float, float]] = []
        self.groups = self.bytes = 0

    def __enter__(self) -> "PacedProbe":
        disk.zero_filled(self._path, PACED_FILE_BYTES)
        mode = "windows" if self._windowed else "always"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.probes.paced", str(self._path), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # "ready", or nothing when it failed
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        said, _ = self._process.communicate()
        self._path.unlink()
        if error is None:
            if self._process.returncode:
                raise SystemExit(f"bench: the paced probe of the disk ended with {self._process.returncode}")
            found = json.loads(said)
            self.samples = [(began, waited) for began, waited in found["samples"]]
            self.groups, self.bytes = found["groups"], found["bytes"]


def _run(module: str, *arguments: str) -> dict[str, float]:
    """A probe's client is a process of its own, as a workload's is."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, check=True, timeout=120
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found
