"""A cluster of real processes that share a real ZooKeeper: three bookies and a broker, found by their registrations."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from magnetar.cli.service_process import ServiceFailed, ServiceProcess
from magnetar.client import connect
from support.zookeeper import Ensemble, open_store, zookeeper

__all__ = ["zookeeper"]

pytestmark = pytest.mark.timeout(180)
SESSION_S = 2.0


def magnetar(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that ends."""
    return subprocess.run(
        [sys.executable, "-m", "magnetar.cli.main", *arguments], capture_output=True, text=True, timeout=60
    )


class Cluster:
    """ZooKeeper is somebody else's; everything is below `directory`."""

    def __init__(self, zookeeper: Ensemble, directory: Path, bookies: int = 3) -> None:
        self.url = f"{zookeeper.url}/{directory.name}"
        self.directory = directory
        self.bookies = {f"b{number}": self.daemon("bookie", f"b{number}") for number in range(1, bookies + 1)}
        self.broker = self.daemon("broker", "broker")

    def daemon(self, command: str, name: str, *arguments: str) -> ServiceProcess:
        line = ["--metadata", self.url, "--set", f"daemon.session_timeout_s={SESSION_S}", *arguments]
        if command == "bookie":
            line += ["--id", name]
        else:
            quorums = ("ensemble_size=3", "write_quorum=2", "ack_quorum=2")
            line += [part for quorum in quorums for part in ("--set", f"broker.{quorum}")]
            line += ["--set", "ledger.add_timeout_s=2", "--set", "ledger.reconnect_backoff_max_s=0.2"]
        return ServiceProcess(self.directory / name, command=command, arguments=line)

    def status(self) -> dict[str, Any]:
        found = magnetar("cluster", "status", "--metadata", self.url, "--json")
        assert found.returncode == 0, found.stderr
        status: dict[str, Any] = json.loads(found.stdout)
        return status

    def states(self) -> dict[str, str]:
        return {bookie["id"]: bookie["state"] for bookie in self.status()["bookies"]}

    def start(self) -> None:
        assert magnetar("cluster", "init", "--metadata", self.url).returncode == 0
        for bookie in self.bookies.values():
            bookie.start()
        self.broker.start()


@pytest.fixture
def cluster(zookeeper: Ensemble, tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        cluster = Cluster(zookeeper, tmp_path)
        for process in (*cluster.bookies.values(), cluster.broker):
            stack.callback(process.kill)
        cluster.start()
        yield cluster


async def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.1)


async def consumed(url: str, topic: str, count: int) -> list[bytes]:
    found: list[bytes] = []
    async with connect(url) as client, client.create_reader(topic, start="earliest") as reader:
        while len(found) < count:
            found.append((await reader.receive(timeout=20)).value or b"")
    return found


async def test_a_cluster_loses_a_bookie_and_its_broker_and_goes_on(cluster: Cluster) -> None:
    status = cluster.status()
    assert status["broker"] == cluster.broker.url
    assert {bookie["id"]: bookie["state"] for bookie in status["bookies"]} == dict.fromkeys(
        cluster.bookies, "writable"
    )
    sent = [b"%d" % number for number in range(300)]
    async with connect(cluster.broker.url) as client, client.create_producer("orders") as producer:
        await producer.send_many(sent[:100])
        await asyncio.to_thread(cluster.bookies["b2"].kill)
        await until(lambda: cluster.states()["b2"] == "lost")
        fourth = cluster.daemon("bookie", "b4")  # ledgers need three
        await asyncio.to_thread(fourth.start)
        try:
            await producer.send_many(sent[100:200])
            await asyncio.to_thread(cluster.broker.kill)
            await asyncio.to_thread(cluster.broker.start)
            await producer.send_many(sent[200:])
            assert await consumed(cluster.broker.url, "orders", len(sent)) == sent
            await asyncio.to_thread(cluster.bookies["b2"].start)
            assert cluster.states() == dict.fromkeys(("b1", "b2", "b3", "b4"), "writable")
        finally:
            await asyncio.to_thread(fourth.kill)


def test_every_daemon_shows_its_figures(cluster: Cluster) -> None:
    for daemon, figure in (
        (cluster.bookies["b1"], "magnetar_autorecovery_postponed_ledgers 0"),
        (cluster.broker, "magnetar_broker_"),
    ):
        with urllib.request.urlopen(f"http://127.0.0.1:{daemon.ports['http']}/metrics", timeout=10) as answer:
            assert figure in answer.read().decode()


def test_a_second_broker_is_refused(cluster: Cluster) -> None:
    second = cluster.daemon("broker", "second")
    with pytest.raises(ServiceFailed, match=f"another broker at {cluster.broker.url} serves this cluster"):
        second.start()
    second.kill()


def test_rule_31_a_broker_without_zookeeper_stops_and_a_bookie_registers_again(tmp_path: Path) -> None:
    with Ensemble(tmp_path / "zookeeper") as own, ExitStack() as stack:
        own.start()
        (tmp_path / "cluster").mkdir()
        cluster = Cluster(own, tmp_path / "cluster")
        for process in (*cluster.bookies.values(), cluster.broker):
            stack.callback(process.kill)
        cluster.start()
        own.servers[0].pause()
        cluster.broker.wait_ended(timeout_s=30)
        assert cluster.broker.returncode == 70
        assert "the session with the metadata store was lost" in cluster.broker.errors()
        own.servers[0].resume()
        deadline = time.monotonic() + 30
        while set(cluster.states().values()) != {"writable"}:
            assert time.monotonic() < deadline, cluster.states()
        assert all(bookie.running for bookie in cluster.bookies.values())
        cluster.broker.start()


def refusal(command: str, directory: Path, url: str, *arguments: str) -> str:
    process = ServiceProcess(directory, command=command, arguments=["--metadata", url, *arguments])
    with pytest.raises(ServiceFailed) as caught:
        process.start()
    process.kill()
    return str(caught.value)


def test_wrong_configurations_end_in_one_clear_error(zookeeper: Ensemble, tmp_path: Path) -> None:
    root = f"{zookeeper.url}/{tmp_path.name}"
    assert "magnetar cluster init" in refusal("bookie", tmp_path / "b", root)
    for url, words in (
        ("zk://127.0.0.1:1/x", "setting metadata: no ZooKeeper server of zk://127.0.0.1:1/x can be used"),
        ("http://127.0.0.1/x", "'http' is no scheme of a metadata store"),
    ):
        for command in ("bookie", "broker"):
            assert words in refusal(command, tmp_path / command, url)
    assert "exclude each other" in refusal("broker", tmp_path / "c", root, "--bookies", "127.0.0.1:1")


def test_rule_35_a_bookie_of_another_cluster_and_a_second_one_of_its_name_are_refused(
    cluster: Cluster,
) -> None:
    other = f"{cluster.url}-other"
    assert magnetar("cluster", "init", "--metadata", other).returncode == 0
    cluster.bookies["b1"].stop()
    assert "cluster" in refusal("bookie", cluster.directory / "b1", other, "--id", "b1")
    text = refusal("bookie", cluster.directory / "empty", cluster.url, "--id", "b1")
    assert "--accept-new-disk" in text
    cluster.bookies["b1"].start()


async def test_a_leader_that_dies_fails_no_append(tmp_path: Path) -> None:
    with Ensemble(tmp_path / "zookeeper", servers=3) as own, ExitStack() as stack:
        own.start()
        (tmp_path / "cluster").mkdir()
        cluster = Cluster(own, tmp_path / "cluster")
        for process in (*cluster.bookies.values(), cluster.broker):
            stack.callback(process.kill)
        await asyncio.to_thread(cluster.start)
        sent = 0
        async with connect(cluster.broker.url) as client, client.create_producer("orders") as producer:
            await producer.send(b"0")
            await asyncio.to_thread(own.leader().kill)
            for sent in range(1, 2001):
                await producer.send(b"%d" % sent)
        assert cluster.broker.running
        assert await consumed(cluster.broker.url, "orders", sent + 1) == [b"%d" % n for n in range(sent + 1)]


def copies(cluster: Cluster, topic: str) -> dict[str, int]:
    """Ledgers of a topic by bookie, as their records say, and how many wait for repair."""
    from magnetar.ledger import LedgerMetadata
    from magnetar.metadata.ledgers import StoredLedgers

    async def count() -> dict[str, int]:
        store = await open_store(cluster.url)
        try:
            found: dict[str, int] = {}
            ledgers = StoredLedgers(store)
            async for page in ledgers.pages():
                for ledger_id in page:
                    node = await ledgers.get(ledger_id)
                    assert node is not None
                    for ensemble in LedgerMetadata.decode(node.value, ledger_id).ensembles:
                        for bookie in ensemble.bookies:
                            found[bookie] = found.get(bookie, 0) + 1
            return found
        finally:
            await store.close()

    return asyncio.run(count())


async def test_rule_22_a_lost_bookie_heals_and_a_drained_one_empties_by_themselves(
    zookeeper: Ensemble, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        cluster = Cluster(zookeeper, tmp_path, bookies=4)
        for process in (*cluster.bookies.values(), cluster.broker):
            process.arguments += [
                "--set",
                "repair.lost_bookie_delay_s=1",
                "--set",
                "repair.open_ledger_grace_s=1",
            ]
            process.arguments += ["--set", "broker.max_ledger_entries=5"]
            stack.callback(process.kill)
        await asyncio.to_thread(cluster.start)
        sent = [b"%d" % number for number in range(200)]
        async with connect(cluster.broker.url) as client, client.create_producer("orders") as producer:
            for number in range(0, 200, 2):
                await producer.send_many(sent[number : number + 2])
        await asyncio.to_thread(cluster.bookies["b1"].kill)
        await until(lambda: not copies(cluster, "orders").get("b1"), 60)
        healed = await asyncio.to_thread(cluster.status)
        assert healed["under_replicated_ledgers"] == 0
        assert healed["auditor"].startswith("bookie b")
        await asyncio.to_thread(cluster.bookies["b1"].start)
        drained = await asyncio.to_thread(magnetar, "cluster", "drain", "--metadata", cluster.url, "b2")
        assert drained.returncode == 0, drained.stderr
        await until(lambda: not copies(cluster, "orders").get("b2"), 60)
        assert (await asyncio.to_thread(cluster.states))["b2"] == "draining"
        ended = await asyncio.to_thread(magnetar, "cluster", "drain", "--metadata", cluster.url, "b2")
        assert "no ledger names b2" in ended.stdout
        early = await asyncio.to_thread(magnetar, "cluster", "remove", "--metadata", cluster.url, "b2")
        assert "stop it first" in early.stderr
        await asyncio.to_thread(cluster.bookies["b2"].stop)
        removed = await asyncio.to_thread(magnetar, "cluster", "remove", "--metadata", cluster.url, "b2")
        assert removed.returncode == 0, removed.stderr
        assert "b2" not in await asyncio.to_thread(cluster.states)
        assert await consumed(cluster.broker.url, "orders", len(sent)) == sent
        unknown = await asyncio.to_thread(magnetar, "cluster", "recover", "--metadata", cluster.url, "b9")
        assert "there is no bookie b9" in unknown.stderr
        checked = await asyncio.to_thread(magnetar, "cluster", "check", "--metadata", cluster.url)
        assert "ledgers looked at" in checked.stdout, checked.stderr
