"""Rule 19 and its price: an idle writer tells its last entry, one that appends tells with its entries."""

import asyncio

from magnetar.ledger import LedgerSettings
from magnetar.proto.errors import LedgerFenced, LedgerNotFound
from support.bookies import Bookies, Confirmations, FakeBookie
from support.sim import SimLoop
from support.virtual_time import in_virtual_time

INTERVAL_S = 0.2
SETTINGS = LedgerSettings(explicit_lac_interval_s=INTERVAL_S)


def told(bookie: FakeBookie) -> list[int]:
    return [call[2] for call in bookie.calls if call[0] == "write_last_confirmed"]


@in_virtual_time
async def test_without_it_readers_elsewhere_learn_of_an_entry_later_and_recovery_of_all() -> None:
    bookies = Bookies("a", "b", "c")
    client, elsewhere = bookies.client(SETTINGS), bookies.client(SETTINGS)
    writer = await client.create(explicit_lac=False)
    confirmed = Confirmations()
    for number in range(3):
        writer.append(b"%d" % number, confirmed)
        await asyncio.sleep(10 * INTERVAL_S)
    assert confirmed.ids == [0, 1, 2]
    assert [told(bookie) for bookie in bookies.values()] == [[], [], []]
    reader = await elsewhere.open(writer.ledger_id, recover=False)
    assert reader.last_add_confirmed == 1, "the header of entry 2 says so"
    assert len(await reader.read(0, 1)) == 2
    writer.append(b"3", confirmed)
    assert await reader.wait(timeout_s=1.0) == 2
    recovered = await elsewhere.open(writer.ledger_id, recover=True)
    assert recovered.last_add_confirmed == 3
    assert len(await recovered.read(0, 3)) == 4
    assert await reader.wait(timeout_s=1.0) == 3
    await client.close()
    await elsewhere.close()


@in_virtual_time
async def test_a_writer_whose_ledger_was_recovered_or_deleted_writes_it_no_more() -> None:
    bookies = Bookies("a", "b", "c")
    client, confirmed = bookies.client(SETTINGS), Confirmations()
    deleted = await client.create()
    deleted.append(b"x", confirmed)
    await confirmed.count(1)
    await client.delete(deleted.ledger_id)
    deleted.append(b"y", confirmed)
    await confirmed.count(2)
    assert confirmed.errors == [LedgerNotFound]
    await asyncio.sleep(100)
    assert [told(bookie) for bookie in bookies.values()] == [[], [], []]
    fenced = await client.create()
    fenced.append(b"x", confirmed)
    await confirmed.count(3)
    for bookie in bookies.values():
        bookie.fail(LedgerFenced("by another owner"))
    await asyncio.sleep(100)
    assert [told(bookie) for bookie in bookies.values()] == [[0], [0], [0]], "not again and again"
    await client.close()


def test_rule_19_only_an_idle_writer_tells_and_within_the_interval() -> None:
    async def main() -> None:
        bookies = Bookies("a", "b", "c")
        client = bookies.client(SETTINGS)
        writer = await client.create()
        confirmed = Confirmations()
        for number in range(200):  # twenty entries for each interval: nobody has to be told
            writer.append(b"x", confirmed)
            await asyncio.sleep(INTERVAL_S / 20 if number % 10 else INTERVAL_S / 3)
        assert [told(bookie) for bookie in bookies.values()] == [[], [], []]
        await asyncio.sleep(INTERVAL_S * 1.25)
        assert confirmed.ids == list(range(200))
        assert [told(bookie) for bookie in bookies.values()] == [[199]] * 3
        await asyncio.sleep(100)
        assert [told(bookie) for bookie in bookies.values()] == [[199]] * 3, "once"
        for number in range(200, 205):  # rarer than the interval: each of them
            writer.append(b"x", confirmed)
            await asyncio.sleep(INTERVAL_S * 1.25)
            assert [told(bookie)[-1] for bookie in bookies.values()] == [number] * 3
        await client.close()

    loop = SimLoop(1)
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
