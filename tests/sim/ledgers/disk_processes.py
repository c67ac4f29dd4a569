"""Stand-ins for the disk worker and the journal writer that work beside the bookie, as the shipped processes do.

`InlineDiskWorker` and `InlineJournalDevice` do a whole request in one step of the loop, so nothing ever happens between its
parts. Here each request is taken up some time after it was made, a write is done in two parts, and what is done is heard of
later still; the bookie goes on meanwhile, and a crash may find it anywhere in between. The order is that of the processes:
one queue for each directory and kind of work in the worker, one group after another in the journal.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from magnetar.bookie.components import BookieComponents
from magnetar.bookie.journal.records import GROUP_ALIGNMENT
from magnetar.proto.errors import DiskFull, MagnetarError, StorageFailed
from magnetar.runtime.files import Files
from support.inline_devices import InlineDiskWorker, InlineJournalDevice, device_maker

_RETRY_FULL_S = 0.5
# Usually at once, at times long enough for a checkpoint to pass.
_STEP_S = (0.0, 0.0, 20e-6, 300e-6, 3e-3)


class ProcessLikeDiskWorker(InlineDiskWorker):
    """See DiskWorker. What was asked for is done whether or not the caller still waits."""

    def __init__(self, files: Files, rng: random.Random) -> None:
        super().__init__(files)
        self._rng = rng
        self._queues: dict[tuple[str, str], asyncio.Task[None]] = {}  # (kind, directory) -> its last request

    async def sync(self, path: str) -> None:
        """See DiskWorker."""
        await self._queued("sync", path, lambda: super(ProcessLikeDiskWorker, self).sync(path))

    async def create(self, path: str) -> None:
        """See DiskWorker."""
        await self._queued("write", path, lambda: super(ProcessLikeDiskWorker, self).create(path))

    async def write(self, path: str, position: int, parts: Sequence[bytes]) -> None:
        """See DiskWorker."""
        data = b"".join(parts)

        async def write() -> None:
            half = self._rng.randrange(len(data) + 1)
            await super(ProcessLikeDiskWorker, self).write(path, position, [data[:half]])
            await self._step()
            await super(ProcessLikeDiskWorker, self).write(path, position + half, [data[half:]])

        await self._queued("write", path, write)

    async def truncate(self, path: str, size: int) -> None:
        """See DiskWorker."""
        await self._queued("write", path, lambda: super(ProcessLikeDiskWorker, self).truncate(path, size))

    async def prepare(self, path: str, size: int, source: str = "", *, hurry: bool = False) -> None:
        """See DiskWorker."""
        await self._queued(
            "prepare", path, lambda: super(ProcessLikeDiskWorker, self).prepare(path, size, source)
        )

    async def replace(self, path: str, data: bytes) -> None:
        """See DiskWorker."""
        await self._queued("sync", path, lambda: super(ProcessLikeDiskWorker, self).replace(path, data))

    async def rename(self, source: str, target: str) -> None:
        """See DiskWorker."""
        await self._queued("sync", source, lambda: super(ProcessLikeDiskWorker, self).rename(source, target))

    async def delete(self, path: str) -> None:
        """See DiskWorker."""
        await self._queued("sync", path, lambda: super(ProcessLikeDiskWorker, self).delete(path))

    async def _queued(self, kind: str, path: str, work: Callable[[], Awaitable[None]]) -> None:
        queue = (kind, os.path.dirname(path))
        before = self._queues.get(queue)

        async def do() -> None:
            if before is not None:
                await asyncio.wait([before])
            await self._step()
            await work()

        task = self._queues[queue] = asyncio.get_running_loop().create_task(do())
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(task)
        await self._step()

    async def _step(self) -> None:
        await asyncio.sleep(self._rng.choice(_STEP_S))


class ProcessLikeJournalDevice(InlineJournalDevice):
    """See JournalDevice. A group is written, synced, and heard of, at times of their own."""

    def __init__(
        self, files: Files, path_of: Callable[[int], str], rng: random.Random, **options: Any
    ) -> None:
        super().__init__(files, path_of, **options)
        self._rng = rng
        self._requested = 0
        self._writer: asyncio.Task[None] | None = None

    @property
    def requested_offset(self) -> int:
        """See JournalDevice."""
        return max(self._durable, self._requested)

    def _schedule(self, wait_s: float) -> None:
        self._requested = self._end
        super()._schedule(wait_s)

    def _write_groups(self) -> None:
        self._scheduled = None
        if not self._failed and self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._work_off())

    async def _work_off(self) -> None:
        work = self._work
        try:
            while work and (isinstance(work[0], int) or self._durable < self._requested):
                item = work.popleft()
                if isinstance(item, int):
                    self._begin_file(item)
                else:
                    await self._make_durable(b"".join(item))
        except MagnetarError as error:
            self._fail(
                error if isinstance(error, StorageFailed) else StorageFailed(str(error), **error.details)
            )
        finally:
            self._writer = None

    def _begin_file(self, sequence: int) -> None:
        assert self._file is not None
        self._file.close()
        self._file = self._files.open(self._path_of(sequence))
        self._position = 0

    async def _make_durable(self, group: bytes) -> None:
        assert self._file is not None
        padded = group + bytes(-len(group) % GROUP_ALIGNMENT)
        half = self._rng.randrange(len(padded))
        for begin, part in ((0, padded[:half]), (half, padded[half:])):
            await self._step()
            while True:
                try:
                    self._file.write_at(self._position + begin, [part])
                    break
                except DiskFull:
                    self._notify_space(True)
                    await asyncio.sleep(_RETRY_FULL_S)
        self._notify_space(False)
        await self._step()
        self._file.sync()
        await self._step()
        self._position += len(padded)
        self._durable += len(group)
        self.on_durable(self._durable)

    async def _step(self) -> None:
        await asyncio.sleep(self._rng.choice(_STEP_S))

    async def close(self, *, wait: bool = True) -> None:
        """See JournalDevice."""
        if wait:
            self.sync()
            while self._scheduled is not None or self._writer is not None:
                await asyncio.sleep(0.001)
        await super().close(wait=False)


def with_processes(
    components: BookieComponents, rng: random.Random, group_max_wait_ms: float
) -> BookieComponents:
    """`inline_components`, with these in place of what works in one step."""
    files = components.files
    devices = device_maker(
        partial(ProcessLikeJournalDevice, rng=rng, group_max_wait_ms=group_max_wait_ms), files
    )
    return dataclasses.replace(
        components, disk_worker=ProcessLikeDiskWorker(files, rng), make_journal_device=devices
    )
