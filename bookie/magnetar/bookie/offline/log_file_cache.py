"""Read-only files that stay open while entries are read from many logs."""

from __future__ import annotations

from collections import OrderedDict

from magnetar.runtime.files import File, Files

__all__ = ["LogFileCache"]

_MOST = 16


class LogFileCache:
    """Read-only, the most recently used ones."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._open: OrderedDict[str, File] = OrderedDict()

    def read_at(self, path: str, offset: int, length: int) -> bytes:
        """Short only at the end of the file. DataDirectoryError when it is missing, StorageFailed."""
        file = self._open.get(path)
        if file is None:
            file = self._open[path] = self._files.open(path, read_only=True)
            if len(self._open) > _MOST:
                self._open.popitem(last=False)[1].close()
        else:
            self._open.move_to_end(path)
        return file.read_at(offset, length)

    def close(self) -> None:
        """May be called twice."""
        for file in self._open.values():
            file.close()
        self._open.clear()
