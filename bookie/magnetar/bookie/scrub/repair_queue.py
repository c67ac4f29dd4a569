"""The repair queue in the metadata store: what replicas elsewhere are asked to heal.

    /damaged/<bookie id>/<ledger id, 20 digits>   msgpack map: "format" 1, "ranges": [[first entry, last entry, reason], ...]

A node is written or widened when damage is found, and deleted when nothing of the ledger is damaged any more. Whoever
repairs (the auditor, or this bookie) reads the other replicas and adds the entries again; then the damage goes away here
by itself. What is not yet written waits in memory, one row for each ledger; a restart finds the damage again.
"""

from __future__ import annotations

import asyncio
import logging

import msgpack

from magnetar.metadata.store import MetadataStore
from magnetar.proto.errors import (
    AlreadyExists,
    InvalidArgument,
    MagnetarError,
    NotFoundInStore,
    VersionConflict,
)

__all__ = ["DAMAGED_PATH", "MetadataRepairQueue", "damaged_path"]

_log = logging.getLogger(__name__)
DAMAGED_PATH = "/damaged"
_FORMAT = 1
_MAX_RANGES = 500
_MAX_PENDING = 50_000
_RETRY_S = 5.0

Ranges = list[tuple[int, int, str]]


def damaged_path(bookie_id: str, ledger_id: int) -> str:
    """The node of one ledger of one bookie."""
    return f"{DAMAGED_PATH}/{bookie_id}/{ledger_id:020d}"


class MetadataRepairQueue:
    """See the module. `start` it once in the loop, `close` it before the store; damage may be told from the beginning."""

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata
        self._bookie_id = ""
        # By ledger: ranges to add, or None: the node is to go.
        self._pending: dict[int, Ranges | None] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.not_queued = 0

    def start(self, bookie_id: str) -> None:
        """Begins to write, once the bookie has read its cookie."""
        self._bookie_id = bookie_id
        self._task = asyncio.get_running_loop().create_task(self._write_forever(), name="repair queue")

    def damaged(self, ledger_id: int, first: int, last: int, reason: str) -> None:
        """See RepairQueue."""
        if ledger_id not in self._pending and len(self._pending) >= _MAX_PENDING:
            self.not_queued += 1
            return
        ranges = self._pending.get(ledger_id) or []
        self._pending[ledger_id] = merge_ranges([*ranges, (first, last, reason)])
        self._wake.set()

    def gone(self, ledger_id: int) -> None:
        """See RepairQueue."""
        if ledger_id in self._pending or len(self._pending) < _MAX_PENDING:
            self._pending[ledger_id] = None
            self._wake.set()

    @property
    def pending(self) -> int:
        """Ledgers whose node is not written yet."""
        return len(self._pending)

    async def _write_forever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                ledger_id = next(iter(self._pending))
                ranges = self._pending.pop(ledger_id)
                try:
                    await self._write(ledger_id, ranges)
                except MagnetarError as error:
                    self._put_back(ledger_id, ranges)
                    _log.warning("the repair queue cannot be written: %s", error)
                    await asyncio.sleep(_RETRY_S)

    def _put_back(self, ledger_id: int, ranges: Ranges | None) -> None:
        newer = self._pending.get(ledger_id, ())
        if newer == ():
            self._pending[ledger_id] = ranges
        elif newer is not None and ranges is not None:
            self._pending[ledger_id] = merge_ranges([*ranges, *newer])

    async def _write(self, ledger_id: int, ranges: Ranges | None) -> None:
        path = damaged_path(self._bookie_id, ledger_id)
        while True:
            try:
                node = await self._metadata.get(path)
                if ranges is None:
                    if node is not None:
                        await self._metadata.delete(path, version=node.version)
                elif node is None:
                    await self._metadata.create(path, encode_ranges(ranges))
                else:
                    merged = merge_ranges([*decode_ranges(node.value), *ranges])
                    await self._metadata.put(path, encode_ranges(merged), version=node.version)
            except (VersionConflict, AlreadyExists, NotFoundInStore):
                continue  # somebody repairs it at this moment
            return

    async def close(self) -> None:
        """Ends it; what is not written yet is found again. May be called twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None


def encode_ranges(ranges: Ranges) -> bytes:
    """The value of a node."""
    value: bytes = msgpack.packb({"format": _FORMAT, "ranges": ranges})
    return value


def decode_ranges(value: bytes) -> Ranges:
    """Raises InvalidArgument for a value of a later format, or one that is none."""
    try:
        fields = msgpack.unpackb(value)
        if fields["format"] != _FORMAT:
            raise InvalidArgument(
                f"a node below {DAMAGED_PATH} has format {fields['format']}; upgrade magnetar"
            )
        return [(int(first), int(last), str(reason)) for first, last, reason in fields["ranges"]]
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise InvalidArgument(
            f"a node below {DAMAGED_PATH} cannot be read ({error!r}); delete it: what is damaged is found again"
        ) from error


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
