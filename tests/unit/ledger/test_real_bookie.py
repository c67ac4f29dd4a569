"""The ledger client on the real storage engine: in the same process, and over TCP, with crashes between."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from magnetar.bookie import Bookie
from magnetar.bookie.server import BookieServer
from magnetar.bookie.server.server import InProcessBookie
from magnetar.ledger import (
    BookieTransport,
    LedgerClient,
    LedgerSettings,
    LocalTransport,
    StaticBookies,
    TcpTransport,
)
from magnetar.metadata.embedded import EmbeddedMetadataStore
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import LedgerFenced
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.connection import ConnectionOptions
from support.bookie_kit import crash, open_inline
from support.bookies import Confirmations
from support.index_model import ModelStorage


class Standalone:
    """One bookie and an embedded metadata store; a client per generation."""

    def __init__(self, directory: Path, over_tcp: bool) -> None:
        self.directory = directory
        self.over_tcp = over_tcp
        self.storage = ModelStorage()
        self.running: LedgerClient | None = None

    async def start(self) -> LedgerClient:
        self.bookie: Bookie = await open_inline(
            str(self.directory / "bookie"), self.storage, write_cache_bytes=1024 * 1024
        )
        self.metadata = EmbeddedMetadataStore(str(self.directory / "metadata"))
        settings = LedgerSettings(1, 1, 1, add_timeout_s=20)  # above the bookie's own wait for room
        self.server: BookieServer | None = None
        self.transport: BookieTransport = LocalTransport({"b": InProcessBookie(self.bookie)})
        self.directory_of_bookies = StaticBookies({"b": ("127.0.0.1", 1)})
        if self.over_tcp:
            self.server = await BookieServer.start(self.bookie, "127.0.0.1", 0, ConnectionOptions("bookie"))
            self.directory_of_bookies = StaticBookies({"b": self.server.addresses[0]})
            self.transport = TcpTransport(
                self.directory_of_bookies, settings, ConnectionOptions("ledger client")
            )
        self.running = self.client(settings)
        return self.running

    def client(self, settings: LedgerSettings) -> LedgerClient:
        return LedgerClient(
            StoredLedgers(self.metadata),
            self.transport,
            self.directory_of_bookies,
            settings,
            random.Random(1),
            SystemClock(),
        )

    async def stop(self, client: LedgerClient, *, crashed: bool = False) -> None:
        self.running = None
        await client.close()
        await self.transport.close()
        if self.server is not None:
            await self.server.close(1)
        if crashed:
            crash(self.bookie)
        else:
            await self.bookie.close()
        await self.metadata.close()


@pytest_asyncio.fixture(params=["local", "tcp"])
async def standalone(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Standalone]:
    standalone = Standalone(tmp_path, request.param == "tcp")
    yield standalone
    if standalone.running is not None:  # the test failed
        await standalone.stop(standalone.running, crashed=True)


async def test_ledgers_survive_crashes_of_the_bookie(standalone: Standalone) -> None:
    expected: dict[int, list[bytes]] = {}
    for generation in range(3):
        client = await standalone.start()
        for ledger_id, payloads in expected.items():
            reader = await client.open(ledger_id, recover=True)
            assert reader.last_add_confirmed >= len(payloads) - 1
            entries = await reader.read(0, len(payloads) - 1)
            assert [entry[LEDGER_ENTRY_HEADER_BYTES:] for entry in entries] == payloads
            assert (await client.open(ledger_id, recover=True)).closed
        writer = await client.create()
        confirmed = Confirmations()
        payloads = [b"%d:%d" % (generation, n) * 30 for n in range(400)]
        for payload in payloads:
            writer.append(payload, confirmed)
        await confirmed.count(len(payloads))
        assert confirmed.errors == []
        expected[writer.ledger_id] = payloads
        assert len(await writer.read(0, 399)) == 400
        await standalone.stop(client, crashed=True)


async def test_a_new_owner_fences_the_old_one_for_good(standalone: Standalone) -> None:
    client = await standalone.start()
    successor = standalone.client(LedgerSettings(1, 1, 1))
    writer = await client.create()
    confirmed = Confirmations()
    for n in range(10):
        writer.append(b"%d" % n, confirmed)
    await confirmed.count(10)
    reader = await successor.open(writer.ledger_id, recover=True)
    assert reader.last_add_confirmed == 9
    writer.append(b"stale", confirmed)
    await confirmed.count(11)
    assert confirmed.errors == [LedgerFenced]
    assert len(await reader.read(0, 9)) == 10
    await successor.close()
    await standalone.stop(client)


async def test_tail_reads_of_an_open_ledger(standalone: Standalone) -> None:
    client = await standalone.start()
    writer = await client.create()
    confirmed = Confirmations()
    writer.append(b"only", confirmed)
    await confirmed.count(1)
    reader = await client.open(writer.ledger_id, recover=False)
    async with asyncio.timeout(5):
        while await reader.read_last_confirmed() < 0:  # the explicit LAC of the idle writer (rule 19)
            await asyncio.sleep(0.01)
    assert (await reader.read(0, 0))[0].endswith(b"only")
    await writer.close()
    await standalone.stop(client)


async def test_a_tail_follows_a_writer_until_the_ledger_is_closed(standalone: Standalone) -> None:
    client = await standalone.start()
    reading = standalone.client(LedgerSettings(1, 1, 1))
    writer = await client.create()
    reader = await reading.open(writer.ledger_id, recover=False)
    told: list[bytes] = []

    async def follow() -> None:
        async with reader.follow(0) as tail:
            async for entries in tail:
                told.extend(entry[LEDGER_ENTRY_HEADER_BYTES:] for entry in entries)

    follower = asyncio.create_task(follow())
    confirmed = Confirmations()
    for n in range(200):
        writer.append(b"%d" % n, confirmed)
        if n % 20 == 0:
            await confirmed.count(n + 1)
    await confirmed.count(200)
    async with asyncio.timeout(5):
        while len(told) < 200:  # the last one by the explicit LAC (rule 19)
            await asyncio.sleep(0.01)
    await writer.close()
    await asyncio.wait_for(follower, 2)
    assert told == [b"%d" % n for n in range(200)]
    await reading.close()
    await standalone.stop(client)
