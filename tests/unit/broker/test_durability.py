"""Durability as a policy: quorums of the next ledger, and flush=async, in which receipts come before the sync.

Consumers get what is durable only. What was receipted stays with the broker until then, so bookies that fail take nothing
with them; a broker that fails leaves it with the bookies.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.broker import Broker
from magnetar.broker.log.durability import Durability
from magnetar.broker.log.open_ledger import own_moment
from magnetar.broker.log.records import namespace_path
from magnetar.ledger import BookieFacts, LedgerWriter
from magnetar.ledger.core.degrade import describe
from magnetar.metadata.store import Versioned
from magnetar.proto import commands as c
from magnetar.proto.errors import BookieUnavailable, ConnectionLost, TopicNotServed
from support.bookies import Bookies
from support.broker_kit import TOPIC, FakeClient, running_broker, settle
from support.memory_metadata import MemoryMetadataStore
from support.virtual_time import in_virtual_time

SPACE = "public/default"
# Bookies are forced when a test says so, not by the time.
ASYNC: dict[str, Any] = {
    "flush": "async",
    "flush_interval_ms": 3_600_000,
    "ensemble_size": 3,
    "write_quorum": 3,
    "ack_quorum": 2,
    "retry_initial_ms": 1,
    "ledger_change_spread_ms": 0,
}


def flush(broker: Broker) -> None:
    """The interval is over."""
    opened = broker.topics[str(TOPIC)].ledger.appending.open_ledger
    assert opened is not None
    opened.flusher.force()


async def crash(broker: Broker) -> None:
    for topic in list(broker.topics.values()):
        topic.ledger.fence(TopicNotServed("crash"))
    await broker.close()


async def stripings(bookies: Bookies, broker: Broker) -> list[str]:
    listed = broker.topics[str(TOPIC)].ledger.list.ledgers
    return [describe((await bookies.stored_metadata(info.stored_id)).striping) for info in listed]


async def publish(client: FakeClient, *numbers: int, receipted: bool = True) -> None:
    for number in numbers:
        client.publish(b"%d" % number, first=number)
        if receipted:
            await client.confirmed(number + 1)


async def test_async_receipts_come_before_the_sync_and_messages_are_delivered_after_it() -> None:
    bookies = Bookies("a", "b", "c")
    ledgers = bookies.client()
    async with running_broker(ledgers, bookies.metadata, **ASYNC) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer()
        await publish(client, *range(20))
        await settle()
        assert client.values == []
        assert not any(bookie.forces for bookie in bookies.values())
        topic = broker.topics[str(TOPIC)]
        assert topic.publish_budget.used, "what is not durable counts until it is"
        assert topic.ledger.appending.accepting, "and holds up nobody"
        flush(broker)
        assert await client.received(20) == [b"%d" % number for number in range(20)]
        await settle()
        assert topic.publish_budget.used == 0
        assert [row[0] for row in client.receipts] == list(range(20)), "one each"
    await ledgers.close()


async def test_the_interval_and_the_bytes_force_by_themselves() -> None:
    bookies = Bookies("a", "b", "c")
    ledgers = bookies.client()
    async with running_broker(ledgers, bookies.metadata, **(ASYNC | {"flush_interval_ms": 1})) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer()
        for number in range(5):
            await publish(client, number)
            await client.received(number + 1)
    await ledgers.close()
    bookies, large = Bookies("a", "b", "c"), b"x" * 100_000
    ledgers = bookies.client()
    async with running_broker(
        ledgers, bookies.metadata, **(ASYNC | {"max_outstanding_bytes": 250_000})
    ) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer()
        for number in range(3):
            client.publish(large, first=number)
            await client.confirmed(number + 1)
        await client.received(3)
    await ledgers.close()


async def test_a_bookie_that_loses_its_memory_takes_nothing_with_it() -> None:
    bookies = Bookies("a", "b", "c", "d")
    ledgers = bookies.client()
    async with running_broker(ledgers, bookies.metadata, **ASYNC) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer()
        await publish(client, *range(5))
        info = broker.topics[str(TOPIC)].ledger.list.ledgers[0]
        (ensemble,) = (await bookies.stored_metadata(info.stored_id)).ensembles
        for name in ensemble.bookies[:2]:  # as many as had to accept an entry
            bookies[name].restart()
            bookies[name].fail(BookieUnavailable("down"))
        await publish(client, 5, receipted=False)
        await settle()
        for name in ensemble.bookies[:2]:
            bookies[name].fail(None)
        async with asyncio.timeout(10):
            while len(client.values) < 6:
                flush(broker) if broker.topics[str(TOPIC)].ledger.appending.state.value == "writing" else None
                await asyncio.sleep(0.001)
        assert client.values == [b"%d" % number for number in range(6)]
        assert sorted(row[0] for row in client.receipts) == list(range(6)), "one each"
    await ledgers.close()


@in_virtual_time
async def test_the_interval_goes_on_in_the_next_ledger_when_one_fails() -> None:
    """Its timer had begun for the ledger that failed."""
    bookies = Bookies("a", "b", "c")
    ledgers = bookies.client()
    async with running_broker(ledgers, bookies.metadata, **(ASYNC | {"flush_interval_ms": 1_000})) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer()
        await publish(client, *range(3))
        bookies["b"].fail(BookieUnavailable("down"))
        await publish(client, 3, receipted=False)
        await settle()
        bookies["b"].fail(None)
        await client.confirmed(4)
        for number in range(4, 60):
            await asyncio.sleep(0.1)
            await publish(client, number)
            assert len(client.values) >= number - 13, "delivered within the interval"
        assert broker.topics[str(TOPIC)].ledger.list.ledgers[-1].ledger_id > 0, "another ledger"
        assert client.values == [b"%d" % number for number in range(len(client.values))]
        assert [row[0] for row in client.receipts] == list(range(60))
    await ledgers.close()


async def test_the_next_owner_finds_what_was_receipted_while_its_bookies_live() -> None:
    bookies = Bookies("a", "b", "c")
    ledgers = bookies.client()
    async with running_broker(ledgers, bookies.metadata, **ASYNC) as broker:
        client = FakeClient(broker)
        await client.producer()
        await publish(client, *range(5))
        await crash(broker)
    await ledgers.close()
    ledgers = bookies.client()
    async with running_broker(ledgers, bookies.metadata, **ASYNC) as broker:
        client = FakeClient(broker)
        await client.consumer()
        assert await client.received(5) == [b"%d" % number for number in range(5)]
    await ledgers.close()


async def test_what_was_receipted_does_not_fail_when_the_topic_is_fenced() -> None:
    bookies = Bookies("a", "b", "c")
    ledgers = bookies.client()
    async with running_broker(ledgers, bookies.metadata, **ASYNC) as broker:
        client = FakeClient(broker)
        await client.producer(name="p")
        await publish(client, *range(3))
        (session,) = broker.topics[str(TOPIC)].producers
        broker.fence(TopicNotServed("another owner"))
        await settle()
        assert client.failures == []
        assert session.outstanding == 0, "or the next session of the name waits for ever"
    await ledgers.close()


async def test_a_power_failure_of_all_loses_what_nobody_has_consumed() -> None:
    """The one case in which async loses, and sync does not."""
    bookies = Bookies("a", "b", "c")
    ledgers = bookies.client()
    async with running_broker(ledgers, bookies.metadata, **ASYNC) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer()
        await publish(client, *range(3))
        flush(broker)
        await client.received(3)
        await publish(client, 3, 4)
        await settle()
        assert len(client.values) == 3
        for bookie in bookies.values():
            bookie.restart()
        await crash(broker)
    await ledgers.close()
    ledgers = bookies.client()
    async with running_broker(ledgers, bookies.metadata, **ASYNC) as broker:
        client = FakeClient(broker)
        answer = await client.producer()
        await client.consumer(subscription="another")
        client.publish(b"after", first=5, epoch=answer["epoch"])
        await client.confirmed(1)
        flush(broker)
        assert await client.received(4) == [b"0", b"1", b"2", b"after"]
    await ledgers.close()


async def test_closing_the_broker_makes_everything_durable() -> None:
    bookies = Bookies("a", "b", "c")
    ledgers = bookies.client()
    async with running_broker(ledgers, bookies.metadata, **(ASYNC | {"flush_interval_ms": 20})) as broker:
        client = FakeClient(broker)
        await client.producer()
        await publish(client, *range(5))
    await ledgers.close()
    for bookie in bookies.values():
        bookie.restart()
    ledgers = bookies.client()
    async with running_broker(ledgers, bookies.metadata, **ASYNC) as broker:
        client = FakeClient(broker)
        await client.consumer()
        assert len(await client.received(5)) == 5
    await ledgers.close()


async def test_a_change_rolls_the_open_ledger_over_and_the_next_one_is_as_it_says() -> None:
    bookies = Bookies("a", "b", "c")
    ledgers = bookies.client()
    sizes: dict[str, Any] = {"ensemble_size": 2, "write_quorum": 2, "ack_quorum": 2}
    async with running_broker(ledgers, bookies.metadata, ledger_change_spread_ms=0) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer()
        await publish(client, 0)
        assert await stripings(bookies, broker) == ["1/1/1"]
        await client.change_policies(topic="orders", **sizes)
        await publish(client, 1)
        assert await stripings(bookies, broker) == ["1/1/1", "2/2/2"]
        await client.change_policies(topic="orders", message_ttl_ms=5, **sizes)
        await publish(client, 2)
        assert await stripings(bookies, broker) == ["1/1/1", "2/2/2"], "nothing that matters to ledgers"
        # Of the namespace: those that the topic does not set itself.
        other: dict[str, Any] = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2}
        await client.change_policies(namespace=SPACE, flush="async", **other)
        await settle()
        await publish(client, 3)
        assert await stripings(bookies, broker) == ["1/1/1", "2/2/2", "2/2/2"]
        ledger = broker.topics[str(TOPIC)].ledger
        assert ledger.appending.open_ledger is not None
        writer = ledger.appending.open_ledger.writer
        assert isinstance(writer, LedgerWriter)
        assert writer.deferred_sync
        nothing: Any = dict.fromkeys(sizes)
        await client.change_policies("orders", message_ttl_ms=None, **nothing)
        await publish(client, 4)
        assert (await stripings(bookies, broker))[3:] == ["3/3/2"]
        found = await client.ask(c.GetPolicies, "orders")
        rows = {row[0]: tuple(row[2:]) for row in found["in_force"]}
        assert rows["ensemble_size"] == (3, "namespace")
        assert rows["flush"] == ("async", "namespace")
        assert rows["minimum_write_quorum"] == (0, "broker")
        assert await client.received(5) == [b"%d" % number for number in range(5)]
        # The cursor's next ledger is as safe as the topic's.
        kinds = [
            (await bookies.stored_metadata(number)).properties["kind"]
            for number in range(ledgers_made(bookies))
        ]
        assert "cursor" not in kinds or kinds.count("topic") == 4
    await ledgers.close()


def ledgers_made(bookies: Bookies) -> int:
    return 1 + max(ledger for bookie in bookies.values() for ledger, _ in bookie.entries)


@pytest.mark.parametrize("busy", [False, True])
async def test_publishing_goes_on_across_a_change_and_nothing_is_lost(busy: bool) -> None:
    bookies = Bookies("a", "b", "c")
    ledgers = bookies.client()
    async with running_broker(
        ledgers, bookies.metadata, ledger_change_spread_ms=0, flush_interval_ms=2
    ) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer()
        changes: list[dict[str, Any]] = [
            {"flush": "async"},
            {"flush": None, "ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2},
            {"ensemble_size": None, "write_quorum": None, "ack_quorum": None},
            {"flush": "async"},
        ]
        number = 0
        for change in changes:
            for _ in range(10):
                await publish(client, number, receipted=not busy)
                number += 1
            await client.change_policies(topic="orders", **change)
        await client.confirmed(number)
        assert await client.received(number) == [b"%d" % n for n in range(number)]
        covered = [sequence for row in client.receipts for sequence in range(row[0], row[0] + row[1])]
        assert covered == list(range(number)), "once each, in order"
    await ledgers.close()


class FailingStore(MemoryMetadataStore):
    """`failing`: paths that cannot be read now."""

    failing: tuple[str, ...] = ()

    async def get(self, path: str) -> Versioned | None:
        """See MetadataStore."""
        if path in self.failing:
            raise ConnectionLost("the store is away")
        return await super().get(path)


async def test_while_the_policies_are_not_known_no_ledger_is_begun() -> None:
    """The broker's settings would perhaps store fewer copies than the namespace wants."""
    metadata = FailingStore()
    bookies = Bookies("a", "b", "c", metadata=metadata)
    ledgers = bookies.client()
    async with running_broker(ledgers, metadata, retry_initial_ms=1) as broker:
        client = FakeClient(broker)
        await client.producer()
        metadata.failing = (namespace_path(SPACE),)
        broker.namespaces.followed.drop(SPACE)
        await publish(client, 0, receipted=False)
        await settle()
        assert client.receipts == []
        delayed = [frame.message for frame, _ in client.frames if isinstance(frame, c.SendDelayed)]
        assert any("it is not known how topic" in text for text in delayed), delayed
        metadata.failing = ()
        await client.confirmed(1)
    await ledgers.close()


def test_each_topic_has_its_own_moment() -> None:
    moments = [own_moment(f"persistent://public/default/topic-{number}", 30_000) for number in range(10_000)]
    per_second = [sum(int(moment) == second for moment in moments) for second in range(30)]
    assert max(per_second) < 500, "10,000 topics do not change their ledgers at once"
    assert own_moment("any", 0) == 0


def test_what_a_ledger_is_asked_for() -> None:
    assert Durability(3, 3, 2, 2, "async").of_ledger() == {
        "ensemble_size": 3,
        "write_quorum": 3,
        "ack_quorum": 2,
        "minimum_write_quorum": 2,
        "bookie_group": "",
    }


async def test_a_topic_moves_to_the_bookies_of_its_group() -> None:
    bookies = Bookies("a", "b", "c")
    directory = bookies.directory()
    directory.answered("b", BookieFacts.of({"group": "fast"}))
    ledgers = bookies.client(seed=1, directory=directory)
    async with running_broker(
        ledgers, bookies.metadata, ledger_change_spread_ms=0, retry_initial_ms=1
    ) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.change_policies(namespace=SPACE, bookie_group="fast")
        await settle()
        for number in range(5):
            await publish(client, number)
            await client.change_policies(topic="orders", message_ttl_ms=number)
        listed = broker.topics[str(TOPIC)].ledger.list.ledgers
        ensembles = [(await bookies.stored_metadata(info.stored_id)).last_ensemble.bookies for info in listed]
        assert ensembles[-1] == ("b",)
        directory.answered("c", BookieFacts.of({"group": "golden", "read_only": True}))
        await client.change_policies(topic="orders", bookie_group="golden")
        await settle()
        await publish(client, 5, receipted=False)

        def says_why() -> bool:
            delayed = [frame.message for frame, _ in client.frames if isinstance(frame, c.SendDelayed)]
            return any("[bookie] group=golden" in text for text in delayed)

        await client.until(says_why)
        directory.answered("c", BookieFacts.of({"group": "golden"}))
        await client.confirmed(6)
        found = await client.ask(c.TopicStats, "orders")
        assert found["open_ledger"]["bookies"] == ["c"]
    await ledgers.close()
