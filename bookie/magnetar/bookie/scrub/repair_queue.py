"""Writes damaged entries into the repair queue in the metadata store (`metadata.damage`), to be repaired from replicas.

A node is written or widened when damage is found, and deleted when nothing of the ledger is damaged any more. Whoever
repairs (the auditor, or this bookie) reads the other replicas and adds the entries again; then the damage goes away here
by itself. What is not yet written waits in memory, one row for each ledger; a restart finds the damage again.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from magnetar.metadata.damage import Ranges, add_ranges, damaged_path, merge_ranges
from magnetar.metadata.store import MetadataStore
from magnetar.proto.errors import DataDirectoryError, NotFoundInStore, VersionConflict
from magnetar.runtime.tasks import LongTask, on_change

_log = logging.getLogger(__name__)
_MAX_PENDING = 50_000
_RETRY_S, _RETRY_MAX_S = 1.0, 5.0


class MetadataRepairQueue:
    """See the module. `start` it once in the loop, `close` it before the store; damage may be reported before `start`."""

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata
        self._bookie_id = ""
        # By ledger: ranges to add, or None: the node is to go.
        self._pending: dict[int, Ranges | None] = {}
        self._wake = asyncio.Event()
        self._task: LongTask | None = None
        self.not_queued = 0

    def start(self, bookie_id: str) -> None:
        """Begins to write, once the bookie has read its cookie."""
        self._bookie_id = bookie_id
        write = partial(on_change, self._wake, self._write_all)
        self._task = LongTask("the repair queue", write, retry_s=_RETRY_S, retry_max_s=_RETRY_MAX_S)

    def damaged(self, ledger_id: int, first: int, last: int, reason: str) -> None:
        if ledger_id not in self._pending and len(self._pending) >= _MAX_PENDING:
            self.not_queued += 1
            return
        ranges = self._pending.get(ledger_id) or []
        self._pending[ledger_id] = merge_ranges([*ranges, (first, last, reason)])
        self._wake.set()

    def resolved(self, ledger_id: int) -> None:
        if ledger_id in self._pending or len(self._pending) < _MAX_PENDING:
            self._pending[ledger_id] = None
            self._wake.set()

    @property
    def pending(self) -> int:
        """Ledgers whose node is not written yet."""
        return len(self._pending)

    async def _write_all(self) -> None:
        while self._pending:
            ledger_id = next(iter(self._pending))
            ranges = self._pending.pop(ledger_id)
            try:
                await self._write(ledger_id, ranges)
            except DataDirectoryError as error:  # costs this ledger; a scrub finds its damage again
                self.not_queued += 1
                _log.error("damage of ledger %d is not queued for repair: %s", ledger_id, error)
            except BaseException:
                self._put_back(ledger_id, ranges)
                raise

    def _put_back(self, ledger_id: int, ranges: Ranges | None) -> None:
        newer = self._pending.get(ledger_id, ())
        if newer == ():
            self._pending[ledger_id] = ranges
        elif newer is not None and ranges is not None:
            self._pending[ledger_id] = merge_ranges([*ranges, *newer])

    async def _write(self, ledger_id: int, ranges: Ranges | None) -> None:
        if ranges is not None:
            await add_ranges(self._metadata, self._bookie_id, ledger_id, ranges)
            return
        path = damaged_path(self._bookie_id, ledger_id)
        while (node := await self._metadata.get(path)) is not None:
            try:
                await self._metadata.delete(path, version=node.version)
            except (VersionConflict, NotFoundInStore):
                continue  # it is being repaired at this moment
            return

    async def close(self) -> None:
        """Ends it; what is not written yet is found again. May be called twice."""
        if self._task is not None:
            await self._task.close()
            self._task = None
