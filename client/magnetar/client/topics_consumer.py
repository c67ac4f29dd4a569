"""Several topics behind one consumer.

Each topic has a `TopicConsumer`, which keeps its order. Those that have something to hand out stand in a queue, and each
gives one delivery in its turn, so that a busy topic does not keep the others waiting:

    delivery for topic b -> b wakes -> ready: a, b -> refill opens a delivery of a; a has more -> ready: b, a

The topics are those that were named, or a set that changes (`ChangingTopics`: those that a pattern matches, partitions): new
ones join, and one that was deleted leaves. The receiver queue that the options ask for is shared evenly among the topics.

    open --a named topic cannot be opened--> closed, and its error is raised
    open --a topic fails for good--> it leaves; its error is raised once by whoever waits for messages; the others go on
    the last of the named topics has left --> the last error is raised by every call: there is nobody to wait for
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from operator import length_hint
from typing import Any, Protocol

from magnetar.proto.errors import (
    AlreadyClosed,
    EntryUnreadable,
    InvalidArgument,
    MagnetarError,
    PartitionNotFound,
    TopicNotFound,
)
from magnetar.proto.ids import NO_PARTITION, MessageId, TopicName
from magnetar.runtime.tasks import LongTask

from .connection.calls import all_of, side_by_side
from .connection.pool import ConnectionPool
from .durations import Duration
from .messages import Message, MessageBatch, SeekTarget
from .options import start_on_wire
from .receipts import copy_of
from .topic.acknowledger import Acknowledgeable
from .topic.consumer import TopicConsumer
from .topics_watch import TopicChanges

_log = logging.getLogger("magnetar.client")

# What a topic that does not exist any more fails with.
_GONE = (TopicNotFound, PartitionNotFound)
# What topics that left had of the receiver queue goes to the others so much later: many leave at a time.
SHARE_OUT_S = 0.1


NewConsumer = Callable[[str, Callable[[TopicConsumer], object], bool], TopicConsumer]


class ChangingTopics(Protocol):
    """Topics that come and go: those that a pattern matches, or the partitions of topics that were named.

    endless: there may be none of them for a while. Otherwise who consumes none any more gets the last error.
    """

    endless: bool

    async def begin(self) -> None:
        """Asks the service to tell of changes. Raises nothing: `all` finds them as well."""

    async def all(self) -> list[str]:
        """The full names of those that there are. Raises what the service answered."""

    async def next(self) -> TopicChanges | None:
        """Waits for changes; None: `all` is to be asked."""

    def gone(self, topic: str, others: Iterable[str]) -> bool:
        """A topic is, while there are these others. True if that is nothing that the user must be told of."""

    def made_again(self, topic: str) -> None:
        """Has `next` return that this topic was made."""

    def close(self) -> None:
        """Nothing is to be told any more."""


class TopicsConsumer:
    """See the module docstring. What users call is described in `Consumer`."""

    def __init__(
        self,
        what: str,
        pool: ConnectionPool,
        topics: list[str] | ChangingTopics,
        new_consumer: NewConsumer,
        on_closed: Callable[[], object],
        *,
        expand: Callable[[list[str]], list[str]],
    ) -> None:
        """`topics`: those that were named, or a set that changes. `expand` adds what is consumed with them: retry topics.

        `new_consumer` makes the consumer of a topic, which is to call what it gets whenever it wakes; it also learns whether
        the topic was found after the first ones.
        """
        self.what = what
        self._pool = pool
        self._named = topics if isinstance(topics, list) else []
        self._changing = None if isinstance(topics, list) else topics
        self._expand = expand
        self._new_consumer = new_consumer
        self._on_closed = on_closed
        self.consumers: dict[str, TopicConsumer] = {}  # by topic; those that are open or being opened
        self.acknowledger = TopicsAcknowledger(what, self.consumers)
        self._made = set[str]()  # again, perhaps, before their consumers have learned that they were deleted
        self._ready: dict[TopicConsumer, None] = {}  # may have something to hand out, in turn
        self._current: TopicConsumer | None = None  # whose delivery is open
        self._failures: list[MagnetarError] = []  # not raised yet
        self._last_failure: MagnetarError | None = None
        self.arrived = asyncio.Event()
        self._discovery: LongTask | None = None
        self._sharing: asyncio.TimerHandle | None = None
        self._paused = False
        self.stopped = False  # nothing is handed out any more, and no topic joins

    # --- taking messages ---------------------------------------------------------------------------------------------

    def open_messages(self) -> Iterator[Message]:
        return iter(()) if self._current is None else self._current.open_messages()

    async def refill_now(self, count: int | None) -> bool:
        """Opens the next delivery that is here.

        Raises what a topic failed with, or what is wrong with a damaged delivery.
        """
        if self.stopped or await self._open_next(count):
            return not self.stopped
        if self._current is not None:
            self._current.found_empty()
        return False

    @property
    def ended(self) -> bool:
        """See Receiving."""
        return self.stopped or (self._last_failure is not None and not self.consumers)

    @property
    def at_end(self) -> bool:
        """All of its topics are at their ends, and there will be no others."""
        endless = self._changing is not None and self._changing.endless
        ended = bool(self.consumers) and all(consumer.at_end for consumer in self.consumers.values())
        return ended and not endless and not self._failures

    async def _open_next(self, count: int | None) -> bool:
        """Opens deliveries that are here until one has a message.

        Raises what a topic failed with, or what is wrong with a damaged delivery.
        """
        while self._current is None or not length_hint(self._current.open_messages()):
            if self._current is not None and self._current.open_delivery.withholds:
                await self._current.hand_out(count)
                continue
            if self._failures:
                raise self._failures.pop(0)
            if not self._ready:
                if not self.consumers and (self._changing is None or not self._changing.endless):
                    failure = self._last_failure or AlreadyClosed(f"{self.what} has no topic any more")
                    raise copy_of(failure)
                return False
            consumer = next(iter(self._ready))
            del self._ready[consumer]
            self._current = consumer
            try:
                consumer.open_next()
            finally:
                if consumer.has_next:
                    self._ready[consumer] = None
        return True

    def _woken(self, consumer: TopicConsumer) -> None:
        """Something arrived for a topic, or nothing more will."""
        if consumer.failure is not None and self.consumers.get(consumer.topic) is consumer:
            self._failed(consumer, consumer.failure)
        elif consumer.has_next:
            self._ready[consumer] = None
        self.arrived.set()

    def _failed(self, consumer: TopicConsumer, error: MagnetarError) -> None:
        changing, others = self._changing, self.consumers.keys() - {consumer.topic}
        if changing is not None and isinstance(error, _GONE) and changing.gone(consumer.topic, others):
            _log.info("%s: topic %s is gone", self.what, consumer.topic)
            if consumer.topic in self._made:
                changing.made_again(consumer.topic)
        else:
            self._failures.append(error)
            self._last_failure = error
        self._remove(consumer)

    # --- topics come and go ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Opens all topics. Raises the first error, except of a pattern's topic that was deleted just now."""
        changing = self._changing
        if changing is None:
            await self._open_topics(self._named)
            return
        await changing.begin()
        await self._open_topics(await changing.all())
        self._discovery = LongTask(f"the topics of {self.what}", partial(self._discover, changing))

    async def _open_topics(self, topics: list[str]) -> None:
        async def open_one(consumer: TopicConsumer) -> None:
            try:
                await consumer.open()
            except BaseException as error:
                self._remove(consumer)
                may_go = self._changing is not None and self._changing.endless
                if not (may_go and isinstance(error, _GONE)):
                    raise

        later = self._discovery is not None
        new = [
            self._new_consumer(one, self._woken, later)
            for one in dict.fromkeys(self._expand(topics))
            if one not in self.consumers
        ]
        for consumer in new:
            self.consumers[consumer.topic] = consumer
            if self._paused:
                consumer.pause()
        self._share_queue()
        await side_by_side({consumer.topic: partial(open_one, consumer) for consumer in new})

    def _remove(self, consumer: TopicConsumer) -> None:
        self.consumers.pop(consumer.topic, None)
        self._made.discard(consumer.topic)
        self._ready.pop(consumer, None)
        if self._current is consumer:
            self._current = None
        consumer.abort()
        if self._sharing is None and not self.stopped:
            self._sharing = asyncio.get_running_loop().call_later(SHARE_OUT_S, self._share_queue)

    def _share_queue(self) -> None:
        if self._sharing is not None:
            self._sharing.cancel()
            self._sharing = None
        for consumer in self.consumers.values():
            consumer.share_queue(len(self.consumers))

    async def _discover(self, changing: ChangingTopics) -> None:
        """Topics that are new join, those that are gone leave: partitions when their brokers say so."""
        while True:
            changes = await changing.next()
            try:
                if changes is None:
                    topics = await changing.all()
                    there = set(self._expand(topics))
                    if changing.endless:
                        self._leave([topic for topic in self.consumers if topic not in there])
                else:
                    topics = changes.made
                    self._made.update(topic for topic in self._expand(topics) if topic in self.consumers)
                    self._leave([topic for topic in changes.deleted if topic in self.consumers])
                await self._open_topics(topics)
            except MagnetarError as error:
                _log.warning("%s: not all of its topics could be found and opened: %s", self.what, error)

    def _leave(self, topics: list[str]) -> None:
        for topic in topics:
            _log.info("%s: topic %s is gone", self.what, topic)
            self._remove(self.consumers[topic])

    def consumer_of(self, message: Message) -> TopicConsumer:
        return self.acknowledger.consumer_of(message)

    # --- all topics together -----------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return any(consumer.active for consumer in self.consumers.values())

    @property
    def trimmed_gaps(self) -> int:
        """How often messages were trimmed before they were read, in the topics that are consumed now."""
        return sum(consumer.trimmed_gaps for consumer in self.consumers.values())

    @property
    def unfinished_messages(self) -> int:
        """See Receiving; in the topics that are consumed now."""
        return sum(consumer.unfinished_messages for consumer in self.consumers.values())

    def pause(self) -> None:
        self._paused = True
        for consumer in self.consumers.values():
            consumer.pause()

    def resume(self) -> None:
        self._paused = False
        for consumer in self.consumers.values():
            consumer.resume()

    async def last_message_id(self, topic: str | None = None) -> MessageId | None:
        if topic is None:
            raise InvalidArgument(
                f"{self.what} has several topics: of which one is the last message wanted? last_message_ids() has all"
            )
        return await self.acknowledger.consumer_of_topic(str(TopicName.parse(topic))).last_message_id()

    async def last_message_ids(self) -> dict[str, MessageId | None]:
        consumers = dict(self.consumers)
        found = await asyncio.gather(*[consumer.last_message_id() for consumer in consumers.values()])
        return dict(zip(consumers, found, strict=True))

    async def has_message_available(self) -> bool:
        """See Reader."""
        consumers = self.consumers.values()
        return any(await asyncio.gather(*[consumer.has_message_available() for consumer in consumers]))

    async def redeliver_unacknowledged(self) -> None:
        await self._all(TopicConsumer.redeliver_unacknowledged)

    async def seek(self, start: SeekTarget) -> None:
        """See Receiving. Raises as `all_of`; topics that could be moved are."""
        if isinstance(start, Message | MessageId):
            await self.acknowledger.consumer_of(start).seek(start)
            return
        if not callable(start):
            start_on_wire(start)  # one error for what is no position, instead of one for each topic
        await self._all(lambda consumer: consumer.seek(start))

    async def skip(self, error: EntryUnreadable) -> None:
        """See Receiving. Raises AlreadyClosed if its topic has left."""
        await self.acknowledger.consumer_of_topic(error.topic).skip(error)

    async def unsubscribe(self) -> None:
        """Deletes the subscription of each topic; the consumer is still to be closed.

        Raises as `all_of`: then the topics that it names are consumed as before, and the others have left.
        """
        consumers = list(self.consumers.values())
        try:
            await self._all(lambda consumer: consumer.unsubscribe())
        except MagnetarError as error:
            for consumer in consumers:
                if consumer.topic not in error.details.get("failed", ()):
                    self._remove(consumer)
            raise

    async def _all(self, call: Callable[[TopicConsumer], Awaitable[None]]) -> None:
        await all_of({topic: call(consumer) for topic, consumer in self.consumers.items()})

    async def close(self) -> None:
        """See Receiving. Cancelled, it does not wait for the broker."""
        self.stop()
        try:
            await self._all(TopicConsumer.close)
        finally:
            self.abort()

    def abort(self) -> None:
        self.stop()
        for consumer in self.consumers.values():
            consumer.abort()
        self._on_closed()

    def stop(self) -> None:
        self.stopped = True
        self.arrived.set()
        for consumer in self.consumers.values():
            consumer.stop()
        if self._sharing is not None:
            self._sharing.cancel()
        if self._changing is not None:
            self._changing.close()
        if self._discovery is not None:
            self._pool.await_end(self._discovery.stop())
            self._discovery = None


class TopicsAcknowledger:
    """Gives each acknowledgement to the consumer of its topic."""

    def __init__(self, what: str, consumers: dict[str, TopicConsumer]) -> None:
        self._what = what
        self._consumers = consumers

    def consumer_of(self, message: Any) -> TopicConsumer:
        """Of the topic of a message, or of the only partition that an id names.

        Raises InvalidArgument if that cannot be told, AlreadyClosed if its topic has left.
        """
        if isinstance(message, Message):
            return self.consumer_of_topic(message.topic)
        if isinstance(message, MessageId) and message.partition != NO_PARTITION:
            found = [one for one in self._consumers.values() if one.partition == message.partition]
            if len(found) == 1:
                return found[0]
        raise InvalidArgument(
            f"{self._what} has several topics: it takes messages, not {type(message).__name__}, which names no topic (an id "
            "names a partition where nothing but the partitions of one topic is consumed)"
        )

    def consumer_of_topic(self, topic: str) -> TopicConsumer:
        """Raises AlreadyClosed if it has left."""
        consumer = self._consumers.get(topic)
        if consumer is None:
            raise AlreadyClosed(f"{self._what} does not consume {topic} any more")
        return consumer

    def _by_topic(self, messages: Any) -> list[tuple[TopicConsumer, Any]]:
        """Without the messages of topics that have left: they have nothing to be acknowledged to."""
        if isinstance(messages, Message) or (isinstance(messages, MessageBatch) and messages):
            first = messages if isinstance(messages, Message) else messages[0]
            consumer = self._consumers.get(first.topic)
            return [] if consumer is None else [(consumer, messages)]
        if isinstance(messages, MessageId | str | bytes) or not isinstance(messages, Iterable):
            return [(self.consumer_of(messages), messages)]
        topics: dict[str, list[Message | MessageId]] = {}
        for message in messages:
            topic = message.topic if isinstance(message, Message) else self.consumer_of(message).topic
            topics.setdefault(topic, []).append(message)
        return [(self._consumers[topic], mine) for topic, mine in topics.items() if topic in self._consumers]

    async def ack(self, messages: Acknowledgeable, *, receipt: bool = False) -> None:
        shares = self._by_topic(messages)
        if len(shares) == 1:
            await shares[0][0].acknowledger.ack(shares[0][1], receipt=receipt)
        else:
            await all_of({one.topic: one.acknowledger.ack(mine, receipt=receipt) for one, mine in shares})

    async def ack_cumulative(self, message: Message | MessageId, *, receipt: bool = False) -> None:
        """See Consumer.ack_cumulative."""
        await self.consumer_of(message).acknowledger.ack_cumulative(message, receipt=receipt)

    def nack(self, messages: Message | Iterable[Message], *, delay: Duration | None = None) -> None:
        for consumer, mine in self._by_topic(messages):
            consumer.acknowledger.nack(mine, delay=delay)
