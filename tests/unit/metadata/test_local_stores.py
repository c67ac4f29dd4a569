"""What is special about each store: the lock, damage, a failing disk, a model that must equal RocksDB."""

import asyncio
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import rocksdict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magnetar.metadata import embedded
from magnetar.metadata.embedded import EmbeddedMetadataStore, RocksKeyValue
from magnetar.metadata.local import LocalMetadataStore
from magnetar.metadata.store import Create, Delete
from magnetar.proto.errors import (
    AlreadyClosed,
    DataDirectoryError,
    DiskFull,
    MagnetarError,
    StorageFailed,
    VersionConflict,
)
from magnetar.runtime.files import OsFile
from support.bookie_kit import until
from support.memory_metadata import MemoryMetadataStore, ModelKeyValue


async def test_a_second_opener_is_told_what_to_do(tmp_path: Path) -> None:
    store = EmbeddedMetadataStore(str(tmp_path / "m"))
    with pytest.raises(DataDirectoryError, match=r"held by another process.*setting data\)"):
        EmbeddedMetadataStore(str(tmp_path / "m"))
    await store.create("/still", b"works")
    await store.close()
    await EmbeddedMetadataStore(str(tmp_path / "m")).close()


def test_a_directory_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataDirectoryError, match="cannot be opened"):
        EmbeddedMetadataStore(str(tmp_path / "file"))


async def test_foreign_and_future_formats_are_refused(tmp_path: Path) -> None:
    foreign = rocksdict.Rdict(str(tmp_path / "foreign"), rocksdict.Options(raw_mode=True))
    foreign.put(b"key", b"value")
    foreign.close()
    with pytest.raises(DataDirectoryError, match="not a metadata store"):
        EmbeddedMetadataStore(str(tmp_path / "foreign"))
    storage = RocksKeyValue(str(tmp_path / "future"))
    storage.write_synced({b"f": (99).to_bytes(4)})
    storage.close()
    with pytest.raises(DataDirectoryError, match="format version 99"):
        EmbeddedMetadataStore(str(tmp_path / "future"))
    # The lock is free again after each refusal.
    RocksKeyValue(str(tmp_path / "future")).close()


async def test_after_a_failed_sync_nothing_is_written_any_more() -> None:
    disk = ModelKeyValue()
    store = MemoryMetadataStore(disk)
    session = await store.open_session(4)
    disk.fail_writes("no space")
    with pytest.raises(StorageFailed, match="no space"):
        await store.create("/a", b"")
    disk.fail_writes(None)
    assert session.lost
    with pytest.raises(StorageFailed, match="no space"):
        await store.create("/b", b"")
    await store.close()
    successor = MemoryMetadataStore(disk)
    assert await successor.children("/") == []


async def test_a_store_left_behind_by_a_crash_is_shut_out() -> None:
    disk = ModelKeyValue()
    stale = MemoryMetadataStore(disk)
    await stale.create("/a", b"")
    MemoryMetadataStore(disk)
    with pytest.raises(StorageFailed, match="successor"):
        await stale.put("/a", b"late", version=0)


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "RESERVE_BYTES", 4096)


KEYS = st.binary(min_size=1, max_size=3).map(lambda key: bytes(byte % 4 for byte in key))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(KEYS, st.none() | st.binary(max_size=2), max_size=4), max_size=6), KEYS, KEYS)
def test_the_model_equals_rocksdb(
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[dict[bytes, bytes | None]],
    low: bytes,
    high: bytes,
) -> None:
    real = RocksKeyValue(str(tmp_path_factory.mktemp("rocks") / "db"), turn_bytes=8192)
    model = ModelKeyValue().open()
    for batch in batches:
        real.write_synced(batch)
        model.write_synced(batch)
    assert list(real.keys(b"", b"\xff")) == list(model.keys(b"", b"\xff"))
    assert list(real.keys(low, high)) == list(model.keys(low, high))
    assert real.first_key(low, high) == model.first_key(low, high)
    assert real.get(low) == model.get(low)
    real.close()


@pytest.mark.real
def test_the_interface_loads_no_rocksdb() -> None:
    code = "import sys, magnetar.metadata; sys.exit('rocksdict' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


async def test_failed_write_is_told_once_so_that_the_daemon_stops() -> None:
    disk = ModelKeyValue()
    store = MemoryMetadataStore(disk)
    told: list[MagnetarError] = []
    store.on_failure = told.append
    disk.fail_writes("input/output error")
    for _ in range(2):
        with pytest.raises(StorageFailed):
            await store.create("/a", b"")
    await asyncio.sleep(0)
    assert [type(error) for error in told] == [StorageFailed]


async def test_rule_39_a_full_disk_refuses_a_write_and_poisons_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle = ModelKeyValue().open()
    store = LocalMetadataStore(handle)
    session = await store.open_session(4)
    failures: list[MagnetarError] = []
    store.on_failure = failures.append

    def full(changes: object) -> None:
        raise DiskFull("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(handle, "write_synced", full)
        with pytest.raises(DiskFull):
            await store.create("/a", b"")
    await asyncio.sleep(0)
    assert not failures
    assert not session.lost
    await store.create("/a", b"")


class HangingDisk:
    """Every disk of this process, which can be told to answer no sync."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.asked = 0
        sync = OsFile.sync

        def hanging(file: OsFile) -> None:
            self.asked += 1
            assert self.answers.wait(10), "the test itself waits for this sync"
            sync(file)

        monkeypatch.setattr(OsFile, "sync", hanging)


@pytest.mark.asyncio(loop_factories=["uvloop"])  # with threads
async def test_a_disk_that_hangs_keeps_waiting_only_who_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broker and bookie of a standalone live in the same loop; what is not durable is not shown (rule 4)."""
    disk = HangingDisk(monkeypatch)
    store = EmbeddedMetadataStore(str(tmp_path / "m"))
    await store.create("/a", b"0")
    asked = disk.asked
    disk.answers.clear()
    first = asyncio.ensure_future(store.put("/a", b"1", version=0))
    await until(lambda: disk.asked > asked)
    second = asyncio.ensure_future(store.put("/a", b"2", version=1))
    drawn = [asyncio.ensure_future(store.next_id("s")) for _ in range(2)]
    late = asyncio.ensure_future(store.put("/a", b"x", version=1))
    await asyncio.sleep(0.05)
    assert await store.get("/a") == (b"0", 0)
    assert not any(task.done() for task in (first, second, late, *drawn))
    assert disk.asked == asked + 1
    disk.answers.set()
    assert (await first, await second, [await task for task in drawn]) == (1, 2, [0, 1])
    with pytest.raises(VersionConflict):
        await late
    assert disk.asked == asked + 2, "what came meanwhile shares a write"
    await store.close()
    successor = EmbeddedMetadataStore(str(tmp_path / "m"))
    assert await successor.get("/a") == (b"2", 2)
    await successor.close()


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_rule_45_a_store_whose_disk_hangs_is_given_up_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = HangingDisk(monkeypatch)
    store = EmbeddedMetadataStore(str(tmp_path / "m"))
    await store.create("/a", b"0")
    shutil.copytree(tmp_path / "m", tmp_path / "as after a kill")
    asked = disk.asked
    disk.answers.clear()
    waits = asyncio.ensure_future(store.put("/a", b"1", version=0))
    await until(lambda: disk.asked > asked)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await store.close()
    disk.answers.set()
    await asyncio.wait([waits])
    successor = EmbeddedMetadataStore(str(tmp_path / "as after a kill"))
    assert await successor.get("/a") == (b"0", 0)
    await successor.close()


class Gated:
    """A model whose next write waits until it is let through, or refused, if `outcome` is set."""

    def __init__(self) -> None:
        self._model = ModelKeyValue().open()
        self.get, self.keys, self.first_key = self._model.get, self._model.keys, self._model.first_key
        self.write_synced, self.close = self._model.write_synced, self._model.close
        self.outcome: asyncio.Future[None] | None = None

    async def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        outcome, self.outcome = self.outcome, None
        if outcome is not None:
            await outcome
        self._model.write_synced(changes)


@pytest.mark.parametrize("error", [DiskFull("no space left"), StorageFailed("input/output error")])
async def test_rule_04_what_was_judged_on_top_of_a_failed_write_fails_with_it(error: MagnetarError) -> None:
    storage = Gated()
    store = LocalMetadataStore(storage)
    storage.outcome = outcome = asyncio.get_running_loop().create_future()
    first = asyncio.ensure_future(store.create("/a", b"1"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second = asyncio.ensure_future(store.put("/a", b"2", version=0))
    await asyncio.sleep(0)
    outcome.set_exception(error)  # of the first write alone: the disk would take the second
    found = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(one) for one in found] == [type(error), type(error)]
    assert await store.get("/a") is None
    if isinstance(error, DiskFull):
        assert await store.create("/a", b"3") == 0
        assert await store.get("/a") == (b"3", 0)
    else:
        with pytest.raises(StorageFailed):
            await store.create("/a", b"3")
    await store.close()


async def test_a_store_that_is_closed_has_what_was_under_way() -> None:
    storage = Gated()
    store = LocalMetadataStore(storage)
    session = await store.open_session(4)
    storage.outcome = outcome = asyncio.get_running_loop().create_future()
    made = asyncio.ensure_future(store.create("/a", b"", session=session))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(store.close())
    await asyncio.sleep(0)
    with pytest.raises(AlreadyClosed):
        await store.create("/late", b"")
    outcome.set_result(None)
    assert await made == 0
    await closing
    assert not list(storage.keys(b"n", b"o")), "the session's node goes with it"


async def test_rule_40_a_session_whose_close_is_given_up_leaves_no_nodes() -> None:
    """A slow disk keeps the close waiting for what others write, and whoever closes gives up."""
    storage = Gated()
    store = LocalMetadataStore(storage)
    session, other = await store.open_session(4), await store.open_session(4)
    await store.create("/stored", b"", session=session)
    await store.create("/moves", b"", session=session)
    storage.outcome = outcome = asyncio.get_running_loop().create_future()
    waiting = [
        asyncio.ensure_future(store.create("/waits", b"", session=session)),
        asyncio.ensure_future(store.commit([Delete("/moves"), Create("/moves", b"", other)])),
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(session.close())
    await asyncio.sleep(0)
    closing.cancel()
    outcome.set_result(None)
    await asyncio.gather(*waiting)
    await asyncio.wait([closing])
    await store.create("/behind", b"")
    assert await store.children("/") == ["behind", "moves"]
    await store.close()


async def test_rule_45_a_session_ends_though_others_never_stop_writing() -> None:
    class Slow(Gated):
        async def write(self, changes: Mapping[bytes, bytes | None]) -> None:
            await asyncio.sleep(0.005)
            await super().write(changes)

    store = LocalMetadataStore(Slow())
    session = await store.open_session(4)
    await store.create("/a", b"", session=session)

    async def write() -> None:
        while True:
            await store.next_id("s")

    writers = []
    for _ in range(2):  # the group of one waits while that of the other is written
        writers.append(asyncio.ensure_future(write()))
        await asyncio.sleep(0.001)
    closing = asyncio.ensure_future(session.close())
    await asyncio.sleep(1)
    assert closing.done()
    for writer in writers:
        writer.cancel()
    await store.close()
