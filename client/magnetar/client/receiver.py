"""What consumers and readers share: permits, the queue of deliveries, decoding, and the ways to iterate.

    DELIVER -> queue of deliveries (undecoded) -> the open delivery, decoded at once -> one message after another

Permits count messages that the ack set does not name, and bytes of batches. What the client may hold is the *window*;
granted again, in halves of the window, is what was taken from the queue. Unless receiver_queue_messages is set the window
grows, twofold up to 64 times, whenever the user finds the queue empty although the broker had spent all permits: then the
round trip of a FLOW is what the user waits for. It shrinks again when the queue stays full. `receiver_queue_bytes` bounds
it all.

Dropped are deliveries of an older epoch (from before a seek), and on a lost connection everything not handed out yet: the
broker delivers it again. A subscription that is not durable (a reader's is not) ends at the broker with its last connection:
then the receiver asks for a new one behind the last message that it handed out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from itertools import compress, count, repeat
from operator import length_hint, not_
from typing import TYPE_CHECKING, Any

from magnetar.proto.commands import CloseConsumer, Command, Deliver, Flow, LastMessageId, Seek, Subscribe
from magnetar.proto.errors import AlreadyClosed, MagnetarError, ReceiveTimeout
from magnetar.proto.ids import MessageId

from .attachment import Attachment, until_answered
from .messages import Delivery, Message, MessageBatch
from .options import ConsumerOptions, Start, start_on_wire
from .receipts import copy_of

if TYPE_CHECKING:
    from .client import Client
    from .link import Link

DEFAULT_WINDOW = 1000
LARGEST_GROWTH = 64
# The window halves after as many grants in a row during which the queue was never found empty.
QUIET_GRANTS = 16


class Window:
    """Permits, sans I/O. `granted` and `granted_bytes`: what the broker may still send; negative after an overshoot."""

    __slots__ = (
        "_base",
        "_grows",
        "_quiet",
        "_spent",
        "bytes_limit",
        "granted",
        "granted_bytes",
        "messages_limit",
    )

    def __init__(self, messages: int | None, bytes_limit: int) -> None:
        self.messages_limit = self._base = messages or DEFAULT_WINDOW
        self.bytes_limit = bytes_limit
        self._grows = messages is None
        self._quiet = 0
        self._spent = False  # the broker had (almost) no permits left when it was granted some last
        self.granted = 0
        self.granted_bytes = 0

    def reset(self) -> None:
        """A new subscription at the broker has no permits."""
        self.granted = self.granted_bytes = 0

    def received(self, messages: int, size: int) -> None:
        """A delivery spent permits."""
        self.granted -= messages
        self.granted_bytes -= size

    def grant(self, queued: int, queued_bytes: int) -> tuple[int, int] | None:
        """Messages and bytes to grant now, given what waits in the queue; None if it is too early."""
        messages = self.messages_limit - queued - self.granted
        size = self.bytes_limit - queued_bytes - self.granted_bytes
        if messages * 2 < self.messages_limit and size * 2 < self.bytes_limit:
            return None
        messages, size = max(messages, 0), max(size, 0)
        if not messages and not size:
            return None
        self._spent = self.granted * 4 <= self.messages_limit
        self._quiet += 1
        if self._quiet >= QUIET_GRANTS and self.messages_limit > self._base:
            self.messages_limit = max(self.messages_limit // 2, self._base)
            self._quiet = 0
        self.granted += messages
        self.granted_bytes += size
        return messages, size

    def found_empty(self) -> None:
        """The user waits for a message."""
        self._quiet = 0
        if self._spent and self._grows and self.messages_limit < self._base * LARGEST_GROWTH:
            self.messages_limit *= 2
            self._spent = False


class Receiver:
    """Base of Consumer and Reader."""

    def __init__(
        self,
        client: Client,
        topic: str,
        subscription: str,
        kind: str,
        start: Start,
        options: ConsumerOptions,
        consumer_id: int,
        what: str = "",
    ) -> None:
        self._client = client
        self._topic = topic
        self._subscription = subscription
        self._type = kind
        self._start = start_on_wire(start)
        self._options = options
        self._id = consumer_id
        self._loop = asyncio.get_running_loop()
        self._what = what or f"consumer {subscription!r} of {topic}"
        self._attachment = Attachment(client, topic, self, self._what)
        self._link: Link | None = None
        self._epoch = 0
        self._window = Window(options.receiver_queue_messages, options.receiver_queue_bytes)
        self._queue: deque[Delivery] = deque()
        self._queued_messages = 0
        self._queued_bytes = 0
        # The open delivery. Clearing `_messages` ends every iteration over `_current`, which is its iterator.
        self._messages: list[Message] = []
        self._current: Iterator[Message] = iter(self._messages)
        self._last: MessageId | None = None  # the last message handed out before the open delivery
        self._latest_at_start: MessageId | None = None  # the topic's last message when "latest" was asked for
        self._subscribed_before = False
        self._seeking = 0
        self._arrived = asyncio.Event()  # wakes who waits for messages; also set when nothing more will come
        self._attached = asyncio.Event()  # set while there is a link, and when there never will be again
        self._closed = False
        self._failure: MagnetarError | None = None

    @property
    def topic(self) -> str:
        """Full name of the topic."""
        return self._topic

    # --- for users ---------------------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages, for ever; ends when this is closed. Leaving the loop loses nothing: the next one goes on."""
        while True:
            for message in self._current:
                yield message
            if not await self.refill():
                return

    async def receive(self, timeout: float | None = None) -> Message:
        """The next message. Raises ReceiveTimeout after `timeout` seconds (None: waits for ever), AlreadyClosed."""
        for message in self._current:
            return message
        if timeout is not None and timeout <= 0:
            return await self._receive_now()
        try:
            async with asyncio.timeout(timeout):
                while await self.refill():
                    for message in self._current:
                        return message
        except TimeoutError:
            raise ReceiveTimeout(f"{self._what}: no message within {timeout:g} s") from None
        raise AlreadyClosed(f"{self._what} is closed; open another one")

    async def _receive_now(self) -> Message:
        """What has arrived, after one turn of the loop. asyncio.timeout(0) would swallow a cancellation that is pending."""
        await asyncio.sleep(0)
        for message in self._current:
            return message
        while self._queue and not self._seeking:
            self._open_next()
            for message in self._current:
                return message
        if self._closed:
            raise AlreadyClosed(f"{self._what} is closed; open another one")
        self._check_open()
        self._window.found_empty()
        self._grant()
        raise ReceiveTimeout(f"{self._what}: no message has arrived")

    async def batches(self) -> AsyncIterator[MessageBatch]:
        """Messages as they arrived: each item is a non-empty sequence, decoded at once. Ends when this is closed."""
        while (batch := await self.receive_batch()) is not None:
            yield batch

    async def receive_batch(self) -> MessageBatch | None:
        """The next of `batches`; None when this is closed."""
        while True:
            rest = MessageBatch(self._current)
            if rest:
                return rest
            if not await self.refill():
                return None

    async def seek(self, start: Start | Message) -> None:
        """Goes to "earliest", "latest", a message id or a message (inclusive), or a time (datetime or ms).

        What was received and not handed out is dropped; nothing from before the seek arrives after it.
        """
        wire = start_on_wire(start.id if isinstance(start, Message) else start)
        self._check_open()
        self._before_seek(wire)
        self._drop_local()
        self._seeking += 1
        try:
            result = await self._call(Seek(0, self._id, wire))
            self._epoch = max(self._epoch, int(result["epoch"]))
        finally:
            self._seeking -= 1
            self._drop_stale()
            self._grant()
            if self._queue:
                self._arrived.set()
        if self._keeps_place_from_latest:
            self._note_latest(await self._call(LastMessageId(0, self._id)))
        self._subscribed_before = True

    async def close(self) -> None:
        """Leaves the topic; who waits for messages is woken."""
        if self._closed:
            return
        self._closed = True
        await self._before_close()
        link = self._link
        await self._attachment.close()
        self.detached()
        if link is not None:
            await self._client.tell_leaving(link, CloseConsumer(0, self._id))
        self._finish()

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # --- for subclasses ----------------------------------------------------------------------------------------------

    def _before_seek(self, start: tuple[str, Any]) -> None:
        """Settles what refers to the old position."""
        if not self._options.durable:
            self._start = start
            self._last = None
            self._messages.clear()
            self._subscribed_before = False

    async def _before_close(self) -> None:
        """Settles what is pending."""

    async def _subscribed(self, link: Link) -> None:
        """After Subscribe, before any permits."""
        if self._keeps_place_from_latest and not self._subscribed_before:
            timeout = self._client.options.operation_timeout
            self._note_latest(await link.request(LastMessageId(0, self._id), timeout))
        self._subscribed_before = True

    # --- the place of a subscription that is not durable -------------------------------------------------------------

    @property
    def _keeps_place_from_latest(self) -> bool:
        return not self._options.durable and self._start[0] == "latest"

    def _note_latest(self, answer: bytes | None) -> None:
        self._latest_at_start = None if answer is None else MessageId.from_bytes(answer)

    def _position(self) -> MessageId | None:
        """The last message handed out."""
        handed_out = len(self._messages) - length_hint(self._current)
        return self._messages[handed_out - 1].id if handed_out > 0 else self._last

    def _subscribe_start(self) -> tuple[str, Any]:
        """Where the subscription begins if the broker has none of this name (any more)."""
        if self._options.durable:
            return self._start
        position = self._position()
        if position is None and self._start[0] == "latest" and self._subscribed_before:
            # Nothing was handed out yet: what arrived since the beginning must not be skipped.
            if self._latest_at_start is None:
                return ("earliest", None)
            position = self._latest_at_start
        return (
            self._start
            if position is None
            else ("id", position._replace(index=position.index + 1).to_bytes())
        )

    # --- messages ----------------------------------------------------------------------------------------------------

    def open_messages(self) -> Iterator[Message]:
        """What is left of the open delivery; taking from it hands out."""
        return self._current

    async def refill(self) -> bool:
        """Opens the next delivery, waiting for it; False when closed. Raises why nothing more will come, or a damage."""
        while True:
            if length_hint(self._current):
                return True  # another task was faster, and left something
            if self._closed:
                return False
            if self._queue and not self._seeking:
                self._open_next()
                continue
            if self._failure is not None:
                self._check_open()
            if not self._queue:
                self._window.found_empty()
                self._grant()
            self._arrived.clear()
            await self._arrived.wait()

    def _open_next(self) -> None:
        delivery = self._queue.popleft()
        if self._messages:
            self._last = self._messages[-1].id
        self._messages = []
        self._current = iter(self._messages)
        self._queued_messages -= delivery.permits
        self._queued_bytes -= delivery.bytes
        self._grant()
        values = delivery.values()
        messages = map(Message, values, repeat(delivery), count())
        flags = delivery.flags
        self._messages = list(compress(messages, map(not_, flags)) if any(flags) else messages)
        self._current = iter(self._messages)

    def delivered(self, command: Deliver, payload: bytes) -> None:
        """A DELIVER frame (Link calls it). Raises MalformedFrame, which closes the connection."""
        delivery = Delivery(command, payload, self._topic)
        self._window.received(delivery.permits, delivery.bytes)
        if delivery.epoch != self._epoch:
            if delivery.epoch < self._epoch:
                self._grant()
                return
            # Somebody moved the subscription, this consumer or another one: what came before is stale.
            self._epoch = delivery.epoch
            self._drop_stale()
            self._messages.clear()
        self._queue.append(delivery)
        self._queued_messages += delivery.permits
        self._queued_bytes += delivery.bytes
        self._arrived.set()

    def _grant(self) -> None:
        link = self._link
        if link is None:
            return
        permits = self._window.grant(self._queued_messages, self._queued_bytes)
        if permits is not None:
            link.send(Flow(0, self._id, *permits).encode())

    def _drop_local(self) -> None:
        self._queue.clear()
        self._queued_messages = self._queued_bytes = 0
        self._messages.clear()

    def _drop_stale(self) -> None:
        kept = [delivery for delivery in self._queue if delivery.epoch >= self._epoch]
        self._queue = deque(kept)
        self._queued_messages = sum(delivery.permits for delivery in kept)
        self._queued_bytes = sum(delivery.bytes for delivery in kept)

    # --- the connection ----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Attaches for the first time."""
        await self._attachment.open()

    async def attach(self, link: Link) -> None:
        """Subscribes at the broker and grants permits (Attachment calls it)."""
        link.consumers[self._id] = self
        try:
            subscribe = Subscribe(
                0,
                self._id,
                self._topic,
                self._subscription,
                self._type,
                self._subscribe_start(),
                self._options.durable,
                self._options.name,
                self._epoch,
            )
            result = await link.request(subscribe, self._client.options.operation_timeout)
            self._epoch = int(result["epoch"])
            await self._subscribed(link)
        except BaseException as error:
            link.consumers.pop(self._id, None)
            if not isinstance(error, MagnetarError) or error.retryable:
                # Given up, perhaps, before the broker was done: it must not keep the place for nobody.
                link.send(CloseConsumer(0, self._id).encode())
            raise
        self._link = link
        self._window.reset()
        self._grant()
        self._attached.set()

    def moved(self, error: MagnetarError) -> None:
        """The connection broke or the topic moves (Link calls it)."""
        self._attachment.lost(error)

    def refused(self, error: MagnetarError) -> None:
        """The broker ended the consumer for good (Link calls it)."""
        self._attachment.give_up(error)

    def detached(self) -> None:
        """No link any more: what was not handed out comes again from the next."""
        self._last = self._position()
        link, self._link = self._link, None
        self._attached.clear()
        if link is not None:
            link.consumers.pop(self._id, None)
            self._drop_local()

    def gave_up(self, error: MagnetarError) -> None:
        """Nothing more will come."""
        self._failure = error
        self._wake_all()

    def _finish(self) -> None:
        self._closed = True
        self._drop_local()
        self._wake_all()
        self._client.forget(self)

    def _wake_all(self) -> None:
        self._arrived.set()
        self._attached.set()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise copy_of(self._failure)
        if self._closed:
            raise AlreadyClosed(f"{self._what} is closed; open another one")

    async def _call(self, command: Command, payload: bytes = b"") -> Any:
        """A request to whichever broker this is attached to, repeated when the connection breaks meanwhile.

        Raises what the broker answered, or RequestTimeout after operation_timeout.
        """
        client = self._client

        async def ask() -> Any:
            while self._link is None:
                self._check_open()
                await self._attached.wait()
            return await self._link.request(command, client.options.operation_timeout, payload)

        return await until_answered(
            ask, client.options, client.rng, f"{self._what}: {type(command).__name__}"
        )
