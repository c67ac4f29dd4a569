"""Who belongs together: the store's instance, and bookies that are known with one data directory (rule 9)."""

import asyncio
import random

import pytest

from magnetar.metadata.identity import cluster_instance, register_cookie, registered_cookie
from magnetar.metadata.memory import MemoryMetadataStore
from magnetar.metadata.paths import cookie_path
from magnetar.proto.errors import DataDirectoryError


async def test_the_instance_is_made_once() -> None:
    store = MemoryMetadataStore()
    found = await asyncio.gather(*[cluster_instance(store, random.Random(seed)) for seed in range(5)])
    assert len(set(found)) == 1
    assert found[0] != 0
    assert await cluster_instance(store, random.Random(9)) == found[0]
    assert await cluster_instance(MemoryMetadataStore(), random.Random(9)) != found[0]


async def test_rule_09_a_bookie_is_known_with_one_data_directory() -> None:
    store = MemoryMetadataStore()
    assert await registered_cookie(store, "b1") is None
    await asyncio.gather(*[register_cookie(store, "b1", 5) for _ in range(3)])
    assert await registered_cookie(store, "b1") == 5
    with pytest.raises(DataDirectoryError, match="known with another data directory"):
        await register_cookie(store, "b1", 6)
    await register_cookie(store, "b1", 6, replaces=True)
    assert await registered_cookie(store, "b1") == 6
    await register_cookie(store, "b2", 5)
    assert await registered_cookie(store, "b1") == 6


async def test_a_node_that_is_no_cookie_is_named() -> None:
    store = MemoryMetadataStore()
    await store.create(cookie_path("b1"), b"\xc1")
    with pytest.raises(DataDirectoryError, match="/cookies/b1"):
        await registered_cookie(store, "b1")
