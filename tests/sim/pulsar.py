"""Programs of Pulsar's protocol beside the native ones: the same load, the same history, the same rules.

    MixedLoad       one native producer and two of Pulsar's; in each subscription consumers of either kind
    PulsarPlace     a consumer of Pulsar's: it acknowledges with ack sets or without, and believes what follows from that
    CheckedProducer, CheckedConsumer    in the broker: no receipt after another one has taken the topic over; and the epochs
                    of subscriptions, which Pulsar's consumers are not told

Two rules more than with native programs: a receipt comes for the oldest SEND that has none, and what nobody has
acknowledged is in the backlog.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, ClassVar

from magnetar.broker.dispatch.core.selection import SELECTORS
from magnetar.broker.dispatch.subscription import SubscribeRequest
from magnetar.broker.listeners.pulsar.consumers import Consumer as ListenerConsumer
from magnetar.broker.listeners.pulsar.producers import Producer as ListenerProducer
from magnetar.broker.service.results import ConsumerOpened
from magnetar.broker.topics.core.producers import ReceiptFields
from magnetar.client.chunked_id import ChunkedMessageId
from magnetar.proto.commands import AckRow
from magnetar.proto.errors import MagnetarError, ReceiveTimeout
from magnetar.proto.ids import MessageId
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.ids import unpack_entry
from sim.cluster.metadata import ClusterMetadata
from sim.cluster.receipts import raise_outside
from sim.consuming import Place, SubscriptionPlan
from sim.deliveries import Holder, Name, Subscription, Violation
from sim.history import name_of
from sim.scenarios import cluster
from support.pulsar_client import (
    Consumer,
    ConsumerOptions,
    Id,
    Producer,
    ProducerOptions,
    PulsarClient,
    Received,
)
from support.pulsar_client.consumer import ATTACHMENT
from support.sim import SimClock, current_process

PORT = 6651
PREFIX = "p-"  # of the names of Pulsar's producers
# Without them a client never acknowledges a batch that came to it in part: Java and C++ wait for the others, which they take
# for unacknowledged. Where each message is acknowledged by itself they get single messages, if they send no ack sets.
ACK_SETS = 0.5
LAST_IN_CALM_S = 10.0  # a reader that gets nothing for so long has all


# --- ids -----------------------------------------------------------------------------------------------------------------


def native_id(chunks: Sequence[Id]) -> MessageId:
    """The id of a message, or of all its chunks, as native programs have it."""
    places = [_place(one) for one in chunks]
    if any(ledger < 0 for ledger, _, _ in places):
        return MessageId(-1, -1, 0)  # a duplicate, at least in part: where all of it is, nobody has said
    first = MessageId(*places[0])
    if len(places) == 1:
        return first
    return ChunkedMessageId.of(
        first, [AckRow(ledger, entry, index, index) for ledger, entry, index in places]
    )


def _place(one: Id) -> tuple[int, int, int]:
    entry, index = unpack_entry(one.entry)
    return one.ledger, entry, index + max(one.batch_index, 0)


# --- in the broker ---------------------------------------------------------------------------------------------------------


class Truth:
    """What the simulation knows of the brokers, and their clients do not."""

    def __init__(self, metadata: ClusterMetadata) -> None:
        self.metadata = metadata
        self.epochs: dict[
            int, int
        ] = {}  # of the subscription when a consumer was attached; behind a seek that it asked for
        self._last: dict[tuple[str, str], int] = {}

    def note(self, attachment: int, opened: ConsumerOpened) -> None:
        """The epoch that its subscription has."""
        key = str(opened.topic.name), opened.subscription.name
        self.epochs[attachment] = self._last[key] = opened.subscription.epoch

    def last(self, topic: str, subscription: str) -> int:
        """The last one that was noted."""
        return self._last.get((topic, subscription), 0)


class CheckedConsumer(ListenerConsumer):
    """As a native consumer does, it brings the subscription's epoch to a broker that does not know it."""

    truth: ClassVar[Truth]

    @property
    def _attachment(self) -> int:
        return next(int(one.value) for one in self._command.metadata if one.key == ATTACHMENT)

    def _asked(self) -> SubscribeRequest:
        epoch = self.truth.last(self._command.topic, self._command.subscription)
        return super()._asked()._replace(epoch=epoch)

    async def open(self) -> None:
        await super().open()
        self.truth.note(self._attachment, self.opened)

    async def seek(self, command: wire.CommandSeek) -> None:
        opened = self.opened  # which it closes
        await super().seek(command)
        self.truth.note(self._attachment, opened)


class CheckedProducer(ListenerProducer):
    """See `sim.cluster.receipts`."""

    truth: ClassVar[Truth]

    def receipts(self, rows: list[ReceiptFields]) -> None:
        process, metadata = current_process(), self.truth.metadata
        assert process is not None
        taker = metadata.taken_from(process.name, self.topic.name)
        if taker and any(row[2] >= 0 for row in rows) and not metadata.deceived(process.name):
            raise_outside(
                metadata,
                f"{process.name} sent SEND_RECEIPTs of {self.topic.name.name} after {taker} had taken the topic over",
            )
        super().receipts(rows)


# --- producing -------------------------------------------------------------------------------------------------------------


class ProducerOfPulsar:
    """As `Load` uses a native one."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self.last_sequence_id = producer.last_sequence_id

    def send_nowait(self, value: bytes, key: str, *, deliver_at: int | None = None) -> Awaitable[MessageId]:
        """See the native one."""
        return self._id_of(self._producer.send(value, key, deliver_at_ms=deliver_at))

    async def _id_of(self, receipt: asyncio.Future[tuple[Id, ...]]) -> MessageId:
        try:
            return native_id(await receipt)
        finally:
            if self._producer.protocol_errors:
                raise Violation(self._producer.protocol_errors[0])


class ProgramOfPulsar:
    """As `Load` uses a native client."""

    def __init__(self, client: PulsarClient, load: MixedLoad, max_message_bytes: int) -> None:
        self._client = client
        self._load = load
        self._max_message_bytes = max_message_bytes

    async def create_producer(
        self, topic: str, *, name: str, batching: bool, **options: Any
    ) -> ProducerOfPulsar:
        """See the native one."""
        rng = self._client.rng
        made = ProducerOptions(
            name=name,
            max_batch=rng.choice((2, 5, 20)) if batching else 0,
            one_key_a_batch=any(plan.type == "key_shared" for plan in self._load.plans),
            sequence_ids=rng.choice(self._load.sequence_ids),
            max_message_bytes=self._max_message_bytes,
        )
        producer = await self._client.create_producer(topic, made)
        self._load.opened_producers.append(producer)
        return ProducerOfPulsar(producer)

    async def close(self) -> None:
        """See the native one."""
        await self._client.close()


# --- consuming -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Delivered:
    """As much of a delivery as `Place` looks at."""

    epoch: int


@dataclass(eq=False)
class MessageOfPulsar:
    """As `Place` uses a native one."""

    received: Received
    id: MessageId
    topic: str
    delivery: Delivered

    @property
    def value(self) -> bytes:
        return self.received.value

    @property
    def redelivery_count(self) -> int:
        return self.received.redelivery_count


class ConsumerOfPulsar:
    """As `Place` uses a native one."""

    def __init__(self, consumer: Consumer, topic: str, truth: Truth) -> None:
        self.consumer = consumer
        self.pause, self.resume, self.close = consumer.pause, consumer.resume, consumer.close
        self._topic = topic
        self._truth = truth

    @property
    def active(self) -> bool:
        """Of a failover subscription."""
        return self.consumer.active

    @property
    def reached_end(self) -> bool:
        """Of the topic."""
        return self.consumer.reached_end

    async def receive_batch(self, most: int, timeout: float) -> list[MessageOfPulsar]:
        """See the native one."""
        epochs = self._truth.epochs
        return [
            MessageOfPulsar(one, native_id(one.chunks), self._topic, Delivered(epochs[one.attachment_id]))
            for one in await self.consumer.receive(most, timeout)
        ]

    async def ack(self, messages: list[MessageOfPulsar]) -> None:
        """Without a receipt: it may be lost."""
        try:
            await self.consumer.ack([one.received for one in messages], receipt=False)
        except MagnetarError as error:
            if not error.retryable:
                raise

    def nack(self, message: MessageOfPulsar) -> None:
        """See the native one."""
        self.consumer.nack(message.received)


class PulsarPlace(Place):
    """See the module docstring."""

    def __init__(self, load: MixedLoad, plan: SubscriptionPlan, number: int, again: str) -> None:
        super().__init__(load.around, plan, number, again)
        self._load = load
        self._known: dict[MessageId, Id] = {}  # what it was handed, to seek to
        self._entries: dict[MessageId, list[tuple[int, int]]] = {}  # and the entries with it

    async def _connect(self) -> Any:
        return self._load.pulsar_client()

    async def _subscribe(self, client: Any) -> Any:
        await self._around.start_is_held.wait()
        plan, rng, around = self.plan, self._rng, self._around
        options = ConsumerOptions(
            subscription=plan.name,
            type=plan.type,
            name=self.name,
            queue=rng.choice((1, 10, 50, 1000)),
            priority_level=plan.priorities[self._number],
            hash_ranges=plan.hash_ranges(self._number),
            ack_sets=rng.random() < ACK_SETS or not SELECTORS[plan.type].individual_acks,
            nack_delay=plan.nack_delay,
            ack_timeout=plan.ack_timeout,
            incomplete_chunks=10.0,
            counts_hidden=rng.random() < 0.5,
        )
        holder = self._holder = Holder(self.name, seeks=self.subscription.seeks, attached=around.loop.now)
        self._told_end_in = None
        self._consumer = ConsumerOfPulsar(  # type: ignore[assignment]
            await client.subscribe(
                around.topic,
                options,
                on_detached=lambda: holder.detached(self.subscription, around.loop.now),
                on_redelivery=lambda entries: self._given_back(holder, entries),
            ),
            around.full_topic,
            self._load.truth,
        )
        return self._consumer

    def _given_back(self, holder: Holder, entries: Sequence[tuple[int, int]]) -> None:
        """Whole batches come again, whatever of them was nacked."""
        asked = set(entries)
        for message_id in [one for one in holder.held if asked.intersection(self._entries[one])]:
            self.subscription.given_back(holder, message_id)

    def _take(self, consumer: Any, bite: list[Any]) -> None:
        for message in bite:
            self._known[message.id] = message.received.id
            self._entries[message.id] = [one.key for one in message.received.chunks]
        super()._take(consumer, bite)

    def _arrived(self, message: Any) -> float:
        loop = self._around.loop
        arrived: float = message.received.arrived
        return arrived - loop.time() + loop.now

    def _targets(self) -> list[MessageId]:
        return [one for one in super()._targets() if one in self._known]

    async def _move(self, consumer: Any, target: MessageId) -> int:
        to = self._known.get(target, Id(-1, -1))
        asked_in = 0

        async def seek() -> None:
            nonlocal asked_in
            asked_in = consumer.consumer.attachment_id
            await consumer.consumer.seek(to)

        await self._around.until_done(seek)
        return self._load.truth.epochs[asked_in]

    async def _acknowledge(self, consumer: Any, messages: list[Any]) -> None:
        """Of a batch without ack sets nothing is acknowledged before all of it is: the program knows nothing then."""
        loop, subscription, holder = self._around.loop, self.subscription, self._holder
        attempt = subscription.acknowledging(holder, _ids(messages), loop.now)
        done: list[Received] = []

        async def acknowledge() -> None:
            done[:] = await consumer.consumer.ack([one.received for one in messages], receipt=True)

        await self._around.until_done(acknowledge)
        whole = set(done)
        if len(whole) < len(messages):
            attempt.quietly = True
            attempt = replace(
                attempt, messages=_ids([one for one in messages if one.received in whole]), quietly=False
            )
        subscription.receipt(attempt, loop.now)

    async def _acknowledge_up_to(self, consumer: Any, message: Any) -> None:
        loop, subscription = self._around.loop, self.subscription
        attempt = subscription.acknowledging_up_to(self._holder, message.id, loop.now, cuts=True)
        done: list[bool] = []

        async def acknowledge() -> None:
            done.append(await consumer.consumer.ack_cumulative(message.received, receipt=True))

        await self._around.until_done(acknowledge)
        if done[-1]:
            subscription.receipt_up_to(attempt, message.id, loop.now)


def _ids(messages: list[Any]) -> list[tuple[MessageId, Name]]:
    return [(message.id, name_of(message.value)) for message in messages]


class MixedSubscription(Subscription):
    """What nobody has acknowledged is in the backlog, so in the end there is nothing of that kind."""

    def lacks(self, confirmed: dict[Name, MessageId]) -> list[Name]:
        return super().lacks(confirmed) or list(self._to_be_done(confirmed))


# --- the load --------------------------------------------------------------------------------------------------------------


class MixedLoad(cluster.TopicLoad):
    """Of one topic."""

    bursts_per_s = 2.0  # as there are three producers
    bursts = (1, 3, 12)
    paced_per_s = 5.0
    subscription = MixedSubscription
    sequence_ids: Sequence[Any] = ("first and last", "first", "last")  # how batches have them
    tail_of_pulsar = 0.5  # chance of the tail reader to be Pulsar's
    truth: ClassVar[Truth]

    def __init__(self, loop: Any, history: Any, url: str, plans: Any, topic: str) -> None:
        """Dead letters and retry topics are the matter of clients."""
        plans = [replace(plan, dead_letters=False, retry=False) for plan in plans]
        super().__init__(loop, history, url, plans, topic)
        self.kinds = (
            loop.rng.choice((("batched", True), ("paced", True))),
            (f"{PREFIX}batched", True),
            (f"{PREFIX}single", False),
        )
        self.opened_producers: list[Producer] = []

    def pulsar_client(self) -> PulsarClient:
        """Of the process that calls."""
        rng = random.Random(self._loop.rng.getrandbits(64))
        clock = SimClock(self._loop)
        hosts = self._url.removeprefix("magnetar://").split(",")
        return PulsarClient(
            "pulsar://" + ",".join(f"{host.rpartition(':')[0]}:{PORT}" for host in hosts),
            operation_timeout_s=5.0,
            connect_timeout_s=2.0,
            ping_interval_s=2.0,
            client_version=rng.choice(("Pulsar-Java-v4.0.6", "Pulsar-CPP-v3.7.2")),
            rng=rng,
            now_ms=clock.now_ms,
        )

    async def client(self, name: str, operation_timeout: float = 5.0, **options: Any) -> Any:
        """See Load."""
        if name.startswith(PREFIX):
            return ProgramOfPulsar(self.pulsar_client(), self, options.get("max_message_bytes", 1 << 20))
        return await super().client(name, operation_timeout, **options)

    def start_consumers(self, again: str) -> None:
        """See Load. Of several consumers of a subscription there are some of either kind."""
        self.around.consuming = True
        self.places = []
        for plan in self.plans:
            first = self._loop.rng.randrange(2)
            for number in range(plan.consumers):
                if (number + first) % 2:
                    self.places.append(PulsarPlace(self, plan, number, again))
                else:
                    self.places.append(Place(self.around, plan, number, again))
        for place in self.places:
            place.start()

    async def _tail(self) -> None:
        if self._loop.rng.random() >= self.tail_of_pulsar:
            await super()._tail()
            return
        client = self.pulsar_client()
        reader = await self._reader(client)
        while self.reading:
            try:
                for one in await reader.receive(20, 1.0):
                    self.history.tailed(native_id(one.chunks), one.value)
            except ReceiveTimeout:
                continue
        await client.close()

    async def _reader(self, client: PulsarClient) -> Consumer:
        found: list[Consumer] = []

        async def subscribe() -> None:
            options = ConsumerOptions(
                subscription=f"reader-{client.rng.getrandbits(32)}", durable=False, start=Id(-1, -1), queue=50
            )
            found.append(await client.subscribe(self.topic, options))

        await self.until_done(subscribe)
        return found[0]

    async def reread(self) -> list[tuple[MessageId, bytes]]:
        """See Load. A reader of Pulsar's gets the same."""
        stored = await super().reread()
        client = self.pulsar_client()
        reader = await self._reader(client)
        found: list[tuple[MessageId, bytes]] = []
        while len(found) <= len(stored):
            try:
                bite = await reader.receive(100, LAST_IN_CALM_S)
            except ReceiveTimeout:
                break
            found += [(native_id(one.chunks), one.value) for one in bite]
        await client.close()
        for at, (one, other) in enumerate(zip_longest(stored, found)):
            if one != other:
                raise Violation(
                    f"number {at} of {self.topic} is {one} for a native reader, and {other} for one of Pulsar's"
                )
        return stored
