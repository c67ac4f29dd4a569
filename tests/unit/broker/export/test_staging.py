"""Staged ledgers: made, written by a task through the broker's compare-and-set, kept, discarded, swept."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgpack
import pytest

from magnetar.broker.log.records import StagedRecord
from magnetar.ledger import LedgerClient, LedgerMetadata, LedgerState
from magnetar.metadata.ledgers import ledger_path
from magnetar.proto import commands as c
from magnetar.proto.errors import (
    BookieUnavailable,
    InvalidArgument,
    LedgerClosed,
    LedgerNotFound,
    NotEnoughBookies,
    TooManyRequests,
    TopicNotFound,
    VersionConflict,
)
from support.bookies import Bookies
from support.broker_kit import TOPIC, FakeClient, settle
from support.export_kit import (
    Job,
    appended,
    crash,
    export_broker,
    read_all,
    staged_nodes,
    stored_ledgers,
)
from support.virtual_time import in_virtual_time


def staging(broker: Any) -> Any:
    return broker.topics[str(TOPIC)].export.staging


async def test_a_task_is_told_all_that_it_needs(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers) as broker:
        client = FakeClient(broker)
        made = await client.ask(c.CreateStagedLedger, "orders", "t")
        metadata = LedgerMetadata.decode(made["metadata"], made["ledger"])
        assert metadata.state is LedgerState.OPEN
        (bookie,) = metadata.last_ensemble.bookies
        assert made["bookies"] == {bookie: "127.0.0.1:3181"}
        assert made["writable"] == [
            ["b1", "127.0.0.1:3181", "", "", ""],
            ["b2", "127.0.0.1:3181", "", "", ""],
        ]
        assert await client.ask(c.GetLedgerMetadata, "orders", made["ledger"]) == made
        assert await client.ask(c.QueryState, "orders", "q") == {"batch": -1}


async def test_a_bookie_that_fails_is_replaced_by_the_task(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        writer = await job.open()
        metadata = LedgerMetadata.decode(
            (await job.client.ask(c.GetLedgerMetadata, "orders", writer.ledger_id))["metadata"], 0
        )
        (bad,) = metadata.last_ensemble.bookies
        bookies[bad].fail(BookieUnavailable("down"))
        from magnetar.proto.batch import encode_batch
        from magnetar.proto.entry import encode_entry

        batch = encode_batch([b"a"], sequence_id=0, publish_time_ms=5)
        await appended(writer, encode_entry([batch], [1], [0], ["task"], first_index=0, append_time_ms=5))
        await writer.close()
        bookies[bad].fail(None)
        assert (await job.attach(0, [writer.ledger_id, 1, 5, 5]))["attached"]
        assert await read_all(broker, 1) == [b"a"]


async def test_metadata_is_compared_and_set(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers) as broker:
        client = FakeClient(broker)
        made = await client.ask(c.CreateStagedLedger, "orders", "t")
        ledger, version = made["ledger"], made["version"]
        metadata = LedgerMetadata.decode(made["metadata"], ledger)
        changed = metadata.with_ensemble(0, ("b1",) if metadata.last_ensemble.bookies == ("b2",) else ("b2",))

        def put(value: bytes, at: int, of: int = ledger) -> Any:
            return client.ask(c.PutLedgerMetadata, "orders", of, at, payload=value)

        assert await put(changed.encode(), version) == {"version": version + 1}
        assert await put(changed.encode(), version) == {"version": version + 1}, "the answer was lost"
        with pytest.raises(VersionConflict):
            await put(metadata.encode(), version)
        for value in (b"", b"\x80", b"noise", made["metadata"][:-5]):
            with pytest.raises(InvalidArgument, match="not metadata"):
                await put(value, version + 1)
        larger = dataclasses.replace(
            metadata, ensemble_size=2, ensembles=(type(metadata.last_ensemble)(0, ("b1", "b2")),)
        )
        with pytest.raises(InvalidArgument, match="quorums"):
            await put(larger.encode(), version + 1)
        closed = changed.close(-1, 0)
        assert await put(closed.encode(), version + 1) == {"version": version + 2}
        with pytest.raises(LedgerClosed):
            await put(changed.encode(), version + 2)
        with pytest.raises(InvalidArgument, match="not staged"):
            await put(closed.encode(), 0, ledger + 1)
        await client.ask(c.AttachLedgers, "orders", "q", 0, payload=msgpack.packb([[ledger, 0, 0, 0]]))
        with pytest.raises(InvalidArgument, match="not staged"):
            await put(closed.encode(), version + 2)


async def test_ledgers_of_the_topic_cannot_be_written(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers) as broker:
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"a")
        await client.confirmed(1)
        ledger = client.receipts[0][2]
        found = await client.ask(c.GetLedgerMetadata, "orders", ledger)
        closed = LedgerMetadata.decode(found["metadata"], ledger).close(0, 1)
        with pytest.raises(InvalidArgument, match="not staged"):
            await client.ask(c.PutLedgerMetadata, "orders", ledger, found["version"], payload=closed.encode())
        # Nor those of another topic, be they staged there.
        other = await client.ask(c.CreateStagedLedger, "other", "t")
        for command in (c.GetLedgerMetadata, c.PutLedgerMetadata):
            fields = (other["ledger"],) if command is c.GetLedgerMetadata else (other["ledger"], 0)
            with pytest.raises(InvalidArgument, match="not staged"):
                await client.ask(command, "orders", *fields)
        assert await client.ask(
            c.DiscardStaged, "orders", "t", payload=msgpack.packb([other["ledger"], ledger])
        ) == {"discarded": 0}


async def test_discarding(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        kept = await job.stage([b"kept"], transaction="other")
        rows = [await job.stage([b"x"]) for _ in range(3)]
        ids = msgpack.packb([rows[0][0], kept[0], 77, rows[0][0]])
        assert await job.client.ask(c.DiscardStaged, "orders", "t", payload=ids) == {"discarded": 1}
        assert sorted(await stored_ledgers(bookies)) == sorted([kept[0], rows[1][0], rows[2][0]])
        assert await job.client.ask(c.DiscardStaged, "orders", "t") == {"discarded": 2}
        assert await job.client.ask(c.DiscardStaged, "orders", "t") == {"discarded": 0}
        assert await job.client.ask(c.DiscardStaged, "orders", "unknown") == {"discarded": 0}
        await settle()
        assert await stored_ledgers(bookies) == await staged_nodes(bookies) == [kept[0]]
        assert staging(broker)._transactions.keys() == {"other"}
        for payload in (b"x", msgpack.packb("t"), msgpack.packb([-1, "a"])):
            with pytest.raises(InvalidArgument, match="msgpack"):
                await job.client.ask(c.DiscardStaged, "orders", "t", payload=payload)
        for name in ("", "x" * 256):
            with pytest.raises(InvalidArgument, match="transaction"):
                await job.client.ask(c.CreateStagedLedger, "orders", name)
        # A late task of a transaction that is gone learns it, and does not bring its ledger back.
        with pytest.raises(InvalidArgument, match="not staged"):
            await job.client.ask(c.GetLedgerMetadata, "orders", rows[1][0])


async def test_a_ledger_that_is_being_made_is_discarded_once_it_is_made(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with export_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        await job.client.ask(c.CreateTopic, "orders")
        making = job.client.ask(c.CreateStagedLedger, "orders", "t")
        await asyncio.sleep(0)
        assert await job.client.ask(c.DiscardStaged, "orders", "t") == {"discarded": 1}
        await making
        await settle()
        assert await stored_ledgers(bookies) == []
        assert await staged_nodes(bookies) == []


@in_virtual_time
async def test_the_time_of_a_transaction_is_known_to_the_next_owner() -> None:
    bookies = Bookies("b1", "b2")
    ledgers = bookies.client()
    settings = {"staged_ttl_ms": 60_000, "max_staged_ttl_ms": 300_000}
    async with export_broker(bookies, ledgers, **settings) as broker:
        job = Job(bookies, broker)
        with pytest.raises(InvalidArgument):
            await job.client.ask(c.CreateStagedLedger, "orders", "long", -1)
        await job.client.ask(c.CreateStagedLedger, "orders", "long", 1 << 40)
        await job.client.ask(c.CreateStagedLedger, "orders", "long")
        await job.client.ask(c.CreateStagedLedger, "orders", "short")
        await crash(broker)
    async with export_broker(bookies, ledgers, **settings) as broker:
        await broker.topic(TOPIC, create=False)
        for seconds, left in ((59, 3), (2, 2), (238, 2), (2, 0)):
            await asyncio.sleep(seconds)
            broker.topics[str(TOPIC)].maintain()
            await settle()
            assert len(await staged_nodes(bookies)) == left
    await ledgers.close()


@in_virtual_time
async def test_transactions_are_swept_unless_they_are_heard_of() -> None:
    bookies = Bookies("b1", "b2")
    ledgers = bookies.client()
    settings = {"staged_ttl_ms": 60_000, "max_staged_ttl_ms": 300_000}
    async with export_broker(bookies, ledgers, **settings) as broker:
        job = Job(bookies, broker)
        dead = await job.stage([b"x"], transaction="dead")
        alive = await job.stage([b"y"], transaction="alive")
        answer = await job.client.ask(c.KeepStaged, "orders", "alive", 1 << 40)
        assert answer == {"ttl_ms": 300_000, "ledgers": 1}, "the writer sets the time, up to a bound"
        assert await job.client.ask(c.KeepStaged, "orders", "unknown") == {"ttl_ms": 60_000, "ledgers": 0}
        with pytest.raises(InvalidArgument):
            await job.client.ask(c.KeepStaged, "orders", "alive", -1)
        topic = broker.topics[str(TOPIC)]
        requests: list[tuple[type[c.Command], Any]] = [
            (c.KeepStaged, "alive"),
            (c.GetLedgerMetadata, alive[0]),
            (c.CreateStagedLedger, "alive"),
        ]
        await asyncio.sleep(299)
        topic.maintain()
        await settle()
        assert alive[0] in await stored_ledgers(bookies)
        for command, field in requests:
            await job.client.ask(command, "orders", field)
            await asyncio.sleep(59)
            topic.maintain()
            await settle()
            assert alive[0] in await stored_ledgers(bookies), command
        assert dead[0] not in await stored_ledgers(bookies)
        with pytest.raises(InvalidArgument, match="staged_ttl_ms"):
            await job.attach(0, dead)
        assert (await job.attach(0, alive))["attached"]
    await ledgers.close()


async def test_orphans_of_a_dead_broker_are_found_although_nobody_asks_for_the_topic(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with export_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        await job.stage([b"x"])
        await job.client.ask(c.CreateTopic, "untouched")
        await crash(broker)
    async with export_broker(bookies, ledgers, maintenance_interval_s=0.01, staged_ttl_ms=30) as broker:
        async with asyncio.timeout(5):
            while await stored_ledgers(bookies) or await staged_nodes(bookies):
                await asyncio.sleep(0.01)
        assert list(broker.topics) == [str(TOPIC)], "only the topic that has staged ledgers is loaded"


async def test_staged_ledgers_are_bounded_and_failures_to_make_them_are_swept(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with export_broker(bookies, ledgers, max_staged_ledgers=2) as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateStagedLedger, "orders", "t")
        await client.ask(c.CreateStagedLedger, "orders", "u")
        with pytest.raises(TooManyRequests, match="max_staged_ledgers"):
            await client.ask(c.CreateStagedLedger, "orders", "t")
        await client.ask(c.DiscardStaged, "orders", "t")
        await client.ask(c.CreateStagedLedger, "orders", "t")
    async with export_broker(bookies, ledgers, ensemble_size=3, write_quorum=3, ack_quorum=2) as broker:
        client = FakeClient(broker)
        with pytest.raises(NotEnoughBookies):
            await client.ask(c.CreateStagedLedger, "orders", "v")
        assert len(await staged_nodes(bookies)) == 3
        for transaction in ("t", "u", "v"):
            assert await client.ask(c.DiscardStaged, "orders", transaction) == {"discarded": 1}
        await settle()
        assert await staged_nodes(bookies) == []


async def test_deleting_a_topic_takes_staged_ledgers_along(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        await job.stage([b"x"])
        making = job.client.ask(c.CreateStagedLedger, "orders", "t")
        await asyncio.sleep(0)
        await job.client.ask(c.DeleteTopic, "orders")
        await asyncio.wait([making])
        assert await stored_ledgers(bookies) == []
        assert await bookies.metadata.children("/topics/public/default/persistent") == []
        with pytest.raises(TopicNotFound):
            await job.client.ask(c.DiscardStaged, "orders", "t")


async def test_a_node_of_an_attached_ledger_means_nothing(bookies: Bookies, ledgers: LedgerClient) -> None:
    """A crash before the node was deleted: the next owner goes by the list, also when it sweeps."""
    async with export_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        row = await job.stage([b"x"])
        path = f"/topics/public/default/persistent/orders/staged/{row[0]:020d}"
        node = await bookies.metadata.get(path)
        assert node is not None
        await job.attach(0, row)
        await settle()
        await bookies.metadata.create(path, node.value)
        damaged = path[:-20] + f"{99:020d}"
        await bookies.metadata.create(damaged, b"noise")
        impossible = StagedRecord("u", 5, -1).encode()
        await bookies.metadata.create(path[:-20] + f"{98:020d}", impossible)
    async with export_broker(bookies, ledgers) as broker:
        await broker.topic(TOPIC, create=False)
        await settle()
        assert row[0] not in staging(broker)
        assert sorted(await staged_nodes(bookies)) == [98, 99]
        # Even if it were taken for staged.
        staging(broker)._register(row[0], "t", 0)
        client = FakeClient(broker)
        assert await client.ask(c.DiscardStaged, "orders", "t") == {"discarded": 0}
        with pytest.raises(InvalidArgument):
            await Job(bookies, broker).attach(1, row)
        assert await read_all(broker, 1) == [b"x"]
        for transaction in staging(broker)._transactions.values():
            transaction.expires_at = 0
        await staging(broker).sweep()
        await settle()
        assert await staged_nodes(bookies) == []
        assert await stored_ledgers(bookies) == [row[0]]


async def test_a_ledger_whose_metadata_is_gone(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        row = await job.stage([b"x"])
        await bookies.metadata.delete(ledger_path(row[0]))
        with pytest.raises(LedgerNotFound):
            await job.client.ask(c.GetLedgerMetadata, "orders", row[0])
        with pytest.raises(LedgerNotFound):
            await job.attach(0, row)
        assert await job.client.ask(c.DiscardStaged, "orders", "t") == {"discarded": 1}
