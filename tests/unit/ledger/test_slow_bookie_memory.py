"""Scorecard 21, short: Qa < Qw and a bookie that stops reading: memory stays bounded, and the others' answers go on."""

import asyncio
import gc
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from magnetar.ledger import LedgerClient, LedgerSettings, LedgerWriter, StaticBookies, TcpTransport
from magnetar.ledger.writer import RETRY_PAUSE_S
from magnetar.metadata.memory import MemoryMetadataStore
from magnetar.proto.errors import MagnetarError
from magnetar.proto.ledger_entry import decode_ledger_entry_header
from magnetar.runtime.connection import ConnectionOptions
from support.bookies import FakeBookie, StillClock
from support.tcp_bookies import BookieServer

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
SETTINGS = LedgerSettings(
    ensemble_size=3,
    write_quorum=3,
    ack_quorum=2,
    add_timeout_s=30.0,
    max_outstanding_bytes=2 * MIB,
    explicit_lac_interval_s=0,
)


def rss_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


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
    """Three bookies behind sockets; `stall` makes one of them take no more bytes."""

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

    def stall(self, name: str) -> None:
        for handler in self.servers[name]._handlers:
            if handler.connection is not None:
                handler.connection.pause_reading("test")

    def resume(self, name: str) -> None:
        for handler in self.servers[name]._handlers:
            if handler.connection is not None:
                handler.connection.resume_reading("test")


class Load:
    """Appends so that at most `window` entries are not confirmed."""

    def __init__(self, writer: LedgerWriter, size: int, window: int) -> None:
        self.writer = writer
        self.payload = b"x" * size
        self.window = window
        self.confirmed = 0
        self.errors: list[MagnetarError] = []
        self.peaks: dict[str, int] = {}
        self._room = asyncio.Event()

    def _on_confirmed(self, _entry_id: int, _entry: bytes, error: MagnetarError | None) -> None:
        if error is not None:
            self.errors.append(error)
        self.confirmed += 1
        self._room.set()

    async def run(self, count: int, look: Callable[[], dict[str, int]]) -> None:
        sent, base = 0, self.confirmed
        while self.confirmed - base < count and not self.errors:
            while sent < count and sent - (self.confirmed - base) < self.window:
                self.writer.append(self.payload, self._on_confirmed)
                sent += 1
            for name, value in look().items():
                self.peaks[name] = max(self.peaks.get(name, 0), value)
            self._room.clear()
            await asyncio.wait_for(self._room.wait(), 20)


async def test_what_waits_for_a_stalled_bookie_is_bounded_and_the_others_go_on() -> None:
    async with Cluster() as cluster:
        transport = TcpTransport(cluster.directory, SETTINGS, ConnectionOptions("test"))
        client = LedgerClient(
            MemoryMetadataStore(), transport, cluster.directory, SETTINGS, random.Random(1), StillClock()
        )
        load = Load(await client.create(), 64 << 10, 16)

        def look() -> dict[str, int]:
            link = transport._channels["b2"]._link
            assert link is not None
            connection = link._connection
            return {
                "outstanding": link._outstanding_bytes,
                "buffered": connection.buffered_bytes if connection is not None else 0,
                "pending": len(link._pending),
                "writer": load.writer.outstanding_bytes,
                "rss": rss_bytes(),
            }

        await load.run(200, look)
        gc.collect()
        load.peaks.clear()
        before = rss_bytes()
        cluster.stall("b2")
        count = 2_000  # 125 MiB for each bookie, 60 times what may wait for one
        stored = cluster.bookies["b2"].adds
        await asyncio.wait_for(load.run(count, look), 60)
        assert load.errors == []
        assert load.confirmed == count + 200, "two of three are enough"
        assert load.writer.last_add_confirmed == count + 199
        async with asyncio.timeout(10):  # counted when it would be sent again
            while load.writer.under_replicated < count / 2:
                await asyncio.sleep(0.005)
        peaks = load.peaks
        assert SETTINGS.max_outstanding_bytes - MIB < peaks["outstanding"] <= SETTINGS.max_outstanding_bytes
        assert peaks["buffered"] <= SETTINGS.max_outstanding_bytes + MIB
        assert peaks["pending"] <= SETTINGS.max_outstanding_bytes // (64 << 10)
        assert peaks["writer"] <= 17 * (65 << 10)
        assert peaks["rss"] - before < 32 * MIB, f"grew by {(peaks['rss'] - before) / MIB:.1f} MiB"
        assert cluster.bookies["b2"].adds - stored < 200, "it took what fits into socket buffers"
        # It reads again: what waited arrives, and it takes part as before; nothing was replaced meanwhile.
        cluster.resume("b2")
        async with asyncio.timeout(10):
            while look()["outstanding"]:
                await asyncio.sleep(0.005)
        await asyncio.sleep(RETRY_PAUSE_S * 1.5)  # what was refused last is looked at
        missing = load.writer.under_replicated
        await load.run(200, look)
        assert load.writer.under_replicated == missing
        assert load.writer.metadata.last_ensemble.bookies.count("b2") == 1
        await client.close()
        await transport.close()


@pytest.mark.parametrize("window", [1, 16])
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
            MemoryMetadataStore(), transport, cluster.directory, settings, random.Random(1), StillClock()
        )
        load = Load(await client.create(), 64 << 10, window)
        await load.run(100, dict)
        victim = load.writer.metadata.last_ensemble.bookies[1]
        cluster.stall(victim)
        async with asyncio.timeout(20):
            while victim in load.writer.metadata.last_ensemble.bookies:
                await load.run(20, dict)
        await load.run(100, dict)
        assert load.errors == []
        channel = transport._channels[victim]
        # With a window of 16 it was replaced for being busy, before the add timeout.
        async with asyncio.timeout(10):
            while channel._link is not None or channel._ending:  # the socket, and what was buffered for it
                await asyncio.sleep(0.005)
        await client.close()
        await transport.close()
