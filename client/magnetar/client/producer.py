"""Producer: what applications send with, on top of the producer of its topic, or of those of its partitions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar, Unpack

from magnetar.proto.batch import Key, Properties
from magnetar.proto.errors import ProducerQueueFull
from magnetar.proto.ids import MessageId

from .durations import Duration
from .member import Member
from .partitioned_producer import PartitionedProducer
from .receipts import Receipt
from .topic.chunking import Source
from .topic.columns import MessageFields, checked_columns, some_failed
from .topic.producer import TopicProducer

F = TypeVar("F", bound=Callable[..., Any])


def _with_fields(method: F) -> F:
    """`help` shows the MessageFields one by one."""
    signature = inspect.signature(method)
    *own, _ = signature.parameters.values()
    fields = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in MessageFields.__annotations__.items()
    ]
    vars(method)["__signature__"] = signature.replace(parameters=[*own, *fields])
    return method


class Producer(Member):
    """Sends messages to one topic. Made by `Client.create_producer`; used from one event loop."""

    def __init__(self, producer: TopicProducer | PartitionedProducer) -> None:
        super().__init__(producer.topic, producer)
        self._producer = producer
        # A method that hands over costs 100 ns, as much as all that it hands over to.
        if type(self).send_nowait is _SEND_NOWAIT:  # else a subclass has its own
            self.send_nowait = producer.send_nowait  # type: ignore[method-assign]

    @property
    def name(self) -> str:
        """Name of the producer, given by the service unless chosen."""
        return self._producer.name

    @property
    def topic_epoch(self) -> int:
        """Which exclusive producer of its topic it is: each gets a higher number than all before. -1: it shares the topic.

        Of a partitioned topic that of partition 0.
        """
        return self._producer.topic_epoch

    @property
    def last_sequence_id(self) -> int:
        """Of the last message that is stored, of this session or of earlier ones under this name; -1: none is known.

        The service knows names where the topic has deduplication. A program that sends with sequence ids of its own, the
        numbers of lines for one, goes on behind this.

        Each partition counts for itself. Of a partitioned topic this is the smallest: behind it something may be missing.
        """
        return self._producer.last_sequence_id

    @property
    def ended(self) -> bool:
        """True once nothing can be sent any more: it was closed, or refused by the service for good."""
        return self._producer.ended

    @property
    def pending_bytes(self) -> int:
        """What is sent and not confirmed, as it counts against max_pending_bytes."""
        return self._producer.pending_bytes

    def send_nowait(
        self,
        value: bytes | None,
        key: Key = None,
        *,
        properties: Properties | None = None,
        event_time: datetime | int | None = None,
        sequence_id: int | None = None,
        deliver_at: datetime | int | None = None,
        deliver_after: Duration | None = None,
    ) -> Receipt:
        """Sends in the background; await the receipt for the MessageId. None as value is a tombstone for its key.

        event_time, deliver_at: a datetime (local if it has no tzinfo) or ms since the epoch; deliver_after: seconds or a
        timedelta from now. shared and key_shared consumers get the message then, at most 10 ms late by the clocks of client
        and broker; the others get it at once, as all do if the time has passed. Numbers below 10**12, of 2001, are refused
        as deliver_at: they are seconds.

        sequence_id: the message's number among those of this producer, which rise, with or without gaps; None: the next.
        Where the topic has deduplication, what is at or below the last one that was stored under the producer's name is not
        stored again, and `is_duplicate` of its id is true. When a message fails for another reason than a wrong call, a
        producer that was given sequence ids has `ended`, so that nothing is stored behind it: open it anew, and go on behind
        its `last_sequence_id`.

        Raises ProducerQueueFull at the memory bound, MessageTooLarge, SequenceIdError for an id that does not rise,
        InvalidArgument, AlreadyClosed; awaiting the receipt raises what went wrong later.
        """
        return self._producer.send_nowait(
            value,
            key,
            properties=properties,
            event_time=event_time,
            sequence_id=sequence_id,
            deliver_at=deliver_at,
            deliver_after=deliver_after,
        )

    @_with_fields
    async def send(self, value: bytes | None, key: Key = None, **more: Unpack[MessageFields]) -> MessageId:
        """Sends and waits until the message is durable on the ack quorum; returns its id.

        At the memory bound it waits for room, at most send_timeout (block_when_full=False: raises ProducerQueueFull).
        Takes and raises what `send_nowait` does, and raises SendTimeout.
        """
        try:
            receipt = self.send_nowait(value, key, **more)
        except ProducerQueueFull:
            if not self._producer.options.block_when_full:
                raise
            receipt = await self._producer.send_when_room(value, key, **more)
        return await receipt

    async def send_many(
        self,
        values: Sequence[bytes | None],
        *,
        keys: Sequence[Key] | None = None,
        properties: Sequence[Properties | None] | None = None,
        event_times: Sequence[datetime | int | None] | None = None,
        sequence_ids: Sequence[int] | None = None,
        deliver_at: Sequence[datetime | int | None] | None = None,
    ) -> list[MessageId]:
        """Sends many messages and waits until all are durable; returns their ids.

        The fast way: nothing runs per message. They are one batch (cut at 10,000 messages or 1 MiB), and share one with what
        is sent meanwhile if they are less than half of a batch, and have values and keys only. Messages that are due at
        different times are sent as several batches. Waits for room and raises as `send`. The error of a call of which some
        messages failed has in `details["ids"]` the id of each message that is stored, and None for the others; its text says
        whether these may have been stored all the same.
        """
        columns = checked_columns(values, keys, properties, event_times, sequence_ids, deliver_at)
        ids, failure = await self._producer.store_columns(columns)
        if failure is not None:
            raise some_failed(failure, ids, len(columns.values)) if ids else failure
        return ids  # type: ignore[return-value]

    @_with_fields
    async def send_stream(self, source: Source, key: Key = None, **more: Unpack[MessageFields]) -> MessageId:
        """Sends what a binary file or an iterable of bytes (asynchronous or not) has as one message, however large it is.

        At most two chunks of it are in memory here, beside what max_pending_bytes lets be under way. Whoever sends
        meanwhile waits until the source has ended (`send_nowait` raises ProducerQueueFull). Returns when all of it is
        durable. When the source raises, or this call is cancelled, the message is never finished: consumers let go of it.
        Raises as `send`, and InvalidArgument for a producer without chunking.
        """
        return await (await self._producer.send_stream(source, key, **more))

    async def flush(self) -> None:
        """Waits until everything sent so far is durable. Raises what a message failed with if nobody has seen it yet."""
        await self._producer.flush()


_SEND_NOWAIT = Producer.send_nowait
