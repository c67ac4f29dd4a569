"""Reading archived ledgers of a topic: rows come from the files that their manifests name, as they would from the bookies.

The driver reads the manifests of those ledgers that are wanted at all, and checks that they are of these ledgers. A task
opens its files, compares size and count of rows with the manifest, passes over row groups whose statistics lie outside of
the wanted range, and cuts the others. What it reads is checked by the checksums of the files' pages.

Files that have messages in chunks are read as the entries that they were made of, for these go on in other ledgers.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from magnetar.archive.entries import ArchivedEntries, Place
from magnetar.archive.files import (
    MANIFESTS_AT_ONCE,
    ROW_GROUP_BYTES,
    ROW_GROUP_ROWS,
    ArchivedFile,
    ArchiveFolder,
    LedgerManifest,
)
from magnetar.proto.errors import InvalidArgument, MessageLost

from .columns import ROWS_PER_RECORD_BATCH
from .plan import LedgerSlice, Position, Range, TopicLedger, cut
from .schema import COLUMNS, topic_and_partition

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PLACE = struct.Struct(">QQI")


class ArchivedSlice(NamedTuple):
    """What one task reads: some files of one ledger, each with the offset of its first message."""

    topic: str
    ledger: TopicLedger
    files: tuple[tuple[ArchivedFile, int], ...]
    wanted: Range
    part: tuple[int, int] = (0, 1)  # of a file that is too large for one task: which of how many equal parts


class Bound(NamedTuple):
    """Of a column: values from `low` on, before `high`; None: no bound."""

    column: str
    low: Any
    high: Any

    def overlaps(self, least: Any, most: Any) -> bool:
        """Whether values from `least` to `most` (with it) may lie in it."""
        return (self.low is None or most >= self.low) and (self.high is None or least < self.high)


# --- the driver ------------------------------------------------------------------------------------------------------


def archived_slices(
    topic: str, ledgers: Sequence[TopicLedger], wanted: Range, partition_bytes: int
) -> list[ArchivedSlice | LedgerSlice]:
    """In topic order; a task has about `partition_bytes` of messages: several files of a ledger, or row groups of one.

    Raises MessageLost.
    """
    found: list[ArchivedSlice | LedgerSlice] = []
    met = [ledger for ledger in ledgers if ledger.archive and wanted.meets(ledger)]
    for ledger, manifest in zip(met, read_manifests(topic, met), strict=True):
        gathered: list[tuple[ArchivedFile, int]] = []
        size = 0
        for one, offset in placed(manifest):
            if not _meets(wanted, ledger, one, offset):
                continue
            share = ledger.size * one.rows // max(1, manifest.rows)
            if gathered and (one.chunked or size + share > partition_bytes):
                found.append(ArchivedSlice(topic, ledger, tuple(gathered), wanted))
                gathered, size = [], 0
            if one.chunked:
                whole = LedgerSlice(topic, ledger, one.first_entry, one.last_entry, wanted, {})
                found += cut(whole, partition_bytes)
                continue
            parts = min(share // partition_bytes, _row_groups(share, one.rows))
            if parts > 1:
                found += [
                    ArchivedSlice(topic, ledger, ((one, offset),), wanted, (number, parts))
                    for number in range(parts)
                ]
                continue
            gathered.append((one, offset))
            size += share
        if gathered:
            found.append(ArchivedSlice(topic, ledger, tuple(gathered), wanted))
    return found


def _row_groups(size: int, rows: int) -> int:
    """How many a file of this size in messages has, at most one fewer."""
    return max(size // ROW_GROUP_BYTES, rows // ROW_GROUP_ROWS)


def read_manifests(topic: str, ledgers: Sequence[TopicLedger]) -> list[LedgerManifest]:
    """Of archived ledgers, in their order. Raises MessageLost for one that is not there, or of another ledger."""
    folders = {place: ArchiveFolder(place) for place in dict.fromkeys(ledger.archive for ledger in ledgers)}
    if len(ledgers) == 1:
        return [_manifest(folders[ledgers[0].archive], topic, ledgers[0])]
    with ThreadPoolExecutor(MANIFESTS_AT_ONCE) as threads:
        return list(threads.map(lambda ledger: _manifest(folders[ledger.archive], topic, ledger), ledgers))


def _manifest(folder: ArchiveFolder, topic: str, ledger: TopicLedger) -> LedgerManifest:
    with _as_message_lost(topic, ledger, folder.manifest_path(topic, ledger.position_id)):
        manifest = folder.manifest(topic, ledger.position_id)
        if wrong := manifest.differs_from(topic, ledger):
            raise ValueError(wrong)
    return manifest


def placed(manifest: LedgerManifest) -> Iterator[tuple[ArchivedFile, int]]:
    """The files with the topic-wide offset of the first message in each."""
    offset = manifest.first_offset
    for one in manifest.files:
        yield one, offset
        offset += one.rows


def _meets(wanted: Range, ledger: TopicLedger, one: ArchivedFile, first_offset: int) -> bool:
    """Whether the file may hold something of it, as far as its manifest tells."""
    ledger_id = ledger.position_id
    return (
        one.rows > 0
        and wanted.from_offset < first_offset + one.rows
        and wanted.before_offset > first_offset
        and wanted.from_position < (ledger_id, one.last_entry + 1, 0)
        and wanted.before_position > (ledger_id, one.first_entry, 0)
    )


# --- tasks -----------------------------------------------------------------------------------------------------------


def read_archived(piece: ArchivedSlice, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Arrow record batches of these columns, in the order of the topic. MessageLost names a file that is not as it was."""
    folder = ArchiveFolder(piece.ledger.archive)
    for one, first_offset in piece.files:
        path = folder.data_path(piece.topic, piece.ledger.position_id, one.name)
        bounds = bounds_of(piece.wanted, piece.ledger, one, first_offset)
        with _as_message_lost(piece.topic, piece.ledger, path):
            file = folder.open_rows(piece.topic, piece.ledger.position_id, one, pre_buffer=True)
            try:
                yield from _read_file(piece, file, bounds, columns)
            finally:
                file.close(force=True)


def _read_file(
    piece: ArchivedSlice, file: pq.ParquetFile, bounds: list[Bound], columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    number, parts = piece.part
    borders = [file.num_row_groups * at // parts for at in (number, number + 1)]
    groups = [group for group in range(*borders) if _wanted_group(file, group, bounds)]
    # At least one column, for the count of rows.
    read = dict.fromkeys([*(name for name in columns if name in file.schema_arrow.names), "offset"])
    read |= dict.fromkeys(bound.column for bound in bounds)
    for group in groups:  # one at a time, since all that are asked for at once are in memory at once
        for batch in file.iter_batches(ROWS_PER_RECORD_BATCH, [group], list(read), use_threads=False):
            inside = _within(batch, bounds)
            if inside.num_rows:
                yield _shaped(inside, piece, columns)


def bounds_of(wanted: Range, ledger: TopicLedger, one: ArchivedFile, first_offset: int) -> list[Bound]:
    """What of a range cuts into a file; a file that lies wholly in the range is read without looking at its rows."""
    bounds: list[Bound] = []
    low_offset = wanted.from_offset if wanted.from_offset > first_offset else None
    high_offset = wanted.before_offset if wanted.before_offset < first_offset + one.rows else None
    if (low_offset, high_offset) != (None, None):
        bounds.append(Bound("offset", low_offset, high_offset))
    low_time = _time(wanted.from_append_ms) if wanted.from_append_ms > ledger.first_append_ms else None
    high_time = _time(wanted.before_append_ms) if wanted.before_append_ms <= ledger.last_append_ms else None
    if (low_time, high_time) != (None, None):
        bounds.append(Bound("append_time", low_time, high_time))
    low, high = wanted.from_position, wanted.before_position
    low_id = _id(low) if low > (ledger.position_id, one.first_entry, 0) else None
    high_id = _id(high) if high < (ledger.position_id, one.last_entry + 1, 0) else None
    if (low_id, high_id) != (None, None):
        bounds.append(Bound("message_id", low_id, high_id))
    return bounds


def _time(time_ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=time_ms)


def _id(position: Position) -> bytes:
    """The beginning of that message's id: ids are big-endian, so they stand before or after it as their bytes do."""
    return _PLACE.pack(*position)


def _wanted_group(file: pq.ParquetFile, number: int, bounds: list[Bound]) -> bool:
    group = file.metadata.row_group(number)
    names = {bound.column: bound for bound in bounds}
    for at in range(group.num_columns):
        column = group.column(at)
        bound = names.get(column.path_in_schema)
        statistics = column.statistics
        if bound is None or statistics is None or not statistics.has_min_max:
            continue
        if not bound.overlaps(statistics.min, statistics.max):
            return False
    return True


def _within(batch: pa.RecordBatch, bounds: list[Bound]) -> pa.RecordBatch:
    mask: Any = None
    for bound in bounds:
        column = batch.column(bound.column)
        for edge, compare in ((bound.low, pc.greater_equal), (bound.high, pc.less)):
            if edge is not None:
                inside = compare(column, pa.scalar(edge, column.type))
                mask = inside if mask is None else pc.and_(mask, inside)
    return batch if mask is None else batch.filter(mask)


def _shaped(batch: pa.RecordBatch, piece: ArchivedSlice, columns: Sequence[str]) -> pa.RecordBatch:
    """The columns as a read of the bookies has them.

    Topic and partition stand in no file; a column that a file does not have, as it is older than the column, is null.
    """
    constant = dict(zip(("topic", "partition"), topic_and_partition(piece.topic)))
    fields = [pa.field(name, COLUMNS[name][1]) for name in columns]
    in_file = set(batch.schema.names)
    arrays = [
        batch.column(field.name).cast(field.type)
        if field.name in in_file
        else pa.repeat(pa.scalar(constant.get(field.name), field.type), batch.num_rows)
        for field in fields
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def first_archived(topic: str, ledger: TopicLedger, wanted: Range) -> tuple[bytes, int] | None:
    """Message id and offset of the first message of an archived ledger in a range."""
    (manifest,) = read_manifests(topic, [ledger])
    files = tuple(found for found in placed(manifest) if _meets(wanted, ledger, *found))
    for batch in read_archived(ArchivedSlice(topic, ledger, files, wanted), ("message_id", "offset")):
        return batch.column(0)[0].as_py(), batch.column(1)[0].as_py()
    return None


class ArchivedReader:
    """Reads entries of an archived ledger, as a LedgerReader does those of one at the bookies."""

    def __init__(self, topic: str, ledger: TopicLedger) -> None:
        self._place = Place(topic, ledger)
        self._entries = ArchivedEntries()
        self._one_at_a_time = threading.Lock()

    async def read(self, first: int, last: int, *, max_bytes: int) -> list[bytes]:
        """At least one, else as many as fit. Raises EntryDamaged, ArchiveUnavailable."""

        def work() -> list[bytes]:
            with self._one_at_a_time:
                return self._entries.read(self._place, first, last, max_bytes)

        return await asyncio.to_thread(work)


@contextlib.contextmanager
def _as_message_lost(topic: str, ledger: TopicLedger, path: str) -> Iterator[None]:
    """Whatever a file system or a damaged file says becomes one error that names the place. Raises MessageLost."""
    cause: Exception
    try:
        yield
        return
    except FileNotFoundError as error:
        cause, why = error, "it is not there"
    except InvalidArgument as error:
        cause, why = error, error.message.partition("; ")[0]  # what helps is said below
    except (OSError, ValueError, pa.ArrowException) as error:
        cause, why = error, str(error).splitlines()[0]
    raise MessageLost(
        f"{ledger.messages} messages of {topic} from offset {ledger.first_offset} on (ledger {ledger.position_id}) are "
        f"archived at {ledger.archive}, and {path} cannot be used: {why}; bring it back, or read what comes after it with "
        f"the option start={ledger.position_id + 1}:0:0"
    ) from cause
