"""Producers, consumers and the administration of topics: see `operations` for how each is authorized."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from magnetar.proto.entry import Entry
from magnetar.proto.errors import (
    AlreadyExists,
    InvalidArgument,
    MagnetarError,
    MessageLost,
    ServiceNotReady,
    SubscriptionNotFound,
    TopicNotFound,
)
from magnetar.proto.ids import (
    NO_PARTITION,
    MessageId,
    TopicName,
    check_namespace,
    check_subscription_name,
)
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.clock import Clock

from ..compaction.topic_compaction import CompactionStats
from ..cursors.core.acks import EntryKey
from ..dispatch.core.consumer import ConsumerPort
from ..dispatch.subscription import MAX_EPOCH, Sought, SubscribeRequest, Subscription, check_properties
from ..log.positions import Start, check_start
from ..log.records import ABSENT
from ..log.topic_names import list_topics
from ..ownership.core.bundles import Bundle, parse_bundle_or_topic
from ..ownership.ownership import DrainState, Located
from ..settings import BrokerSettings
from ..tenancy.objects import NAMESPACE
from ..topics.backlog import peek, skip
from ..topics.core.producers import ACCESS_MODES, NOT_ALONE, Claim, ProducerPort
from ..topics.core.schemas import Schema
from ..topics.policies import ALL_BROKERS, Resolved, check_possible
from ..topics.registry import Broker
from ..topics.topic import Topic
from ..topics.watches import TopicWatch
from .admin import AdminService
from .diagnosis import Busiest, BusyTopic, Diagnosis, bookie_rows, busiest, busy_topics, diagnose
from .ledgers import LedgerService
from .operations import on_cluster, on_consumer, on_namespace, on_stored_topic, on_topic
from .results import (
    BookiesFound,
    BrokersFound,
    BundlesFound,
    ConsumerOpened,
    Expired,
    PartitionsLeft,
    Peeked,
    PoliciesFound,
    ProducerOpened,
    Skipped,
    TopicPage,
    TopicStats,
)
from .schemas import SchemaService, check_consumer, version_of_producer
from .stats import TopicOffsets, backlog, topic_stats
from .stored import StoredService
from .tenancy import TenancyService

MAX_TOPICS_PER_PAGE = 1_000
MAX_BUSIEST = 100


class BrokerService:
    """What a listener asks of a broker. Each operation takes who asks and the topic's name as written, first."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.ledgers = LedgerService(broker)
        self.admin = AdminService(broker)
        self.tenancy = TenancyService(broker)
        self.stored = StoredService(broker)
        self.schemas = SchemaService(broker)

    @property
    def settings(self) -> BrokerSettings:
        """The broker's."""
        return self._broker.settings

    @property
    def clock(self) -> Clock:
        """The broker's."""
        return self._broker.clock

    @property
    def connections(self) -> dict[object, None]:
        """Of clients to this broker: a listener notes each while it is open."""
        return self._broker.connections

    # --- producers and consumers -------------------------------------------------------------------------------------

    @on_topic("produce")
    async def create_producer(
        self,
        name: TopicName,
        *,
        new_port: Callable[[int], ProducerPort],
        producer_name: str | None = None,
        epoch: int = 0,
        access_mode: str = "shared",
        topic_epoch: int = NOT_ALONE,
        schema: Schema | None = None,
    ) -> ProducerOpened:
        """A session to publish with; `new_port` makes its port for the epoch. The topic is made if settings allow it.

        Waits until nothing can land that an older session of the name sent, and as the access mode says
        (`topics.core.producers`). Raises ProducerBusy, ProducerFenced, QuorumLost, TopicNotFound, TopicTerminated,
        IncompatibleSchema, InvalidArgument.
        """
        if producer_name is not None and not 0 < len(producer_name) <= 255:
            raise InvalidArgument("a producer name has 1 to 255 characters")
        if not 0 <= epoch < MAX_EPOCH:
            raise InvalidArgument(f"a producer epoch of {epoch} is not allowed")
        if access_mode not in ACCESS_MODES:
            raise InvalidArgument(
                f"unknown access mode {access_mode!r} (want {' or '.join(map(repr, ACCESS_MODES))})"
            )
        if not NOT_ALONE <= topic_epoch < MAX_EPOCH:
            raise InvalidArgument(f"a topic epoch of {topic_epoch} is not allowed")
        topic = await self._broker.find(name)
        claim = Claim(producer_name or self._broker.generate_name(), epoch, access_mode, topic_epoch)
        version = await version_of_producer(self._broker, topic, schema)
        session = await topic.open_producer(claim, new_port)
        session.opened_ms = self.clock.now_ms()
        return ProducerOpened(topic, session, version)

    @on_topic("consume")
    async def subscribe(
        self,
        name: TopicName,
        asked: SubscribeRequest,
        *,
        port: ConsumerPort,
        schema: Schema | None = None,
    ) -> ConsumerOpened:
        """A consumer; its subscription is made if there is none, the topic if the request and settings allow it.

        Raises ConsumerBusy, TopicNotFound, IncompatibleSchema, InvalidArgument.
        """
        asked.check()
        topic = await (self._broker.find(name) if asked.create else self._broker.known(name))
        topic.limits.check_subscribing(asked.subscription, asked.name)
        if not asked.name:
            asked = asked._replace(name=self._broker.generate_name())
        if asked.durable and topic.name.persistent:
            _check_made_by_use(topic, asked.subscription)
        await check_consumer(self._broker, topic, schema)
        opened = ConsumerOpened(topic, *await topic.subscriptions.subscribe(asked, port))
        opened.consumer.opened_ms = self.clock.now_ms()
        return opened

    @on_consumer("consume")
    async def unsubscribe(self, opened: ConsumerOpened, *, force: bool = False) -> None:
        """Deletes the consumer's subscription. Raises ConsumerBusy while it has other consumers, unless `force`."""
        await opened.topic.subscriptions.delete(opened.subscription.name, force=force, by=opened.consumer)

    @on_consumer("consume")
    async def seek(self, opened: ConsumerOpened, start: Start) -> Sought:
        """Moves the consumer's subscription; durable when it returns."""
        return await opened.topic.subscriptions.seek(opened.subscription, start)

    @on_topic("consume")
    async def entry(self, name: TopicName, subscription: str, key: EntryKey) -> Entry | None:
        """A confirmed entry as consumers of the subscription get it, of which there may be none yet; None: it is not there.

        Of it a listener learns which batch a message is in that it has not delivered itself. Raises TopicNotFound.
        """
        topic = await self._broker.known(name)
        found = topic.subscriptions.get(subscription)
        log = topic.log if found is None or found.compacted is None else found.compacted
        if key[1] < 0 or not log.is_known(key[0]) or not log.is_confirmed(*key):
            return None
        cached = log.cached(key)
        if cached is not None:
            return cached
        try:
            return Entry((await log.read(*key, max_bytes=1))[0], LEDGER_ENTRY_HEADER_BYTES)
        except MessageLost:
            return None

    @on_consumer("consume")
    async def last_message_id(self, opened: ConsumerOpened) -> MessageId | None:
        """The last confirmed message of the consumer's topic that it gets; None if there is none."""
        compacted = opened.subscription.compacted
        found = await (opened.topic.log if compacted is None else compacted).last_message_id()
        return None if found is None else found._replace(partition=opened.topic.name.partition)

    @on_consumer("consume")
    async def unfinished_message(
        self, opened: ConsumerOpened, producer: str, chunk_id: bytes, until: MessageId | None, *, held: bool
    ) -> tuple[bool, MessageId | None]:
        """Whether nothing before `until` is left to be delivered, or (`held`) held by other consumers; where it ends.

        Where the message in chunks ends: None, if its producer may still send more of it.
        """
        topic = opened.topic
        but = opened.consumer if held else None
        lost = until is not None and not opened.subscription.is_to_come(until[:3], but)
        if topic.producers.may_continue(producer, chunk_id):
            return lost, None
        return lost, MessageId(*topic.log.list.end)

    # --- topics ------------------------------------------------------------------------------------------------------

    @on_topic("lookup")
    async def lookup(self, name: TopicName, *, authoritative: bool = False, unreachable: str = "") -> Located:
        """Who serves the topic: broker/CLUSTER.md. Raises ServiceNotReady."""
        return await self._broker.ownership.locate(name, authoritative=authoritative, unreachable=unreachable)

    @on_topic("lookup")
    async def partitions(self, name: TopicName, *, existing: bool = False) -> int:
        """How many partitions the topic has; 0: it is not partitioned. Raises TopicBusy while it is being made.

        `existing`: raises TopicNotFound if there is no such topic.
        """
        count = await self._broker.partitioned.count(name)
        if existing and not count and not await self._broker.exists(name):
            raise TopicNotFound(f"topic {name} does not exist")
        return count

    @on_topic("produce", "consume")
    async def partitions_to_use(self, name: TopicName) -> int:
        """The same of a topic that is about to be used, which makes it where there is none and policies say so."""
        return await self._broker.partitions(name)

    @on_topic("lookup")
    async def watch_partitions(
        self, name: TopicName, changed: Callable[[int], None]
    ) -> tuple[int, Callable[[], None]]:
        """As `partitions`, and gives each later number to `changed` until what is returned as well is called."""
        return await self._broker.partitioned.watch(name, changed)

    @on_namespace("list_topics")
    async def list_topics(self, namespace: str, *, after: str = "", count: int = 0) -> TopicPage:
        """At most `count` topics (0 and above the bound: MAX_TOPICS_PER_PAGE) with names after `after`."""
        if count < 0:
            raise InvalidArgument(f"a page of {count} topics is not possible")
        most = min(count or MAX_TOPICS_PER_PAGE, MAX_TOPICS_PER_PAGE)
        names = await list_topics(self._broker.metadata, namespace, after=after, count=most + 1)
        return TopicPage(names[:most], len(names) > most)

    @on_namespace("list_topics")
    async def watch_topics(self, namespace: str, watch: TopicWatch) -> Callable[[], None]:
        """Tells `watch` of topics that are made and deleted, until what this returns is called. Raises InvalidArgument."""
        return await self._broker.watches.watch(check_namespace(namespace), watch)

    @on_topic("topic_stats")
    async def topic_stats(self, name: TopicName) -> TopicStats:
        """Figures of the topic. Raises TopicNotFound."""
        return await topic_stats(await self._broker.known(name))

    @on_stored_topic("compact_topic")
    async def compact_topic(self, name: TopicName, *, action: str = "start") -> CompactionStats:
        """Begins a compaction unless one is under way ("start"), gives up compaction ("remove"), or does nothing ("status").

        Returns the state after that, which says how a compaction goes on. Raises TopicNotFound, InvalidArgument.
        """
        if action not in ("start", "status", "remove"):
            raise InvalidArgument(
                f"a compaction has no action {action!r} (want 'start', 'status' or 'remove')"
            )
        compaction = (await self._broker.known(name)).compaction
        if action == "start":
            compaction.begin()
        elif action == "remove":
            await compaction.remove()
        return compaction.stats()

    @on_topic("create_topic")
    async def create_topic(self, name: TopicName, *, partitions: int = 0, new: bool = False) -> None:
        """Makes a topic, or finds it there unless it is to be `new`; 0: one that is not partitioned.

        Raises TopicBusy, InvalidArgument, and AlreadyExists if there is one of the name with another number of partitions,
        or, as NotFound without the namespace, if it is to be new.
        """
        if new:
            await self._broker.objects.get(NAMESPACE, name.full_namespace)
            if (await self._broker.partitioned.read(name)).partitions or await self._broker.exists(name):
                raise AlreadyExists(f"This topic already exists: {name}")
        if partitions:
            await self._broker.partitioned.create(name, partitions)
        elif name.partition == NO_PARTITION:
            await self._broker.topic(name, create=True)
        else:
            await self._broker.known(name)

    @on_topic("create_topic")
    async def update_partitions(self, name: TopicName, *, partitions: int) -> int:
        """A partitioned topic has so many from now on. Raises TopicNotFound, TopicBusy, InvalidArgument for fewer."""
        return await self._broker.partitioned.update(name, partitions)

    @on_topic("terminate_topic")
    async def terminate_topic(self, name: TopicName) -> MessageId | None:
        """No message follows, for good; the last one, the same each time. Raises TopicNotFound, QuorumLost."""
        return await (await self._broker.known(name)).terminate()

    @on_topic("delete_topic")
    async def delete_topic(
        self, name: TopicName, *, force: bool = False, dry: bool = False
    ) -> PartitionsLeft | None:
        """Deletes it with all it holds. Raises TopicNotFound, and TopicInUse while somebody is connected unless `force`.

        Of a partitioned topic it is the record, once its partitions are deleted: the first call marks it, so that none can
        be used any more, and each returns what is to be deleted before the next one. `dry`: nothing is deleted.
        """
        if name.partition == NO_PARTITION and not dry:
            left = await self._broker.partitioned.delete(name)
            if left is not None:
                return PartitionsLeft(left)
        elif not dry:
            await self._broker.partitioned.check_deletable(name)
        await self._broker.delete_topic(name, force=force, dry=dry)
        return None

    @on_topic("delete_subscription")
    async def delete_subscription(self, name: TopicName, subscription: str, *, force: bool = False) -> None:
        """Raises TopicNotFound, SubscriptionNotFound, and ConsumerBusy while somebody is connected unless `force`."""
        topic = await self._broker.known(name)
        await topic.subscriptions.delete(subscription, force=force)

    # --- policies ----------------------------------------------------------------------------------------------------

    @on_topic("get_policies")
    async def topic_policies(self, name: TopicName) -> PoliciesFound:
        """Those of the topic itself, and what is in force for it. Raises TopicNotFound."""
        in_force, version, _ = await self._policies_of(name)
        return PoliciesFound(in_force.levels[0][1], version, in_force.rows())

    @on_stored_topic("set_policies")
    async def change_topic_policies(self, name: TopicName, changes: Mapping[str, Any]) -> int:
        """As `Policies.changed`; the new version. Raises TopicNotFound, InvalidArgument."""
        before, _, change = await self._policies_of(name)
        await self._check_possible(before, changes, "topic")
        return await change(changes)

    @on_namespace("get_policies")
    async def namespace_policies(self, namespace: str) -> PoliciesFound:
        """Those of `tenant/namespace`, or ALL_BROKERS; and what is in force for its topics that have none of their own."""
        if namespace != ALL_BROKERS:
            await self._broker.objects.get(NAMESPACE, namespace)
        found = await self._broker.namespaces.read(namespace)
        in_force = await self._broker.namespaces.in_force(namespace)
        return PoliciesFound(found.policies, found.version, in_force.rows())

    @on_namespace("set_policies")
    async def change_namespace_policies(
        self, namespace: str, changes: Mapping[str, Any], *, make: bool = False
    ) -> int:
        """As `Policies.changed`, of `tenant/namespace` or ALL_BROKERS; the new version. Raises NotFound, InvalidArgument.

        `make`: of a namespace that its first topic would make as well.
        """
        exists = False
        if namespace != ALL_BROKERS:
            if make:
                await self._broker.creation.existing(namespace)
            exists = (await self._broker.objects.get(NAMESPACE, namespace)).version != ABSENT
        before = await self._broker.namespaces.in_force(namespace)
        await self._check_possible(before, changes, before.levels[0][0])
        return await self._broker.namespaces.change(namespace, changes, exists=exists)

    async def _policies_of(
        self, name: TopicName
    ) -> tuple[Resolved, int, Callable[[Mapping[str, Any]], Awaitable[int]]]:
        """In force for a topic or a partition, or by the record of a partitioned topic; their version; what changes them."""
        partitioned = self._broker.partitioned
        if name.partition == NO_PARTITION and not self._broker.has(name):
            whole = await partitioned.read(name)
            if whole.partitions:
                above = await self._broker.namespaces.in_force(name.full_namespace)
                return (
                    Resolved((("topic", whole.policies), *above.levels)),
                    whole.record.policies_version,
                    partial(partitioned.change_policies, name),
                )
        topic = await self._broker.known(name)
        return await topic.policies.read(), topic.ledger.list.record.policies_version, topic.change_policies

    async def _check_possible(self, before: Resolved, changes: Mapping[str, Any], level: str) -> None:
        policies = before.levels[0][1].changed(changes).check_level(level)
        groups = [broker.group for broker in await self._broker.ownership.administration.brokers()]
        check_possible(self._broker.ledgers, groups, before, policies)

    # --- subscriptions -----------------------------------------------------------------------------------------------

    @on_stored_topic("create_subscription")
    async def create_subscription(
        self,
        name: TopicName,
        subscription: str,
        *,
        start: Start = ("latest", None),
        properties: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """A durable subscription without a consumer; the topic is made if settings allow it. Raises AlreadyExists."""
        check_subscription_name(subscription)
        check_start(start)
        check_properties(properties)
        await (await self._broker.find(name)).subscriptions.create(subscription, start, properties)

    @on_topic("seek_subscription")
    async def seek_subscription(self, name: TopicName, subscription: str, *, start: Start) -> int:
        """Moves a durable subscription, whoever is connected; its new epoch, once that is durable.

        Raises TopicNotFound, SubscriptionNotFound, InvalidArgument, TopicBusy.
        """
        topic, found = await self._existing(name, subscription)
        return (await topic.subscriptions.seek(found, start)).epoch

    @on_topic("skip_messages")
    async def skip_messages(self, name: TopicName, subscription: str, *, count: int) -> Skipped:
        """Acknowledges the next messages of a durable subscription, whoever holds them. Raises as seek_subscription."""
        if count <= 0:
            raise InvalidArgument(f"{count} messages cannot be skipped; want 1 or more")
        topic, found = await self._existing(name, subscription)
        skipped = await skip(topic.ledger.list, topic.log.read_entry, found, count)
        return Skipped(skipped, list(found.cursor.state.mark_delete))

    @on_topic("skip_messages")
    async def clear_backlog(self, name: TopicName, subscription: str) -> Skipped:
        """As skip_messages, of all that is stored now; how many that were is an upper bound, as in the stats."""
        topic, found = await self._existing(name, subscription)
        cleared = (await backlog(topic, found, TopicOffsets(topic))).messages
        await found.skip_to(lambda: topic.log.find(("latest", None)))
        return Skipped(cleared, list(found.cursor.state.mark_delete))

    @on_topic("expire_messages")
    async def expire_messages(self, name: TopicName, subscription: str, before_ms: int) -> Expired:
        """Acknowledges what was stored before a time. Raises TopicNotFound, SubscriptionNotFound, TopicBusy."""
        if before_ms < 0:
            raise InvalidArgument(f"{before_ms} is no time: want milliseconds since the epoch")
        topic, found = await self._existing(name, subscription)
        ledgers = topic.ledger.list
        before = await TopicOffsets(topic).of(ledgers.normalise(found.cursor.state.mark_delete))
        moved = await topic.maintenance.expire_before(found, before_ms)
        mark = ledgers.normalise(found.cursor.state.mark_delete)
        messages = (await TopicOffsets(topic).of(mark)).messages - before.messages if moved else 0
        return Expired(moved, max(messages, 0), list(mark))

    @on_topic("peek_messages")
    async def peek_messages(self, name: TopicName, subscription: str, *, count: int = 1) -> Peeked:
        """The next messages that a subscription has not acknowledged. Raises as seek_subscription, or what a read met."""
        if count <= 0:
            raise InvalidArgument(f"{count} messages cannot be shown; want 1 or more")
        topic, found = await self._existing(name, subscription, durable=False)
        cursor = found.cursor
        return Peeked(
            await peek(topic.ledger.list, cursor.state, cursor.redeliveries, topic.log.read_entry, count)
        )

    async def _existing(
        self, name: TopicName, subscription: str, *, durable: bool = True
    ) -> tuple[Topic, Subscription]:
        topic = await self._broker.known(name)
        return topic, topic.subscriptions.existing(subscription, durable=durable)

    # --- the cluster -------------------------------------------------------------------------------------------------

    @property
    def valid(self) -> bool:
        """False: this broker may not be the owner of its topics any more, and confirms nothing."""
        return self._broker.ownership.valid

    @on_cluster("list_brokers")
    async def list_brokers(self) -> BrokersFound:
        """All brokers of the cluster."""
        administration = self._broker.ownership.administration
        return BrokersFound(await administration.brokers(), await administration.balancer())

    @on_cluster("list_bookies")
    async def list_bookies(self) -> BookiesFound:
        """All bookies that are known here."""
        return BookiesFound(bookie_rows(self._broker.bookies))

    @on_cluster("list_brokers")
    async def broker_figures(self) -> dict[str, float]:
        """Counters and gauges of this broker."""
        return self._broker.figures()

    @on_cluster("list_busiest")
    async def loaded_topics(self) -> list[BusyTopic]:
        """All topics of this broker, with their rates."""
        return [one async for one in busy_topics(self._broker)]

    @on_cluster("diagnose")
    async def diagnose(self) -> Diagnosis:
        """What is wrong at this broker, and what it knows to be wrong elsewhere."""
        return await diagnose(self._broker, self._broker.trouble())

    @on_cluster("list_busiest")
    async def list_busiest(self, *, count: int = 10) -> Busiest:
        """Of this broker. Raises InvalidArgument."""
        if not 0 < count <= MAX_BUSIEST:
            raise InvalidArgument(f"the {count} busiest cannot be listed; want 1 to {MAX_BUSIEST}")
        return await busiest(self._broker, count)

    @on_namespace("list_bundles")
    async def list_bundles(self, namespace: str) -> BundlesFound:
        """The bundles of `tenant/namespace` and their owners. Raises InvalidArgument."""
        return BundlesFound(await self._broker.ownership.administration.bundles(check_namespace(namespace)))

    @on_cluster("unload_bundle")
    async def unload_bundle(self, bundle: str, *, to: str = "") -> None:
        """Returns when the bundle's owner has handed it over; of a partitioned topic the bundles of all its partitions.

        Raises InvalidArgument, RequestTimeout.
        """
        failed: list[MagnetarError] = []
        for one in await self._bundles(bundle):
            try:
                await self._broker.ownership.administration.transfer(one, to)
            except MagnetarError as error:  # rule 48: the others move all the same
                failed.append(error)
        if failed:
            raise failed[0]

    async def _bundles(self, text: str) -> list[str]:
        """A bundle, or a topic that means its own; of a partitioned topic those of its partitions, or these themselves."""
        named = parse_bundle_or_topic(text)
        count = 0 if isinstance(named, Bundle) else await self._broker.partitioned.count(named)
        if isinstance(named, Bundle) or not count:
            return [text]
        names = [named.partition_of(number) for number in range(count)]
        if self._broker.ownership.alone:
            return [str(name) for name in names]
        rows = await self._broker.ownership.administration.bundles(named.full_namespace)
        bundles = [parse_bundle_or_topic(row.bundle) for row in rows]
        return [
            str(one) for one in bundles if isinstance(one, Bundle) and any(one.holds(name) for name in names)
        ]

    @on_cluster("split_bundle")
    async def split_bundle(self, bundle: str) -> list[str]:
        """The parts, once it is divided. Raises InvalidArgument, RequestTimeout."""
        return await self._broker.ownership.administration.split(bundle)

    @on_cluster("drain")
    async def drain(
        self, name: str = "", *, zone: str = "", kind: str = "", undo: bool = False
    ) -> DrainState:
        """What a broker or a bookie, or all of a zone, have to hand over, until `undo`. Raises NotFound, InvalidArgument."""
        return await self._broker.ownership.administration.drain(name, zone=zone, kind=kind, undo=undo)

    @on_cluster("list_brokers")
    async def drains(self, name: str = "", *, zone: str = "", kind: str = "") -> DrainState:
        """What those that are drained have left: all, one of them, or those of a zone. NotFound: it is not drained."""
        return await self._broker.ownership.administration.drains(name, zone=zone, kind=kind)


def _check_made_by_use(topic: Topic, subscription: str) -> None:
    """Before a durable subscription is used: it is there, or by policy its use makes it. Raises SubscriptionNotFound."""
    known = topic.subscriptions
    if subscription in known or subscription in known.recovery.unavailable:
        return
    in_force = topic.policies.in_force()
    if in_force is None:
        raise ServiceNotReady(
            f"topic {topic.name} has no subscription {subscription!r}, and while its policies are not known it is not known "
            "whether its use makes it; try again"
        )
    if not in_force.value("auto_create_subscriptions")[0]:
        raise SubscriptionNotFound(
            f"Subscription does not exist: topic {topic.name} has no subscription {subscription!r}, and by its policy "
            "auto_create_subscriptions none is made by its use; create it first"
        )
