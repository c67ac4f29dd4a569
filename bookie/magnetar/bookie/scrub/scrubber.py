"""The scrub: every byte of every closed entry log and of the index's files is read from the disk and verified within a day.

Three kinds of units, the one that was verified longest ago first, each again after 60% of `scrub_interval_s`:

    log         each record's checksum, and whether the index has the record where it is. What the index has nowhere although
                its ledger lives was lost by it; what it has here counts as live (garbage collection wants to know)
    index file  its bytes, against those that were hashed when it was first seen (`index/database_files`)
    index walk  each location points into a log that exists, and not past its end

Bad bytes of a log are damage only of the entries whose locations in the index are there. Everything found
goes to `damage`; nothing is changed. An entry that was found damaged and is good again (recovered, compacted away) is
taken out of it.

Example: 100 GB are verified at 1.5 MB/s, each MB dropped from the page cache first, and afterwards unless it was in it
before (`disk_reader`). What is being written to (the current logs, the journals) is not looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from magnetar.proto.errors import DataDirectoryError, MagnetarError, RequestTimeout, StorageFailed
from magnetar.proto.ledger_entry import NO_ENTRY
from magnetar.runtime.clock import Clock
from magnetar.runtime.files import Files, file_size

from ..checkpoint import Checkpointer
from ..disk_worker import DiskWorker
from ..entry_log.entry_logs import EntryLogs, LogInfo
from ..entry_log.records import RECORD_HEADER_BYTES, STATE_ENTRY, SYNCED_ENTRY, Scanned
from ..entry_log.scan import MOST_UNREADABLE_PAGES, LogScan, scan_log_in_slices
from ..gc.assignments import Assignments
from ..index import Location, LocationIndex
from ..index.database_files import DatabaseFileCheck, database_file_names
from ..index.locations import REBUILD, location_pages, locations_of
from ..layout import DataLayout
from ..ledgers import LedgerDescriptors
from ..settings import BookieSettings
from ..write_cache import WriteCache
from .damage import Damage
from .disk_reader import DiskReader
from .progress import Pace, ScrubProgress

_log = logging.getLogger(__name__)
# Not while a start is still busy, and not in a bookie that lives for a test.
_START_DELAY_S = 30.0
_DUE_AFTER = 0.6
_LONGEST_SLEEP_S = 60.0
_SAVE_INTERVAL_S = 60.0
# Index look-ups of one slice of the loop: 1 ms.
_SLICE_RECORDS = 250
_WALK_ROWS = 500
_LOCATION_BYTES = 36
_MAX_SUSPICIOUS = 10_000
_MAX_RECHECKED = 2_000
# One step of a file of the index is copied out of the page cache and hashed in about 0.2 ms of the loop.
_STEP_BYTES = 512 << 10
_WALK = "index walk"
_BAD_BYTES = "its bytes do not match their checksum"


class _Unit(NamedTuple):
    name: str
    bytes: int


class Scrubber:
    """See the module. `run` is a task of the bookie; `verify_everything` is one pass at once, for people and tests."""

    def __init__(
        self,
        settings: BookieSettings,
        files: Files,
        worker: DiskWorker,
        layout: DataLayout,
        logs: EntryLogs,
        index: LocationIndex,
        ledgers: LedgerDescriptors,
        cache: WriteCache,
        checkpointer: Checkpointer,
        damage: Damage,
        clock: Clock,
        assignments: Assignments | None,
        busy: Callable[[], bool],
    ) -> None:
        """`busy`: whether the disk is better left to others right now."""
        self._files = files
        self._worker = worker
        self._logs = logs
        self._index = index
        self._ledgers = ledgers
        self._cache = cache
        self._assignments = assignments
        self._checkpointer = checkpointer
        self._damage = damage
        self._clock = clock
        self._interval_ms = int(settings.scrub_interval_s * 1000)
        self._progress = ScrubProgress(files, layout.scrub)
        self._pace = Pace(settings.scrub_interval_s, settings.scrub_bytes_per_s, busy)
        self._index_directory = layout.index
        # Bytes of records in each closed log that the index has there, when it was last scanned as a whole.
        self._live: dict[int, int] = {}
        self._saved_at = 0.0
        # Units on a disk that did not answer, and until when others are verified before them, in loop time.
        self._postponed: dict[str, float] = {}
        # The last ledger that was looked at again, and when.
        self._rechecked = -1
        self._rechecked_at = 0.0
        # Figures.
        self.bytes_verified = 0
        self.units_verified = 0
        self.oldest_s = 0

    def exact_live_bytes(self, log_id: int) -> int | None:
        """Bytes of the log's records that the index had there when it was last scanned; None: not yet."""
        return self._live.get(log_id)

    def verified(self) -> list[tuple[str, int, int]]:
        """(unit, its bytes, when it was verified last, ms since the epoch; 0: not yet) of all that there is now."""
        return [(unit.name, unit.bytes, self._progress.verified.get(unit.name, 0)) for unit in self._units()]

    def figures(self) -> dict[str, int]:
        """For metrics. `scrub_oldest_s`: how long ago what waits longest was verified."""
        return {
            "scrub_bytes": self.bytes_verified,
            "scrub_units": self.units_verified,
            "scrub_oldest_s": self.oldest_s,
            "scrub_rate_bytes_per_s": int(self._pace.rate),
            "scrub_behind": int(self._pace.behind),
            "scrub_paused_ms": int(self._pace.paused_s * 1000),
        }

    async def run(self) -> None:
        """For ever; ends by being cancelled."""
        self._progress.load()
        await asyncio.sleep(_START_DELAY_S)
        while True:
            await self._recheck_damage_sometimes()
            try:
                unit, due_in_s = self._next_unit()
            except MagnetarError as error:
                # The directory of the index cannot be listed: no reason to stop the bookie.
                self._damage.report_file(self._index_path(""), f"{error}; {REBUILD}")
                unit, due_in_s = None, _LONGEST_SLEEP_S
            if unit is None:
                await self._save(soon=False)
                await asyncio.sleep(min(due_in_s, _LONGEST_SLEEP_S))
            else:
                await self._verify(unit)

    async def verify_everything(self) -> None:
        """One pass over all that there is, whenever it was last verified."""
        for unit in self._units():
            await self._verify(unit)

    # --- what is next ------------------------------------------------------------------------------------------------

    def _units(self) -> list[_Unit]:
        logs = self._logs.logs()
        units = [_Unit(_log_unit(info.log_id), info.bytes) for info in logs if not info.current]
        for log_id in [log_id for log_id in self._live if self._logs.path_of(log_id) is None]:
            del self._live[log_id]
        files = self._index_files()
        units += [_Unit(f"index {name}", size) for name, size in files.items()]
        units.append(_Unit(_WALK, sum(files.values())))
        return units

    def _next_unit(self) -> tuple[_Unit | None, float]:
        """What is due, or when something will be. New units come first: 0 is long ago."""
        units = self._units()
        now = self._clock.now_ms()
        loop_s = asyncio.get_running_loop().time()
        self._postponed = {name: until for name, until in self._postponed.items() if until > loop_s}
        verified = self._progress.verified
        self._progress.keep_only({unit.name: 0 for unit in units})
        for name, when in verified.items():
            if when > now:  # the clock was ahead
                verified[name] = now
        # What never was verified counts from the start of this process: its age is not known.
        ready = [unit for unit in units if unit.name not in self._postponed]
        if not ready:
            return None, _LONGEST_SLEEP_S
        oldest = min(ready, key=lambda unit: verified.get(unit.name, 0))
        ages = [now - when for when in verified.values()]
        self.oldest_s = max(ages, default=0) // 1000
        self._pace.aim(sum(unit.bytes for unit in units), self.oldest_s)
        under_way = [unit for unit in ready if unit.name == self._progress.unit]
        if under_way:
            return under_way[0], 0
        due_in = verified.get(oldest.name, 0) + _DUE_AFTER * self._interval_ms - now
        return (oldest, 0) if due_in <= 0 else (None, due_in / 1000)

    async def _verify(self, unit: _Unit) -> None:
        kind, _, name = unit.name.partition(" ")
        try:
            if unit.name == _WALK:
                await self._walk_index()
            elif kind == "log":
                await self._verify_log(int(name, 16))
            else:
                await self._verify_index_file(name)
        except RequestTimeout as error:
            _log.warning("%s is not verified now: %s", unit.name, error)
            self._postponed[unit.name] = asyncio.get_running_loop().time() + _LONGEST_SLEEP_S
            return
        except StorageFailed as error:
            # Parts of the index that cannot be read: requests that need them fail, others are served.
            self._damage.report_file(self._index_path(""), str(error))
        self._progress.done(unit.name, self._clock.now_ms())
        self.units_verified += 1
        await self._save(soon=False)

    async def _spend(self, size: int) -> None:
        self.bytes_verified += size
        await self._pace.spend(size)

    async def _save(self, *, soon: bool) -> None:
        """A progress that cannot be saved is done again after a restart, no more."""
        now = asyncio.get_running_loop().time()
        if self._progress.dirty and (soon or now - self._saved_at >= _SAVE_INTERVAL_S):
            self._saved_at = now
            try:
                await self._progress.save(self._worker)
            except MagnetarError as error:
                _log.warning("the progress of the scrub is not saved: %s", error)

    async def close(self) -> None:
        """Saves how far it got; the task has been cancelled. Never raises."""
        with contextlib.suppress(MagnetarError):
            await self._save(soon=True)

    # --- entry logs --------------------------------------------------------------------------------------------------

    def _info(self, log_id: int) -> LogInfo | None:
        return next((info for info in self._logs.logs() if info.log_id == log_id and not info.current), None)

    async def _verify_log(self, log_id: int) -> None:
        info = self._info(log_id)
        if info is None:
            return
        unit = _log_unit(log_id)
        start = self._progress.offset if self._progress.unit == unit else 0
        try:
            reader = DiskReader(self._files, self._worker, info.path)
        except MagnetarError as error:
            if self._logs.path_of(log_id) is not None:
                self._damage.report_file(info.path, str(error))
            return
        check = _LogCheck(info)
        scan = LogScan(log_id, reader.size, start=start, most_unreadable_pages=MOST_UNREADABLE_PAGES)
        before = scan.walked
        try:
            async for found in scan_log_in_slices(reader.read, scan):
                await asyncio.sleep(0)
                self._check_records(check, found)
                if found:
                    self._progress.at(unit, scan.position)
                await self._spend(scan.walked - before)
                before = scan.walked
                await self._save(soon=False)
        finally:
            reader.close()
        if self._logs.path_of(log_id) is None:  # deleted meanwhile
            return
        await self._report_lost(check)
        if check.bad:
            await self._report_bad(check)
        elif not start:
            self._damage.forget_file(info.path)
        if not start and len(check.missing) < _MAX_SUSPICIOUS:
            self._live[log_id] = check.live_bytes

    def _check_records(self, check: _LogCheck, found: Sequence[Scanned]) -> None:
        """At most 300 records, as a scan cuts them: 0.2 ms if they follow each other in the index, 1.2 ms if none does."""
        entries: list[Scanned] = []
        for record in found:
            if record.data is None:
                continue
            if record.entry_id < SYNCED_ENTRY:
                entries.append(record)
            elif record.entry_id == STATE_ENTRY and self._lives(record.ledger_id):
                check.live_bytes += record.length + RECORD_HEADER_BYTES
        check.bad += [
            (record.offset, record.offset + record.length)
            for record in found
            if record.data is None and not record.torn
        ]
        log_id = check.info.log_id
        del check.missing[_MAX_SUSPICIOUS:]
        for record, place in zip(entries, locations_of(self._index, entries), strict=True):
            if place is None:
                check.missing.append((record.ledger_id, record.entry_id, record.length))
            elif place == (log_id, record.offset, record.length):
                check.live_bytes += record.length + RECORD_HEADER_BYTES

    async def _report_lost(self, check: _LogCheck) -> None:
        """Records whose entry the index has nowhere: of a deleted ledger, another bookie's by now, not indexed yet, or lost.

        Beyond the last entry of its ledger: a crash came between log and index, and the journal did not have it either (it
        was slower than the flush). So it was never acknowledged, and recoveries must get "no such entry" for it.
        """
        for at in range(0, len(check.missing), _SLICE_RECORDS):
            rows = check.missing[at : at + _SLICE_RECORDS]
            looks_lost = {ledger_id for ledger_id, entry_id, _ in rows if self._is_lost(ledger_id, entry_id)}
            ours = {ledger_id: await self._ours(ledger_id) for ledger_id in sorted(looks_lost)}
            # Waits out a flush, which appends before it updates the index, and a deletion.
            async with self._checkpointer.exclusive():
                for ledger_id, entry_id, length in rows:
                    is_ours = ours.get(ledger_id)
                    if not self._is_lost(ledger_id, entry_id) or (is_ours and not is_ours(entry_id)):
                        continue
                    # Not garbage: there is no other copy on this bookie.
                    check.live_bytes += length + RECORD_HEADER_BYTES
                    if is_ours is not None:
                        self._damage.report(
                            ledger_id,
                            entry_id,
                            where="index",
                            reason=f"the index has lost it, {check.info.path} has it; {REBUILD}",
                        )
            await asyncio.sleep(0)

    def _is_lost(self, ledger_id: int, entry_id: int) -> bool:
        """Whether the bookie should have the entry, and neither the index has it nor a flush that waits for space."""
        return (
            self._last_entry(ledger_id) >= entry_id
            and self._index.get(ledger_id, entry_id) is None
            and self._cache.get(ledger_id, entry_id) is None
        )

    async def _ours(self, ledger_id: int) -> Callable[[int], bool] | None:
        """Which entries the record gives this bookie: others were leftovers. None: no record, or it is not known."""
        if self._assignments is None:
            return _each
        try:
            assigned = await self._assignments.assigned(ledger_id)
        except MagnetarError as error:
            _log.warning("whose entries of ledger %d are in a log is not known: %s", ledger_id, error)
            return None
        return None if assigned is None else assigned.gives

    def _last_entry(self, ledger_id: int) -> int:
        """-1 if it has none, or is deleted."""
        state = self._ledgers.by_id.get(ledger_id) or self._index.get_ledger(ledger_id)
        return NO_ENTRY if state is None or state.deleted_at_ms else state.last_entry

    def _lives(self, ledger_id: int) -> bool:
        state = self._ledgers.by_id.get(ledger_id)
        if state is not None:
            return state.known and not state.deleted_at_ms
        record = self._index.get_ledger(ledger_id)
        return record is not None and not record.deleted_at_ms

    async def _report_bad(self, check: _LogCheck) -> None:
        """Bad ranges of a log: whose entries are there? About 0.6 us for each location of the index."""
        log_id, path = check.info.log_id, check.info.path
        check.bad.sort()
        self._damage.report_file(
            path, f"{len(check.bad)} ranges without good records, the first at offset {check.bad[0][0]}"
        )
        starts = [first for first, _ in check.bad]
        for rows in location_pages(self._index, _WALK_ROWS):
            for ledger_id, entry_id, place in rows:
                if place.log_id != log_id:
                    continue
                # The last bad range that begins before the record ends.
                at = bisect_left(starts, place.offset + RECORD_HEADER_BYTES + place.length)
                if at and check.bad[at - 1][1] > place.offset:
                    self._damage.report(ledger_id, entry_id, where=path, reason=_BAD_BYTES)
            await self._pace.spend(len(rows) * _LOCATION_BYTES)

    async def _fault_of(self, ledger_id: int, entry_id: int, place: Location) -> str:
        """Why an entry cannot be read where it should be; "" if it can."""
        try:
            await self._logs.reader.read(ledger_id, [(entry_id, place)])
        except MagnetarError as error:
            return "" if error.details.get("missing_log") else error.message
        return ""

    # --- the index ---------------------------------------------------------------------------------------------------

    def _index_path(self, name: str) -> str:
        return os.path.join(self._index_directory, name)

    def _index_files(self) -> dict[str, int]:
        """Sizes of the index's files to verify; RocksDB deletes some at any time. Forgets the checksums of those."""
        found: dict[str, int] = {}
        for name in database_file_names(self._files, self._index_directory):
            try:
                found[name] = file_size(self._files, self._index_path(name))
            except DataDirectoryError:
                if self._files.exists(self._index_path(name)):
                    found[name] = 0  # `_verify_index_file` says why it cannot be opened
        tables = self._progress.tables
        for name in [name for name in tables if name not in found]:
            del tables[name]
        return found

    async def _verify_index_file(self, name: str) -> None:
        path, seen = self._index_path(name), None
        try:
            fault, seen = await self._index_file_fault(name, path)
        except RequestTimeout:
            raise
        except MagnetarError as error:
            fault = error.message
        if not self._files.exists(path):
            return  # deleted by a RocksDB compaction
        if fault:
            self._damage.report_file(path, f"{fault}; {REBUILD}")
        elif seen is not None:
            self._progress.tables[name] = seen

    async def _index_file_fault(self, name: str, path: str) -> tuple[str, tuple[int, int] | None]:
        """What is wrong with a file of the index, and what the next check compares it with."""
        reader = DiskReader(self._files, self._worker, path)
        check = DatabaseFileCheck(name, reader.size, self._progress.tables.get(name))
        try:
            for offset in range(0, reader.size, _STEP_BYTES):
                data = await reader.read(offset, min(_STEP_BYTES, reader.size - offset))
                check.take(data)
                await self._spend(len(data))
        finally:
            reader.close()
        return check.fault(self._files.list(self._index_directory)), check.seen

    async def _walk_index(self) -> None:
        """Each location: does its log exist, and reach so far?"""
        for rows in location_pages(self._index, _WALK_ROWS):
            # Anew each time: logs grow, are compacted and deleted.
            sizes = {info.log_id: info.bytes for info in self._logs.logs()}
            for ledger_id, entry_id, place in rows:
                end = place.offset + RECORD_HEADER_BYTES + place.length
                if end > sizes.get(place.log_id, 0):
                    await self._check_stray(ledger_id, entry_id, place)
            await self._spend(len(rows) * _LOCATION_BYTES)

    async def _check_stray(self, ledger_id: int, entry_id: int, place: Location) -> None:
        """A location that points nowhere; again, behind the barrier, if it still does."""
        async with self._checkpointer.exclusive():
            sizes = {info.log_id: info.bytes for info in self._logs.logs()}
            size = sizes.get(place.log_id)
            end = place.offset + RECORD_HEADER_BYTES + place.length
            same = self._index.get(ledger_id, entry_id) == place
            if same and self._lives(ledger_id) and (size is None or end > size):
                what = "does not exist" if size is None else f"ends at {size}"
                self._damage.report(
                    ledger_id,
                    entry_id,
                    where="index",
                    reason=f"it should be in entry log {place.log_id:08x}, which {what}",
                )

    async def _recheck_damage_sometimes(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._rechecked_at >= _LONGEST_SLEEP_S:
            self._rechecked_at = now
            try:
                await self._recheck_damage()
            except StorageFailed as error:
                self._damage.report_file(self._index_path(""), str(error))

    async def _recheck_damage(self) -> None:
        """What was recovered meanwhile is damaged no more. Some of it each time, in turn."""
        looked = 0
        known = sorted(self._damage.ledgers().items())
        for ledger_id, ranges in [row for row in known if row[0] > self._rechecked] or known:
            self._rechecked = ledger_id
            if not self._lives(ledger_id):
                self._damage.deleted(ledger_id)
                continue
            for damaged in ranges:
                for entry_id in range(damaged.first, min(damaged.last, damaged.first + _MAX_RECHECKED) + 1):
                    looked += 1
                    place = self._index.get(ledger_id, entry_id)
                    if place is not None and not await self._fault_of(ledger_id, entry_id, place):
                        self._damage.repaired(ledger_id, entry_id, entry_id)
                    await self._pace.spend(place.length if place is not None else 0)
            if looked >= _MAX_RECHECKED:
                return


class _LogCheck:
    """What the scan of one log found."""

    def __init__(self, info: LogInfo) -> None:
        self.info = info
        self.live_bytes = 0
        # Ranges without good records: first byte, byte behind.
        self.bad: list[tuple[int, int]] = []
        # Good records of entries that the index has nowhere: ledger, entry, length.
        self.missing: list[tuple[int, int, int]] = []


def _log_unit(log_id: int) -> str:
    return f"log {log_id:08x}"


def _each(entry_id: int) -> bool:
    return True
