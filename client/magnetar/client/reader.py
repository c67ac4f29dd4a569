"""Reader: reads a topic from a position on and acknowledges nothing.

Its subscription is not durable: the broker deletes it when the reader leaves.
"""

from __future__ import annotations

from .durations import Duration
from .messages import Message
from .receiving import Receiving
from .topic.consumer import TopicConsumer


class Reader(Receiving):
    """Reads one topic. Made by `Client.create_reader`."""

    def __init__(self, topic: str, consumer: TopicConsumer) -> None:
        super().__init__(topic, consumer)
        self._consumer = consumer

    async def read_next(self, timeout: Duration | None = None) -> Message:
        """As `receive`."""
        return await self.receive(timeout)

    async def has_message_available(self) -> bool:
        """True if there is a message behind the reader's position, or at or behind its start if nothing was read yet."""
        if self._consumer.has_queued:
            return True
        last = await self._consumer.last_message_id()
        self._consumer.open_delivery.note_handed_out()
        return last is not None and self._consumer.position.is_behind(last)
