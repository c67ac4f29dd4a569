"""The embedded metadata store: the tree of `local` on RocksDB, in a directory of its own.

    a commit:  change log (synced, in a thread)  ->  RocksDB's memtable, without a log of its own
    a turn:    the log is full  ->  next turn, noted in the database  ->  RocksDB flushes  ->  guard  ->  the turn is over

RocksDB's own log and MANIFEST take damage at their ends for a torn write, and forget what was durable in silence. Ledgers
that the store forgets are ledgers that garbage collection deletes (rule 37). So changes are in a log that tells damage from
a torn write (`change_log`), and a guard (`RocksDbGuard`) notices a database that has lost tables.

An open store holds room for what it needs on a full disk: the log is preallocated, nothing is flushed while less than
`MINIMUM_FREE_BYTES` are free, and `reserve` is given back when the database finds no room to open (rule 39).

Traps of rocksdict: everything in raw mode; a batch serves once; an iterator's lower bound overwrites its upper bound, so
only the upper one is set; `close` keeps the lock while an iterator is alive, so iterators are used up or dropped here;
errors are bare `Exception`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgpack
import rocksdict

from magnetar.proto.errors import DataDirectoryError, DiskFull, MagnetarError, StorageFailed
from magnetar.runtime.files import Files, OsFiles
from magnetar.runtime.rocksdb_guard import RocksDbGuard

from .change_log import RESTORE, TURN_BYTES, ChangeLog
from .local import LocalMetadataStore

_log = logging.getLogger(__name__)

# A flush of two turns and a compaction of what it made.
MINIMUM_FREE_BYTES: Final = 32 << 20
RESERVE_BYTES: Final = 4 << 20
# Larger than all changes of the turns that can be in it, so RocksDB flushes only when it is asked to.
_MEMTABLE_BYTES = 64 << 20
_BLOCK_CACHE_BYTES = 8 << 20
_MAX_INFO_LOGS = 2
# After a pause of this length the log notes that its last record was durable.
_NOTE_AFTER_S = 1.0
_CLOSE_S = 1.0  # what the end of the process waits for a write, with the loop stopped
# The first turn of the log that is not in the database's tables. Keys of `local` begin with other bytes.
_TURN_KEY = b"\xffturn"


class EmbeddedMetadataStore(LocalMetadataStore):
    """MetadataStore in a directory, held by one process. DataDirectoryError if it is held, damaged or not a store."""

    def __init__(self, directory: str) -> None:
        storage = RocksKeyValue(directory)
        try:
            super().__init__(storage)
        except BaseException:
            storage.close()
            raise


class RocksKeyValue:
    """KeyValue on RocksDB and a change log."""

    def __init__(self, directory: str, files: Files | None = None, *, turn_bytes: int = TURN_BYTES) -> None:
        self._files = OsFiles() if files is None else files
        self._directory = directory
        self._log = ChangeLog(self._files, directory, turn_bytes=turn_bytes)
        self._guard = RocksDbGuard(self._files, directory, RESTORE)
        unlogged: Any = rocksdict.WriteOptions()
        unlogged.disable_wal = True
        self._unlogged = unlogged
        # Sequence number that the flush under way makes durable; None: no flush is under way.
        self._flushing: int | None = None
        self._room_is_short = False
        self._logging = threading.Lock()
        self._note: asyncio.TimerHandle | None = None
        self._db: Any = self._open_database()
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def get(self, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._db.get(key)
        except Exception as error:
            raise _unreadable(error) from None
        return value

    def first_key(self, start: bytes, end: bytes) -> bytes | None:
        return next(self.keys(start, end), None)

    def keys(self, start: bytes, end: bytes) -> Iterator[bytes]:
        options = rocksdict.ReadOptions()
        options.set_iterate_upper_bound(end)
        iterator = self._db.iter(options)
        iterator.seek(start)
        while iterator.valid():
            yield iterator.key()
            iterator.next()
        try:
            iterator.status()  # at a damaged block `valid` is false just as at the end
        except Exception as error:
            raise _unreadable(error) from None

    def write_synced(self, changes: Mapping[bytes, bytes | None]) -> None:
        """See KeyValue. DiskFull: nothing was written, and a later write can succeed."""
        self._log_synced(changes)
        self._apply(changes.items())
        self._note_later()

    async def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        """See KeyValue. A thread writes and syncs: that costs 0.1 ms more, and stops the loop for no disk."""
        if self._note is not None:  # nothing else writes to the log meanwhile
            self._note.cancel()
            self._note = None
        await asyncio.get_running_loop().run_in_executor(None, self._log_synced, changes)
        self._apply(changes.items())
        self._note_later()

    def _log_synced(self, changes: Mapping[bytes, bytes | None]) -> None:
        with self._logging:
            if self._flushing is not None:
                self._end_flush()
            if self._log.full and self._flushing is None and self._has_room():
                self._begin_turn()
            self._log.append(msgpack.packb([part for change in changes.items() for part in change]))

    def close(self) -> None:
        """See KeyValue. What was not flushed is replayed at the next start."""
        # A write whose caller was cancelled may hang in the disk.
        if not self._logging.acquire(timeout=_CLOSE_S):
            _log.error(
                "the metadata store %s waits for its disk; it is left as after a kill", self._directory
            )
            return
        if self._note is not None:
            self._note.cancel()
            self._log.note_synced()
        self._log.close()
        self._guard.close()
        try:
            self._db.close()
        except Exception as error:  # what it could not flush is in the log
            _log.warning("the metadata store %s was closed with an error: %s", self._directory, error)
        finally:
            self._logging.release()

    # --- opening -----------------------------------------------------------------------------------------------------

    def _open_database(self) -> Any:
        reserve = os.path.join(self._directory, "reserve")
        for attempt in range(2):
            try:
                return rocksdict.Rdict(self._directory, _options())
            except Exception as error:
                if attempt or "No space left" not in str(error) or not self._files.exists(reserve):
                    raise _cannot_open(self._directory, error) from None
                _log.warning("no space is left for the metadata store: %s is given back to open it", reserve)
                self._files.delete(reserve)
        raise AssertionError

    def _recover(self) -> None:
        """The database as of its last commit: what it flushed, and the log behind that."""
        sequence = self._db.latest_sequence_number()
        turn = self.get(_TURN_KEY)
        if self._guard.open():
            self._guard.check(sequence)
        elif turn is not None:
            raise self._guard.missing()
        if turn is None:
            turn = self._create()
        self._log.open()
        for change in self._log.replay(int.from_bytes(turn, "big")):
            parts = msgpack.unpackb(change)
            self._apply(zip(parts[::2], parts[1::2], strict=True))
        self._make_reserve()

    def _create(self) -> bytes:
        """A new store, or one whose making was interrupted: then nothing was ever written to it. Returns its turn."""
        if self.first_key(b"", _TURN_KEY) is not None:
            raise DataDirectoryError(
                f"{self._directory} is a database, but not a metadata store; point the setting data at the right directory"
            )
        self._log.create()
        if not self._guard.open():
            self._guard.create(0)
        turn = (0).to_bytes(8, "big")
        self._apply([(_TURN_KEY, turn)])
        self._flush(wait=True)
        self._guard.advance(self._db.latest_sequence_number())
        return turn

    def _make_reserve(self) -> None:
        """A file that can be given back; made again when there is room for it."""
        path = os.path.join(self._directory, "reserve")
        if self._files.exists(path) or not self._has_room():
            return
        with (
            contextlib.suppress(MagnetarError),
            contextlib.closing(self._files.open(path, create=True)) as file,
        ):
            file.zero_fill(0, RESERVE_BYTES)
            file.sync()

    # --- turns -------------------------------------------------------------------------------------------------------

    def _begin_turn(self) -> None:
        """The log goes on in its other file, and RocksDB flushes in the background what came before."""
        self._log.begin_turn()
        self._apply([(_TURN_KEY, self._log.turn.to_bytes(8, "big"))])
        self._flushing = self._db.latest_sequence_number()
        try:
            self._flush(wait=False)
        except DiskFull as error:  # what was committed is durable in the log all the same
            _log.warning("%s", error)

    def _end_flush(self) -> None:
        """Advances the guard if RocksDB has flushed. A failed flush never ends: then the log grows, until the next start."""
        assert self._flushing is not None
        if not self._db.property_int_value("rocksdb.num-immutable-mem-table"):
            self._guard.advance(self._flushing)
            self._flushing = None

    def _has_room(self) -> bool:
        free, _ = self._files.free_bytes(self._directory)
        if free < MINIMUM_FREE_BYTES and not self._room_is_short:
            _log.warning(
                "%d bytes are free for the metadata store, fewer than %d: its log grows until there is room",
                free,
                MINIMUM_FREE_BYTES,
            )
        self._room_is_short = free < MINIMUM_FREE_BYTES
        return not self._room_is_short

    def _note_later(self) -> None:
        if self._note is not None:
            self._note.cancel()
        with contextlib.suppress(RuntimeError):  # no loop yet while the store is being opened
            self._note = asyncio.get_running_loop().call_later(_NOTE_AFTER_S, self._log.note_synced)

    # --- the database ------------------------------------------------------------------------------------------------

    def _apply(self, changes: Any) -> None:
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, value in changes:
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
        try:
            self._db.write(batch, self._unlogged)
        except Exception as error:
            raise StorageFailed(
                f"the metadata store cannot write: {error}; repair the disk, then start again"
            ) from None

    def _flush(self, *, wait: bool) -> None:
        try:
            self._db.flush(wait)
        except Exception as error:
            if "No space left" in str(error):
                raise DiskFull(f"no space is left for the metadata store: {error}; free some space") from None
            raise StorageFailed(
                f"the metadata store cannot write: {error}; repair the disk, then start again"
            ) from None


def _unreadable(error: Exception) -> StorageFailed:
    return StorageFailed(f"the metadata store cannot be read: {error}; if its files are damaged, {RESTORE}")


def _options() -> rocksdict.Options:
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_paranoid_checks(True)
    options.set_write_buffer_size(_MEMTABLE_BYTES)
    options.set_keep_log_file_num(_MAX_INFO_LOGS)
    # The index and filter blocks stay out of the cache: inside a small one they make gets 40 times slower.
    tables = rocksdict.BlockBasedOptions()
    tables.set_block_cache(rocksdict.Cache(_BLOCK_CACHE_BYTES))
    options.set_block_based_table_factory(tables)
    return options


def _cannot_open(directory: str, error: Exception) -> DataDirectoryError:
    text = str(error)
    if "/LOCK:" in text:
        return DataDirectoryError(
            f"the metadata store {directory} is held by another process; "
            "stop that one, or give this one a directory of its own (setting data)"
        )
    return DataDirectoryError(
        f"the metadata store {directory} cannot be opened: {text}; "
        f"check the directory's owner and disk, or {RESTORE}"
    )
