"""Rounds of garbage collection: what is deleted, what never is, and when a round comes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from magnetar.bookie.gc.existing_ledgers import MetadataLedgers
from magnetar.bookie.gc.survey import Survey
from magnetar.bookie.settings import BookieSettings
from magnetar.bookie.status import bookie_figures
from magnetar.metadata.ledgers import StoredLedgers, ledger_path
from magnetar.proto.errors import (
    DiskFull,
    InvalidSetting,
    LedgerFenced,
    LedgerNotFound,
    RequestTimeout,
    StorageFailed,
)
from support.bookie_kit import KIB, add, add_all, entry, until
from support.gc_kit import Collected, Existing, data, flip
from support.memory_metadata import MemoryMetadataStore


@pytest.fixture
async def gc(tmp_path: Path) -> AsyncIterator[Collected]:
    collected = Collected(tmp_path / "bookie")
    yield collected
    await collected.close()


async def test_ledgers_that_metadata_no_longer_has_go_and_so_do_their_logs(gc: Collected) -> None:
    bookie = await gc.open()
    await gc.write([1], range(40))
    await gc.write([2], range(40))
    assert gc.existing is not None
    del gc.existing.ledgers[1]
    logs, size = len(gc.names()), gc.log_bytes()
    collected = await bookie.collector.collect()
    assert collected.deleted_ledgers == 1
    assert collected.deleted_logs >= 2
    assert not collected.skipped
    assert len(gc.names()) < logs
    assert gc.log_bytes() <= size - collected.reclaimed_bytes + 4096
    await gc.check(2, range(40))
    with pytest.raises(LedgerNotFound):
        await bookie.read(1, 0, 0)
    stats = bookie_figures(bookie)
    assert stats["gc_rounds"] == 1
    assert stats["gc_deleted_ledgers"] == 1
    assert stats["gc_reclaimed_bytes"] == collected.reclaimed_bytes > 0
    assert all(type(value) is int for value in bookie.collector.stats().values())
    await gc.reopen()
    await gc.check(2, range(40))


async def test_everything_can_go(gc: Collected) -> None:
    bookie = await gc.open()
    await gc.write([1, 2], range(40))
    bookie = await gc.reopen()
    assert gc.existing is not None
    gc.existing.ledgers.clear()
    await bookie.collector.collect()
    assert gc.names() == []
    assert gc.storage.locations == {}
    bookie = await gc.crash_and_open()
    await gc.write([3], range(5))
    await gc.check(3, range(5))


@pytest.mark.parametrize("error", [StorageFailed("the disk of the store"), RequestTimeout("no answer")])
async def test_rule_10_a_metadata_error_or_timeout_is_not_a_deletion(gc: Collected, error: Exception) -> None:
    bookie = await gc.open()
    await gc.write([1, 2], range(20))
    assert gc.existing is not None
    gc.existing.ledgers.clear()
    gc.existing.error = error  # type: ignore[assignment]
    collected = await bookie.collector.collect()
    assert collected.skipped
    assert collected[:4] == (0, 0, 0, 0)
    assert bookie_figures(bookie)["gc_rounds_without_metadata"] == 1
    for ledger_id in (1, 2):
        await gc.check(ledger_id, range(20))


async def test_rule_10_local_ledgers_are_listed_before_metadata_is_read(gc: Collected) -> None:
    """A ledger is created, written and flushed while metadata is read, and the answer is older than it."""
    bookie = await gc.open()
    await gc.write([1], range(5))
    assert gc.existing is not None
    existing = gc.existing
    answer = dict(existing.ledgers)

    class Late(Existing):
        async def missing(self, ledger_ids: Sequence[int]) -> list[int]:
            await gc.write([2], range(5))
            return [ledger_id for ledger_id in ledger_ids if ledger_id not in answer]

    bookie.collector.existing = Late()
    collected = await bookie.collector.collect()
    assert collected.deleted_ledgers == 0
    await gc.check(2, range(5))


async def test_rule_10_with_a_real_store(gc: Collected) -> None:
    store = MemoryMetadataStore()
    bookie = await gc.open()
    await gc.write([1, 2], range(5))
    await StoredLedgers(store).new_ids(3)
    await store.create(ledger_path(1), b"")
    bookie.collector.existing = MetadataLedgers(store, timeout_s=5)
    assert (await bookie.collector.collect()).deleted_ledgers == 1
    await gc.check(1, range(5))
    await store.close()
    assert (await bookie.collector.collect()).skipped
    await gc.check(1, range(5))


async def test_rule_11_a_log_that_a_flush_has_closed_and_not_indexed_yet_is_left_alone(gc: Collected) -> None:
    """Its ledger is in no index, nor are its entries: it looks like garbage until the flush has ended."""
    bookie = await gc.open()
    await gc.write([1], range(3))
    assert gc.existing is not None
    entered, go_on = asyncio.Event(), asyncio.Event()
    append = bookie.logs.append

    async def slow(*arguments: object) -> object:
        placed = await append(*arguments)  # type: ignore[arg-type]
        entered.set()
        await go_on.wait()
        return placed

    bookie.logs.append = slow  # type: ignore[method-assign,assignment]
    gc.existing.ledgers[7] = None
    await add_all(bookie, [data(7, number, 100) for number in range(800)])
    flush = asyncio.create_task(bookie.checkpoint())
    await entered.wait()
    closed = sum(not info.current for info in bookie.logs.logs())
    collecting = asyncio.create_task(bookie.collector.collect())
    for _ in range(100):
        await asyncio.sleep(0)
    waited = not collecting.done()
    go_on.set()
    await flush
    collected = await collecting
    assert closed >= 3
    assert (waited, collected.deleted_logs, collected.compacted_logs) == (True, 0, 0)
    await gc.check(7, range(800), 100)


async def test_a_ledger_that_was_only_fenced_here_lives_until_metadata_says_otherwise(gc: Collected) -> None:
    bookie = await gc.open()
    assert gc.existing is not None
    gc.existing.ledgers[5] = None
    await gc.write([1], range(2))
    await bookie.fence(5)
    await bookie.checkpoint()
    await bookie.collector.collect()
    bookie = await gc.crash_and_open()
    assert await add(bookie, entry(5, 0)) == LedgerFenced.code
    assert await add(bookie, entry(5, 0), recovery=True) == 0
    await bookie.checkpoint()
    del gc.existing.ledgers[5]
    assert (await bookie.collector.collect()).deleted_ledgers == 1
    assert await add(bookie, entry(5, 1), recovery=True) == LedgerFenced.code


async def test_defect_4668_a_copy_that_metadata_does_not_ask_this_bookie_for_is_kept(gc: Collected) -> None:
    """A recovery writes to a bookie before metadata lists it: only a ledger that is gone is collected, never a copy."""
    bookie = await gc.open()
    store = MemoryMetadataStore()
    await store.create(ledger_path(1), b"in recovery, ensemble: other bookies")
    bookie.collector.existing = MetadataLedgers(store)
    await bookie.fence(1)
    assert await add(bookie, data(1, 0), recovery=True) == 0
    await bookie.checkpoint()
    assert (await bookie.collector.collect()).deleted_ledgers == 0
    await gc.check(1, range(1))


async def test_defect_4607_a_damaged_header_or_footer_never_makes_a_log_look_empty(gc: Collected) -> None:
    bookie = await gc.open()
    await gc.write([1], range(60))
    bookie = await gc.reopen()
    for info in bookie.logs.logs():
        for offset in (*range(0, 64, 8), info.bytes - 1, info.bytes - 20, info.bytes - 30, info.bytes - 50):
            flip(info.path, offset)
    bookie = await gc.reopen()
    collected = await bookie.collector.collect()
    assert (collected.deleted_logs, collected.reclaimed_bytes) == (0, 0)
    await gc.check(1, range(60))
    # And once the ledger is gone they can go: nothing in them is needed.
    assert gc.existing is not None
    del gc.existing.ledgers[1]
    await bookie.collector.collect()
    assert gc.names() == []


async def test_rounds_come_by_themselves_and_stop_with_the_bookie(gc: Collected) -> None:
    bookie = await gc.open(gc_interval_s=0.01)
    await gc.write([1], range(5))
    assert gc.existing is not None
    gc.existing.ledgers.clear()
    await until(lambda: bookie_figures(bookie)["gc_deleted_ledgers"] == 1)
    await until(lambda: bookie_figures(bookie)["gc_rounds"] > 3)
    await bookie.close()
    rounds = bookie.collector.figures["gc_rounds"]
    await asyncio.sleep(0.05)
    assert bookie.collector.figures["gc_rounds"] == rounds


async def test_a_disk_that_gets_full_begins_a_round(gc: Collected) -> None:
    bookie = await gc.open(gc_interval_s=1000.0)
    await gc.write([1], range(5))
    assert gc.existing is not None
    gc.existing.ledgers.clear()
    bookie.collector.note_space([])
    for _ in range(20):
        await asyncio.sleep(0)
    assert bookie_figures(bookie)["gc_rounds"] == 0
    bookie.collector.note_space([0])
    await until(lambda: bookie_figures(bookie)["gc_deleted_ledgers"] == 1)


async def test_who_waits_for_a_round_is_told_that_the_bookie_stops(gc: Collected) -> None:
    bookie = await gc.open()
    await gc.write([1], range(5))
    assert gc.existing is not None
    held = asyncio.Event()

    class Silent(Existing):
        async def missing(self, ledger_ids: Sequence[int]) -> list[int]:
            held.set()
            await asyncio.Event().wait()
            return []

    bookie.collector.existing = Silent()
    waiting = [asyncio.create_task(bookie.collector.collect()) for _ in range(2)]
    await held.wait()
    later = asyncio.create_task(bookie.collector.collect())
    await asyncio.sleep(0)
    await bookie.close()
    results = await asyncio.gather(*waiting, later, return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["ServiceNotReady"] * 3


async def test_an_index_that_cannot_be_read_deletes_nothing_and_stops_nobody(
    gc: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = await gc.open()
    await gc.write([1], range(20))

    def broken(*arguments: object, **named: object) -> object:
        raise StorageFailed("a block of the index is damaged")

    with monkeypatch.context() as patch:
        patch.setattr(bookie.index, "list_ledgers", broken)
        with pytest.raises(StorageFailed):
            await bookie.collector.collect()
    assert bookie.failure is None
    assert not (await bookie.collector.collect()).deleted_logs
    await gc.check(1, range(20))


@pytest.mark.parametrize("full", ["flush_locations", "replace_locations", "delete_locations"])
async def test_rule_39_an_index_without_space_ends_a_round_and_not_the_bookie(
    gc: Collected, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    bookie = await gc.open()
    await gc.write([1], range(20))
    await gc.write([2], range(200))
    await bookie.checkpoint()
    assert gc.existing is not None
    gc.existing.ledgers.clear()
    refused = 0
    real = getattr(bookie.index, full)

    def no_space(*arguments: object) -> object:
        nonlocal refused
        refused += 1
        if refused == 1:
            raise DiskFull("the index has no space")
        return real(*arguments)

    monkeypatch.setattr(bookie.index, full, no_space)
    with pytest.raises(DiskFull):
        await bookie.collector.collect()
    assert refused
    assert bookie.failure is None
    await bookie.collector.collect()
    assert bookie.collector.stats()["gc_deleted_ledgers"] == 2
    assert not bookie.index.list_locations(1)
    assert not bookie.index.list_locations(2)
    await bookie.close()


async def test_an_index_that_cannot_be_written_stops_the_bookie(
    gc: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = await gc.open()
    await gc.write([1], range(20))
    assert gc.existing is not None
    gc.existing.ledgers.clear()
    failures: list[object] = []
    bookie.on_failure = failures.append

    async def broken() -> None:
        raise StorageFailed("the index cannot be flushed")

    monkeypatch.setattr(bookie.index, "flush_locations", broken)
    names = gc.names()
    with pytest.raises(Exception, match="stop"):
        await bookie.collector.collect()
    assert len(failures) == 1
    assert gc.names() == names
    await bookie.close()


async def test_the_survey_believes_the_scrub(gc: Collected) -> None:
    bookie = await gc.open()
    await gc.write([1], range(20))
    bookie = await gc.reopen()
    survey: Survey = bookie.collector.survey
    await survey.list_ledgers()
    closed = bookie.logs.logs()
    before = await survey.usages(closed)
    survey.measured_live_bytes = lambda log_id: 0
    after = await survey.usages(closed)
    assert [usage.live_bytes for usage in after] == [1] * len(before)
    assert all(usage.live_bytes > 1 for usage in before)


def test_settings_that_make_no_sense() -> None:
    for changes in (
        {"minor_compaction_threshold": 0.6},
        {"major_compaction_threshold": 1.0},
        {"gc_interval_s": -1.0},
    ):
        with pytest.raises(InvalidSetting, match=next(iter(changes))):
            BookieSettings(data_directory="x", write_cache_bytes=64 * 1024 * KIB, **changes)  # type: ignore[arg-type]
