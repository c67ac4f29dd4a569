"""python -m bench failover: daemons of a cluster that are killed, stopped and drained while producers wait for each receipt.

    python -m bench failover [--topics N] [--brokers N] [--rounds N] [--faults kill,drain,stop] [--subscriptions N]
    python -m bench failover --faults bookie --topics 20 --pace 0.02 --brokers 1 --rounds 10

ZooKeeper, three bookies (3/2/2) and the brokers are processes on loopback with fsync on; this process has a producer for
each topic, which sends a message as soon as the one before is confirmed and the pace (1 s) has passed. A round, one after
another:

    kill       kill -9 of a broker: how long each of its topics confirmed nothing
    stop       SIGTERM: the same, of a hand-over
    drain      `cluster drain` of a broker: the same
    bookie     kill -9 of a bookie, a different one each time: the same. It comes back, and the next round begins when every
               topic has a full ledger again. 3/3/2, and 2/2/2 while a bookie is away, as `make cluster` has it

In the end all topics are read: each message that was confirmed has to be there, in order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from bench.arguments import OUT, console, parser_of
from bench.cluster import Cluster, started
from bench.percentiles import percentiles
from bench.service_process import ServiceProcess
from bench.zookeeper import ensemble_in_scratch
from magnetar.client import Client, Producer, connect

FAULTS = ("kill", "drain", "stop", "bookie")
_BOOKIE_LOSS = {"broker.write_quorum": 3, "ledger.minimum_write_quorum": 2}
_STALL_S = 0.1  # a receipt that takes longer counts


class Load:
    """A producer for each topic; the longest time that each waited for a receipt."""

    def __init__(self, client: Client, topics: int, pace_s: float, subscriptions: int) -> None:
        self.topics = [f"failover-{number}" for number in range(topics)]
        self.sent = dict.fromkeys(self.topics, 0)
        self.longest_s = dict.fromkeys(self.topics, 0.0)
        self._client = client
        self._pace_s = pace_s
        self._subscriptions = subscriptions  # of each topic, each with a cursor ledger
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False

    async def start(self) -> None:
        """Every topic has its first message when this returns."""
        slots = asyncio.Semaphore(64)

        async def open_one(topic: str) -> Producer:
            async with slots:
                producer = await self._client.create_producer(topic, send_timeout=60.0)
                await producer.send(b"0")
                self.sent[topic] = 1
                for number in range(self._subscriptions):
                    await self._client.admin.create_subscription(topic, f"s{number}", start="earliest")
                    await self._client.admin.skip_messages(topic, f"s{number}", 1)
                return producer

        producers = await asyncio.gather(*map(open_one, self.topics))
        self._tasks = [
            asyncio.create_task(self._send(topic, producer, number * self._pace_s / len(self.topics)))
            for number, (topic, producer) in enumerate(zip(self.topics, producers))
        ]

    async def _send(self, topic: str, producer: Producer, offset_s: float) -> None:
        await asyncio.sleep(offset_s)
        while not self._ending:
            began = time.perf_counter()
            await producer.send(b"%d" % self.sent[topic])
            self.sent[topic] += 1
            self.longest_s[topic] = max(self.longest_s[topic], time.perf_counter() - began)
            await asyncio.sleep(self._pace_s)

    def forget(self) -> None:
        """What was waited for until now."""
        self.longest_s = dict.fromkeys(self.topics, 0.0)

    async def end(self) -> None:
        """Nothing is sent any more; everything is confirmed."""
        self._ending = True
        await asyncio.gather(*self._tasks)

    async def lost(self) -> int:
        """Confirmed messages that are not there, or are out of order."""
        slots = asyncio.Semaphore(32)

        async def check(topic: str) -> int:
            expected = 0
            async with slots, self._client.create_reader(topic, start="earliest") as reader:
                while expected < self.sent[topic]:
                    number = int((await reader.receive(timeout=20)).value or b"")
                    if number > expected:
                        return self.sent[topic] - expected
                    expected += number == expected
            return 0

        return sum(await asyncio.gather(*map(check, self.topics)))


async def _busiest(client: Client, brokers: dict[str, ServiceProcess]) -> str:
    """The name of the broker with the most bundles."""
    owners = [row["broker"] for row in await client.admin.bundles("public/default")]
    return max(brokers, key=owners.count)


async def _phase(
    name: str, load: Load, fault: Callable[[], Awaitable[Any]], settle_s: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Longest waits of the topics that waited for longer than _STALL_S."""
    load.forget()
    before = dict(load.sent)
    await fault()
    deadline = time.perf_counter() + 60
    await asyncio.sleep(settle_s)
    while (  # noqa: ASYNC110 - other tasks and processes change it
        any(load.sent[topic] == before[topic] for topic in load.topics) and time.perf_counter() < deadline
    ):
        await asyncio.sleep(0.1)
    stalled = [topic for topic in load.topics if load.longest_s[topic] > _STALL_S]
    found = percentiles([load.longest_s[topic] for topic in (stalled or load.topics)])
    row: dict[str, Any] = {
        "stalled": len(stalled),
        "p50_ms": found.p50,
        "p99_ms": found.p99,
        "max_ms": found.maximum,
    }
    row |= {"fault": name, "longest_s": dict(load.longest_s)}
    say(f"{name:8}{len(stalled):10,}{found.p50:10,.0f}{found.p99:10,.0f}{found.maximum:10,.0f}")
    return row


async def _full_again(client: Client, load: Load) -> None:
    """Every topic has a ledger with all its copies."""
    deadline = time.perf_counter() + 60
    for topic in load.topics:
        while (await client.admin.topic_stats(topic))["degraded"]:
            if time.perf_counter() > deadline:
                raise SystemExit(f"bench: {topic} has no full ledger 60 s after the bookie came back")
            await asyncio.sleep(0.2)


def _say_by_topic(rows: Sequence[dict[str, Any]], say: Callable[[str], None]) -> None:
    """Over all rounds: of every fault the longest waits of all topics, and the topic that waited longest."""
    for fault in dict.fromkeys(row["fault"] for row in rows):
        waits = [
            (wait, topic) for row in rows if row["fault"] == fault for topic, wait in row["longest_s"].items()
        ]
        found = percentiles([wait for wait, _ in waits])
        say(
            f"{fault}, all topics and rounds ({len(waits):,}): p50 {found.p50:,.0f}, p99 {found.p99:,.0f}, "
            f"max {found.maximum:,.0f} ms ({max(waits)[1]})"
        )


async def measure(given: argparse.Namespace, cluster: Cluster, say: Callable[[str], None]) -> list[Any]:
    """All rounds."""
    bundles = f"broker.default_bundles={given.bundles}"
    brokers: dict[str, ServiceProcess] = {}
    settings = ["--set", bundles]
    if "bookie" in given.faults:
        settings += [part for item in _BOOKIE_LOSS.items() for part in ("--set", f"{item[0]}={item[1]}")]
    for number in range(1, given.brokers + 1):
        name = f"broker-{number}"
        brokers[name] = cluster.daemon("broker", name, "--set", f"broker.name={name}", *settings)
        await asyncio.to_thread(brokers[name].start)
    url = "magnetar://" + ",".join(broker.url.partition("://")[2] for broker in brokers.values())
    rows = []
    try:
        async with connect(url, operation_timeout=60.0) as client:
            load = Load(client, given.topics, given.pace, given.subscriptions)
            began = time.perf_counter()
            await load.start()
            say(f"{given.topics:,} topics made in {time.perf_counter() - began:.1f} s")
            await asyncio.sleep(1.0)
            say(f"{'ms':8}{'stalled':>10}{'p50':>10}{'p99':>10}{'max':>10}")
            for number in range(given.rounds):
                for fault in given.faults:
                    name = await _busiest(client, brokers)
                    match fault:
                        case "kill":
                            work = partial(asyncio.to_thread, brokers[name].kill)
                            rows.append(await _phase(fault, load, work, 8.0, say))
                            await asyncio.to_thread(brokers[name].start)
                        case "drain":
                            rows.append(
                                await _phase(fault, load, partial(client.admin.drain, name), 4.0, say)
                            )
                            await client.admin.drain(name, undo=True)
                        case "stop":
                            stop = partial(asyncio.to_thread, brokers[name].stop)
                            rows.append(await _phase(fault, load, stop, 4.0, say))
                            await asyncio.to_thread(brokers[name].start)
                        case _:
                            bookie = list(cluster.bookies.values())[number % len(cluster.bookies)]
                            work = partial(asyncio.to_thread, bookie.kill)
                            rows.append(await _phase(fault, load, work, 8.0, say))
                            await asyncio.to_thread(bookie.start)
                            await _full_again(client, load)
            _say_by_topic(rows, say)
            await load.end()
            say(f"{sum(load.sent.values()):,} messages confirmed, {await load.lost():,} lost or out of order")
    finally:
        for broker in brokers.values():
            if broker.running:
                broker.kill()
    return rows


def main(arguments: Sequence[str]) -> int:
    """Prints the table."""
    parser = parser_of("python -m bench failover", __doc__)
    parser.add_argument("--topics", type=int, default=1_000, metavar="N")
    parser.add_argument("--brokers", type=int, default=3, metavar="N")
    parser.add_argument("--bundles", type=int, default=16, metavar="N", help="of the namespace")
    parser.add_argument("--rounds", type=int, default=1, metavar="N")
    parser.add_argument("--subscriptions", type=int, default=0, metavar="N", help="of each topic")
    parser.add_argument("--pace", type=float, default=1.0, metavar="S", help="between messages of a topic")
    parser.add_argument(
        "--faults", default="kill,drain,stop", metavar="NAME,...", help=f"of {', '.join(FAULTS)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    given.faults = given.faults.split(",")
    if unknown := [name for name in given.faults if name not in FAULTS]:
        parser.error(f"no such fault: {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    screen = console()
    rows: list[Any] = []

    async def run(ensemble: Any, directory: Path) -> None:
        async with started(ensemble, directory) as cluster:
            rows.extend(await measure(given, cluster, screen.print))

    with ensemble_in_scratch(1) as (ensemble, directory):
        uvloop.run(run(ensemble, directory))
    path = given.json or OUT / time.strftime("bench-failover-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(rows, indent=1))
    screen.print(f"all figures: {path}")
    return 0
