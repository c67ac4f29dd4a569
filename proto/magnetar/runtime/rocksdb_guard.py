"""The guard of a RocksDB: a number beside its own files that shows when these have lost changes.

RocksDB verifies every block of its tables, but takes a damaged record at the end of its MANIFEST for a torn one: the newest
tables are then forgotten in silence: entries of an index would be said not to exist (rule 8), ledgers of a metadata store
to be deleted (rule 37). Its sequence number counts
every change and is recorded in the MANIFEST. After each flush the guard keeps the highest number of what was flushed; a
database that opens with a lower one has lost something.

    two slots of 4096 bytes, written in turn: "MAGGUARD" | u32 version | u64 turn | u64 sequence | u64 xxh3-64 of
    all before it | zeros

A torn write spoils one slot; the other one is a flush behind at most. A database that was guarded once says so itself, in a
key of its own, so that a missing guard is noticed as well.

Example: 3,000 puts are flushed and the guard says 3000. A bit flips in the length of the MANIFEST's last record. RocksDB
opens with 2,700, and is refused.
"""

from __future__ import annotations

import os
import struct

import xxhash

from magnetar.proto.errors import DataDirectoryError
from magnetar.runtime.files import File, Files

_NAME = "guard"
_SLOT = struct.Struct(">8sIQQ")
_CHECKSUM = struct.Struct(">Q")
_MAGIC = b"MAGGUARD"
_VERSION = 1
_SLOT_BYTES = 4096
_SLOTS = 2


def _encode_slot(turn: int, sequence: int) -> bytes:
    body = _SLOT.pack(_MAGIC, _VERSION, turn, sequence)
    return (body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))).ljust(_SLOT_BYTES, b"\0")


def _decode_slot(data: bytes) -> tuple[int, int] | None:
    """(turn, sequence), or None: torn, damaged or never written."""
    body = data[: _SLOT.size]
    if data[_SLOT.size : _SLOT.size + 8] != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)):
        return None
    magic, version, turn, sequence = _SLOT.unpack(body)
    return (turn, sequence) if (magic, version) == (_MAGIC, _VERSION) else None


class RocksDbGuard:
    """The guard of one open database. Used by one thread at a time. `repair` is the cure that its errors name."""

    def __init__(self, files: Files, directory: str, repair: str) -> None:
        self.path = os.path.join(directory, _NAME)
        # Everything up to this sequence number was flushed.
        self.sequence = 0
        self._files = files
        self._directory = directory
        self._repair = repair
        self._turn = 0
        self._file: File | None = None

    def open(self, *, read_only: bool = False) -> bool:
        """Reads it; False if there is none. Raises DataDirectoryError when neither slot can be read."""
        if self._file is not None or not self._files.exists(self.path):
            return self._file is not None
        file = self._files.open(self.path, read_only=read_only)
        slots = [_decode_slot(file.read_at(at * _SLOT_BYTES, _SLOT_BYTES)) for at in range(_SLOTS)]
        good = [slot for slot in slots if slot is not None]
        if not good:
            file.close()
            raise DataDirectoryError(f"the guard {self.path} is damaged; {self._repair}", path=self.path)
        self._file = file
        self._turn, self.sequence = max(good)
        return True

    def create(self, sequence: int) -> None:
        """A new one. Durable when it returns."""
        self._files.write_atomically(self.path, _encode_slot(0, sequence) + bytes(_SLOT_BYTES))
        self.open()

    def missing(self) -> DataDirectoryError:
        """The error for a database that says that it is guarded."""
        return DataDirectoryError(f"the guard {self.path} is missing; {self._repair}", path=self.path)

    def check(self, sequence: int) -> None:
        """Raises DataDirectoryError if the database has come less far than it once had."""
        if sequence < self.sequence:
            raise DataDirectoryError(
                f"{self._directory} has lost its newest changes (it is at {sequence} and was at {self.sequence}): its "
                f"MANIFEST is damaged, or an old copy was restored; {self._repair}",
                path=self._directory,
            )

    def advance(self, sequence: int) -> None:
        """Everything up to `sequence` was flushed. Durable when it returns; one write and one sync."""
        if sequence <= self.sequence:
            return
        assert self._file is not None
        self._turn += 1
        self._file.write_at(self._turn % _SLOTS * _SLOT_BYTES, [_encode_slot(self._turn, sequence)])
        self._file.sync()
        self.sequence = sequence

    def close(self) -> None:
        """May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
