"""One ledger directory: its current log, and whether it can be written to.

WRITABLE <-> FULL     a flush found no space, or the disk watch says so; tried again only when nothing else is left
either   --> FAILED   a write or sync failed; nothing is written there until the next start (rule 4)
"""

from __future__ import annotations

import enum
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from magnetar.proto.errors import DiskFull, MagnetarError

from ..disk_worker import DiskWorker
from .log_writer import LogSavepoint, LogWriter, PlacedSlice, Record, in_slices
from .records import LOG_LEDGERS


class DirectoryState(enum.StrEnum):
    """See the module."""

    WRITABLE = "writable"
    FULL = "full"
    FAILED = "failed"


class DirectorySavepoint(NamedTuple):
    """The current log as it was before an append, for `LedgerDirectory.roll_back`."""

    writer: LogWriter | None
    log: LogSavepoint
    appended: bool


class LedgerDirectory:
    """Appends to one log after another. One call at a time.

    `next_log` returns the id and path of a log to begin; `closed_log` is called with a writer that is finished.
    """

    def __init__(
        self,
        number: int,
        path: str,
        worker: DiskWorker,
        log_bytes: int,
        next_log: Callable[[int], Awaitable[tuple[int, str]]],
        closed_log: Callable[[LogWriter], None],
    ) -> None:
        self.number = number
        self.path = path
        # Set by the disk watch.
        self.full_by_disk_watch = False
        # Set by an append that found no space, until one succeeds or the disk watch finds space.
        self.full_by_append = False
        self.failure: MagnetarError | None = None
        self.writer: LogWriter | None = None
        self._worker = worker
        self._log_bytes = log_bytes
        self._next_log = next_log
        self._closed_log = closed_log
        # Whether something waits for a sync: bytes, and the names of new logs.
        self._appended = False
        self._named = False

    @property
    def state(self) -> DirectoryState:
        """See the module."""
        if self.failure is not None:
            return DirectoryState.FAILED
        return (
            DirectoryState.FULL if self.full_by_disk_watch or self.full_by_append else DirectoryState.WRITABLE
        )

    def savepoint(self) -> DirectorySavepoint:
        """The present state, for `roll_back`."""
        log = self.writer.savepoint() if self.writer is not None else LogSavepoint(0, {})
        return DirectorySavepoint(self.writer, log, self._appended)

    async def append(self, records: Iterable[Record]) -> list[PlacedSlice]:
        """Appends everything and says where it is. Buffered when it returns.

        Raises DiskFull, and then nothing was appended; after any other error the directory must be given up.
        """
        before = self.savepoint()
        placed: list[PlacedSlice] = []
        try:
            for part in in_slices(records, self._log_bytes):
                writer = await self._writable()
                self._appended = True
                placed.append(await writer.append_slice(part))
                self._check_not_failed()
        except DiskFull:
            self.full_by_append = True
            await self.roll_back(before)
            raise
        self.full_by_append = False
        return placed

    async def roll_back(self, before: DirectorySavepoint) -> None:
        """Frees the space of what was appended since the savepoint, for the next attempt; finished logs stay."""
        if self.writer is not None:
            log = before.log if self.writer is before.writer else LogSavepoint(0, {})
            await self.writer.roll_back(log)
        self._appended = before.appended

    async def _writable(self) -> LogWriter:
        writer = self.writer
        if writer is not None and (writer.position >= self._log_bytes or len(writer.ledgers) >= LOG_LEDGERS):
            await self._close_log()
        if self.writer is None:
            log_id, path = await self._next_log(self.number)
            self._check_not_failed()
            self.writer = LogWriter(self._worker, path, log_id)
            self._named = True
        return self.writer

    def _check_not_failed(self) -> None:
        """Raises if a compaction gave the directory up during a flush: that part of the flush goes elsewhere."""
        if self.failure is not None:
            raise self.failure

    async def _close_log(self) -> None:
        """Finishes the current log, durably with its footer. Its name is durable after `sync`."""
        writer = self.writer
        assert writer is not None
        try:
            await writer.finish()
            await writer.sync()
        except DiskFull:
            self.full_by_append = True  # no room for the footer: it can be counted again
        writer.close()
        self.writer = None
        self._closed_log(writer)

    async def sync(self) -> None:
        """Everything appended is durable, and so are the names of new logs (rule 12a).

        After an error the directory must be given up, and what was appended since the last sync be appended elsewhere.
        """
        if self._appended and self.writer is not None:
            await self.writer.sync()
        if self._named:
            await self._worker.sync(self.path)
            # A log that found no space to be made gets its name later.
            self._named = self.writer is not None and not self.writer.created
        if self._appended and self.writer is not None:
            await self.writer.note_synced()
        self._appended = False

    async def close(self) -> None:
        """Closes the current log with its footer, durably."""
        if self.writer is not None:
            if self.writer.position:
                await self._close_log()
            self.writer = None
        await self.sync()

    def abandon(self) -> None:
        """Leaves the current log as it is, without a footer."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    def give_up(self, error: MagnetarError) -> None:
        """Marks the directory FAILED after a failed write or sync."""
        self.failure = error
        self._appended = self._named = False
        self.abandon()

    def __repr__(self) -> str:
        return f"<ledger directory {self.number} {os.path.basename(self.path)} {self.state}>"
