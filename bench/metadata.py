"""Requests a second and CPU a request of the metadata stores: ours on ZooKeeper beside kazoo and aiozk, embedded.

    python -m bench metadata [--requests N] [--rounds N] [--servers N] [--only zookeeper,embedded] [--json FILE]

Gets, creates and compare-and-sets of 200 bytes, 256 of them outstanding (`pipelined`) or one (`single`), in interleaved
rounds; medians. CPU is that of this process, all its threads; the servers are processes of their own on the same cores, so
rates say how much work there is altogether. The servers write to
the disk with fsync on; writes that are under way together share a sync.

kazoo is no dependency of the project: pip install kazoo. Without it its lines are missing.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from bench.arguments import OUT, console, parser_of
from bench.zookeeper import ensemble_in_scratch
from magnetar.metadata.embedded import EmbeddedMetadataStore
from magnetar.metadata.store import MetadataStore
from magnetar.metadata.zookeeper import open_zookeeper_store
from magnetar.runtime.clock import elapsed_s

WINDOW = 256
VALUE = bytes(200)
NODES = 64
OPERATIONS = ("get", "create", "compare-and-set")
# The share of --requests that is sent one at a time.
SINGLE_SHARE = 20

Figures = dict[str, dict[str, float]]
# Does request number n; WINDOW of them may be under way.
Request = Callable[[int], Awaitable[object]]


class Clock:
    """Wall and CPU time of a piece of work."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def of(self, count: int) -> dict[str, float]:
        """Figures of `count` requests since it was made."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return {"per_s": count / wall, "cpu_us": cpu / count * 1e6, "each_us": wall / count * 1e6}


async def measure(request: Request, count: int) -> Figures:
    """Pipelined, and one at a time."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await request(number)

    clock = Clock()
    await asyncio.gather(*[worker() for _ in range(WINDOW)])
    pipelined = clock.of(count)
    single = max(count // SINGLE_SHARE, 1)
    clock = Clock()
    for number in range(count, count + single):
        await request(number)
    return {"pipelined": pipelined, "single": clock.of(single)}


async def of_store(store: MetadataStore, count: int, place: str) -> dict[str, Figures]:
    """The three operations of a store of ours."""
    versions = [await store.create(f"{place}/set-{node}", VALUE) for node in range(WINDOW)]

    async def compare_and_set(number: int) -> None:
        # Requests of one worker follow each other, so each node has one writer at a time.
        node = free.pop()
        versions[node] = await store.put(f"{place}/set-{node}", VALUE, version=versions[node])
        free.append(node)

    free = list(range(WINDOW))
    return {
        "get": await measure(lambda number: store.get(f"{place}/set-{number % NODES}"), count),
        "create": await measure(lambda number: store.create(f"{place}/{number:08d}", VALUE), count),
        "compare-and-set": await measure(compare_and_set, count),
    }


def zookeeper(url: str, count: int) -> dict[str, Figures]:
    """Our store."""

    async def run() -> dict[str, Figures]:
        store = await open_zookeeper_store(url, rng=random.Random(1), clock=elapsed_s, make_root=True)
        try:
            return await of_store(store, count, f"/ours-{time.time_ns()}")
        finally:
            await store.close()

    return uvloop.run(run())


def embedded(_url: str, count: int) -> dict[str, Figures]:
    """RocksDB in this process, a synced write each."""

    async def run() -> dict[str, Figures]:
        with tempfile.TemporaryDirectory(dir=OUT) as directory:
            store = EmbeddedMetadataStore(f"{directory}/metadata")
            try:
                return await of_store(store, count, "/embedded")
            finally:
                await store.close()

    return uvloop.run(run())


def aiozk(url: str, count: int) -> dict[str, Figures]:
    """aiozk's own client; it has no pipelined compare-and-set that knows versions, so one node has one writer."""
    import aiozk as library

    async def run() -> dict[str, Figures]:
        client = library.ZKClient(url.removeprefix("zk://").partition("/")[0])
        await client.start()
        place = f"/aiozk-{time.time_ns()}"
        await client.create(place)
        for node in range(WINDOW):
            await client.create(f"{place}/set-{node}", VALUE)
        versions, free = [0] * WINDOW, list(range(WINDOW))

        async def compare_and_set(number: int) -> None:
            node = free.pop()
            await client.set_data(f"{place}/set-{node}", VALUE, versions[node])
            versions[node] += 1
            free.append(node)

        try:
            return {
                "get": await measure(lambda number: client.get_data(f"{place}/set-{number % NODES}"), count),
                "create": await measure(lambda number: client.create(f"{place}/{number:08d}", VALUE), count),
                "compare-and-set": await measure(compare_and_set, count),
            }
        finally:
            await client.close()

    return uvloop.run(run())


def kazoo(url: str, count: int) -> dict[str, Figures]:
    """kazoo with its threads, requests without waiting."""
    from kazoo.client import KazooClient

    client = KazooClient(url.removeprefix("zk://").partition("/")[0])
    client.start()
    place = f"/kazoo-{time.time_ns()}"
    client.ensure_path(place)
    for node in range(WINDOW):
        client.create(f"{place}/set-{node}", VALUE)
    versions = [0] * WINDOW

    def compare_and_set(number: int) -> Any:
        node = number % WINDOW
        versions[node] += 1
        return client.set_async(f"{place}/set-{node}", VALUE, versions[node] - 1)

    def of(request: Callable[[int], Any]) -> Figures:
        clock = Clock()
        window: list[Any] = []
        for number in range(count):
            if len(window) == WINDOW:
                window.pop(0).get()
            window.append(request(number))
        for answer in window:
            answer.get()
        pipelined = clock.of(count)
        clock = Clock()
        single = max(count // SINGLE_SHARE, 1)
        for number in range(count, count + single):
            request(number).get()
        return {"pipelined": pipelined, "single": clock.of(single)}

    try:
        return {
            "get": of(lambda number: client.get_async(f"{place}/set-{number % NODES}")),
            "create": of(lambda number: client.create_async(f"{place}/{number:08d}", VALUE)),
            "compare-and-set": of(compare_and_set),
        }
    finally:
        client.stop()
        client.close()


CLIENTS = {"zookeeper": zookeeper, "kazoo": kazoo, "aiozk": aiozk, "embedded": embedded}


def main(arguments: Sequence[str]) -> int:
    """Prints the table."""
    parser = parser_of("python -m bench metadata", __doc__)
    parser.add_argument("--requests", type=int, default=10_000, metavar="N", help="of each kind in a round")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--servers", type=int, default=1, metavar="N", help="ZooKeeper servers (default: 1)")
    parser.add_argument("--only", default=",".join(CLIENTS), metavar="NAME,...", help="some of the clients")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    wanted = given.only.split(",")
    if unknown := [name for name in wanted if name not in CLIENTS]:
        parser.error(f"no such client: {', '.join(unknown)}; there are {', '.join(CLIENTS)}")
    screen = console()
    rounds: list[dict[str, dict[str, Figures]]] = []
    with ensemble_in_scratch(given.servers) as (ensemble, _):
        for number in range(given.rounds):
            screen.print(f"round {number + 1}")
            rounds.append(_round(wanted, f"{ensemble.url}/bench", given.requests, screen.print))
    _print(rounds, screen.print)
    if given.json is not None:
        given.json.write_text(json.dumps(rounds, indent=2))
    return 0


def _round(
    wanted: Sequence[str], url: str, count: int, say: Callable[[str], None]
) -> dict[str, dict[str, Figures]]:
    found = {}
    for name in wanted:
        try:
            found[name] = CLIENTS[name](url, count)
        except ImportError as error:
            say(f"{name}: {error}; pip install {name}")
    return found


def _print(rounds: Sequence[dict[str, dict[str, Figures]]], say: Callable[[str], None]) -> None:
    say(f"{'':18}{'':12}{'pipelined: per s':>18}{'CPU us':>10}{'single: us':>14}{'CPU us':>10}")
    for operation in OPERATIONS:
        for name in rounds[0]:
            figures = [found[name][operation] for found in rounds]

            def median(way: str, figure: str, of: list[Figures] = figures) -> float:
                return statistics.median(one[way][figure] for one in of)

            say(
                f"{operation:18}{name:12}{median('pipelined', 'per_s'):18,.0f}{median('pipelined', 'cpu_us'):10.1f}"
                f"{median('single', 'each_us'):14.0f}{median('single', 'cpu_us'):10.1f}"
            )
