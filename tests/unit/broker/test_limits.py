"""Limits of producers and consumers, end to end.

Each policy has its effect on an open topic, again after a hand-over, and none once it is removed. In virtual time: what
is slow without a limit, because the machine is busy, is not taken for limited.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from magnetar.client import Client
from magnetar.proto.errors import (
    BacklogQuotaExceeded,
    ConsumerBusy,
    MagnetarError,
    MessageTooLarge,
    NotAllowed,
    ProducerBusy,
    RequestTimeout,
    SendTimeout,
)
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.served_broker import connect_to, serving
from support.virtual_time import in_virtual_time

TOPIC = "orders"
COUNT = 60  # messages: at LIMIT a second they take 0.3 s, without a limit a few milliseconds
LIMIT = 200
SLOW_S = 0.12
Effect = Callable[[Client], Awaitable[bool]]


async def send_many(client: Client, size: int = 1) -> float:
    """How long that takes."""
    begin = asyncio.get_running_loop().time()
    async with client.create_producer(TOPIC, batching=False) as producer:
        receipts = [producer.send_nowait(b"m" * size) for _ in range(COUNT)]
        await asyncio.gather(*receipts)
    return asyncio.get_running_loop().time() - begin


async def publishes_slowly(client: Client) -> bool:
    return await send_many(client) > SLOW_S


async def publishes_large_ones_slowly(client: Client) -> bool:
    return await send_many(client, 900) > SLOW_S


async def delivers_slowly(client: Client) -> bool:
    """To a subscription of each type that shares out differently."""
    slow = []
    for kind in ("exclusive", "shared", "key_shared"):
        async with client.subscribe(TOPIC, f"slow-{kind}", type=kind) as consumer:
            await send_many(client, 900)
            begin = asyncio.get_running_loop().time()
            for _ in range(COUNT):
                await consumer.ack(await consumer.receive(5.0))
            slow.append(asyncio.get_running_loop().time() - begin > SLOW_S)
        await client.admin.delete_subscription(TOPIC, f"slow-{kind}")
    assert len(set(slow)) == 1, slow
    return slow[0]


async def fails(work: Awaitable[Any], error: type[MagnetarError], says: str) -> bool:
    """True: it fails so; False: it does not fail."""
    try:
        await work
    except error as found:
        text = str(found)
    else:
        return False
    assert says in text
    return True


async def opens(opening: Any) -> None:
    """And closes."""
    async with opening:
        pass


async def a_third_producer_is_refused(client: Client) -> bool:
    async with client.create_producer(TOPIC), client.create_producer(TOPIC):
        return await fails(
            opens(client.create_producer(TOPIC)), ProducerBusy, "max_producers=2, a policy of the "
        )


async def a_third_consumer_is_refused(client: Client) -> bool:
    async with client.subscribe(TOPIC, "a"), client.subscribe(TOPIC, "b"):
        refused = await fails(opens(client.subscribe(TOPIC, "c")), ConsumerBusy, "max_consumers=2")
    for name in ("a", "b", "c"):
        with contextlib.suppress(MagnetarError):
            await client.admin.delete_subscription(TOPIC, name)
    return refused


async def a_third_of_a_subscription_is_refused(client: Client) -> bool:
    async with client.subscribe(TOPIC, "a", type="shared"), client.subscribe(TOPIC, "a", type="shared"):
        third = client.subscribe(TOPIC, "a", type="shared")
        return await fails(opens(third), ConsumerBusy, "max_consumers_per_subscription=2")


async def a_third_subscription_is_refused(client: Client) -> bool:
    for existing in (await client.admin.topic_stats(TOPIC))["subscriptions"]:
        await client.admin.delete_subscription(TOPIC, existing)
    for name in ("one", "two"):
        await client.admin.create_subscription(TOPIC, name)
    return await fails(client.admin.create_subscription(TOPIC, "three"), NotAllowed, "max_subscriptions=2")


async def shared_is_refused(client: Client) -> bool:
    return await fails(opens(client.subscribe(TOPIC, "t", type="shared")), NotAllowed, "exclusive, failover")


async def a_large_message_is_refused(client: Client) -> bool:
    async with client.create_producer(TOPIC) as producer:
        await producer.send(b"m" * 1000)
        refused = await fails(producer.send(b"m" * 2000), MessageTooLarge, "max_message_bytes=1000")
        await producer.send(b"it goes on")
        return refused


async def subscribing_often_is_refused(client: Client) -> bool:
    for _ in range(2):
        async with client.subscribe(TOPIC, "often", name="me"):
            pass
    return await fails(
        opens(client.subscribe(TOPIC, "often", name="me")), RequestTimeout, "has subscribed 2 times"
    )


async def only_four_are_in_hand(client: Client) -> bool:
    async with client.subscribe(TOPIC, "unacked", type="shared") as consumer:
        await send_many(client)
        async with asyncio.timeout(0.5):
            got = [await consumer.receive(0.4) for _ in range(4)]
        more = False
        with contextlib.suppress(MagnetarError):
            got.append(await consumer.receive(0.1))
            more = True
        for message in got:
            await consumer.ack(message)
    await client.admin.delete_subscription(TOPIC, "unacked")
    return not more


async def with_a_backlog(client: Client, then: Callable[[Any, Any], Awaitable[bool]]) -> bool:
    """There is a subscription with a backlog, and a producer that is open."""
    async with (
        client.subscribe(TOPIC, "slow") as consumer,
        client.create_producer(TOPIC, send_timeout=1.5, batching=False) as producer,
    ):
        with contextlib.suppress(BacklogQuotaExceeded):
            await asyncio.gather(*[producer.send_nowait(b"m" * 900) for _ in range(COUNT)])
        await asyncio.sleep(0.7)  # a check
        limited = await then(producer, consumer)
        with contextlib.suppress(MagnetarError):
            while True:
                await consumer.ack(await consumer.receive(0.2))
        await asyncio.wait_for(go_on(producer), 10)  # whatever limited it: all is acknowledged
    await client.admin.delete_subscription(TOPIC, "slow")
    return limited


async def go_on(producer: Any) -> None:
    """Until a message is taken."""
    while True:
        try:
            await producer.send(b"again")
            return
        except (BacklogQuotaExceeded, SendTimeout):
            await asyncio.sleep(0.1)


async def a_backlog_holds_the_producer(client: Client) -> bool:
    async def then(producer: Any, consumer: Any) -> bool:
        says = "'slow' of topic persistent://public/default/orders has not acknowledged"
        if not await fails(producer.send(b"more"), SendTimeout, says):
            return False
        return await fails(opens(client.create_producer(TOPIC)), RequestTimeout, says)

    return await with_a_backlog(client, then)


async def a_backlog_refuses_the_message(client: Client) -> bool:
    async def then(producer: Any, consumer: Any) -> bool:
        return await fails(producer.send(b"more"), BacklogQuotaExceeded, "has not acknowledged")

    return await with_a_backlog(client, then)


async def a_backlog_loses_its_oldest(client: Client) -> bool:
    async def then(producer: Any, consumer: Any) -> bool:
        await producer.send(b"more")
        stats = (await client.admin.topic_stats(TOPIC))["subscriptions"]["slow"]
        return bool(stats["backlog_messages"] < COUNT - 10)

    return await with_a_backlog(client, then)


ROWS: list[tuple[dict[str, Any], Effect]] = [
    ({"publish_rate_messages": LIMIT}, publishes_slowly),
    ({"publish_rate_bytes": LIMIT * 950}, publishes_large_ones_slowly),
    ({"broker_publish_rate_messages": LIMIT}, publishes_slowly),
    ({"broker_publish_rate_bytes": LIMIT * 950}, publishes_large_ones_slowly),
    ({"broker_dispatch_rate_messages": LIMIT}, delivers_slowly),
    ({"broker_dispatch_rate_bytes": LIMIT * 950}, delivers_slowly),
    ({"dispatch_rate_messages": 20, "dispatch_rate_period_ms": 100}, delivers_slowly),
    ({"dispatch_rate_bytes": LIMIT * 950}, delivers_slowly),
    ({"subscription_dispatch_rate_messages": LIMIT}, delivers_slowly),
    ({"subscription_dispatch_rate_bytes": LIMIT * 950}, delivers_slowly),
    ({"subscribe_rate": 2, "subscribe_rate_period_ms": 60_000}, subscribing_often_is_refused),
    ({"max_producers": 2}, a_third_producer_is_refused),
    ({"max_consumers": 2}, a_third_consumer_is_refused),
    ({"max_consumers_per_subscription": 2}, a_third_of_a_subscription_is_refused),
    ({"max_subscriptions": 2}, a_third_subscription_is_refused),
    ({"max_unacked_messages_per_consumer": 4}, only_four_are_in_hand),
    ({"max_unacked_messages_per_subscription": 4}, only_four_are_in_hand),
    ({"max_message_bytes": 1000}, a_large_message_is_refused),
    ({"subscription_types": ["exclusive", "failover"]}, shared_is_refused),
    ({"backlog_quota_bytes": 10_000, "backlog_quota_action": "hold"}, a_backlog_holds_the_producer),
    ({"backlog_quota_bytes": 10_000, "backlog_quota_action": "refuse"}, a_backlog_refuses_the_message),
    ({"backlog_quota_bytes": 10_000, "backlog_quota_action": "drop"}, a_backlog_loses_its_oldest),
    ({"backlog_quota_age_ms": 400, "backlog_quota_age_action": "hold"}, a_backlog_holds_the_producer),
    ({"backlog_quota_age_ms": 400, "backlog_quota_age_action": "refuse"}, a_backlog_refuses_the_message),
    ({"backlog_quota_age_ms": 400, "backlog_quota_age_action": "drop"}, a_backlog_loses_its_oldest),
]


class LoopClock:
    """Goes as the pauses of the test do."""

    def now_ms(self) -> int:
        """Ahead of where the loop begins."""
        return 1_000_000 + int(asyncio.get_running_loop().time() * 1000)


@contextlib.asynccontextmanager
async def broker_with(metadata: Any, ledgers: Any, **settings: Any) -> AsyncIterator[Client]:
    settings["clock"] = LoopClock()
    async with (
        serving(metadata, ledgers, **settings) as server,
        connect_to(server, operation_timeout=4.0) as client,
    ):
        yield client


async def update(client: Client, changes: dict[str, Any]) -> None:
    """Of the topic, if it has such policies."""
    if next(iter(changes)).startswith("broker_"):
        await client.admin.update_broker_policies(changes)
    else:
        await client.admin.update_topic_policies(TOPIC, changes)


@pytest.mark.parametrize(
    ("policies", "effect"), ROWS, ids=["-".join(map(str, row[0])) + str(i) for i, row in enumerate(ROWS)]
)
@in_virtual_time
async def test_a_limit_is_heeded_at_once_after_a_hand_over_and_not_once_it_is_removed(
    policies: dict[str, Any], effect: Effect
) -> None:
    metadata, ledgers = MemoryMetadataStore(), FakeLedgers()
    removed = dict.fromkeys(policies)
    async with broker_with(metadata, ledgers) as client:
        await client.admin.create_topic(TOPIC)
        assert not await effect(client)
        await client.admin.update_broker_policies(policies)
        assert await effect(client)
        await client.admin.update_broker_policies(removed)
        assert not await effect(client)
        await update(client, policies)
    async with broker_with(metadata, ledgers) as client:
        assert await effect(client)
        await update(client, removed)
        assert not await effect(client)
