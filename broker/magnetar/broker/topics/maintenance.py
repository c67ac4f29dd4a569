"""The regular round of a topic: an old ledger is closed, what nobody needs is trimmed, staged ledgers are swept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from ..cursors.core.acks import Position
from ..cursors.recovery import CursorRecovery
from ..dispatch.subscription import Subscription
from ..export.topic_export import TopicExport
from ..log.managed_ledger import ManagedLedger

_log = logging.getLogger(__name__)


class Maintenance:
    """Of one topic. One trimming and one sweep at a time; `stop` in the end."""

    def __init__(
        self,
        ledger: ManagedLedger[Any],
        subscriptions: Mapping[str, Subscription],
        recovery: CursorRecovery,
        export: TopicExport,
    ) -> None:
        """`subscriptions`: the topic's own, which come and go."""
        self._ledger = ledger
        self._subscriptions = subscriptions
        self._recovery = recovery
        self._export = export
        self._trimming: asyncio.Task[int] | None = None
        self._sweeping: asyncio.Task[int] | None = None

    def round(self) -> None:
        """Begins a round; what is still under way from the last one is left to it."""
        self._ledger.roll_if_due()
        loop = asyncio.get_running_loop()
        if self._trimming is None:
            self._trimming = loop.create_task(self._ledger.trim(self._trim_limit))
            self._trimming.add_done_callback(self._trimmed)
        if self._sweeping is None and len(self._export.staging):
            self._sweeping = loop.create_task(self._export.staging.sweep())
            self._sweeping.add_done_callback(self._swept)

    def _trimmed(self, task: asyncio.Task[int]) -> None:
        self._trimming = None
        self._look(task)

    def _swept(self, task: asyncio.Task[int]) -> None:
        self._sweeping = None
        self._look(task)

    def _look(self, task: asyncio.Task[int]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a round of topic %s failed", self._ledger.name, exc_info=error)

    def _trim_limit(self) -> Position | None:
        """Below it nothing is needed (rule 25): the slowest durable cursor, a reader, a lease; None: all is kept.

        A connected reader holds what it has not been sent, too: after a restart a subscription that comes back sooner
        must not take the tail away from a reader that comes back later. What nobody subscribed to is kept: retention
        policies come with another issue.
        """
        subscriptions = self._subscriptions.values()
        marks = [subscription.cursor.durable_mark for subscription in subscriptions if subscription.durable]
        # Where a subscription stands whose cursor could not be read is not known.
        if not marks or self._recovery.unavailable or not self._export.leases.settled:
            return None
        marks += [reader.dispatcher.read_position for reader in subscriptions if not reader.durable]
        leased = self._export.leases.mark()
        return min(marks) if leased is None else min(*marks, leased)

    async def trimmed(self) -> None:
        """A trimming that began before is over: it may not have heeded what came since."""
        if self._trimming is not None:
            await asyncio.wait([self._trimming])

    async def stop(self) -> None:
        """Waits for what is under way."""
        tasks = [task for task in (self._trimming, self._sweeping) if task is not None]
        if tasks:
            await asyncio.wait(tasks)
