"""A cluster of real processes that share a real ZooKeeper: three bookies and a broker, found by their registrations."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from bench.service_process import ServiceFailed, ServiceProcess

from magnetar.client import connect
from support.forked_commands import run_magnetar
from support.zookeeper import Ensemble, open_store, zookeeper

__all__ = ["zookeeper"]

pytestmark = [pytest.mark.timeout(180), pytest.mark.real]
SESSION_S = 2.0


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
        found = run_magnetar("cluster", "status", "--metadata", self.url, "--json")
        assert found.returncode == 0, found.stderr
        status: dict[str, Any] = json.loads(found.stdout)
        return status

    def states(self) -> dict[str, str]:
        return {bookie["id"]: bookie["state"] for bookie in self.status()["bookies"]}

    def start(self) -> None:
        assert run_magnetar("cluster", "init", "--metadata", self.url).returncode == 0
        with ThreadPoolExecutor() as pool:
            list(pool.map(ServiceProcess.start, self.bookies.values()))
        self.broker.start()


@contextmanager
def started(cluster: Cluster) -> Iterator[Cluster]:
    with ExitStack() as stack:
        for process in (*cluster.bookies.values(), cluster.broker):
            stack.callback(process.kill)
        cluster.start()
        yield cluster


@pytest.fixture(scope="module")
def cluster(zookeeper: Ensemble, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """For tests that leave its four daemons running, and use topics of their own."""
    with started(Cluster(zookeeper, tmp_path_factory.mktemp("shared-cluster"))) as cluster:
        yield cluster


@pytest.fixture
def own_cluster(zookeeper: Ensemble, tmp_path: Path) -> Iterator[Cluster]:
    with started(Cluster(zookeeper, tmp_path)) as cluster:
        yield cluster


def drain(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_magnetar("cluster", "drain", "--metadata", cluster.url, *arguments)


async def until(condition: Callable[[], Any]) -> None:
    while not await asyncio.to_thread(condition):
        await asyncio.sleep(0.1)


async def consumed(url: str, topic: str, count: int) -> list[bytes]:
    """First occurrences, in order: a producer may send again what a broker has stored and not confirmed (rule 33)."""
    found: dict[bytes, None] = {}
    async with connect(url) as client, client.create_reader(topic, start="earliest") as reader:
        while len(found) < count:
            found[(await reader.receive()).value or b""] = None
    return list(found)


async def test_a_cluster_loses_a_bookie_and_its_broker_and_goes_on(own_cluster: Cluster) -> None:
    cluster = own_cluster
    status = cluster.status()
    assert [(row["url"], row["state"]) for row in status["brokers"]] == [(cluster.broker.url, "ready")]
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


def test_brokers_and_bundles_from_the_command_line(cluster: Cluster) -> None:
    second = cluster.daemon("broker", "second", "--set", "broker.name=second")
    second.start()
    url = ("--url", f"{cluster.broker.url},{second.url.removeprefix('magnetar://')}")
    try:

        def run(*arguments: str, fails: bool = False) -> str:
            done = run_magnetar(*arguments, *url)
            assert (done.returncode != 0) is fails, (arguments, done)
            return done.stderr if fails else done.stdout

        for number in range(3):
            run("produce", f"many-{number}", "-m", "first")
        names = {row["name"]: row["url"] for row in json.loads(run("brokers", "list", "--json"))}
        first = next(name for name in names if name != "second")
        assert names == {first: cluster.broker.url, "second": second.url}
        assert "second" in run("brokers", "list")
        drained = drain(cluster, first)
        assert "can be stopped" in drained.stdout, drained.stderr
        owners = {row["broker"] for row in json.loads(run("bundles", "list", "--json"))}
        assert owners <= {"second", ""}
        assert f"there is no broker {first} that takes bundles" in run(
            "bundles", "unload", "many-1", "--to", first, fails=True
        )
        assert f"broker {first} is not drained any more" in drain(cluster, first, "--undo").stdout
        parts = run("bundles", "split", "many-1").split()
        run("bundles", "unload", parts[0], "--to", first)
        shown = {row["bundle"]: row["broker"] for row in json.loads(run("bundles", "list", "--json"))}
        assert shown[parts[0]] == first
        assert "moved to" in run("bundles", "unload", parts[1], "--to", first)
        assert "not a bundle" in run("bundles", "unload", "public/default/0x0", fails=True)
        for number in range(3):
            run("produce", f"many-{number}", "-m", "second")
            found = run(
                "consume", f"many-{number}", "-s", "s", "--start", "earliest", "-n", "2", "--format", "plain"
            )
            assert found.split() == ["first", "second"]
    finally:
        second.kill()


def test_rule_31_a_broker_without_zookeeper_serves_nothing_and_all_register_again(tmp_path: Path) -> None:
    with Ensemble(tmp_path / "zookeeper") as own, ExitStack() as stack:
        own.start()
        (tmp_path / "cluster").mkdir()
        cluster = stack.enter_context(started(Cluster(own, tmp_path / "cluster")))
        own.servers[0].pause()
        while "lost its session with the metadata store" not in cluster.broker.errors():
            time.sleep(0.05)
        own.servers[0].resume()
        while set(cluster.states().values()) != {"writable"} or not cluster.status()["brokers"]:
            pass
        assert all(process.running for process in (*cluster.bookies.values(), cluster.broker))
        asyncio.run(produced(cluster.broker.url, "orders"))


async def produced(url: str, topic: str) -> None:
    async with connect(url) as client, client.create_producer(topic) as producer:
        await producer.send(b"served again")


def refusal(command: str, directory: Path, url: str, *arguments: str) -> str:
    process = ServiceProcess(directory, command=command, arguments=["--metadata", url, *arguments])
    with pytest.raises(ServiceFailed) as caught:
        process.start()
    process.kill()
    return str(caught.value)


def test_wrong_configurations_end_in_one_clear_error(cluster: Cluster, tmp_path: Path) -> None:
    broker = cluster.broker.url.removeprefix("magnetar://")
    assert "magnetar cluster init" in refusal("bookie", tmp_path / "b", f"{cluster.url}-not-there")
    wrong = {
        f"zk://{broker}/x": "setting metadata: no ZooKeeper server of",
        "http://127.0.0.1/x": "'http' is no scheme of a metadata store",
    }
    with ThreadPoolExecutor() as pool:
        for url, words in wrong.items():
            said = pool.map(
                lambda command, url=url: refusal(command, tmp_path / command, url), ("bookie", "broker")
            )
            assert all(words in text for text in said)
    assert "exclude each other" in refusal("broker", tmp_path / "c", cluster.url, "--bookies", "127.0.0.1:1")


def test_rule_35_a_bookie_of_another_cluster_and_a_second_one_of_its_name_are_refused(
    cluster: Cluster,
) -> None:
    other = f"{cluster.url}-other"
    assert run_magnetar("cluster", "init", "--metadata", other).returncode == 0
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
            elected = asyncio.ensure_future(asyncio.to_thread(own.wait_serving))
            while not elected.done():
                sent += 1
                await producer.send(b"%d" % sent)
                await asyncio.sleep(0.005)
            await elected
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
        await until(lambda: not copies(cluster, "orders").get("b1"))
        healed = await asyncio.to_thread(cluster.status)
        assert healed["under_replicated_ledgers"] == 0
        assert healed["auditor"].startswith("bookie b")
        await asyncio.to_thread(cluster.bookies["b1"].start)
        drained = await asyncio.to_thread(drain, cluster, "b2")
        assert "bookie b2 can be stopped" in drained.stdout, drained.stderr
        assert not (await asyncio.to_thread(copies, cluster, "orders")).get("b2")
        assert (await asyncio.to_thread(cluster.states))["b2"] == "draining"
        early = await asyncio.to_thread(run_magnetar, "cluster", "remove", "--metadata", cluster.url, "b2")
        assert "stop it first" in early.stderr
        await asyncio.to_thread(cluster.bookies["b2"].stop)
        removed = await asyncio.to_thread(run_magnetar, "cluster", "remove", "--metadata", cluster.url, "b2")
        assert removed.returncode == 0, removed.stderr
        assert "b2" not in await asyncio.to_thread(cluster.states)
        assert await consumed(cluster.broker.url, "orders", len(sent)) == sent
        unknown = await asyncio.to_thread(run_magnetar, "cluster", "recover", "--metadata", cluster.url, "b9")
        assert "there is no bookie b9" in unknown.stderr
        checked = await asyncio.to_thread(run_magnetar, "cluster", "check", "--metadata", cluster.url)
        assert "ledgers looked at" in checked.stdout, checked.stderr


def own(broker: ServiceProcess, path: str) -> dict[str, Any]:
    """What a broker answers at a path of its own, as `curl` sees it."""
    url = f"http://127.0.0.1:{broker.ports['http']}/magnetar/v1/{path}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


async def test_over_http_a_lost_bookie_shows_in_fragments_and_repairs_until_they_are_done(
    zookeeper: Ensemble, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        cluster = Cluster(zookeeper, tmp_path)
        for process in (*cluster.bookies.values(), cluster.broker):
            process.arguments += ["--set", "repair.lost_bookie_delay_s=1"]
            process.arguments += [
                "--set",
                "broker.max_ledger_entries=1",
                "--set",
                "broker.min_ledger_age_ms=0",
            ]
            stack.callback(process.kill)
        await asyncio.to_thread(cluster.start)
        async with connect(cluster.broker.url) as client, client.create_producer("orders") as producer:
            for number in range(3):
                await producer.send(b"%d" % number)

        async def ask(path: str) -> dict[str, Any]:
            return await asyncio.to_thread(own, cluster.broker, path)

        topic = "topics/persistent/public/default/orders/ledgers"
        ledger = (await ask(topic))["ledgers"][0]
        assert (ledger["messages"], ledger["stored"]["state"]) == (1, "closed")
        bookies = ledger["stored"]["fragments"][0]["bookies"]
        assert sorted(bookies) == ["b1", "b2", "b3"]
        assert ledger["first_append_ms"] > 0
        assert (await ask("repairs"))["ledgers"] == []
        await asyncio.to_thread(cluster.bookies["b2"].kill)
        path = f"ledgers/{ledger['stored_id']}"
        await until(lambda: own(cluster.broker, path)["repair"] is not None)
        found = await ask("repairs?count=1")
        assert (found["waiting"] >= 1, found["auditor"].startswith("bookie b")) == (True, True)
        assert found["ledgers"][0]["repair"]["bookies"] == {"b2": "lost"}
        assert (await ask(path))["bookies"]["b2"] == "it is not registered any more"
        await until(lambda: "bookie" in own(cluster.broker, path)["repair"]["note"])  # there is no fourth one
        fourth = cluster.daemon("bookie", "b4")
        stack.callback(fourth.kill)
        await asyncio.to_thread(fourth.start)
        await until(lambda: own(cluster.broker, path)["repair"] is None)
        healed = await ask(path)
        assert sorted(healed["stored"]["fragments"][0]["bookies"]) == ["b1", "b3", "b4"]
        assert healed["bookies"] == {"b1": "", "b3": "", "b4": ""}


async def test_a_zone_is_drained_under_load_and_comes_back(zookeeper: Ensemble, tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = Cluster(zookeeper, tmp_path, bookies=5)
        for number, bookie in enumerate(cluster.bookies.values()):
            bookie.arguments += ["--set", f"bookie.zone={'east' if number < 2 else 'west'}"]
        second = cluster.daemon(
            "broker", "second", "--set", "broker.name=second", "--set", "broker.zone=west"
        )
        cluster.broker.arguments += ["--set", "broker.name=first", "--set", "broker.zone=east"]
        for broker in (cluster.broker, second):
            for setting in ("maintenance_interval_s=1", "ledger_change_spread_ms=0"):
                broker.arguments += ["--set", f"broker.{setting}"]
        for process in (*cluster.bookies.values(), cluster.broker, second):
            stack.callback(process.kill)
        await asyncio.to_thread(cluster.start)
        await asyncio.to_thread(second.start)
        url = f"{cluster.broker.url},{second.url.removeprefix('magnetar://')}"
        sent: list[bytes] = []
        done = asyncio.Event()

        async with connect(url) as client, client.create_producer("orders") as producer:

            async def send() -> None:
                while not done.is_set():
                    sent.append(b"%d" % len(sent))
                    await producer.send(sent[-1])
                    await asyncio.sleep(0.005)

            sending = asyncio.create_task(send())
            await client.admin.create_topic("idle")
            refused = await asyncio.to_thread(drain, cluster, "--zone", "west")
            assert "the 2 writable bookies" in refused.stderr, refused
            assert "cannot be drained" in refused.stderr
            begun = await asyncio.to_thread(drain, cluster, "--zone", "east", "--wait", "0")
            assert "draining broker first, bookie b1, bookie b2: " in begun.stdout, begun.stderr
            drained = await asyncio.to_thread(drain, cluster, "--zone", "east")
            assert "broker first, bookie b1, bookie b2 can be stopped" in drained.stdout, drained.stderr
            shown = {broker["name"]: broker["state"] for broker in await client.admin.brokers()}
            assert shown == {"first": "drained", "second": "ready"}
            for process in (cluster.broker, cluster.bookies["b1"], cluster.bookies["b2"]):
                await asyncio.to_thread(process.stop)
            count = len(sent)
            await until(lambda: len(sent) > count + 10)
            for process in (cluster.broker, cluster.bookies["b1"], cluster.bookies["b2"]):
                await asyncio.to_thread(process.start)
            undone = await asyncio.to_thread(drain, cluster, "--zone", "east", "--undo")
            assert "bookie b2 is not drained any more" in undone.stdout, undone.stderr
            await until(lambda: set(cluster.states().values()) == {"writable"})
            done.set()
            await sending
        unknown = await asyncio.to_thread(drain, cluster, "b9")
        assert (
            "no broker or bookie 'b9' in this cluster; brokers: first, second; bookies: b1" in unknown.stderr
        )
        found = await consumed(url, "orders", len(sent))
        assert list(dict.fromkeys(found)) == sent[: len(dict.fromkeys(found))]


async def test_an_interrupted_drain_goes_on_or_is_undone(cluster: Cluster) -> None:
    fourth = cluster.daemon("bookie", "b4")
    try:
        await asyncio.to_thread(fourth.start)
        async with connect(cluster.broker.url) as client, client.create_producer("drained") as producer:
            await producer.send(b"a ledger that its writer keeps: maintenance rounds come every two minutes")
            drained = (await client.admin.topic_stats("drained"))["open_ledger"]["bookies"][0]
            line = ["-m", "magnetar.cli.main", "cluster", "drain", "--metadata", cluster.url, drained]
            process = await asyncio.create_subprocess_exec(
                sys.executable, *line, stdout=asyncio.subprocess.PIPE
            )
            assert process.stdout is not None
            first = await process.stdout.readline()
            assert b"open" in first, first
            process.send_signal(signal.SIGINT)
            said, _ = await process.communicate()
            assert b"goes on without this command" in said
            assert process.returncode == 130
            assert cluster.states()[drained] == "draining"
            assert (await client.admin.drain(drained))["open_ledgers"] >= 1
            following = asyncio.create_task(asyncio.to_thread(drain, cluster, drained))
            while not following.done():
                await asyncio.to_thread(drain, cluster, drained, "--undo")
            assert f"somebody has taken the drain back: bookie {drained}" in following.result().stderr
            assert set((await asyncio.to_thread(cluster.states)).values()) == {"writable"}
    finally:
        await asyncio.to_thread(fourth.kill)
