"""A simulated disk: what was not synced can be lost, torn and reordered; any call can fail or be the last one.

`SimDisk` is the device and outlives processes; `disk.mount(process)` gives the `Files` of one process. Calls are
counted, so a test can crash at every one of them (scorecard 7) or fail every one (scorecard 15).

    disk.lose_power()                 what sync and sync_directory made durable stays; of the rest each sector, each page and
                                      each directory entry survives or not, as the seed has it
    disk.fail(kind, path, errno_)     the next matching call fails; a failed sync also loses what it should have saved, at
                                      least a page of it: the cache shows it until it is dropped, and a second sync would
                                      not notice (rule 4)
    disk.at_call(n, action)           calls `action` in place of the n-th call from now on; it may kill the process
    disk.flip_bit(path)               silent damage

A file poisons itself after a failed sync or an EIO, as OsFiles does. The kill of a process alone loses nothing here: the
page cache is the machine's.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from magnetar.proto.errors import DataDirectoryError, DiskFull, MagnetarError, StorageFailed
from support.sim.inode import PAGE_BYTES, Inode
from support.sim.namespace import Namespace
from support.sim.process import ProcessKilled, SimProcess
from support.sim.trace import Trace, digest

Buffer = bytes | bytearray | memoryview

# Kinds of calls that change the disk; reads are counted apart, since crashing at a read tells nothing new.
CHANGING = ("open", "write", "truncate", "sync", "rename", "delete", "mkdir", "sync_directory")
_OPERATOR = (errno.ENOENT, errno.EACCES, errno.EROFS, errno.EEXIST, errno.EISDIR, errno.ENOTDIR)


@dataclass
class Fault:
    """A failure that waits for its call."""

    kind: str  # of call
    path: str  # part of the path
    error: int  # errno
    skip: int  # matching calls that still pass
    times: int  # how often it fires


class SimDisk:
    """The device. `rng` decides what a crash loses; `consume` is called with the time for which a sync blocks its caller."""

    def __init__(
        self,
        rng: random.Random,
        *,
        trace: Trace | None = None,
        consume: Callable[[float], None] | None = None,
        capacity_bytes: int = 1 << 40,
        uncached_reads: float = 0.0,
    ) -> None:
        self.rng = rng
        self.trace = trace if trace is not None else Trace()
        self.capacity_bytes = capacity_bytes
        self.uncached_reads = uncached_reads  # chance that read_cached answers None
        self.early_writeback = 0.05  # chance that a write makes some older unsynced pages durable
        self.sync_seconds = (50e-6, 1e-3)
        self.names = Namespace()
        self.calls = 0  # changing calls so far
        self.locks: dict[str, SimFileLock] = {}
        self._consume = consume if consume is not None else lambda seconds: None
        self._faults: list[Fault] = []
        self._actions: dict[int, Callable[[], None]] = {}

    def mount(self, process: SimProcess | None = None) -> SimFiles:
        """The file system as one process sees it; when the process dies, its handles and locks end."""
        files = SimFiles(self, process)
        if process is not None:
            process.at_death(files.die)
        return files

    # --- faults --------------------------------------------------------------------------------------------------

    def fail(
        self, kind: str, path: str = "", error: int = errno.EIO, *, skip: int = 0, times: int = 1
    ) -> None:
        """The next call of this kind whose path contains `path` fails, after `skip` that pass."""
        assert kind in (*CHANGING, "read"), kind
        self._faults.append(Fault(kind, path, error, skip, times))

    def at_call(self, number: int, action: Callable[[], None]) -> None:
        """`action` runs just before the changing call `number` (from 0, as `calls` counts)."""
        self._actions[number] = action

    def clear_faults(self) -> None:
        """What was planted and has not fired will not fire."""
        self._faults.clear()
        self._actions.clear()

    def lose_power(self) -> None:
        """Crash of the machine. Every mount must be dead or given up: use new ones."""
        lost_names = self.names.lose_power(self.rng)
        lost_pages = 0
        for inode in self.names.inodes():
            lost_pages += inode.lose_power(self.rng)
        self.locks.clear()
        self.trace.fault("power_loss", f"names={lost_names}", f"pages={lost_pages}")
        for name, count in (("lost_name", lost_names), ("lost_page", lost_pages)):
            if count:
                self.trace.faults[name] += count

    def flip_bit(self, path: str) -> None:
        """Damages one bit of a file, on the device and in the cache."""
        inode = self.names.file(path)
        assert inode is not None, path
        assert inode.size, path
        offset = self.rng.randrange(inode.size)
        inode.flip(offset, self.rng.randrange(8))
        self.trace.fault("bit_flip", path, offset)

    def files(self) -> list[str]:
        """Paths of all files, sorted."""
        return self.names.paths()

    def used_bytes(self) -> int:
        """Bytes that files take, in whole pages."""
        return self.names.pages() * PAGE_BYTES

    def call(self, kind: str, path: str, detail: object = "") -> None:
        """Every call of a mount passes here first. Raises OSError for a fault whose turn it is."""
        if kind != "read":
            number, self.calls = self.calls, self.calls + 1
            action = self._actions.pop(number, None)
            if action is not None:
                self.trace.fault("crash_at_call", number, kind, path)
                action()
            self.trace.record(kind, path, detail)
        for fault in self._faults:
            if fault.kind == kind and fault.path in path:
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                if not fault.times:
                    self._faults.remove(fault)
                self.trace.fault(f"{kind}_{errno.errorcode[fault.error]}", path)
                raise OSError(fault.error, os.strerror(fault.error))

    def block(self) -> None:
        """A sync takes its time."""
        self._consume(self.rng.uniform(*self.sync_seconds))


class SimFiles:
    """magnetar.runtime.files.Files on a simulated disk. Made by `SimDisk.mount`."""

    def __init__(self, disk: SimDisk, process: SimProcess | None) -> None:
        self.disk = disk
        # First failure of each file; as OsFiles has it, a new process does not know of it.
        self.poison: dict[Inode, MagnetarError] = {}
        self._process = process
        self._dead = False

    def die(self) -> None:
        """The process has died: its handles no longer work, its locks are free."""
        self._dead = True
        for path in [path for path, lock in self.disk.locks.items() if lock.files is self]:
            del self.disk.locks[path]

    def check_alive(self) -> None:
        """Code of a dead process that still unwinds must not reach the disk."""
        if self._dead:
            raise ProcessKilled("the process that mounted this disk is dead")

    def call(self, kind: str, path: str, doing: str, detail: object = "") -> None:
        """Counts the call; raises what OsFiles would raise."""
        self.check_alive()
        try:
            self.disk.call(kind, path, detail)
        except OSError as error:
            raise storage_error(error, doing, path) from error
        self.check_alive()

    def open(
        self, path: str, *, create: bool = False, exclusive: bool = False, read_only: bool = False
    ) -> SimFile:
        """See magnetar.runtime.files."""
        path = os.path.abspath(path)
        inode = self.disk.names.file(path)
        if inode is None and (create or exclusive):
            self.call("open", path, "opening")
            if not self.disk.names.is_directory(os.path.dirname(path)):
                raise storage_error(OSError(errno.ENOENT, "No such file or directory"), "opening", path)
            inode = self.disk.names.create(path)
        elif inode is None or exclusive:
            self.check_alive()
            code = errno.ENOENT if inode is None else errno.EEXIST
            raise storage_error(OSError(code, os.strerror(code)), "opening", path)
        self.check_alive()
        return SimFile(self, path, inode, read_only)

    def read(self, path: str) -> bytes:
        """See magnetar.runtime.files."""
        file = self.open(path, read_only=True)
        return file.read_at(0, file.size())

    def write_atomically(self, path: str, data: bytes) -> None:
        """See magnetar.runtime.files: the same calls in the same order as OsFiles makes."""
        temporary = path + ".tmp"
        self.delete(temporary)
        file = self.open(temporary, exclusive=True)
        file.write_at(0, [data])
        file.sync()
        self.rename(temporary, path)
        self.sync_directory(os.path.dirname(os.path.abspath(path)))

    def exists(self, path: str) -> bool:
        """See magnetar.runtime.files."""
        self.check_alive()
        return self.disk.names.exists(os.path.abspath(path))

    def list(self, directory: str) -> list[str]:
        """See magnetar.runtime.files."""
        self.check_alive()
        directory = os.path.abspath(directory)
        if not self.disk.names.is_directory(directory):
            raise storage_error(OSError(errno.ENOENT, "No such file or directory"), "listing", directory)
        return self.disk.names.names(directory)

    def make_directory(self, path: str) -> None:
        """See magnetar.runtime.files."""
        path = os.path.abspath(path)
        if self.disk.names.is_directory(path):
            return
        parent = os.path.dirname(path)
        self.make_directory(parent)
        self.call("mkdir", path, "making the directory")
        self.disk.names.make_directory(path)
        self.sync_directory(parent)

    def rename(self, source: str, target: str) -> None:
        """See magnetar.runtime.files."""
        source, target = os.path.abspath(source), os.path.abspath(target)
        self.call("rename", source, f"renaming to {target}:", target)
        if self.disk.names.file(source) is None:
            raise storage_error(
                OSError(errno.ENOENT, "No such file or directory"), f"renaming to {target}:", source
            )
        self.disk.names.rename(source, target)

    def delete(self, path: str) -> None:
        """See magnetar.runtime.files."""
        path = os.path.abspath(path)
        if self.disk.names.file(path) is None:
            self.check_alive()
            return
        self.call("delete", path, "deleting")
        self.disk.names.delete(path)

    def sync_directory(self, path: str) -> None:
        """See magnetar.runtime.files."""
        path = os.path.abspath(path)
        self.check_alive()
        if not self.disk.names.is_directory(path):
            raise storage_error(OSError(errno.ENOENT, "No such file or directory"), "opening", path)
        try:
            self.disk.call("sync_directory", path)
        except OSError as error:
            raise StorageFailed(
                f"syncing the directory {path} failed: {error.strerror}", path=path, errno=error.errno
            ) from error
        self.check_alive()
        self.disk.names.sync(path)
        self.disk.block()

    def free_bytes(self, path: str) -> tuple[int, int]:
        """See magnetar.runtime.files."""
        self.check_alive()
        capacity = self.disk.capacity_bytes
        return max(0, capacity - self.disk.used_bytes()), capacity

    def device(self, path: str) -> int:
        """See magnetar.runtime.files."""
        return 1

    def lock(self, path: str) -> SimFileLock:
        """See magnetar.runtime.files."""
        self.check_alive()
        path = os.path.abspath(path)
        if path in self.disk.locks:
            raise DataDirectoryError(
                f"{os.path.dirname(path)} is in use by another process", path=path, locked=True
            )
        self.open(path, create=True)
        lock = self.disk.locks[path] = SimFileLock(self, path)
        return lock


class SimFileLock:
    """A held lock. Made by `SimFiles.lock`."""

    def __init__(self, files: SimFiles, path: str) -> None:
        self.files = files
        self.path = path

    def fileno(self) -> int:
        """There is no descriptor to inherit."""
        return -1

    def release(self) -> None:
        """May be called twice."""
        if self.files.disk.locks.get(self.path) is self:
            del self.files.disk.locks[self.path]


class SimFile:
    """magnetar.runtime.files.File on a simulated disk."""

    def __init__(self, files: SimFiles, path: str, inode: Inode, read_only: bool) -> None:
        self.path = path
        self._files = files
        self._disk = files.disk
        self._inode = inode
        self._read_only = read_only
        self._closed = False

    def write_at(self, offset: int, parts: Sequence[Buffer]) -> int:
        """See magnetar.runtime.files. A full disk takes the first pages that fit."""
        data = b"".join(parts)
        self._refuse_poisoned()
        self._call("write", "writing to", f"{offset}+{len(data)} {digest(data)}")
        if self._read_only:
            raise storage_error(OSError(errno.EBADF, "Bad file descriptor"), "writing to", self.path)
        disk = self._disk
        if disk.rng.random() < disk.early_writeback:
            self._inode.write_back_some(disk.rng)
        fits = self._fits(offset, len(data))
        self._inode.write(offset, data[:fits])
        if fits < len(data):
            raise self._full()
        return len(data)

    def read_at(self, offset: int, length: int) -> bytes:
        """See magnetar.runtime.files."""
        self._call("read", "reading")
        return self._inode.read(offset, length)

    def read_cached(self, offset: int, length: int) -> bytes | None:
        """See magnetar.runtime.files. None by chance, each time anew."""
        self._call("read", "reading")
        if self._disk.uncached_reads and self._disk.rng.random() < self._disk.uncached_reads:
            self._disk.trace.fault("uncached_read", self.path, offset)
            self._inode.drop_clean(offset, length)
            return None
        return self._inode.read(offset, length)

    def will_need(self, offset: int, length: int) -> None:
        """Advice only."""

    def drop_cache(self, offset: int, length: int) -> None:
        """See magnetar.runtime.files."""
        self._inode.drop_clean(offset, length)

    def zero_fill(self, offset: int, length: int) -> None:
        """See magnetar.runtime.files."""
        self._refuse_poisoned()
        self._call("write", "writing to", f"{offset}+{length} zeros")
        fits = self._fits(offset, length)
        self._inode.zero_fill(offset, fits)
        if fits < length:
            raise self._full()

    def truncate(self, size: int) -> None:
        """See magnetar.runtime.files."""
        self._refuse_poisoned()
        self._call("truncate", "truncating", size)
        self._inode.truncate(size)

    def size(self) -> int:
        """See magnetar.runtime.files."""
        self._files.check_alive()
        return self._inode.size

    def sync(self) -> None:
        """See magnetar.runtime.files."""
        self._refuse_poisoned()
        try:
            self._call("sync", "syncing")
        except MagnetarError as error:
            self._inode.sync_failed(self._disk.rng)
            raise self._poison(error) from error
        self._inode.sync()
        self._disk.block()

    def close(self) -> None:
        """See magnetar.runtime.files."""
        self._closed = True

    def fileno(self) -> int:
        """There is no descriptor to hand on."""
        return -1

    def _fits(self, offset: int, length: int) -> int:
        """Bytes of a write that find room: whole pages behind the end of the file, and all that is in it already."""
        inode, disk = self._inode, self._disk
        if not inode.pages_to_add(offset, length):  # asked first: the space in use is a sum over all files
            return length
        free = max(0, disk.capacity_bytes - disk.used_bytes()) // PAGE_BYTES
        return min(length, max(0, (inode.pages() + free) * PAGE_BYTES - offset))

    def _full(self) -> MagnetarError:
        self._disk.trace.fault("disk_full", self.path)
        return storage_error(OSError(errno.ENOSPC, "No space left on device"), "writing to", self.path)

    def _call(self, kind: str, doing: str, detail: object = "") -> None:
        assert not self._closed, f"{doing} {self.path} after it was closed"
        try:
            self._files.call(kind, self.path, doing, detail)
        except StorageFailed as error:
            if kind in ("write", "truncate") and error.details.get("errno") == errno.EIO:
                self._inode.sync_failed(self._disk.rng)
                raise self._poison(error) from error
            raise

    def _poison(self, error: MagnetarError) -> StorageFailed:
        self._files.poison.setdefault(self._inode, error)
        return self._refused(self._files.poison[self._inode])

    def _refuse_poisoned(self) -> None:
        self._files.check_alive()
        first = self._files.poison.get(self._inode) if self._files.poison else None
        if first is not None:
            raise self._refused(first)

    def _refused(self, first: MagnetarError) -> StorageFailed:
        return StorageFailed(first.message, path=self.path, errno=first.details.get("errno"))


def storage_error(error: OSError, doing: str, path: str) -> MagnetarError:
    """The error that OsFiles raises for what the kernel says."""
    text = f"{doing} {path} failed: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(text, path=path, errno=error.errno)
    if error.errno in _OPERATOR:
        return DataDirectoryError(text, path=path, errno=error.errno)
    return StorageFailed(text, path=path, errno=error.errno)
