"""Producer: messages into batches, batches into groups, groups onto the connection, receipts back.

What is open is one batch (batching off: the messages of one loop turn). It is closed when it is full, at the end of the
loop turn in which it was opened if nothing is in flight, else after batching_max_delay or when everything in flight is
confirmed, whichever comes first. What happens then is in `publisher`.

Wakers: `link.writable` false stops writing, `writing_resumed` continues; a full memory bound stops `send`, receipts and
expiry continue it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from magnetar.proto.batch import Properties
from magnetar.proto.commands import CloseProducer
from magnetar.proto.errors import (
    AlreadyClosed,
    MagnetarError,
    ProducerQueueFull,
    SendTimeout,
)
from magnetar.proto.ids import MessageId

from .columns import (
    MESSAGE_OVERHEAD_BYTES,
    Columns,
    Key,
    checked_columns,
    checked_key,
    checked_properties,
    checked_value,
    cut_columns,
    message_bytes,
    or_none,
    too_large,
)
from .options import ProducerOptions, time_in_ms
from .publisher import Publisher
from .receipts import Group, Receipt, Settled, copy_of

if TYPE_CHECKING:
    from .client import Client
    from .link import Link

log = logging.getLogger("magnetar.client")


class Producer(Publisher):
    """Sends messages to one topic. Made by `Client.create_producer`; used from one event loop."""

    def __init__(self, client: Client, topic: str, options: ProducerOptions, producer_id: int) -> None:
        super().__init__(client, topic, options, producer_id)
        self._closed = False
        self._closing = asyncio.Lock()
        self._blocked = asyncio.Lock()  # `send`s that wait for room, first come first served
        # The open batch. `_room_bytes` is what still fits into it; -1 sends every message through `_send_slowly`: when
        # no batch is open, when it has keys or other columns, and when the producer is closed.
        self._last_index = options.batching_max_messages - 1
        self._group = Group(0)
        self._values: list[bytes | None] = []
        self._keys: list[Key] | None = None
        self._properties: list[Properties | None] | None = None
        self._event_times: list[int | None] | None = None
        self._room_bytes = -1
        self._column_room_bytes = 0
        self._opened_bytes = 0
        self._flush_handle: asyncio.Handle | None = None

    @property
    def last_sequence_id(self) -> int:
        """Sequence id of the last message sent, -1 before the first."""
        return self._next_sequence_id + len(self._values) - 1

    @property
    def pending_bytes(self) -> int:
        """What is sent and not confirmed, as it counts against max_pending_bytes."""
        return self._outbox.bytes + self._open_bytes()

    # --- sending -----------------------------------------------------------------------------------------------------

    def send_nowait(
        self,
        value: bytes | None,
        key: Key = None,
        *,
        properties: Properties | None = None,
        event_time: datetime | int | None = None,
    ) -> Receipt:
        """Sends in the background; await the receipt for the MessageId. None as value is a tombstone for its key.

        event_time: a datetime or ms since the epoch. Raises ProducerQueueFull at the memory bound, MessageTooLarge,
        InvalidArgument, AlreadyClosed; awaiting the receipt raises what went wrong later.
        """
        # The plain form: 100 ns without the receipt. Everything rare is behind _room_bytes being negative.
        if value.__class__ is bytes and key is None and properties is None and event_time is None:
            room = self._room_bytes - len(value) - MESSAGE_OVERHEAD_BYTES
            if room >= 0:
                self._room_bytes = room
                group, values = self._group, self._values
                index = len(values)
                values.append(value)
                if index == self._last_index:
                    self._close_batch()
                return Receipt(group, index)
        return self._send_slowly(value, key, properties, event_time)

    async def send(
        self,
        value: bytes | None,
        key: Key = None,
        *,
        properties: Properties | None = None,
        event_time: datetime | int | None = None,
    ) -> MessageId:
        """Sends and waits until the message is durable on the ack quorum; returns its id.

        At the memory bound it waits for room, at most send_timeout (block_when_full=False: raises ProducerQueueFull).
        Raises as `send_nowait`, and SendTimeout.
        """
        try:
            receipt = self.send_nowait(value, key, properties=properties, event_time=event_time)
        except ProducerQueueFull:
            if not self._options.block_when_full:
                raise
            receipt = await self._send_when_room(value, key, properties, event_time)
        return await receipt

    async def send_many(
        self,
        values: Sequence[bytes | None],
        *,
        keys: Sequence[Key] | None = None,
        properties: Sequence[Properties | None] | None = None,
        event_times: Sequence[datetime | int | None] | None = None,
    ) -> list[MessageId]:
        """Sends many messages as one batch (cut at 10,000 messages or 1 MiB) and waits until all are durable.

        The fast way: nothing runs per message. Waits for room and raises as `send`; when a batch fails, the ones before
        it are stored.
        """
        columns = checked_columns(values, keys, properties, event_times)
        groups: list[Group] = []
        for chunk, size in cut_columns(columns, self._max_message_bytes):
            while not self._fits(size):
                if not self._options.block_when_full:
                    raise self._queue_full()
                async with self._blocked:
                    await self._wait_for_room(size)
            self._check_open()
            self._close_batch()
            group = Group(self._next_sequence_id)
            self._close_group(group, chunk, size)
            groups.append(group)
            if group.error is not None:
                break
        ids: list[MessageId] = []
        for group in groups:
            if not group.settled:
                await Settled(group)
            ids += group.message_ids()
        return ids

    async def flush(self) -> None:
        """Waits until everything sent so far is durable. Raises what a message failed with if nobody was told yet."""
        self._close_batch()
        group = self._outbox.last
        if group is not None:
            await Settled(group)
        failed, self._unreported = self._unreported, None
        if failed is not None and not failed.error_seen:
            raise failed.told_error()

    async def close(self) -> None:
        """Flushes and leaves the topic. Raises as `flush`, closed all the same. Cancelled, it leaves without flushing."""
        async with self._closing:
            if self._closed:
                return
            try:
                if self._failure is None:
                    await self.flush()
            finally:
                error = sys.exception()
                if error is None or isinstance(error, MagnetarError):
                    await self._leave()
                else:
                    self.abandon()

    def abandon(self) -> None:
        """Leaves the topic at once: what is not confirmed fails with AlreadyClosed, though it may have been stored."""
        link = self._end()
        if link is not None:
            link.send(CloseProducer(0, self._id).encode())

    async def _leave(self) -> None:
        link = self._end()
        if link is not None:
            await self._client.tell_leaving(link, CloseProducer(0, self._id))

    def _end(self) -> Link | None:
        """Everything of closing that needs no waiting; the link on which the broker is to be told, if there is one."""
        if self._closed:
            return None
        self._close_batch()
        self._closed = True
        link = self._link
        self._attachment.close()
        self.detached()
        self._stop_receipts()
        self._fail_all(
            AlreadyClosed(f"the producer of {self._topic} was closed before the message was confirmed")
        )
        self._client.forget(self)
        return link

    # --- the open batch ----------------------------------------------------------------------------------------------

    def _send_slowly(
        self, value: bytes | None, key: Key, properties: Properties | None, event_time: datetime | int | None
    ) -> Receipt:
        self._check_open()
        value = checked_value(value)
        key = checked_key(key)
        properties = checked_properties(properties)
        event_time_ms = None if event_time is None else time_in_ms(event_time)
        plain = value is not None and key is None and properties is None and event_time_ms is None
        size = message_bytes(value, key, properties)
        if size > self._max_message_bytes + MESSAGE_OVERHEAD_BYTES:
            raise too_large(size, self._max_message_bytes)
        if self._values and self._open_room < size:
            self._close_batch()
        if not self._values:
            self._open_batch(size)
        if not plain or self._has_columns:
            self._use_columns(key, properties, event_time_ms)
            self._column_room_bytes -= size
        else:
            self._room_bytes -= size
        group, values = self._group, self._values
        values.append(value)
        index = len(values) - 1
        if index >= self._last_index:
            self._close_batch()
        return Receipt(group, index)

    @property
    def _has_columns(self) -> bool:
        return self._keys is not None

    @property
    def _open_room(self) -> int:
        return self._column_room_bytes if self._has_columns else self._room_bytes

    def _open_bytes(self) -> int:
        return self._opened_bytes - self._open_room if self._values else 0

    def _open_batch(self, size: int) -> None:
        """Opens a batch that has room for `size` at least, or raises ProducerQueueFull."""
        if not self._fits(size):
            raise self._queue_full()
        options = self._options
        room = min(options.batching_max_bytes, options.max_pending_bytes - self._outbox.bytes)
        self._opened_bytes = self._room_bytes = max(room, size)
        self._group = Group(self._next_sequence_id)
        if options.batching and self._outbox:
            self._flush_handle = self._loop.call_later(options.batching_max_delay, self._close_batch)
        else:
            self._flush_handle = self._loop.call_soon(self._close_batch)

    def _use_columns(self, key: Key, properties: Properties | None, event_time_ms: int | None) -> None:
        """Appends to the columns beside the values, which are made when the first message has one."""
        count = len(self._values)
        if self._keys is None or self._properties is None or self._event_times is None:
            self._keys, self._properties, self._event_times = [None] * count, [None] * count, [None] * count
            self._column_room_bytes, self._room_bytes = self._room_bytes, -1
        self._keys.append(key)
        self._properties.append(properties)
        self._event_times.append(event_time_ms)

    def _close_batch(self) -> None:
        """Encodes the open batch, if there is one, and writes what can be written."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        if not self._values:
            return
        size = self._open_bytes()
        columns = Columns(self._values)
        if self._has_columns:
            columns = Columns(
                self._values, or_none(self._keys), or_none(self._properties), or_none(self._event_times)
            )
            self._keys = self._properties = self._event_times = None
        self._values = []
        self._room_bytes = -1
        self._close_group(self._group, columns, size)

    # --- bounds ------------------------------------------------------------------------------------------------------

    def _fits(self, size: int) -> bool:
        pending = self.pending_bytes
        # Something larger than the whole bound goes alone.
        return pending == 0 or pending + size <= self._options.max_pending_bytes

    def _queue_full(self) -> ProducerQueueFull:
        return ProducerQueueFull(
            f"{self.pending_bytes} bytes sent to {self._topic} are not confirmed yet, and max_pending_bytes is "
            f"{self._options.max_pending_bytes}; await receipts or flush(), or raise it"
        )

    async def _send_when_room(
        self, value: bytes | None, key: Key, properties: Properties | None, event_time: datetime | int | None
    ) -> Receipt:
        size = message_bytes(checked_value(value), key, properties)
        async with self._blocked:
            while True:
                await self._wait_for_room(size)
                try:
                    return self.send_nowait(value, key, properties=properties, event_time=event_time)
                except ProducerQueueFull:
                    continue

    async def _wait_for_room(self, size: int) -> None:
        try:
            async with asyncio.timeout(self._options.send_timeout):
                while not self._fits(size) and not self._closed and self._failure is None:
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            raise SendTimeout(
                f"no room came free within send_timeout={self._options.send_timeout:g} s: {self._queue_full().message}"
            ) from None

    def _check_open(self) -> None:
        if self._failure is not None:
            raise copy_of(self._failure)
        if self._closed:
            raise AlreadyClosed(f"the producer of {self._topic} is closed; create another one")

    async def open(self) -> None:
        """Attaches for the first time; used by Client.create_producer."""
        await self._attachment.open()

    async def __aenter__(self) -> Producer:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.close()
        else:
            self.abandon()
