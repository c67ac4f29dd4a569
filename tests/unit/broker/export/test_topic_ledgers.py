"""TopicLedgers: rows, pages, the confirmed end, bookies; and reading a topic at the bookies by them alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from magnetar.broker.export.ledgers import MAX_LEDGERS_PER_PAGE, topic_ledgers
from magnetar.broker.listeners.native.requests import to_wire
from magnetar.broker.log.ledger_list import LedgerList
from magnetar.broker.log.records import LedgerInfo
from magnetar.ledger import LedgerClient, LedgerMetadata, StaticBookies
from magnetar.ledger.core.quorum import Striping
from magnetar.metadata.ledgers import ledger_path
from magnetar.proto import commands as c
from magnetar.proto.batch import decode_batch
from magnetar.proto.entry import Entry
from magnetar.proto.errors import InvalidArgument, TopicNotFound
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from support.bookies import Bookies
from support.broker_kit import TOPIC, FakeClient, FakeClock, settle
from support.export_kit import Job, export_broker
from support.memory_metadata import MemoryMetadataStore


async def read_directly(bookies: Bookies, answer: dict[str, Any]) -> list[bytes]:
    """As a Spark task would: nothing but the rows, and bookies."""
    values: list[bytes] = []
    for _, stored_id, _, entries, messages, _, _, _, closed, encoded in answer["ledgers"]:
        metadata = LedgerMetadata.decode(encoded, stored_id)
        assert metadata.closed == closed
        found = 0
        for entry_id in range(entries):
            (bookie, *_) = metadata.ensemble_of(entry_id).bookies
            assert answer["bookies"][bookie] == "127.0.0.1:3181"
            assert answer["identities"][bookie] == [1, bookie, 2, 3, 4]
            (data,), _ = await bookies[bookie].read(stored_id, entry_id, entry_id, max_bytes=0, fence=False)
            entry = Entry(data, LEDGER_ENTRY_HEADER_BYTES)
            assert entry.first_index == found
            found += entry.message_count
            for position in range(entry.batch_count):
                values += [value for value in decode_batch(bytes(entry.batch(position))).values if value]
        assert found == messages
    return values


async def test_a_topic_is_read_at_the_bookies_up_to_what_is_confirmed(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with export_broker(bookies, ledgers, max_ledger_entries=2) as broker:
        client = FakeClient(broker)
        await client.producer()
        for number in range(5):
            client.publish(b"%d" % number, first=number)
            await client.confirmed(number + 1)
        job = Job(bookies, broker)
        await job.attach(0, await job.stage([b"x", b"y"]))
        client.publish(b"5", first=5)
        await client.confirmed(6)
        for bookie in bookies.values():
            bookie.hold_adds()
        client.publish(b"not confirmed", first=6)
        await settle()
        answer = await client.ask(c.TopicLedgers, "orders")
        expected = [b"0", b"1", b"2", b"3", b"4", b"x", b"y", b"5"]
        assert await read_directly(bookies, answer) == expected
        rows = answer["ledgers"]
        assert answer["more"] is False
        assert (answer["end"], answer["end_offset"]) == ([rows[-1][0], 1, 0], 8)
        assert [row[8] for row in rows] == [True, True, True, True, False]
        assert [row[2] for row in rows] == [0, 2, 4, 5, 7]
        attached = rows[3]
        assert attached[1] < attached[0]
        assert attached[6:8] == [1_000_000, 1_000_000], "by the broker's clock: when it was attached"
        # Page by page it is the same.
        paged: list[Any] = []
        after = -1
        while True:
            page = await client.ask(c.TopicLedgers, "orders", after, 2)
            assert len(page["ledgers"]) <= 2
            paged += page["ledgers"]
            if not page["more"]:
                break
            after = paged[-1][0]
        assert paged == rows
        # A task whose copy of the metadata is stale asks again, by the stored id.
        again = await client.ask(c.GetLedgerMetadata, "orders", attached[1])
        assert again["metadata"] == attached[9]
        for bookie in bookies.values():
            bookie.release()
        with pytest.raises(InvalidArgument, match="at least 1"):
            await client.ask(c.TopicLedgers, "orders", -1, 0)
        with pytest.raises(TopicNotFound):
            await client.ask(c.TopicLedgers, "missing")


async def test_an_empty_topic(bookies: Bookies, ledgers: LedgerClient) -> None:
    clock = FakeClock()
    async with export_broker(bookies, ledgers, clock=clock) as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateTopic, "orders")
        answer = await client.ask(c.TopicLedgers, "orders")
        created_ms = answer.pop("created_ms")
        assert answer.pop("identities") == {}
        assert answer == {"ledgers": [], "more": False, "end": [0, 0, 0], "bookies": {}, "end_offset": 0}
        clock.now += 5
        await client.ask(c.DeleteTopic, "orders")
        await client.ask(c.CreateTopic, "orders")
        assert (await client.ask(c.TopicLedgers, "orders"))["created_ms"] > created_ms


async def test_a_list_of_ten_thousand_ledgers_comes_in_pages_that_fit() -> None:
    metadata = MemoryMetadataStore()
    list_ = LedgerList(TOPIC, metadata)
    encoded = LedgerMetadata.create(Striping(3, 3, 2), ("b1", "b2", "b3"), 1_000, {"kind": "topic"}).encode()
    await list_.load(create_ms=1)
    await list_.commit(append=[LedgerInfo(number, number, 1, 1, 1, 1, 1, True) for number in range(10_000)])
    for number in range(10_000):
        await metadata.create(ledger_path(number), encoded)
    bookies = StaticBookies(["b1:1", "b2:1"])
    found: list[int] = []
    after = -1
    while True:
        page = to_wire(await topic_ledgers(list_, metadata, bookies, after=after, count=1 << 40))
        assert len(page["ledgers"]) <= MAX_LEDGERS_PER_PAGE
        found += [row[0] for row in page["ledgers"]]
        if not page["more"]:
            break
        after = found[-1]
    assert found == list(range(10_000))


async def test_pages_are_bounded_in_bytes_and_lost_metadata_is_told() -> None:
    metadata = MemoryMetadataStore()
    list_ = LedgerList(TOPIC, metadata)
    await list_.load(create_ms=1)
    await list_.commit(append=[LedgerInfo(number, number, 1, 1, 1, 1, 1, True) for number in range(4)])
    for number in (0, 2, 3):
        await metadata.create(ledger_path(number), bytes(600_000))
    page = to_wire(await topic_ledgers(list_, metadata, None, after=-1, count=10))
    assert [(row[0], len(row[9])) for row in page["ledgers"]] == [(0, 600_000), (1, 0)]
    assert page["more"]
    assert page["bookies"] == {}
    page = msgspec.to_builtins(
        await topic_ledgers(list_, metadata, StaticBookies(["b1:1"]), after=2, count=10)
    )
    assert [row[0] for row in page["ledgers"]] == [3]
    assert not page["more"]

    class Trimming(MemoryMetadataStore):
        async def get(self, path: str) -> Any:
            if list_.info(2) is not None:
                await list_.commit(trim=3)
            return None

    page = to_wire(await topic_ledgers(list_, Trimming(), None, after=1, count=10))
    assert [row[0] for row in page["ledgers"]] == [3], "a ledger that is trimmed meanwhile is passed over"
