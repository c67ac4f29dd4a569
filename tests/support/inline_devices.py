"""Journal device and disk worker that do their work in the loop, over `files`: for the simulation, and tests.

Each sync stops the loop for as long as the disk takes (0.1 to 10 ms), which is why the daemon has processes for it.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from magnetar.bookie.components import BookieComponents
from magnetar.bookie.index import LocationIndex
from magnetar.bookie.journal.device import JournalDevice, ignore
from magnetar.bookie.journal.records import GROUP_ALIGNMENT
from magnetar.bookie.layout import journal_path
from magnetar.bookie.settings import BookieSettings
from magnetar.proto.errors import DataDirectoryError, DiskFull, MagnetarError, StorageFailed
from magnetar.runtime.files import File, FileLock, Files

__all__ = ["InlineDiskWorker", "InlineJournalDevice", "inline_components"]

_WARM_STEP_BYTES = 1 << 20
_RETRY_FULL_S = 0.5


class InlineJournalDevice(JournalDevice):
    """See `JournalDevice`. `capacity_bytes` bounds what is appended and not yet durable."""

    def __init__(
        self,
        files: Files,
        path_of: Callable[[int], str],
        *,
        capacity_bytes: int = 32 << 20,
        sync_data: bool = True,
        group_max_wait_ms: float = 0.0,
    ) -> None:
        """`group_max_wait_ms`: as if the disk were slow to begin with a group."""
        super().__init__(capacity_bytes)
        self._files = files
        self._path_of = path_of
        self._sync_data = sync_data
        self._zeros = memoryview(bytes(GROUP_ALIGNMENT))
        self._wait_s = group_max_wait_ms / 1000
        self._group_limit = capacity_bytes
        self._file: File | None = None
        # What is to be done, in order: the parts of a group, or the sequence of the file to go on in.
        self._work: deque[list[bytes] | int] = deque()
        self._last_bytes = 0  # of the last group in `_work`
        self._scheduled: asyncio.Handle | None = None
        self._failed = False

    async def start(self, sequence: int, offset: int) -> None:
        """See `JournalDevice`."""
        self._file = self._files.open(self._path_of(sequence))
        self._end = self._durable = offset
        self._position = 0

    def append(self, header: bytes, payload: bytes) -> None:
        """See `JournalDevice`."""
        self.append_deferred(header, payload)
        self._schedule(0.0 if self._last_bytes >= self._group_limit else self._wait_s)

    def append_deferred(self, header: bytes, payload: bytes) -> None:
        """See `JournalDevice`."""
        work = self._work
        size = len(header) + len(payload)
        if work and self._last_bytes < self._group_limit and not isinstance(work[-1], int):
            work[-1] += (header, payload)
            self._last_bytes += size
        else:
            work.append([header, payload])
            self._last_bytes = size
        self._end += size

    def sync(self) -> None:
        """See `JournalDevice`."""
        if self._work:
            self._schedule(0.0)

    @property
    def requested_offset(self) -> int:
        """See `JournalDevice`."""
        return self._durable if self._scheduled is None else self._end

    def roll(self, sequence: int) -> None:
        """See `JournalDevice`."""
        self._work.append(sequence)
        self._schedule(0.0)

    def _schedule(self, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        if self.full:
            return  # a timer tries again
        if not wait_s and isinstance(self._scheduled, asyncio.TimerHandle):
            self._scheduled.cancel()
            self._scheduled = None
        if self._scheduled is None:
            if wait_s:
                self._scheduled = loop.call_later(wait_s, self._write_groups)
            else:
                self._scheduled = loop.call_soon(self._write_groups)

    async def close(self, *, wait: bool = True) -> None:
        """See `JournalDevice`."""
        if wait:
            self.sync()
        while wait and self._scheduled is not None:
            self._scheduled.cancel()
            self._write_groups()  # which may call for another one: a new file
            if self.full:
                break
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
            if wait:
                self._fail(
                    DiskFull("the disk of the journal is full: what is not durable yet was not stored")
                )
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_groups(self) -> None:
        self._scheduled = None
        if self._failed or self._file is None:
            return
        before = self._durable
        try:
            self._do_work()
        except MagnetarError as error:
            self._fail(
                error if isinstance(error, StorageFailed) else StorageFailed(str(error), **error.details)
            )
            return
        if self._durable > before:
            self.on_durable(self._durable)

    def _do_work(self) -> None:
        assert self._file is not None
        work = self._work
        while work:
            item = work[0]
            if isinstance(item, int):
                self._file.close()
                self._file = self._files.open(self._path_of(item))
                self._position = 0
            else:
                try:
                    self._write(item)
                except DiskFull:
                    self._scheduled = asyncio.get_running_loop().call_later(_RETRY_FULL_S, self._write_groups)
                    self._notify_space(True)
                    return
                self._durable += sum(map(len, item))
            work.popleft()
        self._notify_space(False)

    def _notify_space(self, full: bool) -> None:
        if full != self.full:
            self.full = full
            self.on_space()

    def _fail(self, error: MagnetarError) -> None:
        self._failed = True
        asyncio.get_running_loop().call_soon(self.on_failure, error)

    def _write(self, parts: list[bytes]) -> None:
        """Raises DiskFull if nothing is lost and the group can be written again; StorageFailed."""
        assert self._file is not None
        size = sum(map(len, parts))
        padding = -size % GROUP_ALIGNMENT
        self._file.write_at(self._position, [*parts, self._zeros[:padding]] if padding else parts)
        if self._sync_data:
            clock = asyncio.get_running_loop().time
            before = clock()
            try:
                self._file.sync()
            except DiskFull as error:
                # Whatever the reason: a second sync would not miss what this one lost (rule 4).
                raise StorageFailed(str(error), **error.details) from error
            self.sync_seconds.observe(clock() - before)
        self.group_bytes.observe(size)
        self._position += size + padding


class InlineDiskWorker:
    """Does the work in the loop."""

    def __init__(self, files: Files) -> None:
        self.on_failure: Callable[[MagnetarError], None] = ignore
        self._files = files

    async def start(self, lock: FileLock) -> None:
        """See `DiskWorker`."""

    async def sync(self, path: str) -> None:
        """See `DiskWorker`."""
        await asyncio.sleep(0)
        try:
            file = self._files.open(path)
        except DataDirectoryError:  # a directory
            self._files.sync_directory(path)
            return
        try:
            file.sync()
        finally:
            file.close()

    async def create(self, path: str) -> None:
        """See `DiskWorker`."""
        await asyncio.sleep(0)
        self._files.open(path, exclusive=True).close()

    async def write(self, path: str, position: int, parts: Sequence[bytes]) -> None:
        """See `DiskWorker`."""
        await asyncio.sleep(0)
        file = self._files.open(path)
        try:
            file.write_at(position, parts)
        finally:
            file.close()

    async def truncate(self, path: str, size: int) -> None:
        """See `DiskWorker`."""
        await asyncio.sleep(0)
        file = self._files.open(path)
        try:
            file.truncate(size)
        finally:
            file.close()

    async def warm(self, path: str, offset: int, length: int) -> None:
        """See `DiskWorker`."""
        await asyncio.sleep(0)
        file = self._files.open(path, read_only=True)
        try:
            for start in range(offset, offset + length, _WARM_STEP_BYTES):
                file.read_at(start, min(_WARM_STEP_BYTES, offset + length - start))
        finally:
            file.close()

    def probe(self, directory: str) -> None:
        """See `DiskWorker`."""

    def silent_directories(self) -> dict[str, float]:
        """See `DiskWorker`."""
        return {}

    async def prepare(self, path: str, size: int, source: str = "", *, hurry: bool = False) -> None:
        """See `DiskWorker`."""
        await asyncio.sleep(0)
        if source:
            self._files.rename(source, path)
        file = self._files.open(path, create=True)
        try:
            present = file.size()
            if present < size:
                file.zero_fill(present, size - present)
            elif present > size:
                file.truncate(size)
            file.sync()
        finally:
            file.close()
        self._files.sync_directory(os.path.dirname(path))

    async def replace(self, path: str, data: bytes) -> None:
        """See `DiskWorker`."""
        await asyncio.sleep(0)
        self._files.write_atomically(path, data)

    async def rename(self, source: str, target: str) -> None:
        """See `DiskWorker`."""
        await asyncio.sleep(0)
        self._files.rename(source, target)

    async def delete(self, path: str) -> None:
        """See `DiskWorker`."""
        await asyncio.sleep(0)
        self._files.delete(path)

    async def close(self) -> None:
        """See `DiskWorker`."""


def inline_components(
    files: Files,
    rng: random.Random,
    open_index: Callable[[str], LocationIndex],
    group_max_wait_ms: float = 0.0,
) -> BookieComponents:
    """Components of the simulation: all work happens in the event loop, over `files`."""
    devices = device_maker(partial(InlineJournalDevice, group_max_wait_ms=group_max_wait_ms), files)
    return BookieComponents(files, rng, InlineDiskWorker(files), devices, open_index)


def device_maker(
    new_device: Callable[..., JournalDevice], files: Files
) -> Callable[[BookieSettings, str, FileLock], JournalDevice]:
    """`BookieComponents.make_journal_device` for a device that takes what InlineJournalDevice does."""

    def make_device(settings: BookieSettings, directory: str, lock: FileLock) -> JournalDevice:
        return new_device(
            files,
            lambda sequence: journal_path(directory, sequence),
            capacity_bytes=settings.journal_ring_bytes,
            sync_data=settings.journal_sync_data,
        )

    return make_device
