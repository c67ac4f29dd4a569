"""What the facades `Consumer` and `Reader` share: taking messages and seeking."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from .member import Member
from .messages import Message, MessageBatch
from .options import Start
from .topic.consumer import TopicConsumer


class Receiving(Member):
    """Base of Consumer and Reader."""

    def __init__(self, topic: str, consumer: TopicConsumer) -> None:
        super().__init__(topic, consumer)
        self._consumer = consumer

    def __aiter__(self) -> AsyncIterator[Message]:
        """Messages, for ever; ends when this is closed. Leaving the loop loses nothing: the next one goes on."""
        return self._consumer.__aiter__()

    async def receive(self, timeout: float | None = None) -> Message:
        """The next message. Raises ReceiveTimeout after `timeout` seconds (None: waits for ever), AlreadyClosed."""
        return await self._consumer.receive(timeout)

    def batches(self) -> AsyncIterator[MessageBatch]:
        """Messages as they arrived: each item is a non-empty sequence, decoded at once. Ends when this is closed."""
        return self._consumer.batches()

    async def receive_batch(self) -> MessageBatch | None:
        """The next of `batches`; None when this is closed."""
        return await self._consumer.receive_batch()

    def open_messages(self) -> Iterator[Message]:
        """What is left of the open delivery; taking from it hands out."""
        return self._consumer.open_messages()

    async def refill(self) -> bool:
        """Waits until `open_messages` has one; False when closed. Raises why nothing more will come, or a damage."""
        return await self._consumer.refill()

    async def seek(self, start: Start | Message) -> None:
        """Goes to "earliest", "latest", a message id or a message (inclusive), or a time (datetime or ms).

        What was received and not handed out is dropped; nothing from before the seek arrives after it. When it is refused,
        everything goes on as before it; when its outcome is not known, the consumer subscribes again.
        """
        await self._consumer.seek(start)
