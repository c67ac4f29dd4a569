"""Clients of a simulated service: each keeps going through failures and tells the history what it saw.

Every client is a process of its own (its callbacks are tagged), with its own connection. The storm ends with `Load.stop`;
then producers flush, consumers drain, and everything must come to rest.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from magnetar.client import Client, Consumer, Producer, Reader, connect
from magnetar.proto.errors import MagnetarError, ReceiveTimeout
from magnetar.proto.ids import MessageId
from sim.history import History, Name, Subscription, name_of, value_of
from support.sim import SimClock, SimLoop

TOPIC = "orders"
KEYS = 7  # message n of a producer has the key n % KEYS
PADDINGS = (0, 10, 100, 100, 100, 1000, 20_000)


class Load:
    """All clients of one run. `history` fills up; tasks end after `stop` when there is nothing left to do."""

    def __init__(self, loop: SimLoop, history: History, url: str) -> None:
        self.history = history
        self.producing = True
        self.reading = True
        self._loop = loop
        self._url = url
        self._clients = 0
        # Of these two: their names, and how many keys of a producer keep their order.
        self._types = loop.rng.sample([("shared", 0), ("failover", 1), ("key_shared", KEYS)], 2)
        self.producers: list[asyncio.Task[None]] = []
        self.readers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Three producers, one tail reader, and consumers of three subscriptions."""
        for name, batching in (("batched", True), ("single", False), ("paced", True)):
            self.producers.append(self._spawn(name, self._produce(name, batching)))
        self.start_readers()

    def start_readers(self) -> None:
        """All but the producers."""
        self.readers.append(self._spawn("reader", self._tail()))
        if not self.history.trimming:
            self._spawn("archive", self._archive())
        self.start_consumers("")

    def start_consumers(self, again: str) -> None:
        """One Exclusive consumer, and two each of two of the other types; `again` tells later ones from the first."""
        billing = self.history.subscription("billing", keys_in_order=1)
        self.readers.append(self._spawn(f"billing{again}", self._consume(billing, "exclusive", "billing")))
        for kind, keys in self._types:
            subscription = self.history.subscription(kind, keys_in_order=keys)
            for number in range(2):
                name = f"{kind}-{number}"
                self.readers.append(self._spawn(f"{name}{again}", self._consume(subscription, kind, name)))

    async def client(self, name: str) -> Client:
        """A connected client; keeps trying."""
        while True:
            try:
                return await connect(
                    self._url,
                    operation_timeout=5.0,
                    connect_timeout=2.0,
                    ping_interval=2.0,
                    backoff_max=1.0,
                    name=name,
                    clock=SimClock(self._loop),
                    rng=random.Random(self._loop.rng.getrandbits(64)),
                )
            except MagnetarError as error:
                if not error.retryable:
                    raise
            await asyncio.sleep(0.2)

    async def until_done(self, attempt: Callable[[], Awaitable[object]]) -> None:
        """Retries what says that it can be retried."""
        while True:
            try:
                await attempt()
                return
            except MagnetarError as error:
                if not error.retryable:
                    raise
            await asyncio.sleep(0.2)

    def _spawn(self, name: str, work: Awaitable[None]) -> asyncio.Task[None]:
        async def run() -> None:
            await work

        return self._loop.start_process(name).spawn(run(), name=name)

    # --- producing -------------------------------------------------------------------------------------------------

    async def _produce(self, name: str, batching: bool) -> None:
        rng = random.Random(self._loop.rng.getrandbits(64))
        client = await self.client(name)
        producers: list[Producer] = []

        async def open_producer() -> None:
            producers.append(
                await client.create_producer(
                    TOPIC, name=name, batching=batching, batching_by_key=name == "paced", send_timeout=300.0
                )
            )

        await self.until_done(open_producer)
        waiting: list[asyncio.Task[None]] = []
        while self.producing:
            burst = 1 if name == "paced" else rng.choice((1, 1, 5, 40))
            for _ in range(burst):
                message = self.history.send(name)
                key = f"{name}-{message[1] % KEYS}"
                receipt = producers[0].send_nowait(value_of(message, rng.choice(PADDINGS)), key)
                waiting.append(asyncio.create_task(self._confirm(message, receipt)))
            waiting = [task for task in waiting if not task.done() or task.exception() is not None]
            await asyncio.sleep(rng.expovariate(10 if burst > 1 else 40))
        await asyncio.gather(*waiting)
        await client.close()

    async def _confirm(self, message: Name, receipt: Awaitable[MessageId]) -> None:
        try:
            self.history.confirm(message, await receipt)
        except MagnetarError as error:
            self.history.failed[message] = repr(error)

    # --- reading ---------------------------------------------------------------------------------------------------

    async def _tail(self) -> None:
        client = await self.client("reader")
        reader: Reader | None = None
        while self.reading:
            try:
                if reader is None:
                    reader = await client.create_reader(TOPIC, start="earliest")
                message = await reader.receive(timeout=1.0)
                assert message.value is not None
                self.history.tailed(message.id, message.value)
            except ReceiveTimeout:
                continue
            except MagnetarError as error:
                if not error.retryable:
                    raise
                await asyncio.sleep(0.2)
        await client.close()

    async def _archive(self) -> None:
        """A subscription that acknowledges nothing, so that nothing is trimmed."""
        client = await self.client("archive")

        async def subscribe() -> None:
            await client.subscribe(TOPIC, "archive", start="earliest", receiver_queue_messages=1)

        await self.until_done(subscribe)
        await client.close()

    async def _consume(self, subscription: Subscription, kind: str, name: str) -> None:
        rng = random.Random(self._loop.rng.getrandbits(64))
        client = await self.client(name)
        consumer: Consumer | None = None
        acks: list[asyncio.Task[None]] = []
        while self.reading:
            try:
                if consumer is None:
                    consumer = await client.subscribe(
                        TOPIC, subscription.name, type=kind, start="earliest", name=name, nack_delay=1.0
                    )
                message = await consumer.receive(timeout=1.0)
            except ReceiveTimeout:
                continue
            except MagnetarError as error:
                if not error.retryable:
                    raise
                await asyncio.sleep(0.2)
                continue
            assert message.value is not None
            self.history.delivered(subscription, message.id, message.value, self._loop.now)
            dice = rng.random()
            if dice < 0.03 and kind in ("shared", "key_shared"):
                consumer.nack(message)
            elif dice < 0.032 and kind in ("failover", "key_shared") and self.producing:
                # Its place goes to the other one. Rarely: what waits in its queue is delivered again.
                await asyncio.gather(*acks)
                await self.until_done(consumer.close)
                consumer = None
            elif dice < 0.40:
                await consumer.ack(message)
                self.history.acknowledged(
                    subscription, message.id, name_of(message.value), self._loop.now, receipt=False
                )
            else:
                cumulative = kind in ("exclusive", "failover") and dice < 0.5
                work = self._ack(subscription, consumer, message.id, name_of(message.value), cumulative)
                acks.append(asyncio.create_task(work))
                acks = [task for task in acks if not task.done() or task.exception() is not None]
        await asyncio.gather(*acks)
        await client.close()

    async def _ack(
        self,
        subscription: Subscription,
        consumer: Consumer,
        message_id: MessageId,
        name: Name,
        cumulative: bool,
    ) -> None:
        """Acknowledges with receipt until it works; each failure leaves open whether it did."""

        async def attempt() -> None:
            if cumulative:
                await consumer.ack_cumulative(message_id, receipt=True)
                self.history.acknowledged_up_to(subscription, message_id, self._loop.now)
            else:
                await consumer.ack(message_id, receipt=True)
                self.history.acknowledged(subscription, message_id, name, self._loop.now, receipt=True)

        await self.until_done(attempt)

    # --- the end -----------------------------------------------------------------------------------------------------

    async def reread(self) -> list[tuple[MessageId, bytes]]:
        """The whole topic from its beginning, by a new client."""
        client = await self.client("second reader")
        found: list[tuple[MessageId, bytes]] = []
        async with client.create_reader(TOPIC, start="earliest") as reader:
            while await reader.has_message_available():
                message = await reader.receive(timeout=10.0)
                assert message.value is not None
                found.append((message.id, message.value))
        await client.close()
        return found
