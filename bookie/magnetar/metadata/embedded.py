"""The embedded metadata store: the tree of `local` on RocksDB, in a directory of its own.

Traps of rocksdict: everything in raw mode; a batch serves once; an iterator's lower bound overwrites
its upper bound, so only the upper one is set; `close` keeps the lock while an iterator is alive, so iterators are
used up or dropped here; errors are bare `Exception`.

The write-ahead log is recovered with "tolerate corrupted tail": a tail torn by a crash was never acknowledged and is
dropped, damage before it refuses to open. (RocksDB's default stops at the first damage and silently forgets what follows.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import rocksdict

from magnetar.proto.errors import DataDirectoryError, StorageFailed

from .local import LocalMetadataStore

_MEMTABLE_BYTES = 8 * 1024 * 1024
_BLOCK_CACHE_BYTES = 8 * 1024 * 1024
_MAX_INFO_LOGS = 2


def _unreadable(error: Exception) -> StorageFailed:
    return StorageFailed(
        f"the metadata store cannot be read: {error}; if its files are damaged, restore the data directory from a backup"
    )


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
    """KeyValue on RocksDB."""

    def __init__(self, directory: str) -> None:
        try:
            self._db = rocksdict.Rdict(directory, _options())
        except Exception as error:
            raise _cannot_open(directory, error) from None
        self._synced = rocksdict.WriteOptions()
        self._synced.sync = True

    def get(self, key: bytes) -> bytes | None:
        """See KeyValue."""
        try:
            value: bytes | None = self._db.get(key)
        except Exception as error:
            raise _unreadable(error) from None
        return value

    def first_key(self, start: bytes, end: bytes) -> bytes | None:
        """See KeyValue."""
        return next(self.keys(start, end), None)

    def keys(self, start: bytes, end: bytes) -> Iterator[bytes]:
        """See KeyValue."""
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
        """See KeyValue."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, value in changes.items():
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
        try:
            self._db.write(batch, self._synced)
        except Exception as error:
            raise StorageFailed(
                f"the metadata store cannot write: {error}; make room or repair the disk, then start again"
            ) from None

    def close(self) -> None:
        """See KeyValue."""
        self._db.close()


def _options() -> rocksdict.Options:
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.tolerate_corrupted_tail_records())
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
    if "lock" in text.lower():
        return DataDirectoryError(
            f"the metadata store {directory} is held by another process; "
            "stop that one, or give this one a directory of its own (setting data)"
        )
    return DataDirectoryError(
        f"the metadata store {directory} cannot be opened: {text}; "
        "check the directory's owner and disk, or restore it from a backup"
    )
