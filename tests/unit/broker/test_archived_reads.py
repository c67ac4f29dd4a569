"""Archived ledgers are ledgers like others to whoever reads through the broker: starts, seeks, acknowledgements, figures.

The archive is in memory (`support.archives`); what the real one adds is in tests/unit/archive/test_reader.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.broker import Broker
from magnetar.proto import commands as c
from magnetar.proto.errors import ArchiveUnavailable, EntryDamaged, TopicNotFound
from magnetar.proto.ids import MessageId
from support.archives import MemoryArchives
from support.broker_kit import TOPIC, FakeClient, FakeClock, Message, running_broker, settle
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore

COUNT = 8  # messages of `published`, of which two are an entry and four a ledger


def broker_with(archives: MemoryArchives, **settings: Any) -> Any:
    """Ledgers of two entries; failed reads are tried again at once."""
    settings = {"max_ledger_entries": 2, "retry_initial_ms": 1, "retry_max_ms": 2, **settings}
    return running_broker(archives=archives, **settings)


async def published(broker: Broker, count: int = COUNT, clock: FakeClock | None = None) -> FakeClient:
    """Batches of two; the time of each is its number. All ledgers are closed then, but for an empty one."""
    client = FakeClient(broker)
    answer = await client.producer()
    for number in range(0, count, 2):
        values = [b"%d" % number, b"%d" % (number + 1)]
        if clock is not None:
            clock.now = number
        client.publish_batch(values, first=number, epoch=answer["epoch"], time_ms=number)
        await client.confirmed(number + 2)
    await settle()
    return client


def all_values(first: int = 0, count: int = COUNT) -> list[bytes]:
    return [b"%d" % number for number in range(first, count)]


async def consumed(broker: Broker, subscription: str = "", **named: Any) -> list[Message]:
    """All messages from the place given, by a reader unless a subscription is named."""
    client = FakeClient(broker)
    await client.consumer(1, subscription, durable=bool(subscription), **named)
    await client.until(lambda: client.messages and client.values[-1] == b"%d" % (COUNT - 1))
    client.handler.connection_closed(None)
    await settle()
    return client.messages


def figures(messages: list[Message]) -> list[tuple[bytes, tuple[int, int, int]]]:
    return [(message.value, message.id) for message in messages]


@pytest.mark.parametrize("ledgers", [1, 2])
async def test_what_is_read_is_what_was_read_before(ledgers: int) -> None:
    archives = MemoryArchives()
    async with broker_with(archives) as broker:
        await published(broker)
        before = figures(await consumed(broker))
        assert [value for value, _ in before] == all_values()
        assert (await archives.archive(broker, ledgers))["archived"] == ledgers
        assert figures(await consumed(broker)) == before
        for type in ("exclusive", "failover", "shared", "key_shared"):
            assert figures(await consumed(broker, f"of-{type}", type=type)) == before
        assert archives.reads
        assert broker.topics[str(TOPIC)].ledger.list.start == before[0][1]


async def test_starts_and_seeks_within_the_archived_part() -> None:
    archives, clock = MemoryArchives(), FakeClock()
    async with broker_with(archives, clock=clock) as broker:
        await published(broker, clock=clock)
        before = figures(await consumed(broker))
        by_time = [figures(await consumed(broker, start=("time", time_ms))) for time_ms in range(COUNT - 1)]
        assert [len(found) for found in by_time] == [8, 6, 6, 4, 4, 2, 2], "of two, as a batch has one time"
        await archives.archive(broker, 1)
        for number in range(COUNT):
            place = ("id", MessageId(*before[number][1]).to_bytes())
            assert figures(await consumed(broker, start=place)) == before[number:]
        for time_ms, found in enumerate(by_time):
            assert figures(await consumed(broker, start=("time", time_ms))) == found
        # From the tail back into the archive, and forth again.
        client = FakeClient(broker)
        await client.consumer(1, "mover", start=("latest", None), type="shared")
        for start, first in (
            (("earliest", None), 0),
            (("time", 2), 2),
            (("id", MessageId(*before[6][1]).to_bytes()), 6),
        ):
            client.messages.clear()
            await client.ask(c.Seek, 1, start)
            client.frame(c.Flow(0, 1, 1000))
            await client.until(lambda: client.values and client.values[-1] == b"%d" % (COUNT - 1))
            assert client.values == all_values(first)


async def test_acknowledgements_in_the_archived_part_and_figures() -> None:
    archives, ledgers, clock = MemoryArchives(), FakeLedgers(), FakeClock()
    metadata = MemoryMetadataStore()
    async with broker_with(archives, ledgers=ledgers, metadata=metadata, clock=clock) as broker:
        await published(broker)
        await archives.archive(broker, 1)
        client = FakeClient(broker)
        await client.consumer(1, "slow", type="shared")
        await client.received(COUNT)

        async def slow() -> dict[str, Any]:
            stats = await client.ask(c.TopicStats, "orders")
            found: dict[str, Any] = stats["subscriptions"]["slow"]
            return found

        assert (await slow())["backlog_messages"] == COUNT
        # One message of an entry, and the entry behind it: the mark-delete position stays, then passes both.
        await client.ack(client.messages[1].row())
        await client.ack(client.messages[2].row(), client.messages[3].row())
        assert (await slow())["mark_delete"] == list(client.messages[0].id)
        reads = len(archives.reads)
        assert (await slow())["backlog_messages"] == COUNT - 3, "acknowledged one by one"
        assert len(archives.reads) == reads, "no file is read for a figure"
        # Nothing behind it is trimmed meanwhile.
        topic = broker.topics[str(TOPIC)]
        topic.maintain()
        await topic.maintenance.trimmed()
        assert topic.ledger.list.archived_ledgers
        assert len(topic.ledger.list.ledgers) == 1
    # A successor knows it all, and delivers what is left.
    async with broker_with(archives, ledgers=ledgers, metadata=metadata, clock=clock) as broker:
        client = FakeClient(broker)
        await client.consumer(1, "slow", type="shared")
        assert await client.received(COUNT - 3) == [b"0", *all_values(4)]
        await client.ack(client.messages[0].row())
        stats = await client.ask(c.TopicStats, "orders")
        assert stats["subscriptions"]["slow"]["mark_delete"] == list(client.messages[1].id)
        assert stats["subscriptions"]["slow"]["backlog_messages"] == COUNT - 4
        # A cumulative acknowledgement of what this broker has not delivered is looked up in the archive.
        other = FakeClient(broker)
        await other.consumer(1, "other", permits=0)
        ledger, entry, _ = client.messages[0].id
        await other.ask(c.Ack, 1, True, payload=c.encode_rows(c.ACK_ROW, [(ledger, entry + 1, 0, 1)]))
        stats = await client.ask(c.TopicStats, "orders")
        assert stats["subscriptions"]["other"]["backlog_messages"] == COUNT - 4


async def test_a_topic_of_which_all_is_archived() -> None:
    archives, ledgers = MemoryArchives(), FakeLedgers()
    metadata = MemoryMetadataStore()
    async with broker_with(archives, ledgers=ledgers, metadata=metadata) as broker:
        client = await published(broker)
        before = figures(await consumed(broker))
        await archives.archive(broker, 2)
        await client.consumer(5, "at-the-end", start=("latest", None))
    async with broker_with(archives, ledgers=ledgers, metadata=metadata) as broker:
        assert figures(await consumed(broker)) == before
        client = FakeClient(broker)
        await client.consumer(1, "other")
        last = await client.ask(c.LastMessageId, 1)
        assert MessageId.from_bytes(last)[:3] == before[-1][1]
        stats = await client.ask(c.TopicStats, "orders")
        assert stats["subscriptions"]["at-the-end"]["backlog_messages"] == 0
        assert (stats["archived_messages"], stats["stored_messages"]) == (COUNT, 0)
        # What comes next follows, and messages do not go back in time.
        answer = await client.producer()
        client.publish(b"next", first=COUNT, epoch=answer["epoch"])
        assert (await client.received(COUNT + 1))[-1] == b"next"
        await client.ask(c.DeleteTopic, "orders", True)
        with pytest.raises(TopicNotFound):
            await client.ask(c.TopicStats, "orders")
        assert ledgers.topic_ledgers() == []


async def test_a_ledger_is_archived_under_its_readers() -> None:
    """With `with_backlog`: what subscriptions and readers have still to read leaves the bookies, and they read on."""
    archives = MemoryArchives()
    async with broker_with(archives) as broker:
        client = await published(broker)
        slow, reader = FakeClient(broker), FakeClient(broker)
        await slow.consumer(1, "slow", permits=2)
        await reader.consumer(1, "", durable=False, permits=2)
        await slow.received(2)
        await reader.received(2)
        answer = await archives.archive(broker, 2)
        assert (answer["archived"], answer["kept"][1]) == (
            0,
            "subscription 'slow' has not acknowledged all of it",
        )
        await client.ask(c.KeepLedgers, "orders", "spark", 60_000)
        answer = await archives.archive(broker, 2, with_backlog=True)
        assert answer["archived"] == 0
        assert answer["kept"][1].startswith("a lease keeps it"), "its holder reads the bookies"
        await client.ask(c.KeepLedgers, "orders", "spark", 0)
        assert (await archives.archive(broker, 2, with_backlog=True))["archived"] == 2
        for one in (slow, reader):
            one.frame(c.Flow(0, 1, 1000))
            assert await one.received(COUNT) == all_values()
        await slow.ack(*[message.row() for message in slow.messages])
        stats = await client.ask(c.TopicStats, "orders")
        assert stats["subscriptions"]["slow"]["backlog_messages"] == 0


async def test_an_archive_that_cannot_be_read_stops_its_readers_alone_rule_41() -> None:
    archives = MemoryArchives()
    async with broker_with(archives, max_entry_read_attempts=3) as broker:
        client = await published(broker)
        await archives.archive(broker, 1)
        first = broker.topics[str(TOPIC)].ledger.list.archived_ledgers[0].ledger_id
        archives.failing[first] = ArchiveUnavailable("it is not mounted")
        behind = FakeClient(broker)
        await behind.consumer(1, "behind")
        tail = FakeClient(broker)
        await tail.consumer(1, "tail", start=("id", MessageId(first + 1, 0, 0).to_bytes()))
        assert await tail.received(4) == all_values(4)

        async def unreadable() -> list[Any]:
            stats = await client.ask(c.TopicStats, "orders")
            return [list(one.values()) for one in stats["subscriptions"]["behind"]["unreadable_entries"]]

        while not await unreadable():
            await asyncio.sleep(0.001)
        ledger, entry, text, attempts = (await unreadable())[0]
        assert (ledger, entry, text) == (first, 0, "it is not mounted")
        assert attempts >= 3
        # Publishing goes on, and so does the subscription once the archive is back.
        answer = await client.producer(2)
        client.publish(b"more", producer_id=2, epoch=answer["epoch"])
        assert (await tail.received(5))[-1] == b"more"
        assert behind.values == []
        archives.failing.clear()
        assert await behind.received(COUNT + 1) == [*all_values(), b"more"]


@pytest.mark.parametrize(
    ("error", "delivered"),
    [(EntryDamaged("a file is not there"), all_values(4)), (ArchiveUnavailable("not mounted"), [])],
)
async def test_skip_passes_what_is_lost_and_waits_for_what_may_come_back(
    error: Any, delivered: list[bytes]
) -> None:
    archives = MemoryArchives()
    async with broker_with(archives, max_entry_read_attempts=3, unreadable_entry_policy="skip") as broker:
        await published(broker)
        await archives.archive(broker, 1)
        first = broker.topics[str(TOPIC)].ledger.list.archived_ledgers[0].ledger_id
        archives.failing[first] = error
        client = FakeClient(broker)
        await client.consumer(1, "behind")
        subscription = broker.topics[str(TOPIC)].subscriptions["behind"]
        while len(archives.reads) < 20 and subscription.dispatcher.skipped_entries < 2:
            await asyncio.sleep(0.001)
        await client.received(len(delivered))
        assert client.values == delivered
        assert subscription.dispatcher.skipped_entries == (2 if delivered else 0)


async def test_a_start_that_has_to_read_a_hung_archive_holds_up_nobody_else() -> None:
    archives = MemoryArchives()
    async with broker_with(archives) as broker:
        await published(broker)
        await archives.archive(broker, 1)
        archives.gate = asyncio.Event()
        waiting, other = FakeClient(broker), FakeClient(broker)
        hung = asyncio.ensure_future(waiting.consumer(1, "from-a-time", start=("time", 2)))
        while not archives.reads:
            await asyncio.sleep(0)
        await other.consumer(1, "tail", start=("latest", None))
        assert await other.ask(c.TopicStats, "orders")
        assert not hung.done()
        # A client that leaves meanwhile leaves nothing behind.
        gone = FakeClient(broker)
        left = asyncio.ensure_future(gone.consumer(1, "gone", start=("time", 2)))
        await settle()
        gone.handler.connection_closed(None)
        archives.gate.set()
        await hung
        assert await waiting.received(COUNT - 2) == all_values(2)
        await settle()
        left.cancel()
        assert not broker.topics[str(TOPIC)].subscriptions.get("gone") or (
            not broker.topics[str(TOPIC)].subscriptions["gone"].consumers
        )


async def test_a_broker_without_a_reader_says_so() -> None:
    async with broker_with(None) as broker:  # type: ignore[arg-type]
        await published(broker)
        archives = MemoryArchives()
        await archives.archive(broker, 1)
        client = FakeClient(broker)
        with pytest.raises(
            ArchiveUnavailable, match=r"is archived at memory://archive, and this broker has no reader"
        ):
            await client.ask(c.Subscribe, 1, "orders", "s", start=("time", 2))


async def test_holes_between_archived_ledgers_are_passed_over() -> None:
    """Ledgers that were trimmed before they could be archived."""
    archives = MemoryArchives()
    async with broker_with(archives, max_ledger_entries=1) as broker:
        client = await published(broker)
        before = figures(await consumed(broker))
        await archives.archive(broker, 1)
        await client.consumer(1, "all", start=("id", MessageId(*before[2][1]).to_bytes()))
        await client.received(COUNT - 2)
        await client.ack(client.messages[0].row(), client.messages[1].row())
        await settle()
        topic = broker.topics[str(TOPIC)]
        topic.maintain()
        await topic.maintenance.trimmed()
        assert figures(await consumed(broker)) == before[:2] + before[4:]
        await client.ack(*[message.row() for message in client.messages[2:4]])
        await archives.archive(broker, 1)
        assert figures(await consumed(broker)) == before[:2] + before[4:]
        inside = ("id", MessageId(*before[2][1]).to_bytes())
        assert figures(await consumed(broker, start=inside)) == before[4:]
