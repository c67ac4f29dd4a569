"""Verifies a stopped bookie: all that a start and a scrub would check, without changing anything.

    cookie and its copies -> mark -> journals -> entry logs -> index files -> every location -> ledger records

Entry logs are read once, in order. Every good record is looked up in the index; the locations that point to records of a log
are counted there and again when the index is walked. Where the two counts of a log differ, and only there, a second walk
reads what each location of that log points to, so that damage is reported by ledger and entry. Memory: by log, by ledger
with a state record, and MAX_FINDINGS findings.

What was torn by a crash is no damage: nothing there was ever acknowledged.
"""

from __future__ import annotations

import os
from contextlib import closing
from itertools import chain, pairwise
from typing import Any, NamedTuple

from magnetar.proto.errors import DataDirectoryError, EntryDamaged, MagnetarError, StorageFailed
from magnetar.runtime.files import File, file_size

from ..entry_log.log_ids import decode_log_ids
from ..entry_log.records import RECORD_HEADER_BYTES, STATE_ENTRY, Scanned, record_entry
from ..entry_log.scan import LogScan, scan_log
from ..index import (
    ALL_LEDGERS,
    LedgerRecord,
    Location,
    LocationIndex,
    RocksLocationIndex,
    decode_ledger_record,
)
from ..index.database_files import DatabaseFileCheck, database_file_names
from ..index.locations import ledgers_of, location_pages
from ..journal.records import Record, ledger_change
from ..journal.recovery import GapVerdict, NeededFile, is_clean_end, journal_files, walk_journal
from ..mark import JournalPosition
from ..scrub.progress import ScrubProgress
from .entry_logs import LogSums, stored_entry
from .identity import check_identity
from .journals import Progress, journal_directories, no_progress, read_mark
from .stopped import LogFile, StoppedBookie

# Further findings are only counted.
MAX_FINDINGS = 10_000
_STEP_BYTES = 4 << 20
_STEPS_OVER = "the next start steps over the numbers that it may have reserved"

SOUND = "sound"
TORN = "torn tail"
DAMAGE = "damage"
NOT_CHECKED = "not checked"
# By a running bookie, whose scrub has not come to it yet.
WAITING = "waiting"


class Finding(NamedTuple):
    """One piece of damage. Ledger, entry or position is -1 where it has no meaning."""

    part: str
    path: str
    position: int
    ledger_id: int
    entry_id: int
    text: str


class VerifiedPart(NamedTuple):
    """The result for one part. `verdict`: "sound", "torn tail" and "waiting" (sound as well), "damage" or "not checked"."""

    part: str
    path: str
    verdict: str
    records: int
    bytes: int
    note: str


class Verification:
    """The result. `sound` is the answer; a part that could not be checked is not sound."""

    def __init__(self) -> None:
        self.checks: list[VerifiedPart] = []
        self.findings: list[Finding] = []
        self.damage_found = 0

    @property
    def sound(self) -> bool:
        """True if nothing is damaged and everything was checked."""
        return not self.damage_found and all(check.verdict in (SOUND, TORN, WAITING) for check in self.checks)

    def row(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "sound": self.sound,
            "damage_found": self.damage_found,
            "checks": [check._asdict() for check in self.checks],
            "findings": [finding._asdict() for finding in self.findings],
        }

    def found(
        self,
        part: str,
        path: str,
        text: str,
        *,
        position: int = -1,
        ledger_id: int = -1,
        entry_id: int = -1,
    ) -> None:
        """Notes damage."""
        self.damage_found += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(Finding(part, path, position, ledger_id, entry_id, text))


def verify(bookie: StoppedBookie, progress: Progress = no_progress) -> Verification:
    """See the module. Raises nothing that damage causes: all of it is in the result."""
    result = Verification()
    _Verify(bookie, progress, result).run()
    return result


class _Verify:
    def __init__(self, bookie: StoppedBookie, progress: Progress, result: Verification) -> None:
        self._bookie = bookie
        self._progress = progress
        self._result = result
        self._index: RocksLocationIndex | None = None
        # Live records by log, as the scan of the logs found them; None for a log that could not be read.
        self._live: dict[int, int] = {}
        # What the state records of all logs say together.
        self._states: dict[int, LedgerRecord] = {}
        # What the next start replays: after a crash in a flush the index's ledger records may be behind its locations.
        self._replayed: dict[int, LedgerRecord] = {}

    def run(self) -> None:
        self._check_cookie()
        self._check_mark()
        self._check_journals()
        self._open_index()
        self._check_log_ids()
        for log in self._bookie.logs():
            self._check_log(log)
        if self._bookie.files.exists(self._bookie.layout.index):
            self._check_index_files()
        if self._index is not None:
            self._check_locations(self._index)
            self._check_ledgers(self._index)

    def _note(
        self, part: str, path: str, verdict: str, *, records: int = 0, size: int = 0, note: str = ""
    ) -> None:
        self._result.checks.append(VerifiedPart(part, path, verdict, records, size, note))

    def _failed(self, part: str, path: str, error: str) -> None:
        self._result.found(part, path, error)
        self._note(part, path, DAMAGE, note=error)

    # --- identity, mark, journals --------------------------------------------------------------------------------------

    def _check_cookie(self) -> None:
        path = self._bookie.layout.cookie
        error = check_identity(self._bookie)
        if error:
            self._failed("cookie", path, error)
        else:
            self._note("cookie", path, SOUND, records=1)

    def _check_mark(self) -> None:
        path = self._bookie.layout.mark
        try:
            mark = read_mark(self._bookie)
        except MagnetarError as error:
            self._failed("mark", path, error.message)
            return
        if not mark and self._bookie.logs():
            what = "is missing" if mark is None else "is older than this bookie's data"
            self._failed(
                "mark", path, f"the checkpoint mark {what}; restore it from a backup of this directory"
            )
        else:
            self._note("mark", path, SOUND, records=len(mark or {}))

    def _check_journals(self) -> None:
        """One row a needed file; unneeded ones are nothing to a start."""
        try:
            for directory in journal_directories(self._bookie):
                if directory.mark is not None:
                    self._check_journal(directory.path, directory.mark)
        except StorageFailed as error:  # a start would be refused as well
            self._failed("journal", str(error.details.get("path", "")), error.message)
        except MagnetarError as error:  # without cookie or mark it is not known which journals are needed
            self._note("journal", "", NOT_CHECKED, note=error.message)

    def _check_journal(self, directory: str, mark: JournalPosition) -> None:
        files, instance = self._bookie.files, self._bookie.cookie.instance
        total = sum(size for sequence, size in journal_files(files, directory) if sequence >= mark.sequence)
        current: NeededFile | None = None
        ended = False
        before, records, verdict, note = 0, 0, SOUND, ""

        def end_file() -> None:
            if current is not None and not current.missing:
                self._note("journal", current.path, verdict, records=records, size=current.bytes, note=note)

        for item in walk_journal(files, directory, instance, mark):
            if isinstance(item, NeededFile):
                end_file()
                before += current.bytes if current is not None else 0
                current, records, verdict, note = item, 0, SOUND, ""
                if item.missing:
                    self._failed("journal", item.path, "it is missing, and the checkpoint mark needs it")
            elif isinstance(item, Record):
                assert current is not None
                self._progress("journals", before + item.position, total)
                records += 1
                if item.offset < mark.offset:
                    continue
                try:
                    change = ledger_change(item)
                except DataDirectoryError as error:
                    verdict, note = DAMAGE, error.message
                    self._result.found("journal", current.path, note, position=item.position)
                    continue
                if change is not None and not ended:
                    known = self._replayed.get(change[0], LedgerRecord())
                    self._replayed[change[0]] = known.merged(change[1])
            else:
                # Behind damage or a torn tail a start reads no further.
                ended = ended or item.verdict in (GapVerdict.DAMAGE, GapVerdict.TORN_TAIL)
                at, name = item.gap.position, item.verdict.value
                if item.verdict.is_damage:
                    verdict, note = DAMAGE, f"{name} at or after byte {at}"
                    self._result.found("journal", item.path, f"{name}, offset {item.gap.offset}", position=at)
                elif item.verdict is GapVerdict.TORN_TAIL and current is not None and verdict == SOUND:
                    if not is_clean_end(files, current, instance, item.gap):
                        verdict, note = TORN, f"at byte {at}: never acknowledged"
        end_file()

    # --- entry logs ----------------------------------------------------------------------------------------------------

    def _open_index(self) -> None:
        try:
            self._index = self._bookie.index
        except MagnetarError as error:
            if self._bookie.logs() or self._bookie.files.exists(self._bookie.layout.index):
                self._failed("index", self._bookie.layout.index, error.message)
            else:
                self._note("index", self._bookie.layout.index, SOUND, note="not made yet")

    def _check_log_ids(self) -> None:
        """No number twice, and the file of numbers."""
        for log, other in pairwise(self._bookie.logs()):
            if log.log_id == other.log_id:
                self._failed("log ids", other.path, f"this entry log is in {os.path.dirname(log.path)} too")
        path = self._bookie.layout.log_ids
        if not self._bookie.files.exists(path):
            if self._bookie.logs():
                self._failed("log ids", path, f"it is missing; {_STEPS_OVER}")
        elif decode_log_ids(self._bookie.files.read(path)) is None:
            self._failed("log ids", path, f"it is damaged; {_STEPS_OVER}")
        else:
            self._note("log ids", path, SOUND, records=1)

    def _check_log(self, log: LogFile) -> None:
        try:
            with closing(self._bookie.files.open(log.path, read_only=True)) as file:
                self._check_records(log, file)
        except MagnetarError as error:
            self._failed("entry log", log.path, error.message)

    def _check_records(self, log: LogFile, file: File) -> None:
        scan, sums = LogScan(log.log_id, file.size()), LogSums(log.log_id, self._index)
        verdict, note = SOUND, ""
        header_torn = False
        for found in scan_log(file.read_at, scan):
            self._progress(f"entry log {log.log_id:08x}", found.offset, scan.size)
            live = sums.take(found)
            if found.data is not None:
                if found.entry_id == STATE_ENTRY and (fault := self._take_state(found)):
                    verdict, note = DAMAGE, fault
                    self._result.found(
                        "entry log", log.path, fault, position=found.offset, ledger_id=found.ledger_id
                    )
            elif found.torn and not live:
                # Not even the header of this log was ever synced.
                header_torn = header_torn or not found.offset
                verdict = TORN if verdict == SOUND else verdict
                note = note or f"{found.length} bytes at byte {found.offset}: never synced"
            else:
                verdict, note = DAMAGE, f"{found.length} bytes at byte {found.offset}"
                if not live:  # else it is reported by ledger and entry when the locations are checked
                    self._result.found("entry log", log.path, note, position=found.offset)
        self._live[log.log_id] = sums.live
        header_fault = f"it {scan.header_fault}" if scan.header_fault and not header_torn else ""
        for damage in filter(None, (header_fault, sums.footer_fault(scan))):
            verdict, note = DAMAGE, damage
            self._result.found("entry log", log.path, damage)
        self._note("entry log", log.path, verdict, records=sums.records, size=scan.size, note=note)

    def _take_state(self, found: Scanned) -> str:
        """Merges it with what is known of its ledger. What is wrong with it; "" if nothing is."""
        try:
            state = decode_ledger_record(found.data or b"")
        except MagnetarError as error:
            return error.message
        known = self._states.get(found.ledger_id)
        self._states[found.ledger_id] = state if known is None else known.merged(state)
        return ""

    # --- index -----------------------------------------------------------------------------------------------------------

    def _check_index_files(self) -> None:
        """RocksDB's files as bytes: a walk of the index reads no filter. The scrub of the running bookie left checksums."""
        files, directory = self._bookie.files, self._bookie.layout.index
        scrubbed = ScrubProgress(files, self._bookie.layout.scrub)
        done = known = damaged = 0
        try:
            scrubbed.load()
            names = database_file_names(files, directory)
            sizes = {name: file_size(files, os.path.join(directory, name)) for name in names}
            total = sum(sizes.values())
            for name, size in sizes.items():
                path = os.path.join(directory, name)
                check = DatabaseFileCheck(name, size, scrubbed.tables.get(name))
                try:
                    with closing(files.open(path, read_only=True)) as file:
                        for offset in range(0, size, _STEP_BYTES):
                            check.take(file.read_at(offset, _STEP_BYTES))
                    damage = check.fault(names)
                except MagnetarError as error:
                    damage = error.message
                if damage:
                    damaged += 1
                    self._result.found("index files", path, damage)
                known += check.compared
                done += size
                self._progress("index files", done, total)
        except MagnetarError as error:
            self._failed("index files", directory, error.message)
            return
        unseen = len(names) - known
        note = f"{unseen} of them no scrub has seen: only read" if unseen else ""
        verdict = DAMAGE if damaged else SOUND
        self._note("index files", directory, verdict, records=len(names), size=done, note=note)

    def _check_locations(self, index: RocksLocationIndex) -> None:
        counts: dict[int, int] = {}
        path = self._bookie.layout.index
        total, estimate = 0, index.estimated_locations()
        try:
            for page in location_pages(index):
                for _, _, location in page:
                    counts[location.log_id] = counts.get(location.log_id, 0) + 1
                total += len(page)
                self._progress("locations", total, max(total, estimate))
        except StorageFailed as error:
            self._failed("index", path, error.message)
            return
        suspects = {log_id for log_id, count in counts.items() if self._live.get(log_id) != count}
        damaged = self._read_suspects(index, suspects) if suspects else 0
        note = f"{damaged:,} without a good record" if damaged else ""
        if below := index.incomplete_below():
            note = (
                f"{note}; " * bool(note)
                + "rebuilt from damaged logs: more ledgers"
                + (f" below {below}" if below != ALL_LEDGERS else "")
                + " may have lost entries here"
            )
        self._note("index", path, DAMAGE if damaged else SOUND, records=total, note=note)

    def _read_suspects(self, index: LocationIndex, suspects: set[int]) -> int:
        damaged = 0
        deleted: tuple[int, bool] = (-1, False)
        for ledger_id, entry_id, location in chain.from_iterable(location_pages(index)):
            if location.log_id not in suspects:
                continue
            if ledger_id != deleted[0]:
                record = index.get_ledger(ledger_id)
                deleted = (ledger_id, record is not None and record.deleted_at_ms > 0)
            if deleted[1]:
                continue  # nothing of it is served, and its logs may be deleted already
            path, fault = self._fault_at(ledger_id, entry_id, location)
            if fault:
                damaged += 1
                at = location.offset
                self._result.found("entry", path, fault, position=at, ledger_id=ledger_id, entry_id=entry_id)
        return damaged

    def _fault_at(self, ledger_id: int, entry_id: int, location: Location) -> tuple[str, str]:
        """The file, and why the entry that the index says to be there cannot be served; "" if it can."""
        path = self._bookie.log_path(location.log_id)
        if path is None:
            missing = f"entry log {location.log_id:08x}, where the index has it, is missing"
            return self._bookie.layout.index, missing
        try:
            with closing(self._bookie.files.open(path, read_only=True)) as file:
                data = file.read_at(location.offset, RECORD_HEADER_BYTES + location.length)
            entry = record_entry(data, 0, location.log_id, ledger_id, entry_id, location.length)
        except EntryDamaged:
            return path, "the record is damaged"
        except MagnetarError as error:
            return path, error.message
        return path, stored_entry(ledger_id, entry_id, "entry log", path, location.offset, entry, "").damage

    def _check_ledgers(self, index: LocationIndex) -> None:
        """A ledger record says at least what the logs say, and no entry lies beyond its last one."""
        path = self._bookie.layout.index
        before = self._result.damage_found
        count = 0
        try:
            for ledger_id, record in ledgers_of(index):
                count += 1
                record = record.merged(self._replayed.get(ledger_id, record))
                state = self._states.pop(ledger_id, None)
                # That entries may have been lost is taken back once they were repaired, and state records are never.
                if state is not None and record.merged(state)._replace(unknown=record.unknown) != record:
                    text = f"the index does not say what a state record says: {_missing(record, state)}"
                    self._result.found("ledger record", path, text, ledger_id=ledger_id)
                for entry_id, _ in index.list_locations(ledger_id, record.last_entry, 1):
                    text = f"entry {entry_id} lies beyond the last entry {record.last_entry} of its ledger's record"
                    self._result.found("ledger record", path, text, ledger_id=ledger_id, entry_id=entry_id)
            self._check_unrecorded(index)
        except (StorageFailed, DataDirectoryError) as error:
            self._failed("ledger records", path, error.message)
            return
        damaged = self._result.damage_found - before
        self._note("ledger records", path, DAMAGE if damaged else SOUND, records=count)

    def _check_unrecorded(self, index: LocationIndex) -> None:
        """States in the logs of ledgers without a record: fine once the ledger was deleted and forgotten."""
        for ledger_id, state in sorted(self._states.items()):
            if state.deleted_at_ms or ledger_id in self._replayed:
                continue
            if index.list_locations(ledger_id, count=1):
                text = "entries and a state record are in the entry logs, but the index has no record of the ledger"
                self._result.found("ledger record", self._bookie.layout.index, text, ledger_id=ledger_id)


def _missing(record: LedgerRecord, state: LedgerRecord) -> str:
    wanted = record.merged(state)
    return ", ".join(
        f"{name} {new}"
        for name, old, new in zip(LedgerRecord._fields, record, wanted, strict=True)
        if old != new
    )
