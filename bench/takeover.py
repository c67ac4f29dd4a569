"""python -m bench takeover: ledgers made and opened, and a broker that takes over the topics of one that was killed.

    python -m bench takeover [--count N] [--only zookeeper,embedded] [--json FILE]

On a ZooKeeper server, and on the embedded store; one bookie process over TCP, fsync on. N ledgers are made and closed, then
opened (their record is read), 64 at a time; N topics get a message each. Then that process is killed, and a broker in
a new one loads all topics: each has an open ledger that must be fenced, recovered and closed. For each step: how many a
second, CPU of the process, requests to the store and to the bookie for each, the longest turn of the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from bench.arguments import OUT, console, parser_of
from bench.service_process import ServiceProcess
from bench.together import together
from bench.turns import longest_turn
from bench.zookeeper import ensemble_in_scratch
from magnetar.broker import Broker, BrokerSettings
from magnetar.cli.production import broker_components
from magnetar.cli.settings import SettingSources, service_settings
from magnetar.cli.shared_metadata import open_ledgers, open_shared_metadata
from magnetar.cli.standalone import open_listed_bookies
from magnetar.ledger import LedgerClient
from magnetar.metadata.embedded import EmbeddedMetadataStore
from magnetar.metadata.identity import cluster_instance
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.admission import admit_groups
from magnetar.proto.batch import encode_batch
from magnetar.proto.ids import TopicName
from magnetar.runtime.clock import SystemClock

QUORUMS = {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1}
STORES = ("zookeeper", "embedded")
_COUNTED = {
    "store": ("get", "create", "put", "delete", "children", "next_id", "commit"),
    "bookie": ("read", "read_last_confirmed", "write_last_confirmed", "add"),
}


class Counting:
    """Something whose calls are counted."""

    def __init__(self, inner: Any, names: Sequence[str]) -> None:
        self.calls = 0
        self._inner = inner
        self._names = names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self._names:
            return found

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            return found(*arguments, **options)

        return counted


class Port:
    """A producer that waits for a receipt."""

    writable = True

    def __init__(self) -> None:
        self.received = asyncio.get_running_loop().create_future()

    def receipts(self, rows: Any) -> None:
        """See ProducerPort."""
        if not self.received.done():
            self.received.set_result(None)

    def send_failed(self, error: Exception) -> None:
        """See ProducerPort."""
        raise AssertionError(error)

    producer_closed = send_failed


class Steps:
    """Runs the steps, and prints a line for each."""

    def __init__(self, store: Counting, bookie: Counting, count: int) -> None:
        self._store = store
        self._bookie = bookie
        self._count = count

    async def step(self, name: str, work: Awaitable[Any]) -> None:
        """`count` of what `name` says."""
        before = self._store.calls, self._bookie.calls
        _, turns = await longest_turn(work)
        calls = {
            "store_calls": self._store.calls - before[0],
            "bookie_calls": self._bookie.calls - before[1],
        }
        print(json.dumps({"step": name, "count": self._count, **turns._asdict(), **calls}), flush=True)


async def opened(given: argparse.Namespace, stops: AsyncExitStack) -> tuple[Counting, Counting, LedgerClient]:
    """The store, the bookie, and a client of both."""
    settings = service_settings(SettingSources(flags={"ledger": QUORUMS, "broker": QUORUMS}))
    components = broker_components()
    if given.url:
        inner: Any = await open_shared_metadata(given.url, components.rng, stops, make_root=True)
        store = Counting(inner, _COUNTED["store"])
        await cluster_instance(inner, components.rng)
        client = await open_ledgers(settings, components, store, stops)  # type: ignore[arg-type]
    else:
        directory = given.directory / "metadata"
        directory.mkdir(exist_ok=True)
        inner = EmbeddedMetadataStore(str(directory))
        stops.push_async_callback(inner.close)
        store = Counting(inner, _COUNTED["store"])
        bookies = {"b1": ("127.0.0.1", given.port)}
        listed, transport = await open_listed_bookies(settings, components, inner, bookies, stops)
        client = LedgerClient(
            StoredLedgers(store),  # type: ignore[arg-type]
            transport,
            listed,
            settings.ledger,
            components.rng,
            SystemClock(),
        )
        stops.push_async_callback(client.close)
    bookie = Counting(client.components.transport, _COUNTED["bookie"])
    object.__setattr__(client.components, "transport", bookie)
    return store, bookie, client


def _name(number: int) -> TopicName:
    return TopicName.parse(f"t{number}")


async def _broker(store: Any, client: LedgerClient) -> Broker:
    broker = Broker(store, client, BrokerSettings(**QUORUMS, maintenance_interval_s=1e6), SystemClock())
    await broker.start()
    return broker


async def fill(given: argparse.Namespace) -> None:
    """Ledgers, and topics with a message each; then killed."""
    async with AsyncExitStack() as stops:
        store, bookie, client = await opened(given, stops)
        steps = Steps(store, bookie, given.count)
        ledgers: list[int] = []

        async def create(_: int) -> None:
            writer = await client.create()
            await writer.close()
            ledgers.append(writer.ledger_id)

        async def read(number: int) -> None:
            await client.open(ledgers[number], recover=False)

        await steps.step("ledgers made and closed", together(given.count, create))
        await steps.step("ledgers opened", together(given.count, read))
        broker = await _broker(store, client)
        group = admit_groups([encode_batch([b"x" * 100], sequence_id=0, publish_time_ms=0)])

        async def publish(number: int) -> None:
            topic = await broker.topic(_name(number), create=True)
            port = Port()
            session = await topic.open_producer("p", epoch=0, access_mode="shared", new_port=lambda _: port)
            topic.publish(session, group)
            await port.received

        await steps.step("topics made, one message each", together(given.count, publish))
        os._exit(0)


async def take(given: argparse.Namespace) -> None:
    """A broker loads all of them."""
    async with AsyncExitStack() as stops:
        store, bookie, client = await opened(given, stops)
        broker = await _broker(store, client)

        async def load(number: int) -> None:
            topic = await broker.topic(_name(number), create=False)
            assert topic is not None

        steps = Steps(store, bookie, given.count)
        await steps.step("topics taken over", together(given.count, load))
        await steps.step("unloaded", broker.close())


def _measure(given: argparse.Namespace, kind: str, say: Callable[[str], None]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stops:
        if kind == "zookeeper":
            ensemble, directory = stops.enter_context(ensemble_in_scratch(1))
            url = f"{ensemble.url}/bench"
            command = [sys.executable, "-m", "magnetar.cli.main", "cluster", "init", "--metadata", url]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        else:
            directory, url = Path(stops.enter_context(tempfile.TemporaryDirectory(dir=OUT))), ""
        bookie = stops.enter_context(running_bookie(directory, url))
        for phase in ("fill", "take"):
            command = [sys.executable, "-m", "bench", "takeover", "--phase", phase]
            command += ["--count", str(given.count), "--directory", str(directory), "--url", url]
            command += ["--port", str(bookie.ports["bookie"])]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                for text in process.stdout:
                    lines.append({"store": kind, **json.loads(text)})
                    _show(lines[-1], say)
            if process.returncode:
                raise SystemExit(process.returncode)
    return lines


@contextlib.contextmanager
def running_bookie(directory: Path, url: str = "") -> Iterator[ServiceProcess]:
    """A bookie of the cluster at `url`, or one without a cluster; killed in the end."""
    line = ["--log-level", "warning", *(["--metadata", url, "--id", "b1"] if url else [])]
    bookie = ServiceProcess(directory / "b1", command="bookie", arguments=line)
    try:
        bookie.start()
        yield bookie
    finally:
        if bookie.running:
            bookie.kill()


def _show(line: dict[str, Any], say: Callable[[str], None]) -> None:
    count = line["count"]
    say(
        f"{line['store']:11}{line['step']:32}{line['seconds']:9.2f}{count / line['seconds']:10,.0f}"
        f"{line['cpu_s'] / count * 1e6:10.1f}{line['store_calls'] / count:8.2f}{line['bookie_calls'] / count:8.2f}"
        f"{line['longest_s'] * 1e3:10.1f}{line['longest_cpu_s'] * 1e3:10.1f}"
    )


def main(arguments: Sequence[str]) -> int:
    """Prints the table."""
    parser = parser_of("python -m bench takeover", __doc__)
    parser.add_argument("--count", type=int, default=10_000, metavar="N", help="ledgers, and topics")
    parser.add_argument("--only", default=",".join(STORES), metavar="NAME,...", help="some of the stores")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--phase", choices=("fill", "take"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.phase:
        uvloop.run(fill(given) if given.phase == "fill" else take(given))
        return 0
    wanted = given.only.split(",")
    if unknown := [name for name in wanted if name not in STORES]:
        parser.error(f"no such store: {', '.join(unknown)}; there are {', '.join(STORES)}")
    screen = console()
    OUT.mkdir(exist_ok=True)
    screen.print(
        f"{'':43}{'seconds':>9}{'a second':>10}{'CPU us':>10}{'store':>8}{'bookie':>8}{'turn ms':>10}{'its CPU':>10}"
    )
    lines = [line for kind in wanted for line in _measure(given, kind, screen.print)]
    path = given.json or OUT / time.strftime("bench-takeover-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(lines, indent=1))
    screen.print(f"all figures: {path}")
    return 0
