"""The checkpoint as a task of its own: the barrier of rule 11, callers that go away, what entry logs are told of ledgers."""

import asyncio
from pathlib import Path

import pytest

from magnetar.bookie import Bookie
from magnetar.bookie.entry_log.records import STATE_ENTRY
from magnetar.bookie.index import LedgerRecord, decode_ledger_record
from magnetar.proto.errors import StorageFailed
from support.bookie_kit import add, entry, open_inline
from support.index_model import ModelStorage


@pytest.fixture
async def bookie(tmp_path: Path) -> Bookie:
    return await open_inline(str(tmp_path / "bookie"), ModelStorage(), checkpoint_interval_s=1000.0)


def hold_syncs(bookie: Bookie) -> tuple[asyncio.Event, asyncio.Event]:
    """Entry logs are not synced until the second event; the first tells that somebody wants it."""
    wanted, go = asyncio.Event(), asyncio.Event()
    real = bookie.logs.sync

    async def sync() -> list[int]:
        wanted.set()
        await go.wait()
        return await real()

    bookie.logs.sync = sync  # type: ignore[method-assign]
    return wanted, go


async def test_rule_11_nothing_is_flushed_inside_the_barrier_and_a_flush_is_waited_out(
    bookie: Bookie,
) -> None:
    wanted, go = hold_syncs(bookie)
    steps: list[str] = []

    async def compaction(name: str) -> None:
        async with bookie.checkpointer.exclusive():
            steps.append(f"{name} in")
            assert bookie.checkpointer._running is None or bookie.checkpointer._running.done()
            for _ in range(20):
                await asyncio.sleep(0)
            steps.append(f"{name} out")

    async def flush(name: str) -> None:
        await bookie.checkpoint()
        steps.append(name)

    await add(bookie, entry(1, 0))
    first = asyncio.ensure_future(flush("first"))
    await wanted.wait()
    tasks = [asyncio.ensure_future(compaction("compaction")), asyncio.ensure_future(flush("second"))]
    for _ in range(20):
        await asyncio.sleep(0)
    assert steps == []
    go.set()
    await asyncio.gather(first, *tasks)
    assert sorted(steps[:2]) == ["compaction in", "first"]
    assert steps[2:] == ["compaction out", "second"]
    await bookie.close()


async def test_rule_04_a_flush_whose_caller_went_away_comes_to_its_end(bookie: Bookie) -> None:
    """A sync that nobody waits for could fail unheard, and a second one would say that all is well."""
    wanted, go = hold_syncs(bookie)
    await add(bookie, entry(1, 0))
    caller = asyncio.ensure_future(bookie.checkpointer.run(None))
    await wanted.wait()
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    assert bookie.checkpointer.finished == 1  # that of the start
    inside = asyncio.ensure_future(anext_entered(bookie))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not inside.done()
    go.set()
    assert await inside == 2
    await bookie.close()


async def anext_entered(bookie: Bookie) -> int:
    async with bookie.checkpointer.exclusive():
        return bookie.checkpointer.finished


async def test_rule_04_a_failure_that_nobody_heard_is_not_tried_again(bookie: Bookie) -> None:
    wanted, go = asyncio.Event(), asyncio.Event()
    real = bookie.index.flush_locations

    async def fails_once() -> None:
        bookie.index.flush_locations = real  # type: ignore[method-assign]
        wanted.set()
        await go.wait()
        raise StorageFailed("the index could not be synced")

    bookie.index.flush_locations = fails_once  # type: ignore[method-assign]
    await add(bookie, entry(1, 0))
    caller = asyncio.ensure_future(bookie.checkpointer.run(None))
    await wanted.wait()
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    go.set()
    with pytest.raises(StorageFailed, match="could not be synced"):
        await bookie.checkpoint()
    assert bookie.failure is not None
    await bookie.close()


async def test_what_no_entry_tells_is_in_the_entry_logs_once(bookie: Bookie) -> None:
    """Fence and explicit LAC, also of a ledger that has no entry here; entries alone write no state."""
    await add(bookie, entry(1, 0))
    await bookie.fence(50)
    await bookie.checkpoint()
    await bookie.write_last_confirmed(1, 7)
    await bookie.checkpoint()
    await add(bookie, entry(1, 8))
    await bookie.checkpoint()
    found: list[tuple[int, LedgerRecord]] = []
    for info in bookie.logs.logs():
        async for records in bookie.logs.scan(info.log_id):
            found += [
                (record.ledger_id, decode_ledger_record(record.data))
                for record in records
                if record.entry_id == STATE_ENTRY and record.data is not None
            ]
    assert found == [(50, LedgerRecord(True)), (1, LedgerRecord(False, 7))]
    assert bookie.index.get(1, STATE_ENTRY) is None
    figures = bookie.checkpointer.figures
    assert (figures.flushes, figures.entries) == (3, 2)
    assert figures.seconds.count == 3
    assert figures.bytes == len(entry(1, 0)) + len(entry(1, 8))
    await bookie.close()
