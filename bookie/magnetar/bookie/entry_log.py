"""Entry logs: where entries stay. Appended by the flush, ledger by ledger, and only read afterwards.

    file:    b"MAGELOG\\n" | u32 version | u32 log id | 48 bytes 0 | records | footer (only when the log was closed)
    record:  u64 checksum | u64 ledger | u64 entry | u32 length | u32 0 | entry
    footer:  rows (u64 ledger | u64 bytes) | u64 checksum of the rows | u32 rows | u32 version | u64 start | b"MAGELFTR"

A record's checksum is xxh3-64, seeded with the log id, of everything after it; the footer's is seeded alike. The footer
says how many bytes each ledger has in the log (garbage collection reads it; without one it scans the records).
A log is never appended to by a later start: a start writes to a new one. Log ids are not used twice while any log with
a higher id exists.

Bit rot is EntryDamaged, never "no such entry" (rule 8).
"""

from __future__ import annotations

import asyncio
import struct
from collections import OrderedDict
from collections.abc import Sequence

import xxhash

from magnetar.proto.errors import DataDirectoryError, DiskFull, EntryDamaged, MagnetarError
from magnetar.runtime.files import File, Files

from .disk_worker import DiskWorker
from .index import Location
from .layout import DataLayout
from .write_cache import Half

__all__ = [
    "LOG_HEADER_BYTES",
    "RECORD_HEADER_BYTES",
    "EntryLogs",
    "encode_log_header",
    "encode_record_header",
]

_LOG_HEADER = struct.Struct(">8sII48x")
LOG_HEADER_BYTES = _LOG_HEADER.size
assert LOG_HEADER_BYTES == 64
_RECORD = struct.Struct(">QQQII")
_RECORD_REST = struct.Struct(">QQII")
RECORD_HEADER_BYTES = _RECORD.size
_FOOTER_ROW = struct.Struct(">QQ")
_FOOTER_END = struct.Struct(">QIIQ8s")
_LOG_MAGIC = b"MAGELOG\n"
_FOOTER_MAGIC = b"MAGELFTR"
LOG_VERSION = 1

# One write of 512 KB takes about 0.3 ms of the loop.
_SLICE_BYTES = 512 * 1024
_SLICE_PARTS = 1000
# Dirty pages are handed to the disk in steps, so that the last sync is short and the journal's are not held up.
_SYNC_STEP_BYTES = 16 << 20
_OPEN_LOGS = 64
_WILL_NEED_BYTES = 4 << 20


def encode_log_header(log_id: int) -> bytes:
    """First 64 bytes of a log."""
    return _LOG_HEADER.pack(_LOG_MAGIC, LOG_VERSION, log_id)


def encode_record_header(log_id: int, ledger_id: int, entry_id: int, entry: bytes) -> bytes:
    """The 32 bytes before an entry."""
    rest = _RECORD_REST.pack(ledger_id, entry_id, len(entry), 0)
    digest = xxhash.xxh3_64(rest, log_id)
    digest.update(entry)
    return digest.digest() + rest


def encode_footer(log_id: int, ledgers: dict[int, int], start: int) -> bytes:
    """Closes a log whose records end at `start`; `ledgers` maps ledger ids to their bytes."""
    rows = b"".join([_FOOTER_ROW.pack(ledger, size) for ledger, size in sorted(ledgers.items())])
    checksum = xxhash.xxh3_64_intdigest(rows, log_id)
    return rows + _FOOTER_END.pack(checksum, len(ledgers), LOG_VERSION, start, _FOOTER_MAGIC)


def decode_footer(data: bytes, log_id: int) -> dict[int, int] | None:
    """Bytes by ledger, from the whole content of a log or its end; None if there is no good footer."""
    if len(data) < _FOOTER_END.size:
        return None
    checksum, count, version, _, magic = _FOOTER_END.unpack_from(data, len(data) - _FOOTER_END.size)
    start = len(data) - _FOOTER_END.size - count * _FOOTER_ROW.size
    if magic != _FOOTER_MAGIC or version != LOG_VERSION or start < 0:
        return None
    rows = data[start : len(data) - _FOOTER_END.size]
    if xxhash.xxh3_64_intdigest(rows, log_id) != checksum:
        return None
    return {int(ledger): int(size) for ledger, size in _FOOTER_ROW.iter_unpack(rows)}


def record_entry(data: bytes, at: int, log_id: int, ledger_id: int, entry_id: int, length: int) -> bytes:
    """The verified entry of the record that starts at `at` of `data`. Raises EntryDamaged."""
    body = at + RECORD_HEADER_BYTES
    if body + length <= len(data):
        checksum, ledger, entry_number, size, _ = _RECORD.unpack_from(data, at)
        if (ledger, entry_number, size) == (ledger_id, entry_id, length):
            view = memoryview(data)
            if xxhash.xxh3_64_intdigest(view[at + 8 : body + length], log_id) == checksum:
                return data[body : body + length]
    raise EntryDamaged(
        f"entry {entry_id} of ledger {ledger_id} is damaged in entry log {log_id:08x}; read another replica",
        ledger_id=ledger_id,
        entry_id=entry_id,
        log_id=log_id,
    )


class EntryLogs:
    """All entry logs of one ledger directory: one is appended to, any can be read."""

    def __init__(self, files: Files, worker: DiskWorker, layout: DataLayout, log_bytes: int) -> None:
        self._files = files
        self._worker = worker
        self._layout = layout
        self._log_bytes = log_bytes
        self._next_id = 0
        self._file: File | None = None
        self._log_id = 0
        self._position = 0
        self._ledgers: dict[int, int] = {}
        self._unsynced = 0
        # Logs written to since the last `sync`, and whether one was created.
        self._touched: dict[str, None] = {}
        self._created = False
        self._readers: OrderedDict[int, File] = OrderedDict()

    def open(self) -> None:
        """Finds the next log id; the log itself is made by the first flush."""
        ids = [
            log_id
            for name in self._files.list(self._layout.ledgers)
            if (log_id := self._id(name)) is not None
        ]
        self._next_id = max(ids, default=0) + 1

    def _id(self, name: str) -> int | None:
        return self._layout.entry_log_id(name)

    async def append(self, half: Half) -> list[tuple[int, int, Location]]:
        """Appends everything, in slices of the loop. Buffered when it returns; `sync` makes it durable.

        Raises DiskFull, after which the whole half can be appended again, or StorageFailed.
        """
        locations: list[tuple[int, int, Location]] = []
        start = self._position
        log_id = self._log_id
        try:
            for ledger_id, entries in half.in_order():
                await self._append_ledger(ledger_id, entries, locations)
        except DiskFull:
            self._take_back(start if self._log_id == log_id else 0)
            raise
        return locations

    async def _append_ledger(
        self, ledger_id: int, entries: Sequence[tuple[int, bytes]], locations: list[tuple[int, int, Location]]
    ) -> None:
        parts: list[bytes] = []
        size = 0
        file = self._writable()
        for entry_id, entry in entries:
            parts += (encode_record_header(self._log_id, ledger_id, entry_id, entry), entry)
            locations.append((ledger_id, entry_id, Location(self._log_id, self._position + size, len(entry))))
            size += RECORD_HEADER_BYTES + len(entry)
            if size >= _SLICE_BYTES or len(parts) >= _SLICE_PARTS:
                self._write(file, parts, size, ledger_id)
                parts, size = [], 0
                await asyncio.sleep(0)
                if self._unsynced >= _SYNC_STEP_BYTES:
                    self._unsynced = 0
                    await self._worker.sync(file.path)
                file = self._writable()
        if parts:
            self._write(file, parts, size, ledger_id)
            await asyncio.sleep(0)

    def _write(self, file: File, parts: list[bytes], size: int, ledger_id: int) -> None:
        file.write_at(self._position, parts)
        self._position += size
        self._unsynced += size
        self._ledgers[ledger_id] = self._ledgers.get(ledger_id, 0) + size

    def _writable(self) -> File:
        if self._file is not None and self._position >= self._log_bytes:
            self._finish()
        if self._file is None:
            log_id = self._next_id
            file = self._files.open(self._layout.entry_log(log_id), exclusive=True)
            self._next_id += 1
            self._file, self._log_id, self._position = file, log_id, 0
            self._created = True
        if not self._position:  # again, after a full disk had no room for it
            self._file.write_at(0, [encode_log_header(self._log_id)])
            self._position = LOG_HEADER_BYTES
        self._touched[self._file.path] = None
        return self._file

    def _finish(self) -> None:
        assert self._file is not None
        self._file.write_at(self._position, [encode_footer(self._log_id, self._ledgers, self._position)])
        self._touched[self._file.path] = None
        self._file.close()
        self._file = None
        self._ledgers = {}

    def _take_back(self, position: int) -> None:
        """Gives the space of a flush that found the disk full back, to make the next one possible."""
        if self._file is not None:
            self._position = position
            self._file.truncate(position)

    async def sync(self) -> None:
        """Everything appended is durable, and so are the names of new logs (rule 12a)."""
        while self._touched:
            path = next(iter(self._touched))
            await self._worker.sync(path)
            self._touched.pop(path, None)
        if self._created:
            await self._worker.sync(self._layout.ledgers)
            self._created = False

    async def read(self, ledger_id: int, wanted: Sequence[tuple[int, Location]]) -> list[bytes]:
        """Entries whose records follow each other in one log, in one read. At least the first, or EntryDamaged.

        The loop never waits for the disk: what is not in the page cache is fetched by the disk worker first.
        """
        first, last = wanted[0][1], wanted[-1][1]
        length = last.offset + RECORD_HEADER_BYTES + last.length - first.offset
        try:
            data = await self._read_span(first.log_id, first.offset, length)
        except MagnetarError as error:
            raise EntryDamaged(
                f"entry {wanted[0][0]} of ledger {ledger_id} cannot be read: {error}; read another replica",
                ledger_id=ledger_id,
                entry_id=wanted[0][0],
            ) from error
        entries: list[bytes] = []
        for entry_id, location in wanted:
            try:
                entries.append(
                    record_entry(
                        data,
                        location.offset - first.offset,
                        first.log_id,
                        ledger_id,
                        entry_id,
                        location.length,
                    )
                )
            except EntryDamaged:
                if not entries:
                    raise
                break
        return entries

    async def _read_span(self, log_id: int, offset: int, length: int) -> bytes:
        file = self._reader(log_id)
        data = file.read_cached(offset, length)
        if data is None or len(data) < length:
            await self._worker.warm(file.path, offset, length)
            file = self._reader(log_id)  # it may have been closed meanwhile
            data = file.read_cached(offset, length)
            if data is None:  # evicted again at once: memory is very short
                data = file.read_at(offset, length)
        file.will_need(offset + length, _WILL_NEED_BYTES)
        return data

    def _reader(self, log_id: int) -> File:
        file = self._readers.get(log_id)
        if file is None:
            file = self._files.open(self._layout.entry_log(log_id), read_only=True)
            self._readers[log_id] = file
            if len(self._readers) > _OPEN_LOGS:
                self._readers.popitem(last=False)[1].close()
        else:
            self._readers.move_to_end(log_id)
        return file

    def check_header(self, log_id: int) -> None:
        """Raises DataDirectoryError unless the log begins as one."""
        data = self._reader(log_id).read_at(0, LOG_HEADER_BYTES)
        if len(data) < LOG_HEADER_BYTES or _LOG_HEADER.unpack(data) != (_LOG_MAGIC, LOG_VERSION, log_id):
            path = self._layout.entry_log(log_id)
            raise DataDirectoryError(f"{path} is not an entry log of version {LOG_VERSION}", path=path)

    async def close(self) -> None:
        """Closes the current log with its footer, durably."""
        if self._file is not None:
            self._finish()
            await self.sync()
        self.abandon()

    def abandon(self) -> None:
        """Lets go of all files as they are."""
        for file in self._readers.values():
            file.close()
        self._readers.clear()
        if self._file is not None:
            self._file.close()
            self._file = None
