"""An end that cannot be proved: the operator sees what is known, accepts the loss, and the topic loads (rule 14)."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest
from bench.service_process import ServiceProcess

from magnetar.cli.wiring.service import Service, system_components
from magnetar.cli.wiring.settings import SettingSources, service_settings
from magnetar.client import connect
from magnetar.ledger import LedgerMetadata
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import MagnetarError
from support.forked_commands import run_magnetar
from support.zookeeper import Ensemble, open_store, zookeeper

__all__ = ["zookeeper"]

pytestmark = [pytest.mark.timeout(180), pytest.mark.real]
# One of two bookies confirms: without the other one the end of an open ledger cannot be proved.
SETTINGS = ("broker.ensemble_size=2", "broker.write_quorum=2", "broker.ack_quorum=1")
NO_REPAIR = ("repair.auditor=false", "repair.workers=false", "daemon.session_timeout_s=2")
REPAIR = ("bookie.gc_interval_s=1", "bookie.checkpoint_interval_s=1", "daemon.session_timeout_s=2")


class Cluster:
    """Two bookies and a broker."""

    def __init__(self, zookeeper: Ensemble, directory: Path, settings: tuple[str, ...] = NO_REPAIR) -> None:
        self.settings = settings
        self.url = f"{zookeeper.url}/{directory.name}"
        self.directory = directory
        self.bookies = {name: self.daemon("bookie", name, "--id", name) for name in ("b1", "b2")}
        self.broker = self.daemon("broker", "broker")

    def daemon(self, command: str, name: str, *arguments: str) -> ServiceProcess:
        sets = [part for text in (*SETTINGS, *self.settings) for part in ("--set", text)]
        return ServiceProcess(
            self.directory / name, command=command, arguments=["--metadata", self.url, *sets, *arguments]
        )

    def start(self) -> None:
        assert run_magnetar("cluster", "init", "--metadata", self.url).returncode == 0
        for daemon in (*self.bookies.values(), self.broker):
            daemon.start()

    def replace_disk(self, name: str) -> None:
        """A bookie loses its disk for good, and takes its place again with an empty one."""
        bookie = self.bookies[name]
        bookie.kill()
        assert bookie.data is not None
        shutil.rmtree(bookie.data)
        accepted = run_magnetar(
            "bookie", "cookie", "--data", str(bookie.data), "--accept-new-disk", name, "--yes"
        )
        assert accepted.returncode == 0, accepted.stderr
        bookie.start()

    def recover(self, ledger_id: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_magnetar("cluster", "recover-ledger", str(ledger_id), "--metadata", self.url, *arguments)

    def open_ledgers(self) -> list[int]:
        async def find() -> list[int]:
            store = await open_store(self.url)
            try:
                ledgers, found = StoredLedgers(store), []
                async for page in ledgers.pages():
                    for ledger_id in page:
                        node = await ledgers.get(ledger_id)
                        assert node is not None
                        if not LedgerMetadata.decode(node.value, ledger_id).closed:
                            found.append(ledger_id)
                return found
            finally:
                await store.close()

        return asyncio.run(find())


@pytest.fixture
def cluster(zookeeper: Ensemble, tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        cluster = Cluster(zookeeper, tmp_path)
        for process in (*cluster.bookies.values(), cluster.broker):
            stack.callback(process.kill)
        cluster.start()
        yield cluster


async def send(url: str, topic: str, messages: list[bytes]) -> None:
    async with connect(url) as client, client.create_producer(topic) as producer:
        for message in messages:
            await producer.send(message)


async def consumed(url: str, topic: str, count: int) -> list[bytes]:
    found: list[bytes] = []
    async with connect(url) as client, client.create_reader(topic, start="earliest") as reader:
        while len(found) < count:
            found.append((await reader.receive(timeout=20)).value or b"")
    return found


def test_rule_14_a_topic_loads_after_the_loss_was_accepted(cluster: Cluster) -> None:
    sent = [b"%d" % number for number in range(30)]
    asyncio.run(send(cluster.broker.url, "orders", sent))
    assert cluster.recover(99, "--accept-loss", "0", "--yes").returncode == 1, "there is no such ledger"
    cluster.broker.kill()
    (ledger_id,) = cluster.open_ledgers()
    cluster.replace_disk("b2")

    looked = cluster.recover(ledger_id)
    assert looked.returncode == 1
    assert f"ledger {ledger_id} cannot be closed" in looked.stdout
    assert "UnknownLedgerState" in looked.stdout
    known: dict[str, Any] = json.loads(cluster.recover(ledger_id, "--json").stdout)
    end = known["last_entry_proved"]
    assert end == len(sent) - 1
    assert not known["end_is_proved"]
    by_id = {bookie["id"]: bookie for bookie in known["bookies"]}
    assert by_id["b1"]["last_add_confirmed"] == end or by_id["b1"]["found"][-1][1] == end
    assert by_id["b1"]["denied"] == [[end + 1, end + 1]]
    assert by_id["b2"]["found"] == []
    assert by_id["b2"]["unknown"][-1][1] == end + 1
    assert f"recover-ledger {ledger_id} --accept-loss {end}" in looked.stdout

    fewer = cluster.recover(ledger_id, "--accept-loss", str(end - 1), "--yes")
    assert (fewer.returncode, "prove entry" in fewer.stderr) == (1, True)
    unasked = cluster.recover(ledger_id, "--accept-loss", str(end))
    assert (unasked.returncode, "say --yes" in unasked.stderr) == (2, True)
    assert cluster.open_ledgers() == [ledger_id], "nothing was closed without a word"

    accepted = cluster.recover(ledger_id, "--accept-loss", str(end), "--yes")
    assert f"ledger {ledger_id} is closed after entry {end}" in accepted.stdout, accepted.stderr
    cluster.broker.start()
    asyncio.run(send(cluster.broker.url, "orders", [b"more"]))
    assert asyncio.run(consumed(cluster.broker.url, "orders", len(sent) + 1)) == [*sent, b"more"]
    again = cluster.recover(ledger_id)
    assert (again.returncode, f"ledger {ledger_id} is closed after entry {end}" in again.stdout) == (0, True)


def test_a_bookie_that_does_not_answer_may_prove_more(cluster: Cluster) -> None:
    sent = [b"%d" % number for number in range(10)]
    asyncio.run(send(cluster.broker.url, "orders", sent))
    cluster.broker.kill()
    (ledger_id,) = cluster.open_ledgers()
    cluster.bookies["b2"].stop()
    known = json.loads(cluster.recover(ledger_id, "--json", "--set", "ledger.read_timeout_s=1").stdout)
    by_id = {bookie["id"]: bookie for bookie in known["bookies"]}
    assert by_id["b2"]["error"].startswith("BookieUnavailable")
    cluster.bookies["b2"].start()
    proved = cluster.recover(ledger_id)
    assert f"ledger {ledger_id} is closed after entry {len(sent) - 1}" in proved.stdout, proved.stderr


async def denial(cluster: Cluster, bookie: str, ledger_id: int) -> str:
    """What a bookie says of an entry that a ledger never had."""
    async with AsyncExitStack() as stops:
        store = await open_store(cluster.url)
        stops.push_async_callback(store.close)
        settings = service_settings(SettingSources())
        service = await stops.enter_async_context(Service(settings, system_components()))
        client = await service.operator_ledgers(store)
        try:
            await client.components.transport.read(bookie, ledger_id, 1000, 1000)
        except MagnetarError as error:
            return type(error).__name__
        raise AssertionError("there is no such entry")


def test_rule_9_an_emptied_bookie_denies_again_what_it_never_had_when_it_was_repaired(
    zookeeper: Ensemble, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        cluster = Cluster(zookeeper, tmp_path, REPAIR)
        for process in (*cluster.bookies.values(), cluster.broker):
            stack.callback(process.kill)
        cluster.start()
        asyncio.run(send(cluster.broker.url, "orders", [b"%d" % number for number in range(10)]))
        cluster.broker.kill()
        (ledger_id,) = cluster.open_ledgers()
        assert cluster.recover(ledger_id).returncode == 0
        cluster.replace_disk("b2")
        assert asyncio.run(denial(cluster, "b2", ledger_id)) == "UnknownLedgerState"
        queued = run_magnetar("cluster", "recover", "--metadata", cluster.url, "b2")
        assert queued.returncode == 0, queued.stderr
        deadline = time.monotonic() + 60
        while asyncio.run(denial(cluster, "b2", ledger_id)) != "EntryNotFound":
            assert time.monotonic() < deadline, cluster.bookies["b2"].errors()


def test_the_ledgers_of_a_stopped_standalone_service(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with ExitStack() as stack:
        service = ServiceProcess(data, command="standalone", arguments=[])
        stack.callback(service.kill)
        service.start()
        asyncio.run(send(service.url, "orders", [b"lost"]))
        busy = run_magnetar("cluster", "recover-ledger", "0", "--data", str(data))
        assert busy.returncode == 1
        assert "is in use by another process" in busy.stderr
        service.kill()
        shutil.rmtree(data / "bookie")
        cookie = ("bookie", "cookie", "--data", str(data), "--accept-new-disk")
        accepted = run_magnetar(*cookie, "bookie-1", "--yes")
        assert accepted.returncode == 0, accepted.stderr
        looked = run_magnetar("cluster", "recover-ledger", "0", "--data", str(data))
        assert "--accept-loss -1" in looked.stdout, looked.stderr
        closed = run_magnetar(
            "cluster", "recover-ledger", "0", "--data", str(data), "--accept-loss", "-1", "--yes"
        )
        assert "ledger 0 is closed, and empty" in closed.stdout, closed.stderr
        service.start()
        asyncio.run(send(service.url, "orders", [b"found"]))
        assert asyncio.run(consumed(service.url, "orders", 1)) == [b"found"]
