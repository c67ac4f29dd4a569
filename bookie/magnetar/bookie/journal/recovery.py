"""What a start makes of the journals: one decision table for gaps (rule 5), one walk, and the replay of the records.

A gap at offset X, in a file that a start has to read. The first row that matches holds.

    | good record behind | X and the mark        | highest synced_to behind | later file     | verdict           |
    |--------------------|-----------------------|--------------------------|----------------|-------------------|
    | any                | X >= mark             | <= X                     | begins at X    | COMPLETE          |
    | at or below mark   | X < mark              | any                      | any            | DAMAGE_BELOW_MARK |
    | any                | X < mark              | any                      | any            | DAMAGE            |
    | any                | X >= mark             | > X                      | any            | DAMAGE            |
    | any                | X >= mark             | <= X                     | begun          | DAMAGE            |
    | any                | X >= mark             | <= X                     | none begun     | TORN_TAIL         |

COMPLETE: the file was left in order, or by a start that took its torn tail for the end and could not flush what was before.
TORN_TAIL: never acknowledged, whatever good records follow (pages of one unsynced write persist in any order); it includes
the clean end. DAMAGE_BELOW_MARK: the entry logs have what is missing; it
is reported and the replay goes on. DAMAGE: acknowledged records are missing; the start is refused and nothing
is cut or overwritten.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from itertools import zip_longest
from typing import NamedTuple

from magnetar.proto.errors import DataDirectoryError, InvalidArgument
from magnetar.runtime.files import Files, file_size

from ..layout import DataLayout, journal_path
from ..mark import JournalPosition
from .records import (
    Gap,
    Record,
    RecordType,
    decode_begin,
    holds_records,
    holds_trace,
    incarnation_of,
    probe_begin,
    scan_journal,
)

_log = logging.getLogger(__name__)
_SLICE_RECORDS = 256
_WITHOUT_CONTENT = (RecordType.BEGIN, RecordType.SYNCED)


class GapVerdict(enum.Enum):
    """See the module's table."""

    COMPLETE = "complete"
    TORN_TAIL = "torn tail"
    DAMAGE = "damage"
    DAMAGE_BELOW_MARK = "damage below the mark"

    @property
    def is_damage(self) -> bool:
        """True where bytes changed that were synced."""
        return self in (GapVerdict.DAMAGE, GapVerdict.DAMAGE_BELOW_MARK)


def judge(gap: Gap, *, mark_offset: int, later_begun: bool, later_base: int | None) -> GapVerdict:
    """The table. `later_base` is the first offset of the next begun file, None when its BEGIN cannot be read."""
    if gap.offset >= mark_offset and later_begun and gap.later_synced_to <= gap.offset:
        if later_base == gap.offset or (later_base is None and gap.resumes_at is None):
            return GapVerdict.COMPLETE
    if gap.resumes_at is not None and gap.resumes_at <= mark_offset:
        return GapVerdict.DAMAGE_BELOW_MARK
    if gap.offset < mark_offset:
        return GapVerdict.DAMAGE
    if gap.later_synced_to > gap.offset:
        return GapVerdict.DAMAGE
    if later_begun:
        return GapVerdict.DAMAGE
    return GapVerdict.TORN_TAIL


class Recovered(NamedTuple):
    """What a replay found."""

    # Offset after the last record that counts: the next file begins here.
    end_offset: int
    # Every journal file in the directory with its size, oldest first; none is needed once the replay is flushed.
    files: list[tuple[int, int]]
    # Those that another recovery from the same mark would not read: before the mark's, or never begun.
    unneeded: list[tuple[int, int]]
    records: int
    # Damage below the mark, and records of ledgers or entries that cannot be, for people.
    warnings: list[str]


class NeededFile(NamedTuple):
    """A file that a start reads; in a walk its records and gaps follow."""

    sequence: int
    path: str
    bytes: int
    # Offset of its BEGIN record, None when that cannot be read although later records can.
    base: int | None
    # The mark needs it, and it is not there.
    missing: bool = False


class JudgedGap(NamedTuple):
    """A gap, and what a start makes of it."""

    path: str
    gap: Gap
    verdict: GapVerdict


def walk_journal(
    files: Files, directory: str, instance: int, mark: JournalPosition
) -> Iterator[NeededFile | Record | JudgedGap]:
    """All that a start finds in one journal directory, in order, records below the mark as well. Decides nothing.

    A start reads no further than DAMAGE or TORN_TAIL; other readers may. DataDirectoryError for an unknown format version,
    StorageFailed for a file that cannot be read.
    """
    sizes = dict(journal_files(files, directory))
    marked = journal_path(directory, mark.sequence)
    begun = begun_files(files, directory, instance, [one for one in sizes if one >= mark.sequence])
    if mark.sequence not in sizes:
        yield NeededFile(mark.sequence, marked, 0, None, missing=True)
    elif not begun and mark.offset > mark.base:
        # Everything in the marked file is lost, its BEGIN record too.
        yield JudgedGap(marked, Gap(mark.base, 0, None, -1), GapVerdict.DAMAGE)
    last: Record | None = None
    for found, later in zip_longest(begun, begun[1:]):
        yield found
        with closing(files.open(found.path, read_only=True)) as file:
            incarnation = incarnation_of(instance, found.sequence)
            expected = mark.base if last is None else last.end
            for item in scan_journal(file.read_at, found.bytes, incarnation, expected):
                if isinstance(item, Record):
                    last = item
                    yield item
                else:
                    later_base = later.base if later is not None else None
                    verdict = judge(
                        item,
                        mark_offset=mark.offset,
                        later_begun=later is not None,
                        later_base=later_base,
                    )
                    yield JudgedGap(found.path, item, verdict)
                    if verdict is GapVerdict.COMPLETE:
                        break  # what follows here was never acknowledged


def is_clean_end(files: Files, file: NeededFile, instance: int, gap: Gap) -> bool:
    """Of a TORN_TAIL in `file`: whether nothing of this life of the file stands behind it."""
    incarnation = incarnation_of(instance, file.sequence)
    with closing(files.open(file.path, read_only=True)) as opened:
        return not holds_trace(opened.read_at, file.bytes, incarnation, gap.position)


async def replay_journals(
    files: Files,
    directory: str,
    instance: int,
    mark: JournalPosition,
    apply: Callable[[Record], bool],
    make_room: Callable[[], Awaitable[None]],
) -> Recovered:
    """Calls `apply` for every record of one directory from the mark on, in order; applying a record twice must not matter.

    `apply` returns False when it has no room for the record: it gets it again after `make_room`. A record for which it
    raises InvalidArgument is one that no bookie should have taken: it is reported and left out. Raises DataDirectoryError
    for damage, for a missing marked journal and for an unknown format; changes nothing.
    """
    needed = {mark.sequence}
    last: Record | None = None
    records, warnings, path = 0, [], directory
    for item in walk_journal(files, directory, instance, mark):
        if isinstance(item, Record):
            last = item
            if item.offset >= mark.offset and item.type not in _WITHOUT_CONTENT:
                try:
                    while not apply(item):
                        await make_room()
                except InvalidArgument as error:
                    warnings.append(f"{path}: the record at offset {item.offset} is left out: {error}")
                    _log.error("%s", warnings[-1])
                records += 1
                if records % _SLICE_RECORDS == 0:
                    await asyncio.sleep(0)
        elif isinstance(item, NeededFile):
            if item.missing:
                raise DataDirectoryError(
                    f"the journal {item.path} is missing, and the checkpoint mark needs it; restore it (is its disk "
                    "mounted?): it has acknowledged entries",
                    path=item.path,
                )
            needed.add(item.sequence)
            path = item.path
        elif item.verdict is GapVerdict.DAMAGE:
            raise _damage(item.path, item.gap)
        elif item.verdict is GapVerdict.DAMAGE_BELOW_MARK:
            warnings.append(
                f"{item.path}: records are damaged at or after byte {item.gap.position}, below the mark"
            )
            _log.warning("%s; what they held is in the entry logs", warnings[-1])
        elif item.verdict is GapVerdict.TORN_TAIL:
            break
    sizes = journal_files(files, directory)
    unneeded = [old for old in sizes if old[0] not in needed]
    end_offset = mark.offset if last is None else max(last.end, mark.offset)
    return Recovered(end_offset, sizes, unneeded, records, warnings)


def journal_files(files: Files, directory: str) -> list[tuple[int, int]]:
    """(sequence, bytes) of every journal file in the directory, oldest first; [] if there is no such directory."""
    if not files.exists(directory):
        return []
    present = [
        sequence
        for name in files.list(directory)
        if (sequence := DataLayout.journal_sequence(name)) is not None
    ]
    return [(sequence, file_size(files, journal_path(directory, sequence))) for sequence in present]


def _damage(path: str, gap: Gap) -> DataDirectoryError:
    return DataDirectoryError(
        f"the journal {path} is damaged at or after byte {gap.position} (record offset {gap.offset}), where acknowledged "
        "entries stand; nothing was changed. Restore the file, or replace this bookie and let its ledgers be repaired",
        path=path,
        position=gap.position,
        offset=gap.offset,
    )


def begun_files(files: Files, directory: str, instance: int, sequences: list[int]) -> list[NeededFile]:
    """Files with a good BEGIN, and the one after the last of them if it holds any good record.

    Files are begun in order and each is synced before the next, so no other one can hold anything.
    """
    found: list[NeededFile] = []
    following: int | None = None
    for sequence in sequences:
        path = journal_path(directory, sequence)
        with closing(files.open(path, read_only=True)) as file:
            size = file.size()
            begin = probe_begin(file.read_at, size, incarnation_of(instance, sequence))
        if begin is not None:
            decode_begin(begin.payload, path)
            found.append(NeededFile(sequence, path, size, begin.offset))
            following = None
        elif following is None:
            following = sequence
    if following is not None:
        path = journal_path(directory, following)
        with closing(files.open(path, read_only=True)) as file:
            size = file.size()
            if holds_records(file.read_at, size, incarnation_of(instance, following)):
                found.append(NeededFile(following, path, size, None))
    return found
