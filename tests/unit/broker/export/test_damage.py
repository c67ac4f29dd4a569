"""ReportDamage: what an audit found comes into the repair queue, if it can be true, and nothing else does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgpack
import pytest

from magnetar.broker import Broker
from magnetar.ledger import LedgerClient
from magnetar.metadata.damage import add_ranges, damaged_path, decode_ranges
from magnetar.metadata.ledgers import ledger_path
from magnetar.proto import commands as c
from magnetar.proto.errors import (
    ConnectionLost,
    DataDirectoryError,
    InvalidArgument,
    LedgerNotFound,
    MagnetarError,
    NotAuthorized,
    TopicNotFound,
)
from support.bookies import Bookies
from support.broker_kit import FakeClient
from support.export_kit import Job, export_broker


@pytest.fixture
async def broker(bookies: Bookies, ledgers: LedgerClient) -> AsyncIterator[Broker]:
    async with export_broker(bookies, ledgers, max_ledger_entries=3, ensemble_size=1) as broker:
        yield broker


@pytest.fixture
async def client(broker: Broker) -> FakeClient:
    """Of a broker whose topic has closed ledgers of three entries, an open one with one, and an attached one."""
    client = FakeClient(broker)
    await client.producer()
    for number in range(7):
        client.publish(b"%d" % number, first=number)
        await client.confirmed(number + 1)
    return client


async def rows_of(client: FakeClient) -> list[Any]:
    return list((await client.ask(c.TopicLedgers, "orders"))["ledgers"])


async def holder(bookies: Bookies, stored_id: int) -> str:
    """The one bookie of a ledger with one replica."""
    stored = await bookies.metadata.get(ledger_path(stored_id))
    assert stored is not None
    ((_, names),) = msgpack.unpackb(stored.value)["ensembles"]
    return str(names[0])


def report(client: FakeClient, *rows: list[Any], **named: Any) -> Any:
    return client.ask(c.ReportDamage, "orders", payload=msgpack.packb(rows), **named)


async def queue(bookies: Bookies) -> dict[tuple[str, int], Any]:
    found = {}
    for bookie in await bookies.metadata.children("/damaged"):
        for name in await bookies.metadata.children(f"/damaged/{bookie}"):
            node = await bookies.metadata.get(damaged_path(bookie, int(name)))
            assert node is not None
            found[bookie, int(name)] = decode_ranges(node.value)
    return found


async def test_what_an_audit_found_is_merged_with_what_the_bookie_found(
    bookies: Bookies, client: FakeClient
) -> None:
    closed, _, opened = [row[1] for row in await rows_of(client)]
    first, last = await holder(bookies, closed), await holder(bookies, opened)
    await add_ranges(bookies.metadata, first, closed, [(0, 0, "bits")])
    answer = await report(
        client, [closed, first, 1, 1, "missing"], [opened, last, 0, 0, "differs"], [closed, first, 2, 2, "x"]
    )
    assert answer == {"queued": 2, "known": 0}
    expected = {(first, closed): [(0, 2, "bits")], (last, opened): [(0, 0, "differs")]}
    assert await queue(bookies) == expected
    # The next audit finds the same: nothing is written for it.
    assert await report(client, [closed, first, 1, 2, "missing"]) == {"queued": 0, "known": 1}
    assert await report(client) == {"queued": 0, "known": 0}
    assert await queue(bookies) == expected


async def test_an_attached_ledger_goes_by_its_stored_id(
    bookies: Bookies, broker: Broker, client: FakeClient
) -> None:
    job = Job(bookies, broker)
    staged = await job.stage([b"x", b"y"])
    bookie = await holder(bookies, staged[0])
    with pytest.raises(LedgerNotFound, match="is not one of topic"):  # staged is not yet the topic's
        await report(client, [staged[0], bookie, 0, 0, "missing"])
    await job.attach(0, staged)
    row = next(row for row in await rows_of(client) if row[1] == staged[0])
    assert row[0] != row[1]
    with pytest.raises(LedgerNotFound):
        await report(client, [row[0], bookie, 0, 0, "missing"])
    assert await report(client, [row[1], bookie, 0, 0, "missing"]) == {"queued": 1, "known": 0}
    await job.close()


async def test_what_cannot_be_true_is_refused_as_a_whole(bookies: Bookies, client: FakeClient) -> None:
    closed, _, opened = [row[1] for row in await rows_of(client)]
    bookie, last = await holder(bookies, closed), await holder(bookies, opened)
    other = "b2" if bookie == "b1" else "b1"
    good = [closed, bookie, 0, 0, "missing"]
    refused: list[tuple[list[Any], type[MagnetarError], str]] = [
        ([closed + 1000, bookie, 0, 0, ""], LedgerNotFound, "is not one of topic"),
        ([-1, bookie, 0, 0, ""], LedgerNotFound, "is not one of topic"),
        ([closed, other, 0, 0, ""], InvalidArgument, f"bookie '{other}' does not have entry 0"),
        ([closed, bookie, 0, 3, ""], InvalidArgument, "has 3 confirmed entries"),
        ([opened, last, 0, 1, ""], InvalidArgument, "has 1 confirmed entries"),
        ([closed, bookie, 2, 1, ""], InvalidArgument, "are no range"),
        ([closed, bookie, -1, 1, ""], InvalidArgument, "are no range"),
        ([closed, bookie, 0, 0, "x" * 201], InvalidArgument, "not a reason"),
        ([closed, bookie, 0, 0, "a\nb"], InvalidArgument, "not a reason"),
        ([closed, bookie, 0, 0], InvalidArgument, "not a msgpack array"),
        ([closed, 5, 0, 0, ""], InvalidArgument, "not a msgpack array"),
    ]
    for row, kind, told in refused:
        with pytest.raises(kind, match=told):
            await report(client, good, row)
    with pytest.raises(InvalidArgument, match="1001 rows"):
        await report(client, *[good] * 1001)
    with pytest.raises(InvalidArgument, match="not a msgpack array"):
        await client.ask(c.ReportDamage, "orders", payload=b"\xc1")
    with pytest.raises(TopicNotFound):
        await client.ask(c.ReportDamage, "nothing", payload=msgpack.packb([good]))
    client.forbidden = {"report_damage"}
    with pytest.raises(NotAuthorized):
        await report(client, good)
    assert await queue(bookies) == {}


async def test_a_bookie_that_came_by_an_ensemble_change_has_what_came_after_it(
    bookies: Bookies, client: FakeClient
) -> None:
    closed = (await rows_of(client))[0][1]
    bookie = await holder(bookies, closed)
    other = "b2" if bookie == "b1" else "b1"
    stored = await bookies.metadata.get(ledger_path(closed))
    assert stored is not None
    fields = msgpack.unpackb(stored.value)
    fields["ensembles"].append([2, [other]])
    await bookies.metadata.put(ledger_path(closed), msgpack.packb(fields), version=stored.version)
    with pytest.raises(InvalidArgument, match="does not have entry 2"):
        await report(client, [closed, bookie, 0, 2, "missing"])
    with pytest.raises(InvalidArgument, match="does not have entry 1"):
        await report(client, [closed, other, 1, 2, "missing"])
    rows = [closed, bookie, 0, 1, "missing"], [closed, other, 2, 2, "missing"]
    assert await report(client, *rows) == {"queued": 2, "known": 0}


async def test_a_store_that_fails_is_told(
    bookies: Bookies, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = (await rows_of(client))[0][1]
    row = [closed, await holder(bookies, closed), 0, 0, "missing"]
    real = bookies.metadata.create

    async def create(path: str, *arguments: Any, **named: Any) -> int:
        if path.startswith("/damaged"):
            raise ConnectionLost("no")
        return await real(path, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(bookies.metadata, "create", create)
        with pytest.raises(ConnectionLost):
            await report(client, row)
    assert await report(client, row) == {"queued": 1, "known": 0}


async def test_rule_48_a_node_that_cannot_be_read_is_named_and_the_others_are_written(
    bookies: Bookies, client: FakeClient
) -> None:
    closed, second, _ = [row[1] for row in await rows_of(client)]
    first, other = await holder(bookies, closed), await holder(bookies, second)
    path = damaged_path(first, closed)
    await bookies.metadata.create(path, b"\xc1")
    with pytest.raises(DataDirectoryError, match=f"{path} is damaged"):
        await report(client, [closed, first, 1, 1, "missing"], [second, other, 0, 0, "differs"])
    node = await bookies.metadata.get(damaged_path(other, second))
    assert node is not None
    assert decode_ranges(node.value) == [(0, 0, "differs")]
