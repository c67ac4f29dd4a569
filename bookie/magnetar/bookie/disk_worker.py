"""The seam for disk work that blocks: writing entry logs, syncing, warming the page cache, preparing files.

No thread of the daemon does it (a thread that comes back under a busy loop waits for the interpreter, 0.1 to 6 s):
`device.ProcessDiskWorker` asks a process over a socket; that of the simulation works in the loop over `files`.

A failed write or sync raises StorageFailed, whatever the reason; after it that file must not be written or synced again
(rule 4). The exception is a write that finds no space: DiskFull, of which nothing counts. A worker process that dies
takes unknown outcomes with it, so `on_failure` stops the daemon as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from magnetar.proto.errors import MagnetarError
from magnetar.runtime.files import FileLock


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
        """The range is in the page cache when it returns, if memory allows.

        RequestTimeout when the disk of its directory does not answer: nothing is known to be damaged.
        """
        ...

    def probe(self, directory: str) -> None:
        """Asks its disk to flush, unless it has yet to answer that: of a disk that nobody uses it is known that it hangs."""
        ...

    def silent_directories(self) -> dict[str, float]:
        """For how many seconds reads of each directory, or the last probe, have waited without any answer."""
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
