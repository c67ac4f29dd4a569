"""A bookie that lost something denies nothing until it has all that the records give it, and denies again from then on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from magnetar.bookie import Bookie, open_bookie
from magnetar.bookie.index import ALL_LEDGERS
from magnetar.ledger import LedgerMetadata
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.replication.leftovers import AssignedEntries, StoredAssignments
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import (
    EntryNotFound,
    LedgerFenced,
    LedgerNotFound,
    MagnetarError,
    StorageFailed,
    UnknownLedgerState,
)
from support.bookie_kit import add, add_all, entry, model_components, small_settings
from support.gc_kit import Collected
from support.memory_metadata import MemoryMetadataStore

BELOW = 10
STRIPING = Striping(3, 2, 2)


class Assigned(StoredAssignments):
    error: MagnetarError | None = None

    async def assigned_below(self, ledger_id: int) -> AsyncIterator[AssignedEntries]:
        async for found in super().assigned_below(ledger_id):
            yield found
            if self.error is not None:
                raise self.error


class Node:
    """Bookie b1, which may have lost entries of ledgers below 10, and the records."""

    def __init__(self, directory: Path) -> None:
        self.kit = Collected(directory)
        self.store = MemoryMetadataStore()
        self.ledgers = StoredLedgers(self.store)
        self.assignments = Assigned(self.ledgers, "b1")

    async def open(self) -> Bookie:
        components = replace(model_components(self.kit.storage, self.kit.files), assignments=self.assignments)
        settings = small_settings(self.kit.directory, gc_interval_s=0.0)
        bookie = self.kit.bookie = await open_bookie(settings, components)
        return bookie

    async def lost(self, below: int = BELOW) -> Bookie:
        """Opened with an index that says so."""
        bookie = await self.open()
        bookie.ledgers._index.set_incomplete(below)
        await bookie.close()
        return await self.open()

    async def record(self, ledger_id: int, last: int | None, *bookies: str) -> None:
        """Closed at `last`, or open."""
        metadata = LedgerMetadata.create(STRIPING, bookies or ("b1", "b2", "b3"), 0, {})
        value = (metadata if last is None else metadata.close(last, max(last, 0))).encode()
        node = await self.ledgers.get(ledger_id)
        if node is None:
            await self.ledgers.create(ledger_id, value)
        else:
            await self.ledgers.put(ledger_id, value, version=node.version)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path / "b1")
    yield node
    await node.kit.close()


def own(last: int) -> list[int]:
    """Entries of position 0 up to `last`."""
    return [entry_id for entry_id in range(last + 1) if 0 in STRIPING.write_set(entry_id)]


async def again(bookie: Bookie, ledger_id: int, entries: list[int]) -> None:
    """A repair writes them."""
    assert set(await add_all(bookie, [entry(ledger_id, n) for n in entries], recovery=True)) <= {0}


async def test_rule_9_what_is_complete_is_denied_again_and_all_else_is_not(node: Node) -> None:
    bookie = await node.lost()
    await node.record(1, 9)
    await node.record(2, 9)
    await node.record(3, None)
    await node.record(4, 9, "b4", "b5", "b6")
    await again(bookie, 1, own(9))
    await again(bookie, 2, [n for n in own(9) if n != 3])
    await bookie.checkpoint()
    for ledger_id in (1, 2, 3, 4, 5):
        with pytest.raises(UnknownLedgerState):
            await bookie.read(ledger_id, 20, 20)
    await bookie.collector.collect()
    for turn in range(2):
        with pytest.raises(EntryNotFound):
            await bookie.read(1, 20, 20)
        for ledger_id, entry_id in ((2, 3), (3, 0)):
            with pytest.raises(UnknownLedgerState):
                await bookie.read(ledger_id, entry_id, entry_id)
        for ledger_id in (4, 5):
            with pytest.raises((LedgerNotFound, EntryNotFound)):
                await bookie.read(ledger_id, 0, 0)
        assert await add(bookie, entry(3, 0)) == LedgerFenced.code, "its writer may have been shut out here"
        if not turn:
            await bookie.close()
            bookie = await node.open()
    await again(bookie, 2, [3])
    await again(bookie, 3, own(2))
    await node.record(3, 2)
    await bookie.checkpoint()
    await bookie.collector.collect()
    for ledger_id in (2, 3):
        with pytest.raises(EntryNotFound):
            await bookie.read(ledger_id, 20, 20)


async def test_without_all_records_nothing_is_believed(node: Node) -> None:
    bookie = await node.lost()
    await node.record(1, -1)
    await node.record(2, -1)
    node.assignments.error = StorageFailed("no luck")
    await bookie.collector.collect()
    with pytest.raises(UnknownLedgerState):
        await bookie.read(1, 0, 0)
    node.assignments.error = None
    await bookie.collector.collect()
    with pytest.raises((LedgerNotFound, EntryNotFound)):
        await bookie.read(1, 0, 0)


async def test_a_damaged_record_may_be_of_an_open_ledger(node: Node) -> None:
    bookie = await node.lost()
    await node.ledgers.create(1, b"b1 is in here, and nothing that can be read")
    await bookie.collector.collect()
    with pytest.raises(UnknownLedgerState):
        await bookie.read(1, 0, 0)


async def test_a_known_damaged_entry_is_missing(node: Node) -> None:
    bookie = await node.lost()
    await node.record(1, 1)
    await again(bookie, 1, own(1))
    await bookie.checkpoint()
    bookie.damage.report(1, 0, where="here", reason="a test says so")
    await bookie.collector.collect()
    with pytest.raises(UnknownLedgerState):
        await bookie.read(1, 20, 20)


async def test_before_a_client_has_said_which_ids_are_new_nothing_is_looked_at(node: Node) -> None:
    bookie = await node.lost(ALL_LEDGERS)
    await node.record(1, -1)
    await bookie.collector.collect()
    with pytest.raises(UnknownLedgerState):
        await bookie.read(1, 0, 0)


async def test_a_crash_before_the_marks_are_durable_loses_no_watermark(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = await node.lost()
    await node.record(3, None)

    async def fails() -> None:
        raise StorageFailed("the power is gone")

    assert bookie.collector._unknown is not None
    monkeypatch.setattr(bookie.collector._unknown, "_checkpoint", fails)
    await bookie.collector.collect()
    assert bookie.ledgers.incomplete_below == BELOW
    assert bookie.ledgers._index.incomplete_below() == BELOW
