"""Reads from entry logs: runs, read-ahead, damage, a log that a compaction took away, recoveries, the byte budget."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from magnetar.bookie import Bookie
from magnetar.bookie.entry_log.records import RECORD_HEADER_BYTES
from magnetar.bookie.index import Location
from magnetar.bookie.read_budget import ReadBudget, ReadGrant
from magnetar.bookie.read_cache import ReadCache
from magnetar.bookie.server.server import InProcessBookie
from magnetar.bookie.status import bookie_problems
from magnetar.proto.commands import WaitLastConfirmed
from magnetar.proto.errors import (
    EntryDamaged,
    EntryNotFound,
    LedgerNotFound,
    RequestTimeout,
    UnknownLedgerState,
)
from magnetar.runtime.files import OsFile
from support.bookie_kit import KIB, add, add_all, entry, open_inline
from support.index_model import ModelStorage


@pytest.fixture
async def bookie(tmp_path: Path) -> AsyncIterator[Bookie]:
    bookie = await open_inline(
        str(tmp_path), ModelStorage(), entry_log_bytes=1024 * KIB, read_cache_bytes=1024 * KIB
    )
    yield bookie
    await bookie.close()


class LogReads:
    """Counts reads of entry logs, and how many entries each brought."""

    def __init__(self, bookie: Bookie) -> None:
        self.runs: list[int] = []
        self._read = bookie.logs.reader.read
        bookie.logs.reader.read = self  # type: ignore[method-assign]

    async def __call__(
        self, ledger_id: int, wanted: Sequence[tuple[int, Location]], grant: ReadGrant | None = None
    ) -> list[bytes]:
        self.runs.append(len(wanted))
        return await self._read(ledger_id, wanted, grant)


async def store(bookie: Bookie, ledger_id: int, numbers: Sequence[int], size: int = 100) -> list[bytes]:
    entries = [entry(ledger_id, number, b"x" * size) for number in numbers]
    for start in range(0, len(entries), 100):
        assert not any(await add_all(bookie, entries[start : start + 100]))
    await bookie.checkpoint()
    return entries


def damage(bookie: Bookie, ledger_id: int, entry_id: int) -> None:
    """Flips a bit of the entry in its log."""
    location = bookie.index.get(ledger_id, entry_id)
    assert location is not None
    path = bookie.logs.path_of(location.log_id)
    assert path is not None
    data = bytearray(Path(path).read_bytes())
    data[location.offset + RECORD_HEADER_BYTES + 50] ^= 1
    Path(path).write_bytes(bytes(data))


async def test_a_batch_is_one_read_and_ends_at_a_hole(bookie: Bookie) -> None:
    entries = await store(bookie, 1, [*range(150), *range(151, 200)])
    reads = LogReads(bookie)
    assert await bookie.read(1, 0, 199) == (entries[:150], 198)
    assert reads.runs == [150]
    assert (await bookie.read(1, 0, 149))[0] == entries[:150]
    assert reads.runs == [150]  # read cache
    with pytest.raises(EntryNotFound):
        await bookie.read(1, 150, 160)
    assert (await bookie.read(1, 151, 9999))[0] == entries[150:]


async def test_a_batch_keeps_its_byte_limit_but_has_one_entry(bookie: Bookie) -> None:
    entries = await store(bookie, 1, range(50), 1000)
    size = len(entries[0])
    for limit, count in ((size - 1, 1), (size, 1), (2 * size - 1, 1), (2 * size, 2), (10 * size + 5, 10)):
        bookie.read_cache.clear()
        assert (await bookie.read(1, 3, 40, max_bytes=limit))[0] == entries[3 : 3 + count]  # entry log
        assert (await bookie.read(1, 3, 40, max_bytes=limit))[0] == entries[3 : 3 + count]  # read cache
    more = [entry(1, number, b"y" * 1000) for number in range(50, 60)]
    await add_all(bookie, more)
    for limit, count in ((size, 1), (3 * size - 1, 2), (5 * size, 5), (99 * size, 12)):
        assert (await bookie.read(1, 48, 99, max_bytes=limit))[0] == [*entries[48:], *more][:count]
        assert (await bookie.read(1, 50, 99, max_bytes=limit))[0] == more[:count]  # write cache


async def test_a_sequential_reader_of_single_entries_is_read_ahead_a_random_one_is_not(
    bookie: Bookie,
) -> None:
    entries = await store(bookie, 1, range(300))
    reads = LogReads(bookie)
    for number in (200, 7, 90):
        assert (await bookie.read(1, number, number))[0] == [entries[number]]
    assert reads.runs == [1, 1, 1]
    for number in range(91, 190):
        assert (await bookie.read(1, number, number))[0] == [entries[number]]
    assert reads.runs == [1, 1, 1, 100]


async def test_rule_08_damage_inside_a_batch_ends_it_and_is_told_to_who_asks_for_the_entry(
    bookie: Bookie,
) -> None:
    entries = await store(bookie, 1, range(20))
    damage(bookie, 1, 7)
    assert (await bookie.read(1, 0, 19))[0] == entries[:7]
    for last in (7, 19):
        with pytest.raises(EntryDamaged):
            await bookie.read(1, 7, last)
    assert (await bookie.read(1, 8, 19))[0] == entries[8:]
    assert bookie.damage.covers(1, 7)
    assert bookie.damage.figures()["damaged_entries"] == 1
    assert "1 entries of 1 ledgers are damaged" in bookie_problems(bookie)["damage"]


async def test_rule_45_what_is_in_memory_is_served_while_the_disk_of_what_follows_does_not_answer(
    bookie: Bookie, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = await store(bookie, 1, range(20))
    assert (await bookie.read(1, 0, 9))[0] == entries[:10]

    async def silent(*_: object) -> None:
        raise RequestTimeout("the disk does not answer")

    monkeypatch.setattr(bookie.logs.reader, "read", silent)
    bookie.read_cache.clear()
    for number, stored in enumerate(entries[:10]):
        bookie.cache.put(1, number, stored)
    assert (await bookie.read(1, 0, 19))[0] == entries[:10]
    with pytest.raises(RequestTimeout):
        await bookie.read(1, 10, 19)
    confirmed = (await bookie.read_last_confirmed(1))[0]
    polled, found = await InProcessBookie(bookie).answer(WaitLastConfirmed(1, 1, 9, 1000, 5, 0))
    assert (polled["last_add_confirmed"], polled["fenced"], [*found]) == (confirmed, False, []), (
        "what is confirmed is known without the disk"
    )


async def test_rule_08_damage_is_told_even_when_the_index_has_lost_the_entry(bookie: Bookie) -> None:
    await store(bookie, 1, range(5))
    bookie.damage.report(1, 9, where="test", reason="its log is gone")
    with pytest.raises(EntryDamaged):
        await bookie.read(1, 9, 9)
    with pytest.raises(EntryNotFound):
        await bookie.read(1, 8, 8)


async def test_rule_08_a_ledger_of_which_entries_may_be_lost_has_no_missing_entries(bookie: Bookie) -> None:
    entries = await store(bookie, 1, range(5))
    bookie.ledgers.load(1).unknown = True
    assert (await bookie.read(1, 0, 9))[0] == entries
    with pytest.raises(UnknownLedgerState):
        await bookie.read(1, 5, 5)


async def test_an_entry_whose_log_a_compaction_took_away_is_looked_up_again(bookie: Bookie) -> None:
    entries = await store(bookie, 1, range(20))
    moved = [bookie.index.get(1, number) for number in range(20)]
    # The index names a log that is gone, until the first read has met that.
    for number in range(20):
        bookie.index.put_locations([(1, number, Location(0xDEAD, 64 + number, 10))])
    reads, real_read = [], bookie.logs.reader.read

    async def read(
        ledger_id: int, wanted: Sequence[tuple[int, Location]], grant: ReadGrant | None = None
    ) -> list[bytes]:
        reads.append(wanted[0][1].log_id)
        try:
            return await real_read(ledger_id, wanted, grant)
        finally:
            for number, location in enumerate(moved):
                assert location is not None
                bookie.index.put_locations([(1, number, location)])

    bookie.logs.reader.read = read  # type: ignore[method-assign]
    assert (await bookie.read(1, 3, 3))[0] == [entries[3]]
    assert reads[0] == 0xDEAD
    assert len(reads) == 2
    assert bookie.damage.figures()["damaged_entries"] == 0


async def test_an_entry_whose_log_is_missing_for_good_is_damaged(bookie: Bookie) -> None:
    await store(bookie, 1, range(3))
    bookie.index.put_locations([(1, 1, Location(0xDEAD, 64, 10))])
    with pytest.raises(EntryDamaged):
        await bookie.read(1, 1, 1)
    assert bookie.damage.covers(1, 1)


async def test_rule_20_what_a_recovery_digested_anew_is_served_whatever_was_read_before(
    bookie: Bookie,
) -> None:
    old = await store(bookie, 1, range(10))
    again = entry(1, 5, b"x" * 100, lac=8)
    assert again != old[5]
    # The copy in the log is read as a neighbour while the newer one waits in the write cache ...
    assert await add(bookie, again, recovery=True) == 0
    assert (await bookie.read(1, 0, 9))[0] == [*old[:5], again, *old[6:]]
    await bookie.checkpoint()
    # ... and must not have been kept by then.
    assert (await bookie.read(1, 0, 9))[0] == [*old[:5], again, *old[6:]]


async def test_rule_20_a_copy_that_a_recovery_replaced_while_the_disk_was_read_is_not_kept(
    bookie: Bookie,
) -> None:
    old = await store(bookie, 1, range(10))
    real_read = bookie.logs.reader.read
    newest = entry(1, 6, b"x" * 100, lac=9)

    async def read(
        ledger_id: int, wanted: Sequence[tuple[int, Location]], grant: ReadGrant | None = None
    ) -> list[bytes]:
        found = await real_read(ledger_id, wanted, grant)
        assert await add(bookie, newest, recovery=True) == 0
        await bookie.checkpoint()
        return found

    bookie.logs.reader.read = read  # type: ignore[method-assign]
    assert (await bookie.read(1, 4, 9))[0] == old[4:]  # what was there when it began
    bookie.logs.reader.read = real_read  # type: ignore[method-assign]
    assert (await bookie.read(1, 6, 6))[0] == [newest]


async def test_rule_20_a_copy_that_is_flushed_while_the_disk_is_read_is_newer_than_what_was_read(
    bookie: Bookie,
) -> None:
    old = await store(bookie, 1, range(10))
    newest = entry(1, 6, b"x" * 100, lac=9)
    assert await add(bookie, newest, recovery=True) == 0
    real_read = bookie.logs.reader.read

    async def read(
        ledger_id: int, wanted: Sequence[tuple[int, Location]], grant: ReadGrant | None = None
    ) -> list[bytes]:
        found = await real_read(ledger_id, wanted, grant)
        await bookie.checkpoint()
        return found

    bookie.logs.reader.read = read  # type: ignore[method-assign]
    expected = [*old[4:6], newest, *old[7:]]
    assert (await bookie.read(1, 4, 9))[0] == expected
    assert (await bookie.read(1, 6, 6))[0] == [newest]


async def test_rule_07_a_ledger_deleted_while_the_disk_is_read_is_not_served(bookie: Bookie) -> None:
    await store(bookie, 1, range(3))
    real_read = bookie.logs.reader.read

    async def read(
        ledger_id: int, wanted: Sequence[tuple[int, Location]], grant: ReadGrant | None = None
    ) -> list[bytes]:
        found = await real_read(ledger_id, wanted, grant)
        await bookie.delete_ledger(1)
        return found

    bookie.logs.reader.read = read  # type: ignore[method-assign]
    with pytest.raises(LedgerNotFound):
        await bookie.read(1, 0, 2)
    with pytest.raises(LedgerNotFound):
        await bookie.read(1, 0, 2)


async def test_what_reads_hold_is_bounded_in_bytes(tmp_path: Path) -> None:
    bookie = await open_inline(
        str(tmp_path),
        ModelStorage(),
        entry_log_bytes=1024 * KIB,
        read_budget_bytes=30 * KIB,
        read_cache_bytes=0,
        read_ahead_entries=0,
    )
    stored = [await store(bookie, ledger_id, range(30), 1000) for ledger_id in range(8)]
    most = 0
    running = 0
    real_read = bookie.logs.reader.read

    async def read(
        ledger_id: int, wanted: Sequence[tuple[int, Location]], grant: ReadGrant | None = None
    ) -> list[bytes]:
        nonlocal most, running
        running += 1
        most = max(most, bookie.reads.budget.taken)
        await asyncio.sleep(0.001)
        running -= 1
        return await real_read(ledger_id, wanted, grant)

    bookie.logs.reader.read = read  # type: ignore[method-assign]
    # Each of 10 KB, so that three fit.
    results = await asyncio.gather(
        *[bookie.read(ledger_id, 0, 99, max_bytes=10_400) for ledger_id in range(8)]
    )
    for ledger_id, (entries, _) in enumerate(results):
        assert entries == stored[ledger_id][: len(entries)]
        assert entries
    assert 20 * KIB < most <= 30 * KIB
    assert bookie.reads.budget.taken == 0
    # One that is larger than the whole budget is served alone.
    assert (await bookie.read(1, 0, 99))[0] == stored[1]
    with pytest.raises(EntryNotFound):
        await bookie.read(1, 77, 77)
    task = asyncio.get_running_loop().create_task(bookie.read(2, 0, 99))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bookie.reads.budget.taken == 0
    await bookie.close()


async def test_the_budget_is_given_in_order_and_comes_back_from_those_who_give_up() -> None:
    budget = ReadBudget(100)
    order: list[int] = []

    async def reader(number: int, size: int, held: asyncio.Event) -> None:
        grant = ReadGrant(budget)
        assert grant.take_now(size) or await grant.take(size)
        order.append(number)
        try:
            await held.wait()
        finally:
            grant.give_back()

    go = [asyncio.Event() for _ in range(5)]
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(reader(n, size, go[n])) for n, size in enumerate((60, 300, 30, 20, 50))]
    await asyncio.sleep(0)
    assert (order, budget.taken, budget.waiting) == ([0], 60, 4)
    go[0].set()
    await tasks[0]
    await asyncio.sleep(0)
    assert (order, budget.taken) == ([0, 1], 300)  # alone
    tasks[2].cancel()  # while it waits
    await asyncio.sleep(0)
    go[1].set()
    await tasks[1]
    await asyncio.sleep(0)
    assert (order, budget.taken, budget.waiting) == ([0, 1, 3, 4], 70, 0)
    tasks[3].cancel()
    await asyncio.gather(*tasks[2:4], return_exceptions=True)
    assert budget.taken == 50
    go[4].set()
    await tasks[4]
    assert budget.taken == 0
    # What has something already never waits: two such could wait for each other.
    grant = ReadGrant(budget)
    assert grant.take_now(80)
    assert not grant.take_now(30)
    assert not await grant.take(30)
    grant.give_back()
    assert budget.taken == 0


def test_the_read_cache_counts_what_it_holds_and_lets_the_oldest_run_go() -> None:
    cache = ReadCache(10_000)
    for first in range(0, 100, 10):
        cache.put(1, range(first, first + 10), [b"x" * 100] * 10)
        assert cache.size <= 10_000
    assert cache.run(1, range(10), 9999) == []
    assert cache.run(1, range(85, 121), 9999) == [b"x" * 100] * 15
    assert cache.run(1, range(85, 121), 250) == [b"x" * 100] * 2
    assert cache.run(1, range(85, 121), 1) == [b"x" * 100]
    assert (cache.hits, cache.misses) == (18, 1)
    cache.discard(1, 90)
    assert cache.run(1, range(85, 121), 9999) == [b"x" * 100] * 5
    cache.put(2, [0], [b"y" * 20_000])  # larger than all of it: not kept, and nothing is thrown away for it
    assert cache.run(1, range(91, 92), 9999)
    cache.discard_ledger(1)
    assert cache.run(1, range(91, 92), 9999) == []
    for first in range(0, 100, 10):
        cache.put(3, range(first, first + 10), [b"x" * 100] * 10)
    assert cache.size <= 10_000
    assert cache.run(3, range(99, 100), 9999)
    cache.clear()
    assert cache.size == 0


async def test_read_ahead_fits_the_read_cache_or_it_would_be_read_again_and_again(tmp_path: Path) -> None:
    bookie = await open_inline(
        str(tmp_path), ModelStorage(), entry_log_bytes=1024 * KIB, read_cache_bytes=20 * KIB
    )
    entries = await store(bookie, 1, range(300), 1000)
    reads = LogReads(bookie)
    await bookie.read(1, 0, 0)
    for number in range(1, 100):
        assert (await bookie.read(1, number, number))[0] == [entries[number]]
    assert len(reads.runs) < 40
    assert max(reads.runs) < 10
    # A batch is not cut short by it.
    assert (await bookie.read(1, 100, 199))[0] == entries[100:200]
    await bookie.close()


async def test_rule_41_a_directory_that_hangs_takes_nothing_from_the_reads_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = tuple(str(tmp_path / name) for name in ("one", "two"))
    bookie = await open_inline(
        str(tmp_path / "data"), ModelStorage(), ledger_directories=directories, read_budget_bytes=10 * KIB
    )
    stored = {ledger: await store(bookie, ledger, range(10), 2000) for ledger in (2, 3)}
    location = bookie.index.get(3, 0)
    assert location is not None
    hung = directories[bookie.logs.directory_of(location.log_id) or 0]
    answers = asyncio.get_running_loop().create_future()
    real = bookie.components.disk_worker.warm

    async def warm(path: str, offset: int, length: int) -> None:
        if path.startswith(hung):
            await asyncio.shield(answers)
        await real(path, offset, length)

    monkeypatch.setattr(bookie.components.disk_worker, "warm", warm)
    monkeypatch.setattr(OsFile, "read_cached", lambda *_: None)
    waiting = [asyncio.ensure_future(bookie.read(3, number, number)) for number in range(10)]
    for number in range(10):
        assert (await bookie.read(2, number, number))[0] == stored[2][number : number + 1]
    assert not any(read.done() for read in waiting)
    assert bookie.reads.budget.taken == 0
    answers.set_exception(RequestTimeout("the disk does not answer"))
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, RequestTimeout)
    assert bookie.damage.figures()["damaged_entries"] == 0, "nothing is known to be damaged"
    await bookie.close()
