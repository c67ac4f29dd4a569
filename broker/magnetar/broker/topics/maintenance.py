"""The regular round of a topic: an old ledger is closed, what nobody needs is trimmed, staged ledgers are swept."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ..cursors.core.acks import Position
from ..export.staging import Staging
from ..log.managed_ledger import ManagedLedger
from .retention import Retention

_log = logging.getLogger(__name__)


class Maintenance:
    """Of one topic. One trimming and one sweep at a time; `stop` in the end."""

    def __init__(
        self,
        ledger: ManagedLedger[Any],
        retention: Retention,
    ) -> None:
        self._ledger = ledger
        self._retention = retention
        self._trimming: asyncio.Task[int] | None = None
        self._sweeping: asyncio.Task[int] | None = None

    def round(self, staging: Staging | None) -> None:
        """Begins a round; what is still under way from the last one is left to it. `staging` None: nothing is staged."""
        self._ledger.roll_if_due()
        loop = asyncio.get_running_loop()
        if self._trimming is None and self._ledger.trimmable(self._limit):
            self._trimming = loop.create_task(self._ledger.trim(self._limit))
            self._trimming.add_done_callback(self._trimmed)
        if self._sweeping is None and staging is not None and len(staging):
            self._sweeping = loop.create_task(staging.sweep())
            self._sweeping.add_done_callback(self._swept)

    def _limit(self) -> Position:
        return self._retention.trimmed_until().position

    def _trimmed(self, task: asyncio.Task[int]) -> None:
        self._trimming = None
        self._look(task)

    def _swept(self, task: asyncio.Task[int]) -> None:
        self._sweeping = None
        self._look(task)

    def _look(self, task: asyncio.Task[int]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a round of topic %s failed", self._ledger.name, exc_info=error)

    async def trimmed(self) -> None:
        """A trimming that began before is over: it may not have heeded what came since."""
        if self._trimming is not None:
            await asyncio.wait([self._trimming])

    async def stop(self) -> None:
        """Waits for what is under way."""
        tasks = [task for task in (self._trimming, self._sweeping) if task is not None]
        if tasks:
            await asyncio.wait(tasks)
