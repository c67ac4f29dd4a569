"""The repair queue's nodes: their codec, and that nobody who adds to one loses what somebody else added."""

from __future__ import annotations

import asyncio
import random

import pytest

from magnetar.metadata import damage as module
from magnetar.metadata.damage import add_ranges, damaged_path, decode_ranges, encode_ranges, merge_ranges
from magnetar.metadata.store import Versioned
from magnetar.proto.errors import DataDirectoryError, VersionConflict
from support.memory_metadata import MemoryMetadataStore


def test_ranges_are_merged_and_bounded() -> None:
    assert merge_ranges([(5, 6, "a"), (1, 2, "b"), (3, 3, "c"), (6, 9, "d")]) == [(1, 3, "b"), (5, 9, "a")]
    many = [(number * 2, number * 2, "bits") for number in range(1000)]
    assert merge_ranges(many) == [(0, 1998, "many ranges")]
    assert decode_ranges(encode_ranges([(1, 2, "x")])) == [(1, 2, "x")]
    with pytest.raises(DataDirectoryError, match="format"):
        decode_ranges(encode_ranges([]).replace(b"\xa6format\x01", b"\xa6format\x02"))


@pytest.mark.parametrize("value", [b"", b"\xc1", b"\x01", b"\x80", encode_ranges([(1, 2, "x")])[:-1]])
def test_a_node_that_is_none_ends_no_task(value: bytes) -> None:
    with pytest.raises(DataDirectoryError, match="delete it"):
        decode_ranges(value)


async def stored(metadata: MemoryMetadataStore, bookie: str, ledger_id: int) -> module.Ranges:
    node = await metadata.get(damaged_path(bookie, ledger_id))
    assert node is not None
    return decode_ranges(node.value)


async def test_a_node_widens_and_is_not_written_for_nothing() -> None:
    metadata = MemoryMetadataStore()
    assert await add_ranges(metadata, "b", 7, [(5, 6, "bits"), (1, 1, "gone")])
    assert await add_ranges(metadata, "b", 7, [(7, 9, "gone")])
    assert await stored(metadata, "b", 7) == [(1, 1, "gone"), (5, 9, "bits")]
    node = await metadata.get(damaged_path("b", 7))
    assert not await add_ranges(metadata, "b", 7, [(6, 8, "other"), (1, 1, "other")])
    assert await metadata.get(damaged_path("b", 7)) == node


async def test_all_who_add_at_once_find_their_ranges_there() -> None:
    rng = random.Random(1)

    class Slow(MemoryMetadataStore):
        async def get(self, path: str) -> Versioned | None:
            await turns()
            return await super().get(path)

        async def put(self, path: str, value: bytes, *, version: int) -> int:
            await turns()
            return await super().put(path, value, version=version)

    async def turns() -> None:
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)

    metadata = Slow()
    numbers = range(0, 40, 2)
    await asyncio.gather(*[add_ranges(metadata, "b", 7, [(n, n, "bits")]) for n in numbers])
    assert await stored(metadata, "b", 7) == [(n, n, "bits") for n in numbers]


async def test_conflicts_do_not_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = MemoryMetadataStore()
    await add_ranges(metadata, "b", 7, [(1, 1, "bits")])

    async def put(*_arguments: object, **_named: object) -> int:
        raise VersionConflict("again")

    monkeypatch.setattr(metadata, "put", put)
    with pytest.raises(VersionConflict, match="by others"):
        await add_ranges(metadata, "b", 7, [(5, 5, "bits")])


async def test_rule_48_a_node_that_cannot_be_read_is_named_with_its_path() -> None:
    metadata = MemoryMetadataStore()
    await metadata.create(damaged_path("b", 7), b"\xc1")
    with pytest.raises(DataDirectoryError, match=f"{damaged_path('b', 7)} is damaged"):
        await add_ranges(metadata, "b", 7, [(1, 1, "bits")])
