"""The 40 bytes that the ledger client puts before each payload, and that bookie and reader verify.

    u64 ledger id | u64 entry id | i64 last add confirmed | u64 length | u64 digest | payload

`length` is the sum of the payload bytes of the ledger up to and with this entry; the digest is xxh3-64 over the first
32 bytes and the payload (CORRECTNESS.md rule 20: ledger, entry, LAC and length are covered, so a re-add has another digest).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from .errors import EntryDamaged

# As in LedgerEntryHeader; the hot path of a bookie unpacks them without making one.
LEDGER_ENTRY_FIELDS = struct.Struct(">QQqQ")
LEDGER_ENTRY_HEADER_BYTES = LEDGER_ENTRY_FIELDS.size + 8  # and the digest
assert (LEDGER_ENTRY_FIELDS.size, LEDGER_ENTRY_HEADER_BYTES) == (32, 40)
NO_ENTRY = -1
_JOIN_BYTES = 4096


class LedgerEntryHeader(NamedTuple):
    """Header fields. `last_add_confirmed` is -1 while nothing is confirmed; `length` is in bytes."""

    ledger_id: int
    entry_id: int
    last_add_confirmed: int
    length: int


def encode_ledger_entry(
    ledger_id: int, entry_id: int, last_add_confirmed: int, length: int, payload: bytes
) -> bytes:
    """The entry as bookies store it. One copy of `payload`; the digest costs 20 us a MB."""
    fields = LEDGER_ENTRY_FIELDS.pack(ledger_id, entry_id, last_add_confirmed, length)
    digest = xxhash.xxh3_64(fields)
    digest.update(payload)
    return b"".join((fields, digest.digest(), payload))


def decode_ledger_entry_header(data: bytes) -> LedgerEntryHeader:
    """Reads the header without verifying the digest. Raises EntryDamaged when `data` is too short."""
    if len(data) < LEDGER_ENTRY_HEADER_BYTES:
        raise EntryDamaged(f"a ledger entry has at least {LEDGER_ENTRY_HEADER_BYTES} bytes, not {len(data)}")
    return LedgerEntryHeader(*LEDGER_ENTRY_FIELDS.unpack_from(data))


def ledger_entry_is_intact(data: bytes) -> bool:
    """True if `data` holds a header and its digest is right: `verify_ledger_entry` for callers that check thousands.

    0.2 us for 100 bytes, 0.4 for 1 KB (joining small parts is cheaper than a hasher), 1.9 for 64 KB.
    """
    size = len(data)
    if size < LEDGER_ENTRY_HEADER_BYTES:
        return False
    if size <= _JOIN_BYTES:
        return xxhash.xxh3_64_digest(data[:32] + data[40:]) == data[32:40]
    digest = xxhash.xxh3_64(data[:32])
    digest.update(memoryview(data)[40:])
    return digest.digest() == data[32:40]


def verify_ledger_entry(data: bytes) -> LedgerEntryHeader:
    """Checks the digest and returns the header. Raises EntryDamaged."""
    header = decode_ledger_entry_header(data)
    if not ledger_entry_is_intact(data):
        raise EntryDamaged(
            f"entry {header.entry_id} of ledger {header.ledger_id} does not match its digest",
            ledger_id=header.ledger_id,
            entry_id=header.entry_id,
        )
    return header
