"""The journals of a bookie: files, records, and what a start makes of each gap (the table in journal/recovery)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any, NamedTuple

from magnetar.proto.errors import DataDirectoryError

from ..index import LedgerRecord
from ..journal.records import Gap, Record, RecordType, incarnation_of, ledger_change, scan_journal
from ..journal.recovery import (
    GapVerdict,
    NeededFile,
    begun_files,
    is_clean_end,
    journal_files,
    walk_journal,
)
from ..layout import journal_path
from ..mark import JournalPosition, decode_mark
from .stopped import BookieData

# (label, bytes done, bytes in all)
Progress = Callable[[str, int, int], None]
# What `--json` prints, and a running bookie sends (WIRE.md); "kind" says what it is.
Row = dict[str, Any]
_TYPE_NAMES = {int(known): known.name for known in RecordType}


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
            number, name, path := layout.directory(name), mark.get(name), path in layout.journals
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
) -> Iterator[Row]:
    """Directory by directory, file by file in order, record by record; a gap wherever the order breaks and at each end.

        journal  the fields of JournalDirectory
        file     journal, sequence, path, bytes; base: the offset of its first record, -1 when it was never begun or that
                 cannot be read; state: "needed" by a start; "unneeded", its records are in the entry logs; "prepared",
                 never begun in this life; "missing" although the mark names it
        record   a good record. Ids and last_add_confirmed are -1 where its type has none; deleted_at_ms is 0 for all
                 types but DELETED; below_mark: a start reads over it; payload_bytes follow its header
        gap      a place without the record that should be there. verdict: "clean end", "complete" (the next file goes on
                 here), "torn tail" (never acknowledged), "damage", "damage below the mark" (the entry logs have what was
                 there), "not needed", "being written" (by a running bookie); damage: whether bytes changed that were
                 synced. resumes_at is the offset of the next good record, -1 if there is none

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
            mark = directory.mark._asdict() if directory.mark is not None else None
            yield {"kind": "journal"} | directory._asdict() | {"mark": mark}
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
        self._files = bookie.files
        self._instance = bookie.cookie.instance
        self._directory = directory
        self._file = file
        self._from_mark = from_mark
        self._progress = progress

    def run(self) -> Iterator[Row]:
        mark = self._directory.mark
        sizes = dict(journal_files(self._files, self._directory.path))
        before = [sequence for sequence in sizes if mark is None or sequence < mark.sequence]
        for sequence in before:
            yield from self._unneeded(sequence, sizes.pop(sequence))
        if mark is not None:
            for row in self._needed(mark, sum(sizes.values())):
                if row["kind"] == "file":
                    sizes.pop(row["sequence"], None)
                yield row
        for sequence, size in sizes.items():
            yield from self._unneeded(sequence, size)

    def _wanted(self, path: str) -> bool:
        wanted = not self._file or path == self._file or path.rpartition("/")[2] == self._file
        self.found = self.found or wanted
        return wanted

    def _needed(self, mark: JournalPosition, total: int) -> Iterator[Row]:
        """What a start reads, as it reads it."""
        current = NeededFile(0, "", 0, None)
        before = 0
        for item in walk_journal(self._files, self._directory.path, self._instance, mark):
            if isinstance(item, NeededFile):
                before += current.bytes
                current = item
                if self._wanted(item.path):
                    yield self._file_row(item, "missing" if item.missing else "needed")
            elif isinstance(item, Record):
                self._progress("journals", before + item.position, total)
                below = item.offset < mark.offset
                if self._wanted(current.path) and not (below and self._from_mark):
                    yield self._record_row(current.path, item, below)
            elif self._wanted(item.path):
                name = item.verdict.value
                if item.verdict is GapVerdict.TORN_TAIL:
                    name = (
                        "clean end" if is_clean_end(self._files, current, self._instance, item.gap) else name
                    )
                yield self._gap_row(item.path, item.gap, name, damage=item.verdict.is_damage)
        self._progress("journals", total, total)

    def _unneeded(self, sequence: int, size: int) -> Iterator[Row]:
        """A file that no start reads; its records are shown if it was asked for."""
        path = journal_path(self._directory.path, sequence)
        if not self._wanted(path):
            return
        begun = begun_files(self._files, self._directory.path, self._instance, [sequence])
        found = begun[0] if begun else NeededFile(sequence, path, size, None)
        if not self._from_mark:
            yield self._file_row(found, "unneeded" if begun else "prepared")
        if not self._file or found.base is None:
            return
        incarnation = incarnation_of(self._instance, sequence)
        with closing(self._files.open(path, read_only=True)) as file:
            for item in scan_journal(file.read_at, size, incarnation, found.base):
                if isinstance(item, Record):
                    yield self._record_row(path, item, True)
                else:
                    yield self._gap_row(path, item, "not needed", damage=False)

    def _file_row(self, file: NeededFile, state: str) -> Row:
        return {
            "kind": "file",
            "journal": self._directory.number,
            "sequence": file.sequence,
            "path": file.path,
            "bytes": file.bytes,
            "state": state,
            "base": -1 if file.base is None else file.base,
        }

    def _record_row(self, path: str, record: Record, below_mark: bool) -> Row:
        known: tuple[int, LedgerRecord] | None = None
        with suppress(DataDirectoryError):
            known = ledger_change(record)
        ledger_id, change = known or (-1, LedgerRecord())
        return {
            "kind": "record",
            "journal": self._directory.number,
            "path": path,
            "position": record.position,
            "offset": record.offset,
            "synced_to": record.synced_to,
            "type": _TYPE_NAMES.get(record.type) or f"UNKNOWN {record.type}",
            "ledger_id": ledger_id,
            "entry_id": change.last_entry,
            "last_add_confirmed": max(change.last_add_confirmed, change.explicit_lac),
            "deleted_at_ms": change.deleted_at_ms,
            "below_mark": below_mark,
            "payload_bytes": len(record.payload),
            "type_number": record.type,
        }

    def _gap_row(self, path: str, gap: Gap, verdict: str, *, damage: bool) -> Row:
        return {
            "kind": "gap",
            "journal": self._directory.number,
            "path": path,
            "position": gap.position,
            "offset": gap.offset,
            "resumes_at": -1 if gap.resumes_at is None else gap.resumes_at,
            "later_synced_to": gap.later_synced_to,
            "verdict": verdict,
            "damage": damage,
        }
