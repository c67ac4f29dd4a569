"""ArchiveLedgers: the beginning of a topic leaves the bookies, and the topic goes on naming it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from magnetar.broker.export.archived import MAX_LEDGERS_PER_ARCHIVING
from magnetar.ledger import LedgerClient
from magnetar.proto import commands as c
from magnetar.proto.errors import InvalidArgument, ServiceNotReady, TopicNotFound
from magnetar.proto.ids import MessageId
from support.bookies import Bookies
from support.broker_kit import TOPIC, FakeClient, settle
from support.export_kit import Job, export_broker, loaded, record_of, stored_ledgers

AT = "file:///mnt/archive"


@pytest.fixture
async def bookies() -> Bookies:
    return Bookies("b1")


async def published(broker: Any, count: int, first: int = 0) -> FakeClient:
    """A message each; brokers of these tests close a ledger after each."""
    client = FakeClient(broker)
    answer = await client.producer()
    for number in range(count):
        client.publish(b"%d" % (first + number), first=number, epoch=answer["epoch"])
        await client.confirmed(number + 1)
    await settle()
    return client


async def rows_of(client: FakeClient) -> list[list[Any]]:
    rows: list[list[Any]] = (await client.ask(c.TopicLedgers, "orders"))["ledgers"]
    return rows


def archive(client: FakeClient, rows: list[list[Any]], at: str = AT, **named: Any) -> Any:
    """As the job does, with rows of TopicLedgers."""
    told = [[row[0], row[1], row[3], row[4]] for row in rows]
    return client.ask(c.ArchiveLedgers, "orders", at, payload=msgpack.packb(told), **named)


async def test_what_is_archived_leaves_the_bookies_and_stays_in_the_list(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with export_broker(bookies, ledgers, max_ledger_entries=1) as broker:
        client = await published(broker, 5)
        before = await rows_of(client)
        stats = await client.ask(c.TopicStats, "orders")
        assert (stats["archived_ledgers"], stats["archive_locations"]) == (0, [])
        dry = await archive(client, before[:3], dry=True)
        assert dry == {"archived": 3, "known": 0, "moved": 0, "gone": [], "kept": None}
        assert await rows_of(client) == before
        assert await archive(client, before[:3]) == dry
        assert not set(await stored_ledgers(bookies)) & {row[1] for row in before[:3]}
        assert broker.topics[str(TOPIC)].ledger.list.record.trimmed == []
        after = await rows_of(client)
        assert after == [[*row[:9], b"", AT] for row in before[:3]] + before[3:]
        # Page by page it is the same, over the border as well.
        paged = [
            row
            for at in range(-1, 5)
            for row in (
                await client.ask(c.TopicLedgers, "orders", ([-1] + [r[0] for r in after])[at + 1], 1)
            )["ledgers"]
        ]
        assert paged == after
        # Done before; the rest later, at another place, together with what is known.
        assert await archive(client, before[:3]) == {
            "archived": 0,
            "known": 3,
            "moved": 0,
            "gone": [],
            "kept": None,
        }
        assert await archive(client, before[3:4], "s3://far/away") == dry | {"archived": 1}
        stats = await client.ask(c.TopicStats, "orders")
        assert stats["archive_locations"] == [AT, "s3://far/away"]
        assert (stats["archived_ledgers"], stats["archived_messages"]) == (4, 4)
        assert stats["archived_bytes"] == sum(row[5] for row in before[:4])
        assert (stats["stored_messages"], stats["stored_bytes"]) == (1, before[4][5])
        # Offsets and ids of what comes later are as they would have been.
        await published(broker, 1, first=5)
        last = [row for row in await rows_of(client) if row[3]][-1]
        assert last[2] == 5
        assert last[0] > before[4][0]


async def test_a_topic_of_which_all_is_archived(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers, max_ledger_entries=1) as broker:
        client = await published(broker, 2)
    async with export_broker(bookies, ledgers, max_ledger_entries=1, max_lease_ms=1) as broker:
        client = FakeClient(broker)
        rows = await rows_of(client)
        await asyncio.sleep(0.002)
        assert (await archive(client, rows))["archived"] == 2
        assert await stored_ledgers(bookies) == []
    async with export_broker(bookies, ledgers, max_ledger_entries=1) as broker:
        client = FakeClient(broker)
        page = await client.ask(c.TopicLedgers, "orders")
        assert page["ledgers"] == [[*row[:9], b"", AT] for row in rows]
        assert page["end"] == [rows[-1][0] + 1, 0, 0]
        assert page["bookies"] == {}
        assert (await client.ask(c.TopicStats, "orders"))["next_index"] == 2
        # Attaching goes on behind it, and appending.
        job = Job(bookies, broker)
        await job.attach(0, await job.stage([b"2"]))
        await published(broker, 1, first=3)
        found = [row for row in await rows_of(client) if row[3]]
        assert [row[2] for row in found] == [0, 1, 2, 3]
        assert [row[0] for row in found] == sorted(row[0] for row in found)
        await client.ask(c.DeleteTopic, "orders", True)
        assert await stored_ledgers(bookies) == []
        with pytest.raises(TopicNotFound):
            await rows_of(client)


async def test_what_somebody_needs_is_kept_with_all_after_it(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers, max_ledger_entries=1) as broker:
        client = await published(broker, 6)
        rows = await rows_of(client)

        async def kept() -> tuple[int, Any]:
            answer = await archive(client, rows[:5], dry=True, lease="mine")
            return answer["archived"], answer["kept"]

        assert await kept() == (5, None)
        # Leases, but not one's own.
        await client.ask(c.KeepLedgers, "orders", "mine", 60_000)
        assert await kept() == (5, None)
        await client.ask(c.KeepLedgers, "orders", "other", 60_000, rows[3][0])
        count, (ledger, reason) = await kept()
        assert (count, ledger) == (3, rows[3][0])
        assert reason.startswith("a lease keeps it, for 60 s")
        await client.ask(c.KeepLedgers, "orders", "other", 0)
        # A durable subscription that has not acknowledged, by its durable mark.
        slow = FakeClient(broker)
        await slow.consumer(1, "slow")
        await slow.received(6)
        count, (ledger, reason) = await kept()
        assert (count, ledger) == (0, rows[0][0])
        assert reason == "subscription 'slow' has not acknowledged all of it"
        await slow.ack(*[message.row() for message in slow.messages[:2]])
        await settle()
        assert (await kept())[0] == 2
        # One whose cursor cannot be read: where it stands is not known.
        unavailable = loaded(broker).subscriptions.recovery.unavailable
        unavailable["lost"] = ServiceNotReady("its bookies are away")
        count, (ledger, reason) = await kept()
        assert (count, ledger, reason) == (0, rows[0][0], "where subscription 'lost' stands cannot be read")
        unavailable.clear()
        # A reader that waits for permits.
        await client.consumer(7, "", durable=False, permits=0)
        count, (ledger, reason) = await kept()
        assert (count, ledger, reason) == (0, rows[0][0], "'reader-1' is reading it")
        client.frame(c.Flow(0, 7, 1000))
        await settle()
        assert (await kept())[0] == 2
        answer = await archive(client, rows[:5], lease="mine")
        assert (answer["archived"], answer["kept"][0]) == (2, rows[2][0])
        assert (await record_of(bookies)).archives == [(AT, rows[1][0])]
        await slow.ask(c.DeleteSubscription, "orders", "slow", True)
        assert (await archive(client, rows[:5], lease="mine"))["archived"] == 3


async def test_only_the_beginning_is_archived(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers, max_ledger_entries=1) as broker:
        client = await published(broker, 4)
        rows = await rows_of(client)
        answer = await archive(client, rows[1:3])
        assert answer["archived"] == 0
        assert answer["kept"][0] == rows[0][0]
        assert answer["kept"][1].startswith("it is older than those")
        answer = await archive(client, [rows[0], rows[2]])
        assert (answer["archived"], answer["kept"][0]) == (1, rows[1][0])
        assert await archive(client, []) == {"archived": 0, "known": 0, "moved": 0, "gone": [], "kept": None}


async def test_what_was_trimmed_before_is_told(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers, max_ledger_entries=1) as broker:
        client = await published(broker, 4)
        rows = await rows_of(client)
        await archive(client, rows[:1])
        await client.consumer(start=("id", MessageId(rows[1][0], 0, 0).to_bytes()))
        await client.received(3)
        await client.ack(client.messages[0].row())
        await settle()
        topic = broker.topics[str(TOPIC)]
        topic.maintain()
        await topic.maintenance.trimmed()
        # Trimming takes what is at the bookies, and leaves what is archived.
        assert [row[0] for row in await rows_of(client)][:3] == [rows[0][0], rows[2][0], rows[3][0]]
        await client.ack(client.messages[1].row())
        await settle()
        answer = await archive(client, rows[:3])
        assert answer == {"archived": 1, "known": 1, "moved": 0, "gone": [rows[1][0]], "kept": None}
        assert [row[0] for row in await rows_of(client)][:3] == [rows[0][0], rows[2][0], rows[3][0]]


async def test_a_broker_that_took_over_waits_for_leases(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers, max_ledger_entries=1) as broker:
        await published(broker, 2)
    async with export_broker(bookies, ledgers, max_ledger_entries=1, max_lease_ms=5_000) as broker:
        client = FakeClient(broker)
        rows = await rows_of(client)
        answer = await archive(client, rows[:1])
        assert answer["archived"] == 0
        assert answer["kept"] == [
            rows[0][0],
            "the topic came from another broker, and who holds leases on it is known in 5 s",
        ]


async def test_ledgers_that_are_not_what_was_archived_are_refused(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with export_broker(bookies, ledgers, max_ledger_entries=2) as broker:
        client = await published(broker, 5)
        rows = await rows_of(client)
        good = [rows[0][0], rows[0][1], 2, 2]
        for payload, at, match in (
            ([[rows[0][0], 99, 2, 2]], AT, "is not what was archived"),
            ([[rows[0][0], rows[0][1], 1, 2]], AT, "is not what was archived"),
            ([[rows[0][0], rows[0][1], 2, 3]], AT, "is not what was archived"),
            ([good, good], AT, "does not come after"),
            ([[rows[2][0], rows[2][1], 1, 1]], AT, "is open"),
            ([["x"]], AT, "not a msgpack array"),
            ([good], "/mnt/archive", "want a URI"),
            ([good], "", "want a URI"),
            ([good], "s3://" + "x" * 1100, "want a URI"),
            ([[n, n, 1, 1] for n in range(MAX_LEDGERS_PER_ARCHIVING + 1)], AT, "at most"),
        ):
            with pytest.raises(InvalidArgument, match=match):
                await client.ask(c.ArchiveLedgers, "orders", at, payload=msgpack.packb(payload))
        assert (await record_of(bookies)).archives == []
        await archive(client, rows[:1])
        with pytest.raises(InvalidArgument, match=f"archived already, at {AT}"):
            await archive(client, rows[:2], "file:///elsewhere")
        # Unless it was moved there; nothing but the location changes, and what was not asked for stays where it is.
        await archive(client, rows[1:2])
        moved = await archive(client, rows[:1], "s3://new", moved=True, dry=True)
        assert moved == {"archived": 0, "known": 0, "moved": 1, "gone": [], "kept": None}
        before = await rows_of(client)
        assert await archive(client, rows[:1], "s3://new", moved=True) == moved
        after = await rows_of(client)
        assert after == [[*before[0][:10], "s3://new"], *before[1:]]
        assert [one.location for one in (await record_of(bookies)).archives] == ["s3://new", AT]
        assert (await archive(client, rows[:1], "s3://new", moved=True))["known"] == 1
        with pytest.raises(TopicNotFound):
            await client.ask(c.ArchiveLedgers, "missing", AT, payload=msgpack.packb([]))


async def test_a_new_lease_waits_for_an_archiving_that_does_not_heed_it(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    gate = asyncio.Event()

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(bookies.metadata, name)

        async def put(self, path: str, value: bytes, *, version: int) -> int:
            if path.startswith("/topics") and armed:
                await gate.wait()
            return await bookies.metadata.put(path, value, version=version)

    armed = False
    async with export_broker(bookies, ledgers, Slow(), max_ledger_entries=1) as broker:
        client = await published(broker, 3)
        rows = await rows_of(client)
        armed = True
        archiving = archive(client, rows[:2])
        await settle()
        lease = client.ask(c.KeepLedgers, "orders", "late", 60_000)
        await settle()
        assert not lease.done()
        # A client that goes away meanwhile does not leave it half done.
        client.handler.connection_closed(None)
        gate.set()
        await settle()
        assert not archiving.done(), "nobody is there to be answered"
        other = FakeClient(broker)
        assert [len(row) for row in await rows_of(other)][:2] == [11, 11]
        assert (await other.ask(c.KeepLedgers, "orders", "late", 60_000))["first"] == rows[2][0]
