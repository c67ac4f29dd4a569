"""What metadata gives to other bookies is dropped, its fence stays, and a copy that is about to be named is left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from magnetar.bookie import Bookie, open_bookie
from magnetar.bookie.status import bookie_figures
from magnetar.ledger import LedgerMetadata
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.replication.leftovers import StoredAssignments, UnassignedEntries
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import ConnectionLost, EntryNotFound, LedgerFenced, VersionConflict
from magnetar.proto.stripe import EVERY_ENTRY
from support.bookie_kit import add, add_all, entry, model_components, small_settings
from support.gc_kit import Collected
from support.memory_metadata import MemoryMetadataStore

PAYLOAD = bytes(1000)


class Assigned(StoredAssignments):
    """Lets the test do something between the steps."""

    before_confirm: Callable[[], Any] | None = None

    async def confirm(self, found: UnassignedEntries) -> bool:
        if self.before_confirm is not None:
            await self.before_confirm()
        return await super().confirm(found)


class Node:
    """A bookie b1 that collects leftovers, and a store."""

    def __init__(self, directory: Path) -> None:
        self.kit = Collected(directory)
        self.ledgers = StoredLedgers(MemoryMetadataStore())
        self.assignments = Assigned(self.ledgers, "b1")
        self.bookie: Bookie = None  # type: ignore[assignment]

    async def open(self) -> Bookie:
        components = replace(
            model_components(self.kit.storage, self.kit.files),
            assignments=self.assignments,
            clock=self.kit.clock,
        )
        settings = small_settings(
            self.kit.directory, entry_log_bytes=16 * 1024, compaction_bytes_per_s=0, gc_interval_s=0.0
        )
        self.bookie = self.kit.bookie = await open_bookie(settings, components)
        return self.bookie

    async def ledger(self, ledger_id: int, *ensembles: tuple[int, tuple[str, ...]], last: int | None) -> None:
        """Writes a record; closed at `last`, or open."""
        metadata = LedgerMetadata.create(Striping(2, 2, 2), ensembles[0][1], 0, {})
        for first, bookies in ensembles[1:]:
            metadata = metadata.with_ensemble(first, bookies)
        if last is not None:
            metadata = metadata.close(last, 1)
        await self.ledgers.create(ledger_id, metadata.encode())

    async def fill(self, ledger_id: int, numbers: range, *, recovery: bool = False) -> None:
        """Entries in closed logs."""
        entries = [entry(ledger_id, number, PAYLOAD) for number in numbers]
        assert not any(await add_all(self.bookie, entries, recovery=recovery))
        await self.bookie.checkpoint()

    async def roll(self) -> None:
        """Fills logs with another ledger, so that all earlier ones are closed."""
        await self.fill(999, range(40))

    async def there(self, ledger_id: int, numbers: range) -> list[int]:
        """Entries that it answers."""
        found = []
        for number in numbers:
            try:
                await self.bookie.read(
                    ledger_id, number, number, max_bytes=0, fence=False, stripe=EVERY_ENTRY
                )
            except EntryNotFound:
                continue
            found.append(number)
        return found


@pytest.mark.parametrize("record", ["there", "not readable", "deleted"])
async def test_what_was_dropped_is_not_lost_for_the_scrub(tmp_path: Path, record: str) -> None:
    """Found by the simulation: the scrub took it for damage of the index, answered so, and asked for repairs of it.

    Also of a ledger that has no record any more, and no tombstone here before the next round of garbage collection.
    """
    node = Node(tmp_path)
    await node.open()
    await node.ledger(1, (0, ("b1", "b3")), (10, ("b2", "b3")), last=29)
    await node.fill(1, range(30))
    await node.roll()
    leftovers = node.bookie.collector._leftovers
    assert leftovers is not None
    assert await leftovers.drop([1]) == 20
    if record == "deleted":
        await node.ledgers.delete(1)
    elif record == "not readable":

        async def unavailable(ledger_id: int) -> None:
            raise ConnectionLost("the store is away")

        node.ledgers.get = unavailable  # type: ignore[method-assign]
    await node.bookie.scrubber.verify_everything()
    assert node.bookie.damage.ledgers() == {}
    await node.bookie.close()


async def test_rule_08_an_entry_that_is_this_bookies_and_not_in_the_index_is_damage(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.open()
    await node.ledger(1, (0, ("b1", "b3")), (10, ("b2", "b3")), last=29)
    await node.fill(1, range(30))
    await node.roll()
    for number in range(30):
        node.kit.storage.damage(1, number, None)
    await node.bookie.scrubber.verify_everything()
    (lost,) = node.bookie.damage.ledgers()[1]
    assert (lost.first, lost.last) == (0, 9)
    await node.bookie.close()


async def test_entries_of_other_bookies_are_dropped_and_their_space_comes_back(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.open()
    await node.ledger(1, (0, ("b2", "b3")), last=29)
    await node.ledger(2, (0, ("b1", "b3")), (10, ("b2", "b3")), last=29)
    await node.ledger(3, (0, ("b2", "b3")), last=None)
    for ledger in (1, 2, 3):
        await node.fill(ledger, range(30))
    await node.bookie.fencing.fence(1)
    await node.roll()
    before = sum(info.bytes for info in node.bookie.logs.logs())
    await node.bookie.collector.collect()
    assert await node.there(1, range(30)) == []
    assert await node.there(2, range(30)) == list(range(10))
    assert await node.there(3, range(30)) == list(range(30))  # open: its writer's, or its recovery's
    assert bookie_figures(node.bookie)["gc_dropped_leftovers"] == 50
    assert sum(info.bytes for info in node.bookie.logs.logs()) < before - 15_000
    # Rule 7: a stale writer is refused here as long as the ledger exists, also after a restart.
    assert await add(node.bookie, entry(1, 30)) == LedgerFenced.code
    await node.bookie.close()
    await node.open()
    assert await add(node.bookie, entry(1, 30)) == LedgerFenced.code
    assert await node.there(1, range(30)) == []
    await node.bookie.close()


async def test_nothing_is_written_to_metadata_where_there_is_nothing_to_drop(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.open()
    await node.ledger(1, (0, ("b2", "b3")), last=29)
    await node.fill(1, range(30))
    await node.roll()
    for _ in range(3):
        await node.bookie.collector.collect()
    found = await node.ledgers.get(1)
    assert found is not None
    assert found.version == 1
    await node.bookie.close()


@pytest.mark.parametrize("copied", ["before", "between", "after"])
async def test_rule_22_bookkeeper_4668_a_copy_that_becomes_named_is_never_dropped(
    tmp_path: Path, copied: str
) -> None:
    """A repair reads the record, adds 30 entries at b1 again, and names b1, around a pass over leftovers."""
    node = Node(tmp_path)
    await node.open()
    await node.ledger(1, (0, ("b2", "b3")), last=29)
    await node.fill(1, range(30))  # of a repair that was given up
    await node.roll()

    async def repair() -> bool:
        found = await node.ledgers.get(1)
        assert found is not None
        metadata = LedgerMetadata.decode(found.value, 1).with_replaced(0, {0: "b1"})
        await node.fill(1, range(30), recovery=True)
        await node.roll()
        if copied == "between":
            await node.assignments.confirm(
                UnassignedEntries(1, [], (found.value, found.version))
            )  # what the pass does now
        try:
            await node.ledgers.put(1, metadata.encode(), version=found.version)
        except VersionConflict:
            return False
        return True

    if copied == "before":
        # Read, copied, and named between the pass's reading and its confirmation: nothing may be dropped.
        node.assignments.before_confirm = repair
        await node.bookie.collector.collect()
        assert await node.there(1, range(30)) == list(range(30))
        assert bookie_figures(node.bookie)["gc_dropped_leftovers"] == 0
    elif copied == "between":
        # The version was raised while it copied: it must not name b1, and copies again.
        assert not await repair()
    else:
        # A repair that begins after the confirmation adds the same entries again before they are dropped.
        confirm = node.assignments.confirm

        async def confirm_and_repair(found: UnassignedEntries) -> bool:
            done = await confirm(found)
            assert await repair()
            return done

        node.assignments.confirm = confirm_and_repair  # type: ignore[method-assign]
        await node.bookie.collector.collect()
        assert await node.there(1, range(30)) == list(range(30))
    await node.bookie.close()
