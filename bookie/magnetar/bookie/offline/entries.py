"""One stored entry with what is wrong with it, as the operator's commands show it."""

from __future__ import annotations

from contextlib import closing
from typing import NamedTuple

from magnetar.proto.errors import EntryDamaged, MagnetarError
from magnetar.proto.ledger_entry import decode_ledger_entry_header, verify_ledger_entry

from ..entry_log.records import RECORD_HEADER_BYTES, record_entry
from ..index import Location
from .stopped import StoppedBookie


class StoredEntry(NamedTuple):
    """One entry. `damage` is empty when it is sound; `data` are its bytes with the 40-byte header, empty if unreadable."""

    ledger_id: int
    entry_id: int
    # "entry log" or "write cache"; the file, and where in it the record starts ("" and -1 of the cache).
    source: str
    path: str
    position: int
    last_add_confirmed: int
    # Payload bytes of the ledger up to and with this entry, as its header says.
    ledger_length: int
    data: bytes
    damage: str


def read_located(bookie: StoppedBookie, ledger_id: int, entry_id: int, location: Location) -> StoredEntry:
    """The entry that the index says to be at `location`; damage is in the result, not raised."""
    path = bookie.log_path(location.log_id)
    if path is None:
        missing = f"entry log {location.log_id:08x}, where the index has it, is missing"
        return stored_entry(ledger_id, entry_id, "entry log", "", location.offset, b"", missing)
    length = RECORD_HEADER_BYTES + location.length
    try:
        with closing(bookie.files.open(path, read_only=True)) as file:
            data = file.read_at(location.offset, length)
        entry = record_entry(data, 0, location.log_id, ledger_id, entry_id, location.length)
    except EntryDamaged:
        return stored_entry(
            ledger_id, entry_id, "entry log", path, location.offset, b"", "the record is damaged"
        )
    except MagnetarError as error:
        return stored_entry(ledger_id, entry_id, "entry log", path, location.offset, b"", error.message)
    return stored_entry(ledger_id, entry_id, "entry log", path, location.offset, entry, "")


def stored_entry(
    ledger_id: int, entry_id: int, source: str, path: str, position: int, data: bytes, damage: str
) -> StoredEntry:
    """From the bytes that were read, none if they cannot be; they are verified."""
    confirmed, length = -1, -1
    if data:
        try:
            header = decode_ledger_entry_header(data)
            confirmed, length = header.last_add_confirmed, header.length
            verify_ledger_entry(data)
            if (header.ledger_id, header.entry_id) != (ledger_id, entry_id):
                damage = f"it says to be entry {header.entry_id} of ledger {header.ledger_id}"
        except EntryDamaged as error:
            damage = error.message
    return StoredEntry(ledger_id, entry_id, source, path, position, confirmed, length, data, damage)
