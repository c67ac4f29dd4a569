"""Readers of an open ledger whose writer changes bookies under them."""

import asyncio

import pytest

from magnetar.ledger import LedgerSettings
from magnetar.proto.errors import BookieUnavailable, LedgerNotFound
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from support.bookies import Bookies, Confirmations

NO_LAC = LedgerSettings(explicit_lac_interval_s=0)
DOWN = BookieUnavailable("down")


@pytest.mark.parametrize("back", [False, True])
async def test_a_confirmed_entry_on_bookies_that_the_reader_does_not_know_yet(back: bool) -> None:
    """Striped: the bookie that stayed tells of entries that only the new ones have. They did not exist, said the reader."""
    bookies = Bookies("b1", "b2", "b3", "b4", "b5")
    client, other = bookies.client(NO_LAC), bookies.client(NO_LAC)
    writer = await client.create(ensemble_size=3, write_quorum=2, ack_quorum=2)
    heard = Confirmations()
    for n in range(3):
        writer.append(b"%d" % n, heard)
        await heard.count(n + 1)
    reader = await other.open(writer.ledger_id, recover=False)
    stays, *leave = writer.metadata.last_ensemble.bookies
    for name in leave:
        bookies[name].fail(DOWN)
    for n in range(3, 9):
        writer.append(b"%d" % n, heard)
        await heard.count(n + 1)
    for name in leave:
        bookies[name].fail(None if back else DOWN)
    told = (await bookies[stays].read_last_confirmed(writer.ledger_id, fence=False))[0]
    assert told >= 4
    # What a poll, or an answer that was on its way during the change, says.
    reader.told_confirmed(told)
    entries = await reader.read(3, told)
    assert [entry[LEDGER_ENTRY_HEADER_BYTES:] for entry in entries] == [b"%d" % n for n in range(3, told + 1)]
    await client.close()
    await other.close()


async def test_a_ledger_that_is_deleted_under_its_reader() -> None:
    bookies = Bookies("b1", "b2", "b3")
    client, other = bookies.client(NO_LAC), bookies.client(NO_LAC)
    writer = await client.create()
    heard = Confirmations()
    for n in range(3):
        writer.append(b"%d" % n, heard)
        await heard.count(n + 1)
    reader = await other.open(writer.ledger_id, recover=False)
    await client.delete(writer.ledger_id)
    while any(bookie.entries for bookie in bookies.values()):
        await asyncio.sleep(0)
    with pytest.raises(LedgerNotFound):
        await reader.read(0, 0)
    with pytest.raises(LedgerNotFound):
        await reader.read_last_confirmed()
    await client.close()
    await other.close()
