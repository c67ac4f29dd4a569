"""Rebuilds the index from the entry logs, for a stopped bookie whose index is damaged or lost.

    every log, by id -> INDEX.rebuilding, flushed -> the old one renamed INDEX.damaged-<n> -> the new one renamed INDEX

What is in the journals beyond the mark comes back by the replay of the next start. Killed at any moment, the command can be
given again: it begins anew, and a start refuses while there is no index.

**Which copy wins.** An entry may be in several logs: a compaction was interrupted, or a recovery added it again. The
protocol never gives one entry two payloads; a recovery's copy differs in its last add confirmed and its digest. So the copy
with the higher last add confirmed wins, and of equal ones that with the higher (log id, offset). A copy made by a compaction
has the bytes of its source, so it never beats a recovery's, although its log is younger.

**State records** (fence, explicit LAC, tombstone) only ever grow: they are merged, and merged again with what can still be
read of the old index. Only that entries may have been lost is taken back, by a repair: the old index knows, if it can
tell.

**Damage** (rule 8). What the old index knew and no log gives any more keeps its old location, so that reads say "damaged".
If the old index cannot be read, no ledger gets the answer "no such entry" where something may have been lost:

    footer of the log is good     ledgers whose bytes fall short of it        unknown, and fenced: the fence may be lost
    no footer, or no log          every ledger, and those not heard of yet    the same; the index is `incomplete`

The bookie hears from those who have a metadata store which ids only later ledgers have: these are complete.

Ranges that were never synced (`torn`) lost nothing: the journal has it. What replaces an `incomplete` index is incomplete as
well: the damaged log may have been deleted by now.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

from magnetar.proto.errors import DataDirectoryError, MagnetarError, StorageFailed
from magnetar.proto.ledger_entry import LEDGER_ENTRY_FIELDS, LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.files import File, Files

from ..entry_log.records import RECORD_HEADER_BYTES, STATE_ENTRY, SYNCED_ENTRY, Scanned
from ..entry_log.scan import LogScan, scan_log
from ..index import (
    ALL_LEDGERS,
    BATCH_ENTRIES,
    LedgerRecord,
    Location,
    LocationIndex,
    RocksLocationIndex,
    decode_ledger_record,
)
from ..index.linked_files import remove_empty_directory
from ..index.locations import ledgers_of, location_pages, locations_of
from .identity import check_identity
from .journals import Progress, no_progress
from .stopped import StoppedBookie

_MAX_DAMAGED = 10_000


class DamagedBytes(NamedTuple):
    """Bytes of a log that hold no good record. Ledger and entry are what they claim, -1: nothing."""

    path: str
    offset: int
    length: int
    ledger_id: int
    entry_id: int


@dataclass
class RebuildReport:
    """What a rebuild found and made. `damaged` is cut at 10,000 ranges, `damaged_bytes` counts all."""

    logs: int = 0
    bytes: int = 0
    entries: int = 0
    ledgers: int = 0
    states: int = 0
    # Entries that were found in several places.
    duplicates: int = 0
    damaged: list[DamagedBytes] = field(default_factory=list)
    damaged_bytes: int = 0
    torn_bytes: int = 0
    # Logs that could not be read at all, and why.
    unreadable: dict[str, str] = field(default_factory=dict)
    # Entries that only the old index knew: reads of them say that they are damaged.
    kept_places: int = 0
    # Ledgers that may have lost entries here, ascending; fenced, and missing entries are never said not to exist.
    unknown_ledgers: list[int] = field(default_factory=list)
    # The same goes for ledgers that are not in the index at all.
    incomplete: bool = False
    # Why the old index could not be asked, or not be asked for everything; "" if it could.
    old_index_fault: str = ""
    # Where the old index was put; "" if there was none.
    old_index: str = ""


class OldIndex:
    """The index that is replaced, as far as it can be read. `fault`: why it cannot be relied upon."""

    def __init__(self, path: str, instance: int, *, stale: bool) -> None:
        """`instance` is the bookie's: another one's index is not read."""
        self.fault = "an earlier rebuild put it aside, and the bookie may have run since" if stale else ""
        self.incomplete_below = 0
        self.ledgers: dict[int, LedgerRecord] = {}
        self._index: RocksLocationIndex | None = None
        if not path:
            self.fault = "there is none"
            return
        try:
            self._index = RocksLocationIndex.open_read_only(path)
            if self._index.instance() not in (None, instance):
                self.fault = "it belongs to another bookie"
                self.close()
                return
            self.incomplete_below = self._index.incomplete_below()
            self.ledgers.update(ledgers_of(self._index))
            self._index.check_guard()
        except MagnetarError as error:
            self.fault = self.fault or error.message

    def location_pages(self) -> Iterator[list[tuple[int, int, Location]]]:
        """Everything that can be read of them, ascending; afterwards `fault` tells whether that was all."""
        if self._index is None:
            return
        try:
            yield from location_pages(self._index)
        except StorageFailed as error:
            self.fault = self.fault or error.message

    def close(self) -> None:
        """Frees it."""
        if self._index is not None:
            self._index.close()
            self._index = None


async def rebuild(
    bookie: StoppedBookie, *, dry_run: bool = False, progress: Progress = no_progress
) -> RebuildReport:
    """Reads every entry log; the new index is in place and durable when it returns, the old one put aside.

    Refused with DataDirectoryError when a start would refuse the directories (an empty or wrong disk, say): what they should
    hold would be said not to exist. StorageFailed, DiskFull: the old index is where it was. With `dry_run` nothing changes.
    """
    problem = check_identity(bookie)
    if problem:
        raise DataDirectoryError(
            f"an index without all of its logs would say that their entries do not exist: {problem}",
            path=bookie.layout.root,
        )
    logs = bookie.logs()
    total = sum(log.bytes for log in logs)
    bookie.close_index()
    try:
        return await rebuild_index(
            bookie.files,
            bookie.layout.index,
            {log.log_id: log.path for log in logs},
            bookie.cookie.instance,
            open_index=RocksLocationIndex,
            logs_lost=bookie.cookie.lost_logs,
            dry_run=dry_run,
            progress=lambda report: progress("entry logs", report.bytes, total),
        )
    finally:
        if dry_run:
            remove_empty_directory(bookie.layout.index + ".rebuilding")


async def rebuild_index(
    files: Files,
    index_path: str,
    logs: dict[int, str],
    instance: int,
    *,
    open_index: Callable[[str], LocationIndex],
    logs_lost: bool = False,
    dry_run: bool = False,
    progress: Callable[[RebuildReport], None] = lambda report: None,
) -> RebuildReport:
    """Makes the index at `index_path` anew from `logs` (paths by id, of all ledger directories). Durable when it returns.

    The caller holds the bookie's lock; `instance` is the cookie's. `logs_lost`: there were others, of a ledger directory
    that was declared lost; only the old index can tell which entries they had. After a `dry_run` all is as it was, but for
    an empty directory INDEX.rebuilding. Blocks its loop. Raises StorageFailed or DiskFull, and then the old index is where
    it was.
    """
    new = index_path + ".rebuilding"
    newest = _newest(files, index_path)
    # One that was cut short between its two renames left its own: nothing has changed since.
    stale = newest != index_path and not files.exists(os.path.join(new, "CURRENT"))
    _clear(files, new)
    old = OldIndex(newest, instance, stale=stale)
    try:
        index = open_index(new)
        try:
            rebuild = _Rebuild(files, index, old, logs_lost=logs_lost)
            for log_id in sorted(logs):
                rebuild.take_log(log_id, logs[log_id])
                progress(rebuild.report)
                await asyncio.sleep(0)
            rebuild.finish()
            index.set_instance(instance)
            await index.flush_locations()
            await index.flush_ledgers()
        finally:
            index.close()
        report = rebuild.report
        report.old_index_fault = old.fault
    finally:
        old.close()
    if dry_run:
        _clear(files, new)
    else:
        report.old_index = _swap(files, index_path, new)
    return report


def _newest(files: Files, index_path: str) -> str:
    """The index, or the one that an earlier rebuild put aside last; "" if there is neither."""
    if files.exists(os.path.join(index_path, "CURRENT")):
        return index_path
    numbers = _put_aside(files, index_path)
    return f"{index_path}.damaged-{numbers[-1]}" if numbers else ""


def _put_aside(files: Files, index_path: str) -> list[int]:
    directory, name = os.path.split(os.path.abspath(index_path))
    prefix = f"{name}.damaged-"
    found = [other[len(prefix) :] for other in files.list(directory) if other.startswith(prefix)]
    return sorted(int(number) for number in found if number.isdigit())


def _swap(files: Files, index_path: str, new: str) -> str:
    """Two renames, each durable before the next. Between them there is no index, and a start refuses."""
    directory = os.path.dirname(os.path.abspath(index_path))
    aside = ""
    if files.exists(index_path):
        aside = f"{index_path}.damaged-{max(_put_aside(files, index_path), default=0) + 1}"
        try:
            files.rename(index_path, aside)
        except MagnetarError as error:
            raise DataDirectoryError(
                f"{index_path} cannot be put aside ({error}); if it is a mount point, set index_directory to a directory "
                f"below it. The new index is complete in {new}",
                path=index_path,
            ) from error
        files.sync_directory(directory)
    files.rename(new, index_path)
    files.sync_directory(directory)
    return aside


def _clear(files: Files, path: str) -> None:
    """Empties what an earlier rebuild left. RocksDB keeps all its files in one directory."""
    if files.exists(path):
        for name in files.list(path):
            files.delete(os.path.join(path, name))


class _Entry(NamedTuple):
    ledger_id: int
    entry_id: int


class _Rebuild:
    """Puts together the new index."""

    def __init__(self, files: Files, index: LocationIndex, old: OldIndex, *, logs_lost: bool) -> None:
        self.report = RebuildReport()
        self._files = files
        self._index = index
        self._old = old
        self._records: dict[int, LedgerRecord] = dict(old.ledgers)
        self._paths: dict[int, str] = {}
        # Of the batch: last add confirmed and place by key.
        self._batch: dict[_Entry, tuple[int, Location]] = {}
        # Ledgers that lost records, and logs of which it is not known which ledgers they had.
        self._short: dict[int, None] = {}
        self._unread_logs: list[str] = ["a lost directory"] if logs_lost else []

    def take_log(self, log_id: int, path: str) -> None:
        """Everything that one log has."""
        self._paths[log_id] = path
        report = self.report
        report.logs += 1
        try:
            file = self._files.open(path, read_only=True)
        except MagnetarError as error:
            report.unreadable[path] = error.message
            self._unread_logs.append(path)
            return
        with closing(file):
            size = file.size()
            report.bytes += size
            self._take_records(path, file, LogScan(log_id, size))

    def _take_records(self, path: str, file: File, scan: LogScan) -> None:
        seen: dict[int, int] = {}
        lost = False
        for record in scan_log(file.read_at, scan):
            if record.data is None:
                # A footer that a power loss tore, or a bit of it: all records before it are there.
                lost = (self._note_range(path, record) and record.offset != scan.footer_at) or lost
                continue
            if record.entry_id == SYNCED_ENTRY:
                continue
            length = record.length + RECORD_HEADER_BYTES
            seen[record.ledger_id] = seen.get(record.ledger_id, 0) + length
            if record.entry_id == STATE_ENTRY:
                self._take_state(path, record.ledger_id, record.data)
            else:
                self._take_entry(record, scan.log_id)
        self._put_batch()
        if lost and scan.footer is not None:
            for ledger_id, count in scan.footer.ledgers.items():
                if seen.get(ledger_id, 0) < count:
                    self._short[ledger_id] = None
        elif lost:
            self._unread_logs.append(path)

    def _note_range(self, path: str, record: Scanned) -> bool:
        """True if something may be lost."""
        if record.torn:
            self.report.torn_bytes += record.length
            return False
        self.report.damaged_bytes += record.length
        if len(self.report.damaged) < _MAX_DAMAGED:
            found = DamagedBytes(path, record.offset, record.length, record.ledger_id, record.entry_id)
            self.report.damaged.append(found)
        return True

    def _take_state(self, path: str, ledger_id: int, data: bytes) -> None:
        try:
            record = decode_ledger_record(data)
        except StorageFailed as error:
            raise StorageFailed(
                f"{path} holds a state record of ledger {ledger_id} that cannot be read"
            ) from error
        self.report.states += 1
        self._merge(ledger_id, record)

    def _merge(self, ledger_id: int, record: LedgerRecord) -> None:
        known = self._records.get(ledger_id)
        self._records[ledger_id] = record if known is None else known.merged(record)

    def _merge_living(self, ledger_id: int, record: LedgerRecord) -> None:
        if not self._records.get(ledger_id, LedgerRecord()).deleted_at_ms:
            self._merge(ledger_id, record)

    def _take_entry(self, record: Scanned, log_id: int) -> None:
        confirmed = _last_add_confirmed(record.data or b"")
        key = _Entry(record.ledger_id, record.entry_id)
        known = self._batch.get(key)
        if known is not None:
            self.report.duplicates += 1
        if known is None or confirmed >= known[0]:
            self._batch[key] = (confirmed, Location(log_id, record.offset, record.length))
        if len(self._batch) >= BATCH_ENTRIES:
            self._put_batch()

    def _put_batch(self) -> None:
        rows: list[tuple[int, int, Location]] = []
        # Where earlier logs had them.
        found = locations_of(self._index, list(self._batch))
        for (key, (confirmed, place)), before in zip(self._batch.items(), found, strict=True):
            known = self._records.get(key.ledger_id)
            if known is None or key.entry_id > known.last_entry or confirmed > known.last_add_confirmed:
                self._merge(
                    key.ledger_id, LedgerRecord(last_entry=key.entry_id, last_add_confirmed=confirmed)
                )
            if before is not None:
                self.report.duplicates += 1
                if self._confirmed_at(before) > confirmed:
                    continue
            else:
                self.report.entries += 1
            rows.append((*key, place))
        self._batch.clear()
        if rows:
            self._index.put_locations(rows)

    def _confirmed_at(self, place: Location) -> int:
        """Last add confirmed of a good entry of an earlier log."""
        with closing(self._files.open(self._paths[place.log_id], read_only=True)) as file:
            header = file.read_at(place.offset + RECORD_HEADER_BYTES, LEDGER_ENTRY_HEADER_BYTES)
        return _last_add_confirmed(header)

    def finish(self) -> None:
        """What only the old index knew, and the ledgers."""
        self._keep_old_places()
        report = self.report
        incomplete_below = self._old.incomplete_below
        if not self._old.fault:
            # What was repaired stays so: state records say for ever that entries may have been lost.
            for ledger_id, record in self._old.ledgers.items():
                self._records[ledger_id] = self._records[ledger_id]._replace(unknown=record.unknown)
        else:
            # Nobody can tell what was lost: see the module.
            if self._unread_logs:
                incomplete_below = ALL_LEDGERS
            unknown = sorted(self._records if self._unread_logs else self._short)
            for ledger_id in unknown:
                self._merge_living(ledger_id, LedgerRecord(fenced=True, unknown=True))
        rows = sorted(self._records.items())
        for start in range(0, len(rows), BATCH_ENTRIES):
            self._index.put_ledgers(rows[start : start + BATCH_ENTRIES])
        report.unknown_ledgers = [ledger_id for ledger_id, record in rows if record.unknown]
        report.ledgers = len(rows)
        report.incomplete = incomplete_below > 0
        if incomplete_below:
            self._index.set_incomplete(incomplete_below)

    def _keep_old_places(self) -> None:
        rows: list[tuple[int, int, Location]] = []
        for page in self._old.location_pages():
            for ledger_id, entry_id, place in page:
                if self._index.get(ledger_id, entry_id) is None:
                    rows.append((ledger_id, entry_id, place))
            for start in range(0, len(rows), BATCH_ENTRIES):
                self._index.put_locations(rows[start : start + BATCH_ENTRIES])
            self.report.kept_places += len(rows)
            rows.clear()


def _last_add_confirmed(data: bytes) -> int:
    if len(data) < LEDGER_ENTRY_HEADER_BYTES:
        return -1
    confirmed: int = LEDGER_ENTRY_FIELDS.unpack_from(data)[2]
    return confirmed
