"""A read-only file system that ignores writes: it shows what a start would do."""

from __future__ import annotations

from magnetar.runtime.files import File, FileLock, Files

__all__ = ["LookOnlyFiles"]


class LookOnlyFiles:
    """`magnetar.runtime.files.Files` over another one: changes are recorded and not made."""

    def __init__(self, files: Files) -> None:
        self._files = files
        # Paths that would have been written or deleted, in order.
        self.changes: list[str] = []

    def open(
        self, path: str, *, create: bool = False, exclusive: bool = False, read_only: bool = False
    ) -> File:
        """Always for reading."""
        return self._files.open(path, read_only=True)

    def read(self, path: str) -> bytes:
        """See `Files.read`."""
        return self._files.read(path)

    def write_atomically(self, path: str, data: bytes) -> None:
        """Notes it."""
        self.changes.append(path)

    def exists(self, path: str) -> bool:
        """See `Files.exists`."""
        return self._files.exists(path)

    def list(self, directory: str) -> list[str]:
        """See `Files.list`; a directory that would have been made is empty."""
        if not self._files.exists(directory) and directory in self.changes:
            return []
        return self._files.list(directory)

    def make_directory(self, path: str) -> None:
        """Notes it if it would be new."""
        if not self._files.exists(path):
            self.changes.append(path)

    def rename(self, source: str, target: str) -> None:
        """Notes it."""
        self.changes.append(target)

    def delete(self, path: str) -> None:
        """Notes it."""
        self.changes.append(path)

    def sync_directory(self, path: str) -> None:
        """Nothing to sync."""

    def device(self, path: str) -> int:
        """See `Files`."""
        return self._files.device(path)

    def free_bytes(self, path: str) -> tuple[int, int]:
        """See `Files.free_bytes`."""
        return self._files.free_bytes(path)

    def lock(self, path: str) -> FileLock:
        """See `Files.lock`."""
        return self._files.lock(path)
