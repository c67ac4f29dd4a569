"""python -m bench replicated: what a message costs on a cluster of three bookies, by role, with one broker and with three.

    python -m bench replicated [--rounds N] [--quick] [--json FILE]

A ZooKeeper server, three bookies and the brokers are processes on loopback with fsync on; messages have 100 bytes. For each
E/Qw/Qa, as (a) and (b) of `make bench`: one client process produces to one topic and tails it, unbatched or 1,000 a batch,
at one broker. Then three such clients with a topic each, 3/2/2, at full speed and at a pace: first at one broker, then at
three with one topic each. CPU microseconds a message tell what a broker more costs; rates share the cores of this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from rich.table import Table

from bench.arguments import OUT, add_common, console, parser_of
from bench.cluster import Cluster, started
from bench.probes import settle
from bench.service_process import ServiceProcess, cpu_time
from bench.services import client_line
from bench.zookeeper import ensemble_in_scratch
from magnetar.broker.ownership.core.bundles import Bundle
from magnetar.client import Client, connect
from magnetar.proto.ids import TopicName

QUORUMS = ((2, 2, 2), (3, 3, 2), (3, 2, 2))
# Messages a second of the prototype with three bookies, 3/2/2, a broker and a client process; and the share of it asked for.
PROTOTYPE = {"unbatched": 353_000, "batched": 861_000}
SHARE = 0.7
ROLES = ("client", "broker", "bookie", "zookeeper")
CLIENTS = 3
PACE = 5_000  # messages a second of each client


class Load(NamedTuple):
    """What a client process does (bench.client)."""

    name: str
    workload: str
    parameters: dict[str, Any]


def loads(part: int) -> dict[str, Load]:
    """By name; `part`: which part of the messages is sent."""
    return {
        "unbatched": Load("unbatched", "unbatched", {"messages": 600_000 // part, "size": 100}),
        "batched": Load("batched", "batched", {"messages": 2_000_000 // part, "size": 100, "batch": 1000}),
        "paced": Load("paced", "end_to_end", {"rate": PACE, "seconds": 8 / part, "size": 100}),
    }


class Run(NamedTuple):
    """A row: `rate` of all clients, CPU microseconds a message by role; p50 and p99 in milliseconds if it was paced."""

    quorums: str
    clients: int
    brokers: int
    load: str
    rate: float
    cpu_us: dict[str, float]
    p50_ms: float | None = None
    p99_ms: float | None = None


class Bench:
    """A cluster, and the runs on it."""

    def __init__(self, cluster: Cluster, settle_s: float, say: Callable[[str], None]) -> None:
        self.runs: list[Run] = []
        self._cluster = cluster
        self._settle_s = settle_s
        self._say = say
        self._brokers: dict[str, ServiceProcess] = {}
        self._topics = 0

    async def start_brokers(self, count: int) -> None:
        """Until there are `count`."""
        for number in range(len(self._brokers) + 1, count + 1):
            name = f"broker-{number}"
            broker = self._brokers[name] = self._cluster.daemon(
                "broker", name, "--set", f"broker.name={name}"
            )
            await asyncio.to_thread(broker.start)

    def stop(self) -> None:
        """All brokers."""
        for broker in self._brokers.values():
            if broker.running:
                broker.kill()

    async def run(self, quorums: tuple[int, int, int], load: Load, clients: int = 1) -> None:
        """Clients with a topic each; the topics are spread over all brokers."""
        namespace = f"bench/{'-'.join(map(str, quorums))}-{len(self._brokers)}"
        broker = next(iter(self._brokers.values()))
        async with connect(broker.url) as client:
            names = ("ensemble_size", "write_quorum", "ack_quorum")
            await client.admin.update_namespace_policies(namespace, dict(zip(names, quorums)))
            topics = await self._spread(client, namespace, clients)
        await asyncio.to_thread(settle, self._settle_s)
        before = self._cpu()
        results = await asyncio.gather(*[self._client(broker.url, load, topic) for topic in topics])
        used = {role: seconds - before[role] for role, seconds in self._cpu().items()}
        used["client"] = sum(result["cpu_s"] for result in results)
        messages = sum(result["messages"] for result in results)
        run = Run(
            "/".join(map(str, quorums)),
            clients,
            len(self._brokers),
            load.name,
            sum(result["rate"] for result in results),
            {role: used[role] / messages * 1e6 for role in ROLES},
            *(
                statistics.median(result[name] for result in results) if name in results[0] else None
                for name in ("p50", "p99")
            ),
        )
        self.runs.append(run)
        self._say(
            f"    {run.quorums}  {clients} clients  {run.brokers} brokers  {load.name:10} {run.rate:12,.0f}/s"
        )

    async def _spread(self, client: Client, namespace: str, count: int) -> list[str]:
        """Names of new topics in bundles of their own; the bundles are given to the brokers in turn."""
        found: list[str] = []
        moved: set[str] = set()
        while len(found) < count:
            self._topics += 1
            topic = f"{namespace}/load-{self._topics}"
            async with client.create_producer(topic):
                pass  # the topic is there now, and its bundle has an owner
            name = TopicName.parse(topic)
            bundle = next(
                row
                for row in await client.admin.bundles(namespace)
                if Bundle.parse(row["bundle"]).holds(name)
            )
            if bundle["bundle"] in moved:
                continue
            to = list(self._brokers)[len(found) % len(self._brokers)]
            if bundle["broker"] != to:
                await client.admin.unload_bundle(bundle["bundle"], to=to)
            moved.add(bundle["bundle"])
            found.append(topic)
        return found

    async def _client(self, url: str, load: Load, topic: str) -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            *client_line(url, load.workload, topic, load.parameters), stdout=asyncio.subprocess.PIPE
        )
        said, _ = await process.communicate()
        if process.returncode:
            raise SystemExit(f"bench: the client of {load.name} ended with {process.returncode}")
        found: dict[str, Any] = json.loads(said.splitlines()[-1])
        return found

    def _cpu(self) -> dict[str, float]:
        """Seconds by role, so far; helper processes count with their daemon."""

        def used(services: dict[str, ServiceProcess]) -> float:
            return sum(
                cpu_time(pid).total for service in services.values() for pid in service.processes().values()
            )

        servers = self._cluster.ensemble.servers
        return {
            "broker": used(self._brokers),
            "bookie": used(self._cluster.bookies),
            "zookeeper": sum(cpu_time(server.pid).total for server in servers),
        }


async def measure(given: argparse.Namespace, cluster: Cluster, say: Callable[[str], None]) -> list[Run]:
    """All rounds."""
    bench = Bench(cluster, given.settle, say)
    wanted = loads(8 if given.quick else 1)
    try:
        await bench.start_brokers(1)
        for number in range(given.rounds):
            say(f"round {number + 1} of {given.rounds}, one broker")
            for quorums in QUORUMS:
                await bench.run(quorums, wanted["unbatched"])
                await bench.run(quorums, wanted["batched"])
            for load in wanted.values():
                await bench.run(QUORUMS[-1], load, CLIENTS)
        await bench.start_brokers(3)
        for number in range(given.rounds):
            say(f"round {number + 1} of {given.rounds}, three brokers")
            for load in wanted.values():
                await bench.run(QUORUMS[-1], load, CLIENTS)
    finally:
        bench.stop()
    return bench.runs


def medians(runs: Sequence[Run]) -> list[Run]:
    """Of the rounds, in the order of the first one."""
    found: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        found.setdefault(run[:4], []).append(run)

    def middle(values: list[float | None]) -> float | None:
        there = [value for value in values if value is not None]
        return statistics.median(there) if there else None

    return [
        same[0]._replace(
            rate=statistics.median(run.rate for run in same),
            cpu_us={role: statistics.median(run.cpu_us[role] for run in same) for role in ROLES},
            p50_ms=middle([run.p50_ms for run in same]),
            p99_ms=middle([run.p99_ms for run in same]),
        )
        for same in found.values()
    ]


def table_of(runs: Sequence[Run]) -> Table:
    """For people."""
    table = Table(title="Magnetar: three bookies", title_justify="left")
    table.add_column("E/Qw/Qa", no_wrap=True)
    for column in (
        "clients",
        "brokers",
        "load",
        "messages/s",
        "of prototype",
        "p50, p99 ms",
        *ROLES,
        "CPU us",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        share = run.rate / PROTOTYPE[run.load] if run.clients == 1 else None
        table.add_row(
            run.quorums,
            str(run.clients),
            str(run.brokers),
            run.load,
            f"{run.rate:,.0f}",
            "" if share is None else f"[{'green' if share >= SHARE else 'bold red'}]{share:.2f}[/]",
            "" if run.p50_ms is None else f"{run.p50_ms:.2f}, {run.p99_ms:.2f}",
            *(f"{run.cpu_us[role]:.2f}" for role in ROLES),
            f"{sum(run.cpu_us.values()):.2f}",
        )
    return table


def main(arguments: Sequence[str]) -> int:
    """Prints the table."""
    parser = parser_of("python -m bench replicated", __doc__)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how many rounds (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one round with an eighth of the messages")
    add_common(parser)
    given = parser.parse_args(arguments)
    if given.quick:
        given.rounds = 1
    screen = console()
    runs: list[Run] = []

    async def run(ensemble: Any, directory: Path) -> None:
        async with started(ensemble, directory) as cluster:
            runs.extend(await measure(given, cluster, screen.print))

    with ensemble_in_scratch(1) as (ensemble, directory):
        uvloop.run(run(ensemble, directory))
    screen.print(table_of(medians(runs)))
    path = given.json or OUT / time.strftime("bench-replicated-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps([run._asdict() for run in runs], indent=1))
    screen.print(f"all figures: {path}")
    return 0
