"""`magnetar cluster status` on a metadata store of this process."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from magnetar.broker.ownership.records import broker_path
from magnetar.cli.cluster import commands as cluster
from magnetar.cli.cluster.members import obstacles, read_members
from magnetar.cli.wiring.metadata import open_shared_metadata
from magnetar.ledger.directory import BOOKIES_PATH, encode_registration
from magnetar.metadata.identity import cluster_instance
from magnetar.metadata.paths import cookie_path, known_broker_path
from magnetar.metadata.zookeeper import store as store_module
from magnetar.proto.errors import InvalidArgument, InvalidSetting
from support.memory_metadata import MemoryMetadataStore


@pytest.fixture
async def store(monkeypatch: pytest.MonkeyPatch) -> MemoryMetadataStore:
    """What the command opens, with one bookie."""
    opened = MemoryMetadataStore()

    @asynccontextmanager
    async def open_store(*_: Any) -> AsyncIterator[MemoryMetadataStore]:
        yield opened

    monkeypatch.setattr(cluster, "open_store", open_store)
    await opened.create(f"{BOOKIES_PATH}/bookie-1", encode_registration("10.0.0.11:3181"))
    return opened


async def test_too_few_bookies_fail_a_command_that_waits_for_them(
    store: MemoryMetadataStore, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        (await cluster.status("zk://x", 0.01, 3)).print(as_json=False)
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert "bookie-1" in printed.out
    assert "1 bookie that takes entries, and --bookies is 3" in printed.err


async def test_without_waiting_the_status_is_shown_as_it_is(
    store: MemoryMetadataStore, capsys: pytest.CaptureFixture[str]
) -> None:
    (await cluster.status("zk://x", 0, 3)).print(as_json=False)
    printed = capsys.readouterr()
    assert "0 ledgers, 0 brokers, balancer none" in printed.out
    assert " 10.0.0.11:3181 " in printed.out
    assert " rack " not in printed.out  # nobody has one
    assert not printed.err


async def test_a_bookie_whose_registration_is_damaged_is_shown_and_named(
    store: MemoryMetadataStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a traceback, also of `cluster drain --undo` and `rolling-restart`."""
    await store.create(f"{BOOKIES_PATH}/foreign", b"junk")
    (await cluster.status("zk://x", 0, 1)).print(as_json=False)
    printed = capsys.readouterr().out
    assert " 10.0.0.11:3181 " in printed
    assert " unreadable " in printed
    assert "the registration of bookie foreign cannot be read" in printed
    found = obstacles(await read_members(store), [], 0)
    assert found == ["bookie foreign is unreadable"]


async def test_rule_54_a_root_without_a_cluster_is_an_error_and_no_empty_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened, rng = MemoryMetadataStore(), random.Random(1)

    async def open_zookeeper_store(*_: Any, **__: Any) -> MemoryMetadataStore:
        return opened

    monkeypatch.setattr(store_module, "open_zookeeper_store", open_zookeeper_store)
    async with AsyncExitStack() as stops:
        with pytest.raises(InvalidSetting, match=r"no cluster at zk1:2181/wrong; .*magnetar cluster init"):
            await open_shared_metadata("zk://me:secret@zk1:2181/wrong", rng, stops)
        assert not await opened.children("/")
        store = await open_shared_metadata("zk://zk1:2181/wrong", rng, stops, make_root=True)
        await cluster_instance(store, rng)
        assert await open_shared_metadata("zk://zk1:2181/wrong", rng, stops) is opened


async def cluster_of_two_with_one_name(store: MemoryMetadataStore) -> None:
    await store.create(cookie_path("one"), b"")
    await store.create(known_broker_path("one"), b"")


@pytest.mark.parametrize(
    ("kind", "left"), [("broker", cookie_path("one")), ("bookie", known_broker_path("one"))]
)
async def test_remove_forgets_the_kind_that_is_meant(
    store: MemoryMetadataStore, kind: str, left: str
) -> None:
    """Regression: a lost broker was forgotten where its operator meant the bookie of the same name."""
    await cluster_of_two_with_one_name(store)
    with pytest.raises(InvalidArgument, match="kind"):
        await cluster.remove(store, "one", "")
    assert await store.get(cookie_path("one")) is not None
    assert await store.get(known_broker_path("one")) is not None
    await cluster.remove(store, "one", kind)
    found = [
        path for path in (cookie_path("one"), known_broker_path("one")) if await store.get(path) is not None
    ]
    assert found == [left]


async def test_a_broker_that_runs_is_not_forgotten(store: MemoryMetadataStore) -> None:
    await store.create(known_broker_path("one"), b"")
    await store.create(broker_path("one"), b"")
    with pytest.raises(InvalidArgument, match="stop it first"):
        await cluster.remove(store, "one", "")
