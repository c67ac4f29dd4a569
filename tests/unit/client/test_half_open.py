"""A connection that vanished without a word holds no place for longer than a probe takes: rule 53."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple

import pytest

from magnetar.broker import Broker
from magnetar.broker.listeners.native.connection import listener
from magnetar.client import Client, ConsumerBusy, ProducerBusy, TopicInUse, connect
from magnetar.client.options import SubscriptionType
from magnetar.runtime.connection import ConnectionOptions, start_server
from support.broker_kit import running_broker
from support.silent_line import SilentLine
from support.virtual_time import in_virtual_time

BROKER, LINE = 6650, 6651


class Here(NamedTuple):
    """A real broker behind a line, and a client of it."""

    broker: Broker
    line: SilentLine
    client: Client


@asynccontextmanager
async def here() -> AsyncIterator[Here]:
    async with running_broker(service_url=f"magnetar://127.0.0.1:{LINE}") as broker:
        server = await start_server("127.0.0.1", BROKER, listener(broker), ConnectionOptions(name="broker"))
        line = SilentLine(BROKER)
        await line.open(LINE)
        async with another() as client:
            yield Here(broker, line, client)
        await line.close()
        await server.close(0.0)


def another(ping_interval: float = 5.0) -> AbstractAsyncContextManager[Client]:
    """One with a connection of its own."""
    return connect(f"magnetar://127.0.0.1:{LINE}", ping_interval=ping_interval)


def now() -> float:
    return asyncio.get_running_loop().time()


@in_virtual_time
@pytest.mark.parametrize("type", ["exclusive", "failover", "key_shared"])
async def test_rule_53_a_consumer_whose_connection_vanished_has_its_place_again_without_waiting_for_the_broker(
    type: SubscriptionType,
) -> None:
    hash_ranges = ((0, 65_535),) if type == "key_shared" else ()
    async with here() as (_, line, client):
        consumer = await client.subscribe("t", "s", type=type, hash_ranges=hash_ranges)
        line.fall_silent()
        vanished = now()
        await asyncio.sleep(11)  # two of the client's intervals
        producer = await client.create_producer("t")
        await producer.send(b"0")
        assert (await consumer.receive(20.0)).value == b"0"
        assert now() - vanished < 21.5, "three of its intervals, and the probe"


@in_virtual_time
async def test_rule_53_the_name_of_a_producer_whose_machine_died_is_free_after_a_probe() -> None:
    async with here() as (broker, line, client):
        old = await client.create_producer("t", name="p")
        line.fall_silent()
        async with another() as client:
            began = now()
            newcomers = [asyncio.ensure_future(client.create_producer("t", name="p")) for _ in range(2)]
            await asyncio.wait(newcomers)
            assert 4.9 < now() - began < 5.1
            errors = [newcomer.exception() for newcomer in newcomers]
            assert {type(error) for error in errors} == {ProducerBusy, type(None)}, "one of two at once"
            assert len(next(iter(broker.topics.values())).producers) == 1
        await old.close()


@in_virtual_time
async def test_who_answers_keeps_its_place_and_the_newcomer_is_refused_at_once() -> None:
    async with here() as (_, _, client), another() as newcomer:
        consumer = await client.subscribe("t", "s")
        producer = await client.create_producer("t", name="p")
        for asker in (newcomer, client):  # the second over the very connection of the holder
            began = now()
            with pytest.raises(ConsumerBusy):
                await asker.subscribe("t", "s")
            with pytest.raises(ProducerBusy):
                await asker.create_producer("t", name="p")
            with pytest.raises(TopicInUse):
                await asker.admin.delete_topic("t")
            with pytest.raises(ConsumerBusy):
                await asker.admin.delete_subscription("t", "s")
            assert now() - began < 0.5
        await asyncio.sleep(100)
        await producer.send(b"0")
        assert (await consumer.receive(1.0)).value == b"0"


@in_virtual_time
async def test_what_only_the_dead_use_can_be_deleted() -> None:
    async with here() as (_, line, client):
        await client.create_producer("t")
        await client.subscribe("t", "s", type="shared")
        await client.subscribe("t", "s2", type="shared")
        line.fall_silent()
        async with another() as client:
            await client.admin.delete_subscription("t", "s")
            assert list((await client.admin.topic_stats("t"))["subscriptions"]) == ["s2"]
            await client.admin.delete_topic("t")
            assert not await client.admin.list_topics()


@in_virtual_time
async def test_a_newcomer_that_gives_up_leaves_the_probe_to_the_next() -> None:
    async with here() as (_, line, client):
        await client.subscribe("t", "s")
        line.fall_silent()
        async with another() as client:
            newcomer = asyncio.ensure_future(client.subscribe("t", "s"))
            await asyncio.sleep(4)
            newcomer.cancel()
            await asyncio.sleep(0)
            began = now()
            await client.subscribe("t", "s")
            assert now() - began < 1.5


@in_virtual_time
async def test_who_leaves_by_itself_meanwhile_makes_room() -> None:
    async with here() as (_, line, client):
        await client.subscribe("t", "s", type="shared")
        line.fall_silent()
        async with another() as other, another() as newcomer:
            consumer = await other.subscribe("t", "s", type="shared")
            waiting = asyncio.ensure_future(newcomer.subscribe("t", "s", type="exclusive"))
            await asyncio.sleep(3)
            await consumer.close()
            await waiting
