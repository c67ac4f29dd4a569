"""The location index: (ledger, entry) -> (log, offset, length), and the ledger index: what is known of each ledger.

Both stand behind `LocationIndex`. What `put_*` wrote is readable at once and durable after `flush`, which a checkpoint
awaits and no request does. `RocksLocationIndex` is the real one; `ModelLocationIndex` loses in a crash what was not
flushed, as RocksDB without a write-ahead log does.

    default:    "instance"              ->  u64 instance of the bookie (cookie)
    locations:  u64 ledger | u64 entry  ->  u32 log | u64 offset | u32 length
    ledgers:    u64 ledger              ->  u8 flags (1: fenced) | i64 explicit LAC | i64 last entry | i64 LAC of entries
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from magnetar.proto.errors import DataDirectoryError, StorageFailed
from magnetar.proto.ledger_entry import NO_ENTRY

__all__ = ["LedgerRecord", "Location", "LocationIndex", "ModelLocationIndex", "RocksLocationIndex"]

_KEY = struct.Struct(">QQ")
_LOCATION = struct.Struct(">IQI")
_LEDGER_KEY = struct.Struct(">Q")
_LEDGER = struct.Struct(">Bqqq")
_INSTANCE = b"instance"
_FLAG_FENCED = 1
# A write holds the interpreter: 300 puts take about 0.1 ms.
BATCH_ENTRIES = 300


class Location(NamedTuple):
    """Where an entry's record starts in an entry log, and the length of the entry (without the record's header)."""

    log_id: int
    offset: int
    length: int


class LedgerRecord(NamedTuple):
    """What a bookie remembers of a ledger besides its entries; -1 means none."""

    fenced: bool = False
    explicit_lac: int = NO_ENTRY
    last_entry: int = NO_ENTRY
    last_add_confirmed: int = NO_ENTRY


class LocationIndex(Protocol):
    """See the module. Errors are StorageFailed; a damaged value is StorageFailed as well, never "absent" (rule 8)."""

    def instance(self) -> int | None:
        """Whose index this is (the cookie's instance); None: it was just made, or its disk was lost (rule 8)."""
        ...

    def set_instance(self, instance: int) -> None:
        """Durable when it returns. Once in the life of an index."""
        ...

    def get(self, ledger_id: int, entry_id: int) -> Location | None:
        """Where the entry is; None: it is in no entry log. About 4 us."""
        ...

    def get_range(self, ledger_id: int, first: int, count: int) -> list[tuple[int, Location]]:
        """Locations of up to `count` entries from `first` on, in order."""
        ...

    def put_locations(self, locations: Sequence[tuple[int, int, Location]]) -> None:
        """At most BATCH_ENTRIES of (ledger, entry, location). Buffered when it returns."""
        ...

    def get_ledger(self, ledger_id: int) -> LedgerRecord | None:
        """None: nothing was ever written here for this ledger."""
        ...

    def put_ledgers(self, ledgers: Sequence[tuple[int, LedgerRecord]]) -> None:
        """At most BATCH_ENTRIES. Buffered when it returns."""
        ...

    async def flush_locations(self) -> None:
        """Every location written before the call is durable."""
        ...

    async def flush_ledgers(self) -> None:
        """Every ledger record written before the call is durable."""
        ...

    def close(self) -> None:
        """Frees it; flushes nothing."""
        ...


def encode_ledger_record(record: LedgerRecord) -> bytes:
    """Value of the ledger index."""
    return _LEDGER.pack(
        _FLAG_FENCED if record.fenced else 0,
        record.explicit_lac,
        record.last_entry,
        record.last_add_confirmed,
    )


def decode_ledger_record(value: bytes) -> LedgerRecord:
    """Raises StorageFailed."""
    if len(value) < _LEDGER.size:
        raise StorageFailed("a record of the ledger index is cut short: the index is damaged")
    flags, explicit, last, confirmed = _LEDGER.unpack_from(value)
    return LedgerRecord(bool(flags & _FLAG_FENCED), explicit, last, confirmed)


def _decode_location(value: bytes) -> Location:
    if len(value) != _LOCATION.size:
        raise StorageFailed("a location in the index has a wrong length: the index is damaged")
    return Location(*_LOCATION.unpack(value))


class RocksLocationIndex:
    """RocksDB in raw mode, one column family each, no write-ahead log: the journal is the log."""

    def __init__(self, path: str) -> None:
        import rocksdict  # here: the thin client and the simulation do without it

        self._rocks: Any = rocksdict
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.create_missing_column_families(True)
        options.set_keep_log_file_num(2)
        options.set_max_open_files(512)
        options.set_max_background_jobs(2)
        families = {
            "locations": self._family_options(16 << 20),
            "ledgers": self._family_options(4 << 20),
        }
        try:
            self._db: Any = rocksdict.Rdict(path, options, column_families=families)
            self._locations: Any = self._db.get_column_family("locations")
            self._ledgers: Any = self._db.get_column_family("ledgers")
            self._locations_handle: Any = self._db.get_column_family_handle("locations")
            self._ledgers_handle: Any = self._db.get_column_family_handle("ledgers")
        except Exception as error:
            raise DataDirectoryError(
                f"the index {path} cannot be opened: {error}; it can be rebuilt from the entry logs",
                path=path,
            ) from error
        options_without_log: Any = rocksdict.WriteOptions()
        options_without_log.disable_wal = True
        self._write_options = options_without_log

    def instance(self) -> int | None:
        """See `LocationIndex`."""
        value = self._guard(self._db.get, _INSTANCE)
        return None if value is None else int.from_bytes(value, "big")

    def set_instance(self, instance: int) -> None:
        """See `LocationIndex`. Blocks for some ms, at the first start."""
        self._guard(self._db.put, _INSTANCE, instance.to_bytes(8, "big"))
        self._guard(self._db.flush, True)

    def _family_options(self, write_buffer_bytes: int) -> Any:
        options = self._rocks.Options(raw_mode=True)
        table = self._rocks.BlockBasedOptions()
        table.set_bloom_filter(10, False)
        table.set_block_cache(self._rocks.Cache(8 << 20))
        options.set_block_based_table_factory(table)
        # Headroom: a write stall would freeze the process. Only a checkpoint flushes, every few MB.
        options.set_write_buffer_size(write_buffer_bytes)
        options.set_max_write_buffer_number(8)
        options.set_level_zero_slowdown_writes_trigger(200)
        options.set_level_zero_stop_writes_trigger(400)
        return options

    def get(self, ledger_id: int, entry_id: int) -> Location | None:
        """See `LocationIndex`."""
        value = self._guard(self._locations.get, _KEY.pack(ledger_id, entry_id))
        return None if value is None else _decode_location(value)

    def get_range(self, ledger_id: int, first: int, count: int) -> list[tuple[int, Location]]:
        """See `LocationIndex`."""
        keys = [_KEY.pack(ledger_id, entry_id) for entry_id in range(first, first + count)]
        values = self._guard(self._locations.get, keys)
        return [
            (entry_id, _decode_location(value))
            for entry_id, value in enumerate(values, first)
            if value is not None
        ]

    def put_locations(self, locations: Sequence[tuple[int, int, Location]]) -> None:
        """See `LocationIndex`."""
        batch = self._rocks.WriteBatch(raw_mode=True)
        for ledger_id, entry_id, location in locations:
            batch.put(_KEY.pack(ledger_id, entry_id), _LOCATION.pack(*location), self._locations_handle)
        self._guard(self._db.write, batch, self._write_options)

    def get_ledger(self, ledger_id: int) -> LedgerRecord | None:
        """See `LocationIndex`."""
        value = self._guard(self._ledgers.get, _LEDGER_KEY.pack(ledger_id))
        return None if value is None else decode_ledger_record(value)

    def put_ledgers(self, ledgers: Sequence[tuple[int, LedgerRecord]]) -> None:
        """See `LocationIndex`."""
        batch = self._rocks.WriteBatch(raw_mode=True)
        for ledger_id, record in ledgers:
            batch.put(_LEDGER_KEY.pack(ledger_id), encode_ledger_record(record), self._ledgers_handle)
        self._guard(self._db.write, batch, self._write_options)

    async def flush_locations(self) -> None:
        """See `LocationIndex`. In a thread: only the checkpoint waits for it."""
        await asyncio.get_running_loop().run_in_executor(None, self._guard, self._locations.flush, True)

    async def flush_ledgers(self) -> None:
        """See `LocationIndex`."""
        await asyncio.get_running_loop().run_in_executor(None, self._guard, self._ledgers.flush, True)

    def close(self) -> None:
        """See `LocationIndex`. Handles go first: they keep RocksDB's lock."""
        if self._db is None:
            return
        self._locations_handle = self._ledgers_handle = None
        self._locations.close()
        self._ledgers.close()
        self._locations = self._ledgers = None
        self._db.close()
        self._db = None

    def _guard(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:  # rocksdict raises bare exceptions
            raise StorageFailed(f"the index failed: {error}") from error


class ModelStorage:
    """What a ModelLocationIndex keeps through a crash."""

    def __init__(self) -> None:
        self.locations: dict[tuple[int, int], Location] = {}
        self.ledgers: dict[int, LedgerRecord] = {}
        self.instance: int | None = None


class ModelLocationIndex:
    """An index in memory over a ModelStorage: a new one on the same storage sees what was flushed."""

    def __init__(self, storage: ModelStorage | None = None) -> None:
        self._storage = storage if storage is not None else ModelStorage()
        self._locations: dict[tuple[int, int], Location] = {}
        self._ledgers: dict[int, LedgerRecord] = {}

    def instance(self) -> int | None:
        """See `LocationIndex`."""
        return self._storage.instance

    def set_instance(self, instance: int) -> None:
        """See `LocationIndex`."""
        self._storage.instance = instance

    def get(self, ledger_id: int, entry_id: int) -> Location | None:
        """See `LocationIndex`."""
        key = (ledger_id, entry_id)
        return self._locations.get(key) or self._storage.locations.get(key)

    def get_range(self, ledger_id: int, first: int, count: int) -> list[tuple[int, Location]]:
        """See `LocationIndex`."""
        return [
            (entry_id, location)
            for entry_id in range(first, first + count)
            if (location := self.get(ledger_id, entry_id)) is not None
        ]

    def put_locations(self, locations: Sequence[tuple[int, int, Location]]) -> None:
        """See `LocationIndex`."""
        for ledger_id, entry_id, location in locations:
            self._locations[(ledger_id, entry_id)] = location

    def get_ledger(self, ledger_id: int) -> LedgerRecord | None:
        """See `LocationIndex`."""
        return self._ledgers.get(ledger_id) or self._storage.ledgers.get(ledger_id)

    def put_ledgers(self, ledgers: Sequence[tuple[int, LedgerRecord]]) -> None:
        """See `LocationIndex`."""
        self._ledgers.update(ledgers)

    async def flush_locations(self) -> None:
        """See `LocationIndex`."""
        written = dict(self._locations)
        await asyncio.sleep(0)
        self._storage.locations.update(written)

    async def flush_ledgers(self) -> None:
        """See `LocationIndex`."""
        written = dict(self._ledgers)
        await asyncio.sleep(0)
        self._storage.ledgers.update(written)

    def close(self) -> None:
        """See `LocationIndex`."""
