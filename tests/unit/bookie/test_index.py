"""The location index: RocksDB and the model behave alike, in a crash as well."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from magnetar.bookie.index import (
    LedgerRecord,
    Location,
    LocationIndex,
    RocksLocationIndex,
    decode_ledger_record,
    encode_ledger_record,
)
from magnetar.proto.errors import DataDirectoryError, DiskFull, StorageFailed
from support.index_model import ModelLocationIndex, ModelStorage


@pytest.fixture(params=["rocks", "model"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], LocationIndex]]:
    storage = ModelStorage()
    opened: list[LocationIndex] = []

    def open_again() -> LocationIndex:
        for index in opened:
            index.close()
        opened.clear()
        again: LocationIndex = (
            RocksLocationIndex(str(tmp_path / "index"))
            if request.param == "rocks"
            else ModelLocationIndex(storage)
        )
        opened.append(again)
        return again

    yield open_again
    for index in opened:
        index.close()


async def test_what_was_put_is_read_and_what_was_flushed_survives(
    reopen: Callable[[], LocationIndex],
) -> None:
    index = reopen()
    places = [(1, number, Location(3, 100 * number, 50)) for number in range(250)]
    index.put_locations(places)
    index.put_ledgers([(1, LedgerRecord(True, 4, 249, 248)), (2, LedgerRecord())])
    assert index.get(1, 7) == Location(3, 700, 50)
    assert index.get(1, 250) is None
    assert index.get(2, 7) is None
    assert [number for number, _ in index.get_each(1, range(245, 345))] == [245, 246, 247, 248, 249]
    assert index.get_ledger(1) == LedgerRecord(True, 4, 249, 248)
    assert index.get_ledger(2) == LedgerRecord()
    assert index.get_ledger(3) is None
    await index.flush_locations()
    await index.flush_ledgers()
    index.put_locations([(1, 7, Location(4, 0, 51))])
    assert index.get(1, 7) == Location(4, 0, 51)
    index = reopen()
    location = index.get(1, 7)
    assert location in (Location(3, 700, 50), Location(4, 0, 51))  # a clean close of RocksDB may keep it
    assert index.get(1, 8) == Location(3, 800, 50)
    assert index.get_ledger(1) == LedgerRecord(True, 4, 249, 248)


async def test_lists_deletes_and_replaces(reopen: Callable[[], LocationIndex]) -> None:
    index = reopen()
    index.put_locations(
        [(ledger, number, Location(1, number, 9)) for ledger in (1, 2, 3) for number in (0, 2, 5)]
    )
    index.put_locations(
        [(2**64 - 1, 2**64 - 2, Location(1, 1, 1)), (2**64 - 1, 2**64 - 1, Location(1, 2, 1))]
    )
    index.put_ledgers([(ledger, LedgerRecord(last_entry=5)) for ledger in (1, 2, 3, 2**64 - 1)])
    await index.flush_locations()
    assert index.list_locations(2) == [(number, Location(1, number, 9)) for number in (0, 2, 5)]
    assert index.list_locations(2, after=0, count=1) == [(2, Location(1, 2, 9))]
    assert index.list_locations(2, after=5) == []
    assert len(index.list_locations(2**64 - 1)) == 2
    assert index.list_locations(2**64 - 1, after=2**64 - 1) == []
    assert [row[:2] for row in index.walk((1, 2), 3)] == [(1, 5), (2, 0), (2, 2)]
    assert len(index.walk()) == 11
    assert [ledger for ledger, _ in index.list_ledgers()] == [1, 2, 3, 2**64 - 1]
    assert index.list_ledgers(after=1, count=1) == [(2, LedgerRecord(last_entry=5))]
    assert index.list_ledgers(after=2**64 - 1) == []
    moved = [(1, 0, Location(1, 0, 9), Location(7, 0, 9)), (1, 2, Location(6, 0, 9), Location(7, 50, 9))]
    assert index.replace_locations(moved) == 1
    assert index.replace_locations([]) == 0
    assert index.get(1, 0) == Location(7, 0, 9)
    assert index.get(1, 2) == Location(1, 2, 9)
    for ledger in (2, 2**64 - 1):
        index.delete_locations(ledger)
        index.delete_ledger(ledger)
    assert index.list_locations(2) == index.list_locations(2**64 - 1) == []
    assert index.get(2, 2) is None
    assert index.get_ledger(2) is None
    assert [ledger for ledger, _ in index.list_ledgers()] == [1, 3]
    assert [row[0] for row in index.walk()] == [1, 1, 1, 3, 3, 3]
    index.put_locations([(2, 2, Location(8, 0, 9))])
    assert index.list_locations(2) == [(2, Location(8, 0, 9))]
    await index.flush_locations()
    await index.flush_ledgers()
    index = reopen()
    assert [row[:2] for row in index.walk()] == [(1, 0), (1, 2), (1, 5), (2, 2), (3, 0), (3, 2), (3, 5)]
    assert [ledger for ledger, _ in index.list_ledgers()] == [1, 3]


async def test_the_model_loses_what_was_not_flushed() -> None:
    storage = ModelStorage()
    index = ModelLocationIndex(storage)
    index.put_locations([(1, 0, Location(1, 0, 1))])
    index.put_ledgers([(1, LedgerRecord(True))])
    again = ModelLocationIndex(storage)
    assert again.get(1, 0) is None
    assert again.get_ledger(1) is None
    await index.flush_locations()
    await index.flush_ledgers()
    index.delete_locations(1)
    index.delete_ledger(1)
    assert index.get(1, 0) is None
    assert index.get_ledger(1) is None
    again = ModelLocationIndex(storage)
    assert again.get(1, 0) == Location(1, 0, 1)
    assert again.get_ledger(1) == LedgerRecord(True)
    await index.flush_locations()
    await index.flush_ledgers()
    again = ModelLocationIndex(storage)
    assert again.get(1, 0) is None
    assert again.get_ledger(1) is None


def test_ledger_records() -> None:
    record = LedgerRecord(True, 4, 249, 248, 1_700_000_000_000, True)
    assert decode_ledger_record(encode_ledger_record(record)) == record
    with pytest.raises(StorageFailed, match="damaged"):
        decode_ledger_record(encode_ledger_record(record)[:-1])
    older = LedgerRecord(False, 9, 3, 2)
    assert (
        older.merged(record)
        == record.merged(older)
        == LedgerRecord(True, 9, 249, 248, 1_700_000_000_000, True)
    )


def test_a_second_opening_is_one_clear_error(tmp_path: Path) -> None:
    index = RocksLocationIndex(str(tmp_path / "index"))
    with pytest.raises(DataDirectoryError, match="index"):
        RocksLocationIndex(str(tmp_path / "index"))
    index.close()
    index.close()
    RocksLocationIndex(str(tmp_path / "index")).close()


async def test_rule_39_an_index_that_finds_no_space_says_so_and_can_be_closed(
    tmp_path: Path,
) -> None:
    """RocksDB keeps what it could not flush, and goes on once there is space."""

    class Full:
        def flush(self, _wait: bool) -> None:
            raise Exception("IO error: No space left on device: While appending to file")

        def close(self) -> None:
            self.flush(True)

    index = RocksLocationIndex(str(tmp_path / "index"))
    index.put_locations([(1, 0, Location(1, 64, 10))])
    right = index._locations
    index._locations = Full()
    with pytest.raises(DiskFull):
        await index.flush_locations()
    index._locations = right
    await index.flush_locations()
    right.close()
    index._locations = Full()
    index.close()
    index.close()
