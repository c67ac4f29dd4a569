"""LedgerManager: ids, records, pages."""

import asyncio

import pytest

from magnetar.metadata.ledgers import LEDGERS_PATH, StoredLedgers, ledger_of_path, ledger_path
from magnetar.proto.errors import AlreadyExists, FinalError, NotFoundInStore, VersionConflict
from support.memory_metadata import MemoryMetadataStore


async def test_records_are_versioned() -> None:
    ledgers = StoredLedgers(MemoryMetadataStore())
    version = await ledgers.create(7, b"open")
    with pytest.raises(AlreadyExists):
        await ledgers.create(7, b"again")
    assert await ledgers.put(7, b"closed", version=version) > version
    with pytest.raises(VersionConflict):
        await ledgers.put(7, b"open", version=version)
    found = await ledgers.get(7)
    assert found is not None
    assert found.value == b"closed"
    await ledgers.delete(7)
    assert await ledgers.get(7) is None
    with pytest.raises(NotFoundInStore):
        await ledgers.delete(7)


async def test_rule_36_ids_rise_over_all_users_of_a_store() -> None:
    store = MemoryMetadataStore()
    first, second = StoredLedgers(store), StoredLedgers(store)
    assert [await first.new_ids(), await second.new_ids(3), await first.new_ids()] == [0, 1, 4]


async def test_pages_list_all_ledgers_in_order() -> None:
    ledgers = StoredLedgers(MemoryMetadataStore())
    assert not await ledgers.any()
    wanted = [0, 1, 999, 1_000, 1_001, 99_999_999, 2**63 - 1]
    for ledger_id in reversed(wanted):
        await ledgers.create(ledger_id, b"")
    assert await ledgers.any()
    assert [page async for page in ledgers.pages()] == [
        [0, 1, 999],
        [1_000, 1_001],
        [99_999_999],
        [2**63 - 1],
    ]
    assert await ledgers.page_starts() == [0, 1_000, 99_999_000, (2**63 - 1) // 1_000 * 1_000]
    assert await ledgers.page(1_000) == [1_000, 1_001]
    assert await ledgers.page(2_000) == []


async def test_a_name_of_a_later_release_is_an_error_and_no_ledger() -> None:
    store = MemoryMetadataStore()
    ledgers = StoredLedgers(store)
    await ledgers.create(1, b"")
    await store.create(f"{LEDGERS_PATH}/0000000000000000/x", b"")
    with pytest.raises(FinalError, match="later release"):
        await ledgers.page(0)
    await store.create(f"{LEDGERS_PATH}/by-date/1", b"")
    with pytest.raises(FinalError, match="upgrade"):
        await ledgers.page_starts()


async def test_a_watch_of_a_ledger_sees_its_changes_only() -> None:
    ledgers = StoredLedgers(MemoryMetadataStore())
    calls: list[int] = []
    watch = ledgers.watch(1, lambda: calls.append(1))
    await ledgers.create(2, b"")
    await asyncio.sleep(0)
    assert not calls
    await ledgers.create(1, b"")
    await asyncio.sleep(0)
    assert calls
    watch.close()


def test_paths_of_ledgers() -> None:
    for ledger_id in (0, 9_999, 10_000, 2**63):
        assert ledger_of_path(ledger_path(ledger_id)) == ledger_id
    page = "0" * 16
    for name in ("", "1", "-001", "00011", "\u0661\u0661\u0661\u0661"):
        assert ledger_of_path(f"/ledgers/{page}/{name}") is None
    for other in ("/", "/ledgers", f"/ledgers/{page}", f"/topics/{page}/0001"):
        assert ledger_of_path(other) is None
