"""Verifies the files of the index as bytes: each table (SST) is hashed when it is first seen, and compared from then on.

RocksDB verifies a block when it reads it, which for a filter or a rarely used table may be never; and a table is never
changed after it was written. A MANIFEST only grows, so its hashed part must stay the same. CURRENT must name a MANIFEST.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import xxhash

from magnetar.proto.errors import DataDirectoryError
from magnetar.runtime.files import Files

from ..disk_worker import DiskWorker
from ..index.locations import REBUILD
from .disk_reader import DiskReader

__all__ = ["IndexFiles"]

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
        """Names of the files to verify, with their sizes; empty for an index without files. Forgets deleted tables."""
        if not self._files.exists(self._directory):
            return {}
        found: dict[str, int] = {}
        for name in self._files.list(self._directory):
            if name.endswith(".sst") or name.startswith("MANIFEST-") or name == "CURRENT":
                size = self._size(name)
                if size is not None:
                    found[name] = size
        for name in [name for name in self._tables if name not in found]:
            del self._tables[name]
        return found

    def _size(self, name: str) -> int | None:
        try:
            file = self._files.open(self.path(name), read_only=True)
        except DataDirectoryError:  # deleted by a RocksDB compaction
            return None
        try:
            return file.size()
        finally:
            file.close()

    def path(self, name: str) -> str:
        """The path of a file of the index."""
        return os.path.join(self._directory, name)

    async def verify(self, name: str) -> AsyncIterator[int | str]:
        """Reads a file: yields the number of bytes of each step, and at the end a text if something is wrong."""
        try:
            reader = DiskReader(self._files, self._worker, self.path(name))
        except DataDirectoryError:
            return
        try:
            size = reader.size
            length, checksum = self._tables.get(name, (size, None))
            if name == "CURRENT":
                length, checksum = size, None
            if size < length:
                yield f"it has {size} bytes and had {length}; {REBUILD}"
                return
            digest = xxhash.xxh3_64()
            begin = b""
            before: int | None = None
            for offset in range(0, size, _STEP_BYTES):
                data = await reader.read(offset, min(_STEP_BYTES, size - offset))
                if before is None and offset + len(data) >= length:
                    before = _hash_with(digest, data[: length - offset])
                digest.update(data)
                begin = begin or data
                yield len(data)
            if not self._files.exists(self.path(name)):
                return  # deleted by a RocksDB compaction
            if reader.refused:
                yield f"{reader.refused[0][2]}; {REBUILD}"
            elif name == "CURRENT":
                if not _names_a_manifest(begin, self._files.list(self._directory)):
                    yield f"it does not name a MANIFEST; {REBUILD}"
            elif checksum is not None and before != checksum:
                yield f"its bytes have changed since they were written; {REBUILD}"
            else:
                self._tables[name] = (size, digest.intdigest())
        finally:
            reader.close()


def _hash_with(digest: xxhash.xxh3_64, more: bytes) -> int:
    """The hash of what `digest` has hashed so far and `more`; `digest` does not change."""
    copy = digest.copy()
    copy.update(more)
    return copy.intdigest()


def _names_a_manifest(data: bytes, names: list[str]) -> bool:
    """CURRENT holds the name of a MANIFEST and a newline."""
    name, newline = data[:-1].decode("ascii", "replace"), data[-1:]
    return newline == b"\n" and name.startswith("MANIFEST-") and name in names
