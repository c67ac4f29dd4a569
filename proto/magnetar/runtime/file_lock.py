"""The lock on a data directory, shared with the helper processes that write there (rule 12b)."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Protocol

from magnetar.proto.errors import DataDirectoryError

from .storage_error import storage_error

if sys.platform != "win32":
    import fcntl


class FileLock(Protocol):
    """A held lock. It ends when this process *and* every process that inherited `fileno()` let go (rule 12b)."""

    @property
    def path(self) -> str:
        """The lock file."""
        ...

    def fileno(self) -> int:
        """The descriptor to pass to helper processes, which then hold the lock as well."""
        ...

    def release(self) -> None:
        """Lets go of this process's share. May be called twice."""
        ...


def lock_file(path: str) -> OsFileLock:
    """Takes the lock or raises DataDirectoryError with details["locked"] = True; never waits.

    flock(2): bound to the open file description, which helper processes inherit.
    """
    close_on_exec = getattr(os, "O_CLOEXEC", 0)
    try:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | close_on_exec, 0o640)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            # A dying disk that the kernel made read-only: its operator must still be able to look at it.
            fd = os.open(path, os.O_RDONLY | close_on_exec)
    except OSError as error:
        raise storage_error(error, "opening", path) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        raise DataDirectoryError(
            f"{os.path.dirname(path) or '.'} is in use by another process"
            + (f" (started by process {holder})" if holder else "")
            + "; stop it, or choose another data directory",
            path=path,
            locked=True,
            holder=holder,
        ) from None
    except OSError as error:
        os.close(fd)
        raise storage_error(error, "locking", path) from error
    with contextlib.suppress(OSError):  # the process number is for people only
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    return OsFileLock(path, fd)


class OsFileLock:
    """A held flock. Made by `OsFiles.lock`."""

    __slots__ = ("_fd", "path")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def release(self) -> None:
        """See `FileLock.release`. Closes only: LOCK_UN would take the lock from the helpers that share it."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
