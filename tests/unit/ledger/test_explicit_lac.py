"""Rule 19 and its price: an idle writer tells its last entry, one that appends tells with its entries."""

import asyncio

from magnetar.ledger import LedgerSettings
from support.bookies import Bookies, Confirmations, FakeBookie
from support.sim import SimLoop

INTERVAL_S = 0.2
SETTINGS = LedgerSettings(explicit_lac_interval_s=INTERVAL_S)


def told(bookie: FakeBookie) -> list[int]:
    return [call[2] for call in bookie.calls if call[0] == "write_last_confirmed"]


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
