"""The partitions of a topic behind one producer.

Each partition has a `TopicProducer`; the `Router` says which of them gets a message. They fail, wait and are attached again
each for itself: what goes to another partition goes on. max_pending_bytes is shared evenly, so that one that waits for its
broker leaves room for the others.

    open --partition 0, then the others side by side--> open; one that cannot be opened: all are closed, its error is raised
    the service tells of more partitions --their producers are open--> messages go there as well
    ... of fewer, or of partitions that are made again --> the topic was deleted and made again: it goes on with those
    the topic is deleted --> each producer learns it from its broker; sends raise TopicNotFound
    another has taken a partition for itself --> all are fenced: half a topic is no access for oneself

Partition 0 is opened alone first: of two that want the topic for themselves one gets all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from magnetar.proto.batch import Columns, Key
from magnetar.proto.errors import (
    InvalidArgument,
    MagnetarError,
    PartitionNotFound,
    ProducerFenced,
    ProducerQueueFull,
    TopicNotFound,
)
from magnetar.proto.ids import MessageId, TopicName
from magnetar.runtime.tasks import LongTask

from .connection.calls import all_of, side_by_side
from .connection.pool import ConnectionPool
from .core.routing import OutgoingMessage, Router
from .options import ProducerOptions
from .receipts import Receipt, stored_ids
from .topic.chunking import Source
from .topic.columns import checked_key, cut_columns
from .topic.producer import TopicProducer
from .topics_watch import PartitionsWatch

_log = logging.getLogger("magnetar.client")

# What a partition that does not exist (any more) fails with.
_GONE = (TopicNotFound, PartitionNotFound)
# After so long it looks whether all partitions have a producer, even if nothing was told.
_LOOK_INTERVAL_S = 60.0


class PartitionedProducer:
    """See the module docstring. What users call is described in `Producer`."""

    def __init__(
        self,
        pool: ConnectionPool,
        options: ProducerOptions,
        watch: PartitionsWatch,
        new_producer: Callable[[ProducerOptions], TopicProducer],
        on_closed: Callable[[], object],
    ) -> None:
        self.topic = options.topic
        self.options = options
        self._pool = pool
        self._watch = watch
        self._new_producer = new_producer
        self._on_closed = on_closed
        self._router = Router(options.routing, options.routing_hash, watch.count, pool.rng.randrange)
        self._producers = [self._producer_of(number, watch.count) for number in range(watch.count)]
        # Where the open batch is that messages without a key go to, and what sends there; None: there is none.
        self._filling: TopicProducer | None = None
        self._send_to_filling: Callable[..., Receipt] | None = None
        self._growth: LongTask | None = None

    def _producer_of(self, number: int, partitions: int) -> TopicProducer:
        topic = str(TopicName.parse(self.topic).partition_of(number))
        producer = self._new_producer(
            replace(self.options, topic=topic, max_pending_bytes=self._share(partitions))
        )
        producer.on_batch_closed = self._batch_closed
        producer.on_failed = self._part_failed
        return producer

    def _share(self, partitions: int) -> int:
        return max(self.options.max_pending_bytes // partitions, 1)

    # --- sending -----------------------------------------------------------------------------------------------------

    def send_nowait(self, value: bytes | None, key: Key = None, **more: Any) -> Receipt:
        """See Producer.send_nowait; `more`: its other arguments."""
        send = self._send_to_filling
        try:
            if key is not None and not self._router.by_function:  # written out: 100 ns less
                send = self._producers[self._router.of_key[key]].send_nowait
            elif send is None or more:
                send = self._producer_for(value, key, more).send_nowait
            return send(value, key, **more) if more else send(value, key)
        except (TypeError, UnicodeEncodeError):
            checked_key(key)
            raise
        except MagnetarError as error:
            self._filling = self._send_to_filling = None  # it may have no open batch
            if isinstance(error, _GONE):
                self._watch.look_again()
            elif isinstance(error, ProducerQueueFull) and key is None and not self._router.by_function:
                for _ in self._producers:
                    producer = self._begin_batch()
                    if producer.send_nowait != send:
                        with contextlib.suppress(ProducerQueueFull):
                            return producer.send_nowait(value, **more)
            raise

    async def send_when_room(self, value: bytes | None, key: Key = None, **more: Any) -> Receipt:
        """See TopicProducer. A routing function is asked again."""
        return await self._producer_for(value, key, more).send_when_room(value, key, **more)

    async def send_stream(self, source: Source, key: Key = None, **more: Any) -> Receipt:
        """See TopicProducer. A routing function does not see the value."""
        return await self._producer_for(None, key, more).send_stream(source, key, **more)

    def _producer_for(self, value: bytes | None, key: Key, more: Mapping[str, Any]) -> TopicProducer:
        router = self._router
        if router.by_function:
            return self._producers[router.of_message(OutgoingMessage(value, key, more.get("properties")))]
        if key is None:
            _check_returns(more.get("sequence_id"))
            return self._filling or self._begin_batch()
        try:
            return self._producers[router.of_key[key]]
        except (TypeError, UnicodeEncodeError):
            checked_key(key)
            raise

    def _begin_batch(self) -> TopicProducer:
        """Of messages without a key. Those that follow go there until it is closed."""
        self._filling = producer = self._producers[self._router.of_batch(self._is_ready)]
        self._send_to_filling = producer.send_nowait
        return producer

    def _batch_closed(self, producer: TopicProducer) -> None:
        if producer is self._filling:
            self._filling = self._send_to_filling = None

    def _is_ready(self, number: int) -> bool:
        return self._producers[number].ready

    async def store_columns(self, columns: Columns) -> tuple[list[MessageId | None], MagnetarError | None]:
        """See TopicProducer. Everything is routed before anything is sent."""
        producers = self._producers
        if not self._router.by_function and (columns.keys is None or None in columns.keys):
            _check_returns(columns.sequence_ids)
        count = len(columns.values)
        pieces = cut_columns(columns, producers[0].max_message_bytes, chunking=self.options.chunking)
        parts: dict[int, Sequence[int]] = {}  # by partition: which messages
        if self._router.by_function or columns.keys is not None or len(pieces) < 2:
            parts = self._router.share_out(columns, self._is_ready)
        else:
            start = 0
            for piece, _ in pieces:
                partition = self._router.of_batch(self._is_ready)
                parts[partition] = [*parts.get(partition, ()), *range(start, start + len(piece.values))]
                start += len(piece.values)
        if len(parts) == 1:
            return await producers[next(iter(parts))].store_columns(columns)
        size = sum(size for _, size in pieces)
        sends = [(producers[partition], _part_of(columns, part)) for partition, part in parts.items()]
        if all(producer.has_room(size) for producer, _ in sends):  # nobody waits: no tasks
            sent = [await producer.send_columns(part) for producer, part in sends]
        else:
            sent = await asyncio.gather(*[producer.send_columns(part) for producer, part in sends])
        outcomes = [await stored_ids(*one) for one in sent]
        ids: list[MessageId | None] = [None] * count
        for part, (stored, _) in zip(parts.values(), outcomes, strict=True):
            for number, message_id in zip(part, stored):  # nothing is stored of what was not sent
                ids[number] = message_id
        return ids, next((failure for _, failure in outcomes if failure is not None), None)

    async def flush(self) -> None:
        """Raises as `all_of`."""
        await all_of({producer.topic: producer.flush() for producer in self._producers})

    # --- all partitions together -------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._producers[0].name

    @property
    def topic_epoch(self) -> int:
        return self._producers[0].topic_epoch

    @property
    def last_sequence_id(self) -> int:
        return min(producer.last_sequence_id for producer in self._producers)

    @property
    def pending_bytes(self) -> int:
        return sum(producer.pending_bytes for producer in self._producers)

    @property
    def ended(self) -> bool:
        return all(producer.ended for producer in self._producers)

    # --- opening, growing, leaving -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Raises as `all_of`."""
        first, *others = self._producers
        await first.open()
        with contextlib.suppress(MagnetarError):  # it is watched later
            await self._watch.begin()
        await self._open(others)
        for producer in self._producers:
            if isinstance(producer.failure, ProducerFenced):  # while the others were opened
                raise producer.failure
        self._growth = LongTask(f"the partitions of {self.topic}", self._follow)

    async def _open(self, producers: list[TopicProducer]) -> None:
        for producer in producers:
            producer.name = producer.name or self.name  # one for all partitions
        await side_by_side({producer.topic: producer.open for producer in producers})

    async def _follow(self) -> None:
        """When it could not open what is new, it begins again after a pause."""
        while True:
            await self._adapt(self._watch.count)
            await self._watch.next(_LOOK_INTERVAL_S)

    async def _adapt(self, count: int) -> None:
        """There are so many partitions. Raises as `all_of`; then all stays as it was."""
        old = self._producers
        made = {
            number: self._producer_of(number, count)
            for number in range(count)
            if number >= len(old) or isinstance(old[number].failure, _GONE)
        }
        if not count or not (made or count < len(old)):
            return
        try:
            await self._open(list(made.values()))
        except BaseException:
            for producer in made.values():
                producer.abort()
            raise
        self._producers = [made.get(number) or old[number] for number in range(count)]
        for producer in self._producers:
            producer.room.max_pending_bytes = self._share(count)
        for producer in old:
            if producer not in self._producers:
                producer.abort()
        self._filling = self._send_to_filling = None
        self._router.resize(count)
        _log.info("producer of %s: it has %d partitions now", self.topic, count)

    async def close(self) -> None:
        """See Member.close. Cancelled, it leaves without flushing."""
        self._stop_growing()
        try:
            await all_of({producer.topic: producer.close() for producer in self._producers})
        finally:
            self.abort()

    def abort(self) -> None:
        self._stop_growing()
        for producer in self._producers:
            producer.abort()
        self._on_closed()

    def _part_failed(self, error: MagnetarError) -> None:
        if isinstance(error, ProducerFenced) and self._growth is not None:
            self._stop_growing()
            for producer in self._producers:
                producer.fail(error)

    def _stop_growing(self) -> None:
        self._watch.close()
        if self._growth is not None:
            self._pool.await_end(self._growth.stop())
            self._growth = None


def _check_returns(sequence_ids: object) -> None:
    """Raises InvalidArgument if a message has a sequence id, but nothing by which it returns to the same partition."""
    if sequence_ids is not None:
        raise InvalidArgument(
            "on a partitioned topic a message with a sequence_id needs a key, or the producer a routing function: sent "
            "again, it would go to another partition, which takes it for stored or stores it twice"
        )


def _part_of(columns: Columns, numbers: Sequence[int]) -> Columns:
    return Columns._make(column and [column[number] for number in numbers] for column in columns)
