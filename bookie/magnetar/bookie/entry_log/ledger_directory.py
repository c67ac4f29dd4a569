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
from .log_writer import Kept, LogWriter, PlacedSlice, Record, in_slices

__all__ = ["DirectoryState", "LedgerDirectory"]


class DirectoryState(enum.StrEnum):
    """See the module."""

    WRITABLE = "writable"
    FULL = "full"
    FAILED = "failed"


class Before(NamedTuple):
    """The current log as it was, to take an append back."""

    writer: LogWriter | None
    kept: Kept
    appended: bool


class LedgerDirectory:
    """Appends to one log after another. One call at a time.

    `next_log` gives the id and path of a log to begin; `closed_log` is told of one that is finished.
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
        # Set by the disk watch; and by an append, until one succeeds or the disk watch says otherwise.
        self.told_full = False
        self.found_full = False
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
        return DirectoryState.FULL if self.told_full or self.found_full else DirectoryState.WRITABLE

    def before(self) -> Before:
        """For `take_back`."""
        kept = self.writer.keep() if self.writer is not None else Kept(0, {})
        return Before(self.writer, kept, self._appended)

    async def append(self, records: Iterable[Record]) -> list[PlacedSlice]:
        """Appends everything and says where it is. Buffered when it returns.

        Raises DiskFull, and then nothing was appended; after any other error the directory must be given up.
        """
        before = self.before()
        placed: list[PlacedSlice] = []
        try:
            for part in in_slices(records, self._log_bytes):
                writer = await self._writable()
                self._appended = True
                placed.append(await writer.append_slice(part))
                self._check_not_failed()
        except DiskFull:
            self.found_full = True
            await self.take_back(before)
            raise
        self.found_full = False
        return placed

    async def take_back(self, before: Before) -> None:
        """Gives back the space of what was appended since, to make the next attempt possible; finished logs stay."""
        if self.writer is not None:
            kept = before.kept if self.writer is before.writer else Kept(0, {})
            await self.writer.take_back(kept)
        self._appended = before.appended

    async def _writable(self) -> LogWriter:
        if self.writer is not None and self.writer.position >= self._log_bytes:
            await self._close_log()
        if self.writer is None:
            log_id, path = await self._next_log(self.number)
            self._check_not_failed()
            self.writer = LogWriter(self._worker, path, log_id)
            self._named = True
        return self.writer

    def _check_not_failed(self) -> None:
        """A compaction may give the directory up while a flush appends to it: then this part of the flush goes elsewhere."""
        if self.failure is not None:
            raise self.failure

    async def _close_log(self) -> None:
        """The log is durable with its footer before the next one is begun; its name is once `sync` returns."""
        writer = self.writer
        assert writer is not None
        try:
            await writer.finish()
            await writer.sync()
        except DiskFull:
            self.found_full = True  # no room for the footer: it can be counted again
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
        """Lets go of the current log as it is."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    def give_up(self, error: MagnetarError) -> None:
        """A write or sync failed: FAILED."""
        self.failure = error
        self._appended = self._named = False
        self.abandon()

    def __repr__(self) -> str:
        return f"<ledger directory {self.number} {os.path.basename(self.path)} {self.state}>"
