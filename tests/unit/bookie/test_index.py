"""The location index: RocksDB and the model behave alike, in a crash as well."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from magnetar.bookie.index import (
    LedgerRecord,
    Location,
    LocationIndex,
    ModelLocationIndex,
    ModelStorage,
    RocksLocationIndex,
)
from magnetar.proto.errors import DataDirectoryError


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
    assert [number for number, _ in index.get_range(1, 245, 100)] == [245, 246, 247, 248, 249]
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


async def test_the_model_loses_what_was_not_flushed() -> None:
    storage = ModelStorage()
    index = ModelLocationIndex(storage)
    index.put_locations([(1, 0, Location(1, 0, 1))])
    index.put_ledgers([(1, LedgerRecord(True))])
    again = ModelLocationIndex(storage)
    assert again.get(1, 0) is None
    assert again.get_ledger(1) is None


def test_a_second_opening_is_one_clear_error(tmp_path: Path) -> None:
    index = RocksLocationIndex(str(tmp_path / "index"))
    with pytest.raises(DataDirectoryError, match="index"):
        RocksLocationIndex(str(tmp_path / "index"))
    index.close()
    index.close()
    RocksLocationIndex(str(tmp_path / "index")).close()
