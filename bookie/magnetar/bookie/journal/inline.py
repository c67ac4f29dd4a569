"""A journal device that writes and syncs in the loop, over `files`: for the simulation.

Each sync stops the loop for as long as the disk takes (0.1 to 10 ms), which is why the daemon uses the ring.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from magnetar.proto.errors import MagnetarError, StorageFailed
from magnetar.runtime.files import File, Files

from .device import StreamOffsets
from .records import GROUP_ALIGNMENT

__all__ = ["InlineJournalDevice"]

_ZEROS = memoryview(bytes(GROUP_ALIGNMENT))


class InlineJournalDevice(StreamOffsets):
    """See `JournalDevice`. `capacity_bytes` bounds what is appended and not yet durable."""

    def __init__(
        self,
        files: Files,
        path_of: Callable[[int], str],
        *,
        capacity_bytes: int = 32 << 20,
        sync_data: bool = True,
    ) -> None:
        super().__init__(capacity_bytes)
        self._files = files
        self._path_of = path_of
        self._sync_data = sync_data
        self._file: File | None = None
        self._parts: list[bytes] = []
        # (index in _parts before which the file changes, sequence)
        self._rolls: list[tuple[int, int]] = []
        self._scheduled: asyncio.Handle | None = None
        self._failed = False

    async def start(self, sequence: int, offset: int) -> None:
        """See `JournalDevice`."""
        self._file = self._files.open(self._path_of(sequence))
        self._end = self._durable = offset
        self._position = 0

    def append(self, header: bytes, payload: bytes) -> None:
        """See `JournalDevice`."""
        self._parts += (header, payload)
        self._end += len(header) + len(payload)
        if self._scheduled is None:
            self._scheduled = asyncio.get_running_loop().call_soon(self._write_group)

    def roll(self, sequence: int) -> None:
        """See `JournalDevice`."""
        self._rolls.append((len(self._parts), sequence))
        if self._scheduled is None:
            self._scheduled = asyncio.get_running_loop().call_soon(self._write_group)

    async def close(self) -> None:
        """See `JournalDevice`."""
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._write_group()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_group(self) -> None:
        self._scheduled = None
        if self._failed or self._file is None:
            return
        parts, rolls, end = self._parts, self._rolls, self._end
        self._parts, self._rolls = [], []
        try:
            start = 0
            for index, sequence in rolls:
                self._write(parts[start:index])
                self._file.close()
                self._file = self._files.open(self._path_of(sequence))
                self._position = 0
                start = index
            self._write(parts[start:])
        except MagnetarError as error:
            self._failed = True
            failure = (
                error if isinstance(error, StorageFailed) else StorageFailed(str(error), **error.details)
            )
            asyncio.get_running_loop().call_soon(self.on_failure, failure)
            return
        self._durable = end
        self.on_durable(end)

    def _write(self, parts: list[bytes]) -> None:
        assert self._file is not None
        if not parts:
            return
        size = sum(map(len, parts))
        padding = -size % GROUP_ALIGNMENT
        self._file.write_at(self._position, [*parts, _ZEROS[:padding]] if padding else parts)
        if self._sync_data:
            self._file.sync()
        self._position += size + padding
