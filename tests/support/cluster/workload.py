"""The clients of a cluster under test, in a process of their own: `python -m support.cluster.workload PLAN HISTORY`.

PLAN is `LoadPlan` as JSON. The process prints a line of JSON every 0.2 s with what it has counted, and takes a word a line:

    stop     producers stop, what was sent is confirmed, what was confirmed is acknowledged by every subscription with a
             receipt, every topic is read once more; then the last line says {"drained": true} and the process ends

Producers are keyed or not, batched or not, in turns. Each topic has one subscription, whose type goes round, or all four.
Acknowledgements ask for receipts; some messages are nacked once, some are held for a while before they are acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from magnetar.client import Client, Consumer, Message, Producer, connect
from magnetar.client.options import SUBSCRIPTION_TYPES, SubscriptionType
from magnetar.proto.errors import MagnetarError, ReceiveTimeout
from magnetar.proto.ids import MessageId
from support.cluster.history import (
    AckReceipt,
    Confirmed,
    ConsumerMade,
    Handed,
    HistoryWriter,
    Nacked,
    Position,
    ProducerMade,
    Received,
    SendFailed,
    Sent,
    Stored,
    StoredBefore,
    SubscriptionMade,
    handed,
    key_of,
    value_of,
)

TYPES = SUBSCRIPTION_TYPES
TICK_S = 0.02
PROGRESS_S = 0.2
RETRY_S = 0.2
NACK_DELAY_S = 0.3
BITE = 500  # messages that an application takes together, at most


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients do. `rate`: messages a second, over all producers."""

    url: str
    seed: int = 0
    topics: int = 4
    producers: int = 2  # per topic
    rate: int = 1000
    size: int = 100
    keys: int = 16
    all_types: bool = False  # each topic has a subscription of each type, and not of one
    subscriptions: bool = True
    consumers: int = 2  # per subscription
    nacks: float = 0.01
    holds: float = 0.02
    hold_s: float = 0.3  # at most
    max_outstanding: int = 5000  # sent by a producer and not confirmed
    drain_s: float = 60.0
    deduplication: bool = False  # of the topics


class Counts:
    """What the process says of itself."""

    def __init__(self) -> None:
        self.sent = self.confirmed = self.failed = self.received = self.acknowledged = 0
        self.receipts: dict[tuple[str, str], dict[Position, None]] = {}  # by topic and subscription
        # Acknowledgements whose outcome nobody knows, since their consumer was ended; whoever consumes next asks again.
        self.unknown: dict[tuple[str, str], list[tuple[float, tuple[Position, ...]]]] = {}
        self.positions: dict[str, dict[Position, None]] = {}  # confirmed, by topic
        self.confirmed_at: dict[
            str, float
        ] = {}  # when the newest message of each topic was sent that is confirmed

    def missing(self) -> dict[str, int]:
        """Confirmed and not acknowledged with a receipt, by subscription."""
        found = {
            f"{topic} {subscription}": sum(position not in got for position in self.positions[topic])
            for (topic, subscription), got in self.receipts.items()
        }
        return {name: number for name, number in found.items() if number}

    def line(self, **more: Any) -> str:
        """For the harness."""
        return json.dumps(
            {
                "at": time.monotonic(),
                "sent": self.sent,
                "confirmed": self.confirmed,
                "failed": self.failed,
                "received": self.received,
                "acknowledged": self.acknowledged,
                # Of every topic a message is confirmed that was sent after this.
                "served": min(self.confirmed_at.values(), default=0.0),
                **more,
            }
        )


class LoadedProducer:
    """Sends at its rate until it is stopped."""

    def __init__(self, load: Load, topic: str, number: int) -> None:
        plan = load.plan
        self.name = f"{topic}-p{number}"
        self._load = load
        self._topic = topic
        self._keys = plan.keys if number % 2 == 0 else 0
        self._batched = number % 4 < 2
        self._rate = plan.rate / (plan.topics * plan.producers)
        self._next = 0
        self._outstanding = 0
        self._groups: set[asyncio.Task[None]] = set()

    async def run(self, client: Client) -> None:
        load = self._load
        load.history.add(ProducerMade(self.name, self._topic, self._keys, self._batched))
        # A producer that was refused for good, or whose broker was away for too long, is opened again.
        producer: Producer | None = None
        due = load.rng.random()
        before = time.monotonic()
        while not load.stopping:
            if producer is None or producer.ended:
                with contextlib.suppress(MagnetarError):
                    producer = await client.create_producer(
                        self._topic, name=self.name, batching=self._batched, send_timeout=600.0
                    )
                if producer is None:
                    await asyncio.sleep(RETRY_S)
                continue
            await asyncio.sleep(max(TICK_S, (1 - due) / self._rate))
            now = time.monotonic()
            due, before = due + (now - before) * self._rate, now
            count = int(min(due, load.plan.max_outstanding - self._outstanding))
            due = min(due - count, self._rate)  # what was missed for longer than a second is not made up for
            if count > 0:
                self._send(producer, count)
        await asyncio.gather(*self._groups)
        if producer is not None:
            with contextlib.suppress(MagnetarError):
                await producer.close()

    def _send(self, producer: Producer, count: int) -> None:
        first, at = self._next, time.monotonic()
        receipts: list[Any] = []
        for number in range(first, first + count):
            key = key_of(number, self._keys)
            value = value_of(self.name, number, key, self._load.plan.size)
            try:
                receipts.append(producer.send_nowait(value, key or None))
            except MagnetarError:
                break
        if receipts:
            self._next += len(receipts)
            self._outstanding += len(receipts)
            self._load.counts.sent += len(receipts)
            self._load.history.add(Sent(at, self.name, first, len(receipts)))
            task = asyncio.ensure_future(self._await(first, at, receipts))
            self._groups.add(task)
            task.add_done_callback(self._groups.discard)

    async def _await(self, first: int, sent_at: float, receipts: list[Any]) -> None:
        """Confirmed messages are noted in runs of consecutive numbers."""
        load, positions, start = self._load, list[Position](), first
        before: list[int] = []
        for number, receipt in enumerate(receipts, first):
            try:
                found = await receipt
            except MagnetarError as error:
                self._confirmed(start, sent_at, positions)
                positions, start = [], number + 1
                load.counts.failed += 1
                load.history.add(SendFailed(time.monotonic(), self.name, number, str(error)))
                continue
            if found.is_duplicate:
                self._confirmed(start, sent_at, positions)
                positions, start = [], number + 1
                before.append(number)
            else:
                positions.append((found.ledger, found.entry, found.index))
        self._confirmed(start, sent_at, positions)
        if before:
            load.history.add(StoredBefore(time.monotonic(), sent_at, self.name, tuple(before)))
            load.counts.confirmed += len(before)
            load.counts.confirmed_at[self._topic] = max(load.counts.confirmed_at[self._topic], sent_at)
        self._outstanding -= len(receipts)

    def _confirmed(self, first: int, sent_at: float, positions: list[Position]) -> None:
        if positions:
            load = self._load
            load.history.add(Confirmed(time.monotonic(), sent_at, self.name, first, tuple(positions)))
            load.counts.confirmed += len(positions)
            load.counts.positions[self._topic].update(dict.fromkeys(positions))
            load.counts.confirmed_at[self._topic] = max(load.counts.confirmed_at[self._topic], sent_at)


class LoadedConsumer:
    """Receives, nacks and acknowledges until the load has ended; opened again whenever it is refused or ended."""

    def __init__(self, load: Load, topic: str, type: SubscriptionType, number: int) -> None:
        self.name = f"{topic}-{type}-{number}"
        self._load = load
        self._topic = topic
        self._type = type
        self._attachment = 0
        self._rng = random.Random(f"{load.plan.seed} {self.name}")
        self._got = load.counts.receipts[topic, type]
        self._unknown = load.counts.unknown[topic, type]
        self._acks: set[asyncio.Task[None]] = set()

    async def run(self, client: Client) -> None:
        load = self._load
        load.history.add(ConsumerMade(self.name, self._type, self._topic))
        while not load.ended:
            try:
                consumer = await client.subscribe(
                    self._topic,
                    self._type,
                    type=self._type,
                    start="earliest",
                    name=self.name,
                    nack_delay=NACK_DELAY_S,
                )
            except (
                MagnetarError
            ):  # another one has the place of an exclusive subscription, or its broker is away
                await asyncio.sleep(RETRY_S)
                continue
            self._attachment += 1
            for change in ("detached", "active_changed"):
                (member,) = consumer._consumer.consumers.values()
                setattr(member, change, self._counted(getattr(member, change)))
            await self._consume(consumer)
            for task in self._acks:
                task.cancel()
            await asyncio.gather(*self._acks, return_exceptions=True)
            with contextlib.suppress(MagnetarError):
                await consumer.close()

    def _counted(self, inner: Callable[..., None]) -> Callable[..., None]:
        def outer(*arguments: Any) -> None:
            self._attachment += 1
            inner(*arguments)

        return outer

    async def _consume(self, consumer: Consumer) -> None:
        """Until the load has ended, or the service has ended the consumer for good."""
        while not self._load.ended:
            while self._unknown and consumer.active:
                self._spawn(self._ask_again(consumer, *self._unknown.pop()))
            try:
                messages = await consumer.receive_batch(BITE, timeout=0.5)
            except ReceiveTimeout:
                continue
            except MagnetarError as error:
                if not error.retryable:
                    return
                await asyncio.sleep(RETRY_S)
                continue
            self._take(consumer, list(messages))

    def _take(self, consumer: Consumer, messages: list[Message]) -> None:
        load, plan, rng, now = self._load, self._load.plan, self._rng, time.monotonic()
        load.history.add(Received(now, self.name, self._attachment, tuple(map(_handed, messages))))
        load.counts.received += len(messages)
        nacked = [m for m in messages if not m.redelivery_count and rng.random() < plan.nacks]
        if nacked:
            consumer.nack(nacked)
            load.history.add(Nacked(now, self.name, tuple(map(_position, nacked))))
        left = [m for m in messages if m not in nacked] if nacked else messages
        held_s = rng.random() * plan.hold_s if rng.random() < plan.holds else 0.0
        if left:
            self._spawn(self._acknowledge(consumer, left, held_s))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._acks.add(task)
        task.add_done_callback(self._acks.discard)

    async def _acknowledge(self, consumer: Consumer, messages: list[Message], after_s: float) -> None:
        await asyncio.sleep(after_s)
        asked_at, attachment = time.monotonic(), self._attachment
        positions = tuple(map(_position, messages))
        if await self._has_receipt(consumer, messages, asked_at, positions):
            self._receipt(asked_at, attachment if attachment == self._attachment else -1, positions)

    async def _ask_again(self, consumer: Consumer, asked_at: float, positions: tuple[Position, ...]) -> None:
        ids = [MessageId(*position) for position in positions]
        if await self._has_receipt(consumer, ids, asked_at, positions):
            self._receipt(asked_at, -1, positions)

    async def _has_receipt(
        self,
        consumer: Consumer,
        messages: list[Message] | list[MessageId],
        asked_at: float,
        positions: tuple[Position, ...],
    ) -> bool:
        """Asks until the receipt comes; False if the consumer was ended before."""
        try:
            while True:
                try:
                    await consumer.ack(messages, receipt=True)
                    return True
                except MagnetarError as error:
                    if not error.retryable:
                        self._unknown.append((asked_at, positions))
                        return False
                    await asyncio.sleep(RETRY_S)
        except asyncio.CancelledError:
            self._unknown.append((asked_at, positions))
            raise

    def _receipt(self, asked_at: float, attachment: int, positions: tuple[Position, ...]) -> None:
        self._load.history.add(AckReceipt(time.monotonic(), asked_at, self.name, attachment, positions))
        self._load.counts.acknowledged += len(positions)
        self._got.update(dict.fromkeys(positions))


def _position(message: Message) -> Position:
    found = message.id
    return found.ledger, found.entry, found.index


def _handed(message: Message) -> Handed:
    key = message.key
    text = key.decode() if isinstance(key, bytes) else key or ""
    return handed(_position(message), message.value, text, message.redelivery_count)


class Load:
    """All clients of one process."""

    def __init__(self, plan: LoadPlan, history: HistoryWriter) -> None:
        self.plan = plan
        self.history = history
        self.rng = random.Random(plan.seed)
        self.counts = Counts()
        self.stopping = False  # producers
        self.ended = False  # consumers
        # Fresh ones in each round of a cluster that lives for several.
        self.topics = [f"crash-{plan.seed}-{number}" for number in range(plan.topics)]

    async def run(self, commands: asyncio.StreamReader) -> None:
        """Ends after the command `stop`."""
        plan = self.plan
        options: dict[str, Any] = {"ping_interval": 2.0, "backoff_max": 0.5, "operation_timeout": 10.0}
        async with connect(plan.url, **options) as sending, connect(plan.url, **options) as receiving:
            consuming: list[asyncio.Task[None]] = []
            for number, topic in enumerate(self.topics):
                self.counts.positions[topic] = {}
                self.counts.confirmed_at[topic] = 0.0
                if plan.deduplication:
                    await receiving.admin.create_topic(topic)
                    await receiving.admin.update_topic_policies(topic, {"deduplication": True})
                types = TYPES if plan.all_types else (TYPES[number % len(TYPES)],)
                for type in types if plan.subscriptions else ():
                    self.counts.receipts[topic, type] = {}
                    self.counts.unknown[topic, type] = []
                    self.history.add(SubscriptionMade(type, topic, type))
                    await self._made(receiving, topic, type)
                    for place in range(plan.consumers):
                        consumer = LoadedConsumer(self, topic, type, place)
                        consuming.append(asyncio.ensure_future(consumer.run(receiving)))
            producing = [
                asyncio.ensure_future(LoadedProducer(self, topic, number).run(sending))
                for topic in self.topics
                for number in range(plan.producers)
            ]
            progress = asyncio.ensure_future(self._progress())
            print(self.counts.line(ready=True), flush=True)
            while await commands.readline() not in (b"stop\n", b""):
                pass
            self.stopping = True
            missing = await self._drain(producing)
            self.ended = True
            await asyncio.gather(*consuming)
            for topic in self.topics:
                await self._read(receiving, topic)
            progress.cancel()
            await asyncio.gather(progress, return_exceptions=True)
        self.history.close()
        print(self.counts.line(drained=not missing, missing=missing), flush=True)

    async def _made(self, client: Client, topic: str, type: SubscriptionType) -> None:
        """The subscription, before anything is sent to its topic."""
        async with client.subscribe(topic, type, type=type, start="earliest", name="first"):
            pass

    async def _progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            print(self.counts.line(), flush=True)

    async def _drain(self, producing: list[asyncio.Task[None]]) -> dict[str, int]:
        """What is still missing after `drain_s`: nothing, in a cluster that has healed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.plan.drain_s):
                await asyncio.gather(*producing)
                while self.counts.missing():
                    await asyncio.sleep(0.1)
        missing = self.counts.missing()
        if unconfirmed := self.counts.sent - self.counts.confirmed - self.counts.failed:
            missing["sent and not confirmed"] = unconfirmed
        return missing

    async def _read(self, client: Client, topic: str) -> None:
        async with client.create_reader(topic, start="earliest") as reader:
            while await reader.has_message_available():
                batch = await reader.receive_batch(timeout=30)
                self.history.add(Stored(topic, tuple(map(_handed, batch))))


async def _main() -> None:
    plan = msgspec.json.decode(sys.argv[1], type=LoadPlan)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
    )
    await Load(plan, HistoryWriter(Path(sys.argv[2]))).run(commands)


if __name__ == "__main__":
    gc.set_threshold(50_000, 50, 50)
    try:
        import uvloop
    except ImportError:
        asyncio.run(_main())
    else:
        uvloop.run(_main())
