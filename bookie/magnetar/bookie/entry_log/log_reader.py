"""Reading from entry logs: open handles, the page cache first, every record verified."""

from __future__ import annotations

import errno
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import closing

from magnetar.proto.errors import DataDirectoryError, EntryDamaged, MagnetarError, RequestTimeout
from magnetar.runtime.files import File, Files, file_size

from ..disk_worker import DiskWorker
from ..index import Location
from ..read_budget import ReadGrant
from .records import LOG_HEADER_BYTES, RECORD_HEADER_BYTES, header_fault, record_entry

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
