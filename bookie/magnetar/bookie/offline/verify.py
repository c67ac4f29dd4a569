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

from magnetar.proto.errors import DataDirectoryError, MagnetarError, StorageFailed
from magnetar.runtime.files import file_size

from ..entry_log.log_ids import decode_log_ids
from ..index import ALL_LEDGERS, LedgerRecord, LocationIndex, RocksLocationIndex
from ..index.database_files import DatabaseFileCheck, database_file_names
from ..index.locations import ledgers_of, location_pages
from ..journal.records import RecordType
from ..scrub.progress import ScrubProgress
from .entry_logs import LogBroken, LogHeader, LogRecord, read_located, walk_entry_log
from .identity import check_identity
from .journals import (
    JournalDirectory,
    JournalFileReport,
    JournalGap,
    JournalRecord,
    Progress,
    no_progress,
    read_mark,
    walk_journals,
)
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
            self._walk_journals()
        except StorageFailed as error:  # a start would be refused as well
            self._failed("journal", str(error.details.get("path", "")), error.message)
        except MagnetarError as error:  # without cookie or mark it is not known which journals are needed
            self._note("journal", "", NOT_CHECKED, note=error.message)

    def _walk_journals(self) -> None:
        current: JournalFileReport | None = None
        ended = False
        records, verdict, note = 0, SOUND, ""
        for item in walk_journals(self._bookie, progress=self._progress):
            if isinstance(item, JournalDirectory):
                ended = False
            elif isinstance(item, JournalFileReport):
                if current is not None:
                    self._note(
                        "journal", current.path, verdict, records=records, size=current.bytes, note=note
                    )
                current, records, verdict, note = None, 0, SOUND, ""
                if item.state == "missing":
                    self._failed("journal", item.path, "it is missing, and the checkpoint mark needs it")
                elif item.state == "needed":
                    current = item
            elif isinstance(item, JournalRecord):
                records += 1
                if item.type not in RecordType.__members__ and not item.below_mark:
                    verdict, note = (
                        DAMAGE,
                        f"a record of type {item.type_number}, which this program does not know",
                    )
                    self._result.found("journal", item.path, note, position=item.position)
                if item.change is not None and not item.below_mark and not ended:
                    known = self._replayed.get(item.ledger_id, LedgerRecord())
                    self._replayed[item.ledger_id] = known.merged(item.change)
            elif isinstance(item, JournalGap):
                ended = ended or item.ends_replay
                if item.is_damage:
                    verdict, note = DAMAGE, f"{item.verdict} at or after byte {item.position}"
                    self._result.found(
                        "journal", item.path, f"{item.verdict}, offset {item.offset}", position=item.position
                    )
                elif item.verdict == TORN and verdict == SOUND:
                    verdict, note = TORN, f"at byte {item.position}: never acknowledged"
        if current is not None:
            self._note("journal", current.path, verdict, records=records, size=current.bytes, note=note)

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
        verdict, note, records, size = SOUND, "", 0, log.bytes
        header_damage = ""
        try:
            for item in walk_entry_log(self._bookie, log, index=self._index, progress=self._progress):
                if isinstance(item, LogRecord):
                    if item.state is not None:
                        known = self._states.get(item.ledger_id)
                        self._states[item.ledger_id] = (
                            item.state if known is None else known.merged(item.state)
                        )
                    elif item.type == "state":
                        verdict, note = DAMAGE, item.content
                        self._result.found(
                            "entry log",
                            log.path,
                            item.content,
                            position=item.position,
                            ledger_id=item.ledger_id,
                        )
                elif isinstance(item, LogBroken):
                    if item.torn and not item.live:
                        if not item.position:  # not even the header of this log was ever synced
                            header_damage = ""
                        verdict = TORN if verdict == SOUND else verdict
                        note = note or f"{item.bytes} bytes at byte {item.position}: never synced"
                        continue
                    verdict, note = DAMAGE, f"{item.bytes} bytes at byte {item.position}"
                    if (
                        not item.live
                    ):  # else it is reported by ledger and entry when the locations are checked
                        self._result.found("entry log", log.path, note, position=item.position)
                elif isinstance(item, LogHeader):
                    size, header_damage = item.bytes, item.damage
                else:
                    records = item.records
                    self._live[log.log_id] = item.live
                    for damage in filter(None, (header_damage, item.damage)):
                        verdict, note = DAMAGE, damage
                        self._result.found("entry log", log.path, damage)
        except MagnetarError as error:
            self._failed("entry log", log.path, error.message)
            return
        self._note("entry log", log.path, verdict, records=records, size=size, note=note)

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
            entry = read_located(self._bookie, ledger_id, entry_id, location)
            if entry.damage:
                damaged += 1
                self._result.found(
                    "entry",
                    entry.path or self._bookie.layout.index,
                    entry.damage,
                    position=location.offset,
                    ledger_id=ledger_id,
                    entry_id=entry_id,
                )
        return damaged

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
