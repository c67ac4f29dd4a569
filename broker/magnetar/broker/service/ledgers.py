"""Requests of Spark, and of whoever else reads and writes the ledgers of a topic at the bookies.

A ledger has a position id, which message ids carry, and a stored id, by which the bookies know it. `on_stored_topic` names
the permission that an operation needs.
"""

from __future__ import annotations

from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import TopicName

from ..export.archived import Archived, Wanted
from ..export.attach import Attached, Row
from ..export.damage import DamageReported, DamageRow
from ..export.ledgers import LedgerPage
from ..export.queries import Batch
from ..export.staging import StagedKept, StagedLedger
from ..export.topic_export import LeaseGranted
from ..topics.registry import Broker
from .operations import on_stored_topic


class LedgerService:
    """`BrokerService.ledgers`."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @on_stored_topic("topic_ledgers")
    async def topic_ledgers(self, name: TopicName, *, after: int = -1, count: int = 1000) -> LedgerPage:
        """Ledgers with a position id above `after`. Raises TopicNotFound."""
        topic = await self._broker.known(name)
        return await topic.export.ledgers(after, count)

    @on_stored_topic("keep_ledgers")
    async def keep_ledgers(
        self, name: TopicName, *, lease: str = "", ttl_ms: int = 0, first: int = -1
    ) -> LeaseGranted:
        """Makes, renews or (`ttl_ms` 0) ends a lease on the ledgers from `first` on. Raises TopicNotFound."""
        topic = await self._broker.known(name)
        if ttl_ms == 0 and not lease:
            raise InvalidArgument("a lease needs a ttl_ms, or a name to be ended by")
        lease = lease or self._broker.generate_name()
        return await topic.export.keep_ledgers(lease, ttl_ms, first)

    @on_stored_topic("stage_ledgers")
    async def create_staged_ledger(self, name: TopicName, transaction: str, ttl_ms: int = 0) -> StagedLedger:
        """A new ledger of a transaction, kept for `ttl_ms` as by `keep_staged`; the topic is made if settings allow it."""
        topic = await self._broker.find(name)
        return await topic.export.staging.create(transaction, ttl_ms)

    @on_stored_topic("topic_ledgers")
    async def get_ledger_metadata(self, name: TopicName, ledger: int) -> StagedLedger:
        """The metadata of a staged ledger, or of one of the topic, by stored id. Raises TopicNotFound, LedgerNotFound."""
        topic = await self._broker.known(name)
        return await topic.export.staging.get(ledger)

    @on_stored_topic("stage_ledgers")
    async def put_ledger_metadata(self, name: TopicName, ledger: int, version: int, metadata: bytes) -> int:
        """Compare-and-set by the ledger's writer; the new version. Raises VersionConflict, LedgerClosed."""
        topic = await self._broker.known(name)
        return await topic.export.staging.put(ledger, version, metadata)

    @on_stored_topic("stage_ledgers")
    async def keep_staged(self, name: TopicName, transaction: str, *, ttl_ms: int = 0) -> StagedKept:
        """Renews a transaction, for at most max_staged_ttl_ms (`ttl_ms` 0: for staged_ttl_ms)."""
        topic = await self._broker.known(name)
        return topic.export.staging.keep(transaction, ttl_ms)

    @on_stored_topic("stage_ledgers")
    async def discard_staged(self, name: TopicName, transaction: str, stored_ids: list[int] | None) -> int:
        """Deletes staged ledgers of a transaction (None: all); how many."""
        topic = await self._broker.known(name)
        return await topic.export.staging.discard(transaction, stored_ids)

    @on_stored_topic("attach_ledgers")
    async def attach_ledgers(self, name: TopicName, batch: Batch, rows: list[Row]) -> Attached:
        """Attaches staged ledgers; the same batch again changes nothing. The topic is made if settings allow it."""
        topic = await self._broker.find(name)
        return await topic.export.attachments.attach(batch, rows)

    @on_stored_topic("attach_ledgers")
    async def last_batch(self, name: TopicName, query: str) -> int:
        """The last batch of the query that was attached, -1 if none was."""
        if self._broker.settings.auto_create_topics and not await self._broker.exists(name):
            return -1  # whoever attaches makes it
        topic = await self._broker.known(name)
        return topic.export.attachments.last_batch(query)

    @on_stored_topic("report_damage")
    async def report_damage(self, name: TopicName, rows: list[DamageRow]) -> DamageReported:
        """Queues ledgers for repair whose entries a reader could not read."""
        topic = await self._broker.known(name)
        return await topic.export.report_damage(rows)

    @on_stored_topic("archive_ledgers")
    async def archive_ledgers(self, name: TopicName, wanted: Wanted) -> Archived:
        """Records where ledgers are archived, and deletes them from the bookies."""
        topic = await self._broker.known(name)
        return await topic.export.archiving.archive(wanted)
