"""The native protocol of the broker: frames become calls on topics and subscriptions, and back.

One `ClientConnection` per connection. The hot frames take the short way: a SEND header is looked up by its bytes (it is
constant per producer and epoch), its run of payloads is verified and published in one call; a DELIVER is a header of a few
fields before untouched entry bytes. Everything else is a request: a task per request, so that a slow one (loading a topic,
rule 33's wait) holds up nobody, bounded per connection, cancelled with it.

Backpressure, in and out: see `listeners.backpressure`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from magnetar.proto import commands as c
from magnetar.proto.errors import (
    InvalidArgument,
    MagnetarError,
    MalformedFrame,
    ProducerFenced,
    UnknownCommand,
)
from magnetar.proto.frames import Run
from magnetar.proto.ids import TopicName

from ...dispatch.subscription import SubscribeRequest
from ...service.broker import BrokerService
from ...service.results import ConsumerOpened
from ...topics.registry import Broker
from ..backpressure import Backpressure
from ..openings import Openings
from ..requests import Requests, for_client
from .ports import ConsumerPort, Link, Producer, first_sequence_id
from .requests import CONSUMER_REQUESTS, REQUESTS, started, to_wire
from .watches import Watches

_log = logging.getLogger(__name__)


class ClientConnection:
    """`ConnectionHandler` of one client."""

    def __init__(self, service: BrokerService) -> None:
        self._service = service
        self._link: Link  # from `connection_ready` on
        self._backpressure: Backpressure
        self._requests = Requests(service)
        # SEND header bytes -> producer; one for each producer that sends, whatever else it may write into its headers.
        self._senders: dict[bytes, Producer] = {}
        self._producers = Openings(
            "producer",
            self._requests,
            begin=self._open_producer,
            accept=self._producer_opened,
            refuse=self._refuse,
            release=self._release_producer,
        )
        self._consumers = Openings(
            "consumer",
            self._requests,
            begin=self._open_consumer,
            accept=self._consumer_opened,
            refuse=self._refuse,
            release=self._release_consumer,
        )
        self._watches = Watches(service)
        self._closed = False

    # --- ConnectionHandler -------------------------------------------------------------------------------------------

    def connection_ready(self, connection: Link) -> None:
        """The handshake is done."""
        self._link = connection
        self._backpressure = Backpressure(connection)
        self._service.connections[self] = None

    def runs_received(self, runs: list[Run]) -> None:
        """Frames in order."""
        senders = self._senders
        for header, payloads in runs:
            producer = senders.get(header)
            if producer is not None:
                producer.send(payloads)
            else:
                self._received(header, payloads)

    def connection_closed(self, error: MagnetarError | None) -> None:
        """Producers and consumers of this connection go with it."""
        self._closed = True
        self._service.connections.pop(self, None)
        self._backpressure.close()
        self._requests.cancel()
        self._producers.lose_all()
        self._consumers.lose_all()
        self._watches.close()

    def writing_resumed(self) -> None:
        """Consumers and watches go on."""
        self._backpressure.writing_resumed(list(self._consumers))
        self._watches.writing_resumed()

    # --- frames ------------------------------------------------------------------------------------------------------

    def _received(self, header: bytes, payloads: list[bytes]) -> None:
        command = c.decode_command(header)
        if isinstance(command, c.Send):
            self._send(header, command, payloads)
            return
        for payload in payloads:
            try:
                self._command(command, payload)
            except MalformedFrame:
                raise
            except MagnetarError as error:
                if command.request_id:
                    self._link.answer_error(command.request_id, error)
                else:
                    _log.info("%s refused: %s", type(command).__name__, error)

    def _send(self, header: bytes, command: c.Send, payloads: list[bytes]) -> None:
        """A SEND whose header is not known: the first of its producer, or none of an open one."""
        producer = self._producers.get(command.producer_id)
        if producer is not None and producer.session.epoch == command.epoch:
            if command.request_id == 0:
                self._senders.pop(producer.send_header, None)
                self._senders[header] = producer
                producer.send_header = header
            producer.send(payloads)
            return
        # Sent before it learned that its session ended: it knows by now, or learns it again.
        error = ProducerFenced(
            f"producer {command.producer_id} with epoch {command.epoch} is not open on this connection; "
            "create it (again) first"
        )
        sequence_id = first_sequence_id(payloads[0])
        self._link.send(c.SendFailed.of(command.producer_id, command.epoch, sequence_id, error).encode())

    def _command(self, command: c.Command, payload: bytes) -> None:
        """Everything but SEND; consumers' frames at once and in order, requests as tasks."""
        if isinstance(command, c.Ack):
            self._ack(command, payload)
        elif isinstance(command, c.Flow):
            consumer = self._consumer(command.consumer_id)
            if command.messages < 0 or command.bytes < 0:
                raise InvalidArgument("permits cannot be negative")
            consumer.subscription.flow(consumer.consumer, command.messages, command.bytes)
        elif isinstance(command, c.Redeliver):
            consumer = self._consumer(command.consumer_id)
            consumer.subscription.redeliver(
                consumer.consumer, c.decode_rows(c.ACK_ROW, payload), counted=command.counted
            )
            self._link.answer(command.request_id, started(consumer, consumer.consumer.epoch, False))
        elif isinstance(command, c.HandedOut):
            consumer = self._consumer(command.consumer_id)
            consumer.subscription.handed_out(
                consumer.consumer,
                command.consumer_epoch,
                c.decode_rows(c.ACK_ROW, payload),
                taken_back=command.taken_back,
            )
        elif isinstance(command, c.CreateProducer):
            self._producers.open(command.producer_id, command)
        elif isinstance(command, c.Subscribe):
            self._consumers.open(command.consumer_id, command)
        elif isinstance(command, c.Unsubscribe):
            opened = self._consumer(command.consumer_id)
            self._ask(command.request_id, lambda: self._unsubscribe(command.consumer_id, opened))
        elif isinstance(command, c.CloseProducer):
            if (producer := self._producers.get(command.producer_id)) is not None:
                producer.topic.producer_left(producer.session, lost=False)
            self._producers.close(command.producer_id)
            self._link.answer(command.request_id)
        elif isinstance(command, c.CloseConsumer):
            self._consumers.close(command.consumer_id)
            self._link.answer(command.request_id)
        elif isinstance(command, c.WatchTopics):
            self._ask(command.request_id, lambda: self._watches.watch_topics(self._link, command))
        elif isinstance(command, c.WatchPartitions):
            self._ask(command.request_id, lambda: self._watches.watch_partitions(self._link, command))
        else:
            self._request(command, payload)

    def _request(self, command: c.Command, payload: bytes) -> None:
        """A task of its own for each. Raises TooManyRequests, or why nobody here answers such a command."""
        kind, service, link = type(command), self._service, self._link
        if (answer := REQUESTS.get(kind)) is not None:
            self._ask(command.request_id, lambda: answer(service, link, command, payload))
        elif (answer_for := CONSUMER_REQUESTS.get(kind)) is not None:
            opened = self._consumer(command.consumer_id)  # type: ignore[attr-defined]
            self._ask(command.request_id, lambda: answer_for(service, link, command, opened))
        else:
            raise UnknownCommand(f"{kind.__name__} is not a command for a broker")

    def _ack(self, command: c.Ack, payload: bytes) -> None:
        consumer = self._consumer(command.consumer_id)
        rows: list[Any] = list(c.decode_rows(c.ACK_ROW, payload))
        request_id, link, done = command.request_id, self._link, None
        if request_id:
            done = self._requests.confirmed(
                lambda: link.answer(request_id), lambda error: link.answer_error(request_id, error)
            )
        consumer.subscription.acknowledge(consumer.consumer, rows, cumulative=command.cumulative, done=done)

    def _consumer(self, consumer_id: int) -> ConsumerOpened:
        consumer = self._consumers.get(consumer_id)
        if consumer is None:
            raise InvalidArgument(f"consumer {consumer_id} is not open on this connection; subscribe first")
        return consumer

    def _ask(self, request_id: int, work: Callable[[], Awaitable[Any]]) -> None:
        link = self._link
        self._requests.ask(
            work,
            lambda result: link.answer(request_id, to_wire(result)),
            lambda error: link.answer_error(request_id, error),
        )

    # --- producers and consumers -------------------------------------------------------------------------------------

    async def _open_producer(self, command: c.CreateProducer) -> Producer:
        opened = await self._service.create_producer(
            self._link,
            command.topic,
            new_port=lambda epoch: Producer(
                self._link, command.producer_id, epoch, self._backpressure.wait_for, self._producer_closed
            ),
            producer_name=command.name,
            epoch=command.epoch,
            access_mode=command.access_mode,
            topic_epoch=command.topic_epoch,
        )
        producer = opened.session.port
        assert isinstance(producer, Producer)
        producer.topic, producer.session, _ = opened
        return producer

    def _producer_opened(self, command: c.CreateProducer, producer: Producer) -> None:
        session = producer.session
        self._link.answer(
            command.request_id,
            {
                "name": session.name,
                "epoch": session.epoch,
                "last_sequence_id": session.last_sequence_id,
                "topic_epoch": session.topic_epoch,
            },
        )

    def _release_producer(self, producer: Producer) -> None:
        self._senders.pop(producer.send_header, None)
        producer.topic.producer_left(producer.session, lost=True)
        del producer.session  # which refers to the producer

    def _producer_closed(self, producer: Producer) -> None:
        """The topic ended the session."""
        if self._producers.get(producer.producer_id) is producer:
            self._senders.pop(producer.send_header, None)
            self._producers.ended(producer.producer_id, producer)
            del producer.session

    async def _open_consumer(self, command: c.Subscribe) -> ConsumerOpened:
        return await self._service.subscribe(
            self._link,
            command.topic,
            SubscribeRequest(*[getattr(command, name) for name in SubscribeRequest._fields]),
            port=ConsumerPort(
                self._link,
                command.consumer_id,
                self._consumer_ended,
                TopicName.parse(command.topic).partition,
            ),
        )

    def _consumer_opened(self, command: c.Subscribe, opened: ConsumerOpened) -> None:
        self._link.answer(command.request_id, started(opened, opened.consumer.epoch, opened.trimmed))

    def _release_consumer(self, opened: ConsumerOpened) -> None:
        opened.subscription.remove_consumer(opened.consumer, lost=self._closed)

    def _consumer_ended(self, port: ConsumerPort, error: MagnetarError) -> None:
        """The topic ended the consumer, or it cannot take what is to be delivered: others may have its place."""
        opened = self._consumers.get(port.consumer_id)
        if opened is not None and opened.consumer.port is port:
            self._consumers.ended(port.consumer_id, opened)
            self._release_consumer(opened)
        self._link.send(c.CloseConsumer.of(port.consumer_id, for_client(error)).encode())

    def _refuse(self, command: c.Command, error: MagnetarError) -> None:
        self._link.answer_error(command.request_id, error)

    async def _unsubscribe(self, consumer_id: int, opened: ConsumerOpened) -> None:
        await self._service.unsubscribe(self._link, opened)
        self._consumers.ended(consumer_id, opened)


def listener(broker: Broker) -> Callable[[], ClientConnection]:
    """The handler factory for `start_server`."""
    service = BrokerService(broker)
    return lambda: ClientConnection(service)


__all__ = ["ClientConnection", "Link", "listener"]
