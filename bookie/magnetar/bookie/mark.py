"""The checkpoint mark: for each journal directory, the position before which everything is in entry logs and indexes.

    b"MAGMARK\\n" | u32 version | u32 count | count x (u64 sequence | u64 offset | u64 base) | u64 xxh3-64 of all before it

A vector of one so far. It is replaced atomically and never moves backwards, in any of its components (rule 3).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

from magnetar.proto.errors import DataDirectoryError

from .journal.journal import JournalPosition

__all__ = ["decode_mark", "encode_mark", "mark_moves_forward"]

MARK_VERSION = 1
_HEAD = struct.Struct(">8sII")
_POSITION = struct.Struct(">QQQ")
_CHECKSUM = struct.Struct(">Q")
_MAGIC = b"MAGMARK\n"


def encode_mark(mark: Sequence[JournalPosition]) -> bytes:
    """The file's bytes."""
    data = _HEAD.pack(_MAGIC, MARK_VERSION, len(mark)) + b"".join(_POSITION.pack(*place) for place in mark)
    return data + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))


def decode_mark(data: bytes, path: str) -> list[JournalPosition]:
    """Raises DataDirectoryError."""
    body, checksum = data[:-8], data[-8:]
    if len(body) < _HEAD.size or _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)) != checksum:
        raise DataDirectoryError(
            f"the checkpoint mark {path} is damaged; restore it from a backup of this directory "
            "(without it the bookie cannot tell which journals it still needs)",
            path=path,
        )
    magic, version, count = _HEAD.unpack_from(body)
    if magic != _MAGIC or version != MARK_VERSION or len(body) != _HEAD.size + count * _POSITION.size:
        raise DataDirectoryError(
            f"the checkpoint mark {path} has version {version}, this program reads {MARK_VERSION}; "
            "run the version of magnetar that wrote it",
            path=path,
        )
    return [JournalPosition(*fields) for fields in _POSITION.iter_unpack(body[_HEAD.size :])]


def mark_moves_forward(old: Sequence[JournalPosition], new: Sequence[JournalPosition]) -> bool:
    """True if no component falls: a checkpoint needs coverage of every journal, not lexicographic order."""
    return len(old) == len(new) and all(was <= now for was, now in zip(old, new, strict=True))
