"""Long polls: who waits for news of a ledger's last add confirmed, what wakes them, and what they cost."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnetar.bookie import Bookie
from magnetar.bookie.server.server import InProcessBookie
from magnetar.proto.commands import WaitLastConfirmed
from magnetar.proto.errors import LedgerNotFound, ServiceNotReady, StorageFailed, TooManyRequests
from support.bookie_kit import add, add_all, entry, open_inline, until
from support.index_model import ModelStorage

# Last add confirmed, whether the ledger is fenced, entries.
Answered = tuple[int, bool, list[bytes]]


@pytest.fixture
async def bookie(tmp_path: Path) -> AsyncIterator[Bookie]:
    bookie = await open_inline(str(tmp_path), ModelStorage(), max_long_polls=20)
    yield bookie
    await bookie.close()


async def answer(bookie: Bookie, ledger_id: int, confirmed: int, *, max_entries: int) -> Answered:
    """What a ledger client is answered."""
    command = WaitLastConfirmed(1, ledger_id, confirmed, 20_000, max_entries, 0)
    result, entries = await InProcessBookie(bookie).answer(command)
    assert [len(entry) for entry in entries] == result["sizes"]
    return result["last_add_confirmed"], result["fenced"], list(entries)


def poll(bookie: Bookie, ledger_id: int, confirmed: int, *, max_entries: int = 0) -> asyncio.Task[Answered]:
    """One that must be woken: the end of its own time is a failure."""
    work = answer(bookie, ledger_id, confirmed, max_entries=max_entries)
    return asyncio.get_running_loop().create_task(asyncio.wait_for(work, 3.0))


async def waiting(bookie: Bookie, count: int) -> None:
    await until(lambda: len(bookie.waiters) == count)


async def test_an_add_that_raises_the_last_add_confirmed_wakes_those_who_wait_for_its_ledger(
    bookie: Bookie,
) -> None:
    first, other = poll(bookie, 1, -1, max_entries=10), poll(bookie, 2, -1)
    await waiting(bookie, 2)
    await add(bookie, entry(1, 0))  # confirms nothing
    await add(bookie, entry(2, 0))
    assert not first.done()
    assert await add_all(bookie, [entry(1, number) for number in range(1, 4)]) == [0] * 3
    assert await first == (2, False, [entry(1, number) for number in range(3)])
    assert not other.done()
    other.cancel()
    await waiting(bookie, 0)


async def test_what_is_known_already_is_answered_at_once(bookie: Bookie) -> None:
    await add_all(bookie, [entry(1, number) for number in range(5)])
    assert await bookie.wait_last_confirmed(1, 2) == (3, False)
    assert (await answer(bookie, 1, 0, max_entries=2))[2] == [entry(1, 1), entry(1, 2)]
    # The last entry is not confirmed: nobody may see it.
    assert (await answer(bookie, 1, 2, max_entries=9))[2] == [entry(1, 3)]


async def test_rule_19_an_explicit_last_add_confirmed_wakes_them(bookie: Bookie) -> None:
    await add(bookie, entry(1, 0))
    waiter = poll(bookie, 1, -1, max_entries=1)
    await waiting(bookie, 1)
    await bookie.write_last_confirmed(1, 0)
    assert await waiter == (0, False, [entry(1, 0)])


async def test_a_fence_wakes_them_and_a_fenced_ledger_is_not_waited_for(bookie: Bookie) -> None:
    await add(bookie, entry(1, 0))
    waiter = poll(bookie, 1, 5)
    await waiting(bookie, 1)
    await bookie.fence(1)
    assert await waiter == (-1, True, [])
    assert (await bookie.wait_last_confirmed(1, 5)).fenced


async def test_rule_07_a_deletion_ends_them_and_nothing_is_served_any_more(bookie: Bookie) -> None:
    await add(bookie, entry(1, 0))
    waiter = poll(bookie, 1, 5)
    await waiting(bookie, 1)
    await bookie.delete_ledger(1)
    with pytest.raises(LedgerNotFound):
        await waiter
    with pytest.raises(LedgerNotFound):
        await bookie.wait_last_confirmed(1, 5)


async def test_without_news_they_end_in_time_and_leave_nothing(bookie: Bookie) -> None:
    assert await bookie.wait_last_confirmed(9, 3, timeout_s=0.01) == (-1, False)
    assert not bookie.waiters.by_ledger
    assert len(bookie.waiters) == 0
    # Nobody wrote it: waiting for it must not fill the memory.
    assert 9 not in bookie.ledgers.by_id


async def test_news_of_what_another_bookie_holds_come_without_entries(bookie: Bookie) -> None:
    await add(bookie, entry(1, 5))
    assert await answer(bookie, 1, 2, max_entries=3) == (4, False, [])


async def test_they_are_bounded_and_the_bound_is_free_again(bookie: Bookie) -> None:
    waiters = [poll(bookie, number % 3, -1) for number in range(20)]
    await waiting(bookie, 20)
    with pytest.raises(TooManyRequests, match="max_long_polls"):
        await bookie.wait_last_confirmed(1, -1)
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)
    assert len(bookie.waiters) == 0
    assert not bookie.waiters.by_ledger
    assert (await bookie.wait_last_confirmed(1, -1, timeout_s=0.01)).last_add_confirmed == -1


async def test_a_stop_and_a_failure_end_them(tmp_path: Path) -> None:
    bookie = await open_inline(str(tmp_path / "a"), ModelStorage())
    waiter = poll(bookie, 1, -1)
    await waiting(bookie, 1)
    await bookie.close()
    with pytest.raises(ServiceNotReady):
        await waiter
    bookie = await open_inline(str(tmp_path / "b"), ModelStorage())
    waiter = poll(bookie, 1, -1)
    await waiting(bookie, 1)
    bookie.on_failure = lambda error: None
    bookie.fail(StorageFailed("the disk broke"))
    with pytest.raises(StorageFailed, match="the disk broke"):
        await waiter
    await bookie.close()
