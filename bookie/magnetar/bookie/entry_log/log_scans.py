"""Scans of the entry logs of a running bookie, and the statistics of each log: bytes by ledger."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from magnetar.proto.errors import StorageFailed

from .log_reader import LogReader
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
)
from .scan import MOST_UNREADABLE_PAGES, LogScan, scan_log_in_slices

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
