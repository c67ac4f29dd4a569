"""Taking messages and seeking, which consumers and readers have in common; and Reader, which does nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from itertools import islice
from typing import Any

from magnetar.proto.errors import (
    AlreadyClosed,
    EntryUnreadable,
    InvalidArgument,
    ReceiveTimeout,
    TopicTerminated,
)
from magnetar.proto.ids import MessageId
from magnetar.runtime.timeouts import TimeLimit

from .durations import Duration, in_seconds
from .member import Member
from .messages import Message, MessageBatch, SeekTarget, StreamedMessage
from .topic.consumer import TopicConsumer
from .topic.open_delivery import ALL_HERE
from .topics_consumer import TopicsConsumer


class Receiving(Member):
    """Base of Consumer and Reader: a delivery is open at a time, and what is left of it is handed out first."""

    def __init__(self, topic: str, source: TopicConsumer | TopicsConsumer) -> None:
        super().__init__(topic, source)
        self._source = source

    @property
    def trimmed_gaps(self) -> int:
        """How often messages were trimmed that were to come next, so that it went on behind them."""
        return self._source.trimmed_gaps

    @property
    def unfinished_messages(self) -> int:
        """How many messages in chunks, and chunks without those before them, were dropped: the rest can never come."""
        return self._source.unfinished_messages

    @property
    def ended(self) -> bool:
        """True once nothing can be received any more: it was stopped or closed, or the service refused it for good."""
        return self._source.ended

    @property
    def reached_end(self) -> bool:
        """True when the topic, or each of several, is terminated and nothing is left to be received.

        Nothing comes any more unless this seeks back, or gives back what it has: what was nacked comes again before. With
        shared and key_shared what other consumers hold may still come here when they leave: the end is reached when they
        have acknowledged it. A consumer of a pattern, and with retry=True of the retry topics, goes on for those.
        """
        return self._source.at_end

    def stop(self) -> None:
        """Hands out nothing more, for good: `async for` and `batches` end behind what is in hand, `receive` raises.

        What is in hand can be acknowledged until this is closed; what waits here comes again then.
        """
        self._source.stop()

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages; ends when this is stopped or closed, and at the end of a terminated topic (`reached_end`).

        Leaving the loop loses nothing: the next one goes on.
        """
        source = self._source
        while True:
            for message in source.open_messages():
                yield message
            if not await self._refill(None):
                return

    async def receive(self, timeout: Duration | None = None) -> Message:
        """The next message. Raises ReceiveTimeout after `timeout` (None: waits for ever), AlreadyClosed once it is stopped,
        and TopicTerminated once everything of a terminated topic was received.

        Raises EntryUnreadable, once, where an entry is damaged on all its replicas: `skip` or `seek` goes on behind it.
        A call that is cancelled loses no message.
        """
        for message in self._source.open_messages():
            return message
        await self._wait_for_message(timeout)
        # In the same step as the end of the wait: a cancellation comes before the message is taken, or never.
        return next(self._source.open_messages())

    async def receive_batch(
        self, max_messages: int | None = None, timeout: Duration | None = None
    ) -> MessageBatch:
        """Messages that arrived together, decoded at once: one at least, and `max_messages` at most. Raises as `receive`."""
        if max_messages is not None:
            check_max_messages(max_messages)
        source = self._source
        batch = MessageBatch(islice(source.open_messages(), max_messages))
        if not batch:
            await self._wait_for_message(timeout, max_messages or ALL_HERE)
            batch = MessageBatch(islice(source.open_messages(), max_messages))
        return batch

    async def batches(self) -> AsyncIterator[MessageBatch]:
        """Messages as they arrived: each item is a non-empty sequence, decoded at once. Ends as iterating does."""
        source = self._source
        while True:
            if batch := MessageBatch(source.open_messages()):
                yield batch
            if not await self._refill(ALL_HERE):
                return

    async def stream(self, message: Message) -> AsyncGenerator[bytes, None]:
        """The value of a message in pieces: of one in chunks with stream_chunks=True as they come, else all of it at once.

        A message is read once. Whoever leaves the loop, acknowledges or nacks it does not want the rest, which is not kept.
        What nobody reads fills the receiver queue, and is let go if that keeps other messages out for too long. Raises
        MessageLost if the message comes again as another one (its connection was lost, a seek), AlreadyClosed.
        """
        if isinstance(message, StreamedMessage):
            try:
                async for piece in message.pieces:
                    yield piece
            finally:
                message.pieces.close()
        elif message.value is not None:
            yield message.value

    async def _wait_for_message(self, timeout: Duration | None = None, count: int = 1) -> None:
        """Returns when a message may be taken, which is not taken yet. Raises as `receive`."""
        source = self._source
        seconds = None if timeout is None else in_seconds(timeout)
        if seconds is not None and not seconds > 0:  # or not a number
            # After one turn of the loop. asyncio.timeout(0) would swallow a cancellation that is pending.
            await asyncio.sleep(0)
            if await source.refill_now(count):
                return
            if not source.stopped and not source.at_end:
                raise ReceiveTimeout(f"{source.what}: no message has arrived")
        late = f"{source.what}: no message within {seconds} s"
        async with TimeLimit(seconds, lambda: ReceiveTimeout(late)):
            if await self._refill(count):
                return
        if not source.stopped:
            raise TopicTerminated(f"{source.what} has received everything: its topic was terminated")
        raise AlreadyClosed(f"{source.what} was stopped, or is closed; open another one")

    async def _refill(self, count: int | None) -> bool:
        """Waits until a message may be taken; False when stopped, or at the end of all that there will be.

        Raises why nothing more will come, or what is wrong with a damaged delivery. count: see OpenDelivery.show.
        """
        source = self._source
        while not await source.refill_now(count):
            if source.stopped or source.at_end:
                return False
            source.arrived.clear()
            await source.arrived.wait()
        return True

    async def last_message_id(self, topic: str | None = None) -> MessageId | None:
        """The last message that is stored and can be received here, None if none is. Of several topics: of `topic`."""
        return await self._source.last_message_id(topic)

    async def last_message_ids(self) -> dict[str, MessageId | None]:
        """The same for each topic and partition that is consumed now, by full name."""
        return await self._source.last_message_ids()

    async def seek(self, start: SeekTarget) -> None:
        """Goes to "earliest", "latest", a message id or a message (inclusive), or a time (datetime or ms).

        A function gets the full name of each topic and returns one of these, or None to leave the topic where it is. Of
        several topics a message moves its own, and of a partitioned topic an id its partition; other ids are refused.

        What was received and not handed out is dropped; nothing from before the seek arrives after it. When it is refused,
        everything goes on as before it; when its outcome is not known, the consumer subscribes again.
        """
        await self._source.seek(start)

    async def skip(self, error: EntryUnreadable) -> None:
        """Goes on behind an entry that is damaged on all its replicas, which `receive` and all others like it raised.

        It is acknowledged as a whole, durably where the subscription is durable, and counted in `skipped_entries`.
        """
        if not isinstance(error, EntryUnreadable):
            raise InvalidArgument(f"skip takes the EntryUnreadable that was raised, not {error!r}")
        await self._source.skip(error)


class Reader(Receiving):
    """Reads a topic, or all of its partitions, from a position on, and acknowledges nothing. Made by `Client.create_reader`.

    Its subscription is not durable: the broker deletes it when the reader leaves.
    """

    async def read_next(self, timeout: Duration | None = None) -> Message:
        """As `receive`."""
        return await self.receive(timeout)

    async def has_message_available(self) -> bool:
        """True if there is a message behind the reader's position, or at or behind its start if nothing was read yet."""
        return await self._source.has_message_available()


def check_max_messages(count: Any) -> None:
    """Raises InvalidArgument."""
    if type(count) is not int or count < 1:
        raise InvalidArgument(f"max_messages must be a whole number, 1 or more, not {count!r}")
