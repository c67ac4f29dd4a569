"""Rule 38: a deletion is done when every bookie did it; nothing leaks because one was away."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from magnetar.bookie import Bookie
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import LedgerNotFound
from support.bookies import Confirmations
from support.identity_kit import Client, Fleet

COUNT = 8


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(tmp_path, "b1", "b2", "b3") as fleet:
        yield fleet


async def write(client: Client) -> int:
    writer = await client.ledgers.create()
    confirmed = Confirmations()
    for _ in range(6):
        writer.append(b"payload", confirmed)
    await confirmed.count(6)
    await writer.close()
    return writer.ledger_id


def alive(bookie: Bookie) -> list[int]:
    return [ledger.ledger_id for ledger in bookie.list_ledgers()[0] if not ledger.deleted]


async def notes(fleet: Fleet) -> list[str]:
    ledgers = StoredLedgers(fleet.metadata)
    return [
        f"{bookie}/{ledger_id}"
        for bookie in await ledgers.bookies_to_delete()
        for ledger_id in await ledgers.noted_deletions(bookie, limit=1000)
    ]


async def gone(fleet: Fleet) -> None:
    """No bookie has anything, and no note is left."""
    async with asyncio.timeout(20):
        while any(map(alive, fleet.bookies.values())) or await notes(fleet):
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("broker", ["the same", "a new"])
async def test_rule_38_what_was_deleted_while_a_bookie_was_down_goes_when_it_is_back(
    fleet: Fleet, broker: str
) -> None:
    client = await fleet.client()
    ledgers = [await write(client) for _ in range(COUNT)]
    await fleet.stop("b2")
    for ledger_id in ledgers:
        await client.ledgers.delete(ledger_id)
    async with asyncio.timeout(20):
        while alive(fleet.bookies["b1"]) or alive(fleet.bookies["b3"]):
            await asyncio.sleep(0.005)
    if broker == "a new":
        await client.close()
        client = await fleet.client()
    assert [note for note in await notes(fleet) if note.startswith("b2/")] == [f"b2/{n}" for n in ledgers]
    bookie = await fleet.start("b2")
    assert alive(bookie) == ledgers
    await gone(fleet)


async def test_rule_38_a_broker_that_is_killed_right_after_the_metadata_went(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await fleet.client()
    ledgers = [await write(first) for _ in range(COUNT)]

    async def never(bookie: str, ledger_id: int) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(first.transport, "delete_ledger", never)
    for ledger_id in ledgers:
        await first.ledgers.delete(ledger_id)
    await first.close()
    assert len(await notes(fleet)) == 3 * COUNT
    await fleet.client()
    await gone(fleet)


async def test_no_note_is_left_of_deletions_that_all_took(fleet: Fleet) -> None:
    client = await fleet.client()
    for ledger_id in [await write(client) for _ in range(COUNT)]:
        await client.ledgers.delete(ledger_id)
        with pytest.raises(LedgerNotFound):
            await client.ledgers.delete(ledger_id)
    await gone(fleet)


async def test_more_deletions_than_are_sent_at_a_time(fleet: Fleet) -> None:
    client = await fleet.client()
    ledgers = [await write(client) for _ in range(80)]
    for ledger_id in ledgers:
        await client.ledgers.delete(ledger_id)
    await gone(fleet)
