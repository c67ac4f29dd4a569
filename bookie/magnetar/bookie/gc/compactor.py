"""Compaction: what is alive in some logs is copied to a new one, and the old ones are deleted. Crash-safe at every step.

    1  copy     entrylog-N.compacting: every record whose location in the index is this very one, and the states of ledgers
    2  sync     footer, data
    3  name     entrylog-N.replaces (which logs), durable; then the copy gets its final name, durable
    4  index    locations that still name one of the old logs now name N; flushed
    5  delete   the old logs, durably; then entrylog-N.replaces

So a copy with its final name and a `.replaces` beside it (FORMATS.md, "Compaction") replaces those logs. A `.replaces`
without the copy is ignored. A damaged one is deleted: then the copy is a log like any other, and no log is deleted.

A crash before 3 leaves a file that a start deletes. After it `finish` does 4 and 5, which can be repeated. No old log is
deleted before the index is durable without it (BookKeeper #1534). The index is compared and written in one turn, so an entry
that was added again meanwhile keeps its newer location.

The sources must be logs of which the index knows everything: the collector lists them while no flush is under way (rule 11).
Otherwise a record that a flush has written and not yet indexed would look like garbage, and be deleted with its log.

What cannot be read in a source is never taken for garbage: if the index names a place in there the entry is reported, the
copy given up, and the log stays until the entry was repaired or its ledger deleted (BookKeeper #4607).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from magnetar.proto.errors import DiskFull, MagnetarError, RequestTimeout
from magnetar.runtime.files import Files

from ..disk_worker import DiskWorker
from ..entry_log.entry_logs import EntryLogs, LogInfo
from ..entry_log.log_writer import LogWriter
from ..entry_log.records import STATE_ENTRY, Scanned
from ..index import (
    BATCH_ENTRIES,
    LedgerRecord,
    Location,
    LocationIndex,
    decode_ledger_record,
    encode_ledger_record,
)
from ..index.locations import location_pages, locations_of
from ..layout import DataLayout
from ..scrub import Damage
from ..sealed_file import seal, unseal
from .decisions import CompactionBatch

_log = logging.getLogger(__name__)
_RETRY_FLUSH_S = 1.0
# `.replaces` is a sealed file: [log id of the copy, [log id, ...]].
_MAGIC = b"MAGCMPCT"
_VERSION = 1
_COMPACTING = re.compile(r"entrylog-([0-9a-f]{8})\.compacting")
_REPLACES = re.compile(r"entrylog-([0-9a-f]{8})\.replaces")


def compacting_path(directory: str, log_id: int) -> str:
    """The copy while it is written."""
    return os.path.join(directory, f"entrylog-{log_id:08x}.compacting")


def replaces_path(directory: str, log_id: int) -> str:
    """Which logs the copy `log_id` replaces."""
    return os.path.join(directory, f"entrylog-{log_id:08x}.replaces")


def unfinished_log_id(name: str) -> int | None:
    """Inverse of `compacting_path` for a bare name; None for other files."""
    found = _COMPACTING.fullmatch(name)
    return int(found[1], 16) if found else None


def replaces_log_id(name: str) -> int | None:
    """Inverse of `replaces_path` for a bare name; None for other files."""
    found = _REPLACES.fullmatch(name)
    return int(found[1], 16) if found else None


def encode_replaces(log_id: int, sources: Sequence[int]) -> bytes:
    """The content of a `.replaces`."""
    return seal(_MAGIC, _VERSION, [log_id, list(sources)])


def decode_replaces(data: bytes, log_id: int) -> list[int] | None:
    """The logs that copy `log_id` replaces; None if the data are damaged, or another copy's."""
    try:
        found, sources = unseal(data, _MAGIC, _VERSION)
    except (ValueError, TypeError):
        return None
    return [int(source) for source in sources] if found == log_id else None


class _CausedFailure(Exception):
    """A compaction failed because of `error`."""

    def __init__(self, error: MagnetarError) -> None:
        super().__init__(str(error))
        self.error = error


class IndexFailed(_CausedFailure):
    """The index could not be written: the bookie must stop. Never for DiskFull: a later round writes the same."""


class IndexUnreadable(_CausedFailure):
    """The index could not be read, so it is not known what is alive. Nothing was changed."""


class OutputFailed(_CausedFailure):
    """The copy could not be made. Nothing was changed.

    `error` is DiskFull, RequestTimeout of a disk that does not answer, or the directory is not to be trusted.
    """


@contextlib.contextmanager
def raising(kind: type[_CausedFailure]) -> Iterator[None]:
    """A MagnetarError inside becomes the cause of a `kind`; an index without space ends the round as itself."""
    try:
        yield
    except MagnetarError as error:
        if isinstance(error, DiskFull) and kind is not OutputFailed:
            raise
        raise kind(error) from error


class SourceDamaged(Exception):
    """A live entry of the log cannot be read, so the log stays."""

    def __init__(self, log_id: int, reason: str) -> None:
        super().__init__(reason)
        self.log_id = log_id


class Copied(NamedTuple):
    """A finished copy; `log_id` 0: nothing was alive, and there is none."""

    log_id: int
    bytes: int


class Compactor:
    """Copies one batch at a time."""

    def __init__(
        self,
        files: Files,
        worker: DiskWorker,
        layout: DataLayout,
        logs: EntryLogs,
        index: LocationIndex,
        damage: Damage,
        bytes_per_s: int,
    ) -> None:
        self._files = files
        self._worker = worker
        self._layout = layout
        self._logs = logs
        self._index = index
        self._damage = damage
        self._bytes_per_s = bytes_per_s

    # --- after a crash -----------------------------------------------------------------------------------------------

    def open(self) -> list[int]:
        """Deletes copies that a crash interrupted; returns the copies for which `finish` must be called, in no hurry.

        After `EntryLogs.open`, and before anything is written. Raises StorageFailed, DataDirectoryError.
        """
        found: list[int] = []
        for directory in self._layout.ledgers:
            deleted = False
            for name in self._files.list(directory):
                log_id = replaces_log_id(name)
                if unfinished_log_id(name) is not None or (
                    log_id is not None and self._logs.path_of(log_id) is None
                ):
                    self._files.delete(os.path.join(directory, name))
                    deleted = True
                elif log_id is not None:
                    found.append(log_id)
            if deleted:
                self._files.sync_directory(directory)
        return found

    async def finish(self, log_id: int) -> list[int]:
        """Steps 4 and 5 for the copy `log_id`; returns the logs that it replaced. IndexFailed, or what the files raise.

        A copy that cannot be read as a whole replaces nothing: it stays beside its sources.
        """
        path = self._logs.path_of(log_id)
        assert path is not None
        trace = replaces_path(os.path.dirname(path), log_id)
        sources = decode_replaces(self._files.read(trace), log_id) or []
        if await self._point_to(log_id, sources):
            await self.delete(sources)
        else:
            _log.error("entry log %08x, a copy, is damaged: the logs that it was made from stay", log_id)
            sources = []
        await self._worker.delete(trace)
        await self._worker.sync(os.path.dirname(trace))
        return sources

    # --- a batch -----------------------------------------------------------------------------------------------------

    async def copy(self, batch: CompactionBatch, is_deleted: Callable[[int], bool]) -> Copied:
        """Steps 1 to 3, without the ledgers for which `is_deleted` is true; `finish` must follow.

        OutputFailed, IndexUnreadable, SourceDamaged: nothing has changed.
        """
        directory = self._layout.ledgers[batch.directory]
        with raising(OutputFailed):
            log_id = await self._logs.take_log_id()
        writer = LogWriter(self._worker, compacting_path(directory, log_id), log_id)
        try:
            with raising(OutputFailed):
                await self._copy_live(batch, is_deleted, writer)
                if writer.position:
                    await self._name(batch, writer, directory)
        except (OutputFailed, IndexUnreadable, SourceDamaged):
            await self._give_up(writer)
            raise
        finally:
            writer.close()
        return Copied(log_id if writer.position else 0, writer.position)

    async def _copy_live(
        self, batch: CompactionBatch, is_deleted: Callable[[int], bool], writer: LogWriter
    ) -> None:
        states: dict[int, LedgerRecord] = {}
        for source in batch.sources:
            unreadable: list[Scanned] = []
            try:
                async for scanned in self._logs.scan(source.log_id, bytes_per_s=self._bytes_per_s):
                    await self._copy_slice(source.log_id, scanned, is_deleted, writer, states, unreadable)
            except RequestTimeout:  # of its directory: nothing is known to be damaged
                raise
            except MagnetarError as error:
                raise SourceDamaged(source.log_id, f"cannot be read: {error}") from error
            if unreadable:
                await self._check_unreadable(source.log_id, unreadable, is_deleted)
        rows = [(ledger_id, STATE_ENTRY, encode_ledger_record(state)) for ledger_id, state in states.items()]
        for start in range(0, len(rows), BATCH_ENTRIES):
            await self._append(writer, rows[start : start + BATCH_ENTRIES])

    async def _copy_slice(
        self,
        log_id: int,
        scanned: Sequence[Scanned],
        is_deleted: Callable[[int], bool],
        writer: LogWriter,
        states: dict[int, LedgerRecord],
        unreadable: list[Scanned],
    ) -> None:
        entries: list[Scanned] = []
        with raising(IndexUnreadable):
            for record in scanned:
                if record.data is None:
                    unreadable.append(record)  # what is torn as well: the index has the last word
                elif is_deleted(record.ledger_id):
                    continue
                elif record.entry_id == STATE_ENTRY:
                    state = decode_ledger_record(record.data)
                    known = states.get(record.ledger_id)
                    states[record.ledger_id] = state if known is None else known.merged(state)
                else:
                    entries.append(record)
            places = locations_of(self._index, entries)
        live = [
            (record.ledger_id, record.entry_id, record.data or b"")
            for record, place in zip(entries, places, strict=True)
            if place is not None and place.log_id == log_id and place.offset == record.offset
        ]
        if live:
            await self._append(writer, live)

    async def _append(self, writer: LogWriter, records: list[tuple[int, int, bytes]]) -> None:
        with raising(OutputFailed):
            await writer.append(records)

    async def _check_unreadable(
        self, log_id: int, ranges: Sequence[Scanned], is_deleted: Callable[[int], bool]
    ) -> None:
        """SourceDamaged if the index names a place in one of the ranges. Reads the whole index: damage is rare."""
        found = 0
        path = self._logs.path_of(log_id) or f"{log_id:08x}"
        with raising(IndexUnreadable):
            for rows in location_pages(self._index):
                for ledger_id, entry_id, place in rows:
                    if place.log_id == log_id and not is_deleted(ledger_id) and _within(place, ranges):
                        found += 1
                        reason = "it cannot be read, so its log is not compacted"
                        self._damage.report(ledger_id, entry_id, where=path, reason=reason)
                await asyncio.sleep(0)
        if found:
            raise SourceDamaged(log_id, f"holds {found} damaged entries that are not written elsewhere")

    async def _name(self, batch: CompactionBatch, writer: LogWriter, directory: str) -> None:
        """Step 3: from here on the copy counts."""
        await writer.finish()
        await writer.sync()
        path = self._layout.entry_log(batch.directory, writer.log_id)
        sources = [source.log_id for source in batch.sources]
        # Before the copy has a name that counts, so that none is ever found without it.
        await self._worker.replace(
            replaces_path(directory, writer.log_id), encode_replaces(writer.log_id, sources)
        )
        await self._worker.rename(writer.path, path)
        await self._worker.sync(directory)
        self._logs.adopt(LogInfo(writer.log_id, batch.directory, path, writer.position, False))

    async def _give_up(self, writer: LogWriter) -> None:
        """The file goes now, a full disk needs the space; whatever fails here a start sees to."""
        with contextlib.suppress(MagnetarError):
            await self._worker.delete(writer.path)

    async def _point_to(self, log_id: int, sources: Sequence[int]) -> bool:
        """Step 4. False if the copy has a record that cannot be read: then no source may be deleted."""
        old = frozenset(sources)
        whole = True
        async for scanned in self._logs.scan(log_id, bytes_per_s=self._bytes_per_s):
            await asyncio.sleep(0)  # the scan's slice took its part of this turn
            whole = whole and all(record.data is not None for record in scanned)
            entries = [
                record for record in scanned if record.data is not None and record.entry_id != STATE_ENTRY
            ]
            # One turn of the loop: nothing else writes to the index in between.
            with raising(IndexFailed):
                moved = [
                    (record.ledger_id, record.entry_id, place, Location(log_id, record.offset, record.length))
                    for record, place in zip(entries, locations_of(self._index, entries), strict=True)
                    if place is not None and place.log_id in old
                ]
                for start in range(0, len(moved), BATCH_ENTRIES):
                    self._index.replace_locations(moved[start : start + BATCH_ENTRIES])
        await self.flush_index()
        return whole

    async def flush_index(self) -> None:
        """What the index says of places is durable when it returns. IndexFailed."""
        with raising(IndexFailed):
            while True:
                try:
                    return await self._index.flush_locations()
                except DiskFull as error:  # whatever comes next relies on it
                    _log.warning("a garbage collection waits for disk space: %s", error)
                    await asyncio.sleep(_RETRY_FLUSH_S)

    async def delete(self, log_ids: Sequence[int]) -> None:
        """Deletes logs that the index, as it is on disk, does not name. Durable when it returns."""
        for log_id in log_ids:
            await self._logs.delete(log_id)


def _within(place: Location, ranges: Sequence[Scanned]) -> bool:
    return any(found.offset <= place.offset < found.offset + found.length for found in ranges)
