"""The files of a compaction in a ledger directory, from which a start can finish it (FORMATS.md, "Compaction").

    entrylog-<new id>.compacting    the copy while it is written; a start deletes it
    entrylog-<new id>.replaces      which logs the copy replaces: made durable before the copy gets its final name
    entrylog-<new id>.log           the copy, complete and synced

So a copy with its final name and a `.replaces` beside it replaces those logs: locations in the index that still name one of
them are changed to the copy, the logs are deleted, and `.replaces` is deleted last. A `.replaces` without the copy is
ignored. A damaged one is deleted: then the copy is a log like any other, and no log is deleted because of it.

`.replaces` is a sealed file (`sealed_file`): [log id of the copy, [log id, ...]].
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ..sealed_file import seal, unseal

_MAGIC = b"MAGCMPCT"
_VERSION = 1
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
    return seal(_MAGIC, _VERSION, [log_id, list(sources)])


def decode_replaces(data: bytes, log_id: int) -> list[int] | None:
    """The logs that copy `log_id` replaces; None if the data are damaged, or another copy's."""
    try:
        found, sources = unseal(data, _MAGIC, _VERSION)
    except (ValueError, TypeError):
        return None
    return [int(source) for source in sources] if found == log_id else None
