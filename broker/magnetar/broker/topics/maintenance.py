"""The regular round of a topic: an old ledger is closed, what nobody needs is trimmed, staged ledgers are swept, and a
compaction that is due begins.
"""

from __future__ import annotations

from typing import Any

from ..compaction.topic_compaction import TopicCompaction
from ..cursors.core.acks import Position
from ..export.staging import Staging
from ..log.managed_ledger import ManagedLedger
from ..resources.tasks import Jobs
from .retention import Retention


class Maintenance:
    """Of one topic; `stop` in the end."""

    def __init__(self, ledger: ManagedLedger[Any], retention: Retention, compaction: TopicCompaction) -> None:
        self._ledger = ledger
        self._retention = retention
        self._compaction = compaction
        self._jobs = Jobs(f"topic {ledger.name}")

    def round(self, staging: Staging | None) -> None:
        """Begins a round; what is still under way from the last one is left to it. `staging` None: nothing is staged."""
        self._ledger.roll_if_due()
        if self._ledger.trimmable(self._limit):
            self._jobs.begin("trimming", lambda: self._ledger.trim(self._limit))
        self._compaction.round()
        if staging is not None and len(staging):
            self._jobs.begin("sweeping staged ledgers", staging.sweep)

    def _limit(self) -> Position:
        return self._retention.trimmed_until().position

    async def trimmed(self) -> None:
        """A trimming that began before is over: it may not have heeded what came since."""
        await self._jobs.wait("trimming")

    async def stop(self) -> None:
        """Waits for what is under way."""
        await self._jobs.wait()
