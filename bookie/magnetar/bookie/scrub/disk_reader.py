"""Reads a file from the disk itself: each step is dropped from the page cache and read again by the disk worker.

What was not cached before is dropped again afterwards, so that a pass over cold data does not push out what readers use.
"""

from __future__ import annotations

from magnetar.proto.errors import DataDirectoryError, MagnetarError, StorageFailed
from magnetar.runtime.files import File, Files

from ..disk_worker import DiskWorker

# Another read waits for one step at most.
_STEP_BYTES = 1 << 20


class DiskReader:
    """One file, read from its start or a later offset to its end. The loop never waits for the disk.

    Raises DataDirectoryError if the file is missing.
    """

    def __init__(self, files: Files, worker: DiskWorker, path: str) -> None:
        self._path = path
        self._worker = worker
        self._file: File = files.open(path, read_only=True)
        self.size = self._file.size()
        self._refreshed = -1
        self._cold: list[int] = []

    async def read(self, offset: int, length: int) -> bytes:
        """Shorter than `length` only at the end of the file. StorageFailed when the disk refuses a part of it."""
        if self._refreshed < 0:
            self._refreshed = offset - offset % _STEP_BYTES
        elif offset < self._refreshed - _STEP_BYTES or offset > self._refreshed:
            self._refreshed = offset - offset % _STEP_BYTES  # the scan looked at the file's end first
        while self._refreshed < min(offset + length, self.size):
            await self._refresh(self._refreshed)
            self._refreshed += _STEP_BYTES
        while self._cold and self._cold[0] + _STEP_BYTES <= offset:
            self._file.drop_cache(self._cold.pop(0), _STEP_BYTES)
        data = self._file.read_cached(offset, length)
        if data is None or len(data) < length:
            try:
                await self._worker.warm(self._path, offset, length)
            except DataDirectoryError as error:  # the file was deleted meanwhile
                raise StorageFailed(error.message, **error.details) from error
            data = self._file.read_at(offset, length)
        return data

    async def _refresh(self, start: int) -> None:
        try:
            if self._file.read_cached(start, 1) is None:
                self._cold.append(start)
            self._file.drop_cache(start, _STEP_BYTES)
            await self._worker.warm(self._path, start, min(_STEP_BYTES, self.size - start))
        except MagnetarError:
            return  # `read` finds out where

    def close(self) -> None:
        """Leaves no cold step warm. May be called twice."""
        while self._cold:
            self._file.drop_cache(self._cold.pop(), _STEP_BYTES)
        self._file.close()
