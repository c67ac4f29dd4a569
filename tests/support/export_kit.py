"""A job's driver and tasks against a broker: they stage ledgers, write them to the bookies themselves, and attach them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgpack

from magnetar.broker import Broker
from magnetar.broker.log.records import TopicRecord, staged_path, topic_path
from magnetar.ledger import (
    LedgerClient,
    LedgerMetadata,
    LedgerSettings,
    LedgerWriter,
    LocalTransport,
    StaticBookies,
)
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.metadata.store import Versioned
from magnetar.proto import commands as c
from magnetar.proto.batch import encode_batch
from magnetar.proto.bookie_identity import BookieIdentity
from magnetar.proto.entry import encode_entry
from magnetar.proto.errors import MagnetarError, TopicNotServed
from support.bookies import Bookies
from support.broker_kit import TOPIC, FakeClient, running_broker


class BrokerLedgers:
    """A task's LedgerManager: records of ledgers through the broker, and nothing else."""

    def __init__(self, client: FakeClient, topic: str = "orders") -> None:
        self.client = client
        self.topic = topic
        self.puts = 0

    async def get(self, ledger_id: int) -> Versioned | None:
        """GetLedgerMetadata."""
        found = await self.client.ask(c.GetLedgerMetadata, self.topic, ledger_id)
        return Versioned(found["metadata"], found["version"])

    async def put(self, ledger_id: int, record: bytes, *, version: int) -> int:
        """PutLedgerMetadata."""
        self.puts += 1
        answer = await self.client.ask(c.PutLedgerMetadata, self.topic, ledger_id, version, payload=record)
        return int(answer["version"])


class Job:
    """The driver of one query, and its tasks. `bookies` are reached directly, the broker through `client`."""

    def __init__(self, bookies: Bookies, broker: Broker, topic: str = "orders") -> None:
        self.client = FakeClient(broker)
        self.topic = topic
        ledgers: Any = BrokerLedgers(self.client, topic)
        directory = bookies.directory()
        self.ledgers = LedgerClient(
            ledgers,
            LocalTransport(bookies),
            directory,
            LedgerSettings(),
            random.Random(1),
            bookies.clock,
        )

    async def open(self, transaction: str = "t") -> LedgerWriter:
        """A staged ledger, open."""
        made = await self.client.ask(c.CreateStagedLedger, self.topic, transaction)
        metadata = LedgerMetadata.decode(made["metadata"], made["ledger"])
        return LedgerWriter(
            self.ledgers._components, made["ledger"], metadata, made["version"], lambda writer: None
        )

    async def stage(
        self, *entries: list[bytes], transaction: str = "t", time_ms: int = 2_000_000
    ) -> list[int]:
        """A task: an entry for each list of values, closed; its row for `attach`."""
        writer = await self.open(transaction)
        messages = 0
        for values in entries:
            batch = encode_batch(values, sequence_id=messages, publish_time_ms=time_ms)
            entry = encode_entry(
                [batch], [len(values)], [0], ["task"], first_index=messages, append_time_ms=time_ms
            )
            await appended(writer, entry)
            messages += len(values)
        await writer.close()
        return [writer.ledger_id, messages, time_ms if entries else 0, time_ms if entries else 0]

    def attach(self, batch: int, *rows: list[int], query: str = "q", **named: Any) -> Any:
        """AttachLedgers."""
        return self.client.ask(
            c.AttachLedgers, self.topic, query, batch, payload=msgpack.packb(rows), **named
        )

    async def close(self) -> None:
        """The job's process ends."""
        await self.ledgers.close()
        self.client.handler.connection_closed(None)


async def appended(writer: LedgerWriter, payload: bytes) -> None:
    """Waits for the confirmation."""
    future = asyncio.get_running_loop().create_future()

    def confirmed(_entry_id: int, _entry: bytes, error: MagnetarError | None) -> None:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    writer.append(payload, confirmed)
    await future


def export_broker(bookies: Bookies, ledgers: LedgerClient, metadata: Any = None, **settings: Any) -> Any:
    """A broker on these bookies, with one replica, which tells where they are. Small batches are attached as well."""
    settings = {"attach_min_bytes": 0, **settings}
    directory = StaticBookies(dict.fromkeys(bookies, ("127.0.0.1", 3181)))
    directory.identity = lambda bookie: BookieIdentity(1, bookie, 2, 3, 4)
    return running_broker(
        ledgers,
        metadata or bookies.metadata,
        bookies=directory,
        retry_initial_ms=1,
        **settings,
    )


async def published(broker: Any, *values: bytes) -> FakeClient:
    """A producer's client, whose first messages are confirmed."""
    client = FakeClient(broker)
    answer = await client.producer()
    client.publish(*values, epoch=answer["epoch"])
    await client.confirmed(len(values))
    return client


SMALL = 1 << 20  # bytes, for `small_broker`


def small_broker(bookies: Bookies, ledgers: LedgerClient, metadata: Any = None, **settings: Any) -> Any:
    """The same, which publishes what is small."""
    return export_broker(bookies, ledgers, metadata, **{"attach_min_bytes": SMALL, **settings})


def loaded(broker: Broker) -> Any:
    """The topic "orders", which is loaded."""
    return broker.topics[str(TOPIC)]


async def open_ledger(client: FakeClient) -> int:
    """The ledger of "orders" that is being written."""
    kept = (await client.ask(c.TopicStats, "orders"))["ledgers"]
    return int(next(one["ledger"] for one in kept if not one["closed"]))


async def crash(broker: Broker) -> None:
    """What a killed broker leaves: nothing written. Its tasks are cancelled so that the test ends clean."""
    for topic in list(broker.topics.values()):
        topic.ledger.fence(TopicNotServed("crash"))
    await broker.close()


async def record_of(bookies: Bookies) -> TopicRecord:
    """The stored ledger list of "orders"."""
    stored = await bookies.metadata.get(topic_path(TOPIC))
    assert stored is not None
    return TopicRecord.decode(stored.value, "")


async def stored_ledgers(bookies: Bookies) -> list[int]:
    """Ids of all ledgers in metadata."""
    return [ledger_id async for page in StoredLedgers(bookies.metadata).pages() for ledger_id in page]


async def staged_nodes(bookies: Bookies) -> list[int]:
    """Stored ids of the staged ledgers of "orders" in metadata."""
    return [int(name) for name in await bookies.metadata.children(staged_path(TOPIC))]


async def read_all(broker: Broker, count: int) -> list[bytes]:
    """By a new reader of "orders" from the start; it leaves afterwards."""
    reader = FakeClient(broker)
    await reader.consumer(9, "", durable=False, permits=1 << 20)
    values = await reader.received(count)
    reader.handler.connection_closed(None)
    return values
