"""Messages that a consumer could not process: to its retry topic and back, and to its dead-letter topic in the end.

    handed out --nack, timeout--> delivered again, redelivery count + 1 --above max_redeliver_count--> dead-letter topic
    handed out --reconsume_later--> retry topic --its time has come--> handed out --...--> dead-letter topic

A message is acknowledged when its copy is confirmed, never before: what cannot be written stays unacknowledged, and is
tried again when the broker delivers it again, after pauses that grow to a minute. A copy may be written twice (the
connection breaks between its receipt and the acknowledgement), as with any producer. Properties are those of Pulsar: a copy
has what the message had, and where it came from.

What these properties say is believed in this subscription's own retry topic alone, and only if LETTER_TOPIC and
REAL_SUBSCRIPTION say that the copy was written there by it: a letter that somebody sent again begins a new life. A
message that is a dead letter already (LETTER_TOPIC is where it stands) does not become one once more by a consumer of a
pattern, and at most MAX_GENERATIONS times by one that names its topics: then it is handed out like any other, so that
subscriptions that consume each other's letters come to an end.

What is not due in a retry topic is given back and asked for when it is, so that its payload does not wait here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from magnetar.proto.errors import AlreadyClosed, InvalidArgument, MagnetarError
from magnetar.proto.ids import MessageId, TopicName
from magnetar.runtime.tasks import TaskSet, awaited

from .durations import Duration
from .messages import Delivery, Message, StreamedMessage
from .options import DeadLetterPolicy, RedeliveryBackoff, checked_delay
from .producer import Producer
from .topic.consumer import TopicConsumer

_log = logging.getLogger("magnetar.client")

# Names of properties, as Pulsar's clients write and read them.
REAL_TOPIC = "REAL_TOPIC"  # where the message was published first
REAL_SUBSCRIPTION = "REAL_SUBSCRIPTION"
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"  # of that publication, as text
RECONSUMETIMES = "RECONSUMETIMES"  # how often it went through the retry topic
DELAY_TIME = "DELAY_TIME"  # ms from its publication in the retry topic on
# Magnetar's own: the topic that a copy was written to, and how often the message became a dead letter.
LETTER_TOPIC = "LETTER_TOPIC"
LETTER_GENERATION = "LETTER_GENERATION"
_OWN_PROPERTIES = {
    REAL_TOPIC, REAL_SUBSCRIPTION, ORIGIN_MESSAGE_ID, RECONSUMETIMES, DELAY_TIME, LETTER_TOPIC, LETTER_GENERATION
}  # fmt: skip
MAX_GENERATIONS = 3

# Dead letters being written, over all topics of a consumer; what is above is delivered again a little later.
MAX_LETTERS_IN_FLIGHT = 5_000
# Pauses before a letter that could not be written is tried again, by the number of attempts.
_BACKOFF = RedeliveryBackoff(min_delay=1.0, max_delay=60.0)
_LOG_INTERVAL_S = 60.0
_MAX_DIGITS = 15  # of a number in a property: more than 30,000 years of milliseconds
# How long closing waits for letters that are being written.
_SETTLE_TIMEOUT_S = 5.0


class DeadLetters:
    """The dead-letter and retry topics of one consumer, whichever topics it has."""

    def __init__(
        self,
        what: str,
        subscription: str,
        policy: DeadLetterPolicy,
        open_producer: Callable[[str], Awaitable[Producer]],
        make_subscription: Callable[[str, str], Awaitable[None]],
        await_end: Callable[[asyncio.Task[Any]], None],
        *,
        of_letters: bool,
    ) -> None:
        """`make_subscription` makes one at the start of a topic, unless it is there. `await_end` takes cancelled tasks.

        `of_letters`: letters of others become dead letters here as well, MAX_GENERATIONS times: their topics were asked for.
        """
        self._what = what
        self._subscription = subscription
        self._policy = policy
        self._open_producer = open_producer
        self._make_subscription = make_subscription
        self._await_end = await_end
        self._max_generations = MAX_GENERATIONS if of_letters else 1
        self._loop = asyncio.get_running_loop()
        self._producers: dict[str, asyncio.Task[Producer]] = {}
        self._topics: dict[str, None] = {}  # that are consumed, without retry topics
        self._origins: dict[str, str] = {}  # retry topic -> the topic whose messages it has, or one of them
        self._tasks = TaskSet(f"dead letters of {what}")
        # Topic and id of dead letters that are being written: what comes again meanwhile is not written twice.
        self._in_flight: dict[tuple[str, MessageId], None] = {}
        self._last_warning_s = float("-inf")

    def with_retry_topics(self, topics: list[str], *, retry: bool) -> list[str]:
        """What is to be consumed for these topics: themselves, and each one's retry topic; one for all partitions."""
        self._topics.update(dict.fromkeys(map(_whole, topics)))
        if not retry:
            return topics
        wanted: dict[str, None] = {}
        for topic in topics:
            retry_topic = self._policy.retry_letter_topic(_whole(topic), self._subscription)
            self._origins[retry_topic] = _whole(topic)
            wanted |= {topic: None, retry_topic: None}
        return list(wanted)

    def is_retry_topic(self, topic: str) -> bool:
        """True for the retry topic of one that is consumed."""
        return _whole(topic) in self._origins

    def is_letter_topic(self, topic: str) -> bool:
        """True for what a pattern must not match, though it may look alike: this subscription's own letters."""
        policy, own = self._policy, (f"-{self._subscription}-DLQ", f"-{self._subscription}-RETRY")
        named = [str(TopicName.parse(name)) for name in (policy.topic, policy.retry_topic) if name]
        return _whole(topic) in named or _whole(topic).endswith(own)

    # --- of each delivery --------------------------------------------------------------------------------------------

    def takes(self, delivery: Delivery) -> bool:
        """See topic.consumer.DeliveryFilter."""
        return delivery.redelivery_count > self._policy.max_redeliver_count

    def take(self, consumer: TopicConsumer, messages: list[Message]) -> bool:
        """See topic.consumer.DeliveryFilter: to the dead-letter topic, in the background."""
        if any(self._generation(message) >= self._max_generations for message in messages):
            return False
        room = MAX_LETTERS_IN_FLIGHT - len(self._in_flight)
        new = [message for message in messages if (message.topic, message.id) not in self._in_flight]
        consumer.acknowledger.give_back(new[room:], _BACKOFF.min_delay, counted=True)
        if new := new[:room]:
            self._in_flight.update(((message.topic, message.id), None) for message in new)
            self._tasks.begin(self._write_dead_letters(consumer, new))
        return True

    def shown(self, consumer: TopicConsumer, messages: list[Message]) -> list[Message]:
        """See topic.consumer.DeliveryFilter: of a retry topic, gives back what is not due yet."""
        if not self.is_retry_topic(consumer.topic):
            return messages
        due: list[Message] = []
        now_ms = consumer.now_ms
        for message in messages:
            wait_ms = message.publish_time + _number(self._own_record(message), DELAY_TIME) - now_ms
            if wait_ms > 0:
                consumer.acknowledger.give_back([message], wait_ms / 1000, counted=False)
            else:
                due.append(message)
        return due

    async def _write_dead_letters(self, consumer: TopicConsumer, messages: list[Message]) -> None:
        try:
            outcomes = await asyncio.gather(
                *[self._write_dead_letter(consumer, message) for message in messages], return_exceptions=True
            )
        finally:
            for message in messages:
                self._in_flight.pop((message.topic, message.id), None)
        failed = [
            (message, error) for message, error in zip(messages, outcomes, strict=True) if error is not None
        ]
        # AlreadyClosed: the client is being closed.
        if failed and not consumer.stopped and not isinstance(failed[0][1], AlreadyClosed):
            attempts = messages[0].redelivery_count - self._policy.max_redeliver_count - 1
            pause = _BACKOFF.delay(attempts)
            self._warn(consumer.topic, len(failed), failed[0][1], pause)
            consumer.acknowledger.give_back([message for message, _ in failed], pause, counted=True)

    async def _write_dead_letter(self, consumer: TopicConsumer, message: Message) -> None:
        await self._send_dead(message, self._properties(message))
        await consumer.acknowledger.ack(message)

    def _warn(self, topic: str, count: int, error: BaseException, pause: float) -> None:
        now = self._loop.time()
        if now - self._last_warning_s >= _LOG_INTERVAL_S:
            self._last_warning_s = now
            _log.warning(
                "%s: %d messages of %s could not be written to the dead-letter topic; they stay unacknowledged, and are "
                "tried again after %g s: %s", self._what, count, topic, pause, error,
            )  # fmt: skip

    # --- reconsume_later ---------------------------------------------------------------------------------------------

    async def reconsume_later(
        self,
        consumer: TopicConsumer,
        message: Message,
        delay: Duration,
        properties: Mapping[str, str] | None,
    ) -> None:
        """See Consumer.reconsume_later."""
        delay_ms = round(1000 * checked_delay("delay", delay))
        if not self._origins:
            raise InvalidArgument("reconsume_later needs a retry topic: subscribe with retry=True")
        times = _number(self._own_record(message), RECONSUMETIMES) + 1
        copied = self._properties(message, properties or {})
        copied |= {RECONSUMETIMES: str(times), DELAY_TIME: str(delay_ms)}
        generation = self._generation(message)
        if times > self._policy.max_redeliver_count and generation < self._max_generations:
            await self._send_dead(message, copied)
        else:
            topic = self._policy.retry_letter_topic(self._origin(message), self._subscription)
            await self._send(
                topic, message, copied | ({LETTER_GENERATION: str(generation)} if generation else {})
            )
        await consumer.acknowledger.ack(message)

    # --- writing -----------------------------------------------------------------------------------------------------

    async def _send_dead(self, message: Message, properties: dict[str, str]) -> None:
        topic = self._policy.dead_letter_topic(self._origin(message), self._subscription)
        await self._send(topic, message, properties | {LETTER_GENERATION: str(self._generation(message) + 1)})

    def _own_record(self, message: Message) -> Mapping[str, str]:
        """What this subscription wrote about this life of the message: its properties, or nothing."""
        found = message.properties
        topic = _whole(message.topic)
        if topic not in self._origins or found.get(REAL_SUBSCRIPTION) != self._subscription:
            return {}
        return found if found.get(LETTER_TOPIC) == topic else {}

    @staticmethod
    def _generation(message: Message) -> int:
        """How often it became a dead letter before, of whichever subscription."""
        found = message.properties
        return _number(found, LETTER_GENERATION) if found.get(LETTER_TOPIC) == _whole(message.topic) else 0

    def _origin(self, message: Message) -> str:
        """The topic that a message was consumed from first; the whole one, of a message of a partition."""
        topic = _whole(message.topic)
        origin = self._origins.get(topic, topic)
        real = self._own_record(message).get(REAL_TOPIC, "")
        return real if real in self._topics else origin

    def _properties(self, message: Message, more: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """Those of the message and `more`, and where it came from."""
        record = self._own_record(message)
        origin = {
            REAL_TOPIC: record.get(REAL_TOPIC, _whole(message.topic)),
            REAL_SUBSCRIPTION: self._subscription,
            ORIGIN_MESSAGE_ID: record.get(ORIGIN_MESSAGE_ID, str(message.id)),
        }
        if RECONSUMETIMES in record:
            origin[RECONSUMETIMES] = record[RECONSUMETIMES]
        own = {name: value for name, value in message.properties.items() if name not in _OWN_PROPERTIES}
        return own | dict(more) | origin

    async def _send(self, topic: str, message: Message, properties: dict[str, str]) -> None:
        """Durable when it returns. Raises what the service says; then the next letter opens another producer."""
        opening = self._producers.get(topic)
        if opening is None:
            opening = self._producers[topic] = awaited(self._producer(topic))
        try:
            producer = await asyncio.shield(opening)
            more: dict[str, Any] = {
                "properties": properties | {LETTER_TOPIC: topic},
                "event_time": message.event_time,
            }
            if isinstance(message, StreamedMessage):
                await producer.send_stream(message.pieces, message.key, **more)
            else:
                await producer.send(message.value, message.key, **more)
        except MagnetarError:
            # Opening failed, or the service has ended the producer: the next letter opens another one.
            refused = opening.exception() is not None
            if (refused or opening.result().ended) and self._producers.get(topic) is opening:
                del self._producers[topic]
                if not refused:
                    opening.result().abort()
            raise

    async def _producer(self, topic: str) -> Producer:
        if self._policy.initial_subscription is not None and topic not in self._origins:
            await self._make_subscription(topic, self._policy.initial_subscription)
        return await self._open_producer(topic)

    # --- ending ------------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Waits for letters that are being written, 5 s at most, before the consumer closes."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=_SETTLE_TIMEOUT_S)

    def end(self) -> None:
        """Gives up what is being written: it stays unacknowledged."""
        openings, self._producers = list(self._producers.values()), {}
        for task in [*self._tasks, *openings]:
            if not task.done():
                task.cancel()
                self._await_end(task)
        for opening in openings:
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                opening.result().abort()


@lru_cache(1000)
def _whole(topic: str) -> str:
    """The topic that a partition is of; any other topic itself."""
    return str(TopicName.parse(topic).whole)


def _number(properties: Mapping[str, str], name: str) -> int:
    """A property that other clients may have written as well; 0 if it is not there, or no number."""
    text = properties.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else 0
