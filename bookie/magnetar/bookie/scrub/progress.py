"""How far the scrub is, and how fast. When each file was last verified is stored across restarts: a bookie that restarts
every hour still gets through its data.

    DATA/scrub, a sealed file (`sealed_file`):

    "verified":  {unit: ms since the epoch}; a unit is "log 0000002a", "index 000123.sst" or "index walk"
    "tables":    {file of the index: [bytes, xxh3-64 of so many of its first bytes]}
    "at":        [unit, offset] of what was under way

Losing the file costs a pass over everything, and damage that the index's tables took before is only found when they are
read. So a damaged one is said aloud and begun anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from magnetar.proto.errors import MagnetarError
from magnetar.runtime.files import Files

from ..disk_worker import DiskWorker
from ..sealed_file import seal, unseal

_log = logging.getLogger(__name__)
_MAGIC = b"MAGSCRUB"
_VERSION = 1


class ScrubProgress:
    """See the module."""

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self.verified: dict[str, int] = {}
        self.tables: dict[str, tuple[int, int]] = {}
        # Unit under way, and how far it was verified; "" and 0: none.
        self.unit = ""
        self.offset = 0
        self.dirty = False

    def load(self) -> None:
        """From the disk, as far as it can be read."""
        try:
            if not self._files.exists(self._path):
                return
            fields = decode_progress(self._files.read(self._path))
            self.verified.update({str(unit): int(when) for unit, when in fields["verified"].items()})
            self.tables.update(
                {str(name): (int(row[0]), int(row[1])) for name, row in fields["tables"].items()}
            )
            unit, offset = fields["at"]
            self.unit, self.offset = str(unit), int(offset)
        except (MagnetarError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            _log.warning("%s cannot be used (%s): the scrub begins anew", self._path, error)
            self.verified.clear()
            self.tables.clear()
            self.unit, self.offset = "", 0

    async def save(self, worker: DiskWorker) -> None:
        """Durable when it returns. Raises StorageFailed or DiskFull; then it is tried again with the next change."""
        fields = {"verified": self.verified, "tables": self.tables, "at": [self.unit, self.offset]}
        self.dirty = False
        try:
            await worker.replace(self._path, encode_progress(fields))
        except MagnetarError:
            self.dirty = True
            raise

    def at(self, unit: str, offset: int) -> None:
        """This far in a unit, everything is verified."""
        self.unit, self.offset, self.dirty = unit, offset, True

    def done(self, unit: str, now_ms: int) -> None:
        """The unit is verified."""
        self.verified[unit] = now_ms
        self.unit, self.offset, self.dirty = "", 0, True

    def keep_only(self, units: dict[str, int]) -> None:
        """Forgets units that are no more."""
        for unit in [unit for unit in self.verified if unit not in units]:
            del self.verified[unit]
            self.dirty = True


def encode_progress(fields: dict[str, Any]) -> bytes:
    """The file's bytes."""
    return seal(_MAGIC, _VERSION, fields)


def decode_progress(data: bytes) -> dict[str, Any]:
    """Raises ValueError."""
    fields: dict[str, Any] = unseal(data, _MAGIC, _VERSION)
    return fields


_SHARE_OF_INTERVAL = 0.8
_BEHIND = 0.9
_FLOOR_BYTES_PER_S = 1 << 20
_BUSY_POLL_S = 0.1
# Shorter sleeps cost more than they spread.
_LEAST_SLEEP_S = 0.005


class Pace:
    """The rate of the scrub, which calls `spend` after each slice: fast enough to verify everything in time, and bounded.

    The target is what is stored divided by 80% of the interval, at least 1 MiB/s, at most `scrub_bytes_per_s`. While the
    bookie is `busy`, which is polled, the scrub waits, unless something was not verified for 90% of the interval: then it
    goes on at the bound.
    """

    def __init__(self, interval_s: float, bytes_per_s: int, busy: Callable[[], bool]) -> None:
        self._interval_s = interval_s
        self._bound = float(bytes_per_s)
        self._busy = busy
        self._ahead_until = 0.0
        # Loop time from which on some file is verified too late unless the scrub runs at its full rate.
        self._behind_at = float("inf")
        self._needed: float = _FLOOR_BYTES_PER_S
        # Time spent waiting for a bookie that was busy.
        self.paused_s = 0.0

    def aim(self, total_bytes: int, oldest_age_s: float) -> None:
        """What is stored now, and how long ago the oldest of it was verified."""
        now = asyncio.get_running_loop().time()
        self._needed = max(total_bytes / (self._interval_s * _SHARE_OF_INTERVAL), _FLOOR_BYTES_PER_S)
        self._behind_at = now + _BEHIND * self._interval_s - oldest_age_s

    @property
    def behind(self) -> bool:
        """Whether the scrub is behind schedule: then neither the target rate nor a busy bookie slows it down."""
        return asyncio.get_running_loop().time() >= self._behind_at

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self._bound if self.behind else min(self._needed, self._bound)

    async def spend(self, size: int) -> None:
        """`size` bytes were verified: waits until the next ones may be. Gives the loop a turn in any case."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._ahead_until = max(self._ahead_until, now) + size / self.rate
        if self._ahead_until - now > _LEAST_SLEEP_S:
            await asyncio.sleep(self._ahead_until - now)
        else:
            await asyncio.sleep(0)
        while self._busy() and not self.behind:
            self.paused_s += _BUSY_POLL_S
            await asyncio.sleep(_BUSY_POLL_S)
