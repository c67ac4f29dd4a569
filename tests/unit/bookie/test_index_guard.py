"""Damage to the index's own files: noticed when it is opened or read, never an entry that is said not to exist (rule 8)."""

from __future__ import annotations

import shutil
import struct
from collections import Counter
from pathlib import Path

import pytest

from magnetar.bookie.index import LedgerRecord, Location, RocksLocationIndex
from magnetar.bookie.index.locations import REBUILD
from magnetar.proto.errors import DataDirectoryError, StorageFailed
from magnetar.runtime.files import OsFiles
from magnetar.runtime.rocksdb_guard import RocksDbGuard
from support.rocksdb_damage import PAGE_BYTES, manifest_records, with_damaged_manifest, with_flipped_bits

LEDGERS = 5
ENTRIES = 600


@pytest.fixture
async def index_directory(tmp_path: Path) -> Path:
    """An index of several tables, closed without a flush of its own."""
    path = tmp_path / "index"
    index = RocksLocationIndex(str(path))
    index.set_instance(77)
    for ledger_id in range(LEDGERS):
        for start in range(0, ENTRIES, 300):
            index.put_locations(
                [(ledger_id, n, Location(1, n * 100, ledger_id)) for n in range(start, start + 300)]
            )
        index.put_ledgers([(ledger_id, LedgerRecord(True, 1, ENTRIES, 2))])
        await index.flush_locations()
        await index.flush_ledgers()
    index.close()
    return path


def judge(path: Path) -> str:
    """What becomes of the damage: refused, told by a read, or fine (then everything is there)."""
    try:
        index = RocksLocationIndex(str(path))
    except DataDirectoryError as error:
        return "refused" if "magnetar bookie index rebuild" in str(error) else "refused without a cure"
    outcome = "fine"
    try:
        for ledger_id in range(LEDGERS):
            for start in range(0, ENTRIES, 100):
                try:
                    found = index.get_each(ledger_id, range(start, start + 100))
                    assert found == [(n, Location(1, n * 100, ledger_id)) for n in range(start, start + 100)]
                    assert len(index.list_locations(ledger_id, start - 1, 100)) == 100
                except StorageFailed:
                    outcome = "told"
            try:
                assert index.get_ledger(ledger_id) == LedgerRecord(True, 1, ENTRIES, 2)
                assert len(index.list_ledgers()) == LEDGERS
            except StorageFailed:
                outcome = "told"
        try:
            assert len(index.walk(None, LEDGERS * ENTRIES + 1)) == LEDGERS * ENTRIES
        except StorageFailed:
            outcome = "told"
    finally:
        index.close()
    return outcome


async def test_rule_08_a_bit_in_every_page_of_every_file_of_the_index(
    index_directory: Path, tmp_path: Path
) -> None:
    wanted = sorted(index_directory.glob("*.sst"))
    wanted += [
        path for path in index_directory.iterdir() if path.name.split("-")[0] in ("MANIFEST", "CURRENT")
    ]
    copy = tmp_path / "copy"
    kinds = with_flipped_bits(index_directory, copy, wanted, times=2)
    outcomes = Counter(f"{kind} {judge(copy)}" for kind in kinds)
    assert outcomes["MANIFEST refused"] == outcomes["CURRENT refused"] == 2
    assert not [outcome for outcome in outcomes if outcome.endswith("cure")]
    assert sum(outcomes.values()) > 15


@pytest.mark.parametrize("damage", ["length", "cut"])
async def test_rule_08_a_manifest_that_lost_its_end_is_noticed(
    index_directory: Path, tmp_path: Path, damage: str
) -> None:
    copy = tmp_path / "copy"
    outcomes = Counter(judge(copy) for _ in with_damaged_manifest(index_directory, copy, damage, last=6))
    assert outcomes["refused"] >= 3
    assert not outcomes["told"]


async def test_teeth_without_the_guard_entries_are_missing(index_directory: Path) -> None:
    (path,) = index_directory.glob("MANIFEST-*")
    data = path.read_bytes()
    path.write_bytes(data[: manifest_records(data)[-6]])
    RocksDbGuard(OsFiles(), str(index_directory), REBUILD).create(0)
    with pytest.raises(AssertionError):
        judge(index_directory)


async def test_a_missing_guard_is_noticed(index_directory: Path) -> None:
    (index_directory / "guard").unlink()
    with pytest.raises(DataDirectoryError, match=r"guard .* is missing; .*index rebuild"):
        RocksLocationIndex(str(index_directory))


async def test_a_guard_survives_a_torn_write_and_not_more(index_directory: Path) -> None:
    guard = index_directory / "guard"
    data = guard.read_bytes()
    for start in (0, PAGE_BYTES):
        torn = bytearray(data)
        torn[start : start + 64] = b"\xff" * 64
        guard.write_bytes(torn)
        assert judge(index_directory) == "fine"
    guard.write_bytes(bytes(len(data)))
    with pytest.raises(DataDirectoryError, match=r"guard .* is damaged; .*index rebuild"):
        RocksLocationIndex(str(index_directory))


async def test_an_index_of_the_first_release_gets_a_guard(tmp_path: Path) -> None:
    import rocksdict

    path = tmp_path / "index"
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    families = {name: rocksdict.Options(raw_mode=True) for name in ("locations", "ledgers")}
    database = rocksdict.Rdict(str(path), options, column_families=families)
    database.put(b"instance", (5).to_bytes(8, "big"))
    database.get_column_family("locations").put(struct.pack(">QQ", 1, 2), struct.pack(">IQI", 3, 4, 5))
    database.close()
    for _ in range(2):
        index = RocksLocationIndex(str(path))
        assert index.instance() == 5
        assert index.get(1, 2) == Location(3, 4, 5)
        index.close()
        assert (path / "guard").stat().st_size == 2 * PAGE_BYTES


async def test_an_old_copy_of_the_index_files_is_noticed(index_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(index_directory, tmp_path / "old")
    index = RocksLocationIndex(str(index_directory))
    index.put_locations([(9, 9, Location(1, 1, 1))])
    await index.flush_locations()
    index.close()
    shutil.copy(index_directory / "guard", tmp_path / "old" / "guard")
    with pytest.raises(DataDirectoryError, match="lost its newest changes"):
        RocksLocationIndex(str(tmp_path / "old"))
