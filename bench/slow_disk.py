"""python -m bench slow_disk: how long the turns of a service's loop are on a slow disk.

    python -m bench slow_disk [--slow MS] [--ledgers N] [--json FILE]

A store, a bookie and a ledger client in one process, as in `magnetar standalone`. Each sync of that process, and each of its
reads that finds something not in the page cache, takes MS longer (`probes/slow_disk.c`, needs gcc): a turn of so many ms has
waited for the disk. The helper processes (journal writer, disk worker) keep the disk of the machine: no turn waits for them.

    fill     ledgers, a checkpoint; killed
    work     behind a dropped page cache: a start after the kill (which serves nobody), introductions, reads of cold ledgers
             alone and as catching up, more ledgers, deletions, garbage collection, a stop
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop

from bench.arguments import OUT, console, parser_of
from bench.services import drop_page_cache
from magnetar.bookie import Bookie, open_bookie
from magnetar.bookie.components import os_components
from magnetar.bookie.gc.existing_ledgers import MetadataLedgers
from magnetar.bookie.server.server import InProcessBookie
from magnetar.bookie.settings import BookieSettings
from magnetar.cli.wiring.metadata import system_rng
from magnetar.cli.wiring.service import introduce_bookie
from magnetar.ledger import LedgerClient, LedgerSettings
from magnetar.ledger.directory import StaticBookies
from magnetar.ledger.local_transport import LocalTransport
from magnetar.metadata.embedded import EmbeddedMetadataStore
from magnetar.metadata.identity import cluster_instance
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.clock import SystemClock

T = TypeVar("T")
BOOKIE = "b1"
PHASES = ("fill", "work")
ENTRIES = 100
PAYLOAD = bytes(1000)
SOME = 100
TOGETHER = 8
# Between two looks at the clock; how late a look is counts as a turn.
LOOK_EVERY_S = 0.001


async def longest_turn(work: Awaitable[T]) -> tuple[T, float]:
    """Awaits the work, and says how long the longest turn of the loop was meanwhile, in seconds."""
    loop = asyncio.get_running_loop()
    longest, at = 0.0, time.perf_counter()
    timer: asyncio.TimerHandle | None = None

    def look() -> None:
        nonlocal longest, at, timer
        now = time.perf_counter()
        longest, at = max(longest, now - at - LOOK_EVERY_S), now
        timer = loop.call_later(LOOK_EVERY_S, look)

    look()
    try:
        result = await work
        await asyncio.sleep(2 * LOOK_EVERY_S)  # one more look, at the last turn
    finally:
        assert timer is not None
        timer.cancel()
    return result, longest


async def step(name: str, work: Awaitable[T]) -> T:
    """Runs and reports it, as a JSON line."""
    began = time.perf_counter()
    result, longest = await longest_turn(work)
    print(
        json.dumps({"step": name, "seconds": time.perf_counter() - began, "longest_s": longest}), flush=True
    )
    return result


class Service:
    """Store, bookie and ledger client of this process."""

    def __init__(self, store: EmbeddedMetadataStore, bookie: Bookie, client: LedgerClient) -> None:
        self.bookie = bookie
        self._store = store
        self._client = client

    async def fill(self, count: int) -> None:
        """Ledgers, some at a time, each of ENTRIES."""
        await together(count, self._make)

    async def _make(self, _: int) -> None:
        writer = await self._client.create()
        left = ENTRIES
        confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(entry_id: int, entry: bytes, error: MagnetarError | None) -> None:
            nonlocal left
            assert error is None, error
            left -= 1
            if not left:
                confirmed.set_result(None)

        for _ in range(ENTRIES):
            writer.append(PAYLOAD, done)
        await confirmed
        await writer.close()

    async def introduce(self) -> None:
        """As brokers that come one after another, each with a newer ledger id of the store."""
        for _ in range(20):
            found = self.bookie.introduce(None)
            self.bookie.introduce(msgspec.structs.replace(found, next_ledger_id=found.next_ledger_id + 1))
            await asyncio.sleep(0.01)

    async def read(self, ledgers: int, entries: int) -> None:
        """The first entries of SOME ledgers anywhere."""
        wanted = random.Random(2).sample(range(ledgers), SOME)

        async def read(number: int) -> None:
            reader = await self._client.open(wanted[number], recover=False)
            first = 0
            while first < entries:
                first += len(await reader.read(first, entries - 1))

        await together(SOME, read)

    async def read_last_confirmed(self, ledgers: int) -> None:
        """Of SOME ledgers that nobody has asked for since the start."""
        for ledger_id in random.Random(3).sample(range(ledgers), SOME):
            await self.bookie.read_last_confirmed(ledger_id)

    async def fence(self, ledgers: int) -> None:
        """SOME others."""
        for ledger_id in random.Random(4).sample(range(ledgers), SOME):
            await self.bookie.fence(ledger_id)

    async def delete(self, ledgers: int) -> None:
        """SOME, spread over all."""
        await together(SOME, lambda number: self._client.delete(number * ledgers // SOME))


async def together(count: int, act: Callable[[int], Awaitable[object]]) -> None:
    """`act` of each number below `count`, TOGETHER at a time."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await act(number)

    await asyncio.gather(*[worker() for _ in range(TOGETHER)])


@contextlib.asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Service]:
    """The whole service; its stop is reported."""
    (directory / "metadata").mkdir(parents=True, exist_ok=True)
    store = EmbeddedMetadataStore(str(directory / "metadata"))
    components = os_components(system_rng())
    cluster = await cluster_instance(store, components.rng)
    ledgers = StoredLedgers(store)
    settings = BookieSettings(str(directory / "bookie"), bookie_id=BOOKIE, gc_interval_s=0.0)
    existing = MetadataLedgers(store, cluster=cluster)
    bookie = await step(
        "(start)", open_bookie(settings, replace(components, cluster=cluster, existing_ledgers=existing))
    )
    await introduce_bookie(bookie, store, cluster)
    transport = LocalTransport({BOOKIE: InProcessBookie(bookie)}, add_timeout_s=60.0, read_timeout_s=60.0)
    client = LedgerClient(
        ledgers,
        transport,
        StaticBookies({BOOKIE: ("127.0.0.1", 1)}),
        LedgerSettings(1, 1, 1),
        random.Random(1),
        SystemClock(),
    )
    yield Service(store, bookie, client)

    async def close() -> None:
        await client.close()
        await transport.close()
        await bookie.close()
        await store.close()

    await step("stop", close())


async def fill(directory: Path, ledgers: int) -> None:
    """See the module."""
    async with opened(directory) as service:
        await step("ledgers", service.fill(ledgers))
        await step("checkpoint", service.bookie.checkpoint())
        os._exit(0)


async def work(directory: Path, ledgers: int) -> None:
    """See the module."""
    async with opened(directory) as service:
        await step("introductions", service.introduce())
        await step("cold last confirmed", service.read_last_confirmed(ledgers))
        await step("cold reads", service.read(ledgers, 1))
        await step("cold catching up", service.read(ledgers, ENTRIES))
        await step("fences", service.fence(ledgers))
        await step("more ledgers", service.fill(SOME))
        await step("deletions", service.delete(ledgers))
        await step("garbage collection", service.bookie.collector.collect())


def slowed(directory: Path, slow_ms: int) -> dict[str, str]:
    """The environment of a process whose disk is slow."""
    library = directory / "slow_disk.so"
    source = Path(__file__).parent / "probes" / "slow_disk.c"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return {**os.environ, "LD_PRELOAD": str(library.resolve()), "SLOW_DISK_MS": str(slow_ms)}


def main(arguments: Sequence[str]) -> int:
    """Runs the phases, each in a process of its own, and prints the table."""
    parser = parser_of("python -m bench slow_disk", __doc__)
    parser.add_argument("--slow", type=int, default=50, metavar="MS")
    parser.add_argument("--ledgers", type=int, default=2_000, metavar="N", help=f"of {ENTRIES} entries each")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.phase:
        uvloop.run({"fill": fill, "work": work}[given.phase](given.directory, given.ledgers))
        return 0
    screen = console()
    directory = OUT / f"scratch-{time.time_ns()}"
    directory.mkdir(parents=True)
    screen.print(f"{'':24}{'seconds':>9}{'longest turn, ms':>20}")
    lines: list[dict[str, Any]] = []
    try:
        environment = slowed(directory, given.slow)
        for name in PHASES:
            drop_page_cache(directory / "data")
            command = [sys.executable, "-m", "bench", "slow_disk", "--phase", name]
            command += ["--ledgers", str(given.ledgers), "--directory", str(directory / "data")]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
                assert process.stdout is not None
                for line in map(json.loads, process.stdout):
                    lines.append(line)
                    screen.print(f"{line['step']:24}{line['seconds']:9.2f}{line['longest_s'] * 1e3:20.1f}")
            if process.returncode:
                return process.returncode
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if given.json is not None:
        given.json.write_text(json.dumps(lines, indent=1))
    return 0
