"""What is special about each store: the lock, damage, a failing disk, a model that must equal RocksDB."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import rocksdict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magnetar.metadata import embedded
from magnetar.metadata.embedded import EmbeddedMetadataStore, RocksKeyValue
from magnetar.metadata.local import LocalMetadataStore
from magnetar.proto.errors import DataDirectoryError, DiskFull, MagnetarError, StorageFailed
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
