"""The native protocol of the broker: frames become calls on topics and subscriptions, and back.

One `ClientConnection` per connection. The hot frames take the short way: a SEND header is looked up by its bytes (it is
constant per producer and epoch), its run of payloads is verified and published in one call; a DELIVER is a header of a few
fields before untouched entry bytes. Everything else is a request: a task per request, so that a slow one (loading a topic,
rule 33's wait) holds up nobody, bounded per connection, cancelled with it.

Backpressure: a publish that fills its topic's or the broker's budget stops reading from this connection; the budget's
waker starts it again. Delivery stops while the connection is not writable; `writing_resumed` starts it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from magnetar.proto import commands as c
from magnetar.proto.errors import (
    InvalidArgument,
    MagnetarError,
    MalformedFrame,
    ProducerFenced,
    ServiceNotReady,
    TooManyRequests,
    UnknownCommand,
    Unsupported,
)
from magnetar.proto.frames import Run
from magnetar.proto.ids import TopicName

from ...export import EXPORT_REQUESTS
from ...resources.budget import ByteBudget
from ...topics.registry import Broker
from ..openings import OpeningActions, Openings
from .ports import (
    ConsumerPort,
    Link,
    OpenConsumer,
    OpenProducer,
    ProducerPort,
    first_sequence_id,
    for_client,
)

_log = logging.getLogger(__name__)


_PUBLISH_REASON = "publish"


class ClientConnection:
    """`ConnectionHandler` of one client."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._settings = broker.settings
        self._link: Link  # from `connection_ready` on
        self._loop = asyncio.get_running_loop()
        # SEND header bytes -> producer; one for each producer that sends, whatever else it may write into its headers.
        self._senders: dict[bytes, OpenProducer] = {}
        self._producers = Openings(
            "producer",
            OpeningActions(
                self._open_producer, self._producer_opened, self._refuse, self._release_producer, self._spawn
            ),
        )
        self._consumers = Openings(
            "consumer",
            OpeningActions(
                self._open_consumer, self._consumer_opened, self._refuse, self._release_consumer, self._spawn
            ),
        )
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._budgets: dict[int, ByteBudget] = {}  # that this connection waits for
        self._closed = False

    # --- ConnectionHandler -------------------------------------------------------------------------------------------

    def connection_ready(self, connection: Link) -> None:
        """The handshake is done."""
        self._link = connection

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
        for budget in self._budgets.values():
            budget.forget((self, budget))
        self._budgets.clear()
        for task in list(self._tasks.values()):
            task.cancel()
        self._producers.lose_all()
        self._consumers.lose_all()

    def writing_resumed(self) -> None:
        """Delivery goes on."""
        for consumer in self._consumers:
            consumer.subscription.writable(consumer.consumer)

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
        # Sent before it learned that its session ended: it knows by now, or is told again.
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
            consumer.subscription.redeliver(consumer.consumer, c.decode_rows(c.ACK_ROW, payload))
            self._link.answer(command.request_id)
        elif isinstance(command, c.CreateProducer):
            self._check_busy()
            self._producers.open(command.producer_id, command)
        elif isinstance(command, c.Subscribe):
            self._check_busy()
            self._consumers.open(command.consumer_id, command)
        elif isinstance(command, c.CloseProducer):
            self._producers.close(command.producer_id)
            self._link.answer(command.request_id)
        elif isinstance(command, c.CloseConsumer):
            self._consumers.close(command.consumer_id)
            self._link.answer(command.request_id)
        else:
            handler = _REQUESTS.get(type(command))
            export = EXPORT_REQUESTS.get(type(command))
            if handler is not None:
                self._ask(command.request_id, lambda: handler(self, command))
            elif export is not None:
                self._ask(command.request_id, lambda: export(self._broker, self._link, command, payload))
            elif type(command) in c.RESERVED:
                raise Unsupported(f"{type(command).__name__} is reserved and not offered by this version yet")
            else:
                raise UnknownCommand(f"{type(command).__name__} is not a command for a broker")

    def _ack(self, command: c.Ack, payload: bytes) -> None:
        consumer = self._consumer(command.consumer_id)
        rows: list[Any] = list(c.decode_rows(c.ACK_ROW, payload))
        done: Callable[[MagnetarError | None], None] | None = None
        if command.request_id:
            request_id, link = command.request_id, self._link

            def done(error: MagnetarError | None) -> None:
                if error is None:
                    link.answer(request_id)
                else:
                    link.answer_error(request_id, for_client(error))

        consumer.subscription.acknowledge(consumer.consumer, rows, cumulative=command.cumulative, done=done)

    def _consumer(self, consumer_id: int) -> OpenConsumer:
        consumer = self._consumers.get(consumer_id)
        if consumer is None:
            raise InvalidArgument(f"consumer {consumer_id} is not open on this connection; subscribe first")
        return consumer

    def _check_busy(self) -> None:
        if len(self._tasks) >= self._settings.max_requests_per_connection:
            raise TooManyRequests(
                f"{len(self._tasks)} requests of this connection are being worked on; wait for some of them"
            )

    def _ask(self, request_id: int, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._check_busy()
        self._spawn(self._run(request_id, work))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks[id(task)] = task
        task.add_done_callback(lambda done: self._tasks.pop(id(done), None))
        return task

    async def _run(self, request_id: int, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        try:
            self._link.answer(request_id, await work())
        except MagnetarError as error:
            self._link.answer_error(request_id, for_client(error))
        except Exception as error:
            _log.exception("a request failed")
            self._link.answer_error(request_id, ServiceNotReady(f"the request failed here: {error!r}"))

    # --- backpressure ------------------------------------------------------------------------------------------------

    def wait_for(self, budget: ByteBudget) -> None:
        """Stops reading until `budget` has room; its waker is `_has_room`."""
        if not self._closed and id(budget) not in self._budgets:
            self._budgets[id(budget)] = budget
            self._link.pause_reading(_PUBLISH_REASON)
            # One key a budget: two topics of this connection may both have to wait for the broker's.
            budget.wait((self, budget), lambda: self._has_room(budget))

    def _has_room(self, budget: ByteBudget) -> None:
        del self._budgets[id(budget)]
        if budget.full:  # its parent, or again
            self.wait_for(budget)
        elif not self._budgets:
            self._link.resume_reading(_PUBLISH_REASON)

    # --- producers and consumers -------------------------------------------------------------------------------------

    async def _open_producer(self, command: c.CreateProducer) -> OpenProducer:
        name = TopicName.parse(command.topic)
        self._link.authorize("produce", str(name))
        if command.name is not None and not 0 < len(command.name) <= 255:
            raise InvalidArgument("a producer name has 1 to 255 characters")
        if not 0 <= command.epoch < 1 << 62:
            raise InvalidArgument(f"a producer epoch of {command.epoch} is not allowed")
        topic = await self._broker.find(name)
        session = await topic.open_producer(
            command.name or self._broker.generate_name(),
            epoch=command.epoch,
            access_mode=command.access_mode,
            new_port=lambda epoch: ProducerPort(
                self._link, command.producer_id, epoch, self._producer_closed
            ),
        )
        return OpenProducer(topic, session, self.wait_for)

    def _producer_opened(self, command: c.CreateProducer, producer: OpenProducer) -> None:
        session = producer.session
        self._link.answer(
            command.request_id, {"name": session.name, "epoch": session.epoch, "last_sequence_id": -1}
        )

    def _release_producer(self, producer: OpenProducer) -> None:
        self._senders.pop(producer.send_header, None)
        producer.topic.close_producer(producer.session)

    def _producer_closed(self, port: ProducerPort) -> None:
        """The topic ended the session."""
        producer = self._producers.get(port.producer_id)
        if producer is not None and producer.session.port is port:
            self._senders.pop(producer.send_header, None)
            self._producers.ended(port.producer_id, producer)

    async def _open_consumer(self, command: c.Subscribe) -> OpenConsumer:
        name = TopicName.parse(command.topic)
        self._link.authorize("consume", str(name))
        if not 0 <= command.epoch < 1 << 62:
            raise InvalidArgument(f"a consumer epoch of {command.epoch} is not allowed")
        topic = await self._broker.find(name)
        subscription, consumer = await topic.subscribe(
            command.subscription,
            ConsumerPort(self._link, command.consumer_id, self._consumer_closed),
            type=command.type,
            start=command.start,
            durable=command.durable,
            consumer_name=command.name or self._broker.generate_name(),
            epoch=command.epoch,
        )
        return OpenConsumer(topic, subscription, consumer)

    def _consumer_opened(self, command: c.Subscribe, opened: OpenConsumer) -> None:
        self._link.answer(command.request_id, {"epoch": opened.consumer.epoch})

    def _release_consumer(self, opened: OpenConsumer) -> None:
        opened.subscription.remove_consumer(opened.consumer)

    def _consumer_closed(self, port: ConsumerPort) -> None:
        """The topic ended the consumer."""
        opened = self._consumers.get(port.consumer_id)
        if opened is not None and opened.consumer.port is port:
            self._consumers.ended(port.consumer_id, opened)

    def _refuse(self, command: c.Command, error: MagnetarError) -> None:
        self._link.answer_error(command.request_id, for_client(error))

    async def _unsubscribe(self, command: c.Unsubscribe) -> None:
        opened = self._consumer(command.consumer_id)
        await opened.topic.delete_subscription(opened.subscription.name, by=opened.consumer)
        self._consumers.ended(command.consumer_id, opened)

    async def _seek(self, command: c.Seek) -> dict[str, Any]:
        port = self._consumer(command.consumer_id)
        return {"epoch": await port.topic.seek(port.subscription, command.start)}

    async def _last_message_id(self, command: c.LastMessageId) -> bytes | None:
        found = await self._consumer(command.consumer_id).topic.last_message_id()
        return None if found is None else found.to_bytes()

    # --- topics ------------------------------------------------------------------------------------------------------

    async def _lookup(self, command: c.Lookup) -> dict[str, Any]:
        self._link.authorize("lookup", str(TopicName.parse(command.topic)))
        return {"url": self._settings.service_url}

    async def _partitions(self, command: c.Partitions) -> dict[str, Any]:
        self._link.authorize("lookup", str(TopicName.parse(command.topic)))
        return {"partitions": 0}

    async def _list_topics(self, command: c.ListTopics) -> list[str]:
        self._link.authorize("list_topics", command.namespace)
        return await self._broker.list_topics(command.namespace)

    async def _topic_stats(self, command: c.TopicStats) -> dict[str, Any]:
        name = TopicName.parse(command.topic)
        self._link.authorize("topic_stats", str(name))
        return await (await self._broker.known(name)).stats()

    async def _create_topic(self, command: c.CreateTopic) -> None:
        name = TopicName.parse(command.topic)
        self._link.authorize("create_topic", str(name))
        if command.partitions:
            raise Unsupported("partitioned topics are not offered yet; create the topic with partitions=0")
        await self._broker.create_topic(name)

    async def _delete_topic(self, command: c.DeleteTopic) -> None:
        name = TopicName.parse(command.topic)
        self._link.authorize("delete_topic", str(name))
        await self._broker.delete_topic(name, force=command.force)

    async def _delete_subscription(self, command: c.DeleteSubscription) -> None:
        name = TopicName.parse(command.topic)
        self._link.authorize("delete_subscription", str(name))
        topic = await self._broker.known(name)
        await topic.delete_subscription(command.subscription, force=command.force)


_Handler = Callable[[ClientConnection, Any], Coroutine[Any, Any, Any]]
_REQUESTS: dict[type[c.Command], _Handler] = {
    c.Unsubscribe: ClientConnection._unsubscribe,
    c.Seek: ClientConnection._seek,
    c.LastMessageId: ClientConnection._last_message_id,
    c.Lookup: ClientConnection._lookup,
    c.Partitions: ClientConnection._partitions,
    c.ListTopics: ClientConnection._list_topics,
    c.TopicStats: ClientConnection._topic_stats,
    c.CreateTopic: ClientConnection._create_topic,
    c.DeleteTopic: ClientConnection._delete_topic,
    c.DeleteSubscription: ClientConnection._delete_subscription,
}


def listener(broker: Broker) -> Callable[[], ClientConnection]:
    """The handler factory for `FramedServer.start`."""
    return lambda: ClientConnection(broker)


__all__ = ["ClientConnection", "Link", "listener"]
