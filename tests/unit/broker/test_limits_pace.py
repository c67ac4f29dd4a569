"""Rates at a real broker: within 5 % over ten seconds, at most twice the rate in 100 ms, and nobody else waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from magnetar.client import connect
from magnetar.proto import commands as c
from magnetar.proto.entry import Entry
from support.broker_kit import TOPIC, FakeClient, running_broker
from support.cluster_kit import brokers
from support.served_broker import connect_to, serving
from support.virtual_time import in_virtual_time

SPACE = "public/default"
RATE = 2_000
SECONDS = 10
TURN = 500


class TimedClient(FakeClient):
    """Notes when how many messages are confirmed or delivered to it."""

    def __init__(self, broker: Any) -> None:
        super().__init__(broker)
        self.passed: list[tuple[float, int]] = []

    def send(self, header: bytes, payload: Any = b"") -> None:
        """Of large deliveries the count is enough."""
        command = c.decode_command(header)
        body = bytes(payload) if isinstance(payload, (bytes, bytearray, memoryview)) else b"".join(payload)
        count = 0
        if isinstance(command, c.Deliver):
            rows = command.ack_set_rows * c.ACK_SET_ROW.size
            hidden = sum(last - first + 1 for first, last in c.decode_rows(c.ACK_SET_ROW, body[:rows]))
            count = Entry(body, rows).message_count - hidden
        elif isinstance(command, c.Receipt):
            count = sum(row[1] for row in c.decode_rows(c.RECEIPT_ROW, body))
        if count:
            self.passed.append((asyncio.get_running_loop().time(), count))
        if not isinstance(command, c.Deliver):
            super().send(header, payload)

    async def pace(self) -> tuple[int, int, float]:
        """In ten seconds from now on: messages, the most of them in any 100 ms, and the longest pause."""
        begin = asyncio.get_running_loop().time()
        await asyncio.sleep(SECONDS)
        passed = [(at, count) for at, count in self.passed if begin <= at < begin + SECONDS]
        most, start, total = 0, 0, 0
        for at, count in passed:
            total += count
            while passed[start][0] <= at - 0.1:
                total -= passed[start][1]
                start += 1
            most = max(most, total)
        pauses = [after - before for (before, _), (after, _) in pairwise(passed)]
        return sum(count for _, count in passed), most, max(pauses)


@asynccontextmanager
async def broker_with(policies: dict[str, Any], **settings: Any) -> AsyncIterator[TimedClient]:
    async with running_broker(**settings) as broker:
        client = TimedClient(broker)
        await broker.namespaces.change(SPACE, policies)
        yield client


def check(pace: tuple[int, int, float], rate: int) -> None:
    total, most, pause = pace
    assert abs(total - rate * SECONDS) <= 0.05 * rate * SECONDS
    assert most <= 2 * rate * 0.1
    assert pause <= 0.06


async def publish(client: FakeClient, count: int) -> None:
    for first in range(0, count, TURN):
        client.publish(*[b"%07d" % number for number in range(first, first + TURN)], first=first)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("policies", "rate"),
    [
        ({"publish_rate_messages": RATE}, RATE),
        ({"publish_rate_bytes": RATE * 65}, RATE),  # what a message of 7 bytes takes in an entry
    ],
)
@in_virtual_time
async def test_producers_that_send_as_fast_as_they_can(policies: dict[str, int], rate: int) -> None:
    async with broker_with(policies) as client:
        await client.producer()
        sending = asyncio.ensure_future(publish(client, (SECONDS + 2) * RATE))
        await asyncio.sleep(0.5)
        pace = await client.pace()
        sent = sum(frame.reason != "" for frame, _ in client.frames if isinstance(frame, c.HoldProducer))
        assert sent == 1  # it does not heed that
        await sending
        check(pace, rate)


@pytest.mark.parametrize("type", ["exclusive", "shared", "key_shared"])
@in_virtual_time
async def test_consumers_that_take_as_much_as_there_is(type: str) -> None:
    """Two, where there may be two: the rate is that of both together."""
    async with broker_with(
        {"dispatch_rate_messages": RATE, "subscription_dispatch_rate_messages": 3 * RATE},
        max_unacked_messages_per_consumer=0,
        max_unacked_messages_per_subscription=0,
    ) as client:
        await client.producer()
        await publish(client, (SECONDS + 2) * RATE)
        await client.confirmed((SECONDS + 2) * RATE)
        client.passed.clear()
        for number in (1, 2) if type != "exclusive" else (1,):
            await client.consumer(number, type=type, permits=1_000_000)
        check(await client.pace(), RATE)


@in_virtual_time
async def test_what_is_queued_behind_a_rate_is_stored_at_once_when_the_topic_moves() -> None:
    async with broker_with({"publish_rate_messages": 10}) as client:
        await client.producer()
        client.publish(*[b"m"] * 1_000)
        await client.confirmed(1)
        begin = asyncio.get_running_loop().time()
        await client.ask(c.TerminateTopic, str(TOPIC))
        assert asyncio.get_running_loop().time() - begin < 1
        assert sum(row[1] for row in client.receipts) == 1_000


@in_virtual_time
async def test_nobody_else_waits_for_a_topic_whose_rate_is_reached() -> None:
    """On the same connection: another producer, a consumer, and its acknowledgements."""
    async with serving() as server, connect_to(server) as client:
        await client.admin.create_topic("slow")
        await client.admin.update_topic_policies("slow", {"publish_rate_bytes": 50_000})
        async with (
            client.create_producer("slow", batching=False) as slow,
            client.create_producer("fast") as fast,
            client.subscribe("fast", "all") as consumer,
        ):
            # More than a topic may have queued.
            waiting = [slow.send_nowait(b"m" * 10_000) for _ in range(4_000)]
            begin = asyncio.get_running_loop().time()
            for number in range(100):
                await fast.send(b"%d" % number)
                await consumer.ack(await consumer.receive(5.0))
            assert asyncio.get_running_loop().time() - begin < 2
            await waiting[9]
            assert asyncio.get_running_loop().time() - begin < 5
            await client.admin.update_topic_policies("slow", {"publish_rate_bytes": None})
            await asyncio.wait_for(slow.flush(), 10)  # all of it goes on at once


@pytest.mark.parametrize(
    "policies",
    [{"publish_rate_messages": 200}, {"backlog_quota_bytes": 2_000, "backlog_quota_action": "hold"}],
    ids=["rate", "quota"],
)
@in_virtual_time
async def test_a_producer_that_is_held_goes_on_where_its_topic_moves(policies: dict[str, Any]) -> None:
    """And is held there: each message is stored once, in order."""
    async with brokers("a", "b") as cluster, connect(cluster.brokers["a"].url, backoff_first=0.01) as client:
        await client.admin.create_topic("t")
        await client.admin.update_topic_policies("t", policies)
        async with (
            client.subscribe("t", "all") as consumer,
            client.create_producer("t", batching=False, name="me") as producer,
        ):
            sent = [producer.send_nowait(b"%0100d" % number) for number in range(100)]
            await asyncio.sleep(0.6)  # a check of the quota
            sent += [producer.send_nowait(b"%0100d" % number) for number in range(100, 200)]
            await asyncio.sleep(0.1)
            assert sum(receipt.done for receipt in sent) < 180
            source = cluster.owner_of("t")
            (target,) = [one for one in cluster.brokers.values() if one is not source]
            await source.ownership.administration.transfer(
                "persistent://public/default/t", target.broker.settings.name
            )
            got = []
            for _ in sent:
                message = await consumer.receive(10.0)
                await consumer.ack(message)
                got.append(message.value)
            assert got == [b"%0100d" % number for number in range(200)]
            assert cluster.owner_of("t") is target
            await asyncio.gather(*sent)
            begin = asyncio.get_running_loop().time()
            await asyncio.gather(*[producer.send_nowait(b"more") for _ in range(60)])
            assert (asyncio.get_running_loop().time() - begin > 0.12) is ("publish_rate_messages" in policies)
