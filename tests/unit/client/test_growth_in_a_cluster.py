"""A partitioned topic grows, and loses a broker, while a producer and a consumer use all of it: nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib

from magnetar.client import Client, Consumer, connect
from support.cluster_kit import brokers


async def consume(consumer: Consumer, into: dict[bytes, int], expected: set[bytes]) -> None:
    """Until all that was expected has come."""
    while expected - into.keys():
        message = await consumer.receive(20.0)
        assert message.value is not None
        into[message.value] = into.get(message.value, 0) + 1
        await consumer.ack(message)


async def produce(client: Client, sent: set[bytes], stop: asyncio.Event) -> int:
    """One message after the other, to all partitions; how many partitions the last ones went to."""
    partitions: list[int] = []
    async with client.create_producer("orders") as producer:
        number = 0
        while not stop.is_set():
            value = b"%d" % number
            id = await producer.send(value, key=f"key-{number}")
            sent.add(value)
            partitions.append(id.partition)
            number += 1
    return len(set(partitions[-60:]))


async def test_growth_and_a_failure_under_load() -> None:
    async with brokers("a", "b", "c") as cluster:
        urls = ",".join(broker.url.removeprefix("magnetar://") for broker in cluster.brokers.values())
        async with connect(f"magnetar://{urls}", backoff_first=0.01, operation_timeout=20.0) as client:
            await client.admin.create_topic("orders", partitions=2)
            sent: set[bytes] = set()
            received: dict[bytes, int] = {}
            stop = asyncio.Event()
            consumer = await client.subscribe("orders", "billing", start="earliest")
            producing = asyncio.ensure_future(produce(client, sent, stop))
            for partitions in (5, 8):
                before = len(sent)
                await client.admin.update_partitions("orders", partitions)
                while len(sent) < before + 100:
                    await asyncio.sleep(0.01)
            cluster.expire("c")
            await cluster.stop("c")
            before = len(sent)
            while len(sent) < before + 100:
                await asyncio.sleep(0.01)
            stop.set()
            assert await producing == 8, "the new partitions are used"
            async with asyncio.timeout(60):
                await consume(consumer, received, sent)
            assert received.keys() >= sent
            stats = await client.admin.topic_stats("orders")
            assert len(stats["partitions"]) == 8
            assert all(list(one["subscriptions"]) == ["billing"] for one in stats["partitions"])
            await consumer.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):  # acknowledgements without receipts are on their way
                    while (await client.admin.topic_stats("orders"))["subscriptions"]["billing"][
                        "backlog_messages"
                    ]:
                        await asyncio.sleep(0.01)
            stats = await client.admin.topic_stats("orders")
            assert stats["subscriptions"]["billing"]["backlog_messages"] == 0
            assert stats["stored_messages"] >= len(sent)
            await client.admin.delete_topic("orders")
