"""What tests of Spark do to topics without Spark: produce, read through the broker, trim, count reads at the bookie."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from magnetar.client import Client, connect
from magnetar.client.administration import ask
from magnetar.proto import commands as c
from magnetar.proto.ids import MessageId, TopicName

from .service import Service

if TYPE_CHECKING:
    from magnetar.spark.batch_source import TopicReader

T = TypeVar("T")


class Sent(NamedTuple):
    """A message to produce."""

    value: bytes | None
    key: str | bytes | None = None
    properties: dict[str, str] | None = None
    event_time: int | None = None  # ms since the epoch


class Row(NamedTuple):
    """A message as the broker delivers it; columns as Spark has them, times in ms."""

    key: bytes | None
    value: bytes | None
    topic: str
    message_id: bytes
    offset: int
    publish_time: int
    event_time: int | None
    properties: dict[str, str] | None
    producer: str
    sequence_id: int


def full(topic: str) -> str:
    """The full name of a topic."""
    return str(TopicName.parse(topic))


class Topics:
    """Of one service. Blocking, as tests of Spark are."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def ask(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        """Runs `work` with a client."""

        async def run() -> T:
            async with connect(self.service.url) as client:
                return await work(client)

        return asyncio.run(run())

    def request(self, command: c.Command, topic: str) -> Any:
        """One request to the broker of a topic."""
        return self.ask(lambda client: ask(client.admin, command, topic=full(topic)))

    def create(self, *names: str) -> None:
        """Makes empty topics. Tests share a service: what another one made under that name would come between."""

        async def work(client: Client) -> None:
            there = {*await client.admin.list_topics()} & {full(name) for name in names}
            assert not there, f"another test has {there}"
            for name in names:
                await client.admin.create_topic(name)

        self.ask(work)

    def produce(
        self,
        topic: str,
        messages: Sequence[bytes | Sent],
        *,
        batching: bool = True,
        compression: str = "none",
        per_entry: int = 0,
    ) -> list[MessageId]:
        """Durable when it returns. `per_entry`: messages of an entry (0: as it comes)."""

        async def work(client: Client) -> list[MessageId]:
            ids: list[MessageId] = []
            options: dict[str, Any] = {"batching": batching, "compression": compression}
            async with client.create_producer(topic, **options) as producer:
                step = per_entry or len(messages)
                for first in range(0, len(messages), step):
                    receipts = []
                    for message in messages[first : first + step]:
                        sent = message if isinstance(message, Sent) else Sent(message)
                        columns: dict[str, Any] = {
                            "properties": sent.properties,
                            "event_time": sent.event_time,
                        }
                        receipts.append(producer.send_nowait(sent.value, sent.key, **columns))
                    ids += [await receipt for receipt in receipts]
            return ids

        return self.ask(work)

    def rows(self, topic: str, count: int | None = None) -> list[Row]:
        """All messages, through the broker. `count`: that many are waited for; None: what is confirmed now."""

        async def work(client: Client) -> list[Row]:
            wanted = await _messages(client, topic) if count is None else count
            rows: list[Row] = []
            async with client.create_reader(topic, start="earliest") as reader:
                while len(rows) < wanted:
                    message = await reader.read_next(timeout=20)
                    key = message.key
                    rows.append(
                        Row(
                            key.encode() if isinstance(key, str) else key,
                            message.value,
                            message.topic,
                            message.id.to_bytes(),
                            len(rows),
                            message.publish_time,
                            message.event_time,
                            dict(message.properties) or None,
                            message.producer_name,
                            message.sequence_id,
                        )
                    )
            return rows

        return self.ask(work)

    def values(self, topic: str) -> list[bytes | None]:
        """Values of all messages that are confirmed now."""
        return [row.value for row in self.rows(topic)]

    def reader(self, *columns: str, **options: str) -> TopicReader:
        """As Spark has it in a driver."""
        from magnetar.spark.batch_source import TopicReader
        from magnetar.spark.options import ReadOptions

        return TopicReader(ReadOptions.parse({"service_url": self.service.url, **options}), columns)

    def read(self, *columns: str, **options: str) -> list[tuple[Any, ...]]:
        """What Spark's tasks would read, one after another, without Spark."""
        reader = self.reader(*columns, **options)
        batches = [batch for piece in reader.partitions() for batch in reader.read(piece)]
        return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]

    def ledgers(self, topic: str) -> list[list[Any]]:
        """Rows of TopicLedgers."""
        return list(self.request(c.TopicLedgers(0, full(topic)), topic)["ledgers"])

    def stats(self, topic: str) -> dict[str, Any]:
        """TopicStats."""
        return self.ask(lambda client: client.admin.topic_stats(topic))

    def staged(self, topic: str) -> int:
        """How many staged ledgers the topic has."""
        return int(self.stats(topic)["staged_ledgers"])

    def consume_all(self, topic: str, subscription: str = "everything") -> None:
        """Acknowledges every message there is, so that the topic may be trimmed."""

        async def work(client: Client) -> None:
            count = await _messages(client, topic)
            async with client.subscribe(topic, subscription, start="earliest") as consumer:
                for _ in range(count):
                    await consumer.ack(await consumer.receive(timeout=20))

        self.ask(work)

    def subscribe_at_end(self, topic: str, subscription: str) -> None:
        """A subscription that needs nothing of what there is, archived or not, so that the topic may be trimmed."""

        async def work(client: Client) -> None:
            async with client.subscribe(topic, subscription, start="latest"):
                pass

        self.ask(work)

    def wait_trimmed(self, topic: str, ledgers: int = 1) -> None:
        """Until the topic has at most so many ledgers."""
        self.wait_for(lambda: len(self.ledgers(topic)) <= ledgers, f"{topic} is trimmed")

    def wait_for(self, holds: Callable[[], bool], what: str) -> None:
        """Looks again and again; `what` is for the reader."""
        del what
        while not holds():
            time.sleep(0.05)

    def entries_read(self) -> int:
        """Entries that the bookie has read for anybody since it started."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.service.http_port}/metrics") as answer:
            text = answer.read().decode()
        found = re.search(r"^magnetar_bookie_entries_read_total (\S+)", text, re.MULTILINE)
        assert found is not None
        return int(float(found[1]))


async def _messages(client: Client, topic: str) -> int:
    name = full(topic)
    count, after, more = 0, -1, True
    while more:
        page = await ask(client.admin, c.TopicLedgers(0, name, after), topic=name)
        count += sum(row[4] for row in page["ledgers"])
        more = page["more"]
        after = page["ledgers"][-1][0] if page["ledgers"] else after
    return count


__all__ = ["Row", "Sent", "Topics", "full"]
