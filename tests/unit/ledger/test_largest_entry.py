"""The largest entry that bookies take, and what one that is larger costs its writer."""

import asyncio
import random
from pathlib import Path

import pytest

from magnetar.bookie.server import BookieServer
from magnetar.ledger import LedgerClient, LedgerSettings, StaticBookies, TcpTransport
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import MessageTooLarge
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.connection import ConnectionOptions
from support.bookie_kit import open_inline
from support.bookies import Bookies, Confirmations
from support.index_model import ModelStorage
from support.memory_metadata import MemoryMetadataStore

LARGEST = 100_000
PAYLOAD = LARGEST - LEDGER_ENTRY_HEADER_BYTES
NO_LAC = LedgerSettings(explicit_lac_interval_s=0)


@pytest.mark.parametrize("limit", ["of the bookie", "of the connection"])
async def test_an_entry_of_the_largest_size_and_one_of_a_byte_more(tmp_path: Path, limit: str) -> None:
    bookie = await open_inline(str(tmp_path / "bookie"), ModelStorage(), max_entry_bytes=LARGEST)
    largest_frame = LARGEST if limit == "of the connection" else 5 << 20
    server = await BookieServer.start(
        bookie, "127.0.0.1", 0, ConnectionOptions("bookie", max_message_bytes=largest_frame)
    )
    settings = LedgerSettings(1, 1, 1, explicit_lac_interval_s=0)
    directory = StaticBookies({"b": server.addresses[0]})
    transport = TcpTransport(directory, settings, ConnectionOptions("ledger client"))
    client = LedgerClient(
        StoredLedgers(MemoryMetadataStore()), transport, directory, settings, random.Random(1), SystemClock()
    )
    try:
        writer = await client.create()
        heard = Confirmations()
        writer.append(b"x" * PAYLOAD, heard)
        await heard.count(1)
        assert heard.ids == [0]
        assert len((await writer.read(0, 0))[0]) == LARGEST
        for more in (1, 1 << 20):
            writer = await client.create()
            heard = Confirmations()
            writer.append(b"x" * (PAYLOAD + more), heard)
            await heard.count(1)
            assert heard.errors == [MessageTooLarge], heard.heard[0][2]
            assert (await writer.close()).last_entry == -1
    finally:
        await client.close()
        await transport.close()
        await server.close(1)
        await bookie.close()


async def test_an_entry_that_no_bookie_takes_costs_no_bookies() -> None:
    """It was offered to one bookie after another, each of which counted as failed; then there were not enough."""
    bookies = Bookies("b1", "b2", "b3", "b4", "b5")
    client = bookies.client(NO_LAC)
    writer = await client.create()
    confirmed = Confirmations()
    writer.append(b"fits", confirmed)
    await confirmed.count(1)
    for bookie in bookies.values():
        bookie.fail(MessageTooLarge("too large"))
    writer.append(b"does not", confirmed)
    writer.append(b"comes after", confirmed)
    await confirmed.count(3)
    assert confirmed.errors == [MessageTooLarge] * 2
    assert "max_entry_bytes" in str(confirmed.heard[1][2])
    for bookie in bookies.values():
        bookie.fail(None)
    metadata = await writer.close()
    assert (metadata.last_entry, len(metadata.ensembles)) == (0, 1)
    await client.close()


async def test_a_copy_that_is_refused_as_too_large_after_its_quorum_is_a_lost_bookie() -> None:
    """Bookies with different limits: with Qa < Qw the entry was confirmed, so it is not the entry's fault."""
    bookies = Bookies("b1", "b2", "b3", "b4")
    client = bookies.client(NO_LAC)
    writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
    confirmed = Confirmations()
    strict = writer.metadata.last_ensemble.bookies[2]
    bookies[strict].hold()
    writer.append(b"large for one", confirmed)
    await confirmed.count(1)
    bookies[strict].release(MessageTooLarge.code)
    async with asyncio.timeout(5):
        while strict in writer.metadata.last_ensemble.bookies:
            await asyncio.sleep(0)
    writer.append(b"goes on", confirmed)
    await confirmed.count(2)
    assert confirmed.errors == []
    await client.close()
