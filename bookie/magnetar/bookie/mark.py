"""The checkpoint mark: for each journal directory, the position before which everything is in entry logs and indexes.

    b"MAGMARK\\n" | u32 version 2 | u32 count | count x row | u64 xxh3-64 of all before it
    row: u16 length | directory's name (DataLayout.name_of), UTF-8 | u64 sequence | u64 offset | u64 base

Version 1 had rows without a name, for the one directory "journal". The mark is replaced atomically. It never moves
backwards in any of its components (rule 3); rows come and go at a start only, which has replayed and flushed what the old
ones needed. No rows: the first start has not come to its end, no journal was ever begun.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

import xxhash

from magnetar.proto.errors import DataDirectoryError

__all__ = ["JournalPosition", "Mark", "decode_mark", "encode_mark", "mark_moves_forward"]

MARK_VERSION = 2
_HEAD = struct.Struct(">8sII")
_POSITION = struct.Struct(">QQQ")
_NAME_LENGTH = struct.Struct(">H")
_CHECKSUM = struct.Struct(">Q")
_MAGIC = b"MAGMARK\n"
# The directory and the first sequence of version 1, whose mark was written before the first journal was prepared.
_FIRST_DIRECTORY = "journal"
_FIRST_SEQUENCE = 1


class JournalPosition(NamedTuple):
    """A place in one journal directory. Compares as the journal is ordered."""

    sequence: int
    offset: int
    # Offset of the first record of the file; `offset == base` is the one place where the file may not be begun yet.
    base: int


# Positions by the directory's name. Never changed in place.
Mark = Mapping[str, JournalPosition]


def encode_mark(mark: Mark) -> bytes:
    """The file's bytes."""
    parts = [_HEAD.pack(_MAGIC, MARK_VERSION, len(mark))]
    for name, position in sorted(mark.items()):
        encoded = name.encode()
        parts += (_NAME_LENGTH.pack(len(encoded)), encoded, _POSITION.pack(*position))
    data = b"".join(parts)
    return data + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))


def decode_mark(data: bytes, path: str) -> dict[str, JournalPosition]:
    """Raises DataDirectoryError."""
    body, checksum = data[:-8], data[-8:]
    if len(body) < _HEAD.size or _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)) != checksum:
        raise DataDirectoryError(
            f"the checkpoint mark {path} is damaged; restore it from a backup of this directory "
            "(without it the bookie cannot tell which journals it still needs)",
            path=path,
        )
    magic, version, count = _HEAD.unpack_from(body)
    try:
        if magic == _MAGIC and version == MARK_VERSION:
            return _decode_rows(body, count)
        if magic == _MAGIC and version == 1 and count == 1:
            position = JournalPosition(*_POSITION.unpack(body[_HEAD.size :]))
            return {} if position.sequence == _FIRST_SEQUENCE else {_FIRST_DIRECTORY: position}
    except (struct.error, UnicodeDecodeError):
        pass  # a good checksum over rows that are none: as strange as another version
    raise DataDirectoryError(
        f"the checkpoint mark {path} has version {version}, this program reads 1 to {MARK_VERSION}; "
        "run the version of magnetar that wrote it",
        path=path,
    )


def _decode_rows(body: bytes, count: int) -> dict[str, JournalPosition]:
    mark: dict[str, JournalPosition] = {}
    at = _HEAD.size
    for _ in range(count):
        start = at + _NAME_LENGTH.size
        end = start + _NAME_LENGTH.unpack_from(body, at)[0]
        mark[body[start:end].decode()] = JournalPosition(*_POSITION.unpack_from(body, end))
        at = end + _POSITION.size
    if at != len(body) or len(mark) != count:
        raise struct.error("rows do not end where the mark does")
    return mark


def mark_moves_forward(old: Mark, new: Mark, *, directories_change: bool = False) -> bool:
    """True if no component falls: a checkpoint needs coverage of every journal, not lexicographic order.

    `directories_change`: a start, which has replayed all of `old`, may leave directories and take new ones.
    """
    if not directories_change and old.keys() != new.keys():
        return False
    return all(position >= old[name] for name, position in new.items() if name in old)
