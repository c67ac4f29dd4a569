"""The files of a compaction in a ledger directory, from which a start can finish it (FORMATS.md, "Compaction").

    entrylog-<new id>.compacting    the copy while it is written; a start deletes it
    entrylog-<new id>.replaces      which logs the copy replaces: made durable before the copy gets its final name
    entrylog-<new id>.log           the copy, complete and synced

So a copy with its final name and a `.replaces` beside it replaces those logs: locations in the index that still name one of
them are changed to the copy, the logs are deleted, and `.replaces` is deleted last. A `.replaces` without the copy is
ignored. A damaged one is deleted: then the copy is a log like any other, and no log is deleted because of it.

    b"MAGCMPCT" | u32 version | u32 log id of the copy | u32 count | count x u32 log id | u64 xxh3-64 of all before it
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence

import xxhash

__all__ = [
    "compacting_path",
    "decode_replaces",
    "encode_replaces",
    "replaces_log_id",
    "replaces_path",
    "unfinished_log_id",
]

_MAGIC = b"MAGCMPCT"
_VERSION = 1
_HEAD = struct.Struct(">8sIII")
_LOG_ID = struct.Struct(">I")
_CHECKSUM = struct.Struct(">Q")
_COMPACTING = re.compile(r"entrylog-([0-9a-f]{8})\.compacting")
_REPLACES = re.compile(r"entrylog-([0-9a-f]{8})\.replaces")


def compacting_path(directory: str, log_id: int) -> str:
    """The copy while it is written."""
    return os.path.join(directory, f"entrylog-{log_id:08x}.compacting")


def replaces_path(directory: str, log_id: int) -> str:
    """Which logs the copy `log_id` replaces."""
    return os.path.join(directory, f"entrylog-{log_id:08x}.replaces")


def unfinished_log_id(name: str) -> int | None:
    """Inverse of `compacting_path` for a bare name; None for other files."""
    found = _COMPACTING.fullmatch(name)
    return int(found[1], 16) if found else None


def replaces_log_id(name: str) -> int | None:
    """Inverse of `replaces_path` for a bare name; None for other files."""
    found = _REPLACES.fullmatch(name)
    return int(found[1], 16) if found else None


def encode_replaces(log_id: int, sources: Sequence[int]) -> bytes:
    """The content of a `.replaces`."""
    data = _HEAD.pack(_MAGIC, _VERSION, log_id, len(sources))
    data += b"".join([_LOG_ID.pack(source) for source in sources])
    return data + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))


def decode_replaces(data: bytes, log_id: int) -> list[int] | None:
    """The logs that copy `log_id` replaces; None if the data are damaged."""
    if len(data) < _HEAD.size + _CHECKSUM.size:
        return None
    magic, version, found, count = _HEAD.unpack_from(data)
    body = data[: -_CHECKSUM.size]
    if (magic, version, found) != (_MAGIC, _VERSION, log_id) or len(
        body
    ) != _HEAD.size + count * _LOG_ID.size:
        return None
    if xxhash.xxh3_64_intdigest(body) != _CHECKSUM.unpack(data[-_CHECKSUM.size :])[0]:
        return None
    return [int(source) for (source,) in _LOG_ID.iter_unpack(body[_HEAD.size :])]
