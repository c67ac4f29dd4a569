"""Verifies the files of the index, read from the disk itself, in slices of the loop (`index/database_files`)."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

from magnetar.proto.errors import DataDirectoryError, StorageFailed
from magnetar.runtime.files import Files, file_size

from ..disk_worker import DiskWorker
from ..index.database_files import DatabaseFileCheck, database_file_names
from ..index.locations import REBUILD
from .disk_reader import DiskReader

# One step is copied out of the page cache and hashed in about 0.2 ms of the loop.
_STEP_BYTES = 512 << 10


class IndexFiles:
    """Verifies the files in `directory`. `tables` maps names to (bytes, checksum); `ScrubProgress` owns and stores it."""

    def __init__(
        self, files: Files, worker: DiskWorker, directory: str, tables: dict[str, tuple[int, int]]
    ) -> None:
        self._files = files
        self._worker = worker
        self._directory = directory
        self._tables = tables

    def names(self) -> dict[str, int]:
        """Names of the files to verify, with their sizes; empty for an index without files. Forgets deleted tables.

        RocksDB deletes some at any time.
        """
        found: dict[str, int] = {}
        for name in database_file_names(self._files, self._directory):
            try:
                found[name] = file_size(self._files, self.path(name))
            except DataDirectoryError:
                if self._files.exists(self.path(name)):
                    found[name] = 0  # `verify` says why it cannot be opened
        for name in [name for name in self._tables if name not in found]:
            del self._tables[name]
        return found

    def path(self, name: str) -> str:
        """The path of a file of the index."""
        return os.path.join(self._directory, name)

    async def verify(self, name: str) -> AsyncIterator[int | str]:
        """Reads a file: yields the number of bytes of each step, and at the end a text if something is wrong."""
        try:
            reader = DiskReader(self._files, self._worker, self.path(name))
        except DataDirectoryError as error:
            if self._files.exists(self.path(name)):
                yield f"{error.message}; {REBUILD}"
            return
        check = DatabaseFileCheck(name, reader.size, self._tables.get(name))
        try:
            for offset in range(0, reader.size, _STEP_BYTES):
                data = await reader.read(offset, min(_STEP_BYTES, reader.size - offset))
                check.take(data)
                yield len(data)
            fault = check.fault(self._files.list(self._directory))
        except StorageFailed as error:
            fault = str(error)
        finally:
            reader.close()
        if not self._files.exists(self.path(name)):
            return  # deleted by a RocksDB compaction
        if fault:
            yield f"{fault}; {REBUILD}"
        elif check.seen is not None:
            self._tables[name] = check.seen
