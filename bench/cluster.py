"""python -m bench cluster: three bookies, ZooKeeper of three servers, 5,000 appends a second, and what goes wrong meanwhile.

    python -m bench cluster [--rate N] [--megabytes N] [--seconds S] [--quick] [--json FILE]

All of them are processes on loopback with fsync on; the writer is a ledger client in this one (E 3, Qw 2, Qa 2, 1 KB), which
begins a new ledger every two seconds. One after another:

    alone      nothing goes wrong
    leader     the leader of ZooKeeper is killed; it comes back at the end
    repair     a fourth bookie is there; one of the first three is killed, and its disk is gone: until every ledger has all
               its copies again. The first second, in which writers replace it, is shown apart (`loss`)
    no quorum  a broker and a producer at the same rate; two of three ZooKeeper servers stop: the broker says so and fences
               its topics before its session can expire elsewhere, and serves again by itself when they are back

For each: appends a second, failed ones, their latency from the moment when each was due; of the repair its rate. The writer,
the repair and all servers share the cores of this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import shutil
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from bench.arguments import OUT, console
from bench.percentiles import percentiles
from bench.repair import UNCONFIRMED, lacking, write
from bench.service_process import ServiceProcess
from bench.zookeeper import ensemble_in_scratch
from magnetar.cli.wiring.components import broker_components
from magnetar.cli.wiring.metadata import open_shared_metadata
from magnetar.cli.wiring.settings import SettingSources, service_settings
from magnetar.cli.wiring.shared_metadata import open_ledgers
from magnetar.client import connect
from magnetar.ledger import LedgerClient, LedgerWriter
from magnetar.ledger.tcp_transport import TcpTransport
from magnetar.metadata import MetadataStore
from magnetar.metadata.identity import cluster_instance
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import MagnetarError

SIZE = 1024
ROLL_S = 2.0
SESSION_S = 4.0
LOSS_S = 1.0
LEDGER_ENTRIES = 4096
# Loopback, whatever proxy the environment names.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
SETTINGS = {
    "daemon.session_timeout_s": SESSION_S,
    "broker.ensemble_size": 3,
    "broker.write_quorum": 2,
    "broker.ack_quorum": 2,
    "repair.lost_bookie_delay_s": 2,
    "repair.open_ledger_grace_s": 2,
    "repair.retry_backoff_s": 1,
}


class Load:
    """Appends at a rate, whatever happens; a new ledger every ROLL_S as soon as one can be made, or when one fails."""

    def __init__(self, client: LedgerClient, rate: int) -> None:
        self.latencies_s: list[float] = []
        self.failed = 0
        self.ledgers = 0
        self._client = client
        self._rate = rate
        self._payload = random.Random(2).randbytes(SIZE)
        self._tasks: list[asyncio.Task[Any]] = []
        self._outstanding = asyncio.Semaphore(100_000)

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._run())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def take(self) -> tuple[list[float], int]:
        """Latencies and failures since the last call."""
        found = self.latencies_s, self.failed
        self.latencies_s, self.failed = [], 0
        return found

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        writer = await self._next()
        following: asyncio.Task[LedgerWriter] | None = None
        due = roll = loop.time()
        broken = False

        def done(began: float, of: LedgerWriter, error: MagnetarError | None) -> None:
            nonlocal broken
            self.failed += error is not None
            broken = broken or (error is not None and of is writer)
            self.latencies_s.append(loop.time() - began)

        while True:
            due += 1 / self._rate
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            if following is None and (broken or loop.time() > roll + ROLL_S):
                following = asyncio.create_task(self._next())
            if following is not None and (broken or following.done()):
                old, writer = writer, await following
                self._tasks = [task for task in self._tasks if not task.done()]
                self._tasks.append(asyncio.create_task(self._close(old)))
                following, roll, broken = None, loop.time(), False
            began, of = due, writer
            writer.append(
                self._payload, lambda _id, _entry, error, began=began, of=of: done(began, of, error)
            )

    async def _next(self) -> LedgerWriter:
        while True:
            with contextlib.suppress(MagnetarError):
                writer = await self._client.create()
                self.ledgers += 1
                return writer
            await asyncio.sleep(0.1)

    async def _close(self, writer: LedgerWriter) -> None:
        with contextlib.suppress(MagnetarError):
            await writer.close()


class Cluster:
    """The processes, and what this process sees of them."""

    def __init__(self, ensemble: Any, directory: Path) -> None:
        self.ensemble = ensemble
        self.url = f"{ensemble.url}/bench"
        self._directory = directory
        self.bookies: dict[str, ServiceProcess] = {}
        self.store: MetadataStore
        self.client: LedgerClient

    def daemon(self, command: str, name: str, *arguments: str) -> ServiceProcess:
        """Not started."""
        line = ["--metadata", self.url, "--log-level", "warning"]
        line += [part for item in SETTINGS.items() for part in ("--set", f"{item[0]}={item[1]}")]
        return ServiceProcess(self._directory / name, command=command, arguments=[*line, *arguments])

    async def add_bookie(self, name: str) -> None:
        """Ready when it returns."""
        bookie = self.bookies[name] = self.daemon("bookie", name, "--id", name)
        await asyncio.to_thread(bookie.start)
        await asyncio.to_thread(self._copied_by, bookie)  # a first look at its figures imports what they need

    async def lose(self, name: str) -> None:
        """kill -9, and its disk is gone."""
        bookie = self.bookies.pop(name)
        await asyncio.to_thread(bookie.kill)
        assert bookie.data is not None
        await asyncio.to_thread(shutil.rmtree, bookie.data, ignore_errors=True)

    def copied_bytes(self) -> int:
        """By all bookies' workers."""
        return sum(map(self._copied_by, self.bookies.values()))

    def _copied_by(self, bookie: ServiceProcess) -> int:
        with _DIRECT.open(f"http://{bookie.host}:{bookie.ports['http']}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found = re.search(r"^magnetar_autorecovery_repair_copied_bytes_total\S* (\S+)", text, re.MULTILINE)
        return int(float(found[1])) if found else 0

    async def naming(self, bookie: str) -> int:
        """Ledgers whose record names it."""
        ledgers, name = StoredLedgers(self.store), bookie.encode()
        count = 0
        async for page in ledgers.pages():
            for node in await asyncio.gather(*map(ledgers.get, page)):
                count += node is not None and name in node.value
        return count


@contextlib.asynccontextmanager
async def started(ensemble: Any, directory: Path) -> AsyncIterator[Cluster]:
    """Three bookies, and the client of this process."""
    cluster = Cluster(ensemble, directory)
    async with AsyncExitStack() as stops:
        components = broker_components()
        cluster.store = await open_shared_metadata(cluster.url, components.rng, stops, make_root=True)
        await cluster_instance(cluster.store, components.rng)
        try:
            for number in range(1, 4):
                await cluster.add_bookie(f"b{number}")
            ledger = {"ensemble_size": 3, "write_quorum": 2, "ack_quorum": 2}
            settings = service_settings(SettingSources(flags={"ledger": ledger}))
            cluster.client = await open_ledgers(settings, components, cluster.store, stops)
            yield cluster
        finally:
            for bookie in cluster.bookies.values():
                if bookie.running:
                    bookie.kill()


class Report:
    """Rows of the table."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self._say = say
        say(f"{'':12}{'appends/s':>10}{'failed':>8}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}  ")

    def phase(self, name: str, seconds: float, load: tuple[list[float], int], note: str = "") -> None:
        """One row."""
        latencies, failed = load
        found = percentiles(latencies) if latencies else None
        row = {"appends_per_s": len(latencies) / seconds, "failed": failed, "seconds": seconds, "note": note}
        row |= {"p50_ms": found.p50, "p99_ms": found.p99, "max_ms": found.maximum} if found else {}
        self.rows[name] = row
        figures = "".join(f"{row.get(key, 0.0):9,.1f}" for key in ("p50_ms", "p99_ms", "max_ms"))
        self._say(f"{name:12}{row['appends_per_s']:10,.0f}{failed:8}{figures}  {note}")


async def measure(given: argparse.Namespace, ensemble: Any, directory: Path, report: Report) -> None:
    """All phases."""
    async with started(ensemble, directory) as cluster:
        entries = given.megabytes * 1024
        ledgers = [
            await write(cluster.client, min(LEDGER_ENTRIES, entries - at), SIZE)
            for at in range(0, entries, LEDGER_ENTRIES)
        ]
        async with Load(cluster.client, given.rate) as load:
            await asyncio.sleep(LOSS_S)
            load.take()
            await _phase(report, "alone", load, asyncio.sleep(given.seconds))
            await _phase(report, "leader", load, _lose_leader(cluster, load, given.seconds))
            await cluster.add_bookie("b4")
            load.take()
            await _phase(report, "loss", load, _lose_bookie(cluster))
            began = time.perf_counter()
            copied = await _until_repaired(cluster)
            took = time.perf_counter() - began
            there = list(cluster.bookies)
            report.phase(
                "repair", took, load.take(), f"{copied / took / 1e6:.1f} MB/s, {copied / 1e6:.0f} MB"
            )
            await _phase(report, "afterwards", load, asyncio.sleep(given.seconds))
        transport = cluster.client.components.transport
        assert isinstance(transport, TcpTransport)
        missing = await lacking(StoredLedgers(cluster.store), transport, ledgers, there)
        report.rows["repair"]["lacking"] = missing
        report.rows["repair"]["mb_per_s"] = copied / took / 1e6
        print(f"entries that lack a copy: {missing}")
        await _lose_zookeeper(cluster, given.rate, report)


async def _phase(report: Report, name: str, load: Load, work: Any) -> None:
    began = time.perf_counter()
    note = await work
    report.phase(name, time.perf_counter() - began, load.take(), note or "")


async def _lose_leader(cluster: Cluster, load: Load, seconds: float) -> str:
    leader = cluster.ensemble.leader()
    began, before = time.perf_counter(), load.ledgers
    leader.kill()
    while load.ledgers == before:  # noqa: ASYNC110 - it is made by somebody else
        await asyncio.sleep(0.02)
    first = time.perf_counter() - began
    await asyncio.sleep(max(0.0, seconds - first))
    await asyncio.to_thread(cluster.ensemble.start)
    return f"a ledger was made {first:.1f} s after the kill"


async def _lose_bookie(cluster: Cluster) -> str:
    await cluster.lose("b1")
    await asyncio.sleep(LOSS_S)
    return "b1 is killed, its disk is gone"


async def _until_repaired(cluster: Cluster) -> int:
    while await cluster.naming("b1"):  # noqa: ASYNC110 - repaired by other processes
        await asyncio.sleep(0.2)
    return await asyncio.to_thread(cluster.copied_bytes)


async def _lose_zookeeper(cluster: Cluster, rate: int, report: Report) -> None:
    """A broker's producer goes on; two servers stop."""
    broker = cluster.daemon("broker", "broker")
    await asyncio.to_thread(broker.start)
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    last_receipt = 0.0
    try:
        # What was not confirmed fails when the client is closed.
        async with contextlib.AsyncExitStack() as stops:
            stops.enter_context(contextlib.suppress(MagnetarError))
            client = await stops.enter_async_context(connect(broker.url))
            producer = await client.create_producer("load", send_timeout=SESSION_S)
            due = begun = loop.time()
            outstanding = asyncio.Semaphore(UNCONFIRMED * 10)
            stopped_at: float | None = None
            fenced_at: float | None = None
            look_at = 0.0
            tasks: dict[asyncio.Task[None], None] = {}

            async def send(began: float) -> None:
                nonlocal last_receipt
                try:
                    await producer.send(bytes(SIZE))
                except MagnetarError:
                    return
                finally:
                    outstanding.release()
                last_receipt = loop.time()
                latencies.append(last_receipt - began)

            while fenced_at is None and loop.time() < begun + 60:
                due += 1 / rate
                if (wait := due - loop.time()) > 0:
                    await asyncio.sleep(wait)
                if stopped_at is None and loop.time() > begun + 3:
                    stopped_at = loop.time()
                    for server in cluster.ensemble.servers[:2]:
                        server.pause()
                if stopped_at is not None and loop.time() > look_at:
                    look_at = loop.time() + 0.05
                    fenced_at = loop.time() if "lost its session" in broker.errors() else None
                if outstanding.locked():
                    await asyncio.sleep(0.001)
                    continue
                await outstanding.acquire()
                task = asyncio.create_task(send(due))
                tasks[task] = None
                task.add_done_callback(tasks.pop)
            assert stopped_at is not None
            assert fenced_at is not None
            last_before = last_receipt
            for server in cluster.ensemble.servers[:2]:
                server.resume()
            resumed_at = loop.time()
            await asyncio.gather(*tasks, return_exceptions=True)
            while last_receipt < resumed_at:
                await send(loop.time())
        note = (
            f"the broker fenced itself {fenced_at - stopped_at:.2f} s after the stop and said so; last receipt after "
            f"{last_before - stopped_at:.2f} s; its session lasts {SESSION_S:g} s; served again "
            f"{last_receipt - resumed_at:.2f} s after the servers were back"
        )
        report.phase("no quorum", last_receipt - begun, (latencies, 0), note)
    finally:
        for server in cluster.ensemble.servers[:2]:
            server.resume()
        if broker.running:
            broker.kill()


def main(arguments: Sequence[str]) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rate", type=int, default=5_000, metavar="N", help="appends a second")
    parser.add_argument(
        "--megabytes", type=int, default=256, metavar="N", help="stored before; a copy of half of it goes"
    )
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="of a phase")
    parser.add_argument("--quick", action="store_true", help="1,000 appends a second, 16 MB, 4 s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    if given.quick:
        given.rate, given.megabytes, given.seconds = 1_000, 16, 4.0
    screen = console()
    report = Report(screen.print)
    with ensemble_in_scratch(3) as (ensemble, directory):
        uvloop.run(measure(given, ensemble, directory, report))
    path = given.json or OUT / time.strftime("bench-cluster-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(report.rows, indent=1))
    screen.print(f"all figures: {path}")
    return 0
