"""When each file was last verified, stored across restarts: a bookie that restarts every hour still gets through its data.

    DATA/scrub, a sealed file (`sealed_file`):

    "verified":  {unit: ms since the epoch}; a unit is "log 0000002a", "index 000123.sst" or "index walk"
    "tables":    {file of the index: [bytes, xxh3-64 of so many of its first bytes]}
    "at":        [unit, offset] of what was under way

Losing the file costs a pass over everything, and damage that the index's tables took before is only found when they are
read. So a damaged one is said aloud and begun anew.
"""

from __future__ import annotations

import logging
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
