"""Journal records (FORMATS.md, "Journal"): encoding, and a scan that reports what it finds and repairs nothing.

    u64 checksum | u64 incarnation | u64 offset | u64 synced_to | u32 length | u16 type | u16 0 | payload

* Offsets count the bytes of all records of this journal directory since its beginning, padding not counted. They go on
  from file to file, so positions compare as plain numbers, and a record that was misplaced shows.
* `synced_to` is the offset that was known to be durable when the record was written.
* The checksum is xxh3-64, seeded with the incarnation, of everything after it. What a recycled file still holds of its
  earlier life has another incarnation and counts as free space.
* A group (what one sync made durable) starts at a multiple of GROUP_ALIGNMENT in the file and
  is padded with zeros. The content of the padding does not matter: only a record with the next offset continues the stream.
* The first record of a file is BEGIN. A file without a valid one was prepared, but never begun.

Bytes decide nothing here: `scan_journal` reports records and *gaps*; `recovery` has the table that judges them (rule 5).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import xxhash

from magnetar.proto.errors import DataDirectoryError
from magnetar.proto.ledger_entry import LEDGER_ENTRY_FIELDS, NO_ENTRY

from ..index import LedgerRecord

# A group (what one sync makes durable) starts at a multiple of it in the file: the page of the disk, so that no sync reads
# before it writes.
GROUP_ALIGNMENT = 4096
FENCE = struct.Struct(">Q")  # payload of a FENCE record: ledger id
LAST_CONFIRMED = struct.Struct(">Qq")  # of a LAST_CONFIRMED record: ledger id, explicit last add confirmed
DELETED = struct.Struct(">QQ")  # of a DELETED record: ledger id, time of deletion
_HEADER = struct.Struct(">QQQQIHH")
_REST = struct.Struct(">QQQIHH")
_CHECKSUM = struct.Struct(">Q")
RECORD_HEADER_BYTES = _HEADER.size
assert RECORD_HEADER_BYTES == 40 == _CHECKSUM.size + _REST.size

_BEGIN = struct.Struct(">8sIQQ")
_BEGIN_MAGIC = b"MAGJRNL\n"
JOURNAL_FORMAT_VERSION = 1
MAX_PAYLOAD_BYTES = 1 << 30
_WINDOW_BYTES = 4 << 20


class RecordType(enum.IntEnum):
    """What a record's payload is. An unknown type means a newer format: recovery refuses it."""

    BEGIN = 1  # Begin
    ADD = 2  # a ledger entry, with its 40-byte header
    FENCE = 3  # u64 ledger id
    LAST_CONFIRMED = 4  # u64 ledger id | i64 explicit last add confirmed
    SYNCED = (
        5  # nothing: its `synced_to` says that all before it is durable, once the journal has fallen quiet
    )
    DELETED = 6  # u64 ledger id | u64 ms since the epoch: adds to the ledger are refused from now on (rule 7)


class Record(NamedTuple):
    """A record whose checksum is good. `position` is its place in the file."""

    offset: int
    synced_to: int
    type: int
    payload: bytes
    position: int

    @property
    def end(self) -> int:
        """Offset after it."""
        return self.offset + RECORD_HEADER_BYTES + len(self.payload)


class Gap(NamedTuple):
    """A place where the next record should be and is not. The last item of every scan is a Gap without `resumes_at`.

    A damaged place, a torn group and the clean end of a file look alike from here.
    """

    # Offset of the missing record.
    offset: int
    position: int
    # Offset of the next good record behind the gap, None if there is none.
    resumes_at: int | None
    # Highest `synced_to` of all good records behind the gap, -1 if there is none.
    later_synced_to: int


class Begin(NamedTuple):
    """Payload of the first record of a file."""

    format_version: int
    instance: int
    sequence: int


def incarnation_of(instance: int, sequence: int) -> int:
    """The incarnation of a file's life: never the same for two sequences or two bookies."""
    return int(xxhash.xxh3_64_intdigest(struct.pack(">QQ", instance, sequence))) or 1


def encode_begin(instance: int, sequence: int) -> bytes:
    """Payload of a BEGIN record."""
    return _BEGIN.pack(_BEGIN_MAGIC, JOURNAL_FORMAT_VERSION, instance, sequence)


def decode_begin(payload: bytes, path: str) -> Begin:
    """Raises DataDirectoryError for another format version."""
    magic, version, instance, sequence = _BEGIN.unpack_from(payload)
    if magic != _BEGIN_MAGIC or version != JOURNAL_FORMAT_VERSION:
        raise DataDirectoryError(
            f"the journal {path} has format version {version}, this program reads {JOURNAL_FORMAT_VERSION}; "
            "run the version of magnetar that wrote it",
            path=path,
        )
    return Begin(version, instance, sequence)


def encode_record_header(
    incarnation: int, offset: int, synced_to: int, record_type: int, payload: bytes
) -> bytes:
    """The 40 bytes before `payload`. About 0.7 us, and 20 us for each MB of payload."""
    rest = _REST.pack(incarnation, offset, synced_to, len(payload), record_type, 0)
    digest = xxhash.xxh3_64(rest, incarnation)
    digest.update(payload)
    return digest.digest() + rest


class _Window:
    """Reads a file in steps of 4 MB, so that a scan holds little and asks for each byte about once."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read = read
        self.size = size
        self._start = 0
        self._data = b""

    def get(self, position: int, length: int) -> bytes:
        begin = position - self._start
        if begin < 0 or begin + length > len(self._data):
            self._data = self._read(position, max(length, _WINDOW_BYTES))
            self._start, begin = position, 0
        return self._data[begin : begin + length]

    def held(self, position: int) -> tuple[bytes, int]:
        """The bytes read last, and the index of `position` in them; b"" and 0 if it is outside."""
        at = position - self._start
        return (self._data, at) if 0 <= at < len(self._data) else (b"", 0)

    def find(self, pattern: bytes, position: int) -> int:
        """Place of `pattern` at or after `position`, -1 if there is none."""
        while position < self.size:
            data = self._read(position, _WINDOW_BYTES)
            found = data.find(pattern)
            if found >= 0:
                self._data, self._start = data, position
                return position + found
            if len(data) <= len(pattern):
                break
            position += len(data) - len(pattern) + 1
        return -1


def _decode_at(window: _Window, position: int, incarnation: int) -> Record | None:
    head = window.get(position, RECORD_HEADER_BYTES)
    if len(head) < RECORD_HEADER_BYTES:
        return None
    checksum, found, offset, synced_to, length, record_type, _ = _HEADER.unpack(head)
    if (
        found != incarnation
        or length > MAX_PAYLOAD_BYTES
        or position + RECORD_HEADER_BYTES + length > window.size
    ):
        return None
    payload = window.get(position + RECORD_HEADER_BYTES, length)
    digest = xxhash.xxh3_64(head[8:], incarnation)
    digest.update(payload)
    if digest.intdigest() != checksum:
        return None
    return Record(offset, synced_to, record_type, payload, position)


def scan_journal(
    read: Callable[[int, int], bytes], size: int, incarnation: int, base: int
) -> Iterator[Record | Gap]:
    """Yields the records of one life of a file in order, and a Gap wherever the order breaks; the last item is a Gap.

    `read(position, length)` is short at the end of the file only. `base` is the offset that the first record must have.
    """
    window = _Window(read, size)
    expected, position = base, 0
    while True:
        if plain := _in_order(window, position, incarnation, expected):
            yield from plain
            position = plain[-1].position + RECORD_HEADER_BYTES + len(plain[-1].payload)
            expected = plain[-1].end
        record = _decode_at(window, position, incarnation)
        if record is None:  # or a group ended here, and this is where the next one begins
            record = _decode_at(window, position + -position % GROUP_ALIGNMENT, incarnation)
        if record is not None and record.offset == expected:
            yield record
            position = record.position + RECORD_HEADER_BYTES + len(record.payload)
            expected = record.end
            continue
        later, highest = _resume(window, position, incarnation, expected)
        yield Gap(expected, position, None if later is None else later.offset, highest)
        if later is None:
            return
        position, expected = later.position, later.offset


def _in_order(window: _Window, position: int, incarnation: int, expected: int) -> list[Record]:
    """Good records that follow each other in what the window holds already: the plain case, at 1.1 us a record of 1 KB.

    Stops at anything else (a border of the window, a group's end, damage), which `_decode_at` looks at: 3 us.
    """
    data, at = window.held(position)
    view, end = memoryview(data), len(data)
    shift = position - at
    found: list[Record] = []
    unpack_from, digest, new = _HEADER.unpack_from, xxhash.xxh3_64_intdigest, tuple.__new__
    while (body := at + RECORD_HEADER_BYTES) <= end:
        checksum, life, offset, synced_to, length, record_type, _ = unpack_from(data, at)
        after = body + length
        if life != incarnation or offset != expected or after > end or length > MAX_PAYLOAD_BYTES:
            break
        if digest(view[at + 8 : after], incarnation) != checksum:
            break
        found.append(new(Record, (offset, synced_to, record_type, data[body:after], at + shift)))
        expected += after - at
        at = after
    return found


def probe_begin(read: Callable[[int, int], bytes], size: int, incarnation: int) -> Record | None:
    """The BEGIN record at the start of a file, None unless it is good."""
    record = _decode_at(_Window(read, size), 0, incarnation)
    return record if record is not None and record.type == RecordType.BEGIN else None


def holds_records(read: Callable[[int, int], bytes], size: int, incarnation: int) -> bool:
    """True if the file has a good record of this incarnation anywhere. Reads all of it."""
    return _resume(_Window(read, size), 0, incarnation, -1)[0] is not None


def holds_trace(read: Callable[[int, int], bytes], size: int, incarnation: int, position: int) -> bool:
    """True if the file has anything of this incarnation at or after `position`, if only a part of a record."""
    return _Window(read, size).find(_CHECKSUM.pack(incarnation), position) >= 0


def _resume(window: _Window, position: int, incarnation: int, missing: int) -> tuple[Record | None, int]:
    """The next good record behind a gap, and the highest `synced_to` of all good records behind it.

    Records are searched for wherever the incarnation appears, not only at group borders: a group may have lost its first
    page only.
    """
    first: Record | None = None
    highest = -1
    pattern = _CHECKSUM.pack(incarnation)
    search = position + 8
    while (found := window.find(pattern, search)) >= 0:
        record = _decode_at(window, found - 8, incarnation)
        if record is None or record.offset <= missing:
            search = found + 1
            continue
        first = first or record
        highest = max(highest, record.synced_to)
        search = record.position + RECORD_HEADER_BYTES + len(record.payload) + 8
    return first, highest


def ledger_change(record: Record) -> tuple[int, LedgerRecord] | None:
    """(ledger id, what it adds to the ledger's record); None for the records that the journal writes for itself.

    DataDirectoryError for a type that is not known here: a newer program wrote it.
    """
    kind, payload = record.type, record.payload
    try:
        if kind == RecordType.ADD:
            ledger_id, entry_id, confirmed, _ = LEDGER_ENTRY_FIELDS.unpack_from(payload)
            return ledger_id, LedgerRecord(False, NO_ENTRY, entry_id, confirmed)
        if kind == RecordType.FENCE:
            return FENCE.unpack(payload)[0], LedgerRecord(fenced=True)
        if kind == RecordType.LAST_CONFIRMED:
            ledger_id, explicit = LAST_CONFIRMED.unpack(payload)
            return ledger_id, LedgerRecord(explicit_lac=explicit)
        if kind == RecordType.DELETED:
            ledger_id, deleted_at_ms = DELETED.unpack(payload)
            return ledger_id, LedgerRecord(fenced=True, deleted_at_ms=deleted_at_ms)
    except struct.error as error:
        raise DataDirectoryError(f"a journal record of type {kind} is too short: {error}") from error
    if kind in (RecordType.BEGIN, RecordType.SYNCED):
        return None
    raise DataDirectoryError(
        f"a journal holds a record of type {kind}, which this program does not know; run the version of magnetar that wrote "
        "it"
    )
