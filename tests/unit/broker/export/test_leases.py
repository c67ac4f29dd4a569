"""KeepLedgers: a lease pins like a cursor for as long as it is renewed, also over a change of owner."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.broker import BrokerSettings
from magnetar.broker.export.leases import Leases
from magnetar.ledger import LedgerClient
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto import commands as c
from magnetar.proto.errors import InvalidArgument, TooManyRequests
from support.bookies import Bookies
from support.broker_kit import TOPIC, FakeClient, settle
from support.export_kit import export_broker, record_of
from support.virtual_time import in_virtual_time


class Time:
    """Loop time that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def leases(**settings: Any) -> tuple[Leases, Time]:
    time = Time()
    return Leases(BrokerSettings(**settings), time), time


def first(held: Leases) -> int:
    lease = held.lowest()
    assert lease is not None
    return lease.first


def test_a_lease_ends_with_its_time_and_the_lowest_one_counts() -> None:
    held, time = leases(max_lease_ms=10_000)
    assert not held.all_known_in_s
    assert held.lowest() is None
    assert held.keep("a", 99_000, 7) == (10_000, 7)
    assert held.keep("b", 2_000, 3) == (2_000, 3)
    assert first(held) == 3
    time.now = 2.0
    assert first(held) == 7
    assert held.keep("a", 1_000, -1) == (1_000, 7), "as it is"
    assert first(held) == 7
    held.keep("a", 1_000, 9)
    assert first(held) == 9
    held.keep("all", 1_000, -1)
    assert first(held) == -1
    held.release("all")
    held.release("unknown")
    time.now = 3.0
    assert held.count() == 0
    assert held.lowest() is None


def test_leases_are_bounded_and_their_names_checked() -> None:
    held, time = leases(max_leases=2, max_lease_ms=1_000)
    held.keep("a", 1_000, -1)
    held.keep("b", 1_000, -1)
    with pytest.raises(TooManyRequests, match="max_leases"):
        held.keep("c", 1_000, -1)
    held.keep("b", 1_000, 4)
    time.now = 1.0
    held.keep("c", 1_000, -1)
    for name in ("", "x" * 256, "a\n"):
        with pytest.raises(InvalidArgument):
            held.keep(name, 1, -1)
    with pytest.raises(InvalidArgument):
        held.keep("d", -1, -1)


def test_who_takes_over_waits_for_the_longest_lease() -> None:
    held, time = leases(max_lease_ms=5_000)
    time.now = 100.0
    held.taken_over()
    assert held.all_known_in_s
    time.now = 104.999
    assert held.all_known_in_s
    time.now = 105.0
    assert not held.all_known_in_s


@pytest.fixture
async def bookies() -> Bookies:
    return Bookies("b1")


async def consumed(broker: Any, count: int, first: int = 0) -> FakeClient:
    """So many ledgers of one message each, and a durable subscription that is done with all."""
    client = FakeClient(broker)
    answer = await client.producer()
    await client.consumer()
    for number in range(count):
        client.publish(b"%d" % (first + number), first=number, epoch=answer["epoch"])
        await client.confirmed(number + 1)
    await client.received(count)
    await client.ack(*[message.row() for message in client.messages])
    await settle()
    return client


async def trim(broker: Any) -> None:
    topic = broker.topics[str(TOPIC)]
    topic.maintain()
    await topic.maintenance.trimmed()


async def listed(bookies: Bookies) -> list[int]:
    return [info.ledger_id for info in (await record_of(bookies)).ledgers]


async def test_a_lease_keeps_ledgers_until_it_is_moved_or_ended(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with export_broker(bookies, ledgers, max_ledger_entries=1) as broker:
        client = await consumed(broker, 4)
        ids = await listed(bookies)
        answer = await client.ask(c.KeepLedgers, "orders", "", 30_000)
        assert answer["ttl_ms"] == 30_000
        assert answer["first"] == ids[0]
        lease = answer["lease"]
        stats = await client.ask(c.TopicStats, "orders")
        assert (stats["leases"], stats["staged_ledgers"]) == (1, 0)
        await trim(broker)
        assert await listed(bookies) == ids
        answer = await client.ask(c.KeepLedgers, "orders", lease, 30_000, ids[2])
        assert answer == {"lease": lease, "ttl_ms": 30_000, "first": ids[2]}
        assert (await client.ask(c.KeepLedgers, "orders", lease, 30_000)) == answer
        await trim(broker)
        assert await listed(bookies) == ids[2:]
        # Renewing leaves it where it is; going back does not bring back what is gone.
        assert (await client.ask(c.KeepLedgers, "orders", lease, 30_000))["first"] == ids[2]
        assert (await client.ask(c.KeepLedgers, "orders", lease, 30_000, ids[0]))["first"] == ids[2]
        ended = await client.ask(c.KeepLedgers, "orders", lease, 0)
        assert ended["ttl_ms"] == 0
        await trim(broker)
        assert len(await listed(bookies)) < 2
        with pytest.raises(InvalidArgument, match="ttl_ms"):
            await client.ask(c.KeepLedgers, "orders")
        with pytest.raises(InvalidArgument):
            await client.ask(c.KeepLedgers, "orders", lease, 5, -2)


async def test_an_expired_lease_keeps_nothing(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers, max_ledger_entries=1) as broker:
        client = await consumed(broker, 3)
        await client.ask(c.KeepLedgers, "orders", "", 1)
        await asyncio.sleep(0.005)
        await trim(broker)
        assert len(await listed(bookies)) < 2


@in_virtual_time
async def test_after_a_load_nothing_is_trimmed_until_leases_are_renewed() -> None:
    bookies = Bookies("b1", "b2")
    ledgers = bookies.client()
    async with export_broker(bookies, ledgers, max_ledger_entries=1) as broker:
        client = await consumed(broker, 3)
        lease = (await client.ask(c.KeepLedgers, "orders", "", 60_000))["lease"]
    ids = await listed(bookies)
    async with export_broker(bookies, ledgers, max_ledger_entries=1, max_lease_ms=20_000) as broker:
        await broker.topic(TOPIC, create=False)
        await trim(broker)
        assert await listed(bookies) == ids
        client = FakeClient(broker)
        await asyncio.sleep(19)
        assert (await client.ask(c.KeepLedgers, "orders", lease, 20_000, ids[1]))["first"] == ids[1]
        await trim(broker)
        assert await listed(bookies) == ids
        await asyncio.sleep(2)
        await trim(broker)
        assert await listed(bookies) == ids[1:]
    await ledgers.close()


async def test_a_lease_that_comes_during_a_trimming_is_told_what_is_left(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with export_broker(bookies, ledgers, max_ledger_entries=1) as broker:
        client = await consumed(broker, 4)
        ids = await listed(bookies)
        topic = broker.topics[str(TOPIC)]
        before = client.ask(c.KeepLedgers, "orders", "before", 60_000, ids[1])
        await asyncio.sleep(0)
        topic.maintain()
        during = client.ask(c.KeepLedgers, "orders", "during", 60_000)
        assert (await before)["first"] == ids[1]
        first = (await during)["first"]
        kept = await listed(bookies)
        assert first == kept[0]
        assert ids[1] in kept


async def test_a_topic_is_deleted_in_spite_of_leases(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers) as broker:
        client = await consumed(broker, 1)
        await client.ask(c.KeepLedgers, "orders", "", 60_000)
        await client.ask(c.DeleteTopic, "orders", True)
        assert not await StoredLedgers(bookies.metadata).any()
