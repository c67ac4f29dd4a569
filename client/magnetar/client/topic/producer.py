"""A producer of one topic: messages into batches, batches into groups, groups onto the connection, receipts back.

What is open is one batch (batching off: the messages of one loop turn). It is closed when it is full, at the end of the
loop turn in which it was opened if nothing is in flight, else after batching_max_delay or when everything in flight is
confirmed, whichever comes first.

A closed group is kept encoded until it settles; after a reconnect everything that is not confirmed is sent again, in order,
under a new epoch (CORRECTNESS.md rule 33).

Wakers: `writable` false of the connection stops writing, `writing_resumed` continues; a full memory bound stops `send`,
receipts and expiry continue it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from typing import Any

from magnetar.proto.batch import (
    GROUP_OVERHEAD_BYTES,
    Columns,
    EncodedBatches,
    Key,
    Properties,
    encode_columns,
    encode_group,
    encode_singles,
)
from magnetar.proto.batch_extensions import CHUNK_ID_BYTES
from magnetar.proto.commands import (
    RECEIPT_ROW,
    CloseProducer,
    Command,
    CreateProducer,
    Send,
    SendDelayed,
    SendFailed,
    decode_rows,
)
from magnetar.proto.commands import Receipt as ReceiptCommand
from magnetar.proto.compression import Compression
from magnetar.proto.errors import (
    Action,
    AlreadyClosed,
    FinalError,
    FrameTooLarge,
    InvalidArgument,
    MagnetarError,
    MessageLost,
    ProducerFenced,
    ProducerQueueFull,
    SendTimeout,
    SequenceIdError,
    TopicNotFound,
    TopicTerminated,
    error_from_wire,
)
from magnetar.proto.ids import MessageId, TopicName
from magnetar.proto.message_rules import checked_properties, checked_sequence_id
from magnetar.runtime.timeouts import TimeLimit

from ..connection.attachment import Attachment
from ..connection.broker_connection import BrokerConnection
from ..connection.pool import ConnectionPool
from ..durations import Duration
from ..options import ProducerOptions, time_in_ms
from ..receipts import Group, Receipt, copy_of
from .chunking import MIN_PIECE_BYTES, ChunkedMessage, Source, pieces_of
from .columns import (
    MESSAGE_OVERHEAD_BYTES,
    checked_key,
    checked_value,
    cut_columns,
    delivery_time,
    message_bytes,
    some_failed,
    too_large,
)
from .outbox import Outbox

log = logging.getLogger("magnetar.client")

_NO_RARE_COLUMNS = (None, None, None, None)
MAX_FAILED_GROUPS = 10_000  # remembered for `flush`: of more, the oldest are forgotten


class TopicProducer:
    """Attached to the broker of its topic. What users call is described in `Producer`."""

    def __init__(
        self,
        pool: ConnectionPool,
        options: ProducerOptions,
        producer_id: int,
        on_closed: Callable[[], object],
        *,
        copies: bool = False,
    ) -> None:
        """`copies`: of messages that were received, with more properties. They have no limit but the broker's."""
        self.topic = topic = options.topic
        self._partition = TopicName.parse(topic).partition
        self.name = options.name or ""  # given by the service unless chosen
        self.topic_epoch = -1  # under which it has the topic for itself
        self._pool = pool
        self.options = options
        self._id = producer_id
        self._loop = asyncio.get_running_loop()
        self._compression = Compression.parse(options.compression)
        self._blocked = asyncio.Lock()  # who waits for room, first come first served
        self._waiting = 0  # how many do; until they have sent nobody else does, and `_other_room` is the room
        self._turn_limit: asyncio.Timeout | None = None  # of who has the turn; see `_end_turn`
        self._turn_ended: MagnetarError | None = None
        self._streaming = False  # who has the turn sends a message in chunks
        self._streamed: ChunkedMessage | None = None  # the message, once one was sent
        self._room = asyncio.Event()  # set when pending bytes fall, or nothing is to be waited for any more
        self._budget = pool.pending_budget
        self._held = 0  # of the budget
        # A message without a sequence id of its own gets the next one, which is behind everything that was sent and all that
        # the broker has: through `_stored_through`, which lies between two batches. `_sent_through`: in closed groups.
        self._next_sequence_id = 0  # of the first message of the open batch while this has no column of them
        self._sent_through = self._stored_through = -1
        self._numbered = False  # the application has given one
        self._max_message_bytes = pool.options.max_message_bytes
        self._max_group_bytes = self._max_message_bytes + GROUP_OVERHEAD_BYTES
        self._copies = copies
        # The open batch: columns as long as `_values`, or None. One of the three says what still fits into it, the others
        # are -1: `_plain_room` while it has values only, `_keyed_room` while it has values and keys.
        self._group = Group(0, self._partition)
        self._values: list[bytes | None] = []
        self._keys: list[Key] | None = None
        self._properties: list[Properties | None] | None = None
        self._event_times_ms: list[int | None] | None = None
        self._sequence_ids: list[int] | None = None
        self._due_ms: list[int | None] | None = None
        self._plain_room = self._keyed_room = self._other_room = -1
        self._opened_bytes = 0
        self.on_batch_closed: Callable[[TopicProducer], object] | None = None  # it is about to be
        self._last_index = options.batching_max_messages - 1
        self._flush_handle: asyncio.Handle | None = None
        # Closed groups.
        self._outbox = Outbox()
        # Those that failed since the last `flush`, which raises the first error that nobody has seen.
        self._failed: deque[Group] = deque(maxlen=MAX_FAILED_GROUPS)
        self._expiry: asyncio.TimerHandle | None = None
        # The attachment.
        self._attachment = Attachment(
            pool, topic, producer_id, f"producer of {topic}", self, CloseProducer, on_closed
        )
        self._receipts_from: BrokerConnection | None = None  # of the current epoch, if they can come
        self._epoch = -1
        self._send_header = self._receipt_header = b""

    @property
    def last_sequence_id(self) -> int:
        return self._automatic_id - 1

    @property
    def _automatic_id(self) -> int:
        """What a message without a sequence id of its own gets."""
        return self._next_sequence_id + (len(self._values) if self._sequence_ids is None else 0)

    @property
    def pending_bytes(self) -> int:
        open_bytes = self._opened_bytes - self._open_room if self._values else 0
        return self._outbox.bytes + open_bytes

    # --- sending -----------------------------------------------------------------------------------------------------

    def send_nowait(
        self,
        value: bytes | None,
        key: Key = None,
        properties: Properties | None = None,
        event_time: datetime | int | None = None,
        sequence_id: int | None = None,
        deliver_at: datetime | int | None = None,
        deliver_after: Duration | None = None,
    ) -> Receipt:
        """See Producer.send_nowait, whose arguments have names only: here, each of these would cost every call 15 ns."""
        # The plain forms: 100 ns without the receipt, 160 with a key. All else is behind a room that is negative.
        if (
            value.__class__ is bytes
            and properties is None
            and event_time is None
            and sequence_id is None
            and deliver_at is None
            and deliver_after is None
        ):
            if key is None:
                room = self._plain_room - len(value) - MESSAGE_OVERHEAD_BYTES
                if room >= 0:
                    self._plain_room = room
                    group, values = self._group, self._values
                    index = len(values)
                    values.append(value)
                    if index == self._last_index:
                        self._close_batch()
                    return Receipt(group, index)
            elif key.__class__ is str and key.isascii():  # so it can be encoded, to as many bytes
                room = self._keyed_room - len(value) - len(key) - MESSAGE_OVERHEAD_BYTES
                if room >= 0:
                    self._keyed_room = room
                    group, values = self._group, self._values
                    index = len(values)
                    values.append(value)
                    self._keys.append(key)  # type: ignore[union-attr]
                    if index == self._last_index:
                        self._close_batch()
                    return Receipt(group, index)
        if self._waiting:
            self._check_open()
            raise self._queue_full()  # what is smaller than a message that waits must not overtake it
        due_ms = delivery_time(deliver_at, deliver_after, self._pool.clock.now_ms())
        return self._send_slowly(value, key, properties, event_time, sequence_id, due_ms)

    async def send_when_room(
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
        """Does what send_nowait does, after waiting for room."""
        due_ms = delivery_time(deliver_at, deliver_after, self._pool.clock.now_ms())
        size = message_bytes(checked_value(value), checked_key(key), checked_properties(properties))
        if value is not None and self._is_cut(size):
            return await self.send_stream(
                value,
                key,
                properties=properties,
                event_time=event_time,
                sequence_id=sequence_id,
                deliver_at=due_ms,
            )
        async with self._turn():
            await self._wait_for_room(size)
        return self._send_slowly(value, key, properties, event_time, sequence_id, due_ms, waited=True)

    # --- messages in chunks ------------------------------------------------------------------------------------------

    async def send_stream(
        self,
        source: Source,
        key: Key = None,
        *,
        properties: Properties | None = None,
        event_time: datetime | int | None = None,
        sequence_id: int | None = None,
        deliver_at: datetime | int | None = None,
        deliver_after: Duration | None = None,
    ) -> Receipt:
        """See Producer.send_stream; nobody else sends until all of it is in the outbox."""
        if not self.options.chunking:
            raise InvalidArgument(
                "send_stream is for producers with chunking=True; open one with that, or use send"
            )
        key, properties = checked_key(key), checked_properties(properties)
        event_time_ms = None if event_time is None else time_in_ms(event_time)
        due_ms = delivery_time(deliver_at, deliver_after, self._pool.clock.now_ms())
        async with self._turn():
            self._streaming = True
            warning = self._loop.call_later(self.options.send_timeout, self._warn_of_stream)
            try:
                sequence_id = self._checked_sequence_id(sequence_id)
                size = self._piece_bytes(key, properties)
                async with contextlib.aclosing(pieces_of(source, size)) as pieces:
                    async for piece, last in pieces:
                        await self._wait_for_room(message_bytes(piece, key, properties))
                        self._check_open()
                        message = self._streamed
                        if message is None and last:
                            return self._send_slowly(
                                piece, key, properties, event_time, sequence_id, due_ms, waited=True
                            )
                        if message is None:
                            message = self._streamed = self._begin_message(
                                key, properties, event_time_ms, sequence_id, due_ms
                            )
                        self._send_chunk(message, piece, last=last)
            finally:
                warning.cancel()
                message, self._streamed, self._streaming = self._streamed, None, False
        assert message is not None
        return Receipt(message.group, 0)

    def _warn_of_stream(self) -> None:
        if self._waiting > 1:
            log.warning(
                "producer of %s: %d calls wait until the source of a message in chunks ends",
                self.topic, self._waiting - 1,
            )  # fmt: skip

    def _is_cut(self, size: int) -> bool:
        """True if a message that counts so much is sent in chunks."""
        return self.options.chunking and size > self._max_message_bytes + MESSAGE_OVERHEAD_BYTES

    def _piece_bytes(self, key: Key, properties: Properties | None) -> int:
        """Of the value, in each chunk. Raises MessageTooLarge."""
        size = message_bytes(None, key, properties)
        if size + MIN_PIECE_BYTES > self._max_message_bytes + MESSAGE_OVERHEAD_BYTES:
            raise too_large(size, self._max_message_bytes)
        return self._max_message_bytes + MESSAGE_OVERHEAD_BYTES - size

    def _begin_message(
        self,
        key: Key,
        properties: Properties | None,
        event_time_ms: int | None,
        sequence_id: int,
        due_ms: int | None,
    ) -> ChunkedMessage:
        self._close_batch()
        chunk_id = self._pool.rng.getrandbits(8 * CHUNK_ID_BYTES).to_bytes(CHUNK_ID_BYTES)
        rows = (key, properties, event_time_ms, None, None, due_ms)
        first = Columns([None], *(None if one is None else [one] for one in rows))  # type: ignore[arg-type]
        return ChunkedMessage(Group(sequence_id, self._partition), chunk_id, first)

    def _send_chunk(self, message: ChunkedMessage, piece: bytes, *, last: bool) -> None:
        group, columns = message.next_chunk(piece, last=last)
        self._close_group(group, columns, MESSAGE_OVERHEAD_BYTES + len(piece))

    def _send_cut(self, message: ChunkedMessage, value: bytes, step: int) -> Receipt:
        """All of a message at once, for which there is room."""
        for start in range(0, len(value), step):
            self._send_chunk(message, value[start : start + step], last=start + step >= len(value))
        return Receipt(message.group, 0)

    # --- many messages -----------------------------------------------------------------------------------------------

    async def send_columns(self, columns: Columns) -> list[MessageId]:
        """See Producer.send_many, which has checked them."""
        ids, failure = await self.store_columns(columns)
        if failure is None:
            return ids  # type: ignore[return-value]
        raise some_failed(failure, ids, len(columns.values)) if ids else failure

    async def store_columns(self, columns: Columns) -> tuple[list[MessageId | None], MagnetarError | None]:
        """The same, as ids of what is stored and what went wrong. No ids: nothing was sent."""
        groups: list[Group] = []
        failure: MagnetarError | None = None
        try:
            for chunk, size in self._cut(columns):
                if self._waiting or self._budget.waiting or not self._fits(size):
                    if not self.options.block_when_full:
                        raise self._queue_full(size)
                    async with self._turn():
                        await self._wait_for_room(size)
                self._check_open()
                self._close_batch()
                own = chunk.sequence_ids
                group = Group(self._checked_sequence_id(None if own is None else own[0]), self._partition)
                groups.append(group)
                self._close_group(group, chunk, size)
                if group.error is not None:
                    break
        except MagnetarError as error:
            failure = error
        ids: list[MessageId | None] = []
        for group in groups:
            if not group.settled:
                await group
            ids += group.stored_ids()
            if group.error is not None:
                group.error_seen = True
                failure = failure or group.error
        return ids, failure

    async def flush(self) -> None:
        self._close_batch()
        group = self._outbox.last
        if group is not None:
            await group
        unseen = [failed for failed in self._failed if not failed.error_seen]
        self._failed.clear()
        if unseen:
            raise unseen[0].raisable_error()

    async def close(self) -> None:
        """See Member.close. Cancelled, it leaves without flushing."""
        await self._attachment.close()

    def abort(self) -> None:
        self._attachment.abort()

    # --- the open batch ----------------------------------------------------------------------------------------------

    def _send_slowly(
        self,
        value: bytes | None,
        key: Key,
        properties: Properties | None,
        event_time: datetime | int | None,
        sequence_id: int | None,
        due_ms: int | None,
        *,
        waited: bool = False,
    ) -> Receipt:
        """`waited`: for room, which it has."""
        self._check_open()
        value = checked_value(value)
        key = checked_key(key)
        properties = checked_properties(properties)
        event_time_ms = None if event_time is None else time_in_ms(event_time)
        size = message_bytes(value, key, properties)
        sequence_id = self._checked_sequence_id(sequence_id)
        if size > self._max_message_bytes + MESSAGE_OVERHEAD_BYTES:
            if value is not None and self._is_cut(size):
                step = self._piece_bytes(key, properties)
                if self.pending_bytes + size > self.options.max_pending_bytes or not self._budget.fits(size):
                    raise self._queue_full(size)
                if self._budget.waiting:
                    raise self._queue_full()
                message = self._begin_message(key, properties, event_time_ms, sequence_id, due_ms)
                return self._send_cut(message, value, step)
            if not self._copies:
                raise too_large(size, self._max_message_bytes)
        if self._values and (
            self._open_room < size or self._group.first_sequence_id <= self._stored_through < sequence_id
        ):
            self._close_batch()
        if not self._values:
            self._open_batch(size, sequence_id, waited=waited)
        self._append(value, key, properties, event_time_ms, sequence_id, due_ms, size)
        receipt = Receipt(self._group, len(self._values) - 1)
        if receipt.index >= self._last_index:
            self._close_batch()
        return receipt

    @property
    def _open_room(self) -> int:
        return max(self._plain_room, self._keyed_room, self._other_room)

    def _checked_sequence_id(self, given: int | None) -> int:
        """Of the next message. Raises SequenceIdError, InvalidArgument."""
        if given is None:
            return self._automatic_id
        self._numbered = True
        sent = self._sent_through
        if self._values:
            sent = self._automatic_id - 1 if self._sequence_ids is None else self._sequence_ids[-1]
        if checked_sequence_id(given) <= sent:
            raise SequenceIdError(
                f"the sequence id {given} follows {sent}, which this producer has sent already; they must rise"
            )
        return given

    def _open_batch(self, size: int, sequence_id: int, *, waited: bool) -> None:
        """Opens a batch that has room for `size` at least, or raises ProducerQueueFull."""
        if not self._fits(size) or (self._budget.waiting and not waited):
            raise self._queue_full(size)
        if sequence_id < self._next_sequence_id:
            self._sequence_ids = []
        else:
            self._next_sequence_id = sequence_id
        options = self.options
        room = min(
            options.batching_max_bytes,
            self._max_message_bytes,
            options.max_pending_bytes - self._outbox.bytes,
            self._budget.share,
        )
        self._opened_bytes = self._plain_room = max(room, size)
        self._hold(self._outbox.bytes + self._opened_bytes)
        self._group = Group(sequence_id, self._partition)
        if options.batching and self._outbox:
            self._flush_handle = self._loop.call_later(options.batching_max_delay, self._close_batch)
        else:
            self._flush_handle = self._loop.call_soon(self._close_batch)

    def _append(
        self,
        value: bytes | None,
        key: Key,
        properties: Properties | None,
        event_time_ms: int | None,
        sequence_id: int,
        due_ms: int | None,
        size: int,
    ) -> None:
        """Columns beside the values are made when the first message has one."""
        count = len(self._values)
        if sequence_id != self._automatic_id and self._sequence_ids is None:
            self._sequence_ids = list(range(self._next_sequence_id, self._automatic_id))
        if due_ms is not None and self._due_ms is None:
            self._due_ms = [None] * count
        if key is not None and self._keys is None:
            self._keys = [None] * count
        if properties is not None and self._properties is None:
            self._properties = [None] * count
        if event_time_ms is not None and self._event_times_ms is None:
            self._event_times_ms = [None] * count
        self._values.append(value)
        if self._keys is not None:
            self._keys.append(key)
        if self._properties is not None:
            self._properties.append(properties)
        if self._event_times_ms is not None:
            self._event_times_ms.append(event_time_ms)
        if self._sequence_ids is not None:
            self._sequence_ids.append(sequence_id)
            self._next_sequence_id = max(self._next_sequence_id, sequence_id + 1)
        if self._due_ms is not None:
            self._due_ms.append(due_ms)
        room = self._open_room - size
        self._plain_room = self._keyed_room = self._other_room = -1
        rare = (self._properties, self._event_times_ms, self._sequence_ids, self._due_ms)
        if rare != _NO_RARE_COLUMNS or self._waiting:
            self._other_room = room
        elif self._keys is not None:
            self._keyed_room = room
        else:
            self._plain_room = room

    def _close_batch(self) -> None:
        """Encodes the open batch, if there is one, and writes what can be written."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        if not self._values:
            return
        if self.on_batch_closed is not None:
            self.on_batch_closed(self)
        size = self._opened_bytes - self._open_room
        rare = (self._properties, self._event_times_ms, None, self._sequence_ids, self._due_ms)
        columns = Columns(self._values, self._keys, *rare)
        self._values = []
        self._keys = self._properties = self._event_times_ms = self._sequence_ids = self._due_ms = None
        self._plain_room = self._keyed_room = self._other_room = -1
        self._close_group(self._group, columns, size)

    def _close_group(self, group: Group, columns: Columns, size: int) -> None:
        group.message_count = len(columns.values)
        ids = columns.sequence_ids
        if ids and ids[-1] - ids[0] >= group.message_count:
            group.sequence_ids = ids
        try:
            encoded = self._encode(group, columns, self._compression)
            if encoded.largest > self._max_group_bytes:  # what cannot be compressed has grown
                encoded = self._encode(group, columns, Compression.NONE)
            if encoded.largest > self._max_group_bytes:
                raise too_large(encoded.largest, self._max_message_bytes)
        except Exception as error:
            # Every argument was checked at its call; what is left is, for example, a codec that is not installed.
            unknown = FinalError(f"{group.message_count} messages cannot be encoded: {error!r}")
            group.fail(error if isinstance(error, MagnetarError) else unknown)
            self._note_failed(group)
            return
        group.bytes = size
        group.deadline = self._loop.time() + self.options.send_timeout
        self._sent_through = group.last_sequence_id
        self._next_sequence_id = max(self._next_sequence_id, self._sent_through + 1)
        self._outbox.add(group)
        self._hold(self._outbox.bytes)
        if self._expiry is None:
            self._expiry = self._loop.call_at(group.deadline, self._expire)
        self._write()

    def _encode(self, group: Group, columns: Columns, compression: Compression) -> EncodedBatches:
        arguments = (columns, group.first_sequence_id, self._pool.clock.now_ms(), compression)
        if group.extensions is not None:
            group.encoded = encode_columns(*arguments, group.extensions)
        elif not self.options.batching:
            group.encoded = encode_singles(*arguments)
        else:
            group.encoded, group.order = encode_group(*arguments, by_key=self.options.batching_by_key)
        return group.encoded

    def _cut(self, columns: Columns) -> Iterator[tuple[Columns, int]]:
        """Pieces that are small enough, each with what it counts, of ids on one side of `_stored_through`."""
        count = len(columns.values)
        stored = bisect_right(columns.sequence_ids, self._stored_through) if columns.sequence_ids else 0
        parts = [columns]
        if 0 < stored < count:
            parts = [columns.part(0, stored), columns.part(stored, count)]
        for part in parts:
            yield from cut_columns(part, self._max_message_bytes)

    # --- bounds ------------------------------------------------------------------------------------------------------

    def _fits(self, size: int) -> bool:
        return self._fits_here(size) and self._budget.fits(size)

    def _fits_here(self, size: int) -> bool:
        pending = self.pending_bytes
        # Something larger than the whole bound goes alone.
        return pending == 0 or pending + size <= self.options.max_pending_bytes

    def _hold(self, size: int) -> None:
        """Of the bytes that all producers of the client share, this one has so many."""
        self._budget.change(size - self._held)
        self._held = size

    def _room_came_free(self) -> None:
        self._hold(self._outbox.bytes + (self._opened_bytes if self._values else 0))
        self._room.set()

    def _queue_full(self, size: int = 0) -> ProducerQueueFull:
        """`size`: of what does not fit."""
        if self._streaming and not size:
            return ProducerQueueFull(
                f"a message in chunks is being sent to {self.topic}, and others come behind it: use `send`, which waits"
            )
        if self._budget.waiting or (size and self._fits_here(size)):
            sent = f"{self._budget.used} bytes sent by all producers of this client"
            limit = f"max_pending_bytes of the client is {self._budget.limit}"
        else:
            sent = f"{self.pending_bytes} bytes sent to {self.topic}"
            limit = f"max_pending_bytes is {self.options.max_pending_bytes}"
        return ProducerQueueFull(
            f"{sent} are not confirmed yet, and {limit}; await receipts or flush(), or raise it"
        )

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Behind those who wait already. Who leaves it sends in the same step, before anybody else can."""
        self._waiting += 1
        self._other_room = self._open_room
        self._plain_room = self._keyed_room = -1
        try:
            async with self._blocked:
                self._check_open()
                limit = self._turn_limit = asyncio.timeout(None)
                try:
                    async with limit:
                        yield
                except TimeoutError:
                    if self._turn_ended is not None and limit.expired():
                        raise copy_of(self._turn_ended) from None
                    raise
                finally:
                    self._turn_limit = self._turn_ended = None
        finally:
            self._waiting -= 1

    def _end_turn(self, error: MagnetarError) -> None:
        """Whoever has the turn waits for nothing more, be it room or the rest of a source."""
        if self._turn_limit is not None:
            self._turn_ended = error
            self._turn_limit.reschedule(self._loop.time())

    async def _wait_for_room(self, size: int) -> None:
        """In the caller's turn."""

        def late() -> SendTimeout:
            no_room = f"no room came free within send_timeout={self.options.send_timeout:g} s"
            return SendTimeout(f"{no_room}: {self._queue_full(size).message}{self._outbox.why_delayed}")

        async with TimeLimit(self.options.send_timeout, late):
            while not self._fits_here(size):
                self._room.clear()
                await self._room.wait()
            await self._budget.wait(size)

    @property
    def ended(self) -> bool:
        return self._attachment.ended

    @property
    def failure(self) -> MagnetarError | None:
        """Why it can send nothing any more."""
        return self._attachment.failure

    @property
    def ready(self) -> bool:
        """True while it has a broker."""
        return self._attachment.connection is not None

    @property
    def max_message_bytes(self) -> int:
        """What client and broker take."""
        return self._max_message_bytes

    def _check_open(self) -> None:
        self._attachment.check_open()

    # --- the connection ----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Attaches for the first time."""
        await self._attachment.open()

    def opening(self) -> CreateProducer:
        """Under a new epoch."""
        return CreateProducer(
            0,
            self._id,
            self.topic,
            self.name or None,
            self._epoch + 1,
            self.options.access_mode,
            topic_epoch=self.topic_epoch,
        )

    @property
    def may_wait(self) -> bool:
        """See Attached. Once it was let in, it is let in again or fenced."""
        return self.options.access_mode == "wait_for_exclusive" and self.topic_epoch < 0

    async def opened(self, connection: BrokerConnection, answer: dict[str, Any]) -> None:
        """See Attached."""
        self.name = answer["name"]
        self.topic_epoch = int(answer.get("topic_epoch", -1))
        self._stored_through = max(int(answer.get("last_sequence_id", -1)), self._stored_through)
        if (
            self._stored_through >= self._automatic_id
        ):  # at the first opening, and if another cluster knows more
            self._close_batch()
            self._next_sequence_id = self._stored_through + 1
        self._epoch = int(answer["epoch"])
        self._max_message_bytes = min(
            self._pool.options.max_message_bytes, connection.connection.max_message_bytes
        )
        self._stop_receipts()
        self._send_header = Send(0, self._id, self._epoch).encode()
        most = connection.connection.max_frame_bytes - len(self._send_header) - 2
        self._max_group_bytes = (
            most if self._copies else min(most, self._max_message_bytes + GROUP_OVERHEAD_BYTES)
        )
        self._receipt_header = ReceiptCommand(0, self._id, self._epoch).encode()
        self._receipts_from = connection
        connection.routes[self._receipt_header] = self._receipts

    def attached(self) -> None:
        """Sends what is not confirmed."""
        self._outbox.rewind()
        self._fail_larger(self._max_group_bytes)
        self._write()

    def _fail_larger(self, max_bytes: int) -> None:
        for group in self._outbox.fail_larger(max_bytes):
            self._note_failed(group)

    def received(self, command: Command, payload: bytes) -> None:
        """See Attached."""
        match command:
            case SendFailed():
                self._send_failed(command)
            case SendDelayed() if self._attachment.connection is None:
                self._attachment.waits_for(command.message)  # others have the topic
            case SendDelayed() if command.epoch == self._epoch:
                self._outbox.delay_reason = command.message  # why what was sent waits at the broker

    def detached(self, error: BaseException | None) -> None:
        """Nothing more is written. A frame that the broker refused as too large is not sent again.

        Receipts of what was written may still come, if it was not the connection that broke: the broker opens the next epoch
        when they all have.
        """
        if isinstance(error, FrameTooLarge) and "length" in error.details:
            self._fail_larger(error.details["length"] - len(self._send_header) - 3)

    def _stop_receipts(self) -> None:
        connection, self._receipts_from = self._receipts_from, None
        if connection is not None:
            connection.routes.pop(self._receipt_header, None)

    def cluster_switched(self) -> None:
        """The name that the old cluster gave may belong to somebody else in the new one, and the topic has other epochs."""
        self.name = self.options.name or ""
        self.topic_epoch = -1
        lost = MessageLost(
            f"the first chunks of a message to {self.topic} were stored in the cluster that this client has left"
        )
        for group in self._outbox.fail_begun(lost):
            self._note_failed(group)
        message = self._streamed
        if message is not None and message.group.runs and not message.group.settled:
            message.group.fail(lost)
            self._note_failed(message.group)

    def failed(self, error: MagnetarError) -> None:
        """The topic cannot be produced to any more."""
        self._stop_receipts()
        self._close_batch()
        self._fail_all(error)

    async def settle(self) -> None:
        """See Attached."""
        await self.flush()

    def leaving(self) -> None:
        """See Attached."""
        self._close_batch()

    def left(self) -> None:
        """What is not confirmed fails."""
        self._stop_receipts()
        self._fail_all(
            AlreadyClosed(f"the producer of {self.topic} was closed before the message was confirmed")
        )

    def _write(self) -> None:
        connection = self._attachment.connection
        if connection is None:
            return
        outbox, header = self._outbox, self._send_header
        while outbox.unsent and connection.writable:
            group = outbox.next_unsent()
            assert group.encoded is not None
            connection.send_encoded(group.encoded.frames(header, group.confirmed))

    def writing_resumed(self) -> None:
        """The connection takes more."""
        self._write()

    def _receipts(self, payloads: list[bytes]) -> None:
        outbox = self._outbox
        outbox.delay_reason = ""
        for payload in payloads:
            outbox.confirm(decode_rows(RECEIPT_ROW, payload))
        self._room_came_free()
        if not outbox:
            self._close_batch()

    def _send_failed(self, command: SendFailed) -> None:
        """The broker did not store a group and those after it in this epoch."""
        if command.epoch != self._epoch or self._attachment.connection is None:
            return
        error = error_from_wire(command.code, command.action, command.message)
        if isinstance(error, ProducerFenced | TopicNotFound | TopicTerminated):
            self._attachment.fail(error)
            return
        if error.action in (Action.FIX_CALL, Action.GIVE_UP):
            group = self._outbox.fail_group_with(command.sequence_id, error)
            if group is not None:
                self._note_failed(group)
        else:
            self._outbox.delay_reason = error.message
        # What came after it was not stored either: it goes again, under a new epoch.
        self._attachment.lost(error)

    # --- failures ----------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        self._expiry = None
        for group in self._outbox.expire(self._loop.time(), self.options.send_timeout):
            self._note_failed(group)
        first = self._outbox.first
        if first is not None:
            self._expiry = self._loop.call_at(first.deadline, self._expire)

    def _fail_all(self, error: MagnetarError) -> None:
        for group in self._outbox.fail_all(error):
            self._note_failed(group)
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._room_came_free()
        self._end_turn(error)

    def _note_failed(self, group: Group) -> None:
        group = group.whole
        if self._failed and self._failed[-1] is group:
            return  # another chunk of the same message
        count = group.message_count - group.confirmed
        what = "1 message" if count == 1 else f"{count} messages"
        log.warning("%s to %s failed: %s", what, self.topic, group.error)
        while self._failed and self._failed[0].error_seen:
            self._failed.popleft()
        self._failed.append(group)
        self._room_came_free()
        if self._streamed is not None and self._streamed.group is group and group.error is not None:
            group.error_seen = True
            self._end_turn(group.error)
        error = group.error
        alone = (
            error is not None and error.action is Action.FIX_CALL and count == 1
        )  # wrong itself: it never is stored
        if self._numbered and error is not None and not alone and not self.ended:
            # What is behind it must not be stored without it: who resumes behind `last_sequence_id` would leave it out.
            text = "the producer ends here, so that nothing is stored behind it: open it anew, and go on behind its last id"
            self._attachment.fail(type(error)(f"{error.message}; {text}", **error.details), leave=True)
