"""Consumer: what applications receive and acknowledge with, on top of the consumers of its topics (one, so far)."""

from __future__ import annotations

from collections.abc import Iterable

from magnetar.proto.ids import MessageId

from .messages import Message
from .receiving import Receiving
from .topic.acknowledger import Acknowledgeable
from .topic.consumer import TopicConsumer


class Consumer(Receiving):
    """Receives and acknowledges the messages of one subscription. Made by `Client.subscribe`."""

    def __init__(self, topic: str, subscription: str, consumer: TopicConsumer) -> None:
        super().__init__(topic, consumer)
        self._subscription = subscription
        self._acknowledger = consumer.acknowledger
        # A method that hands over costs 100 ns, and a coroutine more: a third of what it hands over to.
        self.ack = consumer.acknowledger.ack  # type: ignore[method-assign]

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

    def nack(self, messages: Message | Iterable[Message], *, delay: float | None = None) -> None:
        """Has a message (or several) delivered again, unless it is acknowledged before.

        After `delay` seconds; None: after what nack_backoff says, else nack_delay. Of a message nacked again the last
        call counts. When this consumer leaves or loses its connection, everything that it has not acknowledged is delivered
        again at once. At most 100,000 messages wait for their time; above, those that are due first are due at once.
        """
        self._acknowledger.nack(messages, delay=delay)

    async def unsubscribe(self) -> None:
        """Deletes the subscription and closes the consumer."""
        await self._consumer.unsubscribe()
        await self.close()
