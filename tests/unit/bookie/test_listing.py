"""Lists of ledgers and of a ledger's entries, from index and memory together, page by page."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnetar.bookie import Bookie
from magnetar.bookie.listing import LedgerSummary
from magnetar.proto.errors import LedgerNotFound
from support.bookie_kit import add, add_all, entry, open_inline
from support.index_model import ModelStorage


@pytest.fixture
async def bookie(tmp_path: Path) -> AsyncIterator[Bookie]:
    bookie = await open_inline(str(tmp_path), ModelStorage())
    yield bookie
    await bookie.close()


async def test_ledgers_of_index_and_memory_by_id_and_page_by_page(bookie: Bookie) -> None:
    for ledger_id in (5, 1, 9):
        await add_all(bookie, [entry(ledger_id, number) for number in range(3)])
    await bookie.checkpoint()
    for ledger_id in (3, 7, 9):
        await add_all(bookie, [entry(ledger_id, number) for number in range(3, 5)])
    await bookie.fence(4)
    await bookie.write_last_confirmed(1, 2)
    ledgers, more = bookie.list_ledgers()
    assert not more
    assert ledgers == [
        (1, False, False, 2, 2),
        (3, False, False, 4, 3),
        (4, True, False, -1, -1),
        (5, False, False, 2, 1),
        (7, False, False, 4, 3),
        (9, False, False, 4, 3),
    ]
    found, after, more = [], -1, True
    while more:
        page, more = bookie.list_ledgers(after, 2)
        assert 1 <= len(page) <= 2
        found += page
        after = page[-1].ledger_id
    assert found == ledgers
    await bookie.delete_ledger(5)
    assert bookie.list_ledgers(4, 1)[0][0].deleted
    assert bookie.list_ledgers(9) == ([], False)


async def test_a_new_ledger_between_those_of_a_page_is_not_skipped(bookie: Bookie) -> None:
    for ledger_id in range(0, 20, 2):
        await add(bookie, entry(ledger_id, 0))
    await bookie.checkpoint()
    await add(bookie, entry(5, 0))
    await add(bookie, entry(99, 0))
    page, more = bookie.list_ledgers(-1, 4)
    assert ([ledger.ledger_id for ledger in page], more) == ([0, 2, 4, 5], True)
    page, more = bookie.list_ledgers(15, 4)
    assert ([ledger.ledger_id for ledger in page], more) == ([16, 18, 99], False)


async def test_entries_as_ranges_from_entry_logs_and_write_cache(bookie: Bookie) -> None:
    stored = [*range(10), *range(20, 25), 30]
    await add_all(bookie, [entry(1, number) for number in stored])
    await bookie.checkpoint()
    await add_all(bookie, [entry(1, number) for number in (10, 11, 26, 40)])
    ranges = [(0, 11), (20, 24), (26, 26), (30, 30), (40, 40)]
    assert await bookie.list_entries(1) == (ranges, -1)
    assert await bookie.list_entries(1, 5) == ([(5, 11), *ranges[1:]], -1)
    assert await bookie.list_entries(1, 0, 2) == (ranges[:2], 26)
    assert await bookie.list_entries(1, 26, 2) == (ranges[2:4], 40)
    assert await bookie.list_entries(1, 41) == ([], -1)


async def test_a_long_list_of_entries_is_cut_in_slices_and_goes_on(
    bookie: Bookie, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.bookie.listing._SLICE", 7)
    monkeypatch.setattr("magnetar.bookie.listing._MAX_SCANNED", 20)
    numbers = [number for number in range(100) if number % 10 != 9]
    await add_all(bookie, [entry(1, number) for number in numbers])
    await bookie.checkpoint()
    found: list[int] = []
    first = 0
    while first >= 0:
        ranges, first = await bookie.list_entries(1, first, 3)
        found += [number for begin, end in ranges for number in range(begin, end + 1)]
    assert found == numbers


async def test_ledgers_that_are_not_here_have_no_entries_to_list(bookie: Bookie) -> None:
    with pytest.raises(LedgerNotFound):
        await bookie.list_entries(1)
    await add(bookie, entry(1, 0))
    await bookie.delete_ledger(1)
    with pytest.raises(LedgerNotFound):
        await bookie.list_entries(1)


async def summaries(bookie: Bookie) -> dict[int, LedgerSummary]:
    found: dict[int, LedgerSummary] = {}
    unsaved = sorted(bookie.ledgers.unsaved())
    ledger_id = bookie.listing.next_ledger(-1, unsaved)
    while ledger_id is not None:
        found[ledger_id] = await bookie.listing.summary(ledger_id)
        ledger_id = bookie.listing.next_ledger(ledger_id, unsaved)
    return found


async def test_every_ledger_is_summed_up_with_all_that_is_known(bookie: Bookie) -> None:
    await add_all(bookie, [entry(1, number) for number in range(5)])
    await add_all(bookie, [entry(2, number) for number in (0, 1, 4)])
    await add(bookie, entry(7, 0))
    await bookie.fence(3)
    await bookie.write_last_confirmed(4, 17)
    await bookie.checkpoint()
    await bookie.delete_ledger(7)
    bookie.index.delete_ledger(2)  # its record was lost
    bookie.ledgers.by_id.pop(2)
    await add_all(bookie, [entry(1, number) for number in range(5, 8)])
    await add(bookie, entry(9, 6))
    found = await summaries(bookie)
    assert {ledger_id: row.state for ledger_id, row in found.items()} == {
        1: "open",
        2: "unknown",
        3: "fenced",
        4: "open",
        7: "deleted",
        9: "open",
    }
    assert list(found) == sorted(found)
    size = len(entry(1, 0))
    assert (found[1].entries, found[1].bytes, found[1].ranges) == (5, 5 * size, [(0, 7)])
    assert (found[1].journaled_entries, found[1].journaled_bytes) == (3, 3 * size)
    assert (found[2].entries, found[2].ranges) == (3, [(0, 1), (4, 4)])
    assert (found[4].explicit_lac, found[4].ranges) == (17, [])
    assert (found[9].entries, found[9].last_entry, found[9].logs) == (0, 6, [])
    assert found[7].deleted_at_ms
    with pytest.raises(LedgerNotFound):
        await bookie.listing.summary(99)
