"""The regular rounds of a topic: an old ledger is closed, what nobody needs is trimmed, staged ledgers are swept, and a
compaction that is due begins; old messages expire.
"""

from __future__ import annotations

from typing import Any

from magnetar.runtime.tasks import Jobs

from ..compaction.topic_compaction import TopicCompaction
from ..cursors.core.acks import Position
from ..export.staging import Staging
from ..log.managed_ledger import ManagedLedger
from .expiry import Expiry
from .retention import Retention


class Maintenance:
    """Of one topic; `stop` in the end."""

    def __init__(
        self, ledger: ManagedLedger[Any], retention: Retention, expiry: Expiry, compaction: TopicCompaction
    ) -> None:
        self._ledger = ledger
        self._retention = retention
        self._expiry = expiry
        self._compaction = compaction
        self._jobs = Jobs(f"topic {ledger.name}")

    def round(self, staging: Staging | None) -> None:
        """Begins a round; what is still under way from the last one is left to it. `staging` None: nothing is staged."""
        self._ledger.appending.roll_if_due()
        changes = self._ledger.changes
        if changes.trimmable(self._limit):
            self._jobs.begin("trimming", lambda: changes.trim(self._limit))
        self._compaction.round()
        if staging is not None and len(staging):
            self._jobs.begin("sweeping staged ledgers", staging.sweep)

    def expire(self) -> None:
        """Begins a round of expiry, if there is anything with a TTL, and none is under way."""
        if self._expiry.by_ttl():
            self._jobs.begin("expiry", self._expiry.run)

    @property
    def waits_for_time(self) -> bool:
        """True if messages will have to be deleted, or expire, some time later: the topic has to stay loaded for that."""
        return self._retention.waits_for_time or self._expiry.waits_for_time

    async def expired(self) -> None:
        """The round of expiry that was begun is over."""
        await self._jobs.wait("expiry")

    def _limit(self) -> Position:
        return self._retention.trimmed_until().position

    async def trimmed(self) -> None:
        """A trimming that was under way is over; those that follow heed every cursor and lease that is there now."""
        await self._jobs.wait("trimming")

    async def stop(self) -> None:
        """Waits for what is under way."""
        await self._jobs.wait()
