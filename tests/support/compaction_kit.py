"""Topics that are compacted: what must be left by a model, what a reader gets, and a broker that stops at the n-th step."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from magnetar.broker import Broker, Topic
from magnetar.broker.compaction.topic_compaction import CompactionStats
from magnetar.client.messages import Delivery
from magnetar.proto import commands as c
from magnetar.proto.batch import Key, encode_batch
from magnetar.proto.errors import ConnectionLost, MagnetarError
from magnetar.proto.ids import MessageId
from support.broker_kit import TOPIC, FakeClient, running_broker, settle
from support.fake_ledger import FakeLedgers, FakeWriter
from support.memory_metadata import MemoryMetadataStore

Sent = tuple[Key, bytes | None]  # key and value
Found = tuple[MessageId, Key, bytes | None]


class KeyedClient(FakeClient):
    """Sends keys, and takes what it is sent apart as the real client does."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self.found: list[Found] = []

    def _delivered(self, command: c.Deliver, body: bytes) -> None:
        delivery = Delivery(command, body, "orders")
        for index, value in enumerate(delivery.values()):
            if not delivery.flags[index]:
                place = MessageId(command.ledger, command.entry, delivery.base_index + index)
                self.found.append((place, delivery.key(index), value))

    async def send_batches(
        self, *batches: Sequence[Sent], whole: bool = False, **options: Any
    ) -> list[MessageId]:
        """Publishes batches, each as one message group, or all as one; returns the ids when they are durable."""
        encoded = [
            encode_batch(
                [value for _, value in batch],
                sequence_id=0,
                publish_time_ms=5,
                keys=[key for key, _ in batch],
                **options,
            )
            for batch in batches
        ]
        known, count = len(self.receipts), sum(map(len, batches))
        for payload in [b"".join(encoded)] if whole else encoded:
            self.frame(c.Send(0, 1, 0), payload)
        await self.until(lambda: sum(row[1] for row in self.receipts[known:]) == count)
        return [
            MessageId(ledger, entry, first + number)
            for _, messages, ledger, entry, first in self.receipts[known:]
            for number in range(messages)
        ]


async def publisher(broker: Broker) -> KeyedClient:
    """A client with a producer."""
    client = KeyedClient(broker)
    await client.ask(c.CreateProducer, 1, "orders")
    return client


def compacted(messages: list[Found], horizon: tuple[int, ...], *, keyless: bool = True) -> list[Found]:
    """The model: the last message of each key before the horizon unless that deletes it, and all from there on."""
    old = [one for one in messages if one[0][:3] < horizon]
    last = {_name(key): place for place, key, _ in old if key is not None}
    left = [
        one
        for one in old
        if (keyless if one[1] is None else last[_name(one[1])] == one[0] and one[2] is not None)
    ]
    return left + messages[len(old) :]


def _name(key: Key) -> bytes:
    assert key is not None
    return key.encode() if isinstance(key, str) else key


async def read_all(
    broker: Broker, *, start: Any = ("earliest", None), read_compacted: bool = True, **named: Any
) -> list[Found]:
    """All that a new reader gets, up to the last message of its topic."""
    reader = KeyedClient(broker)
    await reader.ask(
        c.Subscribe, 1, "orders", "reading", start=start, read_compacted=read_compacted,
        **{"durable": False, **named},
    )  # fmt: skip
    answer = await reader.ask(c.LastMessageId, 1)
    reader.frame(c.Flow(0, 1, 1_000_000))
    if answer is not None and (start[0] != "id" or start[1] <= answer):
        last = MessageId.from_bytes(answer)
        await reader.until(lambda: reader.found and reader.found[-1][0] >= last)
    reader.handler.connection_closed(None)
    await settle()
    return reader.found


async def compact(broker: Broker) -> CompactionStats:
    """Compacts the topic; waits for the end."""
    topic = await broker.topic(TOPIC, create=False)
    topic.compaction.begin()
    await compacted_once(topic)
    return topic.compaction.stats()


async def compacted_once(topic: Topic) -> None:
    """The compaction that is under way is over."""
    async with asyncio.timeout(60):
        while topic.compaction.running:
            await asyncio.sleep(0.001)


def horizon_of(broker: Broker) -> tuple[int, ...]:
    """Of the last compaction; before all if there was none."""
    pointer = broker.topics[str(TOPIC)].ledger.list.record.compaction
    return (0, 0, 0) if pointer is None else pointer.horizon


def unowned_ledgers(broker: Broker, ledgers: FakeLedgers) -> set[int]:
    """Stored ledgers of messages or compactions that the topic does not name."""
    record = broker.topics[str(TOPIC)].ledger.list
    named = {info.stored_id for info in record.ledgers} | set(record.record.compacted_ledgers())
    return {one.ledger_id for one in ledgers.ledgers.values() if one.properties["kind"] != "cursor"} - named


class Stopping:
    """Stores that stop the broker for good at the n-th of its steps, `arm`ed: it waits, as if its process were gone.

    A step is before or after each thing that would outlive the process.
    """

    def __init__(self) -> None:
        self.metadata = MemoryMetadataStore()
        self.ledgers = FakeLedgers()
        self.steps = 0
        self._stop_at = 1 << 60
        self.stopped = asyncio.Event()
        self._released = asyncio.Event()

    def arm(self, steps: int) -> None:
        """The step after so many from now on is the last one."""
        self._stop_at = self.steps + steps

    def release(self) -> None:
        """What waits fails, so that it can be cleared away."""
        self._released.set()

    async def step(self) -> None:
        """A step."""
        self.steps += 1
        if self.steps >= self._stop_at:
            self.stopped.set()
            await self._released.wait()
            raise ConnectionLost("the process is gone")

    def guarded(self, target: Any, names: tuple[str, ...]) -> Any:
        """The target; each of the named methods has a step before and one after."""
        return _Guarded(self, target, names)


class _Guarded:
    def __init__(self, stopping: Stopping, target: Any, names: tuple[str, ...]) -> None:
        self._stopping = stopping
        self._target = target
        self._names = names

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        if name not in self._names:
            return method
        stopping = self._stopping

        async def call(*args: Any, **named: Any) -> Any:
            await stopping.step()
            result = await method(*args, **named)
            await stopping.step()
            return _Guarded(stopping, result, ("close",)) if isinstance(result, FakeWriter) else result

        return call


@asynccontextmanager
async def stoppable(stores: Stopping, **settings: Any) -> AsyncIterator[Broker]:
    """A broker on stores that may stop it."""
    ledgers = stores.guarded(stores.ledgers, ("create", "delete"))
    metadata = stores.guarded(stores.metadata, ("put", "create", "delete"))
    with suppress(MagnetarError):
        async with running_broker(ledgers, metadata, **settings) as broker:
            try:
                yield broker
            finally:
                stores.release()
