"""Clocks that lie and timeouts that are shorter than the way: nothing is lost, and what gives up says so."""

import asyncio
import random

import pytest

from magnetar.ledger import LedgerClient, LedgerSettings, LocalTransport, StaticBookies
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import MagnetarError, NotEnoughBookies, QuorumLost, RequestTimeout
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from support.bookies import Bookies, Confirmations, Done, FakeBookie
from support.virtual_time import in_virtual_time

PATIENT = LedgerSettings(explicit_lac_interval_s=0)
LATENCY_S = 0.05
HASTY = LedgerSettings(
    explicit_lac_interval_s=0, add_timeout_s=0.01, read_timeout_s=0.01, speculative_read_s=0.002
)


class FarBookie(FakeBookie):
    """Everything takes LATENCY_S, each way of an add and of a request as a whole."""

    def add(self, entry: bytes, *, recovery: bool, done: Done, deferred: bool = False) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(LATENCY_S, lambda: FakeBookie.add(self, entry, recovery=recovery, done=done))

    async def _ready(self, ledger_id: int, fence: bool) -> None:
        await asyncio.sleep(LATENCY_S)
        await super()._ready(ledger_id, fence)


def far(count: int) -> Bookies:
    bookies = Bookies(*(f"b{n}" for n in range(count)))
    for name in bookies:
        bookies[name] = FarBookie(name)
    return bookies


def client_of(bookies: Bookies, settings: LedgerSettings) -> LedgerClient:
    transport = LocalTransport(
        bookies, add_timeout_s=settings.add_timeout_s, read_timeout_s=settings.read_timeout_s
    )
    directory = StaticBookies(dict.fromkeys(bookies, ("127.0.0.1", 1)))
    return LedgerClient(
        StoredLedgers(bookies.metadata), transport, directory, settings, random.Random(1), bookies.clock
    )


@in_virtual_time
async def test_timeouts_below_the_latency_confirm_nothing_wrong_and_cut_nothing_off() -> None:
    """Every bookie is taken for hung although it stores everything, late: the next owner finds it all."""
    bookies = far(6)  # the ensemble, and one replacement for each of it
    hasty, patient = client_of(bookies, HASTY), client_of(bookies, PATIENT)
    writer = await hasty.create()
    heard = Confirmations()
    for n in range(5):
        writer.append(b"%d" % n, heard)
    await heard.count(5)
    assert heard.errors == [NotEnoughBookies] * 5
    with pytest.raises((QuorumLost, RequestTimeout)):
        await hasty.open(writer.ledger_id, recover=True)
    await hasty.close()
    reader = await patient.open(writer.ledger_id, recover=True)
    assert reader.closed
    assert reader.last_add_confirmed == 4
    entries = await reader.read(0, 4)
    assert [entry[LEDGER_ENTRY_HEADER_BYTES:] for entry in entries] == [b"%d" % n for n in range(5)]
    await patient.close()


@in_virtual_time
async def test_a_slow_close_after_the_failure_ends_where_the_callers_were_told() -> None:
    """The owner closes at what was confirmed: nothing. Copies that arrive afterwards are past the end."""
    bookies = far(3)
    hasty, patient = client_of(bookies, HASTY), client_of(bookies, PATIENT)
    writer = await hasty.create()
    heard = Confirmations()
    writer.append(b"0", heard)
    await heard.count(1)
    assert heard.errors == [NotEnoughBookies]
    assert (await writer.close()).last_entry == -1
    await asyncio.sleep(2 * LATENCY_S)
    assert any(bookie.entries for bookie in bookies.values())
    reader = await patient.open(writer.ledger_id, recover=True)
    assert reader.last_add_confirmed == -1
    with pytest.raises(MagnetarError):
        await reader.read(0, 0)
    await hasty.close()
    await patient.close()


@pytest.mark.parametrize("jump_ms", [-1_000_000, -1, 10**12])
async def test_a_wall_clock_that_jumps_matters_to_nothing(jump_ms: int) -> None:
    bookies = Bookies("b1", "b2", "b3", "b4")
    client = bookies.client(PATIENT)
    writer = await client.create()
    heard = Confirmations()
    writer.append(b"0", heard)
    await heard.count(1)
    bookies.clock.now += jump_ms
    bookies[writer.metadata.last_ensemble.bookies[0]].fail(RequestTimeout("silent"))
    writer.append(b"1", heard)
    writer.append(b"2", heard)
    await heard.count(3)
    later = await client.create()
    assert later.ledger_id > writer.ledger_id
    reader = await bookies.client(PATIENT).open(writer.ledger_id, recover=True)
    assert reader.last_add_confirmed == 2
    assert len(await reader.read(0, 2)) == 3
    await client.close()
