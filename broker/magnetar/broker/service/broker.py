"""Producers, consumers and the administration of topics: see `operations` for how each is authorized."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from magnetar.proto.errors import InvalidArgument, Unsupported
from magnetar.proto.ids import MessageId, TopicName

from ..compaction.topic_compaction import CompactionStats
from ..dispatch.core.consumer import ConsumerPort
from ..log.positions import Start
from ..settings import BrokerSettings
from ..topics.producers import ProducerPort
from ..topics.registry import Broker
from .ledgers import LedgerService
from .operations import on_consumer, on_namespace, on_topic
from .results import ConsumerOpened, ProducerOpened, TopicPage, TopicStats
from .stats import topic_stats

MAX_TOPICS_PER_PAGE = 1_000
MAX_PRIORITY_LEVEL = 1_000
_MAX_EPOCH = 1 << 62


class BrokerService:
    """What a listener asks of a broker. Each operation takes who asks and the topic's name as written, first."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.ledgers = LedgerService(broker)

    @property
    def settings(self) -> BrokerSettings:
        """The broker's."""
        return self._broker.settings

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
    ) -> ProducerOpened:
        """A session to publish with; `new_port` makes its port for the epoch. The topic is made if settings allow it.

        Waits until nothing can land that an older session of the name sent. Raises ProducerBusy, TopicNotFound,
        Unsupported, InvalidArgument.
        """
        if producer_name is not None and not 0 < len(producer_name) <= 255:
            raise InvalidArgument("a producer name has 1 to 255 characters")
        if not 0 <= epoch < _MAX_EPOCH:
            raise InvalidArgument(f"a producer epoch of {epoch} is not allowed")
        topic = await self._broker.find(name)
        session = await topic.open_producer(
            producer_name or self._broker.generate_name(),
            epoch=epoch,
            access_mode=access_mode,
            new_port=new_port,
        )
        return ProducerOpened(topic, session)

    @on_topic("consume")
    async def subscribe(
        self,
        name: TopicName,
        subscription: str,
        *,
        port: ConsumerPort,
        type: str = "exclusive",
        start: Start = ("latest", None),
        durable: bool = True,
        consumer_name: str = "",
        epoch: int = 0,
        priority_level: int = 0,
        hash_ranges: Sequence[tuple[int, int]] = (),
        create: bool = True,
        read_compacted: bool = False,
    ) -> ConsumerOpened:
        """A consumer; its subscription is made at `start` if there is none, the topic if `create` and settings allow it.

        Raises ConsumerBusy, TopicNotFound, InvalidArgument.
        """
        if not 0 <= epoch < _MAX_EPOCH:
            raise InvalidArgument(f"a consumer epoch of {epoch} is not allowed")
        if not 0 <= priority_level <= MAX_PRIORITY_LEVEL:
            raise InvalidArgument(
                f"a priority level of {priority_level} is not allowed; want 0, the highest, to {MAX_PRIORITY_LEVEL}"
            )
        topic = await (self._broker.find(name) if create else self._broker.known(name))
        found, consumer = await topic.subscribe(
            subscription,
            port,
            type=type,
            start=start,
            durable=durable,
            consumer_name=consumer_name or self._broker.generate_name(),
            epoch=epoch,
            priority_level=priority_level,
            hash_ranges=hash_ranges,
            read_compacted=read_compacted,
        )
        return ConsumerOpened(topic, found, consumer)

    @on_consumer("consume")
    async def unsubscribe(self, opened: ConsumerOpened) -> None:
        """Deletes the consumer's subscription. Raises ConsumerBusy while it has other consumers."""
        await opened.topic.delete_subscription(opened.subscription.name, by=opened.consumer)

    @on_consumer("consume")
    async def seek(self, opened: ConsumerOpened, start: Start) -> int:
        """Moves the consumer's subscription; its new epoch, once that is durable."""
        return await opened.topic.seek(opened.subscription, start)

    @on_consumer("consume")
    async def last_message_id(self, opened: ConsumerOpened) -> MessageId | None:
        """The last confirmed message of the consumer's topic that it gets; None if there is none."""
        return await opened.topic.last_message_id(opened.subscription)

    # --- topics ------------------------------------------------------------------------------------------------------

    @on_topic("lookup")
    async def lookup(self, _name: TopicName) -> str:
        """The service URL of the broker that serves the topic."""
        return self.settings.service_url

    @on_topic("lookup")
    async def partitions(self, _name: TopicName) -> int:
        """How many partitions the topic has; 0: it is not partitioned."""
        return 0

    @on_namespace("list_topics")
    async def list_topics(self, namespace: str, *, after: str = "", count: int = 0) -> TopicPage:
        """At most `count` topics (0 and above the bound: MAX_TOPICS_PER_PAGE) with names after `after`."""
        if count < 0:
            raise InvalidArgument(f"a page of {count} topics is not possible")
        most = min(count or MAX_TOPICS_PER_PAGE, MAX_TOPICS_PER_PAGE)
        names = await self._broker.list_topics(namespace, after=after, count=most + 1)
        return TopicPage(names[:most], len(names) > most)

    @on_topic("topic_stats")
    async def topic_stats(self, name: TopicName) -> TopicStats:
        """Figures of the topic. Raises TopicNotFound."""
        return await topic_stats(await self._broker.known(name))

    @on_topic("compact_topic")
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
    async def create_topic(self, name: TopicName, *, partitions: int = 0) -> None:
        """Makes a topic, or finds it there. Raises TopicBusy, Unsupported."""
        if partitions:
            raise Unsupported("partitioned topics are not offered yet; create the topic with partitions=0")
        await self._broker.topic(name, create=True)

    @on_topic("delete_topic")
    async def delete_topic(self, name: TopicName, *, force: bool = False) -> None:
        """Deletes it with all it holds. Raises TopicNotFound, and TopicBusy while somebody is connected unless `force`."""
        await self._broker.delete_topic(name, force=force)

    @on_topic("delete_subscription")
    async def delete_subscription(self, name: TopicName, subscription: str, *, force: bool = False) -> None:
        """Raises TopicNotFound, SubscriptionNotFound, and ConsumerBusy while somebody is connected unless `force`."""
        topic = await self._broker.known(name)
        await topic.delete_subscription(subscription, force=force)
