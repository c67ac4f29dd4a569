"""Recoveries over real bookies, over TCP, whose write caches are far smaller than what is added again."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from magnetar.bookie import Bookie
from magnetar.bookie.server import BookieServer
from magnetar.ledger import LedgerClient, LedgerSettings, StaticBookies, TcpTransport
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import TooManyRequests
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.connection import ConnectionOptions
from support.bookie_kit import KIB, open_inline
from support.bookies import Confirmations
from support.index_model import ModelStorage
from support.memory_metadata import MemoryMetadataStore

COUNT, SIZE, AT_ONCE = 120, 2000, 10


class Small:
    """Three bookies with write caches of 64 KiB, and clients of them."""

    def __init__(self) -> None:
        self.metadata = MemoryMetadataStore()
        self.bookies: list[Bookie] = []
        self.servers: list[BookieServer] = []
        self.refused: list[int] = []  # codes with which adds of recoveries were answered

    async def start(self, directory: Path) -> None:
        for number in range(3):
            bookie = await open_inline(
                str(directory / f"b{number}"), ModelStorage(), write_cache_bytes=64 * KIB
            )
            self._listen(bookie)
            self.bookies.append(bookie)
            server = await BookieServer.start(bookie, "127.0.0.1", 0, ConnectionOptions("bookie"))
            self.servers.append(server)

    def _listen(self, bookie: Bookie) -> None:
        right = bookie.add

        def add(
            entry: bytes, *, recovery: bool, done: Callable[[int, int, int], None], deferred: bool = False
        ) -> None:
            def told(ledger_id: int, entry_id: int, code: int) -> None:
                if recovery and code:
                    self.refused.append(code)
                done(ledger_id, entry_id, code)

            right(entry, recovery=recovery, done=told, deferred=deferred)

        bookie.add = add

    def client(self, settings: LedgerSettings) -> tuple[LedgerClient, TcpTransport]:
        addresses = {f"b{number}": server.addresses[0] for number, server in enumerate(self.servers)}
        directory = StaticBookies(addresses)
        transport = TcpTransport(directory, settings, ConnectionOptions("ledger client"))
        return LedgerClient(
            StoredLedgers(self.metadata), transport, directory, settings, random.Random(1), SystemClock()
        ), transport

    async def stop(self) -> None:
        for server in self.servers:
            await server.close(1)
        for bookie in self.bookies:
            await bookie.close()


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Small]:
    small = Small()
    await small.start(tmp_path)
    yield small
    await small.stop()


async def test_a_recovery_ends_although_bookies_refuse_what_is_too_much_for_them(
    small: Small,
) -> None:
    settings = LedgerSettings(3, 3, 3, explicit_lac_interval_s=0)
    client, transport = small.client(settings)
    writer = await client.create()
    confirmed = Confirmations()
    for number in range(0, COUNT, AT_ONCE):
        for entry in range(number, number + AT_ONCE):
            writer.append((b"%d" % entry).ljust(SIZE, b"."), confirmed)
        await confirmed.count(number + AT_ONCE)
    # Nobody tells that they were confirmed: all that the first entries piggybacked is forgotten.
    for bookie in small.bookies:
        state = bookie.ledgers.load(writer.ledger_id)
        state.last_add_confirmed = state.explicit_lac = -1
    await client.close()
    await transport.close()
    successor, transport = small.client(settings)
    try:
        reader = await asyncio.wait_for(successor.open(writer.ledger_id, recover=True), 30)
        assert reader.last_add_confirmed == COUNT - 1
        for first in range(0, COUNT, 60):
            entries = await reader.read(first, first + 59)
            assert [int(entry[LEDGER_ENTRY_HEADER_BYTES:].rstrip(b".")) for entry in entries] == list(
                range(first, first + 60)
            )
        assert TooManyRequests.code in small.refused, "it was put to the test"
        assert dict.fromkeys(small.refused) == {TooManyRequests.code: None}
    finally:
        await successor.close()
        await transport.close()
