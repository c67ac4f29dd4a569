"""Metadata in memory: the same tree as the embedded store, on a model of its storage.

>>> disk = ModelKeyValue()
>>> store = MemoryMetadataStore(disk)     # crash: drop it, and open the next one on the same disk
>>> successor = MemoryMetadataStore(disk)
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from magnetar.metadata.local import KeyValue, LocalMetadataStore
from magnetar.proto.errors import ConnectionLost, StorageFailed
from magnetar.runtime.tasks import begin


class MemoryMetadataStore(LocalMetadataStore):
    """Synced writes survive in `disk`; a store that was opened earlier on the same disk is shut out."""

    def __init__(self, disk: ModelKeyValue | None = None, *, grouped: bool = True) -> None:
        """`grouped` False: each commit is written before it returns, which then needs no turn of the loop."""
        super().__init__((ModelKeyValue() if disk is None else disk).open())
        self._grouped = grouped

    def expire(self, session_id: int) -> None:
        """Expires a session: deletes its nodes and notifies its holder."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.lose()
            if self._groups:
                begin(self.purge(session_id), "metadata session")
            else:
                changes, paths = self._ephemerals(session_id)
                self._write(changes)
                self._notify_watches(*paths)

    async def _write_grouped(
        self,
        changes: Mapping[bytes, bytes | None],
        changed_paths: Iterable[str] = (),
        parents: Mapping[str, None] | None = None,
    ) -> None:
        if self._grouped:
            await super()._write_grouped(changes, changed_paths, parents)
        else:
            self._write(changes)
            self._notify_watches(*changed_paths)


class ModelKeyValue:
    """A model of a disk: its synced values outlive the stores that are opened on it."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._sorted: list[bytes] = []  # the keys of _values
        self._holder = 0  # number of the newest handle, the only one that may write; older ones belong to crashed processes
        self._failing: str | None = None

    def open(self) -> KeyValue:
        """Makes a handle. It invalidates the earlier ones, as the lock on a data directory does."""
        self._holder += 1
        return _ModelHandle(self, self._holder)

    def fail_writes(self, reason: str | None) -> None:
        """Makes writes raise StorageFailed with this reason, until it is called with None."""
        self._failing = reason

    def get(self, key: bytes) -> bytes | None:
        """The synced value."""
        return self._values.get(key)

    def first_key(self, start: bytes, end: bytes) -> bytes | None:
        """See KeyValue."""
        at = bisect.bisect_left(self._sorted, start)
        return self._sorted[at] if at < len(self._sorted) and self._sorted[at] < end else None

    def keys(self, start: bytes, end: bytes) -> Iterator[bytes]:
        """See KeyValue."""
        low, high = bisect.bisect_left(self._sorted, start), bisect.bisect_left(self._sorted, end)
        return iter(self._sorted[low:high])

    def write(self, holder: int, changes: Mapping[bytes, bytes | None]) -> None:
        """Applies one batch for handle number `holder`."""
        if holder != self._holder:
            raise StorageFailed("the metadata store was opened by a successor; this process must stop")
        if self._failing is not None:
            raise StorageFailed(f"the metadata store cannot write: {self._failing}")
        for key, value in changes.items():
            at = bisect.bisect_left(self._sorted, key)
            there = at < len(self._sorted) and self._sorted[at] == key
            if value is None:
                if there:
                    del self._sorted[at]
                    del self._values[key]
                continue
            if not there:
                self._sorted.insert(at, key)
            self._values[key] = value


class _ModelHandle:
    def __init__(self, disk: ModelKeyValue, holder: int) -> None:
        self._disk = disk
        self._holder = holder
        self.get = disk.get
        self.first_key = disk.first_key
        self.keys = disk.keys

    def write_synced(self, changes: Mapping[bytes, bytes | None]) -> None:
        self._disk.write(self._holder, changes)

    async def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        self.write_synced(changes)

    def close(self) -> None:
        pass


class CrashingStore(MemoryMetadataStore):
    """Fails before the write number `at`, or after it."""

    def __init__(self, disk: ModelKeyValue) -> None:
        super().__init__(disk)
        self.at = -1
        self.after = False
        self.writes = 0

    async def _write_grouped(self, *args: Any, **kwargs: Any) -> None:
        number, self.writes = self.writes, self.writes + 1
        if number == self.at and not self.after:
            raise ConnectionLost("the process is killed before this write")
        await super()._write_grouped(*args, **kwargs)
        if number == self.at:
            raise ConnectionLost("the process is killed after this write")
