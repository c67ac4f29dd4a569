"""Walks the entry logs of a bookie: records, whether they are live, damage, footer, sums by ledger; and reads one entry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

from magnetar.proto.errors import DataDirectoryError, EntryDamaged, MagnetarError, StorageFailed
from magnetar.proto.ledger_entry import decode_ledger_entry_header, verify_ledger_entry

from ..entry_log.records import RECORD_HEADER_BYTES, STATE_ENTRY, SYNCED_ENTRY, Scanned, record_entry
from ..entry_log.scan import LogScan, scan_log
from ..index import LedgerRecord, Location, LocationIndex, decode_ledger_record
from .journals import Progress, no_progress
from .stopped import BookieData, LogFile, StoppedBookie


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


class LogHeader(NamedTuple):
    """The first item of a walk. `damage` is empty if the header is good."""

    log_id: int
    path: str
    bytes: int
    damage: str


class LogRecord(NamedTuple):
    """A good record. `type`: "entry", "state" (of a ledger: `content`) or "synced" (all before it was durable then).

    `bytes` is the length of the entry. `live`: the index points to this very record; None without an index.
    """

    log_id: int
    position: int
    type: str
    ledger_id: int
    entry_id: int
    bytes: int
    live: bool | None
    content: str
    state: LedgerRecord | None


class LogBroken(NamedTuple):
    """A range without a good record. `torn`: nothing there was ever synced; otherwise it is damage.

    The ids are what the first bytes claim, or -1. `live`: the index has that entry at this very offset.
    """

    log_id: int
    position: int
    bytes: int
    torn: bool
    ledger_id: int
    entry_id: int
    live: bool


class LogLedger(NamedTuple):
    """The sums of one ledger in a log. `bytes` includes the headers of records; `live` counts live records."""

    ledger_id: int
    records: int
    bytes: int
    live: int


class LogEnd(NamedTuple):
    """The last item of a walk: the sums. `footer`: True good, False damaged, None missing (the log was not closed)."""

    log_id: int
    records: int
    record_bytes: int
    live: int
    live_bytes: int
    footer: bool | None
    damaged: int
    torn_bytes: int
    ledgers: dict[int, LogLedger]
    damage: str


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


def walk_entry_log(
    bookie: BookieData,
    log: LogFile,
    *,
    index: LocationIndex | None = None,
    progress: Progress = no_progress,
) -> Iterator[LogHeader | LogRecord | LogBroken | LogEnd]:
    """Yields a LogHeader, records and broken ranges in order, and a LogEnd. `index` None: the bookie's, if it can be opened.

    Raises StorageFailed when the log or the index cannot be read.
    """
    if index is None:
        try:
            index = bookie.index
        except (DataDirectoryError, StorageFailed):
            index = None
    return _LogWalk(bookie, log, index, progress).run()


class _LogWalk:
    def __init__(
        self, bookie: BookieData, log: LogFile, index: LocationIndex | None, progress: Progress
    ) -> None:
        self._bookie = bookie
        self._log = log
        self._index = index
        self._progress = progress
        self._ledgers: dict[int, LogLedger] = {}
        self._records = self._live = self._live_bytes = self._damaged = self._torn_bytes = 0

    def run(self) -> Iterator[LogHeader | LogRecord | LogBroken | LogEnd]:
        log = self._log
        with closing(self._bookie.files.open(log.path, read_only=True)) as file:
            scan = LogScan(log.log_id, file.size())
            records = scan_log(file.read_at, scan)
            found = next(records, None)  # the header comes before it
            damage = f"it {scan.header_fault}" if scan.header_fault else ""
            yield LogHeader(log.log_id, log.path, scan.size, damage)
            while found is not None:
                self._progress(f"entry log {log.log_id:08x}", found.offset, scan.size)
                yield self._found(found)
                found = next(records, None)
            yield self._end(scan)

    def _found(self, found: Scanned) -> LogRecord | LogBroken:
        log_id = self._log.log_id
        if found.data is None:
            if found.torn:
                self._torn_bytes += found.length
            else:
                self._damaged += 1
            live = self._is_live(found, claimed=True)
            return LogBroken(
                log_id, found.offset, found.length, found.torn, found.ledger_id, found.entry_id, bool(live)
            )
        kind = {STATE_ENTRY: "state", SYNCED_ENTRY: "synced"}.get(found.entry_id, "entry")
        is_live = self._is_live(found) if kind == "entry" else None
        self._count(found, bool(is_live))
        state, content = None, ""
        if kind == "state":
            state, content = _state(found.data)
        entry_id = found.entry_id if kind == "entry" else -1
        return LogRecord(
            log_id, found.offset, kind, found.ledger_id, entry_id, found.length, is_live, content, state
        )

    def _is_live(self, found: Scanned, *, claimed: bool = False) -> bool | None:
        if self._index is None or found.ledger_id < 0 or found.entry_id < 0:
            return None
        try:
            location = self._index.get(found.ledger_id, found.entry_id)
        except StorageFailed:
            if claimed:
                return None
            raise
        if location is None or claimed:
            return location is not None and location[:2] == (self._log.log_id, found.offset)
        return location == Location(self._log.log_id, found.offset, found.length)

    def _count(self, found: Scanned, live: bool) -> None:
        size = RECORD_HEADER_BYTES + found.length
        self._records += 1
        if live:
            self._live += 1
            self._live_bytes += size
        if found.entry_id == SYNCED_ENTRY:
            return
        known = self._ledgers.get(found.ledger_id) or LogLedger(found.ledger_id, 0, 0, 0)
        self._ledgers[found.ledger_id] = LogLedger(
            found.ledger_id, known.records + 1, known.bytes + size, known.live + live
        )

    def _end(self, scan: LogScan) -> LogEnd:
        footer_state = scan.footer is not None if scan.footer_found else None
        damage = "the footer is damaged" if footer_state is False else ""
        counted = {ledger_id: row.bytes for ledger_id, row in self._ledgers.items()}
        if scan.footer is not None and not self._damaged and scan.footer.ledgers != counted:
            damage = "the footer does not match the records"
        return LogEnd(
            self._log.log_id,
            self._records,
            sum(counted.values()),
            self._live,
            self._live_bytes,
            footer_state,
            self._damaged,
            self._torn_bytes,
            self._ledgers,
            damage,
        )


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
