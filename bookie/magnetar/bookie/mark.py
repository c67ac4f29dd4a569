"""The checkpoint mark: for each journal directory, the position before which everything is in entry logs and indexes.

    a sealed file (`sealed_file`): {directory's name (DataLayout.name_of): [sequence, offset, base]}

The mark is replaced atomically. It never moves backwards in any of its components (rule 3); rows come and go at a start
only, which has replayed and flushed what the old ones needed. No rows: the first start has not come to its end, no journal
was ever begun.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .sealed_file import open_sealed, seal

_VERSION = 1
_MAGIC = b"MAGMARK\n"


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
    return seal(_MAGIC, _VERSION, dict(sorted(mark.items())))


def decode_mark(data: bytes, path: str) -> dict[str, JournalPosition]:
    """Raises DataDirectoryError."""
    return open_sealed(
        data,
        _MAGIC,
        _VERSION,
        _from_fields,
        name="the checkpoint mark",
        path=path,
        cure="restore it from a backup of this directory (without it the bookie cannot tell which journals it still needs)",
    )


def _from_fields(fields: dict[str, Any]) -> dict[str, JournalPosition]:
    return {str(name): JournalPosition(*map(int, row)) for name, row in fields.items()}


def mark_moves_forward(old: Mark, new: Mark, *, directories_change: bool = False) -> bool:
    """True if no component falls: a checkpoint needs coverage of every journal, not lexicographic order.

    `directories_change`: a start, which has replayed all of `old`, may leave directories and take new ones.
    """
    if not directories_change and old.keys() != new.keys():
        return False
    return all(position >= old[name] for name, position in new.items() if name in old)
