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
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, Unpack

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
from magnetar.proto.batch_extensions import CHUNK_ID_BYTES, WholeMessage
from magnetar.proto.commands import (
    RECEIPT_ROW,
    CloseProducer,
    Command,
    CreateProducer,
    HoldProducer,
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
    BacklogQuotaExceeded,
    FinalError,
    FrameTooLarge,
    InvalidArgument,
    MagnetarError,
    MessageLost,
    ProducerFenced,
    SequenceIdError,
    TopicNotFound,
    TopicTerminated,
    error_from_wire,
)
from magnetar.proto.ids import MessageId, TopicName
from magnetar.runtime.quantities import counted

from ..connection.attachment import Attachment
from ..connection.broker_connection import BrokerConnection
from ..connection.pool import ConnectionPool
from ..durations import Duration
from ..options import ProducerOptions
from ..receipts import Group, Part, Receipt, stored_ids
from .chunking import MIN_PIECE_BYTES, ChunkedMessage, Source, pieces_of, whole_message
from .columns import (
    MESSAGE_OVERHEAD_BYTES,
    MessageFields,
    Row,
    checked_row,
    cut_columns,
    row_of,
    too_large,
)
from .open_batch import OpenBatch
from .outbox import Outbox
from .room import Room

log = logging.getLogger("magnetar.client")

MAX_FAILED_GROUPS = 10_000  # remembered for `flush`: of more, the oldest are forgotten


_VALUES_AND_KEYS_ONLY = (None, None, None, None, None)


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
        self.max_message_bytes = pool.options.max_message_bytes  # which client and broker take
        self._max_group_bytes = self.max_message_bytes + GROUP_OVERHEAD_BYTES
        self._copies = copies
        self._batch = OpenBatch()
        self._last_index = options.batching_max_messages - 1
        self._flush_handle: asyncio.Handle | None = None  # closes the open batch
        self.on_batch_closed: Callable[[TopicProducer], object] | None = None  # it is about to be
        self.on_failed: Callable[[MagnetarError], object] | None = None
        self._outbox = Outbox()
        self.room = Room(options, pool.pending_budget, self._outbox, self._batch)
        self._streamed: ChunkedMessage | None = None  # by the call that has the turn, once a chunk was sent
        # A message without a sequence id of its own gets the next one behind everything that was sent, and all that the
        # broker has under this name: through `last_sequence_id`, which lies between two batches.
        self._sent_through = -1  # in closed groups
        self.last_sequence_id = -1
        self._numbered = False  # the application has given one
        # Groups that failed since the last `flush`, which raises the first error that nobody has seen.
        self._failed: deque[Group] = deque(maxlen=MAX_FAILED_GROUPS)
        self._expiry: asyncio.TimerHandle | None = None
        # The attachment.
        self._attachment = Attachment(
            pool, topic, producer_id, f"producer of {topic}", self, CloseProducer, on_closed
        )
        self._receipts_from: BrokerConnection | None = None  # of the current epoch, if they can come
        self._epoch = -1
        self._hold = (-1, "")  # an epoch, and why nothing is to be written in it for now
        self._held = ""  # the same of the current epoch
        self._send_header = self._receipt_header = b""

    @property
    def pending_bytes(self) -> int:
        return self.room.pending_bytes

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
            batch = self._batch
            if key is None:
                room = batch.plain_room - len(value) - MESSAGE_OVERHEAD_BYTES
                if room >= 0:
                    batch.plain_room = room
                    group, values = batch.group, batch.values
                    index = len(values)
                    values.append(value)
                    if index == self._last_index:
                        self._close_batch()
                    return Receipt(group, index)
                if not batch.values and self._opened_for(len(value) + MESSAGE_OVERHEAD_BYTES):
                    return self.send_nowait(value)
            elif key.__class__ is str and key.isascii():  # so it can be encoded, to as many bytes
                room = batch.keyed_room - len(value) - len(key) - MESSAGE_OVERHEAD_BYTES
                if room >= 0:
                    batch.keyed_room = room
                    group, values = batch.group, batch.values
                    index = len(values)
                    values.append(value)
                    batch.keys.append(key)  # type: ignore[union-attr]
                    if index == self._last_index:
                        self._close_batch()
                    return Receipt(group, index)
        self._attachment.check_open()
        if self.room.waiting:
            raise self.room.queue_full()
        more = properties, event_time, sequence_id, deliver_at, deliver_after
        return self._send(checked_row(self._pool.clock, value, key, *more))

    async def send_when_room(
        self, value: bytes | None, key: Key = None, **more: Unpack[MessageFields]
    ) -> Receipt:
        """Does what send_nowait does, after waiting for room."""
        row = checked_row(self._pool.clock, value, key, **more)
        size = row.size
        if row.value is not None and self._is_cut(size):
            return await self._send_pieces(row, row.value)
        async with self.room.turn():
            self._attachment.check_open()
            await self.room.wait(size)
            self._attachment.check_open()
        return self._send(row, waited=True)

    async def send_stream(self, source: Source, key: Key = None, **more: Unpack[MessageFields]) -> Receipt:
        """See Producer.send_stream."""
        if not self.options.chunking:
            raise InvalidArgument(
                "send_stream is for producers with chunking=True; open one with that, or use send"
            )
        row = checked_row(self._pool.clock, None, key, **more)
        return await self._send_pieces(row, source)

    async def store_columns(self, columns: Columns) -> tuple[list[MessageId | None], MagnetarError | None]:
        """See Producer.send_many, which has checked them: the ids of what is stored, and what went wrong.

        No ids: nothing was sent.
        """
        return await stored_ids(*await self.send_columns(columns))

    def has_room(self, size: int) -> bool:
        """True if `send_columns` does not wait."""
        return not self.room.waiting and self.room.fits(size)

    async def send_columns(self, columns: Columns) -> tuple[list[Part], MagnetarError | None]:
        """The same without waiting for it to be stored: where the messages that were sent are, in order."""
        parts: list[Part] = []
        try:
            chunking, border = self.options.chunking, self.last_sequence_id
            for piece, size in cut_columns(columns, self.max_message_bytes, chunking=chunking, border=border):
                if self._is_cut(size):
                    row = row_of(piece)
                    receipt = await self._send_pieces(row, row.value or b"")
                    parts.append((receipt.group, 0, 1))
                    continue
                if not self.has_room(size):
                    if not self.options.block_when_full:
                        raise self.room.queue_full(size)
                    async with self.room.turn():
                        self._attachment.check_open()
                        await self.room.wait(size)
                self._attachment.check_open()
                parts.append(self._send_piece(piece, size))
                if parts[-1][0].error is not None:
                    break
        except MagnetarError as error:
            return parts, error
        return parts, None

    def _send_piece(self, columns: Columns, size: int) -> Part:
        """Messages for which there is room: few of them share the open batch, many are a batch of their own."""
        count = len(columns.values)
        batch, options = self._batch, self.options
        if (
            options.batching
            and 2 * size <= options.batching_max_bytes
            and 2 * count <= options.batching_max_messages
            and columns[2:] == _VALUES_AND_KEYS_ONLY
        ):
            if batch.values and (
                batch.other_room >= 0
                or batch.room < size
                or len(batch.values) + count > options.batching_max_messages
            ):
                self._close_batch()
            if not batch.values:
                self._open_batch(size, self._automatic_id, own_ids=False, waited=True)
            first = batch.extend(columns, size)
            if self.room.waiting:
                batch.slow_down()
            group = batch.group
            if len(batch.values) > self._last_index:
                self._close_batch()
            return group, first, first + count
        self._close_batch()
        own = columns.sequence_ids
        group = Group(self._checked_sequence_id(None if own is None else own[0]), self._partition)
        self._close_group(group, columns, size)
        return group, 0, count

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

    # --- messages in chunks ------------------------------------------------------------------------------------------

    async def _send_pieces(self, row: Row, source: Source) -> Receipt:
        """A message with this value. Nobody else sends until all of it is in the outbox."""
        piece_bytes = self._piece_bytes(row)
        pieces, whole = pieces_of(source, piece_bytes), whole_message(source, piece_bytes)
        async with self.room.turn():
            self._attachment.check_open()
            self.room.streaming = True
            warning = self._loop.call_later(self.options.send_timeout, self._warn_of_stream)
            try:
                sequence_id = self._checked_sequence_id(row.sequence_id)
                async with contextlib.aclosing(pieces):
                    async for piece, last in pieces:
                        part = row._replace(value=piece, sequence_id=sequence_id)
                        await self.room.wait(part.size)
                        self._attachment.check_open()
                        message = self._streamed
                        if message is None and last:
                            return self._send(part, waited=True)
                        if message is None:
                            message = self._streamed = self._begin_message(part, whole)
                        self._send_chunk(message, piece, last=last)
            finally:
                warning.cancel()
                message, self._streamed, self.room.streaming = self._streamed, None, False
        assert message is not None
        return Receipt(message.group, 0)

    def _warn_of_stream(self) -> None:
        if self.room.waiting > 1:
            log.warning(
                "producer of %s: %d calls wait until the source of a message in chunks ends",
                self.topic, self.room.waiting - 1,
            )  # fmt: skip

    def _is_cut(self, size: int) -> bool:
        """True if a message that counts so much is sent in chunks."""
        return self.options.chunking and size > self.max_message_bytes + MESSAGE_OVERHEAD_BYTES

    def _piece_bytes(self, row: Row) -> int:
        """Of the value, in each chunk. Raises MessageTooLarge."""
        size = row._replace(value=None).size
        if size + MIN_PIECE_BYTES > self.max_message_bytes + MESSAGE_OVERHEAD_BYTES:
            raise too_large(size, self.max_message_bytes)
        return self.max_message_bytes + MESSAGE_OVERHEAD_BYTES - size

    def _begin_message(self, row: Row, whole: WholeMessage | None) -> ChunkedMessage:
        self._close_batch()
        assert row.sequence_id is not None
        chunk_id = self._pool.rng.getrandbits(8 * CHUNK_ID_BYTES).to_bytes(CHUNK_ID_BYTES)
        return ChunkedMessage(Group(row.sequence_id, self._partition), chunk_id, row, whole)

    def _send_chunk(self, message: ChunkedMessage, piece: bytes, *, last: bool) -> None:
        group, columns = message.next_chunk(piece, last=last)
        self._close_group(group, columns, MESSAGE_OVERHEAD_BYTES + len(piece))

    def _send_cut(self, row: Row, value: bytes, size: int) -> Receipt:
        """All of a message at once. Raises ProducerQueueFull if there is no room for all of it."""
        step, room = self._piece_bytes(row), self.room
        if room.pending_bytes + size > room.max_pending_bytes or not room.fits(size):
            raise room.queue_full(size)
        message = self._begin_message(row, whole_message(value, step))
        for start in range(0, len(value), step):
            self._send_chunk(message, value[start : start + step], last=start + step >= len(value))
        return Receipt(message.group, 0)

    # --- batches -----------------------------------------------------------------------------------------------------

    @property
    def _automatic_id(self) -> int:
        """What a message without a sequence id of its own gets."""
        sent = self._batch.last_sequence_id if self._batch.values else self._sent_through
        return max(sent, self.last_sequence_id) + 1

    def _checked_sequence_id(self, given: int | None) -> int:
        """Of the next message. Raises SequenceIdError."""
        if given is None:
            return self._automatic_id
        self._numbered = True
        sent = max(self._sent_through, self._batch.last_sequence_id)
        if given <= sent:
            raise SequenceIdError(
                f"the sequence id {given} follows {sent}, which this producer has sent already; they must rise"
            )
        return given

    def _send(self, row: Row, *, waited: bool = False) -> Receipt:
        """`waited`: for room, which it has."""
        batch, size = self._batch, row.size
        own = row.sequence_id
        sequence_id = self._automatic_id if own is None else self._checked_sequence_id(own)
        if size > self.max_message_bytes + MESSAGE_OVERHEAD_BYTES:
            if row.value is not None and self.options.chunking:
                return self._send_cut(row._replace(sequence_id=sequence_id), row.value, size)
            if not self._copies:
                raise too_large(size, self.max_message_bytes)
        room = batch.room
        if batch.values and (
            room < size or batch.group.first_sequence_id <= self.last_sequence_id < sequence_id
        ):
            self._close_batch()
        if not batch.values:
            own_ids = own is not None and own < self._automatic_id
            self._open_batch(size, sequence_id, own_ids=own_ids, waited=waited)
            room = batch.plain_room
        receipt = batch.append(row, sequence_id, room - size)
        if self.room.waiting:
            batch.slow_down()
        if receipt.index >= self._last_index:
            self._close_batch()
        return receipt

    def _opened_for(self, size: int) -> bool:
        """Opens a batch for a value alone, unless that needs more than a look: who sends one by one has one each."""
        if self.room.waiting or size > self.max_message_bytes:
            return False
        self._attachment.check_open()
        self._open_batch(size, self._automatic_id, own_ids=False, waited=False)
        return True

    def _open_batch(self, size: int, sequence_id: int, *, own_ids: bool, waited: bool) -> None:
        """Opens a batch that has room for `size` at least, or raises ProducerQueueFull."""
        if not self.room.fits(size, waited=waited):
            raise self.room.queue_full(size)
        options = self.options
        most = min(options.batching_max_bytes, self.max_message_bytes, self.room.for_batch)
        group = Group(sequence_id, self._partition)
        self._batch.open(group, max(most, size), own_ids=own_ids)
        self.room.changed()
        if options.batching and self._outbox:
            self._flush_handle = self._loop.call_later(options.batching_max_delay, self._close_batch)
        else:
            self._flush_handle = self._loop.call_soon(self._close_batch)

    def _close_batch(self) -> None:
        """Encodes the open batch, if there is one, and writes what can be written."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        if not self._batch.values:
            return
        if self.on_batch_closed is not None:
            self.on_batch_closed(self)
        self._close_group(self._batch.group, *self._batch.take())

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
                raise too_large(encoded.largest, self.max_message_bytes)
        except Exception as error:
            # Every argument was checked at its call; what is left is, for example, a codec that is not installed.
            unknown = FinalError(f"{group.message_count} messages cannot be encoded: {error!r}")
            group.fail(error if isinstance(error, MagnetarError) else unknown)
            self._note_failed([group])
            return
        group.bytes = size
        group.deadline = self._loop.time() + self.options.send_timeout
        self._sent_through = ids[-1] if ids else group.first_sequence_id + group.message_count - 1
        self._outbox.add(group)
        self.room.changed()
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

    # --- the connection ----------------------------------------------------------------------------------------------

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
        stored = int(answer.get("last_sequence_id", -1))
        if stored >= self._automatic_id:  # at the first opening, and if another cluster knows more
            self._close_batch()
        self.last_sequence_id = max(stored, self.last_sequence_id)
        self._epoch = int(answer["epoch"])
        self.max_message_bytes = min(
            self._pool.options.max_message_bytes, connection.connection.max_message_bytes
        )
        self._stop_receipts()
        self._send_header = Send(0, self._id, self._epoch).encode()
        most = connection.connection.max_frame_bytes - len(self._send_header) - 2
        self._max_group_bytes = (
            most if self._copies else min(most, self.max_message_bytes + GROUP_OVERHEAD_BYTES)
        )
        self._receipt_header = ReceiptCommand(0, self._id, self._epoch).encode()
        self._receipts_from = connection
        connection.routes[self._receipt_header] = self._receipts

    def attached(self) -> None:
        """Sends what is not confirmed."""
        self._outbox.rewind()
        self._heed()
        self._note_failed(self._outbox.fail_larger(self._max_group_bytes))
        self._write()

    def received(self, command: Command, payload: bytes) -> None:
        """See Attached."""
        match command:
            case SendFailed():
                self._send_failed(command)
            case SendDelayed() if self._attachment.connection is None:
                self._attachment.waits_for(command.message)  # others have the topic
            case HoldProducer() if command.epoch >= self._epoch:
                self._hold = command.epoch, command.reason
                self._heed()
                self._write()
            case SendDelayed() if command.epoch == self._epoch:
                self._outbox.delay_reason = command.message  # why what was sent waits at the broker

    def _heed(self) -> None:
        """What the broker sent behind the answer to an opening may be here before it is known what epoch that began."""
        epoch, reason = self._hold
        self._held = self._outbox.delay_reason = reason if epoch == self._epoch else ""

    def detached(self, error: BaseException | None) -> None:
        """Nothing more is written. A frame that the broker refused as too large is not sent again.

        Receipts of what was written may still come, if it was not the connection that broke: the broker opens the next epoch
        when they all have.
        """
        if isinstance(error, FrameTooLarge) and "length" in error.details:
            most = error.details["length"] - len(self._send_header) - 3
            self._note_failed(self._outbox.fail_larger(most))

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
        self._note_failed(self._outbox.fail_begun(lost))
        message = self._streamed
        if message is not None and message.group.runs and not message.group.settled:
            message.group.fail(lost)
            self._note_failed([message.group])

    def fail(self, error: MagnetarError) -> None:
        """Ends it for good, unless it has ended."""
        self._attachment.fail(error, leave=True)

    def failed(self, error: MagnetarError) -> None:
        """The topic cannot be produced to any more."""
        self._stop_receipts()
        self._close_batch()
        self._fail_all(error)
        if self.on_failed is not None:
            self.on_failed(error)

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
        if connection is None or self._held:
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
        outbox.delay_reason = self._held
        for payload in payloads:
            stored = outbox.confirm(decode_rows(RECEIPT_ROW, payload))
            self.last_sequence_id = max(stored, self.last_sequence_id)
        self.room.changed()
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
        if isinstance(
            error, BacklogQuotaExceeded
        ):  # whoever wants to try again does: its program knows if that makes sense
            self._note_failed(self._outbox.fail_all(error))
        elif error.action in (Action.FIX_CALL, Action.GIVE_UP):
            refused = self._outbox.refuse(command.sequence_id, error)
            if refused is not None:
                self._note_failure(*refused)
        else:
            self._outbox.delay_reason = error.message
        # What came after it was not stored either: it goes again, under a new epoch.
        self._attachment.lost(error)

    # --- failures ----------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        self._expiry = None
        self._note_failed(self._outbox.expire(self._loop.time(), self.options.send_timeout))
        first = self._outbox.first
        if first is not None:
            self._expiry = self._loop.call_at(first.deadline, self._expire)

    def _fail_all(self, error: MagnetarError) -> None:
        self._note_failed(self._outbox.fail_all(error))
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self.room.changed()
        self.room.end_turn(error)

    def _note_failed(self, groups: Iterable[Group]) -> None:
        """All that is not confirmed of them failed; chunks as the message that they belong to."""
        for group in dict.fromkeys(group.whole for group in groups):
            self._note_failure(group, group.message_count - group.confirmed)

    def _note_failure(self, group: Group, count: int) -> None:
        """So many messages of a group failed."""
        group, error = group.whole, group.error
        assert error is not None
        log.warning("%s to %s failed: %s", counted(count, "message"), self.topic, error)
        while self._failed and self._failed[0].error_seen:
            self._failed.popleft()
        self._failed.append(group)
        self.room.changed()
        if self._streamed is not None and self._streamed.group is group:
            group.error_seen = True
            self.room.end_turn(error)
        alone = count == 1 and error.action is Action.FIX_CALL  # wrong itself: it never is stored
        if self._numbered and not alone and not self.ended:
            # What is behind it must not be stored without it: who resumes behind `last_sequence_id` would leave it out.
            text = "the producer ends here, so that nothing is stored behind it: open it anew, and go on behind its last id"
            self.fail(type(error)(f"{error.message}; {text}", **error.details))
