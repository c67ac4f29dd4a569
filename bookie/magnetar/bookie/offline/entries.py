"""Reads entries of a ledger of a stopped bookie, from entry logs or from journals that were not replayed yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from magnetar.proto.errors import EntryDamaged, MagnetarError
from magnetar.proto.ledger_entry import decode_ledger_entry_header, verify_ledger_entry

from ..entry_log.records import RECORD_HEADER_BYTES, record_entry
from ..index import Location
from ..index.walks import locations_of_ledger
from ..journal.records import RECORD_HEADER_BYTES as JOURNAL_HEADER_BYTES
from .journaled import JournalPlace
from .log_file_cache import LogFileCache
from .stopped import BookieData

__all__ = ["StoredEntry", "read_entries", "stored_entry"]


class StoredEntry(NamedTuple):
    """One entry. `damage` is empty when it is sound; `data` are its bytes with the 40-byte header, empty if unreadable."""

    ledger_id: int
    entry_id: int
    # "entry log" or "journal"; the file, and where in it the record starts.
    source: str
    path: str
    position: int
    last_add_confirmed: int
    # Payload bytes of the ledger up to and with this entry, as its header says.
    ledger_length: int
    data: bytes
    damage: str


def read_entries(
    bookie: BookieData,
    places: dict[int, JournalPlace],
    ledger_id: int,
    first: int = 0,
    last: int | None = None,
) -> Iterator[StoredEntry]:
    """What is here of `first` to `last` (None: the end), ascending. One entry is held at a time.

    `places`: entries that are in journals (`Journaled.places`), which are newer than those in entry logs. Raises
    StorageFailed when the index is damaged; a damaged entry is returned as such.
    """
    files = LogFileCache(bookie.files)
    waiting = iter(
        sorted(item for item in places.items() if first <= item[0] and (last is None or item[0] <= last))
    )
    journaled = next(waiting, None)
    try:
        for entry_id, location in locations_of_ledger(bookie.index, ledger_id, first):
            if last is not None and entry_id > last:
                break
            while journaled is not None and journaled[0] < entry_id:
                yield _from_journal(files, ledger_id, *journaled)
                journaled = next(waiting, None)
            if journaled is not None and journaled[0] == entry_id:
                yield _from_journal(files, ledger_id, *journaled)
                journaled = next(waiting, None)
            else:
                yield read_located(bookie, files, ledger_id, entry_id, location)
        while journaled is not None:
            yield _from_journal(files, ledger_id, *journaled)
            journaled = next(waiting, None)
    finally:
        files.close()


def read_located(
    bookie: BookieData, files: LogFileCache, ledger_id: int, entry_id: int, location: Location
) -> StoredEntry:
    """The entry that the index says to be at `location`; damage is in the result, not raised."""
    path = bookie.log_path(location.log_id)
    if path is None:
        missing = f"entry log {location.log_id:08x}, where the index has it, is missing"
        return stored_entry(ledger_id, entry_id, "entry log", "", location.offset, b"", missing)
    length = RECORD_HEADER_BYTES + location.length
    try:
        data = files.read_at(path, location.offset, length)
        entry = record_entry(data, 0, location.log_id, ledger_id, entry_id, location.length)
    except EntryDamaged:
        return stored_entry(
            ledger_id, entry_id, "entry log", path, location.offset, b"", "the record is damaged"
        )
    except MagnetarError as error:
        return stored_entry(ledger_id, entry_id, "entry log", path, location.offset, b"", error.message)
    return stored_entry(ledger_id, entry_id, "entry log", path, location.offset, entry, "")


def _from_journal(files: LogFileCache, ledger_id: int, entry_id: int, place: JournalPlace) -> StoredEntry:
    try:
        data = files.read_at(place.path, place.position + JOURNAL_HEADER_BYTES, place.length)
    except MagnetarError as error:
        return stored_entry(ledger_id, entry_id, "journal", place.path, place.position, b"", error.message)
    return stored_entry(ledger_id, entry_id, "journal", place.path, place.position, data, "")


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
