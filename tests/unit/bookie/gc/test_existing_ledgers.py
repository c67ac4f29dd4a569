"""What counts as "this ledger was deleted"."""

import asyncio
import random

import pytest

from magnetar.bookie.gc.existing_ledgers import MetadataLedgers
from magnetar.metadata.identity import cluster_instance
from magnetar.metadata.ledgers import LEDGERS_PATH, ledger_path
from magnetar.proto.errors import DataDirectoryError, FinalError, RequestTimeout, StorageFailed
from support.memory_metadata import MemoryMetadataStore


async def store_with(*ledger_ids: int) -> MemoryMetadataStore:
    store = MemoryMetadataStore()
    for ledger_id in ledger_ids:
        await store.create(ledger_path(ledger_id), b"metadata")
    return store


async def test_ledgers_that_metadata_does_not_list_are_missing_in_the_order_asked() -> None:
    ledgers = MetadataLedgers(await store_with(1, 3, 7))
    assert await ledgers.missing([9, 1, 2, 3, 0]) == [9, 2, 0]
    assert await ledgers.missing([]) == []


async def test_a_ledger_that_a_listing_left_out_is_looked_for_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = await store_with(1, 2)

    async def page(start: int) -> list[int]:
        return [1]

    ledgers = MetadataLedgers(store)
    monkeypatch.setattr(ledgers._ledgers, "page", page)
    assert await ledgers.missing([1, 2, 3]) == [3]


async def test_rule_10_an_error_of_the_store_is_not_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await store_with(1)

    async def children(path: str, **_: object) -> list[str]:
        raise StorageFailed("the metadata cannot be read")

    monkeypatch.setattr(store, "children", children)
    with pytest.raises(StorageFailed):
        await MetadataLedgers(store).missing([1])


async def test_rule_10_a_timeout_is_not_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await store_with(1)

    async def children(path: str, **_: object) -> list[str]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(store, "children", children)
    with pytest.raises(RequestTimeout):
        await MetadataLedgers(store, timeout_s=0.01).missing([1])


async def test_the_store_of_another_cluster_is_not_an_answer() -> None:
    store = await store_with(1)
    cluster = await cluster_instance(store, random.Random(1))
    assert await MetadataLedgers(store, cluster=cluster).missing([1, 2]) == [2]
    with pytest.raises(DataDirectoryError, match="another cluster"):
        await MetadataLedgers(store, cluster=cluster + 1).missing([1, 2])
    with pytest.raises(DataDirectoryError):  # emptied
        await MetadataLedgers(MemoryMetadataStore(), cluster=cluster).missing([1, 2])


async def test_a_name_that_this_release_does_not_know_stops_deleting() -> None:
    store = await store_with(1)
    await store.create(f"{LEDGERS_PATH}/00/0002", b"from a later release")
    with pytest.raises(FinalError, match="upgrade"):
        await MetadataLedgers(store).missing([1, 2])


async def test_pages_of_ledgers_that_are_far_apart() -> None:
    asked = [0, 9_999, 10_000, 123_456_789, 2**62]
    ledgers = MetadataLedgers(await store_with(9_999, 123_456_789))
    assert await ledgers.missing(asked) == [0, 10_000, 2**62]
