"""The bytes of an entry log (FORMATS.md, "Entry log").

    file:    b"MAGELOG\n" | u32 version | u32 log id | 48 bytes 0 | records | footer (only when the log was closed)
    record:  u64 checksum | u64 ledger | u64 entry | u32 length | u32 0 | entry
    footer:  rows (u64 ledger | u64 bytes) | u64 checksum of the rows | u32 rows | u32 version | u64 start | b"MAGELFTR"

A record's checksum is xxh3-64, seeded with the log id, of everything after it; the footer's is seeded alike. The footer
says how many bytes each ledger has in the log. Two kinds of records hold no entry; their entry id marks them:

    STATE_ENTRY   what the bookie knew of the ledger besides its entries (fence, explicit LAC, tombstone), an encoded
                  LedgerRecord: the index can be built from the logs alone
    SYNCED_ENTRY  everything before this record was synced when it was written, so damage before it is no torn tail

A footer is written when everything before it is synced, and says the same. It is made, read and kept in memory as a whole,
so a log is closed when it has `LOG_LEDGERS` ledgers, however small it is.
"""

from __future__ import annotations

import struct
import sys
from array import array
from typing import NamedTuple

import xxhash

from magnetar.proto.errors import EntryDamaged
from magnetar.proto.ids import MAX_ENTRY_ID

_LOG_HEADER = struct.Struct(">8sII48x")
LOG_HEADER_BYTES = _LOG_HEADER.size
assert LOG_HEADER_BYTES == 64
RECORD = struct.Struct(">QQQII")
RECORD_REST = struct.Struct(">QQII")
RECORD_HEADER_BYTES = RECORD.size
assert RECORD_HEADER_BYTES == 32 == 8 + RECORD_REST.size
_FOOTER_END = struct.Struct(">QIIQ8s")
FOOTER_END_BYTES = _FOOTER_END.size
FOOTER_ROW_BYTES = 16
# Half a MB of footer: 8 ms of the loop to make it, 3 to read it. A million ledgers in one log took 400 ms.
LOG_LEDGERS = 1 << 15
_LOG_MAGIC = b"MAGELOG\n"
_FOOTER_MAGIC = b"MAGELFTR"
_LOG_VERSION = 1
STATE_ENTRY = 2**64 - 1
SYNCED_ENTRY = 2**64 - 2
assert MAX_ENTRY_ID < SYNCED_ENTRY < STATE_ENTRY, "no entry has the id of a state record"


class Scanned(NamedTuple):
    """What a scan found at `offset` of a log: a record with a good checksum, or a range without one.

    A record: `length` bytes of entry (or of state, `entry_id` STATE_ENTRY), and the `data` themselves.
    A range: `data` is None, `length` counts all its bytes. It is damage unless `torn`: then nothing there was ever synced,
    as a power failure leaves it, and no index points to it. Ledger and entry are what its first bytes claim, or -1: to be
    believed only if the index has exactly this place for them.
    """

    ledger_id: int
    entry_id: int
    offset: int
    length: int
    data: bytes | None
    torn: bool = False


class Footer(NamedTuple):
    """Bytes of records by ledger, and where the records end."""

    ledgers: dict[int, int]
    start: int


def encode_log_header(log_id: int) -> bytes:
    """First 64 bytes of a log."""
    return _LOG_HEADER.pack(_LOG_MAGIC, _LOG_VERSION, log_id)


def header_fault(header: bytes, log_id: int) -> str:
    """What is wrong with the first bytes of log `log_id`; "" if nothing is. Every byte counts."""
    if header[:LOG_HEADER_BYTES] == encode_log_header(log_id):
        return ""
    version = int.from_bytes(header[8:12], "big")
    if header[:LOG_HEADER_BYTES] == _LOG_HEADER.pack(_LOG_MAGIC, version, log_id):
        return f"is an entry log of version {version}, this program reads version {_LOG_VERSION}"
    return (
        f"does not begin as entry log {log_id:08x} does: its header is damaged, or it is another log's file"
    )


def encode_record_header(log_id: int, ledger_id: int, entry_id: int, entry: bytes) -> bytes:
    """The 32 bytes before an entry. 0.5 us and the hash."""
    rest = RECORD_REST.pack(ledger_id, entry_id, len(entry), 0)
    digest = xxhash.xxh3_64(rest, log_id)
    digest.update(entry)
    return digest.digest() + rest


def encode_footer(log_id: int, ledgers: dict[int, int], start: int) -> bytes:
    """Closes a log whose records end at `start`; `ledgers` maps ledger ids to their bytes."""
    ids = sorted(ledgers)
    columns = array("Q", bytes(len(ids) * FOOTER_ROW_BYTES))
    columns[::2] = array("Q", ids)
    columns[1::2] = array("Q", map(ledgers.__getitem__, ids))
    rows = _big_endian(columns).tobytes()
    checksum = xxhash.xxh3_64_intdigest(rows, log_id)
    return rows + _FOOTER_END.pack(checksum, len(ledgers), _LOG_VERSION, start, _FOOTER_MAGIC)


def footer_bytes(end: bytes) -> int:
    """Bytes of the footer, rows and all, of a log that ends with `end` (FOOTER_END_BYTES); 0: none there."""
    if len(end) < FOOTER_END_BYTES:
        return 0
    _, count, version, _, magic = _FOOTER_END.unpack(end[-FOOTER_END_BYTES:])
    if magic != _FOOTER_MAGIC or version != _LOG_VERSION:
        return 0
    return int(count) * FOOTER_ROW_BYTES + FOOTER_END_BYTES


def footer_claims(end: bytes, size: int) -> tuple[bool, int, int]:
    """Of the end of a log of `size` bytes, as if it were a footer's: has it the magic; where it starts, by two accounts."""
    if len(end) < FOOTER_END_BYTES:
        return False, -1, -1
    _, count, _, start, magic = _FOOTER_END.unpack(end[-FOOTER_END_BYTES:])
    return magic == _FOOTER_MAGIC, int(start), size - FOOTER_END_BYTES - int(count) * FOOTER_ROW_BYTES


def decode_footer(data: bytes, log_id: int, size: int = 0) -> Footer | None:
    """From the end of a log of `size` bytes (0: `data` is all of it); None if there is no good footer.

    Every byte counts: none of the fields that the checksum leaves out can be wrong without being noticed.
    """
    length = footer_bytes(data)
    if not length or length > len(data):
        return None
    checksum, _, _, start, _ = _FOOTER_END.unpack_from(data, len(data) - FOOTER_END_BYTES)
    rows = data[len(data) - length : len(data) - FOOTER_END_BYTES]
    if start != (size or len(data)) - length or xxhash.xxh3_64_intdigest(rows, log_id) != checksum:
        return None
    columns = _big_endian(array("Q", rows))
    return Footer(dict(zip(columns[::2], columns[1::2], strict=True)), int(start))


def _big_endian(numbers: array[int]) -> array[int]:
    """From the order of this machine, and back; changes the array."""
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


def record_entry(data: bytes, at: int, log_id: int, ledger_id: int, entry_id: int, length: int) -> bytes:
    """The verified entry of the record that starts at `at` of `data`. Raises EntryDamaged."""
    body = at + RECORD_HEADER_BYTES
    if body + length <= len(data):
        checksum, ledger, entry_number, size, _ = RECORD.unpack_from(data, at)
        if (ledger, entry_number, size) == (ledger_id, entry_id, length):
            view = memoryview(data)
            if xxhash.xxh3_64_intdigest(view[at + 8 : body + length], log_id) == checksum:
                return data[body : body + length]
    raise EntryDamaged(
        f"entry {entry_id} of ledger {ledger_id} is damaged in entry log {log_id:08x}; read another replica",
        ledger_id=ledger_id,
        entry_id=entry_id,
        log_id=log_id,
    )
