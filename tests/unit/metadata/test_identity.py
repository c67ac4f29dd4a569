"""Who belongs together: the store's instance, and bookies that are known with one data directory (rules 9, 35, 36)."""

import asyncio
import random

import pytest

from magnetar.metadata.identity import (
    cluster_instance,
    register_cookie,
    registered_cookie,
)
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.metadata.paths import cookie_path
from magnetar.proto.bookie_identity import NOT_KNOWN, BookieIdentity
from magnetar.proto.errors import DataDirectoryError, WrongBookie
from support.memory_metadata import MemoryMetadataStore


async def test_the_instance_is_made_once() -> None:
    store = MemoryMetadataStore()
    found = await asyncio.gather(*[cluster_instance(store, random.Random(seed)) for seed in range(5)])
    assert len(set(found)) == 1
    assert found[0] != 0
    assert await cluster_instance(store, random.Random(9)) == found[0]
    assert await cluster_instance(MemoryMetadataStore(), random.Random(9)) != found[0]


def start(number: int, *, instance: int = 5) -> BookieIdentity:
    return BookieIdentity(bookie_id="b", instance=instance, start=number, incarnation=100 + number)


async def test_rule_35_a_bookie_is_registered_only_in_the_place_of_the_one_that_was_expected() -> None:
    store = MemoryMetadataStore()
    assert await registered_cookie(store, "b1") == (NOT_KNOWN, None)
    outcomes = await asyncio.gather(*[register_cookie(store, "b1", NOT_KNOWN, start(1)) for _ in range(3)])
    assert True in outcomes
    assert (await registered_cookie(store, "b1")).identity == start(1)
    assert not await register_cookie(store, "b1", NOT_KNOWN, start(2))
    assert (await registered_cookie(store, "b1")).identity == start(1)
    assert await register_cookie(store, "b1", start(1), start(2))
    assert not await register_cookie(store, "b1", start(1), start(3))
    assert (await registered_cookie(store, "b1")).identity == start(2)


async def test_rule_35_one_data_directory_has_one_name() -> None:
    store = MemoryMetadataStore()
    assert await register_cookie(store, "b1", NOT_KNOWN, start(1))
    with pytest.raises(WrongBookie, match="b1=host:port"):
        await register_cookie(store, "b2", NOT_KNOWN, start(1))
    assert await register_cookie(store, "b2", NOT_KNOWN, start(1, instance=6))


async def test_rule_36_asking_for_the_next_ledger_id_draws_none() -> None:
    store = MemoryMetadataStore()
    assert [await StoredLedgers(store).next_id() for _ in range(2)] == [0, 0]
    assert await StoredLedgers(store).new_ids(3) == 0
    assert await StoredLedgers(store).next_id() == 3


async def test_a_node_that_is_no_cookie_is_named() -> None:
    store = MemoryMetadataStore()
    await store.create(cookie_path("b1"), b"\xc1")
    with pytest.raises(DataDirectoryError, match="/cookies/b1"):
        await registered_cookie(store, "b1")
