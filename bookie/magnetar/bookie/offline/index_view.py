"""A read-only view of the index of a stopped bookie: nothing below its directory changes, not even a time stamp.

RocksDB opens read-only, but rocksdict writes its own configuration file even then. So the database is opened in a directory
of symbolic links, a temporary one, which is deleted afterwards; that works on a read-only file system as well.

rocksdict's iterators end silently at a damaged block, so each iteration checks the status of its iterator afterwards.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from magnetar.proto.errors import DataDirectoryError, StorageFailed
from magnetar.runtime.files import Files
from magnetar.runtime.rocksdb_guard import RocksDbGuard

from ..index import LedgerRecord, Location, decode_ledger_record
from ..index.locations import REBUILD, decode_location
from ..index.rocks import GUARDED, INCOMPLETE, INSTANCE, LEDGER_KEY, LOCATION_KEY

__all__ = ["IndexView", "remove_empty_directory"]

# Not linked: rocksdict writes the first; the second is not needed while the bookie's lock is held.
_OWN_FILES = ("rocksdict-config.json", "LOCK")


class IndexView:
    """Read-only. DataDirectoryError when it is missing or cannot be opened, StorageFailed when a part of it is damaged."""

    def __init__(self, path: str) -> None:
        import rocksdict

        self.path = path
        if not os.path.exists(os.path.join(path, "CURRENT")):
            raise DataDirectoryError(
                f"the index {path} is missing; `magnetar bookie index rebuild` makes it anew from the entry logs",
                path=path,
            )
        self._links = tempfile.mkdtemp(prefix="magnetar-index-")
        self._db: Any = None
        try:
            for name in os.listdir(path):
                if name not in _OWN_FILES:
                    os.symlink(os.path.abspath(os.path.join(path, name)), os.path.join(self._links, name))
            options = rocksdict.Options(raw_mode=True)
            families = {
                name: rocksdict.Options(raw_mode=True)
                for name in rocksdict.Rdict.list_cf(self._links, options)
                if name != "default"
            }
            self._db = rocksdict.Rdict(
                self._links,
                options,
                column_families=families,
                access_type=rocksdict.AccessType.read_only(),
            )
            self._locations: Any = self._db.get_column_family("locations")
            self._ledgers: Any = self._db.get_column_family("ledgers")
        except Exception as error:
            self.close()
            raise DataDirectoryError(
                f"the index {path} cannot be opened: {self._plain(error)}; `magnetar bookie index rebuild` makes it anew "
                "from the entry logs",
                path=path,
            ) from error

    def check_guard(self, files: Files) -> None:
        """DataDirectoryError when the index has lost its newest changes (see RocksDbGuard)."""
        guard = RocksDbGuard(files, self.path, REBUILD)
        try:
            if guard.open(read_only=True):
                guard.check(self.sequence())
            elif self._checked(self._db.get, GUARDED) is not None:
                raise guard.missing()
        finally:
            guard.close()

    def instance(self) -> int | None:
        """The instance of the cookie to which the index belongs; None if it has none."""
        value: bytes | None = self._checked(self._db.get, INSTANCE)
        return None if value is None else int.from_bytes(value, "big")

    def incomplete_below(self) -> int:
        """See `LocationIndex`."""
        value = self._checked(self._db.get, INCOMPLETE)
        return 0 if value is None else int.from_bytes(value, "big")

    def sequence(self) -> int:
        """RocksDB's number of its last change that can be read: see `index.guard`."""
        return int(self._checked(self._db.latest_sequence_number))

    def get(self, ledger_id: int, entry_id: int) -> Location | None:
        """Where the entry is. About 4 us."""
        value = self._checked(self._locations.get, LOCATION_KEY.pack(ledger_id, entry_id))
        return None if value is None else decode_location(value)

    def get_ledger(self, ledger_id: int) -> LedgerRecord | None:
        """What is known of the ledger besides its entries."""
        value = self._checked(self._ledgers.get, LEDGER_KEY.pack(ledger_id))
        return None if value is None else decode_ledger_record(value)

    def ledgers(self) -> Iterator[tuple[int, LedgerRecord]]:
        """Every ledger record, ascending."""
        for key, value in self._items(self._ledgers, b""):
            if len(key) != LEDGER_KEY.size:
                raise StorageFailed(
                    f"a key of the ledger index {self.path} has a wrong length: it is damaged"
                )
            yield LEDGER_KEY.unpack(key)[0], decode_ledger_record(value)

    def locations(self, ledger_id: int | None = None, first: int = 0) -> Iterator[tuple[int, int, Location]]:
        """(ledger, entry, location), ascending; of one ledger from entry `first` on, or of all. About 0.5 us each."""
        start = b"" if ledger_id is None else LOCATION_KEY.pack(ledger_id, first)
        for key, value in self._items(self._locations, start):
            if len(key) != LOCATION_KEY.size:
                raise StorageFailed(
                    f"a key of the location index {self.path} has a wrong length: it is damaged"
                )
            found, entry_id = LOCATION_KEY.unpack(key)
            if ledger_id is not None and found != ledger_id:
                return
            yield found, entry_id, decode_location(value)

    def estimated_locations(self) -> int:
        """An estimate of the number of locations, without reading them."""
        with contextlib.suppress(Exception):
            return int(self._locations.property_int_value("rocksdb.estimate-num-keys") or 0)
        return 0

    def close(self) -> None:
        """Closes the database and deletes the links. May be called twice."""
        if self._db is not None:
            self._locations = self._ledgers = None
            self._db.close()
            self._db = None
        shutil.rmtree(self._links, ignore_errors=True)

    def __enter__(self) -> IndexView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _items(self, family: Any, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        items = family.iter()
        try:
            if start:
                items.seek(start)
            else:
                items.seek_to_first()
            while items.valid():
                yield items.key(), items.value()
                items.next()
            self._checked(items.status)
        finally:
            del items  # the database stays open as long as an iterator lives

    def _checked(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            raise StorageFailed(
                f"the index {self.path} is damaged: {self._plain(error)}; `magnetar bookie index rebuild` makes it anew "
                "from the entry logs",
                path=self.path,
            ) from error

    def _plain(self, error: Exception) -> str:
        """RocksDB's message, with the path of the index in place of the links' path."""
        return str(error).strip().replace(self._links, self.path)


def remove_empty_directory(path: str) -> None:
    """Removes a directory that a dry run made beside the index. Does nothing if it is missing or not empty."""
    with contextlib.suppress(OSError):
        os.rmdir(path)
