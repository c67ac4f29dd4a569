"""The location index: (ledger, entry) -> (log, offset, length), and the ledger index: what is known of each ledger.

Both implement `LocationIndex`. What `put_*`, `replace_*` and `delete_*` wrote is readable at once, and durable after
`flush_*`, which a checkpoint awaits and no request does. `RocksLocationIndex` is the real one; that of the simulation loses
in a crash what was not flushed, as RocksDB without a write-ahead log does. FORMATS.md draws keys and values.

Two rules for those who write to it:

* A deletion is a write like another: until it was flushed, a crash brings back what was deleted.
* Nothing is read, decided and written in two turns of the loop: `replace_locations` compares and writes in one, so that
  a compaction never puts an old place over that of an entry which was added again meanwhile.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from magnetar.proto.errors import StorageFailed
from magnetar.proto.ledger_entry import NO_ENTRY

# What an operator does about a damaged index.
REBUILD = "`magnetar bookie index rebuild` makes the index anew from the entry logs"
_LOCATION = struct.Struct(">IQI")
_LEDGER = struct.Struct(">BqqqQ")
_FLAG_FENCED = 1
_FLAG_UNKNOWN = 2
# A write holds the interpreter: 300 puts take about 0.1 ms, reading 1000 locations in order 0.4 ms.
BATCH_ENTRIES = 300


# Above every ledger id.
ALL_LEDGERS = 1 << 63


class Location(NamedTuple):
    """Where an entry's record starts in an entry log, and the length of the entry (without the record's header)."""

    log_id: int
    offset: int
    length: int


class LedgerRecord(NamedTuple):
    """What a bookie remembers of a ledger besides its entries; -1 means none.

    `deleted_at_ms`, if it is not 0, makes the record a tombstone (rule 7). `unknown`: entries of it may have been lost here,
    so that a missing one is never said not to exist (rule 8).
    """

    fenced: bool = False
    explicit_lac: int = NO_ENTRY
    last_entry: int = NO_ENTRY
    last_add_confirmed: int = NO_ENTRY
    deleted_at_ms: int = 0
    unknown: bool = False

    def merged(self, other: LedgerRecord) -> LedgerRecord:
        """What both know together. Monotone: the order in which records are merged does not matter."""
        return LedgerRecord(
            self.fenced or other.fenced,
            max(self.explicit_lac, other.explicit_lac),
            max(self.last_entry, other.last_entry),
            max(self.last_add_confirmed, other.last_add_confirmed),
            max(self.deleted_at_ms, other.deleted_at_ms),
            self.unknown or other.unknown,
        )


class LocationIndex(Protocol):
    """See the module. Errors are StorageFailed; a damaged value is StorageFailed as well, never "absent" (rule 8)."""

    def instance(self) -> int | None:
        """Whose index this is (the cookie's instance); None: it was just made, or its disk was lost (rule 8)."""
        ...

    def set_instance(self, instance: int) -> None:
        """Durable when it returns. Once in the life of an index."""
        ...

    def incomplete_below(self) -> int:
        """Ledgers with a lower id that it does not know may have lost entries here (rule 8).

        It was rebuilt from damaged logs, or is that of a bookie that replaces a lost one. ALL_LEDGERS: it is not known yet
        which ids are of later ledgers. 0: nothing was lost.
        """
        ...

    def set_incomplete(self, below: int) -> None:
        """For good: an index that is rebuilt from it is incomplete as well. Durable when it returns."""
        ...

    def last_ledger(self, below: int) -> int:
        """The highest id below the given one of its ledgers, deleted ones among them; -1: it has none."""
        ...

    def states_are_logged(self) -> bool:
        """Whether entry logs have a state record of every ledger that needs one; False for a new or rebuilt index."""
        ...

    def set_states_logged(self) -> None:
        """Durable when it returns. Once in the life of an index."""
        ...

    def get(self, ledger_id: int, entry_id: int) -> Location | None:
        """Where the entry is; None: it is in no entry log. About 4 us."""
        ...

    def get_each(self, ledger_id: int, entry_ids: Sequence[int]) -> list[tuple[int, Location]]:
        """Locations of these entries, in the order asked for, without those that are in no entry log. About 0.6 us each."""
        ...

    async def find(self, ledger_id: int, entry_id: int) -> Location | None:
        """Like `get`, but the loop goes on while the disk is read. RequestTimeout when it does not answer."""
        ...

    async def warm_locations(self, ledger_id: int, first: int, last: int) -> None:
        """`get_each` and `list_locations` of entries from `first` to `last` wait for no disk afterwards. RequestTimeout."""
        ...

    async def warm_ledger(self, ledger_id: int) -> None:
        """`get_ledger` of it waits for no disk afterwards. RequestTimeout."""
        ...

    def list_locations(
        self, ledger_id: int, after: int = NO_ENTRY, count: int = 1000
    ) -> list[tuple[int, Location]]:
        """The next `count` entries of a ledger after `after`, whatever holes there are. Fewer only at its end."""
        ...

    def walk(
        self, after: tuple[int, int] | None = None, count: int = 1000
    ) -> list[tuple[int, int, Location]]:
        """The next `count` of all locations, in order of ledger and entry. Fewer only at the end of the index."""
        ...

    def put_locations(self, locations: Sequence[tuple[int, int, Location]]) -> None:
        """At most BATCH_ENTRIES of (ledger, entry, location). Buffered when it returns."""
        ...

    def replace_locations(self, moved: Sequence[tuple[int, int, Location, Location | None]]) -> int:
        """(ledger, entry, old, new), at most BATCH_ENTRIES: only where it is still `old`; how many. Buffered.

        Without a new location the old one is deleted.
        """
        ...

    def delete_locations(self, ledger_id: int) -> None:
        """All of a ledger. Buffered when it returns."""
        ...

    def get_ledger(self, ledger_id: int) -> LedgerRecord | None:
        """None: nothing was ever written here for this ledger."""
        ...

    def list_ledgers(self, after: int = -1, count: int = 1000) -> list[tuple[int, LedgerRecord]]:
        """The next `count` ledgers after `after`, in order. Fewer only at the end."""
        ...

    def put_ledgers(self, ledgers: Sequence[tuple[int, LedgerRecord]]) -> None:
        """At most BATCH_ENTRIES. Buffered when it returns."""
        ...

    def delete_ledger(self, ledger_id: int) -> None:
        """Its record: nothing is known of it any more. Buffered when it returns."""
        ...

    async def flush_locations(self) -> None:
        """Every location written or deleted before the call is durable so."""
        ...

    async def flush_ledgers(self) -> None:
        """Every ledger record written or deleted before the call is durable so."""
        ...

    def close(self) -> None:
        """Frees it; flushes nothing."""
        ...


def encode_location(location: Location) -> bytes:
    """Value of the location index."""
    return _LOCATION.pack(*location)


def decode_location(value: bytes) -> Location:
    """Raises StorageFailed."""
    if len(value) != _LOCATION.size:
        raise StorageFailed(f"a location in the index has a wrong length: it is damaged, {REBUILD}")
    return Location(*_LOCATION.unpack(value))


def encode_ledger_record(record: LedgerRecord) -> bytes:
    """Value of the ledger index, and of a state record in an entry log."""
    return _LEDGER.pack(
        (_FLAG_FENCED if record.fenced else 0) | (_FLAG_UNKNOWN if record.unknown else 0),
        record.explicit_lac,
        record.last_entry,
        record.last_add_confirmed,
        record.deleted_at_ms,
    )


def decode_ledger_record(value: bytes) -> LedgerRecord:
    """Raises StorageFailed."""
    if len(value) != _LEDGER.size:
        raise StorageFailed(f"a record of the ledger index has a wrong length: it is damaged, {REBUILD}")
    flags, explicit, last, confirmed, deleted_at_ms = _LEDGER.unpack(value)
    return LedgerRecord(
        bool(flags & _FLAG_FENCED), explicit, last, confirmed, deleted_at_ms, bool(flags & _FLAG_UNKNOWN)
    )


_ROWS = 1000
_RANGE = 500


class EntryKey(Protocol):
    """A record that a scan found, or another thing that names an entry."""

    @property
    def ledger_id(self) -> int: ...

    @property
    def entry_id(self) -> int: ...


def location_pages(index: LocationIndex, rows: int = _ROWS) -> Iterator[list[tuple[int, int, Location]]]:
    """All locations, in order of ledger and entry; about 0.5 us each. Errors are those of the index."""
    after: tuple[int, int] | None = None
    while page := index.walk(after, rows):
        yield page
        after = page[-1][:2]


def ledger_pages(index: LocationIndex, rows: int = _ROWS) -> Iterator[list[tuple[int, LedgerRecord]]]:
    """All ledger records, by id."""
    after = -1
    while page := index.list_ledgers(after, rows):
        yield page
        after = page[-1][0]


def ledgers_of(index: LocationIndex) -> Iterator[tuple[int, LedgerRecord]]:
    """The same without pages."""
    for page in ledger_pages(index):
        yield from page


def locations_of_ledger(
    index: LocationIndex, ledger_id: int, first: int = 0
) -> Iterator[tuple[int, Location]]:
    """Locations of one ledger from entry `first` on, in order."""
    after = first - 1
    while page := index.list_locations(ledger_id, after, _ROWS):
        yield from page
        after = page[-1][0]


def locations_of(index: LocationIndex, records: Sequence[EntryKey]) -> list[Location | None]:
    """One location for each record, None where the index has none; runs of a ledger are looked up as ranges.

    0.6 us for an entry of a run, 4 us for a single one. StorageFailed.
    """
    places: list[Location | None] = []
    start = 0
    while start < len(records):
        ledger_id, first = records[start].ledger_id, records[start].entry_id
        end = start + 1
        # A flush writes the entries of a ledger in order; with E > Qw each bookie has every second or third of them.
        while (
            end < len(records)
            and end - start < _RANGE
            and records[end].ledger_id == ledger_id
            and 0 < records[end].entry_id - records[end - 1].entry_id <= 3
        ):
            end += 1
        if end == start + 1:
            places.append(index.get(ledger_id, first))
        else:
            found = dict(index.get_each(ledger_id, range(first, records[end - 1].entry_id + 1)))
            places += [found.get(record.entry_id) for record in records[start:end]]
        start = end
    return places
