"""python -m bench.repair: a bookie is lost for good with its disk; how fast its entries are back, and what writers notice.

Five bookie processes on loopback with fsync on; metadata in memory; writer and AutoRecovery share one process, so a writer
elsewhere notices less. When the repair is done every entry is looked for at the bookies that its ledger's record names.

    --entries N --size BYTES --ledgers N      what is stored before the loss (10,000 of 1 KiB in 10 ledgers)
    --rate BYTES_PER_S                        copy_bytes_per_s; the default is the shipped one
    --foreground N                            appends a second of a writer beside it (500)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from bench.arguments import OUT, console
from bench.percentiles import percentiles
from bench.service_process import ServiceProcess
from magnetar.ledger import LedgerClient, LedgerMetadata, LedgerSettings, RegisteredBookies, TcpTransport
from magnetar.ledger.directory import encode_registration
from magnetar.ledger.replication.auto_recovery import AutoRecovery
from magnetar.ledger.replication.core.fragments import fragments_of
from magnetar.ledger.replication.settings import RepairSettings
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.metadata.store import Session
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.connection import ConnectionOptions
from support.memory_metadata import MemoryMetadataStore

BOOKIES = 5
ALONE_S = 5.0
DELAY_S = 4.0
QUORUMS = (3, 2, 2)
UNCONFIRMED = 1000


class Cluster:
    """Bookie processes, their registrations, and one client."""

    def __init__(self, directory: Path) -> None:
        self.store = MemoryMetadataStore()
        self.settings = LedgerSettings(*QUORUMS)
        self.processes = {
            f"b{number}": ServiceProcess(
                directory / f"b{number}", command="bookie", arguments=["--log-level", "warning"]
            )
            for number in range(1, BOOKIES + 1)
        }
        self._sessions: dict[str, Session] = {}

    async def start(self) -> None:
        """All of them, and the client."""
        for name, process in self.processes.items():
            await asyncio.to_thread(process.start)
            session = self._sessions[name] = await self.store.open_session(10.0)
            value = encode_registration(f"{process.host}:{process.ports['bookie']}")
            await self.store.create(f"/bookies/{name}", value, session=session)
        self.directory = await RegisteredBookies.open(self.store)
        self.transport = self.new_transport()
        self.client = LedgerClient(
            StoredLedgers(self.store),
            self.transport,
            self.directory,
            self.settings,
            random.Random(1),
            SystemClock(),
        )

    def new_transport(self) -> TcpTransport:
        """One of its own for each component that has a process of its own in a cluster."""
        return TcpTransport(self.directory, self.settings, ConnectionOptions("bench"))

    async def lose(self, name: str) -> None:
        """kill -9, and its disk is gone."""
        process = self.processes[name]
        await asyncio.to_thread(process.kill)
        assert process.data is not None
        shutil.rmtree(process.data, ignore_errors=True)
        await self._sessions.pop(name).close()

    async def names(self, ledger_id: int, bookie: str) -> bool:
        """Whether a ledger's record does."""
        node = await StoredLedgers(self.store).get(ledger_id)
        return node is not None and bookie.encode() in node.value

    @property
    def there(self) -> Collection[str]:
        """Bookies that are registered."""
        return self._sessions

    def close(self) -> None:
        """Kills what is left."""
        for process in self.processes.values():
            if process.running:
                process.kill()


async def write(client: LedgerClient, entries: int, size: int) -> int:
    """A closed ledger."""
    writer = await client.create()
    confirmed = asyncio.Semaphore(UNCONFIRMED)

    def done(entry_id: int, entry: bytes, error: MagnetarError | None) -> None:
        assert error is None, error
        confirmed.release()

    payload = random.Random(1).randbytes(size)
    for _ in range(entries):
        await confirmed.acquire()
        writer.append(payload, done)
    await writer.close()
    return writer.ledger_id


async def lacking(
    ledgers: StoredLedgers, transport: TcpTransport, wanted: Sequence[int], there: Collection[str]
) -> int:
    """Entries of closed ledgers that a bookie should have by the record, and does not list, or is not `there`."""
    found = 0
    for ledger_id in wanted:
        node = await ledgers.get(ledger_id)
        assert node is not None
        metadata = LedgerMetadata.decode(node.value, ledger_id)
        for fragment in fragments_of(metadata):
            assert fragment.last is not None
            for position, bookie in enumerate(fragment.bookies):
                has = await _entries(transport, bookie, ledger_id) if bookie in there else {}
                found += sum(
                    position in metadata.striping.write_set(entry_id) and entry_id not in has
                    for entry_id in range(fragment.first, fragment.last + 1)
                )
    return found


async def _entries(transport: TcpTransport, bookie: str, ledger_id: int) -> dict[int, None]:
    found: dict[int, None] = {}
    following = 0
    while following >= 0:
        page = await transport.list_entries(bookie, ledger_id, first=following)
        for first, last in page.ranges:
            found.update(dict.fromkeys(range(first, last + 1)))
        following = page.following
    return found


class Foreground:
    """A writer at a rate; a ledger that fails is followed by another one."""

    def __init__(self, client: LedgerClient, rate: int, size: int) -> None:
        self.latencies_s: list[float] = []
        self.failed = 0
        self._client = client
        self._rate = rate
        self._payload = random.Random(2).randbytes(size)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Foreground:
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            writer = await self._client.create()
            due = loop.time()
            broken = False
            while not broken:
                due += 1 / self._rate
                await asyncio.sleep(max(0.0, due - loop.time()))
                began = due

                def done(_: int, entry: bytes, error: MagnetarError | None, began: float = began) -> None:
                    nonlocal broken
                    broken = broken or error is not None
                    self.failed += error is not None
                    self.latencies_s.append(loop.time() - began)

                writer.append(self._payload, done)


async def measure(given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One run."""
    cluster = Cluster(directory)
    try:
        await cluster.start()
        each = given.entries // given.ledgers
        ledgers = [await write(cluster.client, each, given.size) for _ in range(given.ledgers)]
        async with Foreground(cluster.client, given.foreground, given.size) as alone:
            await asyncio.sleep(ALONE_S)
        changes = {"copy_bytes_per_s": given.rate} if given.rate else {}
        repair = AutoRecovery(
            cluster.store,
            cluster.new_transport(),
            cluster.directory,
            cluster.settings,
            RepairSettings(lost_bookie_delay_s=DELAY_S, **changes),
            random.Random(3),
            SystemClock(),
            owner="bench",
        )
        await repair.start()
        await asyncio.sleep(1.0)
        await cluster.lose("b1")
        await asyncio.sleep(DELAY_S / 2)  # what a writer notices of the loss itself is not the repair's
        async with Foreground(cluster.client, given.foreground, given.size) as beside:
            while not repair.progress().copied_bytes:
                beside.latencies_s.clear()
                await asyncio.sleep(0.01)
            began = time.perf_counter()
            while any([await cluster.names(ledger_id, "b1") for ledger_id in ledgers]):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            took = time.perf_counter() - began
        progress = repair.progress()
        missing = await lacking(StoredLedgers(cluster.store), cluster.transport, ledgers, cluster.there)
        await repair.close()
        await cluster.client.close()
        return {
            "entries": given.entries,
            "size": given.size,
            "copied_entries": progress.copied_entries,
            "seconds": round(took, 3),
            "mb_per_s": round(progress.copied_bytes / took / 1e6, 2),
            "lacking": missing,
            "p99_alone_ms": percentiles(alone.latencies_s).p99,
            "p99_beside_ms": percentiles(beside.latencies_s).p99,
            "p50_alone_ms": percentiles(alone.latencies_s).p50,
            "p50_beside_ms": percentiles(beside.latencies_s).p50,
            "failed_appends": alone.failed + beside.failed,
        }
    finally:
        cluster.close()


def main() -> int:
    """Runs it, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.repair", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--ledgers", type=int, default=10)
    parser.add_argument("--rate", type=int, default=0)
    parser.add_argument("--foreground", type=int, default=500)
    given = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    directory = OUT / f"scratch-{time.time_ns()}"
    directory.mkdir()
    try:
        figures = asyncio.run(measure(given, directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    screen = console()
    for name, value in figures.items():
        screen.print(f"{name:18} {value}")
    path = OUT / time.strftime("bench-repair-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(figures, indent=1))
    screen.print(f"all figures: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
