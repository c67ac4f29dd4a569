"""The disk as a seam: all file access of broker and bookie goes through `Files` and `File`.

`OsFiles` is the real disk. The simulation has its own that loses unsynced bytes and directory entries.

What holds when a call returns:

    write_at, zero_fill, truncate   buffered: survives a crash of the process, not of the machine
    sync                            durable: all bytes written to this file before the call, and its size
    sync_directory                  durable: names created, renamed and deleted in the directory (rule 12a)
    write_atomically                durable: either the old content or the new one, never a mixture

Errors: DataDirectoryError where an operator must act (missing, not permitted, locked), DiskFull where no space is left
(nothing is poisoned, the caller may go on later), StorageFailed for everything else the disk refuses. A file whose sync
failed is **poisoned**: the kernel may have marked the lost pages clean, so a second sync could succeed without them
(rule 4). Every later write or sync of it fails with the first error, through this handle or a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from magnetar.proto.errors import DataDirectoryError, DiskFull, MagnetarError, StorageFailed

if sys.platform != "win32":
    import fcntl

_MAX_PARTS = 1024  # IOV_MAX on Linux and macOS
_ZEROS = bytes(1 << 20)
_RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_OPERATOR = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)

Buffer = bytes | bytearray | memoryview


class File(Protocol):
    """One open file. Offsets and lengths are bytes; memoryviews must be of single bytes."""

    @property
    def path(self) -> str:
        """Where it was opened."""

    def write_at(self, offset: int, parts: Sequence[Buffer]) -> int:
        """Writes all parts one after another and returns their bytes. Buffered when it returns."""

    def read_at(self, offset: int, length: int) -> bytes:
        """May block for the disk. Shorter than `length` only at the end of the file."""

    def read_cached(self, offset: int, length: int) -> bytes | None:
        """Like `read_at`, but None instead of waiting when a part is not in the page cache."""

    def will_need(self, offset: int, length: int) -> None:
        """Asks the kernel to read ahead; returns at once."""

    def drop_cache(self, offset: int, length: int) -> None:
        """Asks the kernel to forget what is clean, so that the next read sees the disk. 50 us a MB that was cached."""

    def zero_fill(self, offset: int, length: int) -> None:
        """Writes zeros (not a hole: later overwrites then change no metadata). Buffered when it returns."""

    def truncate(self, size: int) -> None:
        """Cuts or extends to `size` bytes. Buffered when it returns."""

    def size(self) -> int:
        """Bytes of the file."""

    def sync(self) -> None:
        """Durable when it returns. A failure poisons the file."""

    def close(self) -> None:
        """Syncs nothing. May be called twice."""

    def fileno(self) -> int:
        """The descriptor, to hand to a helper process."""


class FileLock(Protocol):
    """A held lock. It ends when this process *and* every process that inherited `fileno()` let go (rule 12b)."""

    @property
    def path(self) -> str:
        """The lock file."""

    def fileno(self) -> int:
        """The descriptor to pass to helper processes, which then hold the lock as well."""

    def release(self) -> None:
        """Lets go of this process's share. May be called twice."""


class Files(Protocol):
    """A file system. Paths are strings; `list` gives names without their directory."""

    def open(
        self, path: str, *, create: bool = False, exclusive: bool = False, read_only: bool = False
    ) -> File:
        """`create` makes a missing file, `exclusive` insists that it was missing. DataDirectoryError otherwise."""

    def read(self, path: str) -> bytes:
        """The whole content. DataDirectoryError if it is missing."""

    def write_atomically(self, path: str, data: bytes) -> None:
        """Replaces the content by way of `path + ".tmp"`. Durable when it returns."""

    def exists(self, path: str) -> bool:
        """True for files and directories. DataDirectoryError, StorageFailed where that cannot be seen."""

    def list(self, directory: str) -> list[str]:
        """Names in the directory, sorted. DataDirectoryError if it is missing."""

    def make_directory(self, path: str) -> None:
        """With its parents; fine if it exists. Each new name is durable when it returns."""

    def rename(self, source: str, target: str) -> None:
        """Replaces the target. Durable after `sync_directory`."""

    def delete(self, path: str) -> None:
        """A file. Fine if it is missing. Durable after `sync_directory`."""

    def sync_directory(self, path: str) -> None:
        """Makes the directory's names durable."""

    def free_bytes(self, path: str) -> tuple[int, int]:
        """(free for this user, total) of the file system that holds `path`."""

    def device(self, path: str) -> int:
        """Number of the file system that holds `path`: equal for two paths that share their space."""

    def lock(self, path: str) -> FileLock:
        """Takes the exclusive lock or raises DataDirectoryError with details["locked"] = True; never waits."""


def file_size(files: Files, path: str) -> int:
    """Bytes of a file. DataDirectoryError when it is missing."""
    with contextlib.closing(files.open(path, read_only=True)) as file:
        return file.size()


async def wait_for_lock(files: Files, path: str, timeout_s: float) -> FileLock:
    """Takes the lock, waiting for a predecessor's helper process to let go of it (rule 12b)."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        try:
            return files.lock(path)
        except DataDirectoryError as error:
            if not error.details.get("locked") or loop.time() >= deadline:
                raise
        await asyncio.sleep(0.02)


def storage_error(error: OSError, doing: str, path: str) -> MagnetarError:
    """DiskFull, DataDirectoryError (an operator must act) or StorageFailed; details hold "path" and "errno"."""
    reason = error.strerror or str(error)
    if error.errno in _NO_SPACE:
        return DiskFull(
            f"no space left while {doing} {path}: {reason}; free some space", path=path, errno=error.errno
        )
    if error.errno in _OPERATOR:
        return DataDirectoryError(f"{doing} {path} failed: {reason}", path=path, errno=error.errno)
    return StorageFailed(f"{doing} {path} failed: {reason}", path=path, errno=error.errno)


class OsFile:
    """A file of the operating system. Made by `OsFiles.open`."""

    __slots__ = ("_fd", "_nowait", "_owner", "_poison", "path")

    def __init__(self, owner: OsFiles, path: str, fd: int) -> None:
        self.path = path
        self._owner = owner
        self._fd = fd
        # False once the file system has said that it cannot answer without waiting.
        self._nowait = bool(_RWF_NOWAIT)
        self._poison: StorageFailed | None = owner.poison_of(fd)

    def write_at(self, offset: int, parts: Sequence[Buffer]) -> int:
        """See `File.write_at`. One system call for up to 1024 parts."""
        if self._poison is not None:
            raise self._refused()
        total = sum(map(len, parts))
        try:
            if len(parts) <= _MAX_PARTS:
                written = os.pwritev(self._fd, parts, offset)
                if written == total:
                    return total
                parts = _after(parts, written)
            else:
                written = 0
            while written < total:
                count = os.pwritev(self._fd, parts[:_MAX_PARTS], offset + written)
                parts = _after(parts, count)
                written += count
        except OSError as error:
            raise self._write_failed(error, "writing to") from error
        return total

    def read_at(self, offset: int, length: int) -> bytes:
        """See `File.read_at`. An unreadable sector raises StorageFailed and poisons nothing."""
        try:
            data = os.pread(self._fd, length, offset)
            if len(data) == length or not data:
                return data
            parts = [data]
            read = len(data)
            while read < length:
                data = os.pread(self._fd, length - read, offset + read)
                if not data:
                    break
                parts.append(data)
                read += len(data)
        except OSError as error:
            raise storage_error(error, "reading", self.path) from error
        return b"".join(parts)

    def read_cached(self, offset: int, length: int) -> bytes | None:
        """See `File.read_cached`. Where the file system does not know (macOS, some others), it reads and may block."""
        if not self._nowait:
            return self.read_at(offset, length)
        buffer = bytearray(length)
        view = memoryview(buffer)
        read = 0
        try:
            while read < length:
                # A short count is the end of the cached part or of the file; only the next call shows which.
                count = os.preadv(self._fd, [view[read:]], offset + read, _RWF_NOWAIT)
                if not count:
                    break
                read += count
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in _NOT_SUPPORTED:
                self._nowait = False
                return self.read_at(offset, length)
            raise storage_error(error, "reading", self.path) from error
        return bytes(view[:read])

    def will_need(self, offset: int, length: int) -> None:
        """See `File.will_need`. Advice only: failures are ignored."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_WILLNEED)

    def drop_cache(self, offset: int, length: int) -> None:
        """See `File.drop_cache`. Advice only: failures are ignored."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)

    def zero_fill(self, offset: int, length: int) -> None:
        """See `File.zero_fill`. About 1 ms a MB: fill large ranges in slices."""
        end = offset + length
        while offset < end:
            count = min(len(_ZEROS), end - offset)
            self.write_at(offset, [memoryview(_ZEROS)[:count]])
            offset += count

    def truncate(self, size: int) -> None:
        if self._poison is not None:
            raise self._refused()
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise self._write_failed(error, "truncating") from error

    def size(self) -> int:
        try:
            return os.fstat(self._fd).st_size
        except OSError as error:
            raise storage_error(error, "looking at", self.path) from error

    def sync(self) -> None:
        """See `File.sync`. Blocks for the device: 0.1 to 10 ms and more."""
        if self._poison is not None:
            raise self._refused()
        try:
            _sync_fd(self._fd)
        except OSError as error:
            raise self._poisoned(error, "syncing") from error

    def close(self) -> None:
        """See `File.close`. An error of close(2) poisons nothing, since what matters was synced before."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)

    def fileno(self) -> int:
        return self._fd

    def _write_failed(self, error: OSError, doing: str) -> MagnetarError:
        # A device that fails to take a write has lost bytes that a later sync would not miss; a full disk, a
        # limit or a closed descriptor has not.
        if error.errno == errno.EIO:
            return self._poisoned(error, doing)
        return storage_error(error, doing, self.path)

    def _poisoned(self, error: OSError, doing: str) -> StorageFailed:
        self._poison = StorageFailed(
            f"{doing} {self.path} failed: {error.strerror}; what was written since the last sync may be lost, "
            "so this file is not used again until a restart replays what is durable",
            path=self.path,
            errno=error.errno,
        )
        self._owner.note_poison(self._fd, self._poison)
        return self._poison

    def _refused(self) -> StorageFailed:
        assert self._poison is not None
        return StorageFailed(self._poison.message, **self._poison.details)


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


class OsFiles:
    """The disk of this machine."""

    def __init__(self) -> None:
        # (device, inode) -> first failure: a new handle to a poisoned file is poisoned too.
        self._poison: dict[tuple[int, int], StorageFailed] = {}

    def open(
        self, path: str, *, create: bool = False, exclusive: bool = False, read_only: bool = False
    ) -> OsFile:
        """See `Files.open`. New files have mode 0640."""
        flags = os.O_RDONLY if read_only else os.O_RDWR
        if create or exclusive:
            flags |= os.O_CREAT | (os.O_EXCL if exclusive else 0)
        try:
            return OsFile(self, path, os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o640))
        except OSError as error:
            raise storage_error(error, "opening", path) from error

    def read(self, path: str) -> bytes:
        file = self.open(path, read_only=True)
        try:
            return file.read_at(0, file.size())
        finally:
            file.close()

    def write_atomically(self, path: str, data: bytes) -> None:
        """See `Files.write_atomically`. What a crash leaves at `path + ".tmp"` is overwritten by the next call."""
        temporary = path + ".tmp"
        self.delete(temporary)
        file = self.open(temporary, exclusive=True)
        try:
            file.write_at(0, [data])
            file.sync()
        finally:
            file.close()
        self.rename(temporary, path)
        self.sync_directory(os.path.dirname(path) or ".")

    def exists(self, path: str) -> bool:
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:  # permission denied, a hung mount: that says nothing of the file
            raise storage_error(error, "looking at", path) from error
        return True

    def list(self, directory: str) -> list[str]:
        try:
            return sorted(os.listdir(directory))
        except OSError as error:
            raise storage_error(error, "listing", directory) from error

    def make_directory(self, path: str) -> None:
        path = os.path.abspath(path)
        missing: list[str] = []
        ancestor = path
        while not os.path.isdir(ancestor):
            missing.append(ancestor)
            parent = os.path.dirname(ancestor)
            if parent == ancestor:
                break
            ancestor = parent
        for directory in reversed(missing):
            try:
                os.mkdir(directory, 0o750)
            except FileExistsError as error:
                if not os.path.isdir(directory):  # otherwise somebody was faster
                    raise DataDirectoryError(
                        f"{directory} is a file, not a directory; choose another data directory",
                        path=directory,
                    ) from error
            except OSError as error:
                raise storage_error(error, "making the directory", directory) from error
            self.sync_directory(os.path.dirname(directory))

    def rename(self, source: str, target: str) -> None:
        try:
            os.replace(source, target)
        except OSError as error:
            raise storage_error(error, f"renaming to {target}:", source) from error

    def delete(self, path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise storage_error(error, "deleting", path) from error

    def sync_directory(self, path: str) -> None:
        """See `Files.sync_directory`. A failure is StorageFailed: the caller must not depend on the names."""
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise storage_error(error, "opening", path) from error
        try:
            os.fsync(fd)
        except OSError as error:
            raise StorageFailed(
                f"syncing the directory {path} failed: {error.strerror}", path=path, errno=error.errno
            ) from error
        finally:
            os.close(fd)

    def free_bytes(self, path: str) -> tuple[int, int]:
        try:
            status = os.statvfs(path)
        except OSError as error:
            raise storage_error(error, "looking at", path) from error
        return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize

    def device(self, path: str) -> int:
        try:
            return os.stat(path).st_dev
        except OSError as error:
            raise storage_error(error, "looking at", path) from error

    def lock(self, path: str) -> FileLock:
        """See `Files.lock`. flock(2): bound to the open file description, which helper processes inherit."""
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

    def note_poison(self, fd: int, error: StorageFailed) -> None:
        """Remembers a failed sync for handles to come."""
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            self._poison[(status.st_dev, status.st_ino)] = error

    def poison_of(self, fd: int) -> StorageFailed | None:
        """The failure that an earlier handle to the same file met."""
        if not self._poison:
            return None
        status = os.fstat(fd)
        return self._poison.get((status.st_dev, status.st_ino))


def _after(parts: Sequence[Buffer], written: int) -> list[Buffer]:
    """What is left of `parts` after their first `written` bytes."""
    for position, part in enumerate(parts):
        if written < len(part):
            return [memoryview(part)[written:], *parts[position + 1 :]]
        written -= len(part)
    return []


if sys.platform == "darwin":

    def _sync_fd(fd: int) -> None:
        # fsync(2) stops at the drive's cache on macOS.
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)

else:

    def _sync_fd(fd: int) -> None:
        os.fdatasync(fd)
