"""Recovery of the journals at a start: one decision table for gaps (rule 5), and the replay of the records.

A gap at offset X, in a file that a start has to read. The first row that matches holds.

    | good record behind | X and the mark        | highest synced_to behind | later file     | verdict           |
    |--------------------|-----------------------|--------------------------|----------------|-------------------|
    | none               | X >= mark             | -                        | begins at X    | COMPLETE          |
    | at or below mark   | X < mark              | any                      | any            | DAMAGE_BELOW_MARK |
    | any                | X < mark              | any                      | any            | DAMAGE            |
    | any                | X >= mark             | > X                      | any            | DAMAGE            |
    | any                | X >= mark             | <= X                     | begun          | DAMAGE            |
    | any                | X >= mark             | <= X                     | none begun     | TORN_TAIL         |

COMPLETE: the file was left in order. TORN_TAIL: never acknowledged, whatever good records follow (pages of one
unsynced write persist in any order); it includes the clean end. DAMAGE_BELOW_MARK: the entry logs have what is missing; it
is reported and the replay goes on. DAMAGE: acknowledged records are missing; the start is refused and nothing
is cut or overwritten.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from magnetar.proto.errors import DataDirectoryError
from magnetar.runtime.files import Files

from ..layout import DataLayout, journal_path
from ..mark import JournalPosition
from .records import (
    Gap,
    Record,
    RecordType,
    decode_begin,
    holds_records,
    incarnation_of,
    probe_begin,
    scan_journal,
)

__all__ = ["BegunFile", "GapVerdict", "Recovered", "begun_files", "journal_files", "judge", "replay_journals"]

_log = logging.getLogger(__name__)
_SLICE_RECORDS = 256
_WITHOUT_CONTENT = (RecordType.BEGIN, RecordType.SYNCED)


class GapVerdict(enum.Enum):
    """See the module's table."""

    COMPLETE = "complete"
    TORN_TAIL = "torn tail"
    DAMAGE = "damage"
    DAMAGE_BELOW_MARK = "damage below the mark"


def judge(gap: Gap, *, mark_offset: int, later_begun: bool, later_base: int | None) -> GapVerdict:
    """The table. `later_base` is the first offset of the next begun file, None when its BEGIN cannot be read."""
    if gap.resumes_at is None and gap.offset >= mark_offset and later_begun:
        if later_base is None or later_base == gap.offset:
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
    # Damage below the mark, for people.
    warnings: list[str]


class BegunFile(NamedTuple):
    """A file that a start reads."""

    sequence: int
    path: str
    # Offset of its BEGIN record, None when that cannot be read although later records can.
    base: int | None


async def replay_journals(
    files: Files,
    directory: str,
    instance: int,
    mark: JournalPosition,
    apply: Callable[[Record], bool],
    make_room: Callable[[], Awaitable[None]],
) -> Recovered:
    """Calls `apply` for every record of one directory from the mark on, in order; applying a record twice must not matter.

    `apply` returns False when it has no room for the record: it gets it again after `make_room`. Raises DataDirectoryError
    for damage, for a missing marked journal and for an unknown format; changes nothing.
    """
    sizes = journal_files(files, directory)
    present = [sequence for sequence, _ in sizes]
    if mark.sequence not in present:
        raise DataDirectoryError(
            f"the journal {journal_path(directory, mark.sequence)} is missing, and the checkpoint mark needs it; "
            "restore it (is its disk mounted?): it has acknowledged entries",
            path=journal_path(directory, mark.sequence),
        )
    begun = begun_files(files, directory, instance, [seq for seq in present if seq >= mark.sequence])
    expected = mark.base
    if not begun and mark.offset > mark.base:
        raise _damage(journal_path(directory, mark.sequence), mark.base, 0)
    records, warnings = 0, []
    for index, found in enumerate(begun):
        later = begun[index + 1] if index + 1 < len(begun) else None
        file = files.open(found.path, read_only=True)
        try:
            incarnation = incarnation_of(instance, found.sequence)
            for item in scan_journal(file.read_at, file.size(), incarnation, expected):
                if isinstance(item, Record):
                    expected = item.end
                    if item.offset >= mark.offset and item.type not in _WITHOUT_CONTENT:
                        while not apply(item):
                            await make_room()
                        records += 1
                        if records % _SLICE_RECORDS == 0:
                            await asyncio.sleep(0)
                    continue
                verdict = judge(
                    item,
                    mark_offset=mark.offset,
                    later_begun=later is not None,
                    later_base=later.base if later else None,
                )
                if verdict is GapVerdict.DAMAGE:
                    raise _damage(found.path, item.offset, item.position)
                if verdict is GapVerdict.DAMAGE_BELOW_MARK:
                    warnings.append(
                        f"{found.path}: records are damaged at or after byte {item.position}, below the mark"
                    )
                    _log.warning("%s; what they held is in the entry logs", warnings[-1])
                    continue
                break
        finally:
            file.close()
    needed = {mark.sequence, *[found.sequence for found in begun]}
    unneeded = [old for old in sizes if old[0] not in needed]
    return Recovered(max(expected, mark.offset), sizes, unneeded, records, warnings)


def journal_files(files: Files, directory: str) -> list[tuple[int, int]]:
    """(sequence, bytes) of every journal file in the directory, oldest first; [] if there is no such directory."""
    if not files.exists(directory):
        return []
    present = [
        sequence
        for name in files.list(directory)
        if (sequence := DataLayout.journal_sequence(name)) is not None
    ]
    return [(sequence, _size(files, journal_path(directory, sequence))) for sequence in present]


def _damage(path: str, offset: int, position: int) -> DataDirectoryError:
    return DataDirectoryError(
        f"the journal {path} is damaged at or after byte {position} (record offset {offset}), where acknowledged entries "
        "stand; nothing was changed. Restore the file, or replace this bookie and let its ledgers be repaired",
        path=path,
        position=position,
        offset=offset,
    )


def _size(files: Files, path: str) -> int:
    file = files.open(path, read_only=True)
    try:
        return file.size()
    finally:
        file.close()


def begun_files(files: Files, directory: str, instance: int, sequences: list[int]) -> list[BegunFile]:
    """Files with a good BEGIN, and the one after the last of them if it holds any good record.

    Files are begun in order and each is synced before the next, so no other one can hold anything.
    """
    found: list[BegunFile] = []
    following: int | None = None
    for sequence in sequences:
        path = journal_path(directory, sequence)
        file = files.open(path, read_only=True)
        try:
            begin = probe_begin(file.read_at, file.size(), incarnation_of(instance, sequence))
        finally:
            file.close()
        if begin is not None:
            decode_begin(begin.payload, path)
            found.append(BegunFile(sequence, path, begin.offset))
            following = None
        elif following is None:
            following = sequence
    if following is not None:
        path = journal_path(directory, following)
        file = files.open(path, read_only=True)
        try:
            if holds_records(file.read_at, file.size(), incarnation_of(instance, following)):
                found.append(BegunFile(following, path, None))
        finally:
            file.close()
    return found
