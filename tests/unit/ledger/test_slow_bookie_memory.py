"""Scorecard 21, short: Qa < Qw and a bookie that stops reading: memory stays bounded, and the others' answers go on."""

import asyncio
import gc
import random
import tracemalloc
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest

from magnetar.ledger import LedgerClient, LedgerSettings, LedgerWriter, StaticBookies, TcpTransport
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import MagnetarError
from magnetar.proto.ledger_entry import decode_ledger_entry_header
from magnetar.runtime.connection import ConnectionOptions
from support.bookies import FakeBookie, StillClock
from support.memory_metadata import MemoryMetadataStore
from support.sockets import counts_sockets, open_sockets
from support.tcp_bookies import BookieServer

MIB = 1 << 20
ENTRY_BYTES = 64 << 10
SETTINGS = LedgerSettings(
    ensemble_size=3,
    write_quorum=3,
    ack_quorum=2,
    add_timeout_s=30.0,
    max_outstanding_bytes=2 * MIB,
    explicit_lac_interval_s=0,
)


class Sink(FakeBookie):
    """Answers adds and keeps none of them."""

    def add(
        self,
        entry: bytes,
        *,
        recovery: bool,
        done: Callable[[int, int, int], None],
        deferred: bool = False,
    ) -> None:
        header = decode_ledger_entry_header(entry)
        self.adds += 1
        self._answer(done, header.ledger_id, header.entry_id)


class Cluster:
    """Three bookies behind sockets."""

    async def __aenter__(self) -> "Cluster":
        self.bookies = {name: Sink(name) for name in ("b1", "b2", "b3")}
        self.servers = {name: await BookieServer(bookie).start() for name, bookie in self.bookies.items()}
        self.directory = StaticBookies(
            {name: ("127.0.0.1", server.port) for name, server in self.servers.items()}
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self.servers.values():
            await server.stop()


class Load:
    """Appends so that at most `window` entries are not confirmed."""

    def __init__(self, writer: LedgerWriter, size: int, window: int) -> None:
        self.writer = writer
        self.payload = b"x" * size
        self.window = window
        self.confirmed = 0
        self.errors: list[MagnetarError] = []
        self.highest = 0  # outstanding bytes of the writer
        self._room = asyncio.Event()

    def _on_confirmed(self, _entry_id: int, _entry: bytes, error: MagnetarError | None) -> None:
        if error is not None:
            self.errors.append(error)
        self.confirmed += 1
        self._room.set()

    async def run(self, count: int) -> None:
        sent, base = 0, self.confirmed
        while self.confirmed - base < count and not self.errors:
            while sent < count and sent - (self.confirmed - base) < self.window:
                self.writer.append(self.payload, self._on_confirmed)
                sent += 1
            self.highest = max(self.highest, self.writer.outstanding_bytes)
            self._room.clear()
            await asyncio.wait_for(self._room.wait(), 20)


@pytest.fixture
def traced() -> Iterator[None]:
    """The process is shared with other tests, so what it holds is no measure: what is allocated from here on is one."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


async def peak_of(work: Coroutine[Any, Any, None]) -> int:
    """Bytes allocated at most while it runs, beyond what there is."""
    gc.collect()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    await work
    return tracemalloc.get_traced_memory()[1] - before


@pytest.mark.usefixtures("traced")
async def test_what_waits_for_a_stalled_bookie_is_bounded_and_the_others_go_on() -> None:
    async with Cluster() as cluster:
        transport = TcpTransport(cluster.directory, SETTINGS, ConnectionOptions("test"))
        client = LedgerClient(
            StoredLedgers(MemoryMetadataStore()),
            transport,
            cluster.directory,
            SETTINGS,
            random.Random(1),
            StillClock(),
        )
        load = Load(await client.create(), ENTRY_BYTES, 16)
        await load.run(200)
        usual = await peak_of(load.run(200))
        cluster.servers["b2"].pause_reading()
        count = 2_000  # 125 MiB for each bookie, 60 times what may wait for one
        stored = cluster.bookies["b2"].adds
        stalled = await peak_of(asyncio.wait_for(load.run(count), 60))
        assert load.errors == []
        assert load.confirmed == count + 400, "two of three are enough"
        assert load.writer.last_add_confirmed == count + 399
        async with asyncio.timeout(10):  # counted when it would be sent again
            while load.writer.under_replicated < count / 2:
                await asyncio.sleep(0.005)
        assert stalled - usual <= SETTINGS.max_outstanding_bytes + 2 * MIB, f"{usual=}, {stalled=}"
        assert load.highest <= 17 * (ENTRY_BYTES + 1024)
        # It reads again: what waited arrives, and it takes part as before; nothing was replaced meanwhile.
        cluster.servers["b2"].resume_reading()
        async with asyncio.timeout(10):
            while cluster.bookies["b2"].adds - stored < (SETTINGS.max_outstanding_bytes - MIB) // ENTRY_BYTES:
                await asyncio.sleep(0.005)
            assert cluster.bookies["b2"].adds - stored < 200, "what was refused is not kept for it"
            missing = -1
            while missing != load.writer.under_replicated:
                missing = load.writer.under_replicated
                await load.run(200)
        assert load.writer.metadata.last_ensemble.bookies.count("b2") == 1
        await client.close()
        await transport.close()


@counts_sockets
@pytest.mark.parametrize("window", [1, 16])
@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_a_stalled_bookie_is_given_up_after_the_add_timeout_and_its_memory_is_free(window: int) -> None:
    async with Cluster() as cluster:
        settings = replace(
            SETTINGS,
            ensemble_size=2,
            write_quorum=2,
            ack_quorum=1,
            add_timeout_s=0.4,
            max_outstanding_bytes=8 * MIB,
        )
        transport = TcpTransport(cluster.directory, settings, ConnectionOptions("test"))
        client = LedgerClient(
            StoredLedgers(MemoryMetadataStore()),
            transport,
            cluster.directory,
            settings,
            random.Random(1),
            StillClock(),
        )
        load = Load(await client.create(), ENTRY_BYTES, window)
        await load.run(100)
        victim = load.writer.metadata.last_ensemble.bookies[1]
        sockets = open_sockets()
        cluster.servers[victim].pause_reading()
        async with asyncio.timeout(20):
            while victim in load.writer.metadata.last_ensemble.bookies:
                await load.run(20)
        await load.run(100)
        assert load.errors == []
        # With a window of 16 it was replaced for being busy, before the add timeout.
        async with asyncio.timeout(10):
            while not sockets - open_sockets():  # the one to it, with what was buffered for it
                await asyncio.sleep(0.005)
        await client.close()
        await transport.close()
