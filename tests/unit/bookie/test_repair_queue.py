"""The repair queue in the metadata store: who is asked to heal what."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from magnetar.bookie import open_bookie
from magnetar.bookie.scrub import repair_queue as module
from magnetar.bookie.scrub.damage import Damage
from magnetar.bookie.scrub.repair_queue import MetadataRepairQueue
from magnetar.metadata.damage import damaged_path, decode_ranges
from magnetar.proto.errors import EntryDamaged, StorageFailed
from support.bookie_kit import add_all, entry, model_components, small_settings, until
from support.index_model import ModelStorage
from support.memory_metadata import MemoryMetadataStore


async def test_damage_becomes_a_node_that_widens_and_goes() -> None:
    store = MemoryMetadataStore()
    queue = MetadataRepairQueue(store)
    damage = Damage(queue)
    damage.report(7, 3, where="log", reason="bits")  # before it is started: during a replay
    assert queue.pending == 1
    queue.start("bookie-1")
    await until(lambda: not queue.pending)
    damage.report(7, 4, where="log", reason="bits")
    damage.report(7, 9, where="log", reason="bits")
    damage.report(8, 0, where="log", reason="bits")
    await until(lambda: not queue.pending)
    await asyncio.sleep(0)
    assert await store.children("/damaged/bookie-1") == [f"{7:020d}", f"{8:020d}"]
    node = await store.get(damaged_path("bookie-1", 7))
    assert node is not None
    assert decode_ranges(node.value) == [(3, 4, "bits"), (9, 9, "bits")]
    damage.repaired(7, 0, 100)
    await until(lambda: not queue.pending)
    await asyncio.sleep(0)
    assert await store.children("/damaged/bookie-1") == [f"{8:020d}"]
    await queue.close()
    await queue.close()


async def test_a_store_that_fails_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.001)
    store = MemoryMetadataStore()
    failures = 2
    real = store.create

    async def create(*arguments: Any, **named: Any) -> int:
        nonlocal failures
        if failures:
            failures -= 1
            raise StorageFailed("no")
        return await real(*arguments, **named)

    monkeypatch.setattr(store, "create", create)
    queue = MetadataRepairQueue(store)
    queue.start("b")
    queue.damaged(1, 5, 6, "bits")
    await until(lambda: failures < 2)
    queue.damaged(1, 7, 7, "more")
    while (node := await store.get(damaged_path("b", 1))) is None or decode_ranges(node.value)[0][1] < 7:
        await asyncio.sleep(0.001)
    assert decode_ranges(node.value) == [(5, 7, "bits")]
    await queue.close()


async def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PENDING", 2)
    queue = MetadataRepairQueue(MemoryMetadataStore())
    for ledger_id in range(5):
        queue.damaged(ledger_id, 0, 0, "bits")
        queue.resolved(ledger_id + 100)
    assert (queue.pending, queue.not_queued) == (2, 4)


async def test_a_damaged_entry_of_a_bookie_comes_into_the_queue(tmp_path: Path) -> None:
    store = MemoryMetadataStore()
    queue = MetadataRepairQueue(store)
    storage = ModelStorage()
    components = replace(model_components(storage), repair_queue=queue)
    bookie = await open_bookie(small_settings(str(tmp_path)), components)
    queue.start(bookie.cookie.bookie_id)
    assert set(await add_all(bookie, [entry(6, number) for number in range(4)])) == {0}
    await bookie.close()
    place = storage.locations[6, 2]
    (path,) = (tmp_path / "ledgers").glob("entrylog-*.log")
    data = bytearray(path.read_bytes())
    data[place.offset + 50] ^= 1
    path.write_bytes(data)
    components = replace(model_components(storage), repair_queue=queue)
    bookie = await open_bookie(small_settings(str(tmp_path)), components)
    with pytest.raises(EntryDamaged):
        await bookie.read(6, 2, 2)
    while (node := await store.get(damaged_path(bookie.cookie.bookie_id, 6))) is None:
        await asyncio.sleep(0)
    assert decode_ranges(node.value)[0][:2] == (2, 2)
    await bookie.delete_ledger(6)
    while await store.get(damaged_path(bookie.cookie.bookie_id, 6)) is not None:
        await asyncio.sleep(0)
    await bookie.close()
    await queue.close()


@pytest.mark.parametrize(
    "value", [b"\xc1", b"\x82\xa6format\x63\xa6ranges\x90"], ids=["damaged", "newer format"]
)
async def test_rule_48_a_node_that_cannot_be_read_costs_its_ledger_and_is_not_tried_for_ever(
    value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryMetadataStore()
    path = damaged_path("b", 1)
    await store.create(path, value)
    queue = MetadataRepairQueue(store)
    queue.start("b")
    for ledger_id in (1, 2, 3):
        queue.damaged(ledger_id, 5, 6, "bits")
    await until(lambda: not queue.pending)
    assert queue.not_queued == 1
    assert path in caplog.text
    for ledger_id in (2, 3):
        node = await store.get(damaged_path("b", ledger_id))
        assert node is not None
        assert decode_ranges(node.value) == [(5, 6, "bits")]
    assert (await store.get(path)) == (value, 0)
    await queue.close()
