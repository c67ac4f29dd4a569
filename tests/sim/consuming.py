"""The consumers of a simulated service: subscriptions of all types, each with what the seed has it do.

    plan_of_subscriptions   which two types, how many consumers, and how each of them behaves
    Place                   a consumer that is to be there: it leaves, dies and comes back under its name
    disturb                 has places leave, die and seek, while the storm lasts

What they see goes to `sim.deliveries`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from magnetar.client import Client, Consumer, DeadLetterPolicy, Message
from magnetar.client.options import SUBSCRIPTION_TYPES, SubscriptionType
from magnetar.proto.commands import Command, Deliver
from magnetar.proto.errors import ConsumerBusy, MagnetarError, ReceiveTimeout, TopicTerminated
from magnetar.proto.ids import MessageId, TopicName
from sim.deliveries import Holder, Name, Subscription, Violation
from sim.history import History, name_of
from support.sim import SimLoop, SimProcess

TOPIC = "orders"
KEYS = 7  # message n of a producer has the key n % KEYS
INDIVIDUAL = ("shared", "key_shared")
SLOTS = 65_536
POISON_EVERY = 23  # so many messages apart, one cannot be processed
MAX_REDELIVER_COUNT = 2
BITE = 20  # messages that are looked at together, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionPlan:
    """How the consumers of a subscription behave. Times in seconds, rates per message."""

    type: SubscriptionType
    consumers: int = 1
    priorities: tuple[int, ...] = (0,)  # failover, shared: one for each consumer
    sticky: bool = False  # key_shared: each has its part of the slots
    nacks: float = 0.0
    nack_delay: float = 0.3
    forgets: float = 0.0  # neither acknowledged nor nacked
    ack_timeout: float | None = None
    holds: float = 0.0  # acknowledged after a while
    hold_s: float = 0.5  # at most
    dead_letters: bool = False
    retry: bool = False
    stay_s: float = 5.0  # how long a consumer stays, on average
    dies: float = 0.5  # a consumer that leaves does not say so
    pauses: float = 0.0  # per bite
    seeks: int = 0

    @property
    def name(self) -> str:
        """Of the subscription."""
        return self.type

    @property
    def keys_in_order(self) -> int:
        """See `Subscription`."""
        return {"exclusive": 1, "failover": 1, "key_shared": KEYS, "shared": 0}[self.type]

    @property
    def policy(self) -> DeadLetterPolicy | None:
        """For `Client.subscribe`."""
        return DeadLetterPolicy(max_redeliver_count=MAX_REDELIVER_COUNT) if self.dead_letters else None

    def hash_ranges(self, number: int) -> tuple[tuple[int, int], ...]:
        """Of one consumer; together they have all slots."""
        if not self.sticky:
            return ()
        ends = [SLOTS * part // self.consumers for part in range(self.consumers + 1)]
        return ((ends[number], ends[number + 1] - 1),)


def plan_of_subscriptions(rng: random.Random, *, trimming: bool) -> list[SubscriptionPlan]:
    """Two types of the four. `trimming`: what was acknowledged may be gone, so nobody seeks back to it."""
    return [plan_of(rng, type, trimming=trimming) for type in rng.sample(SUBSCRIPTION_TYPES, 2)]


def plan_of(rng: random.Random, type: SubscriptionType, *, trimming: bool) -> SubscriptionPlan:
    """What the consumers of one type do."""
    individual = type in INDIVIDUAL
    consumers = 1 if type == "exclusive" else rng.choice((2, 2, 3))
    dead_letters = individual and rng.random() < 0.5
    ack_timeout = rng.choice((None, None, 1.5, 3.0))
    return SubscriptionPlan(
        type=type,
        consumers=consumers,
        priorities=tuple(
            rng.choice((0, 0, 1)) if type in ("failover", "shared") else 0 for _ in range(consumers)
        ),
        sticky=type == "key_shared" and rng.random() < 0.3,
        nacks=rng.choice((0.0, 0.01, 0.05)),
        nack_delay=rng.choice((0.0, 0.3, 1.0)),
        forgets=0.01 if ack_timeout else 0.0,
        ack_timeout=ack_timeout,
        holds=rng.choice((0.0, 0.1, 0.3)),
        hold_s=rng.choice((0.1, 0.5, 1.0)),
        dead_letters=dead_letters,
        retry=dead_letters and rng.random() < 0.5,
        stay_s=rng.choice((2.0, 5.0, 20.0)),
        dies=rng.choice((0.2, 0.8)),
        pauses=rng.choice((0.0, 0.02)),
        seeks=0 if trimming else rng.choice((0, 1, 2)),
    )


class Surroundings:
    """What the consumers of a run share. `until_done` retries what says that it can be retried."""

    def __init__(
        self,
        loop: SimLoop,
        history: History,
        connect: Callable[[str], Awaitable[Client]],
        until_done: Callable[[Callable[[], Awaitable[object]]], Awaitable[None]],
        topic: str,
    ) -> None:
        self.topic = topic  # which all of them consume
        self.full_topic = str(TopicName.parse(topic))
        self.prefix = "" if topic == TOPIC else f"{topic} "  # of the names of processes
        self.loop = loop
        self.history = history
        self.connect = connect
        self.until_done = until_done
        self.consuming = True
        self.disturbed = True  # consumers leave, die and seek
        # Before anybody subscribes: else what is acknowledged is trimmed before the subscription that is to hold it is made.
        self.start_is_held = asyncio.Event()


class Place:
    """One consumer that is to be there. `task` is its present life."""

    def __init__(self, around: Surroundings, plan: SubscriptionPlan, number: int, again: str) -> None:
        self._around = around
        self.plan = plan
        self.name = f"{plan.name}-{number}"
        self._process_name = f"{around.prefix}{self.name}{again}"
        self._number = number
        self._rng = random.Random(around.loop.rng.getrandbits(64))
        self.subscription: Subscription = around.history.subscriptions[plan.name]
        self.task: asyncio.Task[Any] | None = None  # None: it is away
        self._process: SimProcess | None = None
        self._consumer: Consumer | None = None
        self._holder = Holder(self.name)
        # When the newest delivery of an entry came, by ledger and entry; those before `subscribe` returned: not before this.
        self._arrivals: dict[tuple[int, int], float] = {}
        self._came_at = 0.0
        self._acks: list[asyncio.Task[None]] = []
        self._told_end_in: int | None = None  # the attachment in which nothing was to come any more
        self.leaving = False  # it is to close and come back
        self.seeking = False  # it is to seek, or does
        self._retry_topic = ""

    @property
    def reached_end(self) -> bool:
        """It is told that nothing comes any more; of retry topics, which have no end, nobody is."""
        return self.plan.retry or (self._consumer is not None and self._consumer.reached_end)

    # --- coming and going --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """It comes, or comes back."""
        self._consumer, self._acks, self.leaving = None, [], False
        process = self._process = self._around.loop.start_process(self._process_name)
        self.task = process.spawn(self._run(), name=self._process_name)

    def kill(self) -> None:
        """It dies without a word, and comes back after a while."""
        if self.task is None or self.seeking or not self._around.disturbed:
            return
        assert self._process is not None
        self.task = None
        self._around.loop.trace.fault("kill_consumer", self.name)
        self._around.loop.call_outside(self._rng.uniform(0.05, 2.0), self.start)
        self._process.kill()

    async def _run(self) -> None:
        around, plan, rng = self._around, self.plan, self._rng
        client = await self._connect()
        while around.consuming:
            consumer = self._consumer
            bite: list[Message] = []
            try:
                if consumer is None:
                    consumer = await self._subscribe(client)
                bite += await consumer.receive_batch(1 + rng.randrange(BITE), timeout=1.0)
            except ReceiveTimeout:
                pass
            except TopicTerminated:
                self._told_end_in = self._holder.attachment
                await asyncio.sleep(0.2)
            except MagnetarError as error:
                # Another process of this name may still hold the place.
                if not error.retryable and not (isinstance(error, ConsumerBusy) and self._consumer is None):
                    raise
                await asyncio.sleep(0.2)
                continue
            assert consumer is not None
            if bite:
                self._take(consumer, bite)
            if self.leaving or self.seeking:
                await asyncio.gather(*self._acks)
                self._acks.clear()
                await (self._leave(consumer) if self.leaving else self._seek(consumer))
            elif bite and rng.random() < plan.pauses and around.disturbed:
                around.loop.trace.fault("pause_consumer", self.name)
                consumer.pause()
                asyncio.get_running_loop().call_later(rng.uniform(0.1, 1.0), consumer.resume)
        await asyncio.gather(*self._acks)
        await client.close()

    async def _connect(self) -> Client:
        return await self._around.connect(self._process_name)

    async def _subscribe(self, client: Client) -> Consumer:
        await self._around.start_is_held.wait()
        plan, began = self.plan, self._around.loop.now
        consumer = await client.subscribe(
            self._around.topic,
            plan.name,
            type=plan.type,
            start="earliest",
            name=self.name,
            # Whose program was ended in the middle of it: three times that is longer than any fault, and less than a minute.
            expire_incomplete_chunked_messages=10.0,
            nack_delay=plan.nack_delay,
            ack_timeout=plan.ack_timeout,
            dead_letter=plan.policy,
            retry=plan.retry,
            priority_level=plan.priorities[self._number],
            hash_ranges=plan.hash_ranges(self._number),
        )
        self._consumer = consumer
        self._told_end_in = None
        self._holder = holder = Holder(self.name, seeks=self.subscription.seeks, attached=began)
        member = consumer._consumer.consumers[self._around.full_topic]
        for change in ("detached", "active_changed"):
            setattr(member, change, self._counted(holder, getattr(member, change)))
        self._came_at = began
        self._note_arrivals(member)
        return consumer

    def _arrived(self, message: Message) -> float:
        return self._arrivals.get(message.id[:2], self._came_at)

    def _note_arrivals(self, member: Any) -> None:
        loop, inner = self._around.loop, member.received
        self._arrivals.clear()

        def outer(command: Command, payload: bytes) -> None:
            if isinstance(command, Deliver):
                self._arrivals[command.ledger, command.entry] = loop.now
            inner(command, payload)

        member.received = outer

    def _counted(self, holder: Holder, inner: Callable[..., None]) -> Callable[..., None]:
        """What ends an attachment of a consumer."""

        def outer(*arguments: Any) -> None:
            holder.detached(self.subscription, self._around.loop.now)
            inner(*arguments)

        return outer

    async def _leave(self, consumer: Consumer) -> None:
        self._around.loop.trace.fault("leave", self.name)
        await self._around.until_done(consumer.close)
        self._consumer, self.leaving = None, False
        await asyncio.sleep(self._rng.uniform(0.0, 1.0))

    async def _seek(self, consumer: Consumer) -> None:
        """Back to something that was delivered, sometimes to the beginning."""
        subscription, around = self.subscription, self._around
        delivered = self._targets()
        target = self._rng.choice(delivered[-300:]) if delivered else MessageId(0, 0, 0)
        if self._rng.random() < 0.1:
            target = MessageId(0, 0, 0)
        around.loop.trace.fault("seek", self.name, str(target))
        subscription.seek_begins()
        epoch = await self._move(consumer, target)
        subscription.sought(target, epoch, around.history.confirmed)
        self.seeking = False

    def _targets(self) -> list[MessageId]:
        return list(self.subscription.delivered.values())

    async def _move(self, consumer: Consumer, target: MessageId) -> int:
        """A seek; the epoch of the subscription behind it."""
        around = self._around
        start: Any = (
            target if not self.plan.retry else lambda topic: target if topic == around.full_topic else None
        )
        await around.until_done(lambda: consumer.seek(start))
        epoch: int = consumer._consumer.consumers[around.full_topic]._epoch
        return epoch

    # --- what it does with messages ----------------------------------------------------------------------------------

    def _take(self, consumer: Consumer, bite: list[Message]) -> None:
        plan, rng, subscription = self.plan, self._rng, self.subscription
        holder, now = self._holder, self._around.loop.now
        quietly: list[Message] = []
        with_receipt: list[Message] = []
        for message in bite:
            assert message.value is not None
            name = name_of(message.value)
            if message.topic != self._around.full_topic:
                self._take_from_retry_topic(consumer, message, name)
                continue
            if plan.type == "failover" and not consumer.active:
                raise Violation(f"{self.name} got {name}, and is not the active consumer")
            ended = self._told_end_in == holder.attachment and not plan.seeks
            if ended and name not in subscription.delivered:
                raise Violation(f"{self.name} was told that nothing comes any more, and got {name}")
            subscription.handed_out(
                holder,
                message.id,
                name,
                count=message.redelivery_count,
                epoch=message.delivery.epoch,
                now=now,
                failed_sends=self._around.history.failed,
                arrived=self._arrived(message),
            )
            dice = rng.random()
            if plan.dead_letters and is_poison(name):
                self._fail(consumer, message)
            elif dice < plan.nacks:
                subscription.given_back(holder, message.id)
                consumer.nack(message)
            elif (dice := dice - plan.nacks) < plan.forgets and self._around.disturbed:
                subscription.given_back(holder, message.id)
            elif (dice := dice - plan.forgets) < plan.holds:
                self._spawn(self._acknowledge_later(consumer, message, rng.uniform(0.0, plan.hold_s)))
            else:
                (quietly if dice < 0.5 else with_receipt).append(message)
        if quietly:
            subscription.acknowledging(holder, ids_of(quietly), now, quietly=True)
            self._spawn(consumer.ack(quietly))
        if with_receipt:
            if plan.type not in INDIVIDUAL and rng.random() < 0.3:
                self._spawn(self._acknowledge_up_to(consumer, with_receipt[-1]))
            else:
                self._spawn(self._acknowledge(consumer, with_receipt))

    def _fail(self, consumer: Consumer, message: Message) -> None:
        """It cannot be processed, whoever tries it and however often."""
        loop, rng = self._around.loop, self._rng
        self.subscription.given_back(self._holder, message.id)
        if self.plan.retry:
            self._spawn(self._around.until_done(lambda: consumer.reconsume_later(message, rng.uniform(0, 1))))
        else:
            consumer.nack(message)
            if message.redelivery_count < MAX_REDELIVER_COUNT:
                return
        if rng.random() < 0.2:  # the time when a letter is being written
            loop.call_outside(rng.uniform(0.0, 0.1), self.kill)

    def _take_from_retry_topic(self, consumer: Consumer, message: Message, name: Name) -> None:
        if is_poison(name):
            self._fail(consumer, message)
        else:
            self.subscription.acknowledged[name] = None
            self._spawn(consumer.ack(message))

    def _spawn(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        self._acks = [task for task in self._acks if not task.done() or task.exception() is not None]
        self._acks.append(asyncio.create_task(run()))

    async def _acknowledge(self, consumer: Consumer, messages: list[Message]) -> None:
        """With receipt until it works; each failure leaves open whether it did."""
        loop, subscription = self._around.loop, self.subscription
        attempt = subscription.acknowledging(self._holder, ids_of(messages), loop.now)
        await self._around.until_done(lambda: consumer.ack(messages, receipt=True))
        subscription.receipt(attempt, loop.now)

    async def _acknowledge_later(self, consumer: Consumer, message: Message, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._acknowledge(consumer, [message])

    async def _acknowledge_up_to(self, consumer: Consumer, message: Message) -> None:
        loop, subscription = self._around.loop, self.subscription
        attempt = subscription.acknowledging_up_to(self._holder, message.id, loop.now)
        await self._around.until_done(lambda: consumer.ack_cumulative(message.id, receipt=True))
        subscription.receipt_up_to(attempt, message.id, loop.now)


def ids_of(messages: list[Message]) -> list[tuple[MessageId, Name]]:
    """Id and name of each."""
    return [(message.id, name_of(message.value or b"")) for message in messages]


def is_poison(name: Name) -> bool:
    """True for messages that cannot be processed."""
    return name[1] % POISON_EVERY == 5


async def disturb(around: Surroundings, places: list[Place]) -> None:
    """Has places leave, die and seek; ends with the storm."""
    loop = around.loop
    rng = random.Random(loop.rng.getrandbits(64))
    going = [
        (loop.now + rng.expovariate(1 / place.plan.stay_s), number) for number, place in enumerate(places)
    ]
    seeks = [
        (loop.now + rng.uniform(2.0, 10.0), places.index(place))
        for place in places
        if place._number == 0
        for _ in range(place.plan.seeks)
    ]
    while around.disturbed:
        await asyncio.sleep(0.2)
        for at, number in [one for one in going if one[0] <= loop.now]:
            place = places[number]
            going.remove((at, number))
            going.append((loop.now + rng.expovariate(1 / place.plan.stay_s), number))
            if rng.random() < place.plan.dies:
                place.kill()
            elif place.task is not None and not place.seeking:
                place.leaving = True
        for at, number in [one for one in seeks if one[0] <= loop.now]:
            place = places[number]
            if place.task is not None and not place.leaving and not place.seeking:
                seeks.remove((at, number))
                place.seeking = True
