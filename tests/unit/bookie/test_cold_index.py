"""What the index has to read from the disk is read off the loop (rule 45): the daemon goes on meanwhile."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from magnetar.bookie import Bookie, open_bookie
from magnetar.bookie.index import RocksLocationIndex, rocks
from magnetar.proto.errors import EntryNotFound, RequestTimeout
from magnetar.runtime.files import OsFiles
from support.bookie_kit import add_all, entry, small_settings, until
from support.inline_devices import inline_components

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # a thread reads: not in virtual time
ENTRIES = 300


class ColdFamily:
    """A column family of which nothing is in memory, until a thread has read it, which waits for the disk."""

    def __init__(self, family: Any) -> None:
        self._family = family
        self._warm = False
        self.answers = threading.Event()
        self.asked = 0

    def key_may_exist(self, key: bytes, fetch: bool) -> Any:
        return self._family.key_may_exist(key, fetch) if self._warm else (True, None)

    def get(self, keys: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            assert self._warm, "the loop would wait for the disk"
        else:
            self.asked += 1
            assert self.answers.wait(10)
            self._warm = True
        return self._family.get(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)


@pytest_asyncio.fixture
async def bookie(tmp_path: Path) -> AsyncIterator[Bookie]:
    """Its only ledger is in entry logs and index."""

    async def opened() -> Bookie:
        components = inline_components(OsFiles(), random.Random(1), RocksLocationIndex)
        return await open_bookie(small_settings(str(tmp_path)), components)

    first = await opened()
    assert not any(await add_all(first, [entry(1, number) for number in range(ENTRIES)]))
    await first.close()
    bookie = await opened()
    yield bookie
    await bookie.close()


@pytest.mark.parametrize("last", [0, 20, ENTRIES - 1])
async def test_a_read_waits_for_the_index_and_the_loop_does_not(bookie: Bookie, last: int) -> None:
    index: Any = bookie.index
    families = index._ledgers, index._locations = ColdFamily(index._ledgers), ColdFamily(index._locations)
    reading = asyncio.ensure_future(bookie.read(1, 0, last))
    for family in families:
        await until(lambda: any(family.asked and not family.answers.is_set() for family in families))
        await asyncio.sleep(0.01)
        assert not reading.done()
        family.answers.set()
    entries, _ = await reading
    assert entries == [entry(1, number) for number in range(last + 1)][: len(entries)]
    assert entries
    with pytest.raises(EntryNotFound):
        await bookie.read(1, ENTRIES + 5000, ENTRIES + 5000)


async def test_a_fence_and_a_last_confirmed_wait_so_as_well(bookie: Bookie) -> None:
    index: Any = bookie.index
    cold = index._ledgers = ColdFamily(index._ledgers)
    asking = [asyncio.ensure_future(bookie.read_last_confirmed(1, fence=fence)) for fence in (True, False)]
    await until(lambda: cold.asked == 2)
    cold.answers.set()
    assert [(await one)[1] for one in asking] == [ENTRIES - 1] * 2


async def test_an_index_that_does_not_answer_is_no_damage(
    bookie: Bookie, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rocks, "_READ_TIMEOUT_S", 0.05)
    index: Any = bookie.index
    cold = index._locations = ColdFamily(index._locations)
    with pytest.raises(RequestTimeout):
        await bookie.read(1, 0, 0)
    assert not bookie.damage.covers(1, 0)
    cold.answers.set()
    await until(lambda: cold._warm)
    assert (await bookie.read(1, 0, 0))[0] == [entry(1, 0)]


async def test_rule_44_reads_of_a_disk_that_hangs_leave_nothing_behind(
    bookie: Bookie, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets its timeout; were all given to the threads, what they ask for would stay there until the disk answers."""

    class Counting(ThreadPoolExecutor):
        given = 0

        def submit(self, *arguments: Any, **more: Any) -> Any:
            self.given += 1
            return super().submit(*arguments, **more)

    monkeypatch.setattr(rocks, "_READ_TIMEOUT_S", 0.05)
    index: Any = bookie.index
    cold = index._locations = ColdFamily(index._locations)
    index._readers.shutdown()
    index._readers = readers = Counting(rocks._READERS)
    found = await asyncio.gather(*[bookie.read(1, at, at) for at in range(50)], return_exceptions=True)
    assert {type(one) for one in found} == {RequestTimeout}
    assert readers.given <= rocks._READERS
    cold.answers.set()
    await until(lambda: cold._warm)
    assert (await bookie.read(1, 0, 0))[0] == [entry(1, 0)]
