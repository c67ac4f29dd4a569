"""Reading from entry logs: open handles, the page cache first, every record verified; scans and statistics of whole logs."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from typing import NamedTuple

from magnetar.proto.errors import (
    DataDirectoryError,
    EntryDamaged,
    MagnetarError,
    RequestTimeout,
    StorageFailed,
)
from magnetar.runtime.files import File, Files, file_size

from ..disk_worker import DiskWorker
from ..index import Location
from ..read_budget import ReadGrant
from .log_writer import LogWriter
from .records import (
    FOOTER_END_BYTES,
    LOG_HEADER_BYTES,
    RECORD_HEADER_BYTES,
    SYNCED_ENTRY,
    Footer,
    Scanned,
    decode_footer,
    footer_bytes,
    header_fault,
    record_entry,
)
from .scan import MOST_UNREADABLE_PAGES, LogScan, scan_log_in_slices

_log = logging.getLogger(__name__)
_OPEN_LOGS = 64
_WILL_NEED_BYTES = 4 << 20


class LogReader:
    """Reads of all entry logs. The loop never waits for the disk: what is not in the page cache the disk worker reads first.

    `path_of` returns the path of a log, None if there is none. `on_damaged_log(log_id, reason)` is called when a log does
    not begin as it should: once for each time it is opened.
    """

    def __init__(self, files: Files, worker: DiskWorker, path_of: Callable[[int], str | None]) -> None:
        self.on_damaged_log: Callable[[int, str], None] = _log_damage
        self._files = files
        self._worker = worker
        self._path_of = path_of
        self._open: OrderedDict[int, File] = OrderedDict()

    async def read(
        self, ledger_id: int, wanted: Sequence[tuple[int, Location]], grant: ReadGrant | None = None
    ) -> list[bytes]:
        """Entries whose records follow each other in one log, in one read. At least the first, or EntryDamaged.

        details["missing_log"] is True when there is no such log: it may have been compacted since the index was asked.
        RequestTimeout when the disk does not answer.
        """
        first, last = wanted[0][1], wanted[-1][1]
        length = last.offset + RECORD_HEADER_BYTES + last.length - first.offset
        try:
            data = await self.span(first.log_id, first.offset, length, ahead=len(wanted) > 1, grant=grant)
        except RequestTimeout:
            raise
        except MagnetarError as error:
            raise EntryDamaged(
                f"entry {wanted[0][0]} of ledger {ledger_id} cannot be read: {error}; read another replica",
                ledger_id=ledger_id,
                entry_id=wanted[0][0],
                log_id=first.log_id,
                missing_log=error.details.get("errno") == errno.ENOENT,
            ) from error
        entries: list[bytes] = []
        for entry_id, location in wanted:
            at = location.offset - first.offset
            try:
                entries.append(record_entry(data, at, first.log_id, ledger_id, entry_id, location.length))
            except EntryDamaged:
                if not entries:
                    raise
                break
        return entries

    async def span(
        self, log_id: int, offset: int, length: int, *, ahead: bool = True, grant: ReadGrant | None = None
    ) -> bytes:
        """Bytes of a log, unverified; shorter only at its end. `grant` is given back while the disk is waited for.

        Raises StorageFailed, RequestTimeout, DataDirectoryError if the log is missing.
        """
        file = self._open.get(log_id)
        data = None if file is None else file.read_cached(offset, length)
        if file is None or data is None or len(data) < length:
            # What a directory that hangs has taken of the budget would be missing for the others.
            held = 0 if grant is None else grant.give_back()
            file = file or await self._opened(log_id)
            await self._worker.warm(file.path, offset, length)
            if grant is not None:
                await grant.take(held)
            file = self._open.get(log_id) or await self._opened(log_id)  # it may have been closed meanwhile
            data = file.read_cached(offset, length)
            if data is None:  # evicted again at once: memory is very short
                data = file.read_at(offset, length)
        if log_id in self._open:
            self._open.move_to_end(log_id)
        if ahead:
            file.will_need(offset + length, _WILL_NEED_BYTES)
        return data

    def drop_cache(self, log_id: int, offset: int, length: int) -> None:
        """Makes the next read of these bytes see the disk. For a log that is open, or may be opened."""
        file = self._open.get(log_id)
        if file is not None:
            file.drop_cache(offset, length)

    def size(self, log_id: int) -> int:
        """Bytes of the file."""
        file = self._open.get(log_id)
        if file is not None:
            return file.size()
        return file_size(self._files, self._path(log_id))

    async def header_fault(self, log_id: int) -> str:
        """What is wrong with the first bytes of a log; "" if nothing is, or if a crash left it without any."""
        path = self._path(log_id)
        with closing(self._files.open(path, read_only=True)) as file:
            header = file.read_cached(0, LOG_HEADER_BYTES)
            if header is None:
                await self._worker.warm(path, 0, LOG_HEADER_BYTES)
                header = file.read_at(0, LOG_HEADER_BYTES)
        return header_fault(header, log_id) if header else ""

    async def _opened(self, log_id: int) -> File:
        """A handle of a log that was not open, with a look at its header.

        A good record is served from a log with a bad header as well: its checksum is seeded with the log's id.
        """
        fault = await self.header_fault(log_id)
        if fault:
            self.on_damaged_log(log_id, fault)
        file = self._open.get(log_id)  # another read may have been faster
        if file is None:
            file = self._open[log_id] = self._files.open(self._path(log_id), read_only=True)
            if len(self._open) > _OPEN_LOGS:
                self._open.popitem(last=False)[1].close()
        return file

    def _path(self, log_id: int) -> str:
        path = self._path_of(log_id)
        if path is None:
            raise DataDirectoryError(f"there is no entry log {log_id:08x}", log_id=log_id, errno=errno.ENOENT)
        return path

    def forget(self, log_id: int) -> None:
        """Closes the handle of a log that is moved or deleted."""
        file = self._open.pop(log_id, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """Closes all handles."""
        for file in self._open.values():
            file.close()
        self._open.clear()


def _log_damage(log_id: int, reason: str) -> None:
    _log.error("entry log %08x %s", log_id, reason)


# Bound of the cached statistics, in rows of about 100 bytes.
_KEPT_ROWS = 200_000


class LogStatistics(NamedTuple):
    """Bytes of records by ledger. What a scan could not read is in `damaged_bytes`, or was never synced (`torn_bytes`)."""

    ledgers: dict[int, int]
    bytes: int
    damaged_bytes: int
    torn_bytes: int
    from_footer: bool

    @property
    def whole(self) -> bool:
        """Nothing is damaged: `ledgers` are all that have something in the log."""
        return not self.damaged_bytes


class LogScans:
    """See the module. `writer_of` returns the writer of a log that is current."""

    def __init__(self, reader: LogReader, writer_of: Callable[[int], LogWriter | None]) -> None:
        self._reader = reader
        self._writer_of = writer_of
        self._cached: OrderedDict[int, LogStatistics] = OrderedDict()
        self._cached_rows = 0

    async def scan(
        self, log_id: int, *, bytes_per_s: float = 0, fresh: bool = False
    ) -> AsyncIterator[list[Scanned]]:
        """Yields every record of a log, and ranges without records, in slices of at most 1 ms of the loop.

        Of a current log, what is synced. A throttle of 0 bytes/s is none; `fresh` reads the disk and not the page cache.
        Raises DataDirectoryError if the log is missing (details["errno"] ENOENT), StorageFailed if it cannot be opened.
        """
        writer = self._writer_of(log_id)
        size = writer.synced if writer is not None else self._reader.size(log_id)
        offset = length = 0  # of the last read

        async def read(start: int, count: int) -> bytes:
            nonlocal offset, length
            offset, length = start, count
            if fresh:
                self._reader.drop_cache(log_id, offset, length)
            return await self._reader.span(log_id, offset, length, ahead=False)

        walk = LogScan(log_id, size, current=writer is not None, most_unreadable_pages=MOST_UNREADABLE_PAGES)
        loop = asyncio.get_running_loop()
        begun, done = loop.time(), 0
        async for found in scan_log_in_slices(read, walk):
            found = [record for record in found if record.entry_id != SYNCED_ENTRY]
            if found:
                yield found
            after = walk.wanted()
            done += min(length, after[0] - offset) if after is not None and after[0] > offset else 0
            ahead = begun + done / bytes_per_s - loop.time() if bytes_per_s else 0
            await asyncio.sleep(max(ahead, 0))

    async def statistics(self, log_id: int, *, bytes_per_s: float = 0) -> LogStatistics:
        """Bytes of records by ledger: from the footer, else by a scan, once. Errors as those of `scan`."""
        writer = self._writer_of(log_id)
        if writer is not None:
            return LogStatistics(dict(writer.ledgers), writer.position, 0, 0, True)
        cached = self._cached.get(log_id)
        if cached is not None:
            self._cached.move_to_end(log_id)
            return cached
        size = self._reader.size(log_id)
        footer = await self._footer(log_id, size)
        if footer is not None:
            fault = await self._reader.header_fault(log_id)
            found = LogStatistics(footer.ledgers, size, LOG_HEADER_BYTES if fault else 0, 0, True)
        else:
            found = await self._counted(log_id, size, bytes_per_s)
        self.forget(log_id)  # another call may have been faster
        self._cached[log_id] = found
        self._cached_rows += len(found.ledgers)
        while self._cached_rows > _KEPT_ROWS and len(self._cached) > 1:
            self.forget(next(iter(self._cached)))
        return found

    async def _footer(self, log_id: int, size: int) -> Footer | None:
        try:
            start = max(0, size - (64 << 10))
            data = await self._reader.span(log_id, start, size - start, ahead=False)
            length = footer_bytes(data[-FOOTER_END_BYTES:])
            if len(data) < length <= size:
                data = await self._reader.span(log_id, size - length, length, ahead=False)
        except StorageFailed:
            return None
        return decode_footer(data, log_id, size) if len(data) >= length else None

    async def _counted(self, log_id: int, size: int, bytes_per_s: float) -> LogStatistics:
        ledgers: dict[int, int] = {}
        damaged = torn = 0
        async for records in self.scan(log_id, bytes_per_s=bytes_per_s):
            for record in records:
                if record.data is not None:
                    length = RECORD_HEADER_BYTES + record.length
                    ledgers[record.ledger_id] = ledgers.get(record.ledger_id, 0) + length
                elif record.torn:
                    torn += record.length
                else:
                    damaged += record.length
        return LogStatistics(ledgers, size, damaged, torn, False)

    def forget(self, log_id: int) -> None:
        """Drops the cached statistics of a log that was deleted."""
        cached = self._cached.pop(log_id, None)
        if cached is not None:
            self._cached_rows -= len(cached.ledgers)
