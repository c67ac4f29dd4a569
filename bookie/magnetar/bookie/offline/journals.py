"""The journals of a stopped bookie: files, records, and what a start makes of each gap (the table in journal/recovery)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import NamedTuple

from magnetar.proto.errors import DataDirectoryError

from ..index import LedgerRecord
from ..journal.records import (
    Gap,
    Record,
    RecordType,
    holds_trace,
    incarnation_of,
    ledger_change,
    scan_journal,
)
from ..journal.recovery import GapVerdict, NeededFile, begun_files, journal_files, walk_journal
from ..layout import journal_path
from ..mark import JournalPosition, decode_mark
from .stopped import BookieData

# (label, bytes done, bytes in all)
Progress = Callable[[str, int, int], None]
_TYPE_NAMES = {int(known): known.name for known in RecordType}
_NOTHING = LedgerRecord()


def no_progress(label: str, done: int, total: int) -> None:
    """Nobody watches."""


class JournalDirectory(NamedTuple):
    """A journal directory: of the settings, or one that only the mark or the cookie still names."""

    number: int
    name: str
    path: str
    # From where a start replays it; None: nothing of it.
    mark: JournalPosition | None
    in_settings: bool


class JournalFileReport(NamedTuple):
    """A file. `base` is the offset of its first record, -1 when it was never begun or that cannot be read.

    `state`: "needed" by a start; "unneeded", its records are in the entry logs; "prepared", never begun in this life;
    "missing" although the mark names it.
    """

    journal: int
    sequence: int
    path: str
    bytes: int
    state: str
    base: int


class JournalRecord(NamedTuple):
    """A good record. Ids and last_add_confirmed are -1 where its type has none; the payload follows its header."""

    journal: int
    path: str
    position: int
    offset: int
    synced_to: int
    type: str
    ledger_id: int
    entry_id: int
    last_add_confirmed: int
    # ms since the epoch, 0 for all types but DELETED.
    deleted_at_ms: int
    # Before the mark: a start reads over it.
    below_mark: bool
    payload_bytes: int
    type_number: int
    # What it adds to the record of its ledger; None for those that the journal writes for itself, and unknown types.
    change: LedgerRecord | None


class JournalGap(NamedTuple):
    """A place without the record that should be there.

    `verdict`: "clean end", "complete" (the next file goes on here), "torn tail" (never acknowledged), "damage", "damage
    below the mark" (the entry logs have what was there), "not needed", "being written" (by a running bookie). `resumes_at`
    is the offset of the next good record, -1 if there is none.
    """

    journal: int
    path: str
    position: int
    offset: int
    resumes_at: int
    later_synced_to: int
    verdict: str

    @property
    def is_damage(self) -> bool:
        """True where a start finds bytes changed that were synced."""
        return self.verdict in (GapVerdict.DAMAGE.value, GapVerdict.DAMAGE_BELOW_MARK.value)

    @property
    def ends_replay(self) -> bool:
        """True where a start reads no further: what is behind it was never acknowledged, or the start is refused."""
        return self.verdict in (GapVerdict.DAMAGE.value, GapVerdict.TORN_TAIL.value)


def read_mark(bookie: BookieData) -> dict[str, JournalPosition] | None:
    """Positions by the directory's name; None without a mark. DataDirectoryError when it is damaged."""
    path = bookie.layout.mark
    return decode_mark(bookie.files.read(path), path) if bookie.files.exists(path) else None


def journal_directories(bookie: BookieData) -> list[JournalDirectory]:
    """Numbered in the order of the settings; what only mark or cookie name comes after. DataDirectoryError (mark)."""
    layout = bookie.layout
    mark = read_mark(bookie) or {}
    names = dict.fromkeys([*map(layout.name_of, layout.journals), *mark, *bookie.cookie.journal_directories])
    return [
        JournalDirectory(
            number,
            name,
            path := layout.directory(name),
            mark.get(name),
            path in layout.journals,
        )
        for number, name in enumerate(names)
    ]


def walk_journals(
    bookie: BookieData,
    *,
    journal: int | None = None,
    file: str = "",
    from_mark: bool = False,
    progress: Progress = no_progress,
) -> Iterator[JournalDirectory | JournalFileReport | JournalRecord | JournalGap]:
    """Directory by directory, file by file in order, record by record; a gap wherever the order breaks and at each end.

    `journal`: only this number; `file`: only this path or name. Of unneeded files, records are given for `file` only, and
    with `from_mark` neither they nor records below the mark. DataDirectoryError: no such journal or file, a damaged mark,
    another format version. StorageFailed: a file cannot be read.
    """
    directories = journal_directories(bookie)
    if journal is not None and journal >= len(directories):
        last = len(directories) - 1
        raise DataDirectoryError(f"there is no journal directory {journal}; they are numbered 0 to {last}")
    found = False
    for directory in directories:
        if journal is not None and directory.number != journal:
            continue
        if not file:
            yield directory
        walk = _DirectoryWalk(bookie, directory, file, from_mark, progress)
        yield from walk.run()
        found = found or walk.found
    if file and not found:
        raise DataDirectoryError(
            f"there is no journal file {file}; `magnetar bookie journal dump` lists them"
        )


class _DirectoryWalk:
    """One directory."""

    def __init__(
        self,
        bookie: BookieData,
        directory: JournalDirectory,
        file: str,
        from_mark: bool,
        progress: Progress,
    ) -> None:
        self.found = False
        self._bookie = bookie
        self._directory = directory
        self._file = file
        self._from_mark = from_mark
        self._progress = progress

    def run(self) -> Iterator[JournalFileReport | JournalRecord | JournalGap]:
        mark = self._directory.mark
        sizes = dict(journal_files(self._bookie.files, self._directory.path))
        before = [sequence for sequence in sizes if mark is None or sequence < mark.sequence]
        for sequence in before:
            yield from self._unneeded(sequence, sizes.pop(sequence))
        if mark is not None:
            for item in self._needed(mark, sum(sizes.values())):
                if isinstance(item, JournalFileReport):
                    sizes.pop(item.sequence, None)
                yield item
        for sequence, size in sizes.items():
            yield from self._unneeded(sequence, size)

    def _wanted(self, path: str) -> bool:
        wanted = not self._file or path == self._file or path.rpartition("/")[2] == self._file
        self.found = self.found or wanted
        return wanted

    def _needed(
        self, mark: JournalPosition, total: int
    ) -> Iterator[JournalFileReport | JournalRecord | JournalGap]:
        """What a start reads, as it reads it."""
        number, files, instance = self._directory.number, self._bookie.files, self._bookie.cookie.instance
        report = JournalFileReport(number, 0, "", 0, "", -1)
        before = 0
        for item in walk_journal(files, self._directory.path, instance, mark):
            if isinstance(item, NeededFile):
                before += report.bytes
                state = "missing" if item.missing else "needed"
                report = _report(number, item, state)
                if self._wanted(item.path):
                    yield report
            elif isinstance(item, Record):
                self._progress("journals", before + item.position, total)
                below = item.offset < mark.offset
                if self._wanted(report.path) and not (below and self._from_mark):
                    yield _record(number, report.path, item, below)
            elif self._wanted(item.path):
                gap, name = item.gap, item.verdict.value
                if item.verdict is GapVerdict.TORN_TAIL:
                    with closing(files.open(item.path, read_only=True)) as file:
                        incarnation = incarnation_of(instance, report.sequence)
                        if not holds_trace(file.read_at, report.bytes, incarnation, gap.position):
                            name = "clean end"
                yield _gap(number, item.path, gap, name)
        self._progress("journals", total, total)

    def _unneeded(self, sequence: int, size: int) -> Iterator[JournalFileReport | JournalRecord | JournalGap]:
        """A file that no start reads; its records are shown if it was asked for."""
        number, path = self._directory.number, journal_path(self._directory.path, sequence)
        if not self._wanted(path):
            return
        instance = self._bookie.cookie.instance
        begun = begun_files(self._bookie.files, self._directory.path, instance, [sequence])
        found = begun[0] if begun else NeededFile(sequence, path, size, None)
        if not self._from_mark:
            yield _report(number, found, "unneeded" if begun else "prepared")
        if not self._file or found.base is None:
            return
        with closing(self._bookie.files.open(path, read_only=True)) as file:
            for item in scan_journal(file.read_at, size, incarnation_of(instance, sequence), found.base):
                if isinstance(item, Record):
                    yield _record(number, path, item, True)
                else:
                    yield _gap(number, path, item, "not needed")


def _report(number: int, file: NeededFile, state: str) -> JournalFileReport:
    base = -1 if file.base is None else file.base
    return JournalFileReport(number, file.sequence, file.path, file.bytes, state, base)


def _record(number: int, path: str, record: Record, below_mark: bool) -> JournalRecord:
    try:
        ledger_id, change = ledger_change(record) or (-1, None)
    except DataDirectoryError:
        ledger_id, change = -1, None
    known = change or _NOTHING
    return JournalRecord(
        number,
        path,
        record.position,
        record.offset,
        record.synced_to,
        _TYPE_NAMES.get(record.type) or f"UNKNOWN {record.type}",
        ledger_id,
        known.last_entry,
        max(known.last_add_confirmed, known.explicit_lac),
        known.deleted_at_ms,
        below_mark,
        len(record.payload),
        record.type,
        change,
    )


def _gap(number: int, path: str, gap: Gap, verdict: str) -> JournalGap:
    resumes_at = -1 if gap.resumes_at is None else gap.resumes_at
    return JournalGap(number, path, gap.position, gap.offset, resumes_at, gap.later_synced_to, verdict)
