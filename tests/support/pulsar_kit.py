"""Consumers of Pulsar's protocol on a broker in memory, behind a link without a socket; what they are sent, decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from magnetar.broker import Broker
from magnetar.broker.listeners.pulsar.consumers import Consumer
from magnetar.broker.listeners.pulsar.transcoded import Transcoded
from magnetar.broker.listeners.requests import Requests
from magnetar.broker.service.broker import BrokerService
from magnetar.broker.service.results import ProducerOpened
from magnetar.broker.topics.core.producers import ReceiptFields
from magnetar.proto.errors import MagnetarError
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.batch import admit_pulsar
from magnetar.proto.pulsar.commands import FIELDS, decode
from magnetar.proto.pulsar.ids import decode_ack_set
from support.broker_kit import settle
from support.pulsar_messages import batch, frame, read_frame, single


class Received(NamedTuple):
    """A MESSAGE, without what its ack set leaves out."""

    consumer_id: int
    ledger: int
    entry: int  # packed
    values: list[bytes]
    redelivered: int = 0
    ack_set: tuple[int, ...] = ()
    epoch: int | None = None
    batched: bool = False

    @property
    def id(self) -> tuple[int, int]:
        """As ACK and other commands name it."""
        return self.ledger, self.entry

    def place(self) -> tuple[int, int]:
        """Our entry, and the index in it."""
        return self.entry >> 20, self.entry & (1 << 20) - 1


class FakeLink:
    """See `listeners.pulsar.ports.Link`; `sent` are the commands, in order."""

    address = "127.0.0.1:50000"
    client_version = "Pulsar-Java-v4.0.6"
    protocol_version = 21
    max_message_bytes = 5 * 1024 * 1024

    def __init__(self) -> None:
        self.writable = True
        self.writes = 0  # of messages
        self.sent: list[tuple[str, Any]] = []
        self.messages: list[Received] = []
        self.forbidden: set[str] = set()

    def authorize(self, operation: str, resource: str) -> None:
        """Allows everything."""

    def probe(self) -> asyncio.Future[None]:
        """Somebody is there."""
        probe: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        probe.set_result(None)
        return probe

    def write(self, pieces: Sequence[bytes | bytearray | memoryview], size: int) -> None:
        """Messages."""
        self.writes += 1
        data = b"".join(pieces)
        assert len(data) == size
        while data:
            total, command = int.from_bytes(data[:4], "big"), int.from_bytes(data[4:8], "big")
            found = decode(data[8 : 8 + command])
            self._received(found.message, data[8 + command : 4 + total])
            data = data[4 + total :]

    def send(self, frames: bytes) -> None:
        """One command."""
        found = decode(frames[8:])
        name = FIELDS[found.type]
        self.sent.append((name, getattr(found, name)))

    def answer_error(self, request_id: int, error: MagnetarError) -> None:
        """ERROR."""
        self.sent.append(("error", (request_id, error)))

    def pause_reading(self, reason: str) -> None:
        """Not used by consumers."""

    def resume_reading(self, reason: str) -> None:
        """Not used by consumers."""

    def close(self, error: MagnetarError | None = None) -> None:
        """Not used by consumers."""

    def _received(self, command: wire.CommandMessage, body: bytes) -> None:
        metadata, found = read_frame(body)
        values = [value for _, value in found]
        if command.ack_set:
            gone = {n for a, b in decode_ack_set(command.ack_set, len(values)) for n in range(a, b + 1)}
            values = [value for number, value in enumerate(values) if number not in gone]
        epoch = command.consumer_epoch if command.HasField("consumer_epoch") else None
        message_id, ack_set = command.message_id, tuple(command.ack_set)
        batched = metadata.HasField("num_messages_in_batch")
        self.sent.append(("message", command))
        self.messages.append(
            Received(
                command.consumer_id,
                message_id.ledger_id,
                message_id.entry_id,
                values,
                command.redelivery_count,
                ack_set,
                epoch,
                batched,
            )
        )

    def take(self) -> list[Received]:
        """The messages since the last call."""
        taken, self.messages = self.messages, []
        return taken

    def names(self, name: str) -> list[Any]:
        """Commands of a name, so far."""
        return [command for kind, command in self.sent if kind == name]


class PulsarClient:
    """One connection's consumers."""

    def __init__(self, broker: Broker, transcoded: Transcoded | None = None, **link: Any) -> None:
        self.link = FakeLink()
        for name, value in link.items():
            setattr(self.link, name, value)
        self.service = BrokerService(broker)
        self._requests = Requests(self.service)
        self._transcoded = transcoded or Transcoded()
        self.consumers: dict[int, Consumer] = {}
        self._request_id = 100

    async def subscribe(
        self,
        consumer_id: int = 1,
        subscription: str = "s",
        type: str = "exclusive",
        *,
        topic: str = "orders",
        permits: int = 1000,
        **fields: Any,
    ) -> Consumer:
        """An open consumer, at the beginning of its topic unless it is told another place."""
        command = wire.CommandSubscribe(
            **{
                "topic": topic,
                "subscription": subscription,
                "sub_type": wire.CommandSubscribe.SubType.Value(type.upper()),
                "consumer_id": consumer_id,
                "request_id": 1,
                "consumer_name": f"c{consumer_id}",
                "initial_position": wire.CommandSubscribe.EARLIEST,
                **fields,
            }
        )
        consumer = Consumer(self.link, self.service, self._requests, self._transcoded, command, self._ended)
        await consumer.open()
        self.consumers[consumer_id] = consumer
        self.link.sent.append(("success", None))
        consumer.begin()
        if permits:
            self.flow(permits, consumer_id)
        await settle()
        return consumer

    def _ended(self, consumer: Consumer) -> None:
        del self.consumers[consumer.consumer_id]

    def flow(self, permits: int, consumer_id: int = 1) -> None:
        """FLOW."""
        self.consumers[consumer_id].flow(wire.CommandFlow(consumer_id=consumer_id, message_permits=permits))

    async def ack(
        self,
        *ids: Received | tuple[int, int],
        ack_set: Sequence[int] = (),
        cumulative: bool = False,
        consumer_id: int = 1,
        receipt: bool = True,
    ) -> wire.CommandAckResponse | None:
        """ACK; its answer, if there is to be one."""
        self._request_id += 1
        command = wire.CommandAck(
            consumer_id=consumer_id, ack_type="CUMULATIVE" if cumulative else "INDIVIDUAL"
        )
        if receipt:
            command.request_id = self._request_id
        for one in ids:
            ledger, entry = one.id if isinstance(one, Received) else one
            command.message_id.add(ledger_id=ledger, entry_id=entry, ack_set=ack_set)
        self.consumers[consumer_id].acknowledge(command)
        for _ in range(20):
            await asyncio.sleep(0.001)  # of virtual time
            for answer in self.link.names("ack_response"):
                if answer.request_id == command.request_id:
                    assert isinstance(answer, wire.CommandAckResponse)
                    return answer
        assert not receipt, "no answer"
        return None

    async def redeliver(self, *ids: Received, consumer_id: int = 1, epoch: int | None = None) -> None:
        """REDELIVER_UNACKNOWLEDGED_MESSAGES."""
        command = wire.CommandRedeliverUnacknowledgedMessages(consumer_id=consumer_id)
        for one in ids:
            command.message_ids.add(ledger_id=one.ledger, entry_id=one.entry)
        if epoch is not None:
            command.consumer_epoch = epoch
        self.consumers[consumer_id].redeliver(command)
        await settle()

    async def seek(self, consumer_id: int = 1, **fields: Any) -> None:
        """SEEK, by `message_id` or `message_publish_time`."""
        command = wire.CommandSeek(consumer_id=consumer_id, request_id=7, **fields)
        await self.consumers[consumer_id].seek(command)
        self.link.sent.append(("success", None))

    async def last_id(self, consumer_id: int = 1) -> wire.CommandGetLastMessageIdResponse:
        """GET_LAST_MESSAGE_ID."""
        command = wire.CommandGetLastMessageId(consumer_id=consumer_id, request_id=8)
        return await self.consumers[consumer_id].last_message_id(command)

    def lose(self) -> None:
        """The connection is gone."""
        for consumer in self.consumers.values():
            consumer.release(lost=True)
        self.consumers.clear()
        self._requests.cancel()


def message_id(ledger: int, entry: int, ack_set: Sequence[int] = ()) -> wire.MessageIdData:
    """As a command has it; 64 bits without a sign."""
    bits = (1 << 64) - 1
    return wire.MessageIdData(ledger_id=ledger & bits, entry_id=entry & bits, ack_set=ack_set)


class _Port:
    """Of a producer: nobody reads what it is told."""

    def __init__(self, peer: Any) -> None:
        self.peer = peer
        self.receipted = 0

    def receipts(self, rows: list[ReceiptFields]) -> None:
        """Counts messages."""
        self.receipted += sum(row[1] for row in rows)

    def send_failed(self, sequence_id: int, error: MagnetarError) -> None:
        """A test would wait for ever."""
        raise error

    def send_delayed(self, error: MagnetarError) -> None:
        """Nothing."""

    def hold(self, reason: str) -> None:
        """Nothing."""

    def producer_closed(self, error: MagnetarError) -> None:
        """Nothing."""


class Producer:
    """Publishes what Pulsar's producers send; each call makes one entry."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._sequence_id = 0
        self._opened: ProducerOpened | None = None
        self._port = _Port(FakeLink())

    async def publish(
        self,
        *batches: list[bytes] | bytes,
        topic: str = "orders",
        keys: Sequence[str | None] = (),
        **fields: Any,
    ) -> None:
        """A bytes is a message of its own, a list a batch; `keys` of each."""
        if self._opened is None:
            self._opened = await BrokerService(self._broker).create_producer(
                FakeLink(), topic, new_port=lambda epoch: self._port, producer_name="p"
            )
        frames, messages = [], 0
        for number, one in enumerate(batches):
            given = {"sequence_id": self._sequence_id, **fields}
            if keys and (key := keys[number]) is not None:
                given["partition_key"] = key
            frames.append(
                frame(one, **given) if isinstance(one, bytes) else batch(list(map(single, one)), **given)
            )
            count = 1 if isinstance(one, bytes) else len(one)
            self._sequence_id += count
            messages += count
        found, session, _ = self._opened
        before = self._port.receipted
        found.publish(session, admit_pulsar(frames))
        while self._port.receipted < before + messages:
            await asyncio.sleep(0.001)
