"""Acknowledgements of a consumer: grouped, sent, awaited.

Acks are grouped (ack_group_messages or ack_group_delay) and sent as ranges. With `receipt=True` a request carries them, and
its answer means that the cursor's change is durable; requests of one loop turn are one. On a lost connection acks that are
queued or unanswered are sent again with the new subscription, before it gets permits.

What was nacked is asked for again when its time comes, and what was not acknowledged within ack_timeout when a look finds
that out. Both wait here: on a lost connection the broker delivers everything again anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

from magnetar.proto.chunks import Key
from magnetar.proto.commands import ACK_ROW, Ack, AckRow, Redeliver, encode_rows
from magnetar.proto.errors import AlreadyClosed, InvalidArgument, MagnetarError, MessageLost
from magnetar.proto.ids import MessageId
from magnetar.runtime.tasks import begin

from ..connection.attachment import OF_ANOTHER_CLUSTER, Attachment
from ..connection.broker_connection import BrokerConnection
from ..connection.pool import LEAVE_TIMEOUT_S
from ..durations import Duration
from ..messages import ACKED, QUEUED, UNACKED, Delivery, Message, MessageBatch
from ..options import ConsumerOptions, checked_delay
from .acks import AckTracker, NackTracker, UnackedTracker, rows_of_ids

_log = logging.getLogger("magnetar.client")

# Rows that one frame carries at most: 48 KB, less than any frame of a client and a broker may have (FRAME_OVERHEAD_BYTES).
ROWS_PER_FRAME = 2_000
# Looks for what is not acknowledged in an ack_timeout; what is found is late by less than the time between two.
CHECKS_PER_TIMEOUT = 10
_CUMULATIVE_TYPES = ("exclusive", "failover")

Acknowledgeable = Message | MessageId | Iterable[Message | MessageId]


class Acknowledger:
    """The acknowledgements of one consumer. What users call is described in `Consumer`."""

    def __init__(self, attachment: Attachment, options: ConsumerOptions) -> None:
        self._attachment = attachment
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._acks = AckTracker()
        self._acks.cluster = attachment.cluster
        self._nacks = NackTracker()
        self._unacked = None if options.ack_timeout is None else UnackedTracker(options.ack_timeout)
        self._group_limit = options.ack_group_messages
        # What everything up to a message is; see ChunkIntake. None: what it says.
        self.up_to: Callable[..., tuple[MessageId | None, list[AckRow]]] | None = None
        self._ack_timer: asyncio.TimerHandle | None = None
        self._nack_timer: asyncio.TimerHandle | None = None
        self._nack_timer_due = 0.0  # loop time
        self.redelivers = 0  # how often messages were given back to the broker that it is attached to
        # What was nacked was acknowledged before its time: nothing comes again.
        self.nothing_given_back: Callable[[], object] = lambda: None
        # What the next request for a receipt carries.
        self._receipt_rows: list[AckRow] = []
        self._receipt_spans: list[_Span] = []
        self._receipt_cumulative: MessageId | None = None
        self._next_receipt: asyncio.Task[None] | None = None
        # Requests for receipts that are not answered, with their rows: (cumulative, payload) pairs.
        self._unanswered: dict[asyncio.Task[None], list[tuple[bool, bytes]]] = {}

    # --- acknowledging -----------------------------------------------------------------------------------------------

    async def ack(self, messages: Acknowledgeable, *, receipt: bool = False) -> None:
        if receipt:
            self._check_open()
            rows, spans = _rows_and_spans(messages, self._attachment.cluster)
            self._receipt_rows += rows
            self._receipt_spans += spans
            await self._receipt()
            return
        acks = self._acks
        if messages.__class__ is Message:
            # AckTracker.add, written out: 50 ns less.
            delivery = messages.delivery
            if delivery.flags[messages.index] == UNACKED:
                delivery.flags[messages.index] = QUEUED
                if not delivery.queued:
                    acks.note(delivery)
                acks.count += 1
            else:
                acks.add(messages)
        else:
            self._ack_other(messages)
        if acks.count >= self._group_limit:
            self.flush()
        elif self._ack_timer is None:
            self._schedule_flush()

    async def ack_cumulative(self, message: Message | MessageId, *, receipt: bool = False) -> None:
        """See Consumer.ack_cumulative."""
        self._check_open()
        if self._options.type not in _CUMULATIVE_TYPES:
            raise InvalidArgument(
                f"ack_cumulative on a {self._options.type} subscription would acknowledge what other consumers hold; use ack"
            )
        message_id: MessageId | None = message.id if isinstance(message, Message) else _checked_id(message)
        if isinstance(message, Message) and message.delivery.cluster != self._attachment.cluster:
            if receipt:
                raise _of_another_cluster(message)
            return
        assert message_id is not None
        message_id, rows = (message_id, []) if self.up_to is None else self.up_to(message_id, receipt=receipt)
        if receipt:
            self._receipt_rows += rows
            if message_id is not None and (
                self._receipt_cumulative is None or message_id > self._receipt_cumulative
            ):
                self._receipt_cumulative = message_id
            await self._receipt()
            return
        self.ack_rows(rows)
        if message_id is not None:
            if self._unacked is not None:
                self._unacked.acked_through(message_id)
            self._acks.add_cumulative(message_id)
        if self._ack_timer is None:
            self._schedule_flush()

    def ack_rows(self, rows: list[AckRow]) -> None:
        """Acknowledges what was not handed out by itself: chunks. Never raises."""
        if rows:
            self._acks.add_rows(rows)
            if self._ack_timer is None:
                self._ack_timer = self._loop.call_later(self._options.ack_group_delay, self.flush)

    def give_back_rows(
        self, key: Key, rows: list[AckRow], delay: float, flags: bytearray | None = None
    ) -> None:
        """Has chunks of a message that nobody has seen as a whole delivered again after `delay` seconds. Never raises.

        flags: of their message. `rows` may grow until then.
        """
        if rows:
            self._nacks.add_rows(
                key, rows, self._loop.time() + delay, bytearray(1) if flags is None else flags
            )
            self._nacks_added()

    def gives_back_before(self, key: Key, place: tuple[int, int, int]) -> bool:
        """True while chunks of this message that nobody has seen, before a place, wait for `give_back_rows`."""
        return self._nacks.has_chunks_before(key, place)

    def is_nacked(self, message_id: MessageId) -> bool:
        """True while a message waits for the time when it is to be delivered again."""
        return message_id in self._nacks

    def nack(self, messages: Message | Iterable[Message], *, delay: Duration | None = None) -> None:
        self._check_open()
        seconds = None if delay is None else checked_delay("delay", delay)
        now = self._loop.time()
        # An id is a tuple of numbers, which would be the "messages" that the error names.
        for message in (messages,) if isinstance(messages, Message | MessageId) else messages:
            if not isinstance(message, Message):
                raise InvalidArgument(f"nack takes messages, not {type(message).__name__}")
            if message.delivery.cluster != self._attachment.cluster:
                continue
            self._nacks.add(message, now + (self._nack_delay(message) if seconds is None else seconds))
        self._nacks_added()

    def _nack_delay(self, message: Message) -> float:
        options = self._options
        policy = options.letter_policy
        if policy is not None and message.redelivery_count >= policy.max_redeliver_count:
            return 0.0  # nobody will see it again: it goes to the dead-letter topic
        if options.nack_backoff is not None:
            return options.nack_backoff.delay(message.redelivery_count)
        return options.nack_delay

    def give_back(self, messages: Iterable[Message], delay: float, *, counted: bool) -> None:
        """Has messages that were not handed out delivered again after `delay` seconds. Never raises."""
        due = self._loop.time() + delay
        for message in messages:
            self._nacks.add(message, due, counted=counted)
        self._nacks_added()

    def _nacks_added(self) -> None:
        if self._nacks.overfull:
            self._redeliver_due()
        elif self._nacks:
            self._schedule_redelivery()

    # --- grouping ----------------------------------------------------------------------------------------------------

    def _ack_other(self, messages: Any) -> None:
        acks = self._acks
        if isinstance(messages, MessageId):
            acks.add_id(_checked_id(messages))
        elif isinstance(messages, Message):
            acks.add(messages)
        elif isinstance(messages, MessageBatch) and _is_range(messages):
            acks.add_range(messages[0].delivery, messages[0].index, messages[-1].index + 1)
        else:
            self._check_open()
            for message in _iterated(messages):
                if isinstance(message, Message):
                    acks.add(message)
                else:
                    acks.add_id(_checked_id(message))

    def _schedule_flush(self) -> None:
        self._check_open()
        self._ack_timer = self._loop.call_later(self._options.ack_group_delay, self.flush)

    def flush(self) -> None:
        """Sends what is queued; without a connection it stays queued."""
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        connection = self._attachment.connection
        if connection is None or not self._acks:
            return
        for cumulative, payload in self._take_ack_frames():
            connection.send(Ack(0, self._attachment.id, cumulative).encode(), payload)

    def _take_ack_frames(self) -> list[tuple[bool, bytes]]:
        frames: list[tuple[bool, bytes]] = []
        cumulative = self._acks.take_cumulative()
        if cumulative is not None:
            frames.append((True, encode_rows(ACK_ROW, [cumulative])))
        return frames + _row_frames(self._acks.take_rows())

    async def _receipt(self) -> None:
        task = self._next_receipt
        if task is None:
            task = self._next_receipt = begin(
                self._request_receipt(self._attachment.cluster),
                f"ack {self._attachment.what}",
                lambda done: done.cancelled() or done.exception(),  # those who waited may all have gone
            )
        # Not awaited itself: one who stops waiting must not take the receipt from the others.
        await asyncio.wait([task])
        if task.cancelled():
            raise self._closed()
        task.result()

    async def _request_receipt(self, cluster: int) -> None:
        """Runs one loop turn after it was asked for, with everything acknowledged until then."""
        task, self._next_receipt = self._next_receipt, None
        assert task is not None
        if cluster != self._attachment.cluster:
            raise MessageLost(f"{self._attachment.what}: an acknowledgement {OF_ANOTHER_CLUSTER}")
        self.flush()  # what was acknowledged before without a receipt keeps its place, and needs none
        rows, self._receipt_rows = self._receipt_rows, []
        spans, self._receipt_spans = self._receipt_spans, []
        last, self._receipt_cumulative = self._receipt_cumulative, None
        frames = (
            [] if last is None else [(True, encode_rows(ACK_ROW, [(last.ledger, last.entry, 0, last.index)]))]
        )
        frames += _row_frames(rows)
        self._unanswered[task] = frames
        try:
            for cumulative, payload in frames:
                await self._attachment.call(Ack(0, self._attachment.id, cumulative), payload)
        finally:
            del self._unanswered[task]
        # Not before: after a failure each of them can be acknowledged again, or nacked.
        for flags, first, end in spans:
            flags[first:end] = bytes([ACKED]) * (end - first)
        if last is not None and self._unacked is not None:
            self._unacked.acked_through(last)

    def _schedule_redelivery(self) -> None:
        due = self._nacks.next_due
        if self._nack_timer is None or due < self._nack_timer_due:
            if self._nack_timer is not None:
                self._nack_timer.cancel()
            self._nack_timer = self._loop.call_at(due, self._redeliver_due)
            self._nack_timer_due = due

    def _redeliver_due(self) -> None:
        """Asks for what is due, and comes back when the next one is."""
        if self._nack_timer is not None:
            self._nack_timer.cancel()
            self._nack_timer = None
        seen, unseen = self._nacks.take_due(self._loop.time())
        self.redeliver(seen)
        self.redeliver(unseen, counted=False)
        if self._nacks:
            self._schedule_redelivery()
        elif not seen and not unseen:
            self.nothing_given_back()

    @property
    def gives_back(self) -> bool:
        """True if something that was nacked waits for its time."""
        return bool(self._nacks)

    def redeliver(self, rows: list[AckRow], *, counted: bool = True) -> None:
        """Gives messages back to the broker; without a connection it has them already."""
        connection = self._attachment.connection
        if connection is not None:
            for _, payload in _row_frames(rows):
                self.redelivers += 1
                connection.send(Redeliver(0, self._attachment.id, counted).encode(), payload)

    # --- ack_timeout -------------------------------------------------------------------------------------------------

    @property
    def check_interval(self) -> float:
        """Seconds between two calls of `redeliver_unacked`; 0: there is no ack_timeout."""
        return 0.0 if self._unacked is None else self._unacked.timeout / CHECKS_PER_TIMEOUT

    def handed_out(self, delivery: Delivery, end: int) -> None:
        """Messages before `end` of the delivery were given to the user."""
        if self._unacked is not None:
            self._unacked.handed_out(delivery, end, self._loop.time())

    def redeliver_unacked(self) -> None:
        """Gives back what was not acknowledged in time."""
        assert self._unacked is not None
        rows = self._unacked.take_due(self._loop.time(), self._nacks)
        if rows:
            count = sum(row.last_index - row.first_index + 1 for row in rows)
            _log.info(
                "%s: %d messages were not acknowledged within %g s and are delivered again",
                self._attachment.what, count, self._unacked.timeout,
            )  # fmt: skip
            self.redeliver(rows)

    # --- what the consumer asks --------------------------------------------------------------------------------------

    async def subscribed(self, connection: BrokerConnection) -> None:
        """Before permits are granted, the broker has answered every ack that waits for a receipt: what it delivers then was
        not acknowledged with one (rule 34)."""
        for cumulative, payload in self._take_ack_frames():
            connection.send(Ack(0, self._attachment.id, cumulative).encode(), payload)
        answered: dict[asyncio.Task[None], None] = {}
        while waiting := [task for task in self._unanswered if task not in answered]:
            for task in waiting:
                answered[task] = None
                for cumulative, payload in self._unanswered.get(task, ()):
                    try:
                        await connection.request(
                            Ack(0, self._attachment.id, cumulative),
                            self._attachment.pool.options.operation_timeout,
                            payload,
                        )
                    except MagnetarError as error:
                        if error.retryable:
                            raise
                        # Refused for good: the request that waits for the receipt gets the same error.

    def forget_nacks(self) -> None:
        """After a seek and on a lost connection the broker delivers again by itself."""
        self._nacks.clear()
        if self._unacked is not None:
            self._unacked.clear()

    def cluster_switched(self) -> None:
        """Ids of messages mean other messages from now on: nothing that was acknowledged before is sent."""
        self.forget()
        self._acks.cluster = self._attachment.cluster
        self._receipt_rows, self._receipt_spans, self._receipt_cumulative = [], [], None
        for task in self._unanswered:
            self._unanswered[task] = []  # they fail by themselves, as Attachment.call does

    def forget(self) -> None:
        """The subscription is deleted."""
        self._acks.clear()
        self.forget_nacks()

    async def settle(self) -> None:
        """Sends what is queued and waits for receipts, before the consumer closes; for a broker it waits 5 s at most."""
        timeout = self._attachment.pool.options.operation_timeout
        with contextlib.suppress(TimeoutError):
            if self._attachment.connection is None and (self._acks or self._receipt_tasks()):
                async with asyncio.timeout(min(LEAVE_TIMEOUT_S, timeout)):
                    await self._attachment.attached.wait()
            self.flush()
            async with asyncio.timeout(timeout):
                while tasks := self._receipt_tasks():
                    await asyncio.wait(tasks)

    def end(self) -> None:
        """The consumer is closed now: sends what can be sent without waiting, ends timers and tasks."""
        self.flush()
        self._group_limit = sys.maxsize  # what is acknowledged later is to be refused, not sent
        for timer in (self._ack_timer, self._nack_timer):
            if timer is not None:
                timer.cancel()
        for task in self._receipt_tasks():
            task.cancel()
            self._attachment.pool.await_end(task)

    def _check_open(self) -> None:
        if self._attachment.closed and self._attachment.failure is None:
            raise self._closed()
        self._attachment.check_open()

    def _closed(self) -> MagnetarError:
        return AlreadyClosed(
            f"{self._attachment.what} is closed; open another one, which gets what was not acknowledged before"
        )

    def _receipt_tasks(self) -> list[asyncio.Task[None]]:
        return [*self._unanswered, *filter(None, [self._next_receipt])]


_Span = tuple[bytearray, int, int]  # flags of a delivery, first and end of the messages meant


def _of_another_cluster(message: Message) -> MagnetarError:
    return MessageLost(
        f"to acknowledge {message.id} of {message.topic} {OF_ANOTHER_CLUSTER}; it may be delivered again"
    )


def _rows_and_spans(messages: Any, cluster: int) -> tuple[list[AckRow], list[_Span]]:
    """What is to be acknowledged, for the broker and in the flags of its deliveries. Raises MessageLost."""
    if isinstance(messages, Message | MessageId):
        messages = (messages,)
    elif isinstance(messages, MessageBatch) and _is_range(messages):
        delivery, first, end = messages[0].delivery, messages[0].index, messages[-1].index + 1
        if delivery.cluster != cluster:
            raise _of_another_cluster(messages[0])
        return delivery.rows(first, end), [(delivery.flags, first, end)]
    rows: list[AckRow] = []
    spans: list[_Span] = []
    for message in _iterated(messages):
        if isinstance(message, Message):
            if message.delivery.cluster != cluster:
                raise _of_another_cluster(message)
            spans.append((message.delivery.flags, message.index, message.index + 1))
            rows += message.delivery.rows(message.index, message.index + 1)
        else:
            rows += rows_of_ids([_checked_id(message)])
    return rows, spans


def _is_range(messages: MessageBatch) -> bool:
    return bool(messages) and messages[-1].index - messages[0].index + 1 == len(messages)


def _iterated(messages: Any) -> Iterable[Any]:
    if isinstance(messages, Iterable) and not isinstance(messages, str | bytes):
        return messages
    raise InvalidArgument(
        f"ack takes messages, message ids or an iterable of them, not {type(messages).__name__}"
    )


def _checked_id(message_id: Any) -> MessageId:
    if not isinstance(message_id, MessageId):
        raise InvalidArgument(f"ack takes messages and message ids, not {type(message_id).__name__}")
    return message_id.place()  # refused here: in a frame it would take the others with it


def _row_frames(rows: list[AckRow]) -> list[tuple[bool, bytes]]:
    starts = range(0, len(rows), ROWS_PER_FRAME)
    return [(False, encode_rows(ACK_ROW, rows[start : start + ROWS_PER_FRAME])) for start in starts]
