"""Reads a file from the disk itself: each step is dropped from the page cache and read again by the disk worker.

What was not cached before is dropped again afterwards, so that a pass over cold data does not push out what readers use.
"""

from __future__ import annotations

from magnetar.proto.errors import MagnetarError
from magnetar.runtime.files import File, Files

from ..disk_worker import DiskWorker

__all__ = ["DiskReader"]

# Another read waits for one step at most.
_STEP_BYTES = 1 << 20
_PAGE_BYTES = 4096


class DiskReader:
    """One file, read from its start or a later offset to its end. The loop never waits for the disk.

    Raises DataDirectoryError if the file is missing.
    """

    def __init__(self, files: Files, worker: DiskWorker, path: str) -> None:
        self._path = path
        self._worker = worker
        self._file: File = files.open(path, read_only=True)
        self.size = self._file.size()
        # Ranges that the disk refused to read, and what it said.
        self.refused: list[tuple[int, int, str]] = []
        self._refreshed = -1
        self._cold: list[int] = []

    async def read(self, offset: int, length: int) -> bytes:
        """All `length` bytes; zeros for pages that the disk cannot read."""
        if self._refreshed < 0:
            self._refreshed = offset - offset % _STEP_BYTES
        elif offset < self._refreshed - _STEP_BYTES or offset > self._refreshed:
            self._refreshed = offset - offset % _STEP_BYTES  # the scan looked at the file's end first
        while self._refreshed < min(offset + length, self.size):
            await self._refresh(self._refreshed)
            self._refreshed += _STEP_BYTES
        while self._cold and self._cold[0] + _STEP_BYTES <= offset:
            self._file.drop_cache(self._cold.pop(0), _STEP_BYTES)
        try:
            data = self._file.read_cached(offset, length)
            if data is None or len(data) < length:
                await self._worker.warm(self._path, offset, length)
                data = self._file.read_at(offset, length)
        except MagnetarError:
            data = await self._page_by_page(offset, length)
        return data.ljust(length, b"\0")

    async def _refresh(self, start: int) -> None:
        try:
            if self._file.read_cached(start, 1) is None:
                self._cold.append(start)
            self._file.drop_cache(start, _STEP_BYTES)
            await self._worker.warm(self._path, start, min(_STEP_BYTES, self.size - start))
        except MagnetarError:
            return  # `read` finds out where

    async def _page_by_page(self, offset: int, length: int) -> bytes:
        parts: list[bytes] = []
        end = offset + length
        while offset < end:
            step = min(_PAGE_BYTES - offset % _PAGE_BYTES, end - offset)
            try:
                await self._worker.warm(self._path, offset, step)
                data = self._file.read_at(offset, step)
            except MagnetarError as error:
                data = b""
                self.refused.append((offset, offset + step, error.message))
            parts.append(data.ljust(step, b"\0"))
            offset += step
        return b"".join(parts)

    def close(self) -> None:
        """Leaves no cold step warm. May be called twice."""
        while self._cold:
            self._file.drop_cache(self._cold.pop(), _STEP_BYTES)
        self._file.close()
