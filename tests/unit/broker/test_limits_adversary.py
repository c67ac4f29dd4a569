"""Limits, and programs that give up, close, are killed or come late meanwhile: by the public client, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest

from magnetar.broker.log.reading import LedgerReading
from magnetar.broker.topics.topic import Topic
from magnetar.client import Client
from magnetar.proto.errors import ConsumerBusy, MagnetarError, SendTimeout
from support.memory_metadata import MemoryMetadataStore
from support.served_broker import connect_to, serving
from support.virtual_time import in_virtual_time
from unit.broker.test_limits import TOPIC, LoopClock

RATE = 1_000
HOLD = {"backlog_quota_bytes": 2_000, "backlog_quota_action": "hold"}


def now() -> float:
    return asyncio.get_running_loop().time()


@contextlib.asynccontextmanager
async def limited(policies: dict[str, Any], **settings: Any) -> AsyncIterator[tuple[Any, Client]]:
    """A topic with policies: its server, and a client."""
    async with serving(clock=LoopClock(), **settings) as server, connect_to(server) as client:
        await client.admin.create_topic(TOPIC)
        await client.admin.update_topic_policies(TOPIC, policies)
        yield server, client


async def fill(producer: Any) -> None:
    """More than HOLD allows, and a check of that. In entries of one size: by these what is behind a mark is estimated."""
    for _ in range(40):
        await producer.send(b"m" * 100)
    await asyncio.sleep(1)


async def acknowledge_all(client: Client) -> None:
    async with client.subscribe(TOPIC, "slow") as consumer:
        with contextlib.suppress(MagnetarError):
            while True:
                await consumer.ack(await consumer.receive(0.5))


@pytest.mark.parametrize(
    ("policies", "size"), [({"publish_rate_messages": 1}, 1), ({"publish_rate_bytes": 1_000}, 5_000)]
)
@in_virtual_time
async def test_a_send_that_times_out_behind_a_slow_rate_says_so(policies: dict[str, Any], size: int) -> None:
    async with (
        limited(policies) as (_, client),
        client.create_producer(TOPIC, batching=False, send_timeout=2.0) as producer,
    ):
        receipts = []
        for _ in range(6):
            receipts.append(producer.send_nowait(b"m" * size))
            await asyncio.sleep(0.01)
        *_, last = await asyncio.gather(*receipts, return_exceptions=True)
        assert isinstance(last, SendTimeout)
        policy, value = next(iter(policies.items()))
        assert f"{policy}={value}, a policy of the topic is reached" in str(last)


@pytest.mark.parametrize("policy", ["publish_rate_messages", "broker_publish_rate_messages"])
@in_virtual_time
async def test_whoever_waits_behind_a_large_batch_goes_on_when_the_rate_rises(policy: str) -> None:
    async with limited({"max_producers": 9}) as (_, client):

        async def set_rate(rate: int) -> None:
            if policy.startswith("broker"):
                await client.admin.update_broker_policies({policy: rate})
            else:
                await client.admin.update_topic_policies(TOPIC, {policy: rate})

        await set_rate(1)
        async with client.create_producer(TOPIC, send_timeout=100.0) as producer:
            await asyncio.gather(*[producer.send_nowait(b"m") for _ in range(500)])
            more = [producer.send_nowait(b"m") for _ in range(500)]
            await asyncio.sleep(5)
            waiting = asyncio.ensure_future(producer.send(b"behind"))
            await asyncio.sleep(5)
            assert not any(receipt.done for receipt in more)
            begin = now()
            await set_rate(RATE)
            await waiting
            assert now() - begin < 2


@in_virtual_time
async def test_a_producer_that_is_held_as_it_opens_is_held() -> None:
    """The command may be read before it is known which epoch the opening began."""
    opening = Topic.open_producer

    async def open_and_hold(*arguments: Any) -> Any:
        session = await opening(*arguments)
        asyncio.get_running_loop().call_soon(session.hold, "the moment is bad")
        return session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Topic, "open_producer", open_and_hold)
        async with limited({}) as (_, client), client.create_producer(TOPIC, send_timeout=1.0) as producer:
            with pytest.raises(SendTimeout, match="the moment is bad"):
                await producer.send(b"held")


@in_virtual_time
async def test_a_disk_that_hangs_below_the_oldest_message_keeps_no_producer_out() -> None:
    async def never(*_: Any) -> None:
        await asyncio.sleep(1_000)

    async with limited({}) as (_, client):
        await client.admin.create_subscription(TOPIC, "slow")
        async with client.create_producer(TOPIC) as producer:
            await producer.send(b"m")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LedgerReading, "read_entry", never)
            await client.admin.update_topic_policies(TOPIC, {"backlog_quota_age_ms": 60_000})
            async with client.create_producer(TOPIC) as producer:
                await producer.send(b"m")


@in_virtual_time
async def test_producers_that_leave_while_they_are_held() -> None:
    """One gives up and closes, one cancels, one is killed; once there is room, others go on."""
    async with limited(HOLD) as (server, client), connect_to(server) as other:
        await client.admin.create_subscription(TOPIC, "slow")
        stays = await client.create_producer(TOPIC, batching=False)
        killed = await other.create_producer(TOPIC, batching=False)
        with contextlib.suppress(SendTimeout):  # closing says what was not stored
            async with client.create_producer(TOPIC, batching=False, send_timeout=2.0) as gives_up:
                await fill(gives_up)
                with pytest.raises(SendTimeout, match=r"'slow' of topic .* has not acknowledged"):
                    await gives_up.send(b"given up")
                cancelled = asyncio.ensure_future(gives_up.send(b"cancelled"))
                await asyncio.sleep(0.1)
                cancelled.cancel()
        killed.send_nowait(b"killed")
        waiting = asyncio.ensure_future(stays.send(b"stays"))
        for connection in server.connections[1:]:
            connection.abort()
        await asyncio.sleep(0)
        await asyncio.sleep(1)
        assert not waiting.done()
        await acknowledge_all(client)
        await asyncio.wait_for(waiting, 2)
        async with client.create_producer(TOPIC) as late:
            await asyncio.wait_for(late.send(b"late"), 2)
        await stays.close()


@in_virtual_time
async def test_a_quota_ends_with_the_only_subscription_and_readers_have_none() -> None:
    async with (
        limited(HOLD) as (_, client),
        client.create_reader(TOPIC),
        client.create_producer(TOPIC, batching=False) as producer,
    ):
        await fill(producer)
        await asyncio.wait_for(producer.send(b"a reader holds nobody"), 1)
        await client.admin.create_subscription(TOPIC, "slow")
        await fill(producer)
        waiting = asyncio.ensure_future(producer.send(b"more"))
        await asyncio.sleep(1)
        assert not waiting.done()
        await client.admin.delete_subscription(TOPIC, "slow")
        await asyncio.wait_for(waiting, 1)


@in_virtual_time
async def test_chunked_messages_that_a_quota_drops_are_dropped_whole() -> None:
    async with (
        serving(max_message_bytes=10_000) as server,
        connect_to(server, max_message_bytes=10_000) as client,
    ):
        await client.admin.create_topic(TOPIC)
        await client.admin.update_topic_policies(
            TOPIC, {"backlog_quota_bytes": 100_000, "backlog_quota_action": "drop"}
        )
        await client.admin.create_subscription(TOPIC, "slow")
        async with client.create_producer(TOPIC, chunking=True) as producer:
            for number in range(6):
                await producer.send(b"%d" % number * 40_000)
            await asyncio.sleep(1)
            await producer.send(b"6" * 40_000)
        async with client.subscribe(TOPIC, "slow") as consumer:
            got: list[bytes | None] = []
            while not got or got[-1] != b"6" * 40_000:
                message = await consumer.receive(5.0)
                got.append(message.value)
                await consumer.ack(message)
        assert got in [[b"%d" % number * 40_000 for number in range(first, 7)] for first in (4, 5, 6)]


@in_virtual_time
async def test_while_policies_are_not_known_what_was_known_is_heeded() -> None:
    metadata = MemoryMetadataStore()
    async with limited(HOLD, metadata=metadata) as (_, client):
        await client.admin.create_subscription(TOPIC, "slow")
        async with client.create_producer(TOPIC, batching=False) as producer:
            await fill(producer)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Topic, "_policies_changed", lambda topic: topic._limits_changed())
                patch.setattr("magnetar.broker.topics.policies.TopicPolicies.in_force", lambda _: None)
                waiting = asyncio.ensure_future(producer.send(b"more"))
                await asyncio.sleep(2)
                assert not waiting.done()
                await acknowledge_all(client)
                await asyncio.wait_for(waiting, 2)


@in_virtual_time
async def test_the_last_that_is_allowed_comes_back_when_its_connection_was_lost() -> None:
    async with (
        limited({"max_producers": 1, "max_consumers": 1, "max_subscriptions": 1}) as (server, client),
        client.create_producer(TOPIC) as producer,
        client.subscribe(TOPIC, "only") as consumer,
    ):
        for number in range(3):
            for connection in server.connections:
                connection.abort()
            await producer.send(b"%d" % number)
            message = await consumer.receive(5.0)
            assert message.value == b"%d" % number
            await consumer.ack(message)


@in_virtual_time
async def test_a_reader_that_is_refused_leaves_no_subscription_behind() -> None:
    async with limited({"max_consumers": 1}) as (_, client), client.subscribe(TOPIC, "only"):
        with pytest.raises(ConsumerBusy):
            async with client.create_reader(TOPIC):
                pass
        assert list((await client.admin.topic_stats(TOPIC))["subscriptions"]) == ["only"]


@pytest.mark.parametrize("type", ["shared", "key_shared"])
@in_virtual_time
async def test_a_consumer_that_joins_late_shares_the_rate(type: Literal["shared", "key_shared"]) -> None:
    passed: list[float] = []

    async def consume(client: Client) -> None:
        async with client.subscribe(TOPIC, "all", type=type) as consumer:
            while True:
                message = await consumer.receive()
                passed.append(now())
                await consumer.ack(message)

    async with limited({"subscription_dispatch_rate_messages": RATE}) as (_, client):
        await client.admin.create_subscription(TOPIC, "all")
        async with client.create_producer(TOPIC, batching=False) as producer:
            receipts = [producer.send_nowait(b"m", key=b"%d" % (number % 50)) for number in range(6 * RATE)]
            await asyncio.gather(*receipts)
        consumers = [asyncio.ensure_future(consume(client))]
        await asyncio.sleep(1)
        begin = now()
        await asyncio.sleep(2)
        consumers.append(asyncio.ensure_future(consume(client)))
        await asyncio.sleep(2)
        for consumer in consumers:
            consumer.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
    assert abs(sum(begin <= at < begin + 4 for at in passed) - 4 * RATE) <= 0.05 * 4 * RATE
