"""The journals of a stopped bookie: files, records, and what a start makes of each gap (the table in journal/recovery)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from magnetar.proto.errors import DataDirectoryError
from magnetar.proto.ledger_entry import LEDGER_ENTRY_FIELDS, LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.files import File

from ..journal.records import (
    DELETED,
    FENCE,
    LAST_CONFIRMED,
    RECORD_HEADER_BYTES,
    Gap,
    Record,
    RecordType,
    incarnation_of,
    scan_journal,
)
from ..journal.recovery import BegunFile, GapVerdict, begun_files, journal_files, judge
from ..layout import journal_path
from ..mark import JournalPosition, decode_mark
from .stopped import StoppedBookie

__all__ = [
    "JournalDirectory",
    "JournalFileReport",
    "JournalGap",
    "JournalRecord",
    "Progress",
    "journal_directories",
    "no_progress",
    "read_mark",
    "walk_journals",
]

# (label, bytes done, bytes in all)
Progress = Callable[[str, int, int], None]
_FIND_BYTES = 4 << 20


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
    """A good record. Ids and last_add_confirmed are -1 where its type has none; `payload` follows its header."""

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
    payload: bytes
    kind: int


class JournalGap(NamedTuple):
    """A place without the record that should be there.

    `verdict`: "clean end", "complete" (the next file goes on here), "torn tail" (never acknowledged), "damage", "damage
    below the mark" (the entry logs have what was there), "not needed". `resumes_at` is the offset of the next good
    record, -1 if there is none.
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


def read_mark(bookie: StoppedBookie) -> dict[str, JournalPosition] | None:
    """Positions by the directory's name; None without a mark. DataDirectoryError when it is damaged."""
    path = bookie.layout.mark
    return decode_mark(bookie.files.read(path), path) if bookie.files.exists(path) else None


def journal_directories(bookie: StoppedBookie) -> list[JournalDirectory]:
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
    bookie: StoppedBookie,
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
        bookie: StoppedBookie,
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
        self._done = self._total = 0

    def run(self) -> Iterator[JournalFileReport | JournalRecord | JournalGap]:
        directory, instance = self._directory, self._bookie.cookie.instance
        sizes = dict(journal_files(self._bookie.files, directory.path))
        mark = directory.mark
        needed = [sequence for sequence in sizes if mark is not None and sequence >= mark.sequence]
        begun = begun_files(self._bookie.files, directory.path, instance, needed)
        self._total = sum(sizes[one.sequence] for one in begun)
        if mark is not None and mark.sequence not in sizes:
            path = journal_path(directory.path, mark.sequence)
            if self._wanted(path):
                yield JournalFileReport(directory.number, mark.sequence, path, 0, "missing", -1)
        in_order = {one.sequence: one for one in begun}
        expected = mark.base if mark is not None else 0
        for sequence, size in sizes.items():
            one = in_order.get(sequence)
            if one is None:
                yield from self._unneeded(sequence, size)
                continue
            assert mark is not None
            later = next((other for other in begun if other.sequence > sequence), None)
            wanted = self._wanted(one.path)
            if wanted:
                base = -1 if one.base is None else one.base
                yield JournalFileReport(directory.number, sequence, one.path, size, "needed", base)
            for item in self._scan(one, size, expected, mark, later):
                if isinstance(item, JournalRecord):
                    expected = item.offset + RECORD_HEADER_BYTES + len(item.payload)
                    if item.below_mark and self._from_mark:
                        continue
                if wanted:
                    yield item
        if mark is not None and mark.sequence in sizes and not begun and mark.offset > mark.base:
            # Everything in the marked file is lost, its BEGIN record too.
            path = journal_path(directory.path, mark.sequence)
            if self._wanted(path):
                yield JournalGap(directory.number, path, 0, mark.base, -1, -1, GapVerdict.DAMAGE.value)

    def _wanted(self, path: str) -> bool:
        wanted = not self._file or path == self._file or path.rpartition("/")[2] == self._file
        self.found = self.found or wanted
        return wanted

    def _scan(
        self,
        one: BegunFile,
        size: int,
        expected: int,
        mark: JournalPosition,
        later: BegunFile | None,
    ) -> Iterator[JournalRecord | JournalGap]:
        number = self._directory.number
        incarnation = incarnation_of(self._bookie.cookie.instance, one.sequence)
        file = self._bookie.files.open(one.path, read_only=True)
        try:
            for item in scan_journal(file.read_at, size, incarnation, expected):
                self._progress("journals", self._done + item.position, self._total)
                if isinstance(item, Record):
                    yield _record(number, one.path, item, item.offset < mark.offset)
                    continue
                verdict = judge(
                    item,
                    mark_offset=mark.offset,
                    later_begun=later is not None,
                    later_base=later.base if later is not None else None,
                )
                name = verdict.value
                if verdict is GapVerdict.TORN_TAIL and not _holds(file, size, item.position, incarnation):
                    name = "clean end"
                yield _gap(number, one.path, item, name)
        finally:
            file.close()
        self._done += size
        self._progress("journals", self._done, self._total)

    def _unneeded(self, sequence: int, size: int) -> Iterator[JournalFileReport | JournalRecord | JournalGap]:
        """A file that no start reads; its records are shown if it was asked for."""
        number, path = self._directory.number, journal_path(self._directory.path, sequence)
        if not self._wanted(path):
            return
        instance = self._bookie.cookie.instance
        begun = begun_files(self._bookie.files, self._directory.path, instance, [sequence])
        base = begun[0].base if begun else None
        state = "unneeded" if begun else "prepared"
        if not self._from_mark:
            yield JournalFileReport(number, sequence, path, size, state, -1 if base is None else base)
        if not self._file or base is None:
            return
        file = self._bookie.files.open(path, read_only=True)
        try:
            for item in scan_journal(file.read_at, size, incarnation_of(instance, sequence), base):
                if isinstance(item, Record):
                    yield _record(number, path, item, True)
                else:
                    yield _gap(number, path, item, "not needed")
        finally:
            file.close()


def _record(number: int, path: str, record: Record, below_mark: bool) -> JournalRecord:
    ledger_id = entry_id = confirmed = -1
    deleted_at_ms = 0
    payload = record.payload
    if record.type == RecordType.ADD and len(payload) >= LEDGER_ENTRY_HEADER_BYTES:
        ledger_id, entry_id, confirmed, _ = LEDGER_ENTRY_FIELDS.unpack_from(payload)
    elif record.type == RecordType.FENCE:
        (ledger_id,) = FENCE.unpack_from(payload)
    elif record.type == RecordType.LAST_CONFIRMED:
        ledger_id, confirmed = LAST_CONFIRMED.unpack_from(payload)
    elif record.type == RecordType.DELETED:
        ledger_id, deleted_at_ms = DELETED.unpack_from(payload)
    try:
        name = RecordType(record.type).name
    except ValueError:
        name = f"UNKNOWN {record.type}"
    return JournalRecord(
        number,
        path,
        record.position,
        record.offset,
        record.synced_to,
        name,
        ledger_id,
        entry_id,
        confirmed,
        deleted_at_ms,
        below_mark,
        payload,
        record.type,
    )


def _gap(number: int, path: str, gap: Gap, verdict: str) -> JournalGap:
    resumes_at = -1 if gap.resumes_at is None else gap.resumes_at
    return JournalGap(number, path, gap.position, gap.offset, resumes_at, gap.later_synced_to, verdict)


def _holds(file: File, size: int, position: int, incarnation: int) -> bool:
    """True if the file has anything of this incarnation at or after `position`: then a write was torn there."""
    pattern = incarnation.to_bytes(8, "big")
    while position < size:
        data = file.read_at(position, _FIND_BYTES)
        if pattern in data:
            return True
        if len(data) <= len(pattern):
            return False
        position += len(data) - len(pattern) + 1
    return False
