"""A cluster is restarted under load, daemon by daemon and zone by zone: nothing is lost, producers stall for a moment."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from magnetar.client import Client, connect
from support.cluster.checker import check
from support.cluster.figures import Confirmations
from support.cluster.load import LoadProcess
from support.cluster.run import load_plan
from support.local_cluster import RESTART, LocalCluster
from support.long_form import LONG, long_form

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
RATE = 500


@dataclass
class Load:
    """A producer of RATE messages a second, a consumer, and when each message was confirmed and received."""

    confirmed: list[float] = field(default_factory=list)
    received: set[bytes] = field(default_factory=set)
    repeated: int = 0
    sent: int = 0
    ending: bool = False
    total: int | None = None  # of messages, once it is known; the last of them is sent after that

    async def produce(self, client: Client) -> None:
        """Sends on time, whatever is not confirmed yet, and once more at the end; returns when all is confirmed."""
        loop = asyncio.get_running_loop()
        pending: set[asyncio.Task[None]] = set()
        async with client.create_producer("orders") as producer:

            async def send(number: int) -> None:
                await producer.send(b"%d" % number)
                self.confirmed.append(time.monotonic())

            began = loop.time()
            while self.total is None:
                if self.ending:
                    self.total = self.sent + 1
                pending.add(asyncio.ensure_future(send(self.sent)))
                self.sent += 1
                await asyncio.sleep(max(0.0, began + self.sent / RATE - loop.time()))
                pending = {task for task in pending if not task.done() or task.exception() is not None}
            await asyncio.gather(*pending)

    async def consume(self, client: Client) -> None:
        """Until it has all that is sent."""
        async with client.subscribe("orders", "billing", start="earliest") as consumer:
            while len(self.received) != self.total:
                message = await consumer.receive(timeout=60)
                value = message.value or b""
                self.repeated += value in self.received
                self.received.add(value)
                await consumer.ack(message)

    def longest_stall(self, since: float, until: float) -> float:
        """The longest time in which nothing was confirmed."""
        times = [since, *(moment for moment in self.confirmed if since <= moment <= until), until]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


async def restarted_under_load(local: LocalCluster, names: list[str]) -> None:
    """Restarts them one after another, prints how long producers waited, and asserts that nothing was lost."""
    load = Load()
    async with connect(local.url) as sender, connect(local.url) as receiver:
        work = [asyncio.ensure_future(load.produce(sender)), asyncio.ensure_future(load.consume(receiver))]
        while len(load.received) < RATE:
            await asyncio.sleep(0.05)
            assert not any(task.done() for task in work), work
        stalls = {}
        for name in names:
            since = time.monotonic()
            done = await asyncio.to_thread(local.rolling_restart, *RESTART, "--only", name)
            assert done.returncode == 0, done.stderr + local.output()
            print(done.stdout.splitlines()[0])
            stalls[name] = load.longest_stall(since, time.monotonic())
        load.ending = True
        await asyncio.gather(*work)
    print(f"{load.sent} messages, {load.repeated} received again; nothing confirmed for so long, in seconds:")
    print({name: round(stall, 2) for name, stall in stalls.items()})
    assert load.received == {b"%d" % number for number in range(load.sent)}
    assert len(load.confirmed) == load.sent
    assert max(stalls.values()) < 10


@long_form
@pytest.mark.real
async def test_nothing_is_lost_while_every_daemon_is_restarted(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as local:
        planned = await asyncio.to_thread(local.rolling_restart, *RESTART, "--dry-run")
        names = [line.split()[-1] for line in planned.stdout.splitlines()]
        assert names == ["bookie-1", "bookie-2", "bookie-3", "broker-1", "broker-2"]
        await restarted_under_load(local, names)


@pytest.mark.real
async def test_the_bookie_and_the_broker_of_each_zone_are_restarted_together_under_load(
    tmp_path: Path,
) -> None:
    """All subscription types, MAGNETAR_CRASH_RATE messages a second; judged as the runs of tests/crash/cluster are."""
    keep = {
        "MAGNETAR_BROKER_RETENTION_MS": "-1",
        "MAGNETAR_BROKER_RETENTION_BYTES": "-1",
    }  # read again at the end
    steps: dict[str, tuple[float, float]] = {}
    with LocalCluster(tmp_path, brokers=3, CLUSTER_ZONES="3", **keep) as local:
        refused = await asyncio.to_thread(local.rolling_restart, *RESTART, "--by", "machine")
        words = (
            "machine 127.0.0.1 cannot be restarted together: no broker would be left to take over its topics"
        )
        assert (refused.returncode != 0, words in refused.stderr) == (True, True), refused.stderr
        async with LoadProcess(load_plan(local.url, 1), tmp_path) as load:
            await load.goes_on()
            for zone in ("zone-1", "zone-2", "zone-3") if LONG else ("zone-2",):
                since = time.monotonic()
                done = await asyncio.to_thread(
                    local.rolling_restart, *RESTART, "--by", "zone", "--only", zone
                )
                assert done.returncode == 0, done.stderr + local.output()
                print(done.stdout.splitlines()[0])
                await load.goes_on()
                steps[zone] = since, time.monotonic()
            events = await load.finish()
    verdict, found = await asyncio.to_thread(check, events), Confirmations(events)
    stalls = {zone: found.stall_s(since, until) for zone, (since, until) in steps.items()}
    print(
        f"{verdict.counts['confirmed']} messages, {verdict.counts['duplicates']} stored twice; a topic confirmed nothing for"
    )
    print({zone: round(stall, 2) for zone, stall in stalls.items()}, "seconds")
    assert verdict.good, verdict
    assert load.drained, load.progress
    assert max(stalls.values()) < 10


BASE = os.environ.get("MAGNETAR_UPGRADE_BASE", "")


@pytest.mark.skipif(not BASE, reason="needs an earlier source tree: make upgrade-test BASE=REVISION")
async def test_a_cluster_of_an_earlier_revision_is_upgraded_under_load(tmp_path: Path) -> None:
    local = LocalCluster(tmp_path)
    sources = local.cluster.data / "sources"
    sources.write_text(str(Path(BASE).resolve()))
    with local:
        for name in ("bookie-1", "broker-1"):
            assert str(Path(BASE).resolve()) in environment_of(local, name)
        sources.unlink()
        await restarted_under_load(local, ["bookie-1", "bookie-2", "bookie-3", "broker-1", "broker-2"])
        for name in ("bookie-1", "broker-1"):
            assert str(Path(BASE).resolve()) not in environment_of(local, name)


def environment_of(local: LocalCluster, name: str) -> str:
    """The PYTHONPATH of the daemon of this name."""
    supervisor = int((local.cluster.data / f"{name}.pid").read_text())
    (child,) = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    variables = Path(f"/proc/{child}/environ").read_text().split("\0")
    return next((text for text in variables if text.startswith("PYTHONPATH=")), "")
