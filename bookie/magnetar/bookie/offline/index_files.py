"""The index's own files, compared with the checksums that the scrub of the running bookie stores (`scrub/progress`).

RocksDB verifies a block when it reads it, and a walk reads no filter; so the tables are hashed as bytes as well. A table
that no scrub has seen yet is only read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

from magnetar.proto.errors import MagnetarError
from magnetar.runtime.files import file_size

from ..index.database_files import DatabaseFileCheck, database_file_names
from ..scrub.progress import ScrubProgress
from .journals import Progress, no_progress
from .stopped import StoppedBookie

__all__ = ["IndexFile", "check_index_files"]

_STEP_BYTES = 4 << 20


class IndexFile(NamedTuple):
    """A file of RocksDB. `known`: the scrub has a checksum of it. `damage` is empty when nothing is wrong."""

    path: str
    bytes: int
    known: bool
    damage: str


def check_index_files(bookie: StoppedBookie, progress: Progress = no_progress) -> Iterator[IndexFile]:
    """CURRENT, MANIFEST and tables, by name. Whatever cannot be read is damage."""
    files, directory = bookie.files, bookie.layout.index
    scrubbed = ScrubProgress(files, bookie.layout.scrub)
    scrubbed.load()
    names = database_file_names(files, directory)
    sizes = {name: file_size(files, os.path.join(directory, name)) for name in names}
    done = 0
    for name, size in sizes.items():
        path = os.path.join(directory, name)
        check = DatabaseFileCheck(name, size, scrubbed.tables.get(name))
        try:
            with closing(files.open(path, read_only=True)) as file:
                for offset in range(0, size, _STEP_BYTES):
                    check.take(file.read_at(offset, _STEP_BYTES))
            damage = check.fault(names)
        except MagnetarError as error:
            damage = error.message
        done += size
        progress("index files", done, sum(sizes.values()))
        yield IndexFile(path, size, check.compared, damage)
