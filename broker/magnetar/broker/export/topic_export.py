"""What a topic offers to those who read and write its ledgers at the bookies."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from magnetar.proto.errors import InvalidArgument, MagnetarError
from magnetar.proto.ids import TopicName

from ..log.managed_ledger import ManagedLedger
from ..topics.components import Components
from .archived import Archiving, Needed
from .attach import Attachments
from .damage import DamageReported, DamageRow, report_damage
from .leases import Leases
from .ledgers import LedgerPage, topic_ledgers
from .staging import Staging


class LeaseGranted(msgspec.Struct, frozen=True):
    """The answer to KeepLedgers."""

    lease: str
    ttl_ms: int
    first: int | None  # ledger that is kept, by position id


class TopicExport:
    """What one topic offers."""

    def __init__(
        self,
        name: TopicName,
        ledger: ManagedLedger[Any],
        leases: Leases,
        needed: Needed,
        components: Components,
    ) -> None:
        """`needed` says who needs the topic's ledgers (`archived.Needed`)."""
        self._name = name
        self._ledger = ledger
        self._components = components
        self.leases = leases
        self.staging = Staging(name, ledger, components, asyncio.get_running_loop().time)
        self.attachments = Attachments(ledger, self.staging, components)
        self.archiving = Archiving(ledger, needed)

    async def load(self) -> None:
        """Finds the staged ledgers, and what became of the small batches, of a former owner."""
        await self.staging.load()
        await self.attachments.load()

    async def ledgers(self, after: int, count: int) -> LedgerPage:
        """A page of its ledgers with a position id above `after`."""
        components = self._components
        return await topic_ledgers(
            self._ledger.list, components.metadata, components.bookies, after=after, count=count
        )

    async def keep_ledgers(self, lease: str, ttl_ms: int, first: int) -> LeaseGranted:
        """Makes, renews or (`ttl_ms` 0) ends a lease.

        A trimming or archiving that is under way, and may not heed a new lease, is waited for. A renewal does not wait.
        """
        if first < -1:
            raise InvalidArgument(f"there is no ledger {first}; -1 means all of the topic")
        granted = 0
        if ttl_ms == 0:
            self.leases.release(lease)
        else:
            held = self.leases.holds(lease, first)
            granted, first = self.leases.keep(lease, ttl_ms, first)
            if not held:
                await self._ledger.changes.trimming_decided()
                await self.archiving.decided()
        found = self._ledger.list.after(max(first, 0) - 1, 1)
        return LeaseGranted(lease, granted, found[0].ledger_id if found else None)

    async def report_damage(self, rows: list[DamageRow]) -> DamageReported:
        """Queues copies of its ledgers for repair."""
        return await report_damage(self._name, self._ledger.list, self._components.metadata, rows)

    async def stop(self, error: MagnetarError) -> None:
        """The topic goes away."""
        await self.staging.stop(error)
