"""What operators ask through HTTP and the native protocol has no request for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import NamedTuple

import msgspec

from magnetar.proto.entry import Entry
from magnetar.proto.errors import (
    InvalidArgument,
    MagnetarError,
    MessageLost,
    ServiceNotReady,
    TopicNotFound,
    TopicNotServed,
)
from magnetar.proto.ids import TopicName, check_ids

from ..cursors.core.acks import AckState
from ..dispatch.subscription import check_properties
from ..log.positions import Start
from ..log.records import ABSENT, PARTITIONED_ROOT, TOPICS_ROOT
from ..log.topic_names import list_topics
from ..ownership.core.bundles import Bundle
from ..tenancy.objects import NAMESPACE
from ..topics.backlog import find_skip, unacknowledged_runs
from ..topics.partitions import PartitionedTopic
from ..topics.registry import Broker
from ..topics.topic import Topic
from .operations import on_namespace, on_stored_topic, on_topic
from .results import TopicStats
from .stats import TopicOffsets, backlog, topic_stats

_PAGE = 1_000


class Owner(NamedTuple):
    """Who serves a topic."""

    here: bool  # this broker does
    url: str  # of the native protocol
    http: str
    pulsar: str  # of Pulsar's; "": it is not spoken there
    final: bool  # False: ask that broker, with `authoritative`


class TopicFigures(NamedTuple):
    """A topic and its figures."""

    topic: Topic
    stats: TopicStats


class FoundMessage(NamedTuple):
    """A message of an entry, or of a part of one."""

    entry: Entry
    ledger_id: int
    entry_id: int
    number: int  # its index in the entry

    @property
    def batch(self) -> tuple[int, int]:
        """Where its batch begins, and the index behind it. Raises MessageLost for a number that the entry does not have."""
        entry, at = self.entry, self.entry.batch_of(self.number)
        if self.number < entry.base_index or at == entry.batch_count:
            raise MessageLost(f"this entry has no message {self.number}")
        return entry.batch_start_index(at), entry.end_indexes[at]


class BacklogFound(NamedTuple):
    """What a subscription has not acknowledged."""

    entries: int
    messages: int
    first: tuple[int, int] | None  # ledger and entry; None: nothing is left
    last: tuple[int, int] | None


class AdminService:
    """`BrokerService.admin`."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    # --- who serves it -----------------------------------------------------------------------------------------------

    @on_topic("lookup")
    async def owner(self, name: TopicName, *, authoritative: bool = False, with_http: bool = True) -> Owner:
        """As `BrokerService.lookup`, with its other addresses. Raises ServiceNotReady, also if it is to have HTTP first."""
        ownership, settings = self._broker.ownership, self._broker.settings
        found = await ownership.locate(name, authoritative=authoritative, unreachable="")
        if found.url == settings.service_url:
            return Owner(True, found.url, settings.http_url, settings.pulsar_url_for_clients, found.final)
        brokers = await ownership.administration.brokers()
        for row in brokers:
            if row.url == found.url and (row.http or not with_http):
                return Owner(False, found.url, row.http, row.pulsar, found.final)
        raise ServiceNotReady(
            f"{name} is served at {found.url}, which has not said yet where its HTTP is; try again"
        )

    @on_topic("lookup")
    async def bundle_range(self, name: TopicName) -> str:
        """The bundle that the topic is in, as Pulsar names it: by its first hash and that of the next one."""
        rows = await self._broker.ownership.administration.bundles(name.full_namespace)
        found = next(one for one in (Bundle.parse(row.bundle) for row in rows) if one.holds(name))
        return f"0x{found.first:08x}_0x{min(found.last + 1, 0xFFFFFFFF):08x}"

    @on_topic("unload_topic")
    async def unload_topic(self, name: TopicName) -> None:
        """Closes it here; its next use loads it again. Raises TopicNotFound."""
        await self._broker.known(name)
        await self._broker.unload(name, TopicNotServed(f"topic {name} is unloaded; look it up again"))

    # --- what there is -----------------------------------------------------------------------------------------------

    @on_namespace("list_topics")
    async def topics(self, namespace: str, *, domain: str = "", partitioned: bool = False) -> list[str]:
        """Those of `tenant/namespace`, each partition as a topic; or the partitioned ones. Raises NotFound."""
        await self._broker.objects.get(NAMESPACE, namespace)
        root = PARTITIONED_ROOT if partitioned else TOPICS_ROOT
        start = f"{domain}://" if domain else ""
        found: list[str] = []
        page = [""]
        while page:
            await asyncio.sleep(0)
            page = await list_topics(self._broker.metadata, namespace, after=page[-1], count=_PAGE, root=root)
            found += [topic for topic in page if topic.startswith(start)]
        return found

    @on_topic("lookup")
    async def partitioned(self, name: TopicName) -> PartitionedTopic:
        """The record of a partitioned topic, also while it is being deleted. Raises TopicNotFound."""
        found = await self._broker.partitioned.read(name)
        if found.version == ABSENT:
            raise TopicNotFound(f"Topic {name} not found: there is no partitioned topic of this name")
        return found

    @on_topic("topic_stats")
    async def figures(self, name: TopicName) -> TopicFigures:
        """Raises TopicNotFound."""
        topic = await self._broker.known(name)
        return TopicFigures(topic, await topic_stats(topic))

    # --- messages ----------------------------------------------------------------------------------------------------

    @on_topic("peek_messages")
    async def message(self, name: TopicName, ledger_id: int, entry_id: int, number: int) -> FoundMessage:
        """A message by its id. Raises TopicNotFound, InvalidArgument, or what the read met."""
        check_ids(ledger_id, entry_id)
        topic = await self._broker.known(name)
        entry = await topic.log.read_entry((ledger_id, entry_id))
        return FoundMessage(entry, ledger_id, entry_id, number)

    @on_topic("peek_messages")
    async def examine(
        self, name: TopicName, *, initial_position: str = "latest", message_position: int = 1
    ) -> FoundMessage:
        """The message of this number, from the beginning of the topic ("earliest") or from its end ("latest").

        Raises TopicNotFound, MessageLost, InvalidArgument.
        """
        if initial_position not in ("earliest", "latest"):
            raise InvalidArgument(f"initialPosition is {initial_position[:40]!r}; want earliest or latest")
        topic = await self._broker.known(name)
        ledgers, number = topic.ledger.list, message_position
        position = ledgers.start
        if initial_position == "latest":
            first = ledgers.info(position[0])
            number = ledgers.message_count - (0 if first is None else first.first_index) - number + 1
        if number > 1:
            state = AckState(ledgers, position)
            position, _ = await find_skip(ledgers, state, topic.log.read_entry, number - 1)
        if number < 1 or not ledgers.is_confirmed(*position[:2]):
            raise MessageLost(f"topic {name} does not hold so many messages")
        return FoundMessage(await topic.log.read_entry(position[:2]), *position)

    @on_topic("topic_stats")
    async def last_message(self, name: TopicName) -> tuple[int, int, int]:
        """Ledger, entry and index of the last message; of an empty topic an entry of -1. Raises TopicNotFound."""
        topic = await self._broker.known(name)
        found = await topic.log.last_message_id()
        return (topic.ledger.list.end[0], -1, 0) if found is None else found[:3]

    @on_topic("topic_stats")
    async def find(self, name: TopicName, start: Start) -> tuple[int, int, int]:
        """The position that this means now. Raises TopicNotFound, InvalidArgument."""
        return await (await self._broker.known(name)).log.find(start)

    # --- subscriptions -----------------------------------------------------------------------------------------------

    @on_topic("expire_messages")
    async def expire_older(self, name: TopicName, seconds: int, subscription: str = "") -> None:
        """Acknowledges what is older, for one or all durable subscriptions. Raises as `BrokerService.expire_messages`."""
        if seconds < 0:
            raise InvalidArgument(f"messages cannot be {seconds} seconds old; want 0 or more")
        topic = await self._broker.known(name)
        before_ms = topic.ledger.appending.now_ms() - 1000 * seconds
        wanted = [one for one in topic.subscriptions.values() if one.durable]
        if subscription:
            wanted = [topic.subscriptions.existing(subscription, durable=True)]
        await _each(topic.maintenance.expire_before(one, before_ms) for one in wanted)

    @on_topic("expire_messages")
    async def expire_before(self, name: TopicName, subscription: str, start: Start) -> None:
        """Acknowledges what lies before a place. Raises TopicNotFound, SubscriptionNotFound, TopicBusy."""
        topic = await self._broker.known(name)
        await topic.subscriptions.existing(subscription, durable=True).skip_to(lambda: topic.log.find(start))

    @on_topic("peek_messages")
    async def analyze_backlog(self, name: TopicName, subscription: str) -> BacklogFound:
        """Counts what it has not acknowledged. Raises TopicNotFound, SubscriptionNotFound."""
        topic = await self._broker.known(name)
        found = topic.subscriptions.existing(subscription)
        messages = (await backlog(topic, found, TopicOffsets(topic))).messages
        runs = [run async for run in unacknowledged_runs(topic.ledger.list, found.cursor.state)]
        if not runs:
            return BacklogFound(0, messages, None, None)
        entries = sum(last - first + 1 for _, first, last in runs)
        return BacklogFound(entries, messages, runs[0][:2], (runs[-1][0], runs[-1][2]))

    @on_topic("topic_stats")
    async def backlog_size(self, name: TopicName, start: Start) -> int:
        """Bytes that the topic holds from a place on. Raises TopicNotFound."""
        topic = await self._broker.known(name)
        offsets = TopicOffsets(topic)
        return max(offsets.end.size - (await offsets.of(await topic.log.find(start))).size, 0)

    @on_topic("topic_stats")
    async def subscription_properties(self, name: TopicName, subscription: str) -> dict[str, str]:
        """What users noted of it. Raises TopicNotFound, SubscriptionNotFound."""
        return dict((await self._broker.known(name)).subscriptions.existing(subscription).cursor.properties)

    @on_topic("create_subscription")
    async def set_subscription_properties(
        self, name: TopicName, subscription: str, properties: dict[str, str]
    ) -> None:
        """Notes these in place of what there was; durable when it returns. Raises InvalidArgument, as `expire_before`."""
        check_properties(properties)
        topic = await self._broker.known(name)
        await topic.subscriptions.existing(subscription, durable=True).cursor.set_properties(properties)

    # --- what is stored ----------------------------------------------------------------------------------------------

    @on_stored_topic("trim_topic")
    async def trim(self, name: TopicName) -> None:
        """Deletes now what the next round of maintenance would delete. Raises TopicNotFound."""
        topic = await self._broker.known(name)
        await topic.ledger.changes.trim(lambda: topic.retention.trimmed_until().position)

    @on_stored_topic("delete_topic")
    async def truncate(self, name: TopicName) -> None:
        """All that is stored counts as acknowledged, and is deleted whatever retention says. Raises TopicNotFound."""
        topic = await self._broker.known(name)

        subscriptions = [one for one in topic.subscriptions.values() if one.durable]
        await _each(one.skip_to(lambda: topic.log.find(("latest", None))) for one in subscriptions)
        await topic.ledger.appending.edit_closed(
            topic.ledger.list.commit
        )  # all that is stored is in closed ledgers then
        deleted = 1
        while deleted:
            deleted = await topic.ledger.changes.trim(lambda: topic.retention.lowest().position)

    @on_topic("topic_stats")
    async def properties(self, name: TopicName) -> dict[str, str]:
        """What users noted of a topic. Raises TopicNotFound."""
        return await self._properties(name)

    @on_topic("create_topic")
    async def change_properties(self, name: TopicName, changed: dict[str, str | None]) -> None:
        """Notes these beside what there is; what is None goes. Raises TopicNotFound, TopicBusy, InvalidArgument."""

        def after(before: dict[str, str]) -> dict[str, str]:
            return {key: text for key, text in {**before, **changed}.items() if text is not None}

        check_properties(after(await self._properties(name)))
        if (await self._broker.partitioned.read(name)).partitions:
            await self._broker.partitioned.change(
                name, lambda was: msgspec.structs.replace(was, properties=after(was.properties))
            )
            return
        ledger = (await self._broker.known(name)).ledger
        await ledger.changes.edit(lambda: ledger.list.commit(properties=after(ledger.list.record.properties)))

    async def _properties(self, name: TopicName) -> dict[str, str]:
        whole = await self._broker.partitioned.read(name)
        record = whole.record if whole.partitions else (await self._broker.known(name)).ledger.list.record
        return record.properties


async def _each(calls: Iterable[Awaitable[object]]) -> None:
    """Rule 48: all are made; the first error is raised then."""
    failed: list[MagnetarError] = []
    for call in calls:
        try:
            await call
        except MagnetarError as error:
            failed.append(error)
    if failed:
        raise failed[0]
