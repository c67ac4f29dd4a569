"""The seam for disk work that blocks: writing entry logs, syncing, warming the page cache, preparing files.

No thread of the daemon does it (a thread that comes back under a busy loop waits for the interpreter, 0.1 to 6 s):
`device.ProcessDiskWorker` asks a process over a socket, `InlineDiskWorker` works in the loop over `files`.

A failed write or sync raises StorageFailed, whatever the reason; after it that file must not be written or synced again
(rule 4). The exception is a write that finds no space: DiskFull, of which nothing counts. A worker process that dies
takes unknown outcomes with it, so `on_failure` stops the daemon as well.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from magnetar.proto.errors import DataDirectoryError, MagnetarError
from magnetar.runtime.files import FileLock, Files

from .journal.device import ignore_failure

__all__ = ["DiskWorker", "InlineDiskWorker"]

_WARM_STEP_BYTES = 1 << 20


class DiskWorker(Protocol):
    """Paths are those of `files`. All raise StorageFailed, DiskFull or DataDirectoryError."""

    on_failure: Callable[[MagnetarError], None]

    async def start(self, lock: FileLock) -> None:
        """Makes it ready. A process shares the lock: no orphan works beside its daemon's successor (rule 12b)."""
        ...

    async def sync(self, path: str) -> None:
        """A file's bytes, or a directory's names, are durable when it returns."""
        ...

    async def create(self, path: str) -> None:
        """A new, empty file. Its name is durable once its directory is synced. DataDirectoryError if it exists."""
        ...

    async def write(self, path: str, position: int, parts: Sequence[bytes]) -> None:
        """Writes the parts one after another at `position` of an existing file. Buffered when it returns.

        Writes of one directory are done in the order they were asked for. A caller that is cancelled leaves it open
        whether the bytes are written.
        """
        ...

    async def truncate(self, path: str, size: int) -> None:
        """Cuts a file, in order with the writes of its directory. Buffered when it returns."""
        ...

    async def warm(self, path: str, offset: int, length: int) -> None:
        """The range is in the page cache when it returns, if memory allows."""
        ...

    async def prepare(self, path: str, size: int, source: str = "", *, hurry: bool = False) -> None:
        """A file of `size` bytes that the disk has all of, durable with its name; made from `source` if that is given.

        It is made slowly, so that the journal is not disturbed (64 MiB take 0.6 s), unless `hurry`.
        """
        ...

    async def replace(self, path: str, data: bytes) -> None:
        """The content is replaced atomically and durable when it returns."""
        ...

    async def rename(self, source: str, target: str) -> None:
        """Replaces the target, durably once the directory is synced."""
        ...

    async def delete(self, path: str) -> None:
        """Deletes the file, durably once its directory is synced."""
        ...

    async def close(self) -> None:
        """Ends it; what is still asked for fails."""
        ...


class InlineDiskWorker:
    """Does the work in the loop."""

    def __init__(self, files: Files) -> None:
        self.on_failure: Callable[[MagnetarError], None] = ignore_failure
        self._files = files

    async def start(self, lock: FileLock) -> None:
        """See `DiskWorker`."""

    async def sync(self, path: str) -> None:
        """See `DiskWorker`."""
        await asyncio.sleep(0)
        try:
            file = self._files.open(path)
        except DataDirectoryError:  # a directory
            self._files.sync_directory(path)
            return
        try:
            file.sync()
        finally:
            file.close()

    async def create(self, path: str) -> None:
        """See `DiskWorker`."""
        await asyncio.sleep(0)
        self._files.open(path, exclusive=True).close()

    async def write(self, path: str, position: int, parts: Sequence[bytes]) -> None:
        """See `DiskWorker`."""
        await asyncio.sleep(0)
        file = self._files.open(path)
        try:
            file.write_at(position, parts)
        finally:
            file.close()

    async def truncate(self, path: str, size: int) -> None:
        """See `DiskWorker`."""
        await asyncio.sleep(0)
        file = self._files.open(path)
        try:
            file.truncate(size)
        finally:
            file.close()

    async def warm(self, path: str, offset: int, length: int) -> None:
        """See `DiskWorker`."""
        await asyncio.sleep(0)
        file = self._files.open(path, read_only=True)
        try:
            for start in range(offset, offset + length, _WARM_STEP_BYTES):
                file.read_at(start, min(_WARM_STEP_BYTES, offset + length - start))
        finally:
            file.close()

    async def prepare(self, path: str, size: int, source: str = "", *, hurry: bool = False) -> None:
        """See `DiskWorker`."""
        await asyncio.sleep(0)
        if source:
            self._files.rename(source, path)
        file = self._files.open(path, create=True)
        try:
            present = file.size()
            if present < size:
                file.zero_fill(present, size - present)
            elif present > size:
                file.truncate(size)
            file.sync()
        finally:
            file.close()
        self._files.sync_directory(os.path.dirname(path))

    async def replace(self, path: str, data: bytes) -> None:
        """See `DiskWorker`."""
        await asyncio.sleep(0)
        self._files.write_atomically(path, data)

    async def rename(self, source: str, target: str) -> None:
        """See `DiskWorker`."""
        await asyncio.sleep(0)
        self._files.rename(source, target)

    async def delete(self, path: str) -> None:
        """See `DiskWorker`."""
        await asyncio.sleep(0)
        self._files.delete(path)

    async def close(self) -> None:
        """See `DiskWorker`."""
