"""The administration of many objects over HTTP: how long calls take, and how long a turn of the daemon's loop is meanwhile.

    python -m bench admin [--namespaces 10000] [--topics 100000] [--loaded 2000] [--partitions 1000]

The objects are written as records into the embedded store; then a real service starts, and this process asks it. All
namespaces are of one tenant and have policies; half of the topics are in one of them. A part of the topics is loaded.
"CPU" is the daemon's for each call. Turns are measured in its process (`watched.py`): the longest of each call, by its CPU
without that of the garbage collector; the longest collection; where the loop was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from bench.arguments import OUT, console
from bench.many_partitions import Steps, each
from bench.service_process import ServiceProcess, cpu_time
from bench.watched import TURNS
from magnetar.broker.log.records import (
    NamespaceRecord,
    TenantRecord,
    TopicRecord,
    namespace_path,
    tenant_path,
    topic_path,
)
from magnetar.client import connect
from magnetar.metadata.embedded import EmbeddedMetadataStore
from magnetar.metadata.store import Create
from magnetar.proto.ids import TopicName
from magnetar.proto.policies import Policies

TENANT, LARGE = "acme", "acme/ns-0"
GROUP = 500  # records in a commit
STATS_MS, TURN_MS = 5.0, 20.0  # the goals
POLICIES = Policies(
    retention_ms=3_600_000, retention_bytes=1 << 30, message_ttl_ms=86_400_000, max_producers=100
)


def topic(number: int, given: argparse.Namespace) -> str:
    """Even ones are in the large namespace."""
    space = 0 if number % 2 == 0 else number % given.namespaces
    return f"persistent://{TENANT}/ns-{space}/topic-{number}"


async def fill(directory: Path, given: argparse.Namespace) -> None:
    """Writes the records."""
    now_ms = time.time_ns() // 1_000_000
    store = EmbeddedMetadataStore(str(directory))
    path, record = tenant_path(TENANT), TenantRecord([], ["standalone"], now_ms)
    rows = [(path, record.encode())]
    space, plain = NamespaceRecord(POLICIES, now_ms).encode(), TopicRecord.new(now_ms).encode()
    rows += [(namespace_path(f"{TENANT}/ns-{number}"), space) for number in range(given.namespaces)]
    rows += [(topic_path(TopicName.parse(topic(number, given))), plain) for number in range(given.topics)]
    try:
        for first in range(0, len(rows), GROUP):
            await store.commit([Create(*row) for row in rows[first : first + GROUP]])
    finally:
        await store.close()


def own_ms(turn: dict[str, Any]) -> float:
    """What it took itself: not what others used of the processor, nor the garbage collector."""
    return float(min(turn["cpu_ms"], turn["wall_ms"]) - turn["gc_ms"])


class Bench:
    """Asks, and keeps what was measured."""

    def __init__(self, session: aiohttp.ClientSession, turns: Path, pid: int) -> None:
        """`pid`: of the daemon."""
        self._session = session
        self._pid = pid
        self._turns = turns
        self._print = console().print
        self.over: list[str] = []

    async def ask(self, method: str, path: str, body: Any = None) -> bytes:
        """The answer. Raises ClientResponseError."""
        path = path if path[:2] == "/m" or path[:2] == "/o" else f"/admin/v2/{path}"
        async with self._session.request(method, path, json=body) as response:
            answer = await response.read()
            response.raise_for_status()
            return answer

    @asynccontextmanager
    async def row(self, name: str, limit_ms: float = 0.0) -> AsyncIterator[list[float]]:
        """A line of the table, of the times that are put into the list; the time of all when it stays empty."""
        times: list[float] = []
        began, cpu_s = time.monotonic(), cpu_time(self._pid).total
        yield times
        ended, cpu_s = time.monotonic(), cpu_time(self._pid).total - cpu_s
        await asyncio.sleep(0.05)
        times = times or [ended - began]
        lines = map(json.loads, self._turns.read_text().splitlines())
        within = [one for one in lines if began < one["end_s"] < ended + 0.05]
        worst = max(within, key=own_ms, default=None)
        collected = max((one["gc_ms"] for one in within), default=0.0)
        turn = f"{0 if worst is None else own_ms(worst):7.1f} {collected:7.1f}  {worst['where'] if worst else ''}"
        middle, most = statistics.median(times) * 1e3, max(times) * 1e3
        cpu_ms = cpu_s * 1e3 / len(times)
        self._print(
            f"{name:52} {middle:9.2f} {most:9.2f} {cpu_ms:9.2f} {turn}", soft_wrap=True, highlight=False
        )
        if worst is not None and own_ms(worst) > TURN_MS:
            self.over.append(f"{name}: a turn of {own_ms(worst):.1f} ms")
        if limit_ms and cpu_ms > limit_ms:
            self.over.append(f"{name}: {cpu_ms:.1f} ms")

    async def calls(
        self, name: str, method: str, paths: Iterable[str], body: Any = None, *, limit_ms: float = 0.0
    ) -> None:
        """Each path, one after another."""
        async with self.row(name, limit_ms) as times:
            for path in paths:
                began = time.monotonic()
                await self.ask(method, path, body)
                times.append(time.monotonic() - began)


async def work(service: ServiceProcess, turns: Path, given: argparse.Namespace) -> list[str]:
    """All calls; what is beyond its goal."""
    steps = Steps(service)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(
        f"http://{service.host}:{service.ports['http']}", timeout=timeout
    ) as session:
        bench = Bench(session, turns, service.pid)
        say = console().print
        say(f"{'':52} {'p50, ms':>9} {'max, ms':>9} {'CPU, ms':>9} {'turn':>7} {'GC':>7}")
        await bench.calls("the first call of HTTP", "GET", ["tenants"])
        await bench.calls("namespaces of the tenant", "GET", [f"namespaces/{TENANT}"] * 5)
        await bench.calls("topics of the large namespace", "GET", [f"namespaces/{LARGE}/topics"] * 5)
        await bench.calls("persistent topics of it", "GET", [f"persistent/{LARGE}"] * 5)
        spaces = [
            f"namespaces/{TENANT}/ns-{number}"
            for number in range(1, given.namespaces, given.namespaces // 50)
        ]
        await bench.calls("a namespace with its policies", "GET", spaces)
        await bench.calls("a policy of it", "GET", [f"{one}/retention" for one in spaces])
        await bench.calls("a policy set", "POST", [f"{one}/maxProducersPerTopic" for one in spaces], 7)
        names = [topic(number, given).replace("://", "/") for number in range(given.topics)]
        first = names[1 : 1 + 2 * given.loaded : 2]
        stats = [f"{one}/stats" for one in first[:300]]
        await bench.calls("stats of a topic, the first call", "GET", stats, limit_ms=STATS_MS)
        await bench.calls("stats of a topic, again", "GET", stats, limit_ms=STATS_MS)
        await bench.calls("internal stats", "GET", [f"{one}/internalStats" for one in first[:300]])
        await bench.calls("a subscription made", "PUT", [f"{one}/subscription/s" for one in first[:100]])
        await bench.calls("stats of a topic with a subscription", "GET", stats[:100], limit_ms=STATS_MS)
        async with bench.row(f"{given.loaded} topics loaded, 50 at a time"):
            await each(first, lambda one: bench.ask("GET", f"{one}/stats"))
        steps.took(f"{given.loaded} topics loaded", 0.0)
        for name, method, path in (
            ("the busiest topics", "GET", "/magnetar/v1/busiest"), ("problems", "GET", "/magnetar/v1/problems"),
            ("metrics", "GET", "/metrics"), ("topics that the broker serves", "GET", "broker-stats/topics"),
            ("OpenAPI", "GET", "/openapi.json"), ("its page", "GET", "/openapi.html"),
            ("configuration", "GET", "brokers/configuration/runtime"),
            ("bundles of a namespace", "GET", f"namespaces/{LARGE}/bundles"),
        ):  # fmt: skip
            await bench.calls(name, method, [path] * 3)
        broker = json.loads(await bench.ask("GET", "brokers"))[0]
        await bench.calls("what a broker owns", "GET", [f"brokers/standalone/{broker}/ownedNamespaces"])
        many, count = f"persistent/{TENANT}/ns-1/many", given.partitions
        await bench.calls(f"{count} partitions made", "PUT", [f"{many}/partitions"], count)
        for name, method, path in (
            ("their stats, the first call", "GET", "partitioned-stats"), ("their stats", "GET", "partitioned-stats"),
            ("with each", "GET", "partitioned-stats?perPartition=true"),
            ("their internal stats", "GET", "partitioned-internalStats"),
            ("a subscription for all", "PUT", "subscription/s"), ("its backlog cleared", "POST", "subscription/s/skip_all"),
            ("unloaded", "PUT", "unload"), ("deleted by force", "DELETE", "partitions?force=true"),
        ):  # fmt: skip
            await bench.calls(f"{count} partitions: {name}", method, [f"{many}/{path}"])
        await bench.calls("topics deleted", "DELETE", [*names[-201:-1:2]])
        async with (
            connect(service.url, operation_timeout=120.0) as client,
            bench.row("pages of all topics, native"),
        ):
            await client.admin.list_topics()
        steps.took("done", 0.0)
        return bench.over


def main(arguments: Sequence[str]) -> int:
    """Prints a line for each call; 1 when a goal was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench admin", description=__doc__)
    parser.add_argument("--namespaces", type=int, default=10_000)
    parser.add_argument("--topics", type=int, default=100_000)
    parser.add_argument("--loaded", type=int, default=2_000)
    parser.add_argument("--partitions", type=int, default=1_000)
    given = parser.parse_args(arguments)
    data = OUT / f"admin-{time.time_ns()}"
    turns = OUT / f"{data.name}.turns"
    service = ServiceProcess(data, environment={TURNS: str(turns)}, module="bench.watched")
    OUT.mkdir(exist_ok=True)
    try:
        with service:
            Steps(service).took("started, with nothing", service.ready_after_s)
        began = time.monotonic()
        asyncio.run(fill(data / "metadata", given))
        size = sum(one.stat().st_size for one in (data / "metadata").rglob("*") if one.is_file())
        what = f"{given.namespaces} namespaces and {given.topics} topics written"
        console().print(f"{what:55} {time.monotonic() - began:8.2f} s   {size / 1e6:.0f} MB on disk")
        with service:
            Steps(service).took("started again", service.ready_after_s)
            over = asyncio.run(work(service, turns, given))
    finally:
        shutil.rmtree(data, ignore_errors=True)
        turns.unlink(missing_ok=True)
    for one in over:
        console().print(f"beyond its goal: {one}")
    return 1 if over else 0
