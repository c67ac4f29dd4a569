"""python -m bench million: a million small ledgers on one bookie, with the embedded metadata store, on a real disk.

    python -m bench million [--ledgers N] [--quick] [--json FILE]

The engine, the store and a ledger client share a process, as in `magnetar standalone`; its helpers (journal writer, disk
worker), files and RocksDB are real, fsync is on. Three processes follow each other:

    fill     ledgers by the client, one after another as a broker makes them; most are put there in bulk (records by the
             thousand, entries straight to the bookie); ledgers by the client once more; both lists; a stop
    start    a start after the stop; reads of ledgers anywhere; ledgers by the client; killed
    work     a start after the kill; 1% of the records deleted; a round of garbage collection, which finds them; an
             auditor's pass for a lost bookie, and a full check

For each step: seconds, CPU of the process, the longest turn of its loop by the clock and by CPU, memory afterwards of the
process and of its helpers. A start serves nobody until it is done; its turns are shown for what runs beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from bench.arguments import OUT, console, parser_of
from bench.service_process import helper_roles, resident_bytes
from bench.together import together
from bench.turns import Turns, longest_turn
from magnetar.bookie import Bookie, open_bookie
from magnetar.bookie.gc import MetadataLedgers
from magnetar.bookie.settings import BookieSettings
from magnetar.cli.bookie_identity import introduce_bookie
from magnetar.cli.production import bookie_components
from magnetar.ledger import LedgerClient, LedgerMetadata, LedgerSettings, LocalTransport, StaticBookies
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.replication.audit_pass import LedgerAudit
from magnetar.ledger.replication.compliance import violates_placement
from magnetar.ledger.replication.core.request import Reason
from magnetar.ledger.replication.leftovers import StoredAssignments
from magnetar.ledger.replication.queue import RepairQueue
from magnetar.metadata.embedded import EmbeddedMetadataStore
from magnetar.metadata.identity import cluster_instance
from magnetar.metadata.ledgers import StoredLedgers, ledger_path
from magnetar.metadata.store import Create, Delete, Operation
from magnetar.proto.errors import MagnetarError
from magnetar.proto.ledger_entry import encode_ledger_entry
from magnetar.runtime.allocator import keep_large_buffers
from magnetar.runtime.clock import SystemClock

BOOKIE = "b1"
STRIPING = Striping(1, 1, 1)
PAYLOAD = bytes(100)
IN_BULK = 500
DELETED = 0.01
PHASES = ("fill", "start", "work")


class Service:
    """Store, bookie and ledger client of this process."""

    def __init__(
        self, store: EmbeddedMetadataStore, bookie: Bookie, transport: LocalTransport, client: LedgerClient
    ) -> None:
        self.store = store
        self.bookie = bookie
        self.transport = transport
        self.client = client
        self.ledgers = StoredLedgers(store)


class Report:
    """Steps as they end, one JSON line each."""

    def __init__(self, phase: str) -> None:
        self._phase = phase

    async def step(self, name: str, work: Awaitable[Any], *, count: int = 0) -> Any:
        """Runs and reports it. `count`: of what `name` says, for figures of each."""
        result, turns = await longest_turn(work)
        self.tell(name, turns, count)
        return result

    def tell(self, name: str, turns: Turns, count: int = 0) -> None:
        """Prints the line."""
        helpers = sum(map(resident_bytes, helper_roles(os.getpid())))
        print(
            json.dumps(
                {
                    "phase": self._phase,
                    "step": name,
                    "count": count,
                    **turns._asdict(),
                    "resident_bytes": resident_bytes(os.getpid()),
                    "helper_bytes": helpers,
                }
            ),
            flush=True,
        )


@contextlib.asynccontextmanager
async def opened(directory: Path, report: Report) -> AsyncIterator[Service]:
    """The whole service; a start is reported part by part."""
    before, before_cpu = time.perf_counter(), time.thread_time()
    (directory / "metadata").mkdir(parents=True, exist_ok=True)
    store = EmbeddedMetadataStore(str(directory / "metadata"))
    took = time.perf_counter() - before
    report.tell("start of the store", Turns(took, time.thread_time() - before_cpu, took, took))
    components = bookie_components()
    cluster = await cluster_instance(store, components.rng)
    ledgers = StoredLedgers(store)
    bookie: Bookie = await report.step(
        "start of the bookie",
        open_bookie(
            # Rounds of garbage collection when they are measured, not beside something else.
            BookieSettings(str(directory / "bookie"), bookie_id=BOOKIE, gc_interval_s=0.0),
            replace(
                components,
                cluster=cluster,
                existing_ledgers=MetadataLedgers(store, cluster=cluster),
                assignments=StoredAssignments(ledgers, BOOKIE),
            ),
        ),
    )
    await introduce_bookie(bookie, store, cluster)
    transport = LocalTransport({BOOKIE: bookie})

    async def start_client() -> LedgerClient:
        client = LedgerClient(
            ledgers,
            transport,
            StaticBookies({BOOKIE: ("127.0.0.1", 1)}),
            LedgerSettings(1, 1, 1),
            random.Random(1),
            SystemClock(),
        )
        client.send_missed_deletions()
        return client

    client = await report.step("start of the client", start_client())
    gc.collect()
    gc.freeze()  # as a daemon that is ready does
    yield Service(store, bookie, transport, client)

    async def close() -> None:
        await client.close()
        await transport.close()
        await bookie.close()
        await store.close()

    await report.step("stop", close())


async def create_by_client(service: Service, count: int) -> None:
    """Made, one entry appended, closed."""

    async def create(_: int) -> None:
        writer = await service.client.create()
        confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(entry_id: int, entry: bytes, error: MagnetarError | None) -> None:
            assert error is None, error
            confirmed.set_result(None)

        writer.append(PAYLOAD, done)
        await confirmed
        await writer.close()

    await together(count, create)


async def create_in_bulk(service: Service, count: int) -> None:
    """What the client would have left, with fewer synced writes."""
    closed = LedgerMetadata.create(STRIPING, (BOOKIE,), 0, {}).close(0, len(PAYLOAD)).encode()
    room = asyncio.Semaphore(4 * IN_BULK)

    def done(_bookie: str, _ledger: int, _entry: int, code: int) -> None:
        assert not code, code
        room.release()

    left = count
    while left:
        some = min(left, IN_BULK)
        first = await service.ledgers.new_ids(some)
        made: list[Operation] = [Create(ledger_path(first + n), closed) for n in range(some)]
        await service.store.commit(made)
        for ledger_id in range(first, first + some):
            await room.acquire()
            entry = encode_ledger_entry(ledger_id, 0, -1, len(PAYLOAD), PAYLOAD)
            service.transport.add(BOOKIE, entry, ledger_id, 0, recovery=False, done=done)
        await asyncio.sleep(0)
        left -= some
    for _ in range(4 * IN_BULK):
        await room.acquire()


async def list_records(service: Service) -> int:
    """As `magnetar cluster status` and garbage collection do."""
    listed = 0
    async for page in service.ledgers.pages():
        listed += len(page)
        await asyncio.sleep(0)
    return listed


async def list_on_bookie(service: Service) -> int:
    """As the requests of an operator's command do."""
    listed, after, more = 0, -1, True
    while more:
        page = await service.transport.list_ledgers(BOOKIE, after=after)
        listed, more = listed + len(page.ledgers), page.more
        await asyncio.sleep(0)  # each is a request of its own
        after = page.ledgers[-1].ledger_id if page.ledgers else after
    return listed


async def open_and_read(service: Service, count: int, ledgers: int) -> None:
    """Ledgers anywhere: the record from the store, the entry from the disk."""
    rng = random.Random(2)

    async def read(_: int) -> None:
        reader = await service.client.open(rng.randrange(ledgers), recover=False)
        assert len(await reader.read(0, 0)) == 1

    await together(count, read)


async def delete_records(service: Service, ledgers: int) -> int:
    """Every hundredth, as if this bookie had been away: nobody tells it."""
    wanted = range(0, ledgers, round(1 / DELETED))
    for at in range(0, len(wanted), IN_BULK):
        gone: list[Operation] = [Delete(ledger_path(n)) for n in wanted[at : at + IN_BULK]]
        await service.store.commit(gone)
        await asyncio.sleep(0)
    return len(wanted)


async def fill(directory: Path, ledgers: int, some: int) -> None:
    """See the module."""
    report = Report("fill")
    async with opened(directory, report) as service:
        await report.step("ledgers by the client", create_by_client(service, some), count=some)
        bulk = ledgers - 2 * some
        await report.step("ledgers in bulk", create_in_bulk(service, bulk), count=bulk)
        await report.step("ledgers by the client, more", create_by_client(service, some), count=some)
        await report.step("a checkpoint", service.bookie.checkpoint())
        assert await report.step("list of records", list_records(service), count=ledgers) == ledgers
        assert await report.step("list of the bookie", list_on_bookie(service), count=ledgers) == ledgers


async def start(directory: Path, ledgers: int, some: int) -> None:
    """See the module."""
    report = Report("start")
    async with opened(directory, report) as service:
        await report.step("opens and reads", open_and_read(service, some, ledgers), count=some)
        await report.step("ledgers by the client", create_by_client(service, some), count=some)
        os._exit(0)


async def work(directory: Path, ledgers: int, some: int) -> None:
    """See the module."""
    report = Report("work")
    async with opened(directory, report) as service:
        deleted = await report.step("records deleted", delete_records(service, ledgers), count=ledgers // 100)
        collected = await report.step(
            "a round of garbage collection", service.bookie.collector.collect(), count=ledgers
        )
        assert collected.deleted_ledgers == deleted, collected
        await report.step("a second round", service.bookie.collector.collect(), count=ledgers)
        queue = RepairQueue(service.store, 10.0)
        audit = LedgerAudit(service.ledgers, queue, SystemClock(), 10.0)
        await report.step("an auditor's pass", audit.run({"gone": Reason.LOST}), count=ledgers)
        violates = partial(violates_placement, service.client.components.chooser)
        check = audit.run({}, registered=lambda: {BOOKIE: None}, violates=violates)
        await report.step("a full check", check, count=ledgers)
        await report.step("ledgers by the client", create_by_client(service, some), count=some)


def show(line: dict[str, Any], say: Callable[[str], None]) -> None:
    """One row of the table."""
    count = line["count"]
    rate = f"{count / line['seconds']:10,.0f}" if count else " " * 10
    each = f"{line['cpu_s'] / count * 1e6:8.1f}" if count else " " * 8
    say(
        f"{line['phase']:6}{line['step']:32}{line['seconds']:9.2f}{rate}{each}"
        f"{line['longest_s'] * 1e3:10.1f}{line['longest_cpu_s'] * 1e3:10.1f}"
        f"{line['resident_bytes'] / 1e6:10,.0f}{line['helper_bytes'] / 1e6:9,.0f}"
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the phases, each in a process of its own, and prints the table."""
    parser = parser_of("python -m bench million", __doc__)
    parser.add_argument("--ledgers", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--quick", action="store_true", help="20,000 ledgers")
    parser.add_argument("--some", type=int, default=10_000, metavar="N", help="made by the client, or read")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.quick:
        given.ledgers, given.some = 20_000, 1_000
    if given.phase:
        keep_large_buffers()
        phase = {"fill": fill, "start": start, "work": work}[given.phase]
        uvloop.run(phase(given.directory, given.ledgers, given.some))
        return 0
    screen = console()
    OUT.mkdir(exist_ok=True)
    directory = OUT / f"scratch-{time.time_ns()}"
    screen.print(f"{given.ledgers:,} ledgers of one entry of {len(PAYLOAD)} bytes")
    screen.print(
        f"{'':38}{'seconds':>9}{'a second':>10}{'CPU us':>8}{'turn ms':>10}{'its CPU':>10}{'RSS MB':>10}{'helpers':>9}"
    )
    lines: list[dict[str, Any]] = []
    try:
        for name in PHASES:
            command = [sys.executable, "-m", "bench", "million", "--phase", name]
            command += ["--ledgers", str(given.ledgers), "--some", str(given.some)]
            command += ["--directory", str(directory)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                for text in process.stdout:
                    lines.append(json.loads(text))
                    show(lines[-1], screen.print)
            if process.returncode:
                return process.returncode
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    path = given.json or OUT / time.strftime("bench-million-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(lines, indent=1))
    screen.print(f"all figures: {path}")
    return 0
