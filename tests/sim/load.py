"""Clients of a simulated service: each keeps going through failures and tells the history what it saw.

Every client is a process of its own (its callbacks are tagged), with its own connection. The storm ends with `Load.stop`;
then producers flush, consumers drain, and everything must come to rest.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from magnetar.client import Client, Producer, Reader, connect
from magnetar.proto.errors import MagnetarError, ReceiveTimeout, TopicTerminated
from magnetar.proto.ids import MessageId
from sim.consuming import (
    KEYS,
    MAX_REDELIVER_COUNT,
    TOPIC,
    Place,
    SubscriptionPlan,
    Surroundings,
    disturb,
    plan_of_subscriptions,
)
from sim.deliveries import Name, Subscription, Violation
from sim.history import History, name_of, value_of
from support.sim import SimClock, SimLoop

PADDINGS = (0, 10, 100, 100, 100, 1000, 20_000)


class Load:
    """All clients of one topic. `history` fills up; tasks end after `stop` when there is nothing left to do."""

    kinds: Sequence[tuple[str, bool]] = (
        ("batched", True),
        ("single", False),
        ("paced", True),
    )  # name, batching
    paddings: Sequence[int] = PADDINGS  # bytes of messages, one of these each
    bursts_per_s = 10.0  # of producers that are not paced
    bursts: Sequence[int] = (1, 1, 5, 40)  # messages, one of these each
    paced_per_s = 40.0
    subscription: type[Subscription] = Subscription  # what knows what one has handed out

    def __init__(
        self,
        loop: SimLoop,
        history: History,
        url: str,
        plans: Sequence[SubscriptionPlan] | None = None,
        topic: str = TOPIC,
    ) -> None:
        """`plans`: what is consumed and how; None: as the seed has it."""
        self.topic = topic
        self.history = history
        self.producing = True
        self.reading = True
        self.tail_ended = False  # the tail reader is told that nothing comes any more
        self._loop = loop
        self._url = url
        self.dead_letters = 0
        self.producers: list[asyncio.Task[None]] = []
        self.readers: list[asyncio.Task[None]] = []
        self.around = Surroundings(loop, history, self.client, self.until_done, topic)
        self.plans = plan_of_subscriptions(loop.rng, trimming=history.trimming) if plans is None else plans
        self.places: list[Place] = []
        for plan in self.plans:
            history.subscriptions[plan.name] = self.subscription(
                plan.name,
                plan.type,
                plan.keys_in_order,
                max_redeliver_count=MAX_REDELIVER_COUNT if plan.dead_letters else None,
            )

    def start(self) -> None:
        """Three producers, one tail reader, and consumers of two subscriptions, who come and go."""
        for name, batching in self.kinds:
            self.producers.append(self._spawn(name, self._produce(name, batching)))
        self.start_readers()
        self.readers.append(asyncio.create_task(disturb(self.around, self.places)))

    def start_readers(self) -> None:
        """All but the producers."""
        self.readers.append(self._spawn("reader", self._tail()))
        if self.history.trimming:
            self.around.start_is_held.set()
        else:
            self._spawn("archive", self._archive())
        self.start_consumers("")

    def start_consumers(self, again: str) -> None:
        """Those of all subscriptions; `again` tells later ones from the first."""
        self.around.consuming = True
        self.places = [
            Place(self.around, plan, number, again) for plan in self.plans for number in range(plan.consumers)
        ]
        for place in self.places:
            place.start()

    def stop_disturbing(self) -> None:
        """Producers end, and consumers stay where they are."""
        self.producing = self.around.disturbed = False

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Of everybody who is there and reads."""
        return [*self.readers, *(place.task for place in self.places if place.task is not None)]

    async def finish(self) -> None:
        """Everybody stops reading. Raises what one of them raised."""
        self.reading = self.around.consuming = False
        for task in self.tasks:
            await task
        self.readers.clear()

    async def client(self, name: str, operation_timeout: float = 5.0, **options: Any) -> Client:
        """A connected client; keeps trying. `operation_timeout` in seconds."""
        while True:
            try:
                return await connect(
                    self._url,
                    operation_timeout=operation_timeout,
                    connect_timeout=2.0,
                    ping_interval=2.0,
                    backoff_max=1.0,
                    name=name,
                    clock=SimClock(self._loop),
                    rng=random.Random(self._loop.rng.getrandbits(64)),
                    **options,
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

        return self._loop.start_process(f"{self.around.prefix}{name}").spawn(run(), name=name)

    # --- producing -------------------------------------------------------------------------------------------------

    async def _produce(self, name: str, batching: bool) -> None:
        rng = random.Random(self._loop.rng.getrandbits(64))
        client = await self.client(name)
        producers: list[Producer] = []

        async def open_producer() -> None:
            producers.append(
                await client.create_producer(
                    self.topic,
                    name=name,
                    batching=batching,
                    batching_by_key=name == "paced",
                    send_timeout=300.0,
                )
            )

        await self.until_done(open_producer)
        waiting: list[asyncio.Task[None]] = []
        while self.producing:
            burst = 1 if name == "paced" else rng.choice(self.bursts)
            for _ in range(burst):
                message = self.history.send(name)
                key = f"{name}-{message[1] % KEYS}"
                receipt = producers[0].send_nowait(
                    value_of(message, rng.choice(self.paddings)), key, deliver_at=self._deliver_at(message)
                )
                waiting.append(asyncio.create_task(self._confirm(message, receipt)))
            waiting = [task for task in waiting if not task.done() or task.exception() is not None]
            await asyncio.sleep(rng.expovariate(self.bursts_per_s if burst > 1 else self.paced_per_s))
        await asyncio.gather(*waiting)
        await client.close()

    def _deliver_at(self, message: Name) -> int | None:
        """When a message is to be delivered, by the clock of its producer; None: at once."""
        return None

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
                    reader = await client.create_reader(self.topic, start="earliest")
                message = await reader.receive(timeout=1.0)
                assert message.value is not None
                self.history.tailed(message.id, message.value)
            except ReceiveTimeout:
                continue
            except TopicTerminated:
                self.tail_ended = True
                await asyncio.sleep(0.2)
            except MagnetarError as error:
                if not error.retryable:
                    raise
                await asyncio.sleep(0.2)
        await client.close()

    async def _archive(self) -> None:
        """A subscription that acknowledges nothing, so that nothing is trimmed."""
        client = await self.client("archive")

        async def subscribe() -> None:
            await client.subscribe(self.topic, "archive", start="earliest", receiver_queue_messages=1)

        await self.until_done(subscribe)
        self.around.start_is_held.set()
        await client.close()

    # --- the end -----------------------------------------------------------------------------------------------------

    async def reread(self) -> list[tuple[MessageId, bytes]]:
        """The whole topic from its beginning, by a new client."""
        client = await self.client("second reader")
        found: list[tuple[MessageId, bytes]] = []
        async with client.create_reader(self.topic, start="earliest") as reader:
            while await reader.has_message_available():
                message = await reader.receive(timeout=10.0)
                assert message.value is not None
                found.append((message.id, message.value))
        await client.close()
        return found

    async def check_letters(self, stored: list[tuple[MessageId, bytes]]) -> None:
        """Each dead letter is a copy of what it says, and all are there. `stored`: the whole topic."""
        names = {str(message_id): name_of(value) for message_id, value in stored}
        for plan in self.plans:
            if plan.policy is None:
                continue
            subscription = self.history.subscriptions[plan.name]
            letters: Counter[Name] = Counter()
            client = await self.client(f"letters of {plan.name}")
            async with client.create_reader(
                plan.policy.dead_letter_topic(self.around.full_topic, plan.name), start="earliest"
            ) as reader:
                while await reader.has_message_available():
                    message = await reader.receive(timeout=10.0)
                    assert message.value is not None
                    name, origin = name_of(message.value), message.properties["ORIGIN_MESSAGE_ID"]
                    if (
                        message.properties["REAL_TOPIC"] != self.around.full_topic
                        or names.get(origin, name) != name
                    ):
                        raise Violation(
                            f"the dead letter {name} of {plan.name} says that it was {origin}, "
                            f"which is {names.get(origin)}"
                        )
                    letters[name] += 1
            await client.close()
            subscription.check_letters(letters, self.history.confirmed)
            self.dead_letters += len(letters)
