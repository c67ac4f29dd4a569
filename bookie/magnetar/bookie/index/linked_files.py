"""A temporary directory of symbolic links to the files of a database, through which it can be read without a trace.

RocksDB opens read-only, but rocksdict writes its own configuration file even then, beside the database. With the links it
lands in the temporary directory; that works on a read-only file system as well.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile

# Not linked: rocksdict writes the first; the second is not needed while the bookie's lock is held.
_OWN_FILES = ("rocksdict-config.json", "LOCK")


class LinkedFiles:
    """Links to all files of `directory`, below `path`. `remove` them."""

    def __init__(self, directory: str) -> None:
        self.path = tempfile.mkdtemp(prefix="magnetar-index-")
        for name in os.listdir(directory):
            if name not in _OWN_FILES:
                os.symlink(os.path.abspath(os.path.join(directory, name)), os.path.join(self.path, name))

    def remove(self) -> None:
        """May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)


def remove_empty_directory(path: str) -> None:
    """Removes a directory that a dry run made beside the index. Does nothing if it is missing or not empty."""
    with contextlib.suppress(OSError):
        os.rmdir(path)
