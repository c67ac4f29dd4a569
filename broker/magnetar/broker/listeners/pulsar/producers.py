"""Producers of a connection: their SENDs become groups of a session, its receipts SEND_RECEIPTs.

Clients want one receipt for each SEND, in the order in which they were sent and with the sequence ids as they were sent; one
that is ahead makes them close the connection. So a producer keeps a queue of its SENDs, those of one message that follow one
another as one run, and a row of receipts takes as many of them as have its messages:

    sent        7 to 9, a message each | 10, a batch of 10 messages with the last one 19 | 20, a message
    a row       sequence id 7, 13 messages at ledger 4, entry 1, index 3
    receipts    7 to 9 at 4:1|3 to 4:1|5 | 10, 19 at 4:1|6

A session that failed takes nothing more. What is before the SEND that failed is stored yet, and receipted first. Then a SEND
that will never be stored is refused by SEND_ERROR: with most of its reasons the client gives that one message up. In any
case CLOSE_PRODUCER follows, so that the client looks the topic up, opens the producer and sends again what has no receipt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from magnetar.proto.errors import MagnetarError
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.batch import admit_pulsar
from magnetar.proto.pulsar.commands import NO_REQUEST, encode
from magnetar.proto.pulsar.frames import Sends, send_receipts
from magnetar.proto.pulsar.ids import pack_entry

from ...resources.budget import ByteBudget
from ...topics.core.producers import ProducerSession, ReceiptFields, SessionState
from ...topics.topic import Topic
from ..requests import for_client
from .errors import error_text, server_error
from .ports import Link
from .schemas import version_bytes

# SENDs that were taken: the first sequence id, the highest one or 0, how many, messages of each (1, if they are several).
_Sent = tuple[int, int, int, int]


class Producer:
    """One producer. See `ProducerPort`."""

    __slots__ = (
        "_hold_reason", "_name", "_on_closed", "_request_id", "_sent", "_unanswered", "_wait_for", "peer", "producer_id",
        "schema_version", "session", "topic",
    )  # fmt: skip

    def __init__(
        self,
        link: Link,
        command: wire.CommandProducer,
        wait_for: Callable[[ByteBudget], None],
        on_closed: Callable[[Producer], None],
    ) -> None:
        """`wait_for`: stops reading until a budget has room. `on_closed`: the session ended here."""
        self.producer_id = command.producer_id
        self.peer = link
        self.topic: Topic  # these three from its opening on
        self.session: ProducerSession
        self.schema_version: int | None
        self._request_id = command.request_id
        self._name = command.producer_name
        self._unanswered = True  # PRODUCER, even that its producer has to wait
        self._wait_for = wait_for
        self._on_closed = on_closed
        self._sent: deque[_Sent] = deque()  # not receipted yet; the first one may be the one that failed
        self._hold_reason = f"rate of producer {self.producer_id}"

    # --- the way out -------------------------------------------------------------------------------------------------

    def opened(self) -> None:
        """PRODUCER_SUCCESS: it may send."""
        session = self.session
        self._answer(
            producer_name=session.name,
            last_sequence_id=session.last_sequence_id,
            schema_version=version_bytes(self.schema_version),
            topic_epoch=session.topic_epoch if session.topic_epoch >= 0 else None,
            producer_ready=True,
        )

    def _answer(self, **fields: Any) -> None:
        self._unanswered = False
        self.peer.send(encode(wire.CommandProducerSuccess(request_id=self._request_id, **fields)))

    def receipts(self, rows: list[ReceiptFields]) -> None:
        """One write for all of them."""
        sent = self._sent
        receipts: list[tuple[int, int, int, int, int]] = []
        for _, messages, ledger_id, entry_id, index in rows:
            while messages > 0:
                sequence_id, highest, sends, each = sent.popleft()
                answered = min(sends, messages)
                if answered < sends:
                    sent.appendleft((sequence_id + answered, 0, sends - answered, each))
                if ledger_id >= 0:
                    entry = pack_entry(entry_id, index)
                    receipts.append((sequence_id, highest, ledger_id, entry, answered))
                else:
                    receipts += [(sequence_id + n, highest, -1, -1, 1) for n in range(answered)]
                index += answered * each
                messages -= answered * each
        self.peer.send(send_receipts(self.producer_id, receipts))

    def send_failed(self, sequence_id: int, error: MagnetarError) -> None:
        """Once all that was taken before is receipted, what is left begins with the SEND that failed."""
        session = self.session
        self.when_receipted(lambda: self._fail(session, for_client(error)))

    def when_receipted(self, then: Callable[[], None]) -> None:
        """Calls `then` once nothing that was taken of the session is outstanding."""
        if self.session.outstanding:
            self.session.when_drained.append(then)
        else:
            then()

    def _fail(self, session: ProducerSession, error: MagnetarError) -> None:
        if not session.active:  # it was closed meanwhile
            return
        if not error.retryable and self._sent:
            sequence_id, highest, *_ = self._sent[0]
            failed = wire.CommandSendError(
                producer_id=self.producer_id,
                sequence_id=max(sequence_id, highest),
                error=server_error(error),
                message=error_text(error),
            )
            self.peer.send(encode(failed))
        self.topic.producer_left(session, lost=True)
        self.producer_closed(error)

    def send_delayed(self, error: MagnetarError) -> None:
        """Who is not let in yet learns that it has to wait; a producer that waits for receipts has its own time limit."""
        if self._unanswered:
            self._answer(
                producer_name=self._name, last_sequence_id=-1, schema_version=b"", producer_ready=False
            )

    def hold(self, reason: str) -> None:
        """Nothing more is read of the connection until it goes on."""
        if reason:
            self.peer.pause_reading(self._hold_reason)
        else:
            self.peer.resume_reading(self._hold_reason)

    def producer_closed(self, error: MagnetarError) -> None:
        """CLOSE_PRODUCER: the client looks the topic up again, and is told why if that cannot help."""
        self._on_closed(self)
        self.hold("")
        close = wire.CommandCloseProducer(producer_id=self.producer_id, request_id=NO_REQUEST)
        self.peer.send(encode(close))

    # --- the way in --------------------------------------------------------------------------------------------------

    def send(self, sends: Sends) -> None:
        """A run of SENDs. A bad one fails itself and all after it; those before it are published."""
        session = self.session
        payloads, sequence_id = sends.payloads, sends.sequence_id
        if session.state is not SessionState.OPEN or not payloads:
            return
        try:
            groups = admit_pulsar(payloads)
        except MagnetarError as error:
            position = error.details["position"]
            self.send(replace(sends, payloads=payloads[:position]))
            self._sent.append((sequence_id + position, sends.highest_sequence_id, 1, 0))
            session.fail(sequence_id + position, error)
            return
        counts = groups.counts
        if len(counts) == 1 or counts.count(1) == len(counts):
            self._sent.append((sequence_id, sends.highest_sequence_id, len(counts), counts[0]))
        else:
            self._sent += [(sequence_id + n, 0, 1, count) for n, count in enumerate(counts)]
        topic = self.topic
        topic.publish(session, groups)
        if topic.publish_budget.full:
            self._wait_for(topic.publish_budget)
