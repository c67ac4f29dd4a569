"""A consumer: permits, acknowledgements, redelivery, seeks, and a reader's start. It subscribes again after each end.

    SUBSCRIBE --SUCCESS--> FLOW of the whole queue; from then on what the program took, whenever that is half of it
    CLOSE_CONSUMER, a lost connection    the queue is cleared, and so are the chunks that have come
    SEEK                                 the same; permits of what is thrown away are not given back
    REDELIVER of Exclusive and Failover  everything again, under the next consumer epoch; what has an older one is dropped

`attachment_id` of what is received tells where it came; `metadata` of SUBSCRIBE has it too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from magnetar.proto.compression import decompress_raw
from magnetar.proto.errors import AlreadyClosed, ConnectionLost, ReceiveTimeout
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.columns import CODECS
from magnetar.proto.pulsar.ids import ack_set_bits, signed
from magnetar.proto.ranges import Range
from support.pulsar_messages import read_frame

from .attachment import Attachment
from .connection import Connection
from .unacked import Id, Unacked

if TYPE_CHECKING:
    from .client import PulsarClient

ATTACHMENT = "attachment"  # of the metadata of SUBSCRIBE
EARLIEST = Id(-1, -1)


@dataclass(frozen=True, kw_only=True)
class ConsumerOptions:
    """See Java's `ConsumerBuilder`. Times in seconds."""

    subscription: str
    type: str = "exclusive"
    name: str = ""
    queue: int = 1000
    priority_level: int = 0
    hash_ranges: Sequence[Range] = ()  # sticky
    ack_sets: bool = False  # batch index acknowledgement
    nack_delay: float = 60.0
    ack_timeout: float | None = None
    incomplete_chunks: float = 60.0  # acknowledged when they are that old
    durable: bool = True
    start: Id | None = None  # of one that is not durable: the message behind it
    counts_hidden: bool = False  # gives permits back for what an ack set left out, as C++ does


@dataclass(eq=False)
class Received:
    """A message, `id` that of its first chunk."""

    value: bytes
    id: Id
    chunks: tuple[Id, ...]  # all of it is stored there
    key: str | None
    redelivery_count: int
    producer_name: str
    sequence_id: int
    attachment_id: int
    arrived: float  # loop time


@dataclass
class _Chunks:
    began: float
    parts: list[bytes] = field(default_factory=list)
    ids: list[Id] = field(default_factory=list)


class Consumer:
    """Made by `PulsarClient.subscribe`."""

    def __init__(
        self,
        client: PulsarClient,
        topic: str,
        id: int,
        options: ConsumerOptions,
        *,
        on_detached: Callable[[], None] = lambda: None,
        on_redelivery: Callable[[Sequence[tuple[int, int]]], None] = lambda entries: None,
    ) -> None:
        """`on_detached`: the broker takes back all that it has; `on_redelivery`: these entries, which it asks for again."""
        self.active = False  # of a failover subscription: it gets the messages
        self.reached_end = False
        self.attachment_id = 0
        self._on_detached = on_detached
        self._on_redelivery = on_redelivery
        self._client = client
        self._topic = topic
        self._id = id
        self._options = options
        self._in_order = options.type in ("exclusive", "failover")
        self._epoch = 0
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Received] = deque()
        self._taken = 0  # of which permits are to be given back
        self._paused = False
        self._wakeup: asyncio.Future[None] | None = None
        self._unacked = Unacked(ack_sets=options.ack_sets)
        self._chunks: dict[str, _Chunks] = {}
        self._handed: dict[
            Id, tuple[float, tuple[Id, ...]]
        ] = {}  # to be acknowledged until then, and where it is
        self._nacked: dict[Id, tuple[float, tuple[Id, ...]]] = {}  # to be redelivered then
        self._timer: asyncio.TimerHandle | None = None
        self._last = options.start  # handed out by a reader
        self.attachment = Attachment(
            client,
            topic,
            ("consumer", id),
            self,
            open=self._open,
            opened=self._opened,
            give_up=self._close_at,
        )

    # --- receiving ---------------------------------------------------------------------------------------------------

    async def receive(self, most: int, timeout: float) -> list[Received]:
        """At most so many. Raises ReceiveTimeout."""
        deadline = self._loop.time() + timeout
        while not self._queue:
            if (left := deadline - self._loop.time()) <= 0:
                raise ReceiveTimeout(f"no message within {timeout:g} s")
            self._wakeup = self._loop.create_future()
            try:
                async with asyncio.timeout(left):
                    await self._wakeup
            except TimeoutError:
                pass
        bite = [self._queue.popleft() for _ in range(min(most, len(self._queue)))]
        if self._options.ack_timeout:
            until = self._loop.time() + self._options.ack_timeout
            self._handed.update({one.id: (until, one.chunks) for one in bite})
            self._schedule()
        self._last = bite[-1].id
        self._returned(len(bite))  # chunks but the last ones have given theirs back when they came
        return bite

    def pause(self) -> None:
        """Gives no permits."""
        self._paused = True

    def resume(self) -> None:
        """Goes on."""
        self._paused = False
        self._returned(0)

    def _returned(self, messages: int) -> None:
        self._taken += messages
        connection = self.attachment.connection
        if self._taken >= max(self._options.queue // 2, 1) and connection is not None and not self._paused:
            connection.send(wire.CommandFlow(consumer_id=self._id, message_permits=self._taken))
            self._taken = 0

    # --- acknowledging -----------------------------------------------------------------------------------------------

    async def ack(self, messages: Iterable[Received], *, receipt: bool) -> list[Received]:
        """Those that are acknowledged now: of batches without ack sets only what is whole. Raises MagnetarError."""
        messages = list(messages)
        ids = [id for one in messages for id in one.chunks]
        self._done(messages)
        named, covered = self._unacked.acknowledge(ids)
        await self._send_ack("INDIVIDUAL", named, receipt=receipt)
        whole = set(covered)
        return [one for one in messages if whole.issuperset(one.chunks)]

    async def ack_cumulative(self, message: Received, *, receipt: bool) -> bool:
        """False: of its batch nothing is acknowledged. Raises MagnetarError."""
        last = max(message.chunks)
        for id in [id for id in {**self._handed, **self._nacked} if id <= last]:
            self._handed.pop(id, None)
            self._nacked.pop(id, None)
        named, whole = self._unacked.acknowledge_up_to(last)
        await self._send_ack("CUMULATIVE", [named], receipt=receipt)
        return whole

    async def _send_ack(self, kind: str, ids: list[wire.MessageIdData], *, receipt: bool) -> None:
        if not ids:
            return
        connection = self.attachment.connection
        if connection is None:
            raise ConnectionLost("there is no connection to acknowledge on")
        command = wire.CommandAck(consumer_id=self._id, ack_type=kind, message_id=ids)
        if receipt:
            await connection.ask(command, self._client.operation_timeout_s)
        else:
            connection.send(command)

    def nack(self, message: Received) -> None:
        """Asked for again after a while."""
        self._handed.pop(message.id, None)
        self._nacked[message.id] = self._loop.time() + self._options.nack_delay, message.chunks
        self._schedule()

    def _done(self, messages: list[Received]) -> None:
        for one in messages:
            self._handed.pop(one.id, None)
            self._nacked.pop(one.id, None)

    def _schedule(self) -> None:
        """Looks for what is due."""
        times = [at for waiting in (self._handed, self._nacked) for at, _ in waiting.values()]
        times += [one.began + self._options.incomplete_chunks for one in self._chunks.values()]
        if times and self._timer is None:
            self._timer = self._loop.call_at(max(min(times), self._loop.time() + 0.01), self._due)

    def _due(self) -> None:
        self._timer = None
        now, connection = self._loop.time(), self.attachment.connection
        if connection is not None:
            due = [
                (id, chunks)
                for waiting in (self._handed, self._nacked)
                for id, (at, chunks) in waiting.items()
                if at <= now
            ]
            for id, _ in due:
                self._handed.pop(id, None)
                self._nacked.pop(id, None)
            if due:
                self._redeliver(connection, [chunk for _, chunks in due for chunk in chunks])
            for uuid in [
                uuid
                for uuid, one in self._chunks.items()
                if one.began + self._options.incomplete_chunks <= now
            ]:
                self._acknowledge_parts(connection, self._chunks.pop(uuid).ids)
        self._schedule()

    def _redeliver(self, connection: Connection, ids: list[Id]) -> None:
        command = wire.CommandRedeliverUnacknowledgedMessages(consumer_id=self._id)
        if self._in_order:
            self._epoch += 1
            command.consumer_epoch = self._epoch
            connection.send(command)
            self._forget()
            self._on_detached()
        else:
            entries = list(dict.fromkeys(id.key for id in ids))
            command.message_ids.extend([Id(*key).data() for key in entries])
            connection.send(command)
            self._on_redelivery(entries)

    def _acknowledge_parts(self, connection: Connection, ids: list[Id]) -> None:
        command = wire.CommandAck(
            consumer_id=self._id, ack_type="INDIVIDUAL", message_id=[id.data() for id in ids]
        )
        connection.send(command)

    def _forget(self, *, permits: bool = True) -> None:
        """Throws away what nobody was handed."""
        thrown = len(self._queue)
        self._queue.clear()
        self._chunks.clear()
        self._handed.clear()
        self._nacked.clear()
        if permits:
            self._returned(thrown)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def seek(self, to: Id) -> None:
        """To a message, which comes, or to the beginning. Raises MagnetarError."""
        command = wire.CommandSeek(consumer_id=self._id)
        behind = 0 if to.batch_index < 0 else (1 << to.batch_size) - (1 << to.batch_index)
        command.message_id.CopyFrom(to.data(behind if to.batch_index > 0 else None))
        await self._ask(command)
        self._forget(permits=False)

    async def last_message_id(self) -> Id:
        """Of the topic; -1, -1: it is empty. Raises MagnetarError."""
        answer = await self._ask(wire.CommandGetLastMessageId(consumer_id=self._id))
        last = answer.last_message_id
        return Id(signed(last.ledger_id), signed(last.entry_id), last.batch_index)

    async def unsubscribe(self) -> None:
        """Raises MagnetarError."""
        await self._ask(wire.CommandUnsubscribe(consumer_id=self._id))
        self.attachment.close()

    async def close(self) -> None:
        """Raises MagnetarError."""
        connection = self.attachment.close()
        if self._timer is not None:
            self._timer.cancel()
        if connection is not None and not connection.closed:
            await connection.ask(
                wire.CommandCloseConsumer(consumer_id=self._id), self._client.operation_timeout_s
            )

    async def _ask(self, command: Any) -> Any:
        if self.attachment.ended is not None:
            raise AlreadyClosed("the consumer has ended")
        if self.attachment.connection is None:
            raise ConnectionLost("there is no connection to ask on")
        return await self.attachment.connection.ask(command, self._client.operation_timeout_s)

    # --- attachment --------------------------------------------------------------------------------------------------

    async def _open(self, connection: Connection) -> None:
        options = self._options
        self._client.attachments += 1
        self.attachment_id = self._client.attachments
        command = wire.CommandSubscribe(
            topic=self._topic,
            subscription=options.subscription,
            sub_type=options.type.upper(),
            consumer_id=self._id,
            consumer_name=options.name,
            priority_level=options.priority_level,
            durable=options.durable,
            initial_position=wire.CommandSubscribe.EARLIEST,
        )
        command.metadata.add(key=ATTACHMENT, value=str(self.attachment_id))
        if self._in_order:
            command.consumer_epoch = self._epoch
        if options.hash_ranges:
            command.key_shared_meta.key_shared_mode = wire.KeySharedMeta.STICKY
            for first, last in options.hash_ranges:
                command.key_shared_meta.hash_ranges.add(start=first, end=last)
        if self._last is not None and not options.durable:
            command.start_message_id.CopyFrom(self._last.data())
        self._forget(permits=False)
        self._taken = 0
        self.active = False
        await connection.ask(command, self._client.operation_timeout_s)

    def _opened(self) -> None:
        connection = self.attachment.connection
        assert connection is not None
        self._on_detached()
        connection.send(wire.CommandFlow(consumer_id=self._id, message_permits=self._options.queue))

    def _close_at(self, connection: Connection) -> None:
        connection.send(wire.CommandCloseConsumer(consumer_id=self._id, request_id=0))

    def detached(self, connection: Connection) -> None:
        """See Handler."""
        if self.attachment.lost(connection):
            self.active = False
            self._unacked.clear()
            self._forget(permits=False)
            self._on_detached()

    # --- in ----------------------------------------------------------------------------------------------------------

    def received(self, name: str, command: Any, rest: bytes) -> None:
        """See Handler."""
        if name == "message":
            self._message(command, rest)
        elif name == "reached_end_of_topic":
            self.reached_end = True
        elif self.active != command.is_active:
            self.active = command.is_active
            self._forget()
            self._on_detached()

    def _message(self, command: wire.CommandMessage, rest: bytes) -> None:
        metadata, found = read_frame(rest)
        batched = metadata.HasField("num_messages_in_batch")
        all_bits = (1 << len(found)) - 1
        bits = ack_set_bits(command.ack_set) & all_bits if command.ack_set else all_bits
        shown = bits.bit_count()
        if self._in_order and command.consumer_epoch < self._epoch:
            self._returned(shown)
            return
        key = signed(command.message_id.ledger_id), signed(command.message_id.entry_id)
        if batched:  # whatever is hidden of it: clients take that for unacknowledged, too
            self._unacked[key] = all_bits
        if self._options.counts_hidden:
            self._returned(len(found) - shown)
        for number, (one, value) in enumerate(found):
            if not bits >> number & 1:
                continue
            id = Id(*key, number, len(found)) if batched else Id(*key)
            if self._last is not None and not self._options.durable and id <= self._last:
                self._returned(1)
                continue
            if metadata.num_chunks_from_msg > 1:
                self._chunk(command, metadata, id, value)
                continue
            self._put(command, metadata, one or metadata, value, (id,), one.sequence_id if one else None)

    def _put(
        self,
        command: wire.CommandMessage,
        metadata: Any,
        head: Any,
        value: bytes,
        chunks: tuple[Id, ...],
        sequence_id: int | None = None,
    ) -> None:
        self._queue.append(
            Received(
                value,
                chunks[0],
                chunks,
                head.partition_key if head.HasField("partition_key") else None,
                command.redelivery_count,
                metadata.producer_name,
                metadata.sequence_id if sequence_id is None else sequence_id,
                self.attachment_id,
                self._loop.time(),
            )
        )
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    def _chunk(self, command: wire.CommandMessage, metadata: Any, id: Id, value: bytes) -> None:
        """A message begins anew with its first chunk; what came before, or does not follow, is acknowledged."""
        connection, uuid, number = self.attachment.connection, metadata.uuid, metadata.chunk_id
        known = self._chunks.get(uuid)
        if not number:
            if known is not None and connection is not None and known.ids[0] != id:
                self._acknowledge_parts(connection, known.ids)
            known = self._chunks[uuid] = _Chunks(self._loop.time())
        elif known is None or number != len(known.parts):
            self._returned(1)
            if (known is None or id not in known.ids) and connection is not None:
                self._acknowledge_parts(connection, [id])
            return
        known.parts.append(value)
        known.ids.append(id)
        if len(known.parts) < metadata.num_chunks_from_msg:
            self._returned(1)
            self._schedule()
            return
        del self._chunks[uuid]
        whole = b"".join(known.parts)
        if metadata.compression:
            whole = decompress_raw(CODECS[metadata.compression], whole, metadata.uncompressed_size)
        self._put(command, metadata, metadata, whole, tuple(known.ids))
