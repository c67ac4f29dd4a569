"""The index's own files, compared with the checksums that the scrub of the running bookie stores (`scrub/progress`).

RocksDB verifies a block when it reads it, and a walk reads no filter; so the tables are hashed as bytes as well. A table
that no scrub has seen yet is only read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from magnetar.proto.errors import MagnetarError

from ..scrub.progress import decode_progress
from .journals import Progress, no_progress
from .stopped import StoppedBookie, file_size

__all__ = ["IndexFile", "check_index_files"]

_STEP_BYTES = 4 << 20


class IndexFile(NamedTuple):
    """A file of RocksDB. `known`: the scrub has a checksum of it. `damage` is empty when nothing is wrong."""

    path: str
    bytes: int
    known: bool
    damage: str


def check_index_files(bookie: StoppedBookie, progress: Progress = no_progress) -> Iterator[IndexFile]:
    """Tables and MANIFEST, by name. Whatever cannot be read is damage."""
    directory = bookie.layout.index
    tables = _known_tables(bookie)
    names = [
        name for name in bookie.files.list(directory) if name.endswith(".sst") or name.startswith("MANIFEST-")
    ]
    total = sum(file_size(bookie.files, os.path.join(directory, name)) for name in names)
    done = 0
    for name in names:
        path = os.path.join(directory, name)
        size = file_size(bookie.files, path)
        length, checksum = tables.get(name, (size, None))
        try:
            damage = _compare(bookie, path, size, length, checksum)
        except MagnetarError as error:
            damage = error.message
        done += size
        progress("index files", done, total)
        yield IndexFile(path, size, checksum is not None, damage)


def _known_tables(bookie: StoppedBookie) -> dict[str, tuple[int, int]]:
    """(bytes, checksum of so many first bytes) by name; empty if no scrub stored any, or the stored ones are damaged."""
    path = os.path.join(bookie.layout.root, "scrub")
    if not bookie.files.exists(path):
        return {}
    try:
        rows = decode_progress(bookie.files.read(path))["tables"]
        return {str(name): (int(row[0]), int(row[1])) for name, row in rows.items()}
    except (MagnetarError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return {}


def _compare(bookie: StoppedBookie, path: str, size: int, length: int, checksum: int | None) -> str:
    if size < length:
        return f"it has {size} bytes and had {length}"
    digest = xxhash.xxh3_64()
    file = bookie.files.open(path, read_only=True)
    try:
        for offset in range(0, size, _STEP_BYTES):
            data = file.read_at(offset, _STEP_BYTES)
            digest.update(data[: max(length - offset, 0)])
    finally:
        file.close()
    if checksum is not None and digest.intdigest() != checksum:
        return "its bytes have changed since they were written"
    return ""
