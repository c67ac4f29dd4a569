"""The numbers of entry logs: given out once in the life of a data directory.

A location in the index may outlive its log (of a ledger that was deleted, say), and must not come to point into another one.
So numbers are reserved, durably, before a log is named after them:

    DATA/log-ids:  b"MAGLOGS\n" | u32 version | u32 no id from here on was given out | u64 checksum of all before it
"""

from __future__ import annotations

import asyncio
import logging

from magnetar.proto.errors import StorageFailed
from magnetar.runtime.files import Files

from ..disk_worker import DiskWorker
from ..sealed_file import seal, unseal

_log = logging.getLogger(__name__)
_MAGIC = b"MAGLOGS\n"
_VERSION = 1
_RESERVED = 64
# When the file is damaged: more logs than this were not deleted above the highest one that is left.
_STEP_OVER = 1 << 16
_MAX_ID = 2**32 - 1


def encode_log_ids(reserved: int) -> bytes:
    """The file's content."""
    return seal(_MAGIC, _VERSION, reserved)


def decode_log_ids(data: bytes) -> int | None:
    """The first number that was not reserved; None if the file is damaged."""
    try:
        return int(unseal(data, _MAGIC, _VERSION))
    except (ValueError, TypeError):
        return None


class LogIds:
    """Counts up from the highest number that any log has or had."""

    def __init__(self, files: Files, worker: DiskWorker, path: str) -> None:
        self._files = files
        self._worker = worker
        self._path = path
        self._next = 1
        self._reserved = 1
        self._reserving = asyncio.Lock()

    def open(self, highest: int) -> None:
        """`highest`: of the logs that are there, 0 if there are none."""
        reserved: int | None = 1
        if self._files.exists(self._path):
            reserved = decode_log_ids(self._files.read(self._path))
        elif highest:
            reserved = None
        if reserved is None:
            _log.error(
                "%s is missing or damaged: log ids go on with a distance of %d", self._path, _STEP_OVER
            )
            reserved = highest + _STEP_OVER
        self._next = self._reserved = max(highest + 1, reserved)

    async def take(self) -> int:
        """The next number, durably reserved. The disk worker writes: the loop goes on meanwhile."""
        async with self._reserving:
            if self._next >= self._reserved:
                reserved = self._more()
                await self._worker.replace(self._path, encode_log_ids(reserved))
                self._reserved = reserved
            self._next += 1
            return self._next - 1

    def _more(self) -> int:
        if self._next + _RESERVED > _MAX_ID:
            raise StorageFailed("all numbers of entry logs are used up; replace this bookie")
        return self._next + _RESERVED
