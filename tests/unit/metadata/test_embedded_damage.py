"""Damage to the files of the embedded store: refused when opened or read, never a ledger that looks deleted (rule 37)."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path

import pytest

from magnetar.metadata import embedded
from magnetar.metadata.change_log import ChangeLog
from magnetar.metadata.embedded import RocksKeyValue, _cannot_open
from magnetar.proto.errors import DataDirectoryError, StorageFailed
from magnetar.runtime.files import OsFiles
from magnetar.runtime.rocksdb_guard import RocksDbGuard
from support.long_form import times
from support.rocksdb_damage import PAGE_BYTES, with_damaged_manifest, with_flipped_bits
from support.running_copy import copy_running

KEYS = 1200
TURN_BYTES = 16_384


def expected() -> dict[bytes, bytes]:
    return {b"n%04d" % number: b"%d" % number * 10 for number in range(KEYS)}


async def flushed(storage: RocksKeyValue) -> None:
    """RocksDB has flushed what it was asked to."""
    async with asyncio.timeout(20):
        while storage._flushing is not None:
            storage._end_flush()
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "RESERVE_BYTES", PAGE_BYTES)


@pytest.fixture
async def killed(tmp_path: Path) -> Path:
    """The files of a store of several turns as kill -9 leaves them."""
    storage = RocksKeyValue(str(tmp_path / "m"), turn_bytes=TURN_BYTES)
    for key, value in expected().items():
        storage.write_synced({key: value})
        await flushed(storage)
    storage._log.note_synced()
    assert storage._log.turn > 2
    copy_running(tmp_path / "m", tmp_path / "killed", "LOCK")
    storage.close()
    return tmp_path / "killed"


def judge(path: Path) -> str:
    """refused; unreadable: a read says so; fine: everything is there. Anything else fails the test."""
    try:
        storage = RocksKeyValue(str(path), turn_bytes=TURN_BYTES)
    except DataDirectoryError as error:
        return "refused" if "backup" in str(error) else f"refused without a cure: {error}"
    try:
        assert list(storage.keys(b"n", b"o")) == sorted(expected())
        assert {key: storage.get(key) for key in expected()} == expected()
    except StorageFailed as error:
        return "unreadable" if "backup" in str(error) else f"unreadable without a cure: {error}"
    finally:
        storage.close()
    return "fine"


async def test_a_killed_store_has_everything(killed: Path) -> None:
    assert judge(killed) == "fine"
    assert judge(killed) == "fine"  # and again: RocksDB flushed on closing what was replayed


async def test_rule_37_a_bit_in_every_page_of_every_file(killed: Path, tmp_path: Path) -> None:
    kinds = ("changes", "guard", "CURRENT", "MANIFEST")
    wanted = [
        path for path in sorted(killed.iterdir()) if path.name.split("-")[0] in kinds or path.suffix == ".sst"
    ]
    copy = tmp_path / "copy"
    outcomes = Counter(
        f"{kind} {judge(copy)}" for kind in with_flipped_bits(killed, copy, wanted, times=times(1, 3))
    )
    assert outcomes["MANIFEST refused"]
    assert outcomes["changes refused"]
    assert not [outcome for outcome in outcomes if "without" in outcome]
    assert sum(outcomes.values()) > times(10, 30)


@pytest.mark.parametrize("damage", ["length", "cut"])
async def test_rule_37_a_manifest_that_lost_its_end_is_noticed(
    killed: Path, tmp_path: Path, damage: str
) -> None:
    copy = tmp_path / "copy"
    outcomes = Counter(judge(copy) for _ in with_damaged_manifest(killed, copy, damage))
    assert set(outcomes) <= {"refused", "fine"}
    assert outcomes["refused"] >= 3


async def test_files_that_are_missing_or_from_an_old_copy_are_noticed(killed: Path, tmp_path: Path) -> None:
    for name in ("changes-0", "changes-1", "guard", "CURRENT"):
        copy = tmp_path / "copy"
        shutil.copytree(killed, copy)
        (copy / name).unlink()
        assert judge(copy) == "refused", name
        shutil.rmtree(copy)
    old = tmp_path / "old"
    shutil.copytree(killed, old)
    storage = RocksKeyValue(str(killed), turn_bytes=TURN_BYTES)
    for number in range(3000):  # two more turns at least
        storage.write_synced({b"n0000": expected()[b"n0000"], b"x": b"%d" % number})
        await flushed(storage)
    storage.close()
    for name in ("changes-0", "changes-1", "guard"):
        shutil.copy(killed / name, old / name)
    assert judge(old) == "refused"


@pytest.mark.parametrize("made", range(4))
def test_an_interrupted_making_is_repeated(tmp_path: Path, made: int) -> None:
    directory = tmp_path / "m"
    directory.mkdir()
    if made:
        ChangeLog(OsFiles(), str(directory)).create()
        if made == 1:
            (directory / "changes-1").unlink()
    if made == 3:
        RocksDbGuard(OsFiles(), str(directory), "").create(0)
    for value in (None, b"1"):
        storage = RocksKeyValue(str(directory))
        assert storage.get(b"n1") == value
        storage.write_synced({b"n1": b"1"})
        storage.close()


def test_a_damaged_block_is_not_taken_for_a_lock(tmp_path: Path) -> None:
    error = _cannot_open(str(tmp_path), Exception("Corruption: block checksum mismatch in 000009.sst"))
    assert "restore" in str(error)
    assert "another process" not in str(error)
