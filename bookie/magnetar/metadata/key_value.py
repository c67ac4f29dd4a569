"""The storage below a local metadata store: ordered keys, atomic synced batches.

It is implemented by RocksDB (`embedded`); tests have a model of it. The tree of nodes, versions, sessions, sequences and
watches is built on top once, in `local`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol


class KeyValue(Protocol):
    """Ordered bytes to bytes."""

    def get(self, key: bytes) -> bytes | None:
        """The value, or None."""
        ...

    def first_key(self, start: bytes, end: bytes) -> bytes | None:
        """The lowest key with start <= key < end, or None."""
        ...

    def keys(self, start: bytes, end: bytes) -> Iterator[bytes]:
        """Keys with start <= key < end in order. Nothing may be written before the iterator is used up or dropped."""
        ...

    def write_synced(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Puts and (None) deletes, all or nothing, durable when it returns.

        DiskFull: nothing was written, and a later write can succeed. StorageFailed: the outcome is not known.
        """
        ...

    async def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        """The same, one at a time, while the loop goes on: `get` and `keys` show the changes when it returns."""
        ...

    def close(self) -> None:
        """Releases the storage."""
        ...
