"""The index in RocksDB: raw mode, one column family each, no write-ahead log (the journal is the log).

    default:    "instance"              ->  u64 instance of the bookie (cookie)
                "guarded"               ->  empty: a `guard` belongs to it
                "states logged"         ->  empty: entry logs have what a rebuild alone knew of ledgers
                "incomplete"            ->  u64: entries of lower ledgers that it does not know may be lost (`rebuild`)
    locations:  u64 ledger | u64 entry  ->  see `locations`
    ledgers:    u64 ledger              ->  see `locations`

The index of a stopped bookie is read by the same class, see `open_read_only`.

Traps of rocksdict (DEPENDENCIES.md): a write holds the interpreter, so batches are small; an upper bound alone is set on an
iterator, which is sought to its lower end; handles and iterators keep the lock after `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from magnetar.proto.errors import DataDirectoryError, DiskFull, RequestTimeout, StorageFailed
from magnetar.proto.ledger_entry import NO_ENTRY
from magnetar.runtime.files import OsFiles
from magnetar.runtime.rocksdb_guard import RocksDbGuard

from .linked_files import LinkedFiles
from .locations import (
    REBUILD,
    LedgerRecord,
    Location,
    decode_ledger_record,
    decode_location,
    encode_ledger_record,
    encode_location,
)

_log = logging.getLogger(__name__)
# Keys of the column families; see the module.
_LOCATION_KEY = struct.Struct(">QQ")
_LEDGER_KEY = struct.Struct(">Q")
_INSTANCE = b"instance"
_GUARDED = b"guarded"
_INCOMPLETE = b"incomplete"
_STATES_LOGGED = b"states logged"
_MAX_ID = 2**64 - 1
_NO_SPACE = "No space left"
# Threads that read what is not in memory; and, as for entry logs, less than the read timeout of ledger clients.
_READERS = 4
_READ_TIMEOUT_S = 4.0
# Locations are warmed by so many entries of a ledger; a block has more than a step of them. The blocks of the chunks that
# are remembered fit into the cache.
_CHUNK = 1024
_ALL_KEYS = 100
_KEY_STEP = 32
_WARM_CHUNKS = 256


class RocksLocationIndex:
    """See the module and `LocationIndex`. DataDirectoryError: cannot be opened, or has fallen back (guard). DiskFull."""

    def __init__(self, path: str, *, links: LinkedFiles | None = None) -> None:
        """`links` are for `open_read_only`."""
        import rocksdict  # here: the thin client and the simulation do without it

        self.path = path
        self._links = links
        self._rocks: Any = rocksdict
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.create_missing_column_families(True)
        options.set_keep_log_file_num(2)
        options.set_max_open_files(512)
        options.set_max_background_jobs(2)
        # After a full disk RocksDB goes on by itself once the largest write buffer is free; this one takes a few notes.
        options.set_write_buffer_size(1 << 20)
        # As the flush does: a sync of the journal waits for what the disk has been given.
        options.set_bytes_per_sync(1 << 20)
        options.set_paranoid_checks(True)
        families = {
            "locations": self._family_options(16 << 20),
            "ledgers": self._family_options(4 << 20),
        }
        try:
            access = rocksdict.AccessType.read_only() if links else rocksdict.AccessType.read_write()
            self._db: Any = rocksdict.Rdict(
                links.path if links else path, options, column_families=families, access_type=access
            )
            self._locations: Any = self._db.get_column_family("locations")
            self._ledgers: Any = self._db.get_column_family("ledgers")
            self._locations_handle: Any = self._db.get_column_family_handle("locations")
            self._ledgers_handle: Any = self._db.get_column_family_handle("ledgers")
        except Exception as error:
            if _NO_SPACE in str(error):  # RocksDB writes a new MANIFEST before it serves anything
                raise DiskFull(f"the index {path} cannot be opened: {error}; free some space") from error
            raise DataDirectoryError(
                f"the index {path} cannot be opened: {self._plain(error)}; if it is damaged, {REBUILD}",
                path=path,
            ) from error
        options_without_log: Any = rocksdict.WriteOptions()
        options_without_log.disable_wal = True
        self._write_options = options_without_log
        for family in (self._db, self._locations, self._ledgers):
            family.set_read_options(self._read_options())
        # Sequence number of the last change of each family: what a flush of it makes durable.
        self._locations_sequence = self._ledgers_sequence = 0
        # A checkpoint and a garbage collection may flush at once, each in a thread.
        self._flushing = threading.Lock()
        self._warm: set[tuple[int, int]] = set()  # (ledger, chunk)
        self._silent = False  # the last read by a thread was not answered in time
        self._readers = ThreadPoolExecutor(_READERS, "magnetar-index")
        # Nothing is given to a thread that is busy: it would stay there until the disk answers, long after its timeout.
        self._free_readers = asyncio.Semaphore(_READERS)
        self._guard = RocksDbGuard(OsFiles(), path, REBUILD)
        if links is None:
            try:
                self.check_guard()
            except BaseException:
                self.close()
                raise

    @classmethod
    def open_read_only(cls, path: str) -> RocksLocationIndex:
        """The index of a stopped bookie: nothing in its directory changes, not even a time stamp. `check_guard` comes next.

        DataDirectoryError when it is missing or cannot be opened.
        """
        if not OsFiles().exists(os.path.join(path, "CURRENT")):
            raise DataDirectoryError(f"the index {path} is missing; {REBUILD}", path=path)
        links = LinkedFiles(path)
        try:
            return cls(path, links=links)
        except BaseException:
            links.remove()
            raise

    def check_guard(self) -> None:
        """DataDirectoryError when it has lost its newest changes (see RocksDbGuard)."""
        sequence = self._call(self._db.latest_sequence_number)
        guarded = self._call(self._db.get, _GUARDED) is not None
        if self._guard.open(read_only=bool(self._links)):
            self._guard.check(sequence)
        elif guarded:
            raise self._guard.missing()
        elif not self._links:  # it was just made
            self._guard.create(sequence)
        if not guarded and not self._links:
            self._note(_GUARDED)

    def _read_options(self) -> Any:
        """Every block that is read from the disk is verified."""
        options = self._rocks.ReadOptions()
        options.set_verify_checksums(True)
        return options

    def instance(self) -> int | None:
        value = self._call(self._db.get, _INSTANCE)
        return None if value is None else int.from_bytes(value, "big")

    def set_instance(self, instance: int) -> None:
        """See `LocationIndex`. Blocks for some ms, at the first start."""
        self._call(self._db.put, _INSTANCE, instance.to_bytes(8, "big"))
        self._call(self._db.flush, True)

    def incomplete_below(self) -> int:
        value = self._call(self._db.get, _INCOMPLETE)
        return 0 if value is None else int.from_bytes(value, "big")

    def set_incomplete(self, below: int) -> None:
        """See `LocationIndex`. Blocks for some ms."""
        self._note(_INCOMPLETE, below.to_bytes(8, "big"))

    def last_ledger(self, below: int) -> int:

        def read() -> int:
            iterator = self._ledgers.iter(self._read_options())
            iterator.seek_for_prev(_LEDGER_KEY.pack(min(below - 1, _MAX_ID)))
            found = _LEDGER_KEY.unpack(iterator.key())[0] if iterator.valid() else -1
            iterator.status()
            return int(found)

        return self._call(read)  # type: ignore[no-any-return]

    def states_are_logged(self) -> bool:
        return self._call(self._db.get, _STATES_LOGGED) is not None

    def set_states_logged(self) -> None:
        """See `LocationIndex`. Blocks for some ms, once."""
        self._note(_STATES_LOGGED)

    def _note(self, key: bytes, value: bytes = b"") -> None:
        self._call(self._db.put, key, value)
        self._call(self._db.flush, True)

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
        value = self._call(self._locations.get, _LOCATION_KEY.pack(ledger_id, entry_id))
        return None if value is None else decode_location(value)

    def get_each(self, ledger_id: int, entry_ids: Sequence[int]) -> list[tuple[int, Location]]:
        values = self._call(
            self._locations.get, [_LOCATION_KEY.pack(ledger_id, entry_id) for entry_id in entry_ids]
        )
        return [
            (entry_id, decode_location(value))
            for entry_id, value in zip(entry_ids, values, strict=True)
            if value is not None
        ]

    async def find(self, ledger_id: int, entry_id: int) -> Location | None:
        key = _LOCATION_KEY.pack(ledger_id, entry_id)
        may_exist, value = self._call(self._locations.key_may_exist, key, True)
        if may_exist and value is None:
            await self._read_off_loop(self._locations, [key])
            return self.get(ledger_id, entry_id)
        return None if value is None else decode_location(value)

    async def warm_locations(self, ledger_id: int, first: int, last: int) -> None:
        """See `LocationIndex`. What was warmed lately is taken to be warm."""
        chunks = range(first // _CHUNK, last // _CHUNK + 1)
        if all((ledger_id, chunk) in self._warm for chunk in chunks):
            return
        end = chunks.stop * _CHUNK
        # All of the first ones: a key that a Bloom filter of another table takes for its own reads a block there, too.
        ids = chain(range(first, first + _ALL_KEYS), range(first + _ALL_KEYS, end, _KEY_STEP))
        await self._read_off_loop(self._locations, [_LOCATION_KEY.pack(ledger_id, number) for number in ids])
        if len(self._warm) > _WARM_CHUNKS:
            self._warm.clear()
        self._warm.update((ledger_id, chunk) for chunk in chunks)

    async def warm_ledger(self, ledger_id: int) -> None:
        key = _LEDGER_KEY.pack(ledger_id)
        may_exist, value = self._call(self._ledgers.key_may_exist, key, True)
        if may_exist and value is None:
            await self._read_off_loop(self._ledgers, [key])

    async def _read_off_loop(self, family: Any, keys: list[bytes]) -> None:
        """Their blocks are in memory when it returns. 0.1 ms more than the disk needs."""
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                await self._free_readers.acquire()
                self._check_open()
                # Of a list of keys, and only then, rocksdict lets go of the interpreter while it reads.
                reading = asyncio.get_running_loop().run_in_executor(
                    self._readers, self._call, family.get, keys
                )
                reading.add_done_callback(lambda _: self._free_readers.release())
                await asyncio.shield(reading)  # its thread is free when it has read, whoever waits
        except TimeoutError:
            self._silent = True
            raise RequestTimeout(
                f"the index {self.path} waits for its disk; read another replica, and look at the disk",
                path=self.path,
            ) from None
        self._silent = False
        self._check_open()

    def _check_open(self) -> None:
        if self._db is None:
            raise StorageFailed("the index is closed")

    def list_locations(
        self, ledger_id: int, after: int = NO_ENTRY, count: int = 1000
    ) -> list[tuple[int, Location]]:
        if after >= _MAX_ID:
            return []
        first = _LOCATION_KEY.pack(ledger_id, after + 1)
        end = _LOCATION_KEY.pack(ledger_id, _MAX_ID) + b"\0"
        rows = self._rows(self._locations, _LOCATION_KEY, first, count, end)
        return [(entry_id, decode_location(value)) for (_, entry_id), value in rows]

    def walk(
        self, after: tuple[int, int] | None = None, count: int = 1000
    ) -> list[tuple[int, int, Location]]:
        first = b"" if after is None else _LOCATION_KEY.pack(*after) + b"\0"
        rows = self._rows(self._locations, _LOCATION_KEY, first, count)
        return [(ledger_id, entry_id, decode_location(value)) for (ledger_id, entry_id), value in rows]

    def estimated_locations(self) -> int:
        """An estimate of the number of locations, without reading them."""
        with contextlib.suppress(Exception):
            return int(self._locations.property_int_value("rocksdb.estimate-num-keys") or 0)
        return 0

    def _rows(
        self, family: Any, key: struct.Struct, first: bytes, count: int, end: bytes = b""
    ) -> list[tuple[tuple[int, ...], bytes]]:
        """Up to `count` rows from the key `first` on, in order. Their blocks do not push others out of the cache."""

        def read() -> list[tuple[tuple[int, ...], bytes]]:
            options = self._read_options()
            options.fill_cache(False)
            if end:
                options.set_iterate_upper_bound(end)
            iterator = family.iter(options)
            iterator.seek(first)
            rows: list[tuple[tuple[int, ...], bytes]] = []
            while len(rows) < count and iterator.valid():
                rows.append((key.unpack(iterator.key()), iterator.value()))
                iterator.next()
            # At a damaged block an iterator ends as it does behind the last row; only this tells.
            iterator.status()
            return rows

        return self._call(read)  # type: ignore[no-any-return]

    def put_locations(self, locations: Sequence[tuple[int, int, Location]]) -> None:
        batch = self._rocks.WriteBatch(raw_mode=True)
        for ledger_id, entry_id, location in locations:
            batch.put(
                _LOCATION_KEY.pack(ledger_id, entry_id), encode_location(location), self._locations_handle
            )
        self._locations_sequence = self._write(batch)

    def replace_locations(self, moved: Sequence[tuple[int, int, Location, Location | None]]) -> int:
        if not moved:
            return 0
        values = self._call(
            self._locations.get, [_LOCATION_KEY.pack(ledger, entry) for ledger, entry, _, _ in moved]
        )
        there = [
            (ledger, entry, new)
            for (ledger, entry, old, new), value in zip(moved, values, strict=True)
            if value == encode_location(old)
        ]
        if put := [(ledger, entry, new) for ledger, entry, new in there if new is not None]:
            self.put_locations(put)
        if len(put) < len(there):
            batch = self._rocks.WriteBatch(raw_mode=True)
            for ledger, entry, new in there:
                if new is None:
                    batch.delete(_LOCATION_KEY.pack(ledger, entry), self._locations_handle)
            self._locations_sequence = self._write(batch)
        return len(there)

    def delete_locations(self, ledger_id: int) -> None:
        """See `LocationIndex`. One range tombstone, about 2 us, and 1 us a get until RocksDB compacts it away."""
        batch = self._rocks.WriteBatch(raw_mode=True)
        end = _LOCATION_KEY.pack(ledger_id, _MAX_ID)
        batch.delete_range(_LOCATION_KEY.pack(ledger_id, 0), end, self._locations_handle)
        batch.delete(end, self._locations_handle)
        self._locations_sequence = self._write(batch)

    def get_ledger(self, ledger_id: int) -> LedgerRecord | None:
        value = self._call(self._ledgers.get, _LEDGER_KEY.pack(ledger_id))
        return None if value is None else decode_ledger_record(value)

    def list_ledgers(self, after: int = -1, count: int = 1000) -> list[tuple[int, LedgerRecord]]:
        if after >= _MAX_ID:
            return []
        rows = self._rows(self._ledgers, _LEDGER_KEY, _LEDGER_KEY.pack(after + 1), count)
        return [(ledger_id, decode_ledger_record(value)) for (ledger_id,), value in rows]

    def put_ledgers(self, ledgers: Sequence[tuple[int, LedgerRecord]]) -> None:
        batch = self._rocks.WriteBatch(raw_mode=True)
        for ledger_id, record in ledgers:
            batch.put(_LEDGER_KEY.pack(ledger_id), encode_ledger_record(record), self._ledgers_handle)
        self._ledgers_sequence = self._write(batch)

    def delete_ledger(self, ledger_id: int) -> None:
        batch = self._rocks.WriteBatch(raw_mode=True)
        batch.delete(_LEDGER_KEY.pack(ledger_id), self._ledgers_handle)
        self._ledgers_sequence = self._write(batch)

    def _write(self, batch: Any) -> int:
        """The sequence number of its last change."""
        self._call(self._db.write, batch, self._write_options)
        return self._db.latest_sequence_number()  # type: ignore[no-any-return]

    async def flush_locations(self) -> None:
        """See `LocationIndex`. In a thread: only the checkpoint waits for it."""
        await asyncio.get_running_loop().run_in_executor(
            None, self._flush, self._locations, self._locations_sequence
        )

    async def flush_ledgers(self) -> None:
        await asyncio.get_running_loop().run_in_executor(
            None, self._flush, self._ledgers, self._ledgers_sequence
        )

    def _flush(self, family: Any, sequence: int) -> None:
        """`sequence` is that of the family's last change when the flush was asked for: the MANIFEST has it afterwards."""
        self._call(family.flush, True)
        with self._flushing:
            self._guard.advance(sequence)

    def close(self) -> None:
        """See `LocationIndex`. May be called twice. Handles go first: they keep RocksDB's lock."""
        if self._db is None:
            return
        self._readers.shutdown(wait=not self._silent)
        self._locations_handle = self._ledgers_handle = None
        for family in (self._locations, self._ledgers, self._db):
            try:
                family.close()
            except Exception as error:  # it flushes: the journal has what the disk has no room for
                _log.warning("the index %s was closed without a flush: %s", self.path, self._plain(error))
        self._locations = self._ledgers = self._db = family = None
        self._guard.close()
        if self._links is not None:
            self._links.remove()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:  # rocksdict raises bare exceptions
            if _NO_SPACE in str(error):
                raise DiskFull(f"the index {self.path} has no space: {self._plain(error)}") from error
            raise StorageFailed(
                f"the index {self.path} failed: {self._plain(error)}; if it is damaged, {REBUILD}",
                path=self.path,
            ) from error

    def _plain(self, error: Exception) -> str:
        """RocksDB's message, with the path of the index in place of the links' path."""
        text = str(error).strip()
        return text.replace(self._links.path, self.path) if self._links else text
