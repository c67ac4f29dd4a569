"""The listener's side of producers and consumers: how receipts and deliveries become frames, and SENDs become groups."""

from __future__ import annotations

from typing import Any, Protocol

from magnetar.proto import commands as c
from magnetar.proto.batch import AdmittedGroups, admit_groups
from magnetar.proto.errors import MagnetarError, ServiceNotReady, StorageFailed
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES

from ...dispatch.core.consumer import Consumer, Delivery
from ...dispatch.subscription import Subscription
from ...resources.budget import ByteBudget
from ...topics.producers import ProducerSession, ReceiptFields, SessionState
from ...topics.topic import Topic

Payload = bytes | bytearray | memoryview
_RECEIPT_PACK = c.RECEIPT_ROW.pack


class Link(Protocol):
    """What is used of `magnetar.runtime.connection.Connection`."""

    writable: bool

    def send(self, header: bytes, payload: Any = b"") -> None:
        """One frame."""

    def answer(self, request_id: int, result: Any = None) -> None:
        """Ok, if the id is not 0."""

    def answer_error(self, request_id: int, error: MagnetarError) -> None:
        """Failed, if the id is not 0."""

    def authorize(self, operation: str, resource: str) -> None:
        """Raises NotAuthorized."""

    def pause_reading(self, reason: str) -> None:
        """Until every reason is withdrawn."""

    def resume_reading(self, reason: str) -> None:
        """Withdraws a reason."""

    def close(self, error: MagnetarError | None = None) -> None:
        """Flushes, then closes."""


class PortOwner(Protocol):
    """The connection that the ports belong to."""

    def wait_for(self, budget: ByteBudget) -> None:
        """Stops reading until there is room."""

    def producer_gone(self, producer: ProducerSide) -> None:
        """The topic ended the session."""

    def consumer_gone(self, port: ConsumerSide) -> None:
        """The topic ended the consumer."""

    def fail(self, error: MagnetarError) -> None:
        """Ends the connection."""


class ProducerSide:
    """One producer of this connection: the session's port, and the way in for its SENDs."""

    __slots__ = ("connection", "link", "producer_id", "receipt_header", "send_header", "session", "topic")

    def __init__(self, connection: PortOwner, link: Link, producer_id: int, topic: Topic) -> None:
        self.connection = connection
        self.link = link
        self.producer_id = producer_id
        self.topic = topic
        self.session: ProducerSession = _NO_SESSION
        self.receipt_header = b""
        self.send_header = b""  # under which the connection finds this producer; empty before its first SEND

    def opened(self, session: ProducerSession) -> None:
        """The topic let the session in."""
        self.session = session
        self.receipt_header = c.Receipt(0, self.producer_id, session.epoch).encode()

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
            self.connection.wait_for(topic.publish_budget)

    def receipts(self, rows: list[ReceiptFields]) -> None:
        """See `ProducerPort`."""
        pack = _RECEIPT_PACK
        self.link.send(self.receipt_header, b"".join([pack(*row) for row in rows]))

    def send_failed(self, sequence_id: int, error: MagnetarError) -> None:
        """See `ProducerPort`."""
        failed = c.SendFailed.of(self.producer_id, self.session.epoch, sequence_id, for_client(error))
        self.link.send(failed.encode())

    def producer_closed(self, error: MagnetarError) -> None:
        """See `ProducerPort`."""
        self.connection.producer_gone(self)
        self.link.send(c.CloseProducer(0, self.producer_id).encode())


class _NoPort:
    """Stands where no producer is known yet."""

    def receipts(self, rows: list[ReceiptFields]) -> None:
        """Nobody."""

    def send_failed(self, sequence_id: int, error: MagnetarError) -> None:
        """Nobody."""

    def producer_closed(self, error: MagnetarError) -> None:
        """Nobody."""


_NO_SESSION = ProducerSession("", -1, _NoPort())
_NO_SESSION.close()


class ConsumerSide:
    """One consumer of this connection: the subscription's port."""

    __slots__ = ("connection", "consumer", "consumer_id", "link", "subscription", "topic")

    def __init__(self, connection: PortOwner, link: Link, consumer_id: int, topic: Topic) -> None:
        self.connection = connection
        self.link = link
        self.consumer_id = consumer_id
        self.topic = topic
        self.subscription: Subscription
        self.consumer: Consumer

    @property
    def writable(self) -> bool:
        """See `ConsumerPort`."""
        return self.link.writable

    def deliver(self, delivery: Delivery) -> None:
        """See `ConsumerPort`. A whole entry goes out as a view of the stored bytes."""
        _, epoch, ledger_id, entry_id, entry, first, last, redelivery_count, hidden = delivery
        parts: list[Payload] = []
        if hidden:
            parts.append(c.encode_rows(c.ACK_SET_ROW, hidden))
        if first == 0 and last == entry.batch_count:
            parts.append(memoryview(entry.data)[LEDGER_ENTRY_HEADER_BYTES:])
        else:
            parts += entry.slice(first, last)
        header = c.Deliver(
            0, self.consumer_id, epoch, ledger_id, entry_id, -1, redelivery_count, len(hidden)
        ).encode()
        try:
            self.link.send(header, parts)
        except MagnetarError as error:  # an entry larger than this peer takes: it cannot be served
            self.connection.fail(error)

    def consumer_closed(self, error: MagnetarError) -> None:
        """See `ConsumerPort`."""
        self.connection.consumer_gone(self)
        self.link.send(c.CloseConsumer(0, self.consumer_id).encode())


def first_sequence_id(payload: bytes) -> int:
    """Of the first batch of a group; 0 if it is too damaged to tell."""
    return int.from_bytes(payload[24:32], "big") if len(payload) >= 32 else 0


def for_client(error: MagnetarError) -> MagnetarError:
    """What a client is told: a broken disk is final for this process, which stops, and not for whoever asks again.

    Told as it is, a consumer that subscribes anew in just that moment would be closed for good.
    """
    if isinstance(error, StorageFailed):
        return ServiceNotReady(f"the service is stopping because its storage failed: {error.message}")
    return error
