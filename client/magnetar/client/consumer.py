"""Consumer: what applications receive and acknowledge with, on top of the consumer of its topic, or of several."""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Iterable, Mapping

from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import MessageId

from .dead_letters import DeadLetters
from .durations import Duration
from .messages import Message
from .receiving import Receiving
from .topic.acknowledger import Acknowledgeable
from .topic.consumer import TopicConsumer
from .topics_consumer import TopicsConsumer


class _Done:
    """The result of a call that has nothing to wait for."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


_DONE = _Done()


class Consumer(Receiving):
    """Receives and acknowledges the messages of one subscription. Made by `Client.subscribe`."""

    def __init__(
        self,
        topic: str,
        subscription: str,
        consumer: TopicConsumer | TopicsConsumer,
        letters: DeadLetters | None = None,
    ) -> None:
        super().__init__(topic, consumer)
        self._subscription = subscription
        self._consumer = consumer
        self._letters = letters
        self._acknowledger = consumer.acknowledger
        # A method that hands over costs 100 ns, and a coroutine more: a third of what it hands over to.
        if type(self).ack is _ACK:  # else a subclass has its own
            self.ack = consumer.acknowledger.ack  # type: ignore[method-assign]

    @property
    def topics(self) -> list[str]:
        """Full names of the topics that are consumed now; with retry=True their retry topics are among them."""
        return list(self._consumer.consumers)

    @property
    def subscription(self) -> str:
        """Name of the subscription."""
        return self._subscription

    @property
    def active(self) -> bool:
        """True while the consumer is connected and gets messages; of a failover subscription one consumer does.

        When another consumer takes over, messages that wait here are dropped: they, and what was handed out and is not
        acknowledged, are delivered to that one.
        """
        return self._consumer.active

    async def ack(self, messages: Acknowledgeable, *, receipt: bool = False) -> None:
        """Acknowledges a message, a message id, a batch or any iterable of them.

        Queued, and sent within 100 ms or 1,000 messages. receipt=True returns when the cursor's change is durable: what was
        acknowledged so is never delivered again. Raises AlreadyClosed, RequestTimeout.
        """
        await self._acknowledger.ack(messages, receipt=receipt)

    async def ack_cumulative(self, message: Message | MessageId, *, receipt: bool = False) -> None:
        """Acknowledges everything up to `message`, included. Exclusive and failover only; grouped and receipt as `ack`."""
        await self._acknowledger.ack_cumulative(message, receipt=receipt)

    def nack(
        self, messages: Message | Iterable[Message], *, delay: Duration | None = None
    ) -> Awaitable[None]:
        """Has a message (or several) delivered again, unless it is acknowledged before. It is done without `await`, too.

        After `delay` seconds; None: after what nack_backoff says, else nack_delay. Of a message nacked again the last
        call counts, until its time comes; then the next delivery is what can be nacked. When this consumer leaves or loses
        its connection, everything that it has not acknowledged is delivered again at once. At most 100,000 messages wait for
        their time; above, those that are due first are due at once.
        """
        self._acknowledger.nack(messages, delay=delay)
        return _DONE

    async def redeliver_unacknowledged(self) -> None:
        """Has all that this consumer received and has not acknowledged delivered again at once, what was nacked as well.

        What waits here is dropped, and comes again as well. Exclusive and failover go back to the first message that is not
        acknowledged; a failover consumer that is not active has nothing. Redelivery counts rise; with a dead-letter policy
        those of what was handed out.
        """
        await self._consumer.redeliver_unacknowledged()

    async def reconsume_later(
        self, message: Message, delay: Duration = 0.0, *, properties: Mapping[str, str] | None = None
    ) -> None:
        """Has a message come again after `delay` seconds by way of the retry topic, and acknowledges it here.

        Unlike what is nacked it does not depend on this consumer while it waits. `properties` are added to its own. What has
        come back so `max_redeliver_count` times goes to the dead-letter topic instead.

        When this returns, the copy is durable; when it raises (as Producer.send), or is cancelled, the message stays
        unacknowledged.
        """
        if self._letters is None:
            raise InvalidArgument("reconsume_later needs a retry topic: subscribe with retry=True")
        if not isinstance(message, Message):
            raise InvalidArgument(f"reconsume_later takes a message, not {type(message).__name__}")
        consumer = self._consumer.consumer_of(message)
        await self._letters.reconsume_later(consumer, message, delay, properties)

    def pause(self) -> None:
        """Asks for no more messages until `resume`. What is here already, or under way, can still be received."""
        self._consumer.pause()

    def resume(self) -> None:
        """Ends `pause`."""
        self._consumer.resume()

    async def close(self) -> None:
        """Leaves the topic: hands out nothing more, as `stop`, and sends what is acknowledged until then.

        Dead letters that are being written are waited for, and a connection to send acknowledgements on, 5 s at most.
        Whoever acknowledges later gets AlreadyClosed.
        """
        self.stop()
        if self._letters is not None:
            try:
                await self._letters.settle()
            except BaseException:
                self.abort()
                raise
            self._letters.end()
        await super().close()

    def abort(self) -> None:
        """See Member."""
        if self._letters is not None:
            self._letters.end()
        super().abort()

    async def unsubscribe(self) -> None:
        """Deletes the subscription and closes the consumer."""
        await self._consumer.unsubscribe()
        await self.close()


_ACK = Consumer.ack
