"""Rule 54: health, metrics and status of a cluster say what is wrong within seconds, with its reason; ok means ok."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from magnetar.broker.ownership.records import BrokerLoad, BrokerRecord, broker_path
from magnetar.cli.cluster.commands import status_of
from magnetar.cli.terminal.tables import show
from magnetar.cli.wiring.cluster_facts import ClusterHealth, cluster_facts
from magnetar.cli.wiring.health import HttpPages, Started
from magnetar.ledger.directory import BOOKIES_PATH, encode_registration
from magnetar.ledger.replication.core.request import Reason, RepairRequest
from magnetar.ledger.replication.queue import UnderreplicatedLedgers
from magnetar.metadata.damage import damaged_path
from magnetar.metadata.paths import AUDITOR_PATH, cookie_path, known_broker_path
from magnetar.proto.errors import ConnectionLost
from magnetar.runtime.lifecycle import Daemon
from magnetar.runtime.metrics import Metrics
from support.bookie_kit import until
from support.memory_metadata import MemoryMetadataStore


@pytest.fixture
async def store() -> MemoryMetadataStore:
    """A cluster that is well."""
    opened = MemoryMetadataStore()
    for name in ("b1", "b2", "b3"):
        await opened.create(cookie_path(name), b"")
        await opened.create(f"{BOOKIES_PATH}/{name}", encode_registration("10.0.0.1:3181"))
    await broker(opened, "h:1", {})
    await opened.create(AUDITOR_PATH, b"bookie b1")
    return opened


async def broker(store: MemoryMetadataStore, name: str, problems: dict[str, str]) -> None:
    record = BrokerRecord(f"magnetar://{name}", "", "", "ready", 5, "0", BrokerLoad(), problems)
    await store.create(broker_path(name), record.encode())
    await store.create(known_broker_path(name), b"")


@pytest.fixture
async def health(store: MemoryMetadataStore) -> AsyncIterator[ClusterHealth]:
    """What each daemon has."""
    watched = ClusterHealth(store)
    yield watched
    await watched.close()


async def test_rule_54_what_is_wrong_is_named_with_its_reason_and_ok_means_ok(
    store: MemoryMetadataStore, capsys: pytest.CaptureFixture[str]
) -> None:
    found = await cluster_facts(store)
    assert found["problems"] == {}
    show(*status_of(found))
    assert capsys.readouterr().out.startswith("ok\n")
    await store.delete(f"{BOOKIES_PATH}/b1")
    await store.delete(f"{BOOKIES_PATH}/b2")
    hung = encode_registration(
        "10.0.0.1:3181", journal_stalled_s=3, problems={"disk of /d": "it has not answered for 3 s"}
    )
    await store.create(f"{BOOKIES_PATH}/b2", hung)
    await store.delete(f"{BOOKIES_PATH}/b3")
    full = encode_registration("10.0.0.1:3181", read_only=True, read_only_reason="all disks are full")
    await store.create(f"{BOOKIES_PATH}/b3", full)
    await store.delete(broker_path("h:1"))
    await broker(store, "h:2", {"subscription s of t": "message 1:2:3 came back 9 times"})
    await store.delete(AUDITOR_PATH)
    queue = UnderreplicatedLedgers(store)
    for ledger_id in range(21):
        await queue.add(
            ledger_id, RepairRequest({"b1": Reason.LOST}, note="no other bookie takes its copies")
        )
    found = await cluster_facts(store)
    assert found["problems"] == {
        "bookie b1": "it is lost: it has no session with the metadata store",
        "bookie b2": "its journal hangs, for 3 s",
        "bookie b2, disk of /d": "it has not answered for 3 s",
        "bookie b3": "read-only: all disks are full",
        "broker h:1": "it is lost: it did not stop, and has no session with the metadata store",
        "broker h:2, subscription s of t": "message 1:2:3 came back 9 times",
        "auditor": "no process audits the ledgers: what a lost bookie had is not copied (repair.auditor)",
        "repair": "21 ledgers wait for repair; ledger 0: no other bookie takes its copies",
    }
    show(*status_of(found))
    printed = capsys.readouterr().out
    assert printed.startswith("degraded:\n  bookie b1: it is lost")
    assert "\n  repair: 21 ledgers wait for repair; ledger 0: no other" in printed


async def test_rule_54_every_daemon_says_what_is_wrong_with_its_cluster(
    store: MemoryMetadataStore, health: ClusterHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Daemon("broker")
    daemon.state = "ready"
    pages = HttpPages(daemon)
    pages.started = Started({}, Metrics, lambda: health.problems)
    metrics = pages.metrics()
    assert metrics is not None
    await until(lambda: health.looks > 0)
    assert pages.warnings() == {}
    assert b"magnetar_degraded 0.0\n" in await metrics.render()
    await store.delete(f"{BOOKIES_PATH}/b1")
    await until(lambda: bool(health.problems))
    assert list(pages.warnings()) == ["bookie b1"]
    assert b"magnetar_degraded 1.0\n" in await metrics.render()
    asked: list[str] = []
    warnings = pages.warnings

    def counted() -> Any:
        asked.append("once")
        return warnings()

    monkeypatch.setattr(pages, "warnings", counted)
    reason = b"it is lost: it has no session with the metadata store"
    assert b'magnetar_problem{reason="' + reason + b'",subject="bookie b1"} 1.0\n' in await metrics.render()
    assert asked == ["once"]


async def test_rule_44_a_look_at_the_cluster_reads_a_bounded_part_of_its_damage(
    store: MemoryMetadataStore,
) -> None:
    for ledger_id in range(1002):
        await store.create(damaged_path("b1", ledger_id), b"")
    found = await cluster_facts(store, count=False)
    assert found["problems"]["damage at bookie b1"] == "copies of 1,000 ledgers or more are damaged there"
    assert (await cluster_facts(store))["bookies"][0]["damaged_ledgers"] == 1002


async def test_rule_54_a_problem_whose_figures_move_is_one_series() -> None:
    daemon = Daemon("bookie")
    daemon.state = "ready"
    pages = HttpPages(daemon)
    figures = iter(["4.2 s, 10,240 of 1:2:3", "19.0 s, 7 of 1:2:44"])
    pages.started = Started({}, Metrics, lambda: {"reads of /d1": f"disk d1 is silent for {next(figures)}"})
    problems: Any = pages._problem_metrics
    shown = {tuple(labels) for _ in range(2) for labels, _ in problems()["problem"]}
    assert shown == {("reads of /d1", "disk d1 is silent for N s, N of N")}


async def test_rule_54_a_cluster_that_cannot_be_looked_at_is_not_well(
    store: MemoryMetadataStore, health: ClusterHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cut(*_: object, **__: object) -> list[str]:
        raise ConnectionLost("no server answers")

    monkeypatch.setattr(store, "children", cut)
    await until(lambda: bool(health.problems))
    assert health.problems == {"metadata": "the metadata store cannot be read: no server answers"}
