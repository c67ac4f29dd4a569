"""A consumer of one topic: the queue of deliveries, permits, and the ways to take messages out.

    DELIVER -> queue of deliveries (undecoded) -> the open delivery, whose messages are decoded together -> one after another

Dropped are deliveries of an older epoch (from before a seek), and on a lost connection everything not handed out yet: the
broker delivers it again. The place in the topic is kept by acknowledgements at the broker, and where the subscription is not
durable by a position as well. A reader is a consumer that acknowledges nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from operator import length_hint
from sys import getrefcount
from typing import Any, Protocol
from weakref import ref

from magnetar.proto.chunks import Key
from magnetar.proto.commands import (
    ACK_ROW,
    Ack,
    ActiveConsumer,
    CloseConsumer,
    Command,
    Deliver,
    EndOfTopic,
    Flow,
    LastMessageId,
    Redeliver,
    Seek,
    Subscribe,
    UnfinishedMessage,
    UnreadableEntry,
    Unsubscribe,
    encode_rows,
)
from magnetar.proto.entry import ENTRY_CHUNKED
from magnetar.proto.errors import (
    AlreadyClosed,
    ChecksumMismatch,
    EntryUnreadable,
    InvalidArgument,
    MagnetarError,
    MalformedFrame,
    MessageLost,
)
from magnetar.proto.ids import MAX_MESSAGES_PER_ENTRY, NO_PARTITION, MessageId, TopicName

from ..connection.attachment import OF_ANOTHER_CLUSTER, Attachment
from ..connection.broker_connection import BrokerConnection
from ..connection.pool import ConnectionPool
from ..messages import Delivery, Failure, Message, SeekTarget, messages_of, of_entry
from ..options import INDIVIDUAL_TYPES, ConsumerOptions, WireStart, start_on_wire
from .acknowledger import Acknowledger
from .chunk_intake import ChunkIntake
from .open_delivery import OpenDelivery
from .resume_point import ResumePoint
from .window import Window

log = logging.getLogger(__name__)

# A message that is kept keeps less than this of its delivery, and headers and keys.
LARGE_DELIVERY_BYTES = 16 * 1024


class DeliveryFilter(Protocol):
    """Takes what the user is not to see, before any of it is handed out: a dead-letter policy.

    It goes by redelivery counts, so what is handed out under one is reported to the broker first, and nothing else counts
    when the connection is lost.
    """

    def takes(self, delivery: Delivery) -> bool:
        """True if it takes all of a delivery that has just come."""

    def take(self, consumer: TopicConsumer, messages: list[Message]) -> bool:
        """Takes the messages of such a delivery; False if they are to be handed out all the same."""

    def shown(self, consumer: TopicConsumer, messages: list[Message]) -> list[Message]:
        """Takes some messages of a delivery that is opened; returns those to be handed out."""


class TopicConsumer:
    """Attached to the broker of its topic. What users call is described in `Consumer` and `Reader`."""

    def __init__(
        self,
        pool: ConnectionPool,
        topic: str,
        consumer_id: int,
        what: str,
        options: ConsumerOptions,
        on_closed: Callable[[], object],
        *,
        create: bool = True,
        on_wake: Callable[[TopicConsumer], object] | None = None,
        delivery_filter: DeliveryFilter | None = None,
    ) -> None:
        """`create`: the topic, if there is none. `on_wake`: something arrived, or nothing more will."""
        if not TopicName.parse(topic).persistent:  # there a subscription ends with its last connection
            options = replace(options, durable=False)
        self._attachment = Attachment(pool, topic, consumer_id, what, self, CloseConsumer, on_closed)
        self.acknowledger = Acknowledger(self._attachment, options)
        self.position = ResumePoint(options)
        self._options = options
        self.partition = TopicName.parse(topic).partition
        self._create = create
        self._on_wake = on_wake
        self._delivery_filter = delivery_filter
        self._epoch = 0
        self._asked_start = self.position.start()  # as it subscribed last
        self.active = options.type != "failover"  # it gets messages; with failover one consumer does
        self._window = Window(
            options.receiver_queue_messages, options.receiver_queue_bytes, pool.queue_budget
        )
        self._queue: deque[Delivery | Failure] = deque()
        self._queued_messages = 0
        self._queued_bytes = 0
        self.open_delivery = OpenDelivery(
            self._attachment, self._handed_out, reports=delivery_filter is not None
        )
        # Large ones that were opened, until they let go of their values, if somebody keeps messages of them.
        self._opened: deque[ref[Delivery]] = deque()
        self.stopped = False  # nothing is handed out any more
        # Epoch, and how often it had given messages back, when the broker had nothing left for it of a terminated topic.
        self._end: tuple[int, int] | None = None
        self.acknowledger.nothing_given_back = self._wake
        self.trimmed_gaps = 0  # how often messages that were to come next had been trimmed
        self._gap: Failure | None = None  # the last one
        self._chunks = ChunkIntake(
            what,
            options,
            self.acknowledger,
            self.position,
            self._window,
            self._enqueue,
            self._grant,
            self._ask_unfinished,
        )
        self.acknowledger.up_to = self._chunks.up_to
        self.arrived = asyncio.Event()  # wakes who waits for messages; also set when nothing more will come
        self._check_timer: asyncio.TimerHandle | None = None  # for ack_timeout, from the first attachment on

    # --- taking messages ---------------------------------------------------------------------------------------------

    def open_messages(self) -> Iterator[Message]:
        """What is left of the open delivery; taking from it hands out."""
        return self.open_delivery.left

    async def refill_now(self, count: int | None) -> bool:
        """Opens the next delivery if it is here.

        Raises what ended the consumer, or what is wrong with a damaged delivery.
        """
        while not length_hint(self.open_delivery.left):
            if self.open_delivery.withholds:
                await self.hand_out(count)
            elif not self.open_next():
                if not self.stopped:
                    self._attachment.check_open()
                    if not self._queue and not self.at_end:
                        self.found_empty()
                return False
        return True

    def open_next(self) -> bool:
        """Opens a delivery that is here, though it may have nothing to hand out; False if none is.

        Raises what is wrong with a damaged delivery.
        """
        if not self._queue or self.open_delivery.held or self.stopped or self.open_delivery.withholds:
            return False
        self._open_next()
        return True

    @property
    def at_end(self) -> bool:
        """The topic is terminated, and nothing comes any more unless this goes back, or gives back what it has handed out.

        The broker has said so, of all that this consumer gave back until now.
        """
        return (
            self._end == (self._epoch, self.acknowledger.redelivers)
            and not self.has_queued
            and not self.open_delivery.withholds
            and not self.open_delivery.held
            and not self.acknowledger.gives_back
        )

    def found_empty(self) -> None:
        """The user waits for a message."""
        if self._chunks.waits_since is None:
            self._chunks.waits_since = asyncio.get_running_loop().time()
        self._window.found_empty()
        self._grant()

    def _open_next(self) -> None:
        delivery = self._queue.popleft()
        self._chunks.waits_since = None
        self.open_delivery.close()
        self._queued_messages -= delivery.permits
        self._queued_bytes -= delivery.bytes
        self._grant()
        try:
            messages = messages_of(delivery)
        except (MalformedFrame, ChecksumMismatch):
            if not isinstance(delivery, Delivery) or delivery.entry.batch_count == 1:
                raise
            # A batch that cannot be read (damaged, or encrypted by a producer of Pulsar's protocol) costs itself only.
            for position in reversed(range(delivery.entry.batch_count)):
                part = delivery.part(position, position + 1)
                self._queue.appendleft(part)
                self._queued_messages += part.permits
                self._queued_bytes += part.bytes
            return
        self._shrink_opened()
        if delivery.bytes >= LARGE_DELIVERY_BYTES and isinstance(delivery, Delivery):
            self._opened.append(ref(delivery))
        self.open_delivery.open(
            messages if self._delivery_filter is None else self._delivery_filter.shown(self, messages)
        )

    async def hand_out(self, count: int | None) -> None:
        """Shows more of the open delivery."""
        if not await self.open_delivery.show(count):
            self._drop_local()  # it comes again on the next connection

    def _shrink_opened(self) -> None:
        """Who keeps a few messages of an entry keeps what they need, not all of it. The last delivery may be in use."""
        opened = self._opened
        for _ in range(min(len(opened) - 1, 2)):  # more than come
            delivery = opened[0]()
            if delivery is not None:
                if getrefcount(delivery) - 2 > max(delivery.count // 4, 1):  # about as many messages are kept
                    opened.rotate(-1)  # perhaps later: it is looked at again
                    continue
                delivery.let_go_of_values()
            opened.popleft()

    def _handed_out(self, last: Message) -> None:
        self.position.handed_out(last)
        self.acknowledger.handed_out(last.delivery, last.index + 1)

    def _check_unacked(self) -> None:
        """Every check_interval."""
        self.open_delivery.note_handed_out()
        self.acknowledger.redeliver_unacked()
        self._schedule_check()

    def _schedule_check(self) -> None:
        interval = self.acknowledger.check_interval
        if interval and not self._attachment.closed:
            loop = asyncio.get_running_loop()
            self._check_timer = loop.call_later(interval, self._check_unacked)

    @property
    def has_next(self) -> bool:
        """True if there is something to open or to show; during a seek, whose end wakes, there is not."""
        return not self.open_delivery.held and bool(self._queue or self.open_delivery.withholds)

    @property
    def has_queued(self) -> bool:
        """True if a delivery is here. It may turn out to be damaged, and during a seek to be stale."""
        return bool(length_hint(self.open_delivery.left) or self._queue)

    def has_handed_out_to(self, last: MessageId) -> bool:
        """True if all has come up to a message, and nothing waits: what was not handed out are chunks. In order only."""
        return self._chunks.has_had(last) and not self.has_queued

    @property
    def unfinished_messages(self) -> int:
        """See Receiving."""
        return self._chunks.dropped

    @property
    def topic(self) -> str:
        """Full name of its topic."""
        return self._attachment.topic

    @property
    def consumers(self) -> Mapping[str, TopicConsumer]:
        """See TopicsConsumer: itself alone."""
        return {self._attachment.topic: self}

    def consumer_of(self, message: Message) -> TopicConsumer:
        """Itself. Raises InvalidArgument if the message is of another topic."""
        if message.topic != self._attachment.topic:
            raise InvalidArgument(f"{self._attachment.what} has no messages of {message.topic}")
        return self

    @property
    def what(self) -> str:
        """What it is called in messages."""
        return self._attachment.what

    @property
    def now_ms(self) -> int:
        """Wall clock of this client."""
        return self._attachment.pool.clock.now_ms()

    @property
    def ended(self) -> bool:
        """See Receiving."""
        return self.stopped or self._attachment.ended

    @property
    def failure(self) -> MagnetarError | None:
        """Why nothing more will come."""
        return self._attachment.failure

    def pause(self) -> None:
        self._window.paused = True

    def resume(self) -> None:
        self._window.paused = False
        self._grant()

    def share_queue(self, parts: int) -> None:
        """The receiver queue is one of so many that share the messages and bytes of the options."""
        self._window.share(parts)
        self._grant()

    # --- moving, leaving ---------------------------------------------------------------------------------------------

    async def seek(self, start: SeekTarget) -> None:
        if callable(start):
            found = start(self._attachment.topic)
            if found is None:
                return
            start = found
        if isinstance(start, MessageId) and start.partition not in (NO_PARTITION, self.partition):
            raise InvalidArgument(f"{self._attachment.what}: {start} is of partition {start.partition}")
        wire = start_on_wire(start.id if isinstance(start, Message) else start)

        def moved(result: dict[str, Any]) -> None:
            self._gap = None
            self._note_trimmed(wire, result)
            self.position.sought_to(wire, MessageId(*result["position"]))

        await self._move(Seek(0, self._attachment.id, wire), moved)

    async def redeliver_unacknowledged(self) -> None:

        def moved(result: dict[str, Any]) -> None:
            if self._options.type not in INDIVIDUAL_TYPES:  # else what comes again lies between what does not
                self.position.moved_to(MessageId(*result["position"]))

        await self._move(Redeliver(0, self._attachment.id, self._delivery_filter is None), moved)

    async def _move(self, command: Command, moved: Callable[[dict[str, Any]], None]) -> None:
        """What was received before its answer is dropped."""
        self._attachment.check_open()
        self.acknowledger.flush()  # what was acknowledged before counts for the old position
        self.open_delivery.take_back()
        self.open_delivery.held += 1
        try:
            result = await self._attachment.call(command)
            self.open_delivery.close()
            if (epoch := int(result["epoch"])) > self._epoch:
                self._epoch = epoch  # else a delivery told of it, and chunks were given back since
                self.acknowledger.forget_nacks()
            moved(result)
        except BaseException as error:
            if not isinstance(error, MagnetarError) or error.retryable:
                # Whether it happened is not known: what is queued may be from before it.
                self._attachment.start_over(error)
            raise
        finally:
            self.open_delivery.held -= 1
            self._drop_before(self._epoch)
            self._grant()
            self._wake()

    async def skip(self, error: EntryUnreadable) -> None:
        if error.topic != self._attachment.topic:
            raise InvalidArgument(f"{self._attachment.what} has no entries of {error.topic}")
        self._attachment.check_open()
        if error.details["cluster"] != self._attachment.cluster:
            raise MessageLost(f"{self._attachment.what}: the entry to skip {OF_ANOTHER_CLUSTER}")
        row = (error.id.ledger, error.id.entry, 0, MAX_MESSAGES_PER_ENTRY - 1)
        await self._attachment.call(Ack(0, self._attachment.id), encode_rows(ACK_ROW, [row]))
        self.position.skipped(error.id)

    def _note_trimmed(self, start: WireStart, answer: Mapping[str, Any]) -> None:
        """The broker has answered where it begins: perhaps not where it was asked to."""
        if answer["trimmed"]:
            wanted = MessageId.from_bytes(start[1])
            text = (
                f"{self._attachment.what}: messages from {wanted} on were trimmed before they were read; it goes on at "
                f"{MessageId(*answer['position'])}"
            )
            log.warning("%s", text)
            self.trimmed_gaps += 1
            self._gap = Failure(self._epoch, MessageLost(text))
        gap = self._gap
        if gap is not None and self._options.fail_on_trimmed and not gap.raised and gap not in self._queue:
            gap.epoch = self._epoch  # a lost connection took it out of the queue
            self._queue.appendleft(gap)
            self._wake()

    async def _ask_unfinished(
        self, key: Key, until: MessageId | None, *, held: bool
    ) -> tuple[bool, MessageId | None]:
        wire = None if until is None else until.to_bytes()
        answer = await self._attachment.call(UnfinishedMessage(0, self._attachment.id, *key, wire, held))
        end: bytes | None = answer["end"]
        return answer["lost"], None if end is None else MessageId.from_bytes(end)

    async def unsubscribe(self) -> None:
        """Deletes the subscription; the consumer is still to be closed."""
        self._attachment.check_open()
        await self._attachment.call(Unsubscribe(0, self._attachment.id))
        self.acknowledger.forget()

    async def last_message_id(self, topic: str | None = None) -> MessageId | None:
        if topic is not None and str(TopicName.parse(topic)) != self._attachment.topic:
            raise InvalidArgument(f"{self._attachment.what} has no messages of {topic}")
        answer: bytes | None = await self._attachment.call(LastMessageId(0, self._attachment.id))
        return None if answer is None else MessageId.from_bytes(answer)._replace(partition=self.partition)

    async def last_message_ids(self) -> dict[str, MessageId | None]:
        return {self.topic: await self.last_message_id()}

    async def has_message_available(self) -> bool:
        """See Reader."""
        if self.has_queued:
            return True
        last = await self.last_message_id()
        self.open_delivery.note_handed_out()
        return last is not None and self.position.is_behind(last) and not self.has_handed_out_to(last)

    def stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            self.open_delivery.take_back()
            self._drop_local()
            self._wake()

    async def close(self) -> None:
        """See Receiving. Cancelled, it does not wait for the broker."""
        self.stop()
        await self._attachment.close()

    def abort(self) -> None:
        self._attachment.abort()

    async def settle(self) -> None:
        """See Attached."""
        await self.acknowledger.settle()

    def leaving(self) -> None:
        """See Attached."""
        self.stop()
        if self._check_timer is not None:
            self._check_timer.cancel()
        self.acknowledger.end()
        if self._chunks.asking is not None:
            self._chunks.asking.cancel()
            self._attachment.pool.await_end(self._chunks.asking)

    def left(self) -> None:
        """See Attached."""

    # --- the connection ----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Attaches for the first time."""
        await self._attachment.open()
        self._schedule_check()

    def opening(self) -> Subscribe:
        """See Attached."""
        self._asked_start = self.position.start()
        return Subscribe(
            0,
            self._attachment.id,
            self.topic,
            self._options.subscription,
            self._options.type,
            self._asked_start,
            self._options.durable,
            self._options.name,
            self._epoch,
            {},
            self._options.priority_level,
            self._options.hash_ranges,
            self._create,
            self._options.read_compacted,
        )

    @property
    def may_wait(self) -> bool:
        return False

    async def opened(self, connection: BrokerConnection, answer: dict[str, Any]) -> None:
        """See Attached."""
        self._epoch = int(answer["epoch"])
        self._note_trimmed(self._asked_start, answer)
        self.position.begins_at(MessageId(*answer["position"]))
        await self.acknowledger.subscribed(connection)

    def attached(self) -> None:
        """Grants permits."""
        self._window.reset()
        self._grant()

    def received(self, command: Command, payload: bytes) -> None:
        """See Attached."""
        match command:
            case Deliver():
                self._delivered(command, payload)
            case ActiveConsumer():
                self.active_changed(command.active)
            case UnreadableEntry():
                self._unreadable(command)
            case EndOfTopic() if command.consumer_epoch >= self._epoch:
                if command.consumer_epoch > self._epoch:
                    self._moved_by_others(command.consumer_epoch)
                self._end = (command.consumer_epoch, command.redelivers)
                self._wake()

    def writing_resumed(self) -> None:
        """See Attached."""

    def active_changed(self, active: bool) -> None:
        """Failover: this consumer takes over, or another one did, which gets what was not handed out here."""
        self.active = active
        if not active:
            self._drop_local()
            self.acknowledger.flush()  # what the broker has before it switches is not delivered to the other one
            self._grant()

    def detached(self, error: BaseException | None) -> None:
        """No connection any more: what was not handed out comes again from the next."""
        self.active = self._options.type != "failover"
        self._window.reset()
        self.open_delivery.note_handed_out()
        self.position.goes_back_to(self._chunks.first_open())
        self._drop_local()
        self.acknowledger.forget_nacks()
        self._end, self.acknowledger.redelivers = None, 0

    def cluster_switched(self) -> None:
        """The next broker is one of another cluster: what was received before means nothing there."""
        self._gap = None
        self._epoch = 0
        self.acknowledger.cluster_switched()
        self.position.cluster_switched()

    def failed(self, error: MagnetarError) -> None:
        """Nothing more will come."""
        self._wake()

    def _wake(self) -> None:
        self.arrived.set()
        if self._on_wake is not None:
            self._on_wake(self)

    def _delivered(self, command: Deliver, payload: bytes) -> None:
        """A DELIVER frame."""
        try:
            delivery: Delivery | Failure = Delivery(
                command, payload, self._attachment.topic, self._attachment.cluster, self.partition
            )
        except MagnetarError as error:
            named = of_entry(error, command.ledger, command.entry, self._attachment.topic)
            delivery = Failure(command.consumer_epoch, named)
            # How many permits it used is not known. To grant too many is better than a consumer that gets nothing more.
            self._window.received(self._window.granted, len(payload))
        self._window.received(delivery.permits, delivery.bytes)
        if delivery.epoch != self._epoch:
            if delivery.epoch < self._epoch:
                self._grant()
                return
            self._moved_by_others(delivery.epoch)
            if isinstance(delivery, Delivery) and not self.open_delivery.held:
                self.position.moved_to(delivery.first_id)
        chunks = self._chunks
        if isinstance(delivery, Delivery):
            if chunks.open:
                chunks.remember(delivery)
            if not delivery.entry.flags & ENTRY_CHUNKED:
                self._enqueue(delivery)
            elif not self.stopped:  # else nobody puts them together, and a single chunk is no message
                chunks.take(delivery)
                self._grant()
            if chunks.in_order:
                end = delivery.base_index + delivery.count
                chunks.last = delivery.epoch, delivery.ledger, delivery.entry_id, end - 1
        else:
            self._enqueue(delivery)
        if chunks.awaited:
            chunks.make_room()

    def _enqueue(self, delivery: Delivery | Failure) -> None:
        """It is to be handed out, unless the filter takes it."""
        if self.position.again is not None and isinstance(delivery, Delivery):
            self.position.hide_handed_out(delivery)
        if (
            self._delivery_filter is not None
            and isinstance(delivery, Delivery)
            and self._delivery_filter.takes(delivery)
        ):
            with contextlib.suppress(MagnetarError):  # what is damaged is received as an error, as always
                if self._delivery_filter.take(self, messages_of(delivery)):
                    self._grant()
                    return
        self._queue.append(delivery)
        self._queued_messages += delivery.permits
        self._queued_bytes += delivery.bytes
        self._window.charge(self._queued_bytes)
        self._wake()

    def _moved_by_others(self, epoch: int) -> None:
        """Somebody else moved the subscription: what came before is stale."""
        self._epoch = epoch
        self.open_delivery.close()
        self._drop_before(self._epoch)
        self.acknowledger.forget_nacks()

    def _unreadable(self, command: UnreadableEntry) -> None:
        """The broker cannot read an entry that this consumer waits for."""
        topic = self._attachment.topic
        place = f"entry {command.entry} of ledger {command.ledger} in {topic}"
        if not command.lost:
            log.warning(
                "%s: waits for %s, which cannot be read now: %s",
                self._attachment.what,
                place,
                command.message,
            )
        elif command.consumer_epoch >= self._epoch:
            error = EntryUnreadable(
                f"{place} is lost: {command.message}; what lies behind it is received after `skip(error)`, or a seek",
                topic=topic,
                id=MessageId(command.ledger, command.entry, 0, self.partition),
                reason=command.message,
                cluster=self._attachment.cluster,
            )
            self._queue.append(Failure(command.consumer_epoch, error))
            self._wake()

    def _grant(self) -> None:
        connection = self._attachment.connection
        if connection is None or self.stopped:
            self._window.charge(self._queued_bytes)
            return
        messages, size = self._queued_messages, self._queued_bytes
        if self._chunks.reading:
            pieces, of_pieces = self._chunks.held()
            messages, size = messages + pieces, size + of_pieces
        permits = self._window.grant(messages, size)
        if permits is not None:
            connection.send(Flow(0, self._attachment.id, *permits).encode())

    def _drop_local(self) -> None:
        """Nothing that is here is handed out any more."""
        self._drop_before(sys.maxsize)
        self.open_delivery.close()

    def _drop_before(self, epoch: int) -> None:
        """What came in an older epoch comes again, or nothing more comes."""
        what = self._attachment.what
        lost: MagnetarError = MessageLost(
            f"{what}: the rest of the message did not come; it comes again as another message"
        )
        if self.stopped:
            lost = AlreadyClosed(f"{what} was stopped, or is closed")
        self._chunks.clear(lost, epoch)
        self._queue = deque(delivery for delivery in self._queue if delivery.epoch >= epoch)
        self._queued_messages = sum(delivery.permits for delivery in self._queue)
        self._queued_bytes = sum(delivery.bytes for delivery in self._queue)
        self._window.charge(self._queued_bytes)
