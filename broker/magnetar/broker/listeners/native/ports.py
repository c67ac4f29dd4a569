"""Producers and consumers of a connection: receipts and deliveries become frames, SENDs become groups."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from magnetar.proto import commands as c
from magnetar.proto.admission import AdmittedGroups, admit_groups
from magnetar.proto.errors import (
    FrameTooLarge,
    MagnetarError,
    MessageTooLarge,
)
from magnetar.proto.ids import NO_PARTITION
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.connection import Piece

from ...cursors.core.acks import EntryKey
from ...dispatch.core.consumer import Delivery, Peer
from ...resources.budget import ByteBudget
from ...service.operations import Caller
from ...topics.core.producers import ProducerSession, ReceiptFields, SessionState
from ...topics.topic import Topic
from ..backpressure import Pausable
from ..requests import for_client

_log = logging.getLogger(__name__)

_RECEIPT_PACK = c.RECEIPT_ROW.pack


class Link(Peer, Caller, Pausable, Protocol):
    """What is used of `magnetar.runtime.connection.Connection`."""

    def send(self, header: bytes, payload: Any = b"") -> None:
        """One frame."""

    def answer(self, request_id: int, result: Any = None) -> None:
        """Ok, if the id is not 0."""

    def answer_error(self, request_id: int, error: MagnetarError) -> None:
        """Failed, if the id is not 0."""


class Producer:
    """One producer: receipts and failures become frames, its SENDs groups of its session. See `ProducerPort`."""

    __slots__ = (
        "_epoch", "_on_closed", "_receipt_header", "_wait_for", "peer", "producer_id", "send_header", "session", "topic",
    )  # fmt: skip

    def __init__(
        self,
        link: Link,
        producer_id: int,
        epoch: int,
        wait_for: Callable[[ByteBudget], None],
        on_closed: Callable[[Producer], None],
    ) -> None:
        """`wait_for`: stops reading until a budget has room. `on_closed`: the topic ended the session."""
        self.producer_id = producer_id
        self.peer = link
        self.topic: Topic  # from its opening on
        self.session: ProducerSession
        self.send_header = b""  # under which the connection finds this producer; empty before its first SEND
        self._epoch = epoch
        self._wait_for = wait_for
        self._on_closed = on_closed
        self._receipt_header = c.Receipt(0, producer_id, epoch).encode()

    # --- the way out -------------------------------------------------------------------------------------------------

    def receipts(self, rows: list[ReceiptFields]) -> None:
        """One frame for all of them, or as many as the peer's frames are small (rule 42)."""
        pack = _RECEIPT_PACK
        try:
            self.peer.send(self._receipt_header, b"".join([pack(*row) for row in rows]))
        except FrameTooLarge:
            middle = len(rows) // 2
            if not middle:
                raise
            self.receipts(rows[:middle])
            self.receipts(rows[middle:])

    def send_failed(self, sequence_id: int, error: MagnetarError) -> None:
        """SEND_FAILED."""
        failed = c.SendFailed.of(self.producer_id, self._epoch, sequence_id, for_client(error))
        self.peer.send(failed.encode())

    def send_delayed(self, error: MagnetarError) -> None:
        """SEND_DELAYED."""
        delayed = c.SendDelayed.of(self.producer_id, self._epoch, for_client(error))
        self.peer.send(delayed.encode())

    def hold(self, reason: str) -> None:
        """HOLD_PRODUCER."""
        self.peer.send(c.HoldProducer(0, self.producer_id, self._epoch, reason[: c.MAX_ERROR_CHARS]).encode())

    def producer_closed(self, error: MagnetarError) -> None:
        """The topic ended the session."""
        self._on_closed(self)
        self.peer.send(c.CloseProducer.of(self.producer_id, for_client(error)).encode())

    # --- the way in --------------------------------------------------------------------------------------------------

    def send(self, payloads: list[bytes]) -> None:
        """A run of SENDs. A bad one fails itself and all after it; those before it are published."""
        session = self.session
        if session.state is not SessionState.OPEN:
            return
        try:
            groups = admit_groups(payloads)
        except MagnetarError as error:
            position = error.details.get("position", 0)
            if position:
                self._publish(admit_groups(payloads[:position]), payloads[:position])
            session.fail(first_sequence_id(payloads[position]), error)
            return
        self._publish(groups, payloads)

    def _publish(self, groups: AdmittedGroups, payloads: list[bytes]) -> None:
        topic = self.topic
        if len(groups.batches) == len(payloads):
            topic.publish(self.session, groups)
        else:  # groups of several batches: each is stored in one entry
            for payload in payloads:
                topic.publish(self.session, admit_groups([payload]), whole=True)
        if topic.publish_budget.full:
            self._wait_for(topic.publish_budget)


class ConsumerPort:
    """The way out of one consumer: deliveries as frames. See `dispatch.core.consumer.ConsumerPort`.

    A delivery that is larger than the peer's frames is cut at batch borders. A batch that does not fit alone ends the
    consumer with an error that is final for it: leaving the batch out would lose it, trying again would never end.
    """

    __slots__ = ("_on_ended", "_partition", "_stopped", "consumer_id", "peer")

    def __init__(
        self,
        link: Link,
        consumer_id: int,
        on_ended: Callable[[ConsumerPort, MagnetarError], None],
        partition: int = NO_PARTITION,
    ) -> None:
        """`on_ended`: the topic ended the consumer, or the port did, of which the topic does not know yet.

        `partition`: the number of its topic, for the ids of messages.
        """
        self.consumer_id = consumer_id
        self.peer = link
        self._on_ended = on_ended
        self._partition = partition
        self._stopped = False  # nothing is sent after a batch that was not

    @property
    def writable(self) -> bool:
        """False while the connection's write buffer is full."""
        return self.peer.writable and not self._stopped

    def deliver(self, delivery: Delivery) -> None:
        """DELIVER, one or several."""
        if self._stopped:
            return
        try:
            self._send(delivery)
        except FrameTooLarge as error:
            middle = (delivery.first_batch + delivery.last_batch) // 2
            if middle > delivery.first_batch:
                self._deliver_part(delivery, delivery.first_batch, middle)
                self._deliver_part(delivery, middle, delivery.last_batch)
            else:
                self._stop(delivery, error)

    def _deliver_part(self, delivery: Delivery, first_batch: int, last_batch: int) -> None:
        entry = delivery.entry
        first, last = entry.batch_start_index(first_batch), entry.end_indexes[last_batch - 1] - 1
        hidden = [(max(a, first), min(b, last)) for a, b in delivery.hidden if a <= last and b >= first]
        if hidden != [(first, last)]:
            self.deliver(delivery._replace(first_batch=first_batch, last_batch=last_batch, hidden=hidden))

    def _send(self, delivery: Delivery) -> None:
        """A whole entry goes out as a view of the stored bytes, without batches that are hidden as a whole.

        Raises FrameTooLarge, and has sent nothing then.
        """
        _, epoch, ledger_id, entry_id, entry, first, last, redelivery_count, hidden = delivery
        parts: list[Piece] = []
        if hidden:
            parts.append(c.encode_rows(c.ACK_SET_ROW, hidden))
            parts += entry.gather(first, last, hidden)
        elif first == 0 and last == entry.batch_count:
            parts.append(memoryview(entry.data)[LEDGER_ENTRY_HEADER_BYTES:])
        else:
            parts += entry.slice(first, last)
        header = c.Deliver(
            0, self.consumer_id, epoch, ledger_id, entry_id, self._partition, redelivery_count, len(hidden)
        ).encode()
        self.peer.send(header, parts)

    def _stop(self, delivery: Delivery, error: FrameTooLarge) -> None:
        self._stopped = True
        entry, batch = delivery.entry, delivery.first_batch
        start, end = entry.batch_bounds(batch)
        index = entry.batch_start_index(batch)
        final = MessageTooLarge(
            f"the batch at {delivery.ledger_id}:{delivery.entry_id}:{index} has {end - start} bytes and needs a frame of "
            f"{error.details.get('length', end - start)}, more than this client takes: connect with a max_message_bytes "
            f"of {end - start} or more; nothing after it is delivered to this consumer"
        )
        _log.warning("consumer %d is closed: %s", self.consumer_id, final)
        self._on_ended(self, final)

    def active_changed(self, active: bool) -> None:
        """ACTIVE_CONSUMER."""
        self.peer.send(c.ActiveConsumer(0, self.consumer_id, active).encode())

    def sought(self) -> None:
        """Nothing: whatever comes from now on has a higher epoch."""

    def end_of_topic(self, epoch: int, redelivers: int) -> None:
        """END_OF_TOPIC."""
        self.peer.send(c.EndOfTopic(0, self.consumer_id, epoch, redelivers).encode())

    def entry_unreadable(self, epoch: int, key: EntryKey, error: MagnetarError, *, lost: bool) -> None:
        """UNREADABLE_ENTRY."""
        text = for_client(error).message[: c.MAX_ERROR_CHARS]
        self.peer.send(c.UnreadableEntry(0, self.consumer_id, epoch, *key, lost, text).encode())

    def consumer_closed(self, error: MagnetarError) -> None:
        """The topic ended the consumer."""
        self._on_ended(self, error)


def first_sequence_id(payload: bytes) -> int:
    """Of the first batch of a group; 0 if it is too damaged to tell."""
    return int.from_bytes(payload[24:32], "big") if len(payload) >= 32 else 0
