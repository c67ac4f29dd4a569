"""Archived ledgers as the entries that they were: rows of Parquet files back into batches, tables and headers.

    manifest of the ledger -> file with the entry -> row groups with the entry (statistics of `message_id`) -> rows -> entry

The rows say where each batch began and how it was compressed, so an entry that a broker wrote comes back byte for byte. What
cannot come back is what no reader sees: null columns that a client wrote out, the flag of what a job published, and the
append time that entries of an attached ledger have of their own (rows have that of the attachment, by which the topic goes).

A row group is decoded as a whole and remembered, since whoever reads an archive goes on with what follows. A file is opened
once: its size and count of rows must be those of the manifest. What is read is checked by the checksums of its pages, and by
the row count of each entry. After a failure files are opened and manifests read anew, so one that was mended is looked at.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from magnetar.proto.batch import Columns, encode_batch, encode_singles
from magnetar.proto.batch_extensions import entry_flags
from magnetar.proto.compression import Compression
from magnetar.proto.entry import encode_entry
from magnetar.proto.errors import ArchiveUnavailable, EntryDamaged, InvalidArgument, MagnetarError
from magnetar.proto.ledger_entry import NO_ENTRY, encode_ledger_entry

from .files import BATCH_COLUMNS, ArchivedFile, ArchiveFolder, LedgerManifest
from .ledgers import TopicLedger

# Decoded row groups that are remembered; the last one in any case.
GROUP_CACHE_BYTES: Final = 128 << 20
OPEN_FILES: Final = 16
MANIFESTS: Final = 256
# Rows, and bytes of them, that become Python objects at once.
ROWS_AT_ONCE: Final = 4096
PORTION_BYTES: Final = 1 << 20

_READ: Final = (
    "key", "value", "offset", "publish_time", "event_time", "append_time", "properties", "producer", "sequence_id",
    *BATCH_COLUMNS,
)  # fmt: skip


class Place(NamedTuple):
    """A ledger of a topic in an archive."""

    topic: str
    ledger: TopicLedger  # `archive`: where

    @property
    def key(self) -> tuple[str, int]:
        """As the archive's folder takes it."""
        return self.topic, self.ledger.position_id

    def damaged(self, path: str, why: object) -> EntryDamaged:
        """The one error of files that are not what was written."""
        return EntryDamaged(
            f"ledger {self.ledger.position_id} of {self.topic} is archived at {self.ledger.archive}, and {path} cannot be "
            f"used: {why}; bring it back from a copy, or seek behind the ledger"
        )

    def unavailable(self, why: str) -> ArchiveUnavailable:
        """The error of an archive that may be read later."""
        return ArchiveUnavailable(
            f"ledger {self.ledger.position_id} of {self.topic} is archived at {self.ledger.archive}: {why}"
        )


class ArchivedEntries:
    """Reads entries of any archive; not for several threads. Remembers what it opened and decoded, within bounds."""

    def __init__(self) -> None:
        self._folder = cache(ArchiveFolder)
        self._manifest = lru_cache(MANIFESTS)(_manifest)
        self._file = lru_cache(OPEN_FILES)(_File)  # one that is let go of is closed
        self._groups: OrderedDict[tuple[Place, str, int], _Group] = OrderedDict()
        self._group_bytes = 0

    def read(self, place: Place, first: int, last: int, max_bytes: int) -> list[bytes]:
        """Entries from `first` on: at least one, else as many as fit in `max_bytes`. As the port of the broker says."""
        path = place.ledger.archive
        found: list[bytes] = []
        size = 0
        try:
            try:
                folder = self._folder(path)
            except InvalidArgument as error:
                raise place.unavailable(error.message) from None
            path = folder.manifest_path(*place.key)
            manifest = self._manifest(folder, place)
            for one in manifest.files:
                if one.last_entry < first + len(found) or one.first_entry > last:
                    continue
                path = folder.data_path(*place.key, one.name)
                until = min(last, one.last_entry)
                for entry in self._entries(folder, place, one, first + len(found), until, max_bytes):
                    size += len(entry)
                    if found and size > max_bytes:
                        return found
                    found.append(entry)
        except Exception as error:
            self._forget(place)
            if not found:  # else the next read begins, and fails, with the entry that cannot be read
                raise _failure(place, path, error) from error
        return found

    def _forget(self, place: Place) -> None:
        self._manifest.cache_clear()
        self._file.cache_clear()
        for key in [key for key in self._groups if key[0] == place]:
            self._group_bytes -= self._groups.pop(key).table.nbytes

    def _entries(
        self, folder: ArchiveFolder, place: Place, one: ArchivedFile, first: int, last: int, max_bytes: int
    ) -> Iterator[bytes]:
        file = self._file(folder, place, one)
        rows: list[_Group] = []  # of groups that end within the entry that is wanted
        at = first
        for number in range(bisect_left(file.last_entries, first), len(file.last_entries)):
            group = self._group(file, place, number)
            following = file.first_entries[number + 1] if number + 1 < len(file.first_entries) else None
            if rows:
                group = _Group.joined([*rows, group])
                rows = []
            # The last entry of a group may go on in the next one.
            end = group.entries[-1] if following == group.entries[-1] else group.entries[-1] + 1
            yield from group.encoded(at, min(last + 1, end), max_bytes)
            at = max(at, min(last + 1, end))
            if at > last:
                return
            if end == group.entries[-1]:
                rows = [group.tail(end)]
        raise ValueError(f"entry {at} is not in it")

    def _group(self, file: _File, place: Place, number: int) -> _Group:
        key = (place, file.one.name, number)
        found = self._groups.pop(key, None)
        if found is None:
            found = file.group(number)
            self._group_bytes += found.table.nbytes
        self._groups[key] = found
        while self._group_bytes > GROUP_CACHE_BYTES and len(self._groups) > 1:
            self._group_bytes -= self._groups.popitem(last=False)[1].table.nbytes
        return found


def _failure(place: Place, path: str, error: Exception) -> MagnetarError:
    """What a failed read means: files that are not what was written, or something that may pass."""
    if isinstance(error, MagnetarError):
        return error
    text = (str(error) or repr(error)).splitlines()[0]
    if isinstance(error, FileNotFoundError):
        if _is_there(place):
            return place.damaged(path, "it is not there")
        return place.unavailable("there is no archive there; is it mounted on this machine?")
    # A file system in the network says most of what it has to say in the same way as Parquet does: without a number.
    of_parquet = isinstance(error, OSError) and error.errno is None
    if isinstance(error, pa.ArrowException | ValueError) or (
        of_parquet and ("CRC" in text or place.ledger.archive.startswith("file:"))
    ):
        return place.damaged(path, text)
    return place.unavailable(f"{path} cannot be read now: {text}")


def _is_there(place: Place) -> bool:
    try:
        return ArchiveFolder(place.ledger.archive).is_there()
    except (InvalidArgument, OSError):
        return False


def _manifest(folder: ArchiveFolder, place: Place) -> LedgerManifest:
    try:
        manifest = folder.manifest(*place.key)
    except InvalidArgument as error:
        raise place.damaged(folder.manifest_path(*place.key), error.message.partition("; ")[0]) from None
    if wrong := manifest.differs_from(place.topic, place.ledger):
        raise place.damaged(folder.manifest_path(*place.key), wrong)
    return manifest


class _File:
    """An open file, and which entries each of its row groups has. Raises ValueError if it is not that of its manifest."""

    def __init__(self, folder: ArchiveFolder, place: Place, one: ArchivedFile) -> None:
        self.one = one
        self._place = place
        self._file = folder.open_rows(*place.key, one)
        metadata = self._file.metadata
        missing = {"message_id", *_READ} - {*self._file.schema_arrow.names}
        if missing:
            raise ValueError(f"it has no column {min(missing)}")
        self.first_entries: list[int] = []
        self.last_entries: list[int] = []
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            columns = (group.column(at) for at in range(group.num_columns))
            ids = next(column.statistics for column in columns if column.path_in_schema == "message_id")
            if ids is None or not ids.has_min_max:
                raise ValueError("it does not say which messages its row groups have")
            self.first_entries.append(int.from_bytes(ids.min[8:16], "big"))
            self.last_entries.append(int.from_bytes(ids.max[8:16], "big"))

    def group(self, number: int) -> _Group:
        """Reads and decodes a row group."""
        return _Group(self._file.read_row_group(number, use_threads=False).combine_chunks(), self._place)


class _Group:
    """Decoded rows, and the entry that each is of."""

    def __init__(self, table: pa.Table, place: Place) -> None:
        self.table = table
        ids = table.column("message_id").combine_chunks()
        words = array("q", ids.buffers()[2].to_pybytes()[24 * ids.offset : 24 * (ids.offset + len(ids))])
        if len(words) != 3 * len(ids):
            raise ValueError("message ids in it are not of 24 bytes")
        if sys.byteorder == "little":
            words.byteswap()
        self._place = place
        self.entries = words[1::3]
        self._indexes = array("q", (low >> 32 for low in words[2::3]))
        if {*words[0::3]} - {place.ledger.position_id}:
            raise ValueError("there are messages of another ledger in it")

    @classmethod
    def joined(cls, groups: list[_Group]) -> _Group:
        """Rows of several, one after another."""
        return cls(pa.concat_tables([group.table for group in groups]).combine_chunks(), groups[0]._place)

    def tail(self, entry: int) -> _Group:
        """The rows of its last entry."""
        at = bisect_left(self.entries, entry)
        # A copy: what remembers a slice pins the whole.
        return _Group(self.table.take(pa.array(range(at, self.table.num_rows))).combine_chunks(), self._place)

    def encoded(self, first: int, end: int, max_bytes: int) -> Iterator[bytes]:
        """Ledger entries of first..end-1, made as they are asked for; `max_bytes`: about as many will be."""
        # Rows become Python objects in portions, whose size goes by the mean size of a row.
        portion_bytes = min(max_bytes, PORTION_BYTES)
        portion = max(1, min(ROWS_AT_ONCE, portion_bytes * self.table.num_rows // max(self.table.nbytes, 1)))
        ledger = self._place.ledger
        rows: _Rows | None = None
        for entry in range(first, end):
            start = bisect_left(self.entries, entry)
            stop = bisect_right(self.entries, entry, start)
            count = stop - start
            if not count or self._indexes[start] or self._indexes[stop - 1] != count - 1:
                raise ValueError(f"entry {entry} is not whole in it")
            if rows is None or stop > rows.stop:
                upto = max(stop, min(start + portion, self.table.num_rows))
                rows = _Rows(self.table.slice(start, upto - start), start)
            payload = rows.entry(start - rows.start, stop - rows.start, ledger.first_offset)
            yield encode_ledger_entry(ledger.stored_id, entry, NO_ENTRY, 0, payload)


class _Rows:
    """A portion of rows as Python lists. `start`, `stop`: which rows of their group."""

    def __init__(self, table: pa.Table, start: int) -> None:
        self.start = start
        self.stop = start + table.num_rows

        def column(name: str) -> list[Any]:
            found: list[Any] = table.column(name).to_pylist()
            return found

        def times_ms(name: str) -> list[Any]:
            micros: list[int | None] = table.column(name).cast(pa.int64()).to_pylist()
            return [None if micro is None else micro // 1000 for micro in micros]

        def seldom(name: str, read: Callable[[str], list[Any]] = column) -> list[Any] | None:
            """None if all are null."""
            return None if table.column(name).null_count == table.num_rows else read(name)

        self._values = column("value")
        self._batches = column("batch")
        self._compressions = column("compression")
        self._producers = column("producer")
        self._sequence_ids = column("sequence_id")
        self._offsets = column("offset")
        self._publish_ms = times_ms("publish_time")
        self._append_ms = times_ms("append_time")
        self._extensions = seldom("extensions")
        self._event_ms = seldom("event_time", times_ms)
        self._properties = seldom(
            "properties", lambda name: [None if one is None else dict(one) for one in column(name)]
        )
        self._keys = seldom("key")
        if self._keys is not None:
            self._keys = [
                key.decode() if is_text else key
                for key, is_text in zip(self._keys, column("text_key"), strict=True)
            ]
        # Without any of these, and where a batch is a message, all of an entry is made at once.
        self._plain = (
            self._extensions is None
            and self._event_ms is None
            and self._properties is None
            and not any(self._compressions)
            and None not in self._values
        )

    def entry(self, start: int, stop: int, first_offset: int) -> bytes:
        """The entry of these rows."""
        starts = self._batches[start:stop]
        batches: list[bytes] = []
        counts: list[int] = []
        if self._plain and starts == list(range(stop - start)):
            batches = self._singles(start, stop)
            counts = [1] * len(batches)
        else:
            borders = [at for at, (one, before) in enumerate(zip(starts, [-1, *starts])) if one != before]
            for first, last in itertools.pairwise([*borders, stop - start]):
                batches.append(self._batch(start + first, start + last))
                counts.append(last - first)
        if batches and starts[0] != 0:
            raise ValueError("the first message of an entry is not the first of its batch")
        names: dict[str, int] = {}
        producers = [
            names.setdefault(self._producers[start + at], len(names)) for at in dict.fromkeys(starts)
        ]
        return encode_entry(
            batches,
            counts,
            producers,
            list(names),
            first_index=self._offsets[start] - first_offset,
            append_time_ms=self._append_ms[start],
            flags=0 if self._extensions is None else entry_flags(batches),
        )

    def _singles(self, start: int, stop: int) -> list[bytes]:
        """Batches of one message each; those in a row with the same time and sequence ids that count up at once."""
        batches: list[bytes] = []
        keys, publish_ms, sequence_ids = self._keys, self._publish_ms, self._sequence_ids
        at = start
        while at < stop:
            first, time_ms, sequence_id = at, publish_ms[at], sequence_ids[at]
            at += 1
            while at < stop and publish_ms[at] == time_ms and sequence_ids[at] == sequence_id + at - first:
                at += 1
            columns = Columns(self._values[first:at], _unless_null(keys, first, at))
            batches += encode_singles(columns, sequence_id, time_ms).batches()
        return batches

    def _batch(self, start: int, stop: int) -> bytes:
        sequence_ids = self._sequence_ids[start:stop]
        first = sequence_ids[0]
        counting = sequence_ids == list(range(first, first + stop - start))
        packed = None if self._extensions is None else self._extensions[start]
        return encode_batch(
            self._values[start:stop],
            sequence_id=first,
            publish_time_ms=self._publish_ms[start],
            keys=_unless_null(self._keys, start, stop),
            properties=_unless_null(self._properties, start, stop),
            event_times_ms=_unless_null(self._event_ms, start, stop),
            sequence_ids=None if counting else sequence_ids,
            compression=Compression(self._compressions[start]),
            extensions=None if packed is None else msgspec.msgpack.decode(packed),
        )


def _unless_null(column: list[Any] | None, start: int, stop: int) -> list[Any] | None:
    if column is None:
        return None
    part = column[start:stop]
    return None if part.count(None) == len(part) else part
