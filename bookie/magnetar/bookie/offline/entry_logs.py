"""Walks the entry logs of a bookie: records, whether they are live, damage, footer, sums by ledger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any, NamedTuple

from magnetar.proto.errors import DataDirectoryError, EntryDamaged, MagnetarError, StorageFailed
from magnetar.proto.ledger_entry import decode_ledger_entry_header, verify_ledger_entry

from ..entry_log.records import RECORD_HEADER_BYTES, STATE_ENTRY, SYNCED_ENTRY, Scanned
from ..entry_log.scan import LogScan, scan_log
from ..index import LedgerRecord, Location, LocationIndex, decode_ledger_record
from .journals import Progress, Row, no_progress
from .stopped import BookieData, LogFile


class StoredEntry(NamedTuple):
    """One entry, as the operator's commands show it.

    `damage` is empty when it is sound; `data` are its bytes with the 40-byte header, empty if unreadable.
    """

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


def find_log(bookie: BookieData, text: str) -> LogFile:
    """Finds a log by id (hexadecimal), name or path. DataDirectoryError when there is none."""
    logs = bookie.logs()
    name = text.rpartition("/")[2]
    for log in logs:
        if text == log.path or log.path.endswith(f"/{name}"):
            return log
    try:
        wanted = int(name, 16)
    except ValueError:
        wanted = -1
    for log in logs:
        if log.log_id == wanted:
            return log
    known = f"{logs[0].log_id:08x} to {logs[-1].log_id:08x}" if logs else "none"
    raise DataDirectoryError(f"there is no entry log {text} in {bookie.layout.root}; here are {known}")


class LogSums:
    """What a walk over one log has found so far. `index`: None if it cannot be asked."""

    def __init__(self, log_id: int, index: LocationIndex | None) -> None:
        self.records = self.live = self.live_bytes = self.damaged = self.torn_bytes = 0
        # Records, bytes with the headers of records, and live records, by ledger.
        self.ledgers: dict[int, tuple[int, int, int]] = {}
        self._log_id = log_id
        self._index = index

    def take(self, found: Scanned) -> bool | None:
        """Counts it. Whether the index has that entry at this very place; None: it is no entry, or nobody knows."""
        entry = 0 <= found.entry_id < SYNCED_ENTRY
        if found.data is None:
            if found.torn:
                self.torn_bytes += found.length
            else:
                self.damaged += 1
            return bool(entry and self._is_live(found))
        live = self._is_live(found) if entry else None
        size = RECORD_HEADER_BYTES + found.length
        self.records += 1
        if live:
            self.live += 1
            self.live_bytes += size
        if found.entry_id != SYNCED_ENTRY:
            records, length, living = self.ledgers.get(found.ledger_id, (0, 0, 0))
            self.ledgers[found.ledger_id] = (records + 1, length + size, living + bool(live))
        return live

    def _is_live(self, found: Scanned) -> bool | None:
        if self._index is None or found.ledger_id < 0:
            return None
        try:
            location = self._index.get(found.ledger_id, found.entry_id)
        except StorageFailed:
            if found.data is None:  # what it claims to be need not be believed
                return None
            raise
        if location is None or found.data is None:
            return location is not None and location[:2] == (self._log_id, found.offset)
        return location == Location(self._log_id, found.offset, found.length)

    def footer_fault(self, scan: LogScan) -> str:
        """What is wrong with the footer, once the walk is over; "" if nothing is, or there is none."""
        if scan.footer is None:
            return "the footer is damaged" if scan.footer_found else ""
        counted = {ledger_id: length for ledger_id, (_, length, _) in self.ledgers.items()}
        if not self.damaged and scan.footer.ledgers != counted:
            return "the footer does not match the records"
        return ""


def walk_entry_log(bookie: BookieData, log: LogFile, *, progress: Progress = no_progress) -> Iterator[Row]:
    """Rows for `magnetar bookie entrylog dump`, as WIRE.md has them. Raises StorageFailed when log or index cannot be read.

    header      log_id, path, bytes, damage ("": the header is good)
    record      a good record: position, type ("entry", "state" of a ledger: `content`, `state`; "synced": all before
                it was durable then), ledger_id, entry_id, bytes of the entry, live: the index points to this very
                record; None without an index
    broken      a range without a good record: position, bytes, torn (nothing there was ever synced; otherwise it is
                damage), ledger_id and entry_id, what the first bytes claim, or -1; live: the index has that entry here
    statistics  the sums; footer: True good, False damaged, None missing (the log was not closed)
    """
    index: LocationIndex | None = None
    with suppress(DataDirectoryError, StorageFailed):
        index = bookie.index
    log_id = log.log_id
    sums = LogSums(log_id, index)
    with closing(bookie.files.open(log.path, read_only=True)) as file:
        scan = LogScan(log_id, file.size())
        records = scan_log(file.read_at, scan)
        found = next(records, None)  # the header comes before it
        damage = f"it {scan.header_fault}" if scan.header_fault else ""
        yield {"kind": "header", "log_id": log_id, "path": log.path, "bytes": scan.size, "damage": damage}
        while found is not None:
            progress(f"entry log {log_id:08x}", found.offset, scan.size)
            yield _row(log_id, found, sums.take(found))
            found = next(records, None)
    yield {
        "kind": "statistics",
        "log_id": log_id,
        "records": sums.records,
        "record_bytes": sum(length for _, length, _ in sums.ledgers.values()),
        "live": sums.live,
        "live_bytes": sums.live_bytes,
        "footer": scan.footer is not None if scan.footer_found else None,
        "damaged": sums.damaged,
        "torn_bytes": sums.torn_bytes,
        "ledgers": [
            {"ledger_id": ledger_id, "records": count, "bytes": length, "live": live}
            for ledger_id, (count, length, live) in sums.ledgers.items()
        ],
        "damage": sums.footer_fault(scan),
    }


def _row(log_id: int, found: Scanned, live: bool | None) -> Row:
    row: dict[str, Any] = {"kind": "record", "log_id": log_id, "position": found.offset}
    if found.data is None:
        row |= {"kind": "broken", "bytes": found.length, "torn": found.torn}
        return row | {"ledger_id": found.ledger_id, "entry_id": found.entry_id, "live": live}
    kind = {STATE_ENTRY: "state", SYNCED_ENTRY: "synced"}.get(found.entry_id, "entry")
    state, content = _state(found.data) if kind == "state" else (None, "")
    return row | {
        "type": kind,
        "ledger_id": found.ledger_id,
        "entry_id": found.entry_id if kind == "entry" else -1,
        "bytes": found.length,
        "live": live,
        "content": content,
        "state": state,
    }


def _state(data: bytes) -> tuple[LedgerRecord | None, str]:
    try:
        state = decode_ledger_record(data)
    except MagnetarError as error:
        return None, error.message
    parts = ["fenced"] if state.fenced else []
    parts += ["incomplete"] if state.unknown else []
    parts += [f"deleted at {state.deleted_at_ms} ms"] if state.deleted_at_ms else []
    parts.append(
        f"explicit LAC {state.explicit_lac} last entry {state.last_entry} LAC {state.last_add_confirmed}"
    )
    return state, ", ".join(parts)
