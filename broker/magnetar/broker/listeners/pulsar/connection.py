"""One connection of Pulsar's protocol, without I/O: its commands become calls on the service. See broker/ARCHITECTURE.md.

Runs of SENDs take the short way to their producer. What concerns an open consumer is done at once, in order. Producers and
consumers are `openings`; everything else is a task each.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import Message

from magnetar.proto.errors import (
    AlreadyExists,
    LookupAgainError,
    MagnetarError,
    MalformedFrame,
    Unsupported,
)
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.frames import Acks, Sends

from ...service.broker import BrokerService
from ...topics.core.producers import NOT_ALONE
from ..backpressure import Backpressure
from ..openings import Openings
from ..requests import Requests
from .consumers import Consumer, ack_response
from .ports import Link, frame_of, metadata_of
from .producers import Producer
from .requests import REFUSE_STATS, ROWS, failed, failed_request, not_unsubscribed
from .schemas import schema_of
from .transcoded import Transcoded
from .watches import Watches

# For so long what a producer still sends is dropped that was closed here: it learns of that by then.
CLOSED_PRODUCER_S = 30.0


class ClientConnection:
    """From the end of its handshake on."""

    def __init__(self, service: BrokerService, transcoded: Transcoded, link: Link) -> None:
        self._service = service
        self._transcoded = transcoded
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._backpressure = Backpressure(link)
        self._requests = Requests(service)
        self._producers: Openings[wire.CommandProducer, Producer] = Openings(
            "producer",
            self._requests,
            begin=self._open_producer,
            accept=lambda command, producer: producer.opened(),
            refuse=self._refuse,
            release=self._release_producer,
        )
        self._consumers: Openings[wire.CommandSubscribe, Consumer] = Openings(
            "consumer",
            self._requests,
            begin=self._open_consumer,
            accept=self._consumer_opened,
            refuse=self._refuse,
            release=self._release_consumer,
        )
        # By id: when it was closed here (loop time), oldest first.
        self._closed_producers: dict[int, float] = {}
        self._watches = Watches(service)
        self._closed = False
        service.connections[self] = None

    # --- what the link calls -----------------------------------------------------------------------------------------

    def sends_received(self, sends: Sends) -> None:
        """A run of SENDs. Raises MalformedFrame if their producer never was open."""
        producer_id = sends.producer_id
        producer = self._producers.get(producer_id)
        if producer is not None:
            producer.send(sends)
        elif (
            self._loop.time() - self._closed_producers.get(producer_id, -CLOSED_PRODUCER_S)
            >= CLOSED_PRODUCER_S
        ):
            raise MalformedFrame(f"producer {producer_id} is not open on this connection; create it first")

    def acks_received(self, acks: Acks) -> None:
        """Plain ones of one consumer. Of one that is closed nothing is done: its client knows that, or learns it."""
        if (consumer := self._consumers.get(acks.consumer_id)) is not None:
            consumer.acknowledge_ids(acks.ids)

    def command_received(self, name: str, command: Any) -> None:
        """Any other command, by its name. Raises MalformedFrame for one that no client sends."""
        if (row := ROWS.get(name)) is not None:
            self._answer(command, lambda: row.answer(self._service, self._link, command), row.refuse)
        elif (at_once := COMMANDS.get(name)) is not None:
            at_once(self, command)
        else:
            raise MalformedFrame(f"{name.upper()} is no command for a broker")

    def connection_closed(self) -> None:
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
        self._backpressure.writing_resumed([consumer.opened for consumer in self._consumers])
        self._watches.writing_resumed()

    # --- answers -----------------------------------------------------------------------------------------------------

    def _send(self, answer: Message) -> None:
        """Raises FrameTooLarge."""
        self._link.send(frame_of(answer, self._link))

    def _succeed(self, command: Any) -> None:
        self._send(wire.CommandSuccess(request_id=command.request_id))

    def _refuse(self, command: Any, error: MagnetarError) -> None:
        self._send(failed(command, error))

    def _answer(
        self,
        command: Any,
        work: Callable[[], Awaitable[Message | None]],
        refusal: Callable[[Any, MagnetarError], Message] = failed,
    ) -> None:
        """With what `work` returns, or SUCCESS."""
        self._requests.ask(
            work,
            lambda answer: self._succeed(command) if answer is None else self._send(answer),
            lambda error: self._send(refusal(command, error)),
        )

    # --- producers ---------------------------------------------------------------------------------------------------

    async def _open_producer(self, command: wire.CommandProducer) -> Producer:
        service, link = self._service, self._link
        producer = Producer(link, command, self._backpressure.wait_for, self._producer_closed)
        if command.initial_subscription_name:
            with contextlib.suppress(AlreadyExists, Unsupported):  # nothing is stored of a topic of memory
                await service.create_subscription(
                    link, command.topic, command.initial_subscription_name, start=("earliest", None)
                )
        opened = await service.create_producer(
            link,
            command.topic,
            new_port=lambda epoch: producer,
            producer_name=command.producer_name or None,
            access_mode=wire.ProducerAccessMode.Name(command.producer_access_mode).lower(),
            topic_epoch=command.topic_epoch if command.HasField("topic_epoch") else NOT_ALONE,
            schema=schema_of(command),
        )
        producer.topic, producer.session, producer.schema_version = opened
        producer.session.metadata = metadata_of(command)
        return producer

    def _release_producer(self, producer: Producer, *, lost: bool = True) -> None:
        producer.hold("")
        producer.topic.producer_left(producer.session, lost=lost)
        del producer.session  # which refers to the producer

    def _producer_closed(self, producer: Producer) -> None:
        """The session ended here. What its client has sent meanwhile is dropped."""
        producer_id = producer.producer_id
        if self._producers.get(producer_id) is producer:
            self._producers.ended(producer_id, producer)
            del producer.session
            now, closed = self._loop.time(), self._closed_producers
            closed.pop(producer_id, None)
            closed[producer_id] = now
            while closed[first := next(iter(closed))] <= now - CLOSED_PRODUCER_S:
                del closed[first]

    def _close_producer(self, command: wire.CommandCloseProducer) -> None:
        """Answered once what it sent has its receipts."""
        producer = self._producers.get(command.producer_id)
        if producer is None:
            self._producers.close(command.producer_id)
            self._succeed(command)
        else:
            producer.when_receipted(lambda: self._succeed(command))
            self._producers.ended(command.producer_id, producer)
            self._release_producer(producer, lost=False)

    # --- consumers ---------------------------------------------------------------------------------------------------

    def _consumer(self, consumer_id: int) -> Consumer:
        consumer = self._consumers.get(consumer_id)
        if consumer is None:
            raise _not_open(consumer_id)
        return consumer

    def _with(self, command: Any, do: Callable[[Consumer, Any], None]) -> None:
        """Of a consumer that is closed already nothing is done: the client learns that, or knows it."""
        consumer = self._consumers.get(command.consumer_id)
        if consumer is not None:
            do(consumer, command)

    def _acknowledge(self, command: wire.CommandAck) -> None:
        consumer = self._consumers.get(command.consumer_id)
        if consumer is not None:
            consumer.acknowledge(command)
        elif command.HasField("request_id"):
            self._send(ack_response(command, _not_open(command.consumer_id)))

    async def _open_consumer(self, command: wire.CommandSubscribe) -> Consumer:
        consumer = Consumer(
            self._link, self._service, self._requests, self._transcoded, command, self._consumer_ended
        )
        await consumer.open()
        return consumer

    def _consumer_opened(self, command: wire.CommandSubscribe, consumer: Consumer) -> None:
        self._succeed(command)
        consumer.begin()

    def _release_consumer(self, consumer: Consumer) -> None:
        consumer.release(lost=self._closed)

    def _consumer_ended(self, consumer: Consumer) -> None:
        self._consumers.ended(consumer.consumer_id, consumer)

    def _close_consumer(self, command: wire.CommandCloseConsumer) -> None:
        self._consumers.close(command.consumer_id)
        self._succeed(command)

    def _ask_of(
        self,
        command: Any,
        do: Callable[[Consumer, Any], Awaitable[Message | None]],
        refusal: Callable[[Any, MagnetarError], Message] = failed_request,
    ) -> None:
        self._answer(command, lambda: do(self._consumer(command.consumer_id), command), refusal)

    # --- watches -----------------------------------------------------------------------------------------------------

    def _watch(self, command: wire.CommandWatchTopicList) -> None:
        self._answer(command, lambda: self._watches.watch(self._link, command))

    def _end_watch(self, command: wire.CommandWatchTopicListClose) -> None:
        self._watches.end(command.watcher_id)
        self._succeed(command)


def _not_open(consumer_id: int) -> LookupAgainError:
    """It may have been closed here a moment ago, and subscribe again."""
    return LookupAgainError(f"consumer {consumer_id} is not open on this connection; subscribe first")


# By the name of the command, beside `requests.ROWS`.
COMMANDS: dict[str, Callable[[ClientConnection, Any], None]] = {
    "producer": lambda it, command: it._producers.open(command.producer_id, command),
    "subscribe": lambda it, command: it._consumers.open(command.consumer_id, command),
    "flow": lambda it, command: it._with(command, Consumer.flow),
    "ack": ClientConnection._acknowledge,
    "redeliver_unacknowledged_messages": lambda it, command: it._with(command, Consumer.redeliver),
    "close_producer": ClientConnection._close_producer,
    "close_consumer": ClientConnection._close_consumer,
    "unsubscribe": lambda it, command: it._ask_of(command, Consumer.unsubscribe, not_unsubscribed),
    "seek": lambda it, command: it._ask_of(command, Consumer.seek),
    "get_last_message_id": lambda it, command: it._ask_of(command, Consumer.last_message_id),
    "consumer_stats": lambda it, command: it._ask_of(command, Consumer.stats, REFUSE_STATS),
    "watch_topic_list": ClientConnection._watch,
    "watch_topic_list_close": ClientConnection._end_watch,
}
