"""The repair queue in the metadata store: entries of bookies that must be repaired from other replicas.

    /damaged/<bookie id>/<ledger id, 20 digits>   msgpack map: "format" 1, "ranges": [[first entry, last entry, reason], ...]

Ranges are ascending and disjoint, both ends included. One may span entries that are not the bookie's by the ledger's
striping: a repair looks at the write sets. Two processes write here: a bookie what it finds on its own disks, and the
broker about what an audit found. Both only ever add, by compare-and-set, so neither loses what the other wrote; the bookie
deletes a node when nothing of the ledger is damaged there any more. A node is a request and no proof: a repair reads
the copy again first. One of a ledger that was deleted means nothing.
"""

from __future__ import annotations

from magnetar.proto.errors import AlreadyExists, NotFoundInStore, VersionConflict

from .record import Record
from .store import MetadataStore

DAMAGED_PATH = "/damaged"
_MAX_RANGES = 500
# Another writer was faster each time: a node is written a few times in the life of a damage.
_MAX_CONFLICTS = 100

Ranges = list[tuple[int, int, str]]


class _Damaged(Record):
    ranges: Ranges


def damaged_path(bookie_id: str, ledger_id: int) -> str:
    """The node of one ledger of one bookie."""
    return f"{DAMAGED_PATH}/{bookie_id}/{ledger_id:020d}"


async def add_ranges(metadata: MetadataStore, bookie_id: str, ledger_id: int, ranges: Ranges) -> bool:
    """The node names these ranges, durably, when this returns; False if it had named all of their entries before.

    Raises DataDirectoryError for a node that cannot be read, VersionConflict, and what the store fails with.
    """
    path = damaged_path(bookie_id, ledger_id)
    for _ in range(_MAX_CONFLICTS):
        try:
            node = await metadata.get(path)
            if node is None:
                await metadata.create(path, encode_ranges(merge_ranges(ranges)))
                return True
            known = decode_ranges(node.value, path)
            merged = merge_ranges([*known, *ranges])
            if [row[:2] for row in merged] == [row[:2] for row in known]:
                return False
            await metadata.put(path, encode_ranges(merged), version=node.version)
        except (VersionConflict, AlreadyExists, NotFoundInStore):
            continue  # another process added to it, or repaired it, at the same time
        return True
    raise VersionConflict(f"{path} was changed by others {_MAX_CONFLICTS} times in a row")


def encode_ranges(ranges: Ranges) -> bytes:
    """The value of a node."""
    return _Damaged(ranges).encode()


def decode_ranges(value: bytes, path: str = DAMAGED_PATH) -> Ranges:
    """What the node at `path` says. Raises DataDirectoryError."""
    return _Damaged.decode(value, path, "delete it: what is damaged is found again").ranges


def merge_ranges(ranges: Ranges) -> Ranges:
    """Ascending, without overlaps; too many become one."""
    merged: Ranges = []
    for first, last, reason in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            before = merged[-1]
            merged[-1] = (before[0], max(before[1], last), before[2])
        else:
            merged.append((first, last, reason))
    if len(merged) > _MAX_RANGES:
        return [(merged[0][0], merged[-1][1], "many ranges")]
    return merged
