"""The regular round of a topic: an old ledger is closed, what nobody needs is trimmed, staged ledgers are swept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from ..cursors.core.acks import Position
from ..export.staging import Staging
from ..log.managed_ledger import ManagedLedger
from .retention import Retention

_log = logging.getLogger(__name__)


class Maintenance:
    """Of one topic. One trimming and one sweep at a time; `stop` in the end."""

    def __init__(self, ledger: ManagedLedger[Any], retention: Retention) -> None:
        self._ledger = ledger
        self._retention = retention
        self._tasks: dict[str, asyncio.Task[int]] = {}  # by what is under way

    def round(self, staging: Staging | None) -> None:
        """Begins a round; what is still under way from the last one is left to it. `staging` None: nothing is staged."""
        self._ledger.roll_if_due()
        if "trim" not in self._tasks and self._ledger.trimmable(self._limit):
            self._begin("trim", self._ledger.trim(self._limit))
        if "sweep" not in self._tasks and staging is not None and len(staging):
            self._begin("sweep", staging.sweep())

    def _limit(self) -> Position:
        return self._retention.trimmed_until().position

    def _begin(self, name: str, work: Coroutine[Any, Any, int]) -> None:
        def done(task: asyncio.Task[int]) -> None:
            del self._tasks[name]
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("a round of topic %s failed", self._ledger.name, exc_info=error)

        self._tasks[name] = asyncio.get_running_loop().create_task(work)
        self._tasks[name].add_done_callback(done)

    async def trimmed(self) -> None:
        """A trimming that began before is over: it may not have heeded what came since."""
        if (task := self._tasks.get("trim")) is not None:
            await asyncio.wait([task])

    async def stop(self) -> None:
        """Waits for what is under way."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))
