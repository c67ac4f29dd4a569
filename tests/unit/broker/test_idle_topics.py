"""Topics that nobody uses are unloaded, and nothing is lost however their next use meets that."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from magnetar.broker import Broker, BrokerSettings
from magnetar.proto import commands as c
from magnetar.proto.errors import InvalidSetting, LedgerNotFound, TopicNotServed
from support.broker_kit import TOPIC, FakeClient, running_broker, settle
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.virtual_time import in_virtual_time

IDLE: dict[str, Any] = {"topic_idle_unload_ms": 60_000, "maintenance_interval_s": 10.0}


def loaded(broker: Broker) -> bool:
    return str(TOPIC) in broker.topics


async def published(broker: Broker, *values: bytes, first: int = 0) -> None:
    """By a producer that leaves again."""
    client = FakeClient(broker)
    answer = await client.producer()
    client.publish(*values, first=first, epoch=answer["epoch"])
    await client.confirmed(len(values))
    client.close()


async def read(broker: Broker, count: int, subscription: str = "billing") -> list[bytes]:
    """And acknowledges, and leaves."""
    client = FakeClient(broker)
    await client.consumer(subscription=subscription)
    await client.received(count)
    await client.ack(*[message.row() for message in client.messages])
    client.close()
    return client.values


@in_virtual_time
async def test_a_topic_is_unloaded_when_it_was_idle_for_long_and_comes_back_with_all_it_had() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers, **IDLE) as broker:
        await published(broker, b"a", b"b")
        assert await read(broker, 2) == [b"a", b"b"]
        await asyncio.sleep(59)
        assert loaded(broker)
        await asyncio.sleep(21)
        assert not loaded(broker)
        assert ledgers.ledgers[0].closed
        await published(broker, b"c", first=2)
        assert loaded(broker)
        assert await read(broker, 1) == [b"c"], "what was acknowledged is not delivered again"
        await asyncio.sleep(80)
        assert not loaded(broker)
        assert await read(broker, 3, "audit") == [b"a", b"b", b"c"]


async def test_nothing_keeps_a_topic_that_was_unloaded() -> None:
    async with running_broker() as broker:
        await published(broker, b"a", b"b")
        assert await read(broker, 2) == [b"a", b"b"]
        unloaded = weakref.ref(broker.topics[str(TOPIC)])
        await broker.unload(TOPIC, TopicNotServed("it moves"))
        await settle()
        gc.collect()
        assert unloaded() is None


@in_virtual_time
async def test_a_topic_stays_loaded_while_somebody_uses_it() -> None:
    async with running_broker(**IDLE) as broker:
        client = FakeClient(broker)
        await client.producer()
        await asyncio.sleep(200)
        assert loaded(broker), "a producer"
        await client.consumer()
        await client.ask(c.CloseProducer, 1)
        await asyncio.sleep(200)
        assert loaded(broker), "a consumer"
        await client.ask(c.KeepLedgers, "orders", "query", 100_000)
        await client.ask(c.CloseConsumer, 1)
        await asyncio.sleep(95)
        assert loaded(broker), "a lease"
        for _ in range(4):
            await asyncio.sleep(40)
            await client.ask(c.TopicStats, "orders")
        assert loaded(broker), "requests"
        await asyncio.sleep(80)
        assert not loaded(broker)


@in_virtual_time
async def test_staged_ledgers_keep_their_topic_loaded_until_they_are_swept() -> None:
    async with running_broker(staged_ttl_ms=300_000, **IDLE) as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateTopic, "orders")
        with pytest.raises(
            LedgerNotFound
        ):  # of the record that these ledgers do not have; it is staged all the same
            await client.ask(c.CreateStagedLedger, "orders", "t")
        await asyncio.sleep(290)
        assert loaded(broker)
        await asyncio.sleep(100)
        assert not loaded(broker)


@in_virtual_time
async def test_without_the_setting_topics_stay_loaded() -> None:
    async with running_broker(topic_idle_unload_ms=0, maintenance_interval_s=10.0) as broker:
        await published(broker, b"a")
        await asyncio.sleep(3_000)
        assert loaded(broker)
    with pytest.raises(InvalidSetting, match="topic_idle_unload_ms is -1: it must not be negative; 0 keeps"):
        BrokerSettings(topic_idle_unload_ms=-1)


@in_virtual_time
async def test_who_comes_while_a_topic_is_unloaded_waits_and_finds_it_loaded_again() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers, **IDLE) as broker:
        await published(broker, b"a")
        gate = ledgers.close_gate = asyncio.Event()
        await asyncio.sleep(80)  # its ledger is being closed, which takes its time
        assert not loaded(broker)
        assert ledgers.log[-1] == "closing 0"
        publishing = asyncio.ensure_future(published(broker, b"b", first=1))
        reading = asyncio.ensure_future(read(broker, 2))
        deleting = asyncio.ensure_future(FakeClient(broker).ask(c.DeleteSubscription, "orders", "nobody"))
        await asyncio.sleep(5)
        assert not publishing.done()
        assert not reading.done()
        ledgers.close_gate = None
        gate.set()
        await publishing
        assert await reading == [b"a", b"b"]
        assert "no subscription 'nobody'" in str((await asyncio.gather(deleting, return_exceptions=True))[0])
        assert ledgers.log.index("closed 0") < ledgers.log.index("create 1")
        assert "recover 0" not in ledgers.log, "one owner at a time"


@in_virtual_time
async def test_a_broker_that_stops_while_it_unloads_closes_everything_once() -> None:
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    async with running_broker(ledgers, metadata, **IDLE) as broker:
        await published(broker, b"a")
        gate = ledgers.close_gate = asyncio.Event()
        await asyncio.sleep(80)
        asyncio.get_running_loop().call_later(3, gate.set)
    assert len(asyncio.all_tasks()) == 1
    async with running_broker(ledgers, metadata) as broker:
        assert await read(broker, 1) == [b"a"]


@in_virtual_time
async def test_slow_bookies_of_one_idle_topic_stop_neither_rounds_nor_other_topics() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers, max_ledger_age_ms=30_000, **IDLE) as broker:
        await published(broker, b"a")
        gate = ledgers.close_gate = asyncio.Event()
        await asyncio.sleep(80)
        assert not loaded(broker)
        client = FakeClient(broker)
        await client.consumer(topic="other")
        rounds, maintain = 0, broker.topics["persistent://public/default/other"].maintain

        def count() -> None:
            nonlocal rounds
            rounds += 1
            maintain()

        broker.topics["persistent://public/default/other"].maintain = count  # type: ignore[method-assign]
        await asyncio.sleep(45)
        assert rounds == 4
        gate.set()
        await settle()


@in_virtual_time
async def test_a_round_of_many_topics_is_many_turns() -> None:
    async with running_broker(**IDLE) as broker:
        client = FakeClient(broker)
        for number in range(500):
            await client.ask(c.CreateTopic, f"t{number}")
        loop, turn, at = asyncio.get_running_loop(), 0, list[int]()

        def next_turn() -> None:
            nonlocal turn
            turn += 1

        def maintained(real: Any) -> Any:
            def maintain() -> None:
                if turn not in at:
                    loop.call_soon(next_turn)
                at.append(turn)
                real()

            return maintain

        for topic in broker.topics.values():
            topic.maintain = maintained(topic.maintain)  # type: ignore[method-assign]
        before = len(asyncio.all_tasks())
        await asyncio.sleep(10.5)
        assert len(at) == 500
        assert max(at.count(number) for number in set(at)) <= 50
        await asyncio.sleep(10)
        assert len(at) == 1000
        assert len(asyncio.all_tasks()) == before, "an idle topic costs no task"
