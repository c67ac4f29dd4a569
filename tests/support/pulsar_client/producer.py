"""A producer: batches, chunks, receipts in order, and what has no receipt sent again where the producer comes back.

Sequence ids count up from what the broker knows when the producer is opened first. Clients write those of a batch in three
ways: Java the first and the last one, Go the first, C++ 4.0 the last.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from magnetar.proto.errors import AlreadyClosed, MagnetarError
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.frames import encode_frame
from magnetar.proto.pulsar.ids import signed
from support.pulsar_messages import batch, frame, single

from .attachment import Attachment
from .connection import Connection, refused
from .unacked import Id

if TYPE_CHECKING:
    from .client import PulsarClient

_SHARED, _CHECKSUM = wire.ProducerAccessMode.SHARED, wire.ServerError.ChecksumError


@dataclass(frozen=True, kw_only=True)
class ProducerOptions:
    """See Java's `ProducerBuilder`."""

    name: str = ""
    max_batch: int = 0  # messages; 0: none is batched
    linger_s: float = 0.001
    one_key_a_batch: bool = False  # a message of another key begins the next one
    sequence_ids: Literal["first and last", "first", "last"] = "first and last"  # of a batch
    max_message_bytes: int = 5 * 1024 * 1024  # above: chunks
    access_mode: wire.ProducerAccessMode = _SHARED


@dataclass
class _Sent:
    """One SEND; `receipts` of its messages, or of one whose last chunk it is."""

    sequence_id: int
    highest: int
    frame: bytes
    messages: int
    receipts: list[asyncio.Future[tuple[Id, ...]]]
    chunks: list[Id] | None = None  # of a message in chunks, which grows with their receipts


@dataclass
class _Message:
    value: bytes
    key: str | None
    deliver_at_ms: int | None
    sequence_id: int
    receipt: asyncio.Future[tuple[Id, ...]] = field(repr=False)


class Producer:
    """Made by `PulsarClient.create_producer`."""

    def __init__(self, client: PulsarClient, topic: str, id: int, options: ProducerOptions) -> None:
        self.name = options.name
        self.last_sequence_id = -1  # when it was opened first
        self.protocol_errors: list[str] = []  # for which a client closes the connection
        self._client = client
        self._topic = topic
        self._id = id
        self._options = options
        self._epoch = 0
        self._topic_epoch: int | None = None
        self._next: int | None = None  # sequence id
        self._batch: list[_Message] = []
        self._timer: asyncio.TimerHandle | None = None
        self._pending: deque[_Sent] = deque()  # sent or to be sent, and without a receipt
        self.attachment = Attachment(
            client,
            topic,
            ("producer", id),
            self,
            open=self._open,
            opened=self._opened,
            give_up=self._close_at,
        )

    def send(
        self, value: bytes, key: str | None = None, *, deliver_at_ms: int | None = None
    ) -> asyncio.Future[tuple[Id, ...]]:
        """The ids: of the message, or of each of its chunks."""
        assert self._next is not None
        receipt: asyncio.Future[tuple[Id, ...]] = asyncio.get_running_loop().create_future()
        if self.attachment.ended is not None:
            receipt.set_exception(self.attachment.ended)
            return receipt
        message = _Message(value, key, deliver_at_ms, self._next, receipt)
        self._next += 1
        alone = deliver_at_ms is not None or not self._options.max_batch
        if len(value) > self._options.max_message_bytes:
            self.flush()
            self._send_chunks(message)
        elif alone:
            self.flush()
            self._queue(message.sequence_id, 0, frame(value, **self._metadata(message)), 1, [receipt])
        else:
            if self._batch and self._options.one_key_a_batch and self._batch[0].key != key:
                self.flush()
            self._batch.append(message)
            if len(self._batch) >= self._options.max_batch:
                self.flush()
            elif self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self._options.linger_s, self.flush)
        return receipt

    def flush(self) -> None:
        """Sends the batch that is being filled."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        messages, self._batch = self._batch, []
        if not messages:
            return
        first, last = messages[0].sequence_id, messages[-1].sequence_id
        style = self._options.sequence_ids
        sequence_id = last if style == "last" else first
        highest = last if style == "first and last" else 0
        singles = [_single(one) for one in messages]
        metadata = {**self._metadata(messages[0]), "sequence_id": sequence_id}
        if highest:
            metadata["highest_sequence_id"] = highest
        content = batch(singles, **metadata)
        self._queue(sequence_id, highest, content, len(messages), [one.receipt for one in messages])

    async def close(self) -> None:
        """CLOSE_PRODUCER; what has no receipt fails."""
        self.flush()
        connection = self.attachment.close()
        self._fail(AlreadyClosed("the producer was closed"))
        if connection is not None and not connection.closed:
            await connection.ask(
                wire.CommandCloseProducer(producer_id=self._id), self._client.operation_timeout_s
            )

    # --- out ---------------------------------------------------------------------------------------------------------

    def _metadata(self, message: _Message) -> dict[str, Any]:
        found: dict[str, Any] = {
            "producer_name": self.name,
            "sequence_id": message.sequence_id,
            "publish_time": self._client.now_ms(),
        }
        if message.key is not None:
            found["partition_key"] = message.key
        if message.deliver_at_ms is not None:
            found["deliver_at_time"] = message.deliver_at_ms
        return found

    def _send_chunks(self, message: _Message) -> None:
        size, value = self._options.max_message_bytes, message.value
        parts = [value[at : at + size] for at in range(0, len(value), size)]
        ids: list[Id] = []
        uuid = f"{self.name}-{message.sequence_id}-{self._client.rng.getrandbits(32)}"
        for number, part in enumerate(parts):
            content = frame(
                part,
                uuid=uuid,
                chunk_id=number,
                num_chunks_from_msg=len(parts),
                total_chunk_msg_size=len(value),
                **self._metadata(message),
            )
            receipts = [message.receipt] if number == len(parts) - 1 else []
            self._queue(message.sequence_id, 0, content, 1, receipts, ids)

    def _queue(
        self,
        sequence_id: int,
        highest: int,
        content: bytes,
        messages: int,
        receipts: list[asyncio.Future[tuple[Id, ...]]],
        chunks: list[Id] | None = None,
    ) -> None:
        send = wire.CommandSend(producer_id=self._id, sequence_id=sequence_id)
        if messages > 1:
            send.num_messages = messages
        if highest:
            send.highest_sequence_id = highest
        if chunks is not None:
            send.is_chunk = True
        command = wire.BaseCommand(type=wire.BaseCommand.SEND, send=send).SerializeToString()
        sent = _Sent(sequence_id, highest, encode_frame(command, content), messages, receipts, chunks)
        self._pending.append(sent)
        if self.attachment.connection is not None:
            self.attachment.connection.write(sent.frame)

    async def _open(self, connection: Connection) -> None:
        command = wire.CommandProducer(
            topic=self._topic,
            producer_id=self._id,
            epoch=self._epoch,
            producer_access_mode=self._options.access_mode,
            user_provided_producer_name=bool(self._options.name),
        )
        self._epoch += 1
        if self.name:
            command.producer_name = self.name
        if self._topic_epoch is not None:
            command.topic_epoch = self._topic_epoch
        answer: wire.CommandProducerSuccess = await connection.ask(command, self._client.operation_timeout_s)
        self.name = answer.producer_name
        if answer.HasField("topic_epoch"):
            self._topic_epoch = answer.topic_epoch
        if self._next is None:
            self.last_sequence_id = answer.last_sequence_id
            self._next = answer.last_sequence_id + 1

    def _opened(self) -> None:
        assert self.attachment.connection is not None
        self.attachment.connection.write(b"".join([sent.frame for sent in self._pending]))

    def _close_at(self, connection: Connection) -> None:
        connection.send(wire.CommandCloseProducer(producer_id=self._id, request_id=0))

    # --- in ----------------------------------------------------------------------------------------------------------

    def detached(self, connection: Connection) -> None:
        """See Handler."""
        self.attachment.lost(connection)

    def received(self, name: str, command: Any, rest: bytes) -> None:
        """SEND_RECEIPT, SEND_ERROR."""
        if name == "send_receipt":
            self._receipt(command)
        else:
            self._send_failed(command)

    def _receipt(self, receipt: wire.CommandSendReceipt) -> None:
        expected = self._pending[0] if self._pending else None
        if expected is None or receipt.sequence_id < expected.sequence_id:
            return  # of what is not waited for any more
        if (receipt.sequence_id, receipt.highest_sequence_id) != (expected.sequence_id, expected.highest):
            self._protocol_error(
                f"{self.name} waits for a receipt of {expected.sequence_id}, {expected.highest} and got one of "
                f"{receipt.sequence_id}, {receipt.highest_sequence_id}"
            )
            return
        self._pending.popleft()
        ledger, entry = signed(receipt.message_id.ledger_id), signed(receipt.message_id.entry_id)
        if expected.chunks is not None:
            expected.chunks.append(Id(ledger, entry))
            ids = [tuple(expected.chunks)]
        elif expected.messages == 1 and not self._options.max_batch:
            ids = [(Id(ledger, entry),)]
        else:
            ids = [(Id(ledger, entry, number, expected.messages),) for number in range(expected.messages)]
        for waiting, found in zip(expected.receipts, ids):
            if not waiting.done():
                waiting.set_result(found)

    def _protocol_error(self, text: str) -> None:
        self.protocol_errors.append(text)
        if self.attachment.connection is not None:
            self.attachment.connection.close()

    def _send_failed(self, error: wire.CommandSendError) -> None:
        """A damaged one is sent again, others are given up; C++ and Go close the connection in any case."""
        if (
            error.error != _CHECKSUM
            and self._pending
            and error.sequence_id == max(self._pending[0].sequence_id, self._pending[0].highest)
        ):
            for waiting in self._pending.popleft().receipts:
                if not waiting.done():
                    waiting.set_exception(refused(error.error, error.message))
        if self.attachment.connection is not None:
            self.attachment.connection.close()

    def _fail(self, error: MagnetarError) -> None:
        for sent in self._pending:
            for waiting in sent.receipts:
                if not waiting.done():
                    waiting.set_exception(error)
        self._pending.clear()


def _single(one: _Message) -> bytes:
    fields: dict[str, Any] = {} if one.key is None else {"partition_key": one.key}
    return single(one.value, sequence_id=one.sequence_id, **fields)
