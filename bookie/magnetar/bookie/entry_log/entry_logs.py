"""All entry logs of a bookie: one in each ledger directory is appended to, any can be read.

A ledger's entries go to one directory as long as the same directories are writable. What one directory has no room for, or
fails to take, goes to the others: the flush still holds it (rule 4: the failed file is never written or synced again).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from magnetar.proto.errors import DiskFull, MagnetarError, StorageFailed
from magnetar.runtime.files import Files

from ..disk_worker import DiskWorker
from ..index import LedgerRecord, encode_ledger_record
from ..layout import DataLayout
from ..write_cache import MemTable
from .ledger_directory import DirectoryState, LedgerDirectory
from .log_ids import LogIds
from .log_reader import LogReader, LogScans
from .log_writer import LogWriter, PlacedSlice, Record
from .records import STATE_ENTRY

_log = logging.getLogger(__name__)
T = TypeVar("T")
States = Sequence[tuple[int, LedgerRecord]]


class LogInfo(NamedTuple):
    """One log. `directory` is a number of `layout.ledgers`; `current`: it is being appended to."""

    log_id: int
    directory: int
    path: str
    bytes: int
    current: bool


class EntryLogs:
    """See the module. One `append` or `sync` at a time; reads, scans and deletions at any time."""

    def __init__(self, files: Files, worker: DiskWorker, layout: DataLayout, log_bytes: int) -> None:
        # Called once for each directory that a write or sync failed in, while others are left.
        self.on_directory_failed: Callable[[int, MagnetarError], None] = _log_failed_directory
        self._files = files
        self._worker = worker
        self._layout = layout
        self._ids = LogIds(files, worker, layout.log_ids)
        self._directories = [
            LedgerDirectory(number, path, worker, log_bytes, self._next_log, self._log_closed)
            for number, path in enumerate(layout.ledgers)
        ]
        # Directory and bytes of each log that is not current.
        self._logs: dict[int, tuple[int, int]] = {}
        # Directory of each log, current or not.
        self._directory_of: dict[int, int] = {}
        # Directories that hold something which waits for a sync.
        self._appended_to: dict[int, None] = {}
        self.reader = LogReader(files, worker, self.path_of)
        self._scans = LogScans(self.reader, self._writer_of)
        self.scan, self.statistics = self._scans.scan, self._scans.statistics

    def open(self) -> None:
        """Finds the logs; a new one is made by the first flush. Raises DataDirectoryError."""
        self._logs.clear()
        for directory in self._directories:
            for name in self._files.list(directory.path):
                log_id = self._layout.entry_log_id(name)
                if log_id is not None:
                    self._add(log_id, directory.number)
        self._ids.open(max(self._logs, default=0))

    def _add(self, log_id: int, directory: int) -> None:
        before = self._directory_of.get(log_id)
        if before is not None:
            raise StorageFailed(
                f"entry log {log_id:08x} is in two ledger directories, {self._layout.ledgers[before]} and "
                f"{self._layout.ledgers[directory]}; move the one that does not belong there away"
            )
        self._directory_of[log_id] = directory
        self._logs[log_id] = (directory, self.reader.size(log_id))

    # --- what there is -----------------------------------------------------------------------------------------------

    async def take_log_id(self) -> int:
        """A number that no log has or had, durably taken.

        DiskFull, or StorageFailed with details["whole_bookie"]: no directory is to blame.
        """
        try:
            return await self._ids.take()
        except DiskFull:
            raise
        except MagnetarError as error:
            raise _not_of_a_directory(error) from error

    def logs(self) -> list[LogInfo]:
        """All logs, by id."""
        found = [
            LogInfo(log_id, directory, self._layout.entry_log(directory, log_id), size, False)
            for log_id, (directory, size) in self._logs.items()
        ]
        found += [
            LogInfo(writer.log_id, directory.number, writer.path, writer.position, True)
            for directory in self._directories
            if (writer := directory.writer) is not None and writer.position
        ]
        found.sort()
        return found

    def path_of(self, log_id: int) -> str | None:
        """Where a log is; None: there is none."""
        directory = self._directory_of.get(log_id)
        return None if directory is None else self._layout.entry_log(directory, log_id)

    def directory_of(self, log_id: int) -> int | None:
        """Number of the directory that a log is in; None: there is none."""
        return self._directory_of.get(log_id)

    @property
    def directory_states(self) -> list[DirectoryState]:
        """One for each ledger directory."""
        return [directory.state for directory in self._directories]

    def free_bytes(self) -> int:
        """Of the file systems of all directories that have not failed."""
        free: dict[int, int] = {}
        for directory in self._directories:
            with contextlib.suppress(MagnetarError):
                if directory.state is not DirectoryState.FAILED:
                    free[self._files.device(directory.path)] = self._files.free_bytes(directory.path)[0]
        return sum(free.values())

    def space_of(self, directory: int) -> tuple[int, int]:
        """Free and total bytes of the file system of a directory."""
        return self._files.free_bytes(self._layout.ledgers[directory])

    def set_full(self, directory: int, full: bool) -> None:
        """What the disk watch found: a full directory is written to only when no other is left."""
        self._directories[directory].full_by_disk_watch = full
        if not full:
            self._directories[directory].full_by_append = False

    def fail_directory(self, directory: int, error: MagnetarError) -> None:
        """Nothing is written there any more. Raises `error` if no directory is left: then the bookie must stop (rule 4).

        Called after a failed write or sync outside of a flush.
        """
        if self._directories[directory].failure is not None:
            return
        writer = self._directories[directory].writer
        self._directories[directory].give_up(error)
        if writer is not None and writer.position:
            self._log_closed(writer)
        if all(other.failure is not None for other in self._directories):
            raise error
        self.on_directory_failed(directory, error)

    # --- the flush ---------------------------------------------------------------------------------------------------

    async def append(self, memtable: MemTable, states: States = ()) -> list[PlacedSlice]:
        """Appends every entry, and a state record for each of `states`, in slices of the loop; says where they are.

        Of two places of one entry the later one counts. States (entry id STATE_ENTRY) have no place in the index.
        Buffered when it returns; `sync` makes it durable. Raises DiskFull, after which nothing of it is there and the same
        can be appended again, or StorageFailed when no directory is left.
        """
        before = [(directory, directory.savepoint()) for directory in self._usable()]
        share = _Shares(memtable, states)
        placed: list[PlacedSlice] = []
        while share.left:
            try:
                numbers = self._candidates(share)
            except DiskFull:
                for directory, point in before:
                    if directory.failure is None:
                        await self._guarded(directory, directory.roll_back(point))
                raise
            share.begin_round(numbers)
            results = await _together(
                [self._directories[number].append(share.records(number)) for number in numbers]
            )
            for number, result in zip(numbers, results, strict=True):
                if isinstance(result, list):
                    self._appended_to[number] = None
                    placed += result
                    continue
                share.refused(number, result)
                if result.details.get("whole_bookie"):
                    raise result
                if not isinstance(result, DiskFull):
                    self.fail_directory(number, result)
            share.end_round()
        return placed

    def _usable(self) -> list[LedgerDirectory]:
        return [directory for directory in self._directories if directory.failure is None]

    def _candidates(self, share: _Shares) -> list[int]:
        """Directories for what is left. Raises the last directory's error when there is none."""
        left = [directory for directory in self._usable() if directory.number not in share.refusals]
        writable = [directory.number for directory in left if directory.state is DirectoryState.WRITABLE]
        if writable or left:
            return writable or [directory.number for directory in left]
        full = [error for error in share.refusals.values() if isinstance(error, DiskFull)]
        if full:
            raise full[-1]
        raise StorageFailed("no ledger directory is left that can be written to; the bookie stops")

    async def _guarded(self, directory: LedgerDirectory, doing: Coroutine[Any, Any, None]) -> None:
        try:
            await doing
        except MagnetarError as error:
            self.fail_directory(directory.number, error)

    async def sync(self) -> list[int]:
        """Everything appended is durable, and so are the names of new logs (rule 12a); all directories at once.

        Returns the directories that failed meanwhile: what was appended since the last sync must then be appended again,
        and synced. Raises StorageFailed if no directory is left.
        """
        usable = self._usable()
        results = await _together([directory.sync() for directory in usable])
        for directory, result in zip(usable, results, strict=True):
            if isinstance(result, MagnetarError):
                self.fail_directory(directory.number, result)
        # A compaction may have given one up since the append: then what the flush appended there is not synced.
        appended, self._appended_to = self._appended_to, {}
        return [number for number in appended if self._directories[number].failure is not None]

    async def _next_log(self, directory: int) -> tuple[int, str]:
        log_id = await self.take_log_id()
        self._directory_of[log_id] = directory
        return log_id, self._layout.entry_log(directory, log_id)

    def _log_closed(self, writer: LogWriter) -> None:
        directory = self._directory_of[writer.log_id]
        self._logs[writer.log_id] = (directory, writer.position)

    def _writer_of(self, log_id: int) -> LogWriter | None:
        for directory in self._directories:
            if directory.writer is not None and directory.writer.log_id == log_id:
                return directory.writer
        return None

    # --- compaction and deletion -------------------------------------------------------------------------------------

    def adopt(self, info: LogInfo) -> None:
        """A log that was written outside of a flush has its final name now, durably; it is read from now on."""
        assert info.log_id not in self._directory_of, "a log id is used once"
        self._directory_of[info.log_id] = info.directory
        self._logs[info.log_id] = (info.directory, info.bytes)

    async def delete(self, log_id: int) -> None:
        """Deletes a log that is not current, durably when it returns. It is no error if the log is missing."""
        known = self._logs.get(log_id)
        if known is None:
            assert log_id not in self._directory_of, "a current log is never deleted"
            return
        path = self._layout.entry_log(known[0], log_id)
        del self._logs[log_id], self._directory_of[log_id]
        self.reader.forget(log_id)
        self._scans.forget(log_id)
        await self._worker.delete(path)
        await self._worker.sync(os.path.dirname(path))

    async def close(self) -> None:
        """Closes the current logs with their footers, durably."""
        for directory in self._usable():
            await directory.close()
        self.abandon()

    def abandon(self) -> None:
        """Closes all files without writing anything."""
        self.reader.close()
        for directory in self._directories:
            directory.abandon()


class _Shares:
    """Assigns the ledgers of one flush to directories, round by round: what one refused goes to the others in the next."""

    def __init__(self, memtable: MemTable, states: States) -> None:
        self._memtable = memtable
        self._states = states
        # The directories of each round so far, and of the current one.
        self._rounds: list[list[int]] = []
        # The errors of the directories that did not take their share.
        self.refusals: dict[int, MagnetarError] = {}
        self.left = bool(memtable.entries or states)

    def begin_round(self, numbers: list[int]) -> None:
        """These take what is left."""
        self._rounds.append(numbers)
        self.left = False

    def refused(self, number: int, error: MagnetarError) -> None:
        """A directory took nothing of this round."""
        self.refusals[number] = error
        self.left = True

    def end_round(self) -> None:
        """Rounds that only repeat "all of it" are not asked again."""
        if all(number in self.refusals for numbers in self._rounds for number in numbers):
            self._rounds.clear()

    def _place(self, ledger_id: int) -> int:
        """The directory that takes the ledger in this round; -1: it is somewhere already."""
        *earlier, current = self._rounds
        for numbers in earlier:
            if numbers[ledger_id % len(numbers)] not in self.refusals:
                return -1
        return current[ledger_id % len(current)]

    def records(self, number: int) -> Iterator[Record]:
        """The share of one directory in this round, ledger by ledger."""
        everything = len(self._rounds) == 1 and len(self._rounds[0]) == 1
        yield from self._memtable.records(
            None if everything else lambda ledger_id: self._place(ledger_id) == number
        )
        for ledger_id, record in self._states:
            if everything or self._place(ledger_id) == number:
                yield ledger_id, STATE_ENTRY, encode_ledger_record(record)


async def _together(doing: Sequence[Coroutine[Any, Any, T]]) -> list[T | MagnetarError]:
    """Runs all to their ends; raises what is no MagnetarError."""
    if len(doing) == 1:
        try:
            return [await doing[0]]
        except MagnetarError as error:
            return [error]
    results = await asyncio.gather(*doing, return_exceptions=True)
    found: list[T | MagnetarError] = []
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, MagnetarError):
            raise result
        found.append(result)
    return found


def _not_of_a_directory(error: MagnetarError) -> StorageFailed:
    """The file of log ids belongs to the whole bookie: giving a ledger directory up for its failure would not help."""
    return StorageFailed(error.message, **error.details, whole_bookie=True)


def _log_failed_directory(directory: int, error: MagnetarError) -> None:
    _log.critical("ledger directory %d is not written to any more: %s", directory, error)
