"""Rule 54 as an operator meets it: /health, /metrics and `cluster status` name each fault and its reason while it lasts."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from magnetar.client import Client, connect
from support.cluster.processes import ClusterProcesses, Daemon, Shape
from support.cluster.scorecard import Recorder, Row
from support.long_form import long_form
from support.zookeeper import Ensemble

pytestmark = [pytest.mark.crash, pytest.mark.real, pytest.mark.timeout(600)]

GOAL_S = 5.0
SEEN_WITHIN_S = 120.0
TOPIC = "seen"


class Fault(NamedTuple):
    """What is done to the cluster, and words that its reason holds."""

    name: str
    words: tuple[str, ...]


async def page(daemon: Daemon, path: str) -> str:
    """A page of the daemon's HTTP server."""
    url = f"http://127.0.0.1:{daemon.process.ports['http']}{path}"

    def get() -> str:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(get)


async def problem_lines(daemon: Daemon) -> str:
    """The problems in /metrics."""
    lines = (await page(daemon, "/metrics")).splitlines()
    return "\n".join(line for line in lines if line.startswith("magnetar_problem{"))


async def status(cluster: ClusterProcesses) -> str:
    """`magnetar cluster status`, as people read it."""
    code, output, errors = await cluster.command("cluster", "status", "--metadata", cluster.url)
    assert code == 0, errors
    return output


async def seen(cluster: ClusterProcesses, witness: Daemon, fault: Fault, began: float) -> dict[str, float]:
    """Seconds from `began` until each place names the fault with its reason; of the command: until it had ended."""

    async def until(place: str) -> tuple[str, float]:
        while True:
            match place:
                case "/health":
                    said = await page(witness, "/health")
                case "/metrics":
                    said = await problem_lines(witness)
                case _:
                    said = await status(cluster)
            if all(word in said for word in fault.words):
                return place, time.monotonic() - began
            assert time.monotonic() - began < SEEN_WITHIN_S, f"{place} does not name {fault}: {said}"
            await asyncio.sleep(0.05)

    return dict(await asyncio.gather(*(until(place) for place in ("/health", "/metrics", "cluster status"))))


async def well_again(cluster: ClusterProcesses, witness: Daemon) -> None:
    """Waits until nothing is wrong any more in all three places."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while True:
        said = await status(cluster), await page(witness, "/health"), await problem_lines(witness)
        if said[0].startswith("ok\n") and '"ok"' in said[1] and not said[2]:
            return
        assert time.monotonic() < deadline, said
        await asyncio.sleep(0.2)


@asynccontextmanager
async def poisoned(client: Client) -> AsyncIterator[None]:
    """A message that its consumer refuses again and again, until the block ends."""
    async with client.create_producer(TOPIC) as producer:
        await producer.send(b"poison")
    async with client.subscribe(TOPIC, "workers", type="shared", start="earliest") as consumer:
        for _ in range(6):
            message = await consumer.receive()
            await consumer.nack(message, delay=0.0)
        yield
        await consumer.ack(await consumer.receive())


@long_form
async def test_rule_54_each_fault_is_named_with_its_reason_in_health_metrics_and_status(
    one_server: Ensemble, directory: Path, scorecard: Recorder
) -> None:
    """A bookie and a broker are killed, a disk hangs, a message is poison; each ends before the next begins."""
    shape = Shape(brokers=2)
    async with ClusterProcesses(one_server, directory, shape) as cluster:
        witness, other = cluster.brokers
        await well_again(cluster, witness)
        for fault in (
            Fault("a bookie is killed", ("bookie-3", "lost")),
            Fault("a broker is killed", ("broker-2", "lost")),
            Fault("a disk hangs", ("bookie-1", "has not answered")),
            Fault("a message is poison", ("workers", TOPIC)),
        ):
            async with AsyncExitStack() as stack:
                match fault.name:
                    case "a bookie is killed":
                        await stack.enter_async_context(cluster.bookies[2].down())
                    case "a broker is killed":
                        await stack.enter_async_context(other.down())
                    case "a disk hangs":
                        await stack.enter_async_context(cluster.bookies[0].paused("storage-helper"))
                    case _:
                        client = await stack.enter_async_context(connect(cluster.service_url))
                        await stack.enter_async_context(poisoned(client))
                found = await seen(cluster, witness, fault, time.monotonic())
            await well_again(cluster, witness)
            said = ", ".join(f"{place} {seconds:.1f} s" for place, seconds in found.items())
            slowest = max(found.values())
            scorecard(
                Row(
                    "54",
                    f"rule 54: {fault.name}",
                    "2 brokers, 3 bookies",
                    said,
                    f"{GOAL_S:g} s",
                    slowest <= GOAL_S,
                )
            )
