"""(f), (g): what was stored before is read again, cold, or consumed with individual acknowledgements."""

from __future__ import annotations

import time
from typing import Any

from bench.workloads.produce_tail import SEND_TIMEOUT_S, send_batches, send_singly
from magnetar.client import DeadLetterPolicy, connect


async def fill(url: str, topic: str, *, messages: int, size: int, batch: int) -> dict[str, Any]:
    """Stores the backlog; `batch` 1: unbatched."""
    async with (
        connect(url) as client,
        client.create_producer(topic, batching=batch > 1, send_timeout=SEND_TIMEOUT_S) as producer,
    ):
        began = time.perf_counter()
        if batch == 1:
            await send_singly(producer, messages, size)
        else:
            await send_batches(producer, messages, size, batch)
        return {"messages": messages, "rate": messages / (time.perf_counter() - began)}


async def catch_up(url: str, topic: str, *, messages: int) -> dict[str, Any]:
    """(f): a reader from the earliest message on, by batches(); the clock starts before it is created."""
    async with connect(url) as client:
        began = time.perf_counter()
        async with client.create_reader(topic, start="earliest") as reader:
            seen = size = 0
            async for batch in reader.batches():
                seen += len(batch)
                size += len(batch[0].value or b"") * len(batch)
                if seen >= messages:
                    break
            seconds = time.perf_counter() - began
    assert seen == messages, f"{seen} messages were read, {messages} were stored"
    return {"rate": messages / seconds, "messages": seen, "payload_bytes": size, "seconds": seconds}


async def acknowledge(url: str, topic: str, *, messages: int, letters: bool = False) -> dict[str, Any]:
    """(g): `async for message in consumer: await consumer.ack(message)`, Shared; the last one with a receipt.

    `letters`: with a dead-letter policy, so that hand-outs are reported.
    """
    policy = DeadLetterPolicy() if letters else None
    async with connect(url) as client:
        began = time.perf_counter()
        async with client.subscribe(
            topic, "bench", type="shared", start="earliest", dead_letter=policy
        ) as consumer:
            seen = 0
            async for message in consumer:
                seen += 1
                if seen == messages:
                    await consumer.ack(message, receipt=True)
                    break
                await consumer.ack(message)
        # Closing sends what was still queued.
        seconds = time.perf_counter() - began
        admin: Any = getattr(
            client, "admin", client
        )  # older revisions, which `bench compare` runs, have it there
        stats = await admin.topic_stats(topic)
    left = stats["subscriptions"]["bench"]["backlog_messages"]
    assert left == 0, f"{left} messages are not acknowledged"
    return {"rate": messages / seconds, "messages": messages, "seconds": seconds}
