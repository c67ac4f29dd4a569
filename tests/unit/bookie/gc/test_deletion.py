"""Deleted ledgers stay deleted: tombstones (rule 7)."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.bookie import Bookie
from magnetar.proto.errors import LedgerFenced, LedgerNotFound, ServiceNotReady, StorageFailed
from support.bookie_kit import add, add_all, entry, until
from support.gc_kit import DAY_MS, Collected, data


@pytest.fixture
async def gc(tmp_path: Path) -> AsyncIterator[Collected]:
    collected = Collected(tmp_path / "bookie")
    yield collected
    await collected.close()


async def refuses(bookie: Bookie, ledger_id: int) -> None:
    assert await add(bookie, entry(ledger_id, 90)) == LedgerFenced.code
    assert await add(bookie, entry(ledger_id, 91), recovery=True) == LedgerFenced.code
    with pytest.raises(LedgerFenced):
        await bookie.write_last_confirmed(ledger_id, 5)
    with pytest.raises(LedgerNotFound):
        await bookie.read(ledger_id, 0, 0)
    with pytest.raises(LedgerNotFound):
        await bookie.read_last_confirmed(ledger_id)
    assert [ledger.deleted for ledger in bookie.list_ledgers()[0] if ledger.ledger_id == ledger_id] == [True]


async def test_rule_07_adds_to_a_deleted_ledger_are_refused_recovery_included(gc: Collected) -> None:
    bookie = await gc.open()
    await add_all(bookie, [entry(1, 0), entry(2, 0)])
    await bookie.fence(1)
    await bookie.delete_ledger(1)
    await refuses(bookie, 1)
    assert (await bookie.read(2, 0, 0))[0] == [entry(2, 0)]
    assert bookie.cache.active.entries == 1


async def test_rule_07_a_deletion_that_was_answered_survives_a_crash(gc: Collected) -> None:
    bookie = await gc.open()
    await add_all(bookie, [entry(1, 0), entry(1, 1)])
    await bookie.delete_ledger(1)
    # Nothing was flushed: the journal has the adds, and then the tombstone.
    bookie = await gc.crash_and_open()
    assert bookie.replayed_records == 3
    await refuses(bookie, 1)
    bookie = await gc.crash_and_open()  # now the index has it
    assert bookie.replayed_records == 0
    await refuses(bookie, 1)


async def test_rule_07_journals_that_hold_adds_of_a_deleted_ledger_are_replayed_without_them(
    gc: Collected,
) -> None:
    gc.existing = None
    bookie = await gc.open()
    await add_all(bookie, [entry(1, 0), entry(2, 0)])
    await bookie.delete_ledger(1)
    # A flush that moves no mark: index and journal both know of the ledger.
    await bookie.checkpointer.run(None)
    bookie = await gc.crash_and_open()
    await refuses(bookie, 1)
    assert bookie.cache.get(1, 0) is None
    await bookie.collector.collect()
    assert gc.storage.locations.keys() == {(2, 0)}


async def test_rule_07_a_ledger_that_was_never_seen_here_can_be_deleted(gc: Collected) -> None:
    bookie = await gc.open()
    await bookie.delete_ledger(77)
    await refuses(bookie, 77)
    await refuses(await gc.crash_and_open(), 77)


async def test_defect_4462_a_stale_writer_does_not_bring_a_deleted_ledger_back(gc: Collected) -> None:
    bookie = await gc.open()
    await gc.write([1, 2], range(3))
    await bookie.fence(1)
    assert gc.existing is not None
    del gc.existing.ledgers[1]
    await bookie.collector.collect()
    await refuses(bookie, 1)
    await refuses(await gc.reopen(), 1)
    await refuses(await gc.crash_and_open(), 1)
    await gc.check(2, range(3))


async def test_concurrent_deletions_share_one_record_and_survive_a_cancelled_one(gc: Collected) -> None:
    bookie = await gc.open()
    await add(bookie, entry(1, 0))
    first = asyncio.create_task(bookie.delete_ledger(1))
    second = asyncio.create_task(bookie.delete_ledger(1))
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert bookie.fencing.deleted == 1
    await bookie.delete_ledger(1)
    assert bookie.fencing.deleted == 1
    bookie = await gc.crash_and_open()
    await refuses(bookie, 1)


async def test_rule_06_a_fence_during_a_deletion_is_answered_once_the_tombstone_is_durable(
    gc: Collected,
) -> None:
    bookie = await gc.open()
    await add(bookie, entry(1, 0))
    deleting = asyncio.create_task(bookie.delete_ledger(1))
    await asyncio.sleep(0)
    with pytest.raises(LedgerNotFound):
        await bookie.read(1, 0, 0, fence=True)
    deleting.cancel()
    bookie = await gc.crash_and_open()
    await refuses(bookie, 1)


async def test_a_long_poll_learns_that_its_ledger_was_deleted(gc: Collected) -> None:
    bookie = await gc.open()
    await add(bookie, entry(1, 0))
    poll = asyncio.create_task(bookie.wait_last_confirmed(1, 5, timeout_s=30))
    await until(lambda: len(bookie.waiters) == 1)
    await bookie.delete_ledger(1)
    with pytest.raises(LedgerNotFound):
        await poll


async def test_a_deletion_makes_room_for_adds_that_wait(gc: Collected) -> None:
    bookie = await gc.open(write_cache_bytes=128 * 1024, checkpoint_interval_s=1000.0)
    async with bookie.checkpointer.exclusive():  # nothing is flushed: only the deletion makes room
        filling = asyncio.create_task(add_all(bookie, [data(1, number, 10_000) for number in range(12)]))
        await until(lambda: not bookie.accepting)
        await bookie.delete_ledger(1)
        codes = await filling
        assert LedgerFenced.code in codes
        assert bookie.accepting
        assert await add(bookie, entry(2, 0)) == 0


async def test_a_bookie_without_metadata_collects_what_was_deleted_by_name(gc: Collected) -> None:
    gc.existing = None
    bookie = await gc.open()
    await gc.write([1, 2], range(40))
    await bookie.delete_ledger(1)
    await gc.reopen()
    before = gc.log_bytes()
    assert gc.bookie is not None
    collected = await gc.bookie.collector.collect()
    assert collected.deleted_ledgers == 0  # that was before the restart
    assert gc.log_bytes() < before * 0.6
    await gc.check(2, range(40))
    assert all(ledger_id == 2 for ledger_id, _ in gc.storage.locations)


async def test_a_tombstone_is_forgotten_after_its_time_and_not_before(gc: Collected) -> None:
    bookie = await gc.open(tombstone_retention_s=7 * 86400.0)
    await gc.write([1, 2], range(20))
    await bookie.delete_ledger(1)
    await bookie.checkpoint()
    await bookie.collector.collect()
    gc.clock.now += 7 * DAY_MS - 1
    await bookie.collector.collect()
    await refuses(bookie, 1)
    await bookie.checkpoint()  # a log that held the tombstone went, so it is written again
    gc.clock.now += 1
    await bookie.collector.collect()
    assert bookie.collector.figures["gc_forgotten_tombstones"] == 1
    assert list(gc.storage.ledgers) == [2]
    with pytest.raises(LedgerNotFound):
        await bookie.read_last_confirmed(1)
    assert await add(bookie, entry(1, 0)) == 0


async def test_a_tombstone_is_not_forgotten_while_a_journal_could_bring_its_ledger_back(
    gc: Collected,
) -> None:
    bookie = await gc.open(tombstone_retention_s=0.0)
    await gc.write([2], range(1))
    await add(bookie, entry(1, 0))
    await bookie.delete_ledger(1)
    await bookie.collector.collect()
    assert bookie.collector.figures["gc_forgotten_tombstones"] == 0
    bookie = await gc.crash_and_open(tombstone_retention_s=0.0)
    await refuses(bookie, 1)
    await bookie.collector.collect()  # the start has flushed, and its mark stands behind the adds
    assert bookie.collector.figures["gc_forgotten_tombstones"] == 1


async def test_the_logs_keep_saying_that_a_ledger_was_deleted(gc: Collected) -> None:
    """A rebuild of the index from the logs must not revive it while one of them has its entries."""
    bookie = await gc.open()
    await gc.write([1, 2], range(40))  # several logs
    await bookie.delete_ledger(1)
    await bookie.checkpoint()
    [current] = [info for info in bookie.logs.logs() if info.current]
    # The log with the tombstone goes: only ledger 3, deleted too, fills it up.
    await gc.write([3], range(20))
    await bookie.delete_ledger(3)
    await bookie.collector.collect()
    await bookie.checkpoint()
    assert bookie.logs.path_of(current.log_id) is None or current.log_id in [
        info.log_id for info in bookie.logs.logs()
    ]
    named = [
        record.ledger_id
        for info in bookie.logs.logs()
        async for records in bookie.logs.scan(info.log_id)
        for record in records
        if record.entry_id == 2**64 - 1
    ]
    entries = [
        record.ledger_id
        for info in bookie.logs.logs()
        async for records in bookie.logs.scan(info.log_id)
        for record in records
        if record.entry_id < 2**63
    ]
    for ledger_id in (1, 3):
        assert ledger_id in named or ledger_id not in entries


async def test_a_collection_waits_for_a_tombstone_that_is_on_its_way(
    gc: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 7: were the locations removed before it is durable, a crash would leave a ledger that denies its entries."""
    bookie = await gc.open()
    await gc.write([1], range(5))
    journal = bookie.journals.of(1)
    held: list[Any] = []
    monkeypatch.setattr(journal, "delete", lambda ledger_id, at, done: held.append((ledger_id, done)))
    deleting = asyncio.create_task(bookie.delete_ledger(1))
    await until(lambda: bool(held))
    await bookie.collector.collect()
    assert bookie.index.list_locations(1)
    monkeypatch.undo()
    for ledger_id, done in held:
        done(ledger_id, -1, 0)
    await deleting
    await bookie.collector.collect()
    assert not bookie.index.list_locations(1)


async def test_rule_06_no_fence_is_answered_after_the_journal_has_failed(
    gc: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one failed with the journal; the second was looked up meanwhile, and finds the ledger fenced in memory."""
    bookie = await gc.open()
    await add(bookie, entry(1, 0))
    held: list[Any] = []
    monkeypatch.setattr(
        bookie.journals.of(1), "fence", lambda ledger_id, done: held.append((ledger_id, done))
    )
    first = asyncio.create_task(bookie.fence(1))
    await until(lambda: bool(held))
    looked_up, warm = asyncio.Event(), bookie.ledgers.warm

    async def slow(ledger_id: int) -> None:
        await looked_up.wait()
        await warm(ledger_id)

    monkeypatch.setattr(bookie.ledgers, "warm", slow)
    second = asyncio.create_task(bookie.fence(1))
    await asyncio.sleep(0)
    for ledger_id, done in held:
        done(ledger_id, -1, StorageFailed.code)
    bookie.fail(StorageFailed("the journal cannot be written"))
    looked_up.set()
    for fencing in (first, second):
        with pytest.raises(StorageFailed):
            await fencing


async def test_a_stopping_bookie_deletes_nothing(gc: Collected) -> None:
    bookie = await gc.open()
    await bookie.close()
    with pytest.raises(ServiceNotReady):
        await bookie.delete_ledger(1)
    with pytest.raises(ServiceNotReady):
        await bookie.collector.collect()
