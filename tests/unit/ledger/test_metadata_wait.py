"""A metadata store that hangs, fails or loses answers: every call of the ledger client ends, in one clear error."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from magnetar.ledger import LedgerClient, LedgerSettings, LocalTransport, RegisteredBookies, StaticBookies
from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.metadata.ledgers import StoredLedgers, ledger_path
from magnetar.metadata.store import Versioned
from magnetar.proto.errors import (
    BookieUnavailable,
    ConnectionLost,
    FinalError,
    MagnetarError,
    RequestTimeout,
    StorageFailed,
)
from support.bookies import Bookies, Confirmations
from support.memory_metadata import MemoryMetadataStore
from support.sim import SimLoop

FAST = LedgerSettings(1, 1, 1, metadata_timeout_s=0.05)
NO_LAC = LedgerSettings(explicit_lac_interval_s=0)


class HungStore(MemoryMetadataStore):
    """Answers the calls in `hung` never, and counts those that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.hung: set[str] = set()
        self.waiting = 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("next_id", "create", "get", "put", "commit", "children"):
            return found

        async def call(*given: Any, **named: Any) -> Any:
            if name in self.hung:
                self.waiting += 1
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    self.waiting -= 1
            return await found(*given, **named)

        return call


Step = Callable[[LedgerClient, int], Awaitable[Any]]


async def close_writer(client: LedgerClient, _: int) -> None:
    writer = next(iter(client._writers))
    await writer.close()


STEPS: list[tuple[str, str, Step]] = [
    ("next_id", "the id of a new ledger", lambda client, _: client.create()),
    ("create", "making ledger 1", lambda client, _: client.create()),
    ("get", "reading ledger 0", lambda client, ledger: client.open(ledger, recover=False)),
    ("get", "reading ledger 0", lambda client, ledger: client.open(ledger, recover=True)),
    ("put", "writing ledger 0", lambda client, ledger: client.open(ledger, recover=True)),
    ("put", "writing ledger 0", close_writer),
    ("commit", "deleting ledger 0", lambda client, ledger: client.delete(ledger)),
]


@pytest.mark.parametrize(("hung", "what", "step"), STEPS)
async def test_no_wait_is_without_end(hung: str, what: str, step: Step) -> None:
    bookies = Bookies("a", metadata=(store := HungStore()))
    client = bookies.client(FAST)
    writer = await client.create()
    confirmed = Confirmations()
    writer.append(b"x", confirmed)
    await confirmed.count(1)
    store.hung.add(hung)
    with pytest.raises(RequestTimeout, match=rf"metadata_timeout_s=0\.05 s \({what}\)"):
        await asyncio.wait_for(step(client, writer.ledger_id), 5)
    assert store.waiting == 0
    store.hung.clear()
    await client.create()
    await client.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_what_cannot_be_read_in_time_is_deleted_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    bookies = Bookies("a", metadata=(store := HungStore()))
    client = bookies.client(FAST)
    writer = await client.create()
    store.hung.add("get")
    await client.delete(writer.ledger_id)
    assert "the metadata of ledger 0 cannot be read" in caplog.text
    store.hung.clear()
    assert await store.get(ledger_path(0)) is None
    await client.close()


async def test_a_timeout_of_the_store_itself_is_no_word_about_the_setting() -> None:
    class Impatient(MemoryMetadataStore):
        async def next_id(self, name: str, count: int = 1) -> int:
            raise TimeoutError("its own")

    client = Bookies("a", metadata=Impatient()).client(FAST)
    with pytest.raises(TimeoutError, match="its own") as raised:
        await client.create()
    assert not isinstance(raised.value, RequestTimeout)
    await client.close()


@pytest.mark.parametrize("hung", ["children", "get"])
async def test_opening_the_list_of_bookies_ends_and_leaves_nothing(hung: str) -> None:
    store = HungStore()
    await store.create("/bookies/a", b"")
    before = len(store._watches)
    store.hung.add(hung)
    with pytest.raises(RequestTimeout, match=r"metadata_timeout_s=0\.05 s \(.*/bookies"):
        await RegisteredBookies.open(store, metadata_timeout_s=0.05)
    assert len(store._watches) == before
    opening = asyncio.create_task(RegisteredBookies.open(store))
    while not store.waiting:
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    assert len(store._watches) == before
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_list_that_cannot_be_read_for_a_while_stays_and_is_read_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        store = HungStore()
        await store.create("/bookies/a", b"\x81\xa7address\xa3h:1")
        directory = await RegisteredBookies.open(store, metadata_timeout_s=3.0)
        assert directory.writable() == ("a",)
        store.hung.add("children")
        await store.create("/bookies/b", b"\x81\xa7address\xa3h:2")
        await asyncio.sleep(30)
        assert directory.writable() == ("a",)
        assert "the directory of bookies has ended" in caplog.text
        store.hung.clear()
        await asyncio.sleep(5)
        assert directory.writable() == ("a", "b")
        await directory.close()

    loop = SimLoop(1)
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


async def test_rule_46_a_store_that_fails_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(MemoryMetadataStore):
        failing = False

        async def children(self, path: str, *, after: str = "", limit: int = 0) -> list[str]:
            if self.failing:
                raise StorageFailed("the disk is gone")
            return await super().children(path, after=after, limit=limit)

    store = Failing()
    directory = await RegisteredBookies.open(store)
    store.failing = True
    await store.create("/bookies/a", b"")
    async with asyncio.timeout(10):
        while not caplog.records:
            await asyncio.sleep(0)
    assert "begins anew in 1 s: StorageFailed: the disk is gone" in caplog.text
    assert caplog.records[0].exc_info is None
    await directory.close()


def test_the_client_and_static_bookies_need_no_store_to_be_made() -> None:
    directory = StaticBookies(["h:1"])

    async def main() -> None:
        LedgerClient(
            StoredLedgers(HungStore()),
            LocalTransport({}),
            directory,
            FAST,
            random.Random(1),
            Bookies("a").clock,
        )

    asyncio.run(main())


class BrokenStore(MemoryMetadataStore):
    """A defect of the store, which no error class foresees."""

    broken = False

    async def get(self, path: str):  # type: ignore[no-untyped-def]
        if self.broken:
            raise RuntimeError("a defect")
        return await super().get(path)


@pytest.mark.parametrize("party", ["writer", "recovery"])
async def test_a_defect_of_the_metadata_store_is_told_not_waited_for(party: str) -> None:
    store = BrokenStore()
    bookies = Bookies("b1", "b2", "b3", metadata=store)
    client, other = bookies.client(NO_LAC), bookies.client(NO_LAC)
    writer = await client.create()
    if party == "writer":
        confirmed = Confirmations()
        await other.open(writer.ledger_id, recover=True)
        store.broken = True
        with pytest.raises(FinalError, match="a defect"):
            async with asyncio.timeout(1):
                await writer.close()
        assert writer.append(b"x", confirmed) == -1
    else:
        store.broken = True
        with pytest.raises((FinalError, RuntimeError), match="a defect"):
            async with asyncio.timeout(1):
                await other.open(writer.ledger_id, recover=True)
    await client.close()
    await other.close()


class LosingStore(MemoryMetadataStore):
    """Loses the answers to the next writes, one for each letter of `lose`.

    "d": it was done; "n": it was not; "l": it is done late, after the next call.
    """

    lose = ""
    unreadable = False  # and then the connection is gone for a while
    late: Callable[[], Awaitable[Any]] | None = None

    async def get(self, path: str) -> Versioned | None:
        if self.unreadable and not self.lose:
            raise ConnectionLost("no server answers")
        try:
            return await super().get(path)
        finally:
            await self._do_late()

    async def create(self, path: str, value: bytes, *, session: Any = None) -> int:
        return await self._answer(lambda: super(LosingStore, self).create(path, value, session=session))

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        return await self._answer(lambda: super(LosingStore, self).put(path, value, version=version))

    async def _answer(self, write: Callable[[], Awaitable[int]]) -> int:
        loss, self.lose = self.lose[:1], self.lose[1:]
        if loss == "l":
            self.late = write
        elif loss == "n":
            pass
        else:
            try:
                written = await write()
            finally:
                await self._do_late()
            if not loss:
                return written
        raise ConnectionLost("the answer was lost")

    async def _do_late(self) -> None:
        late, self.late = self.late, None
        if late is not None:
            with contextlib.suppress(MagnetarError):  # nobody hears of it
                await late()


@pytest.mark.parametrize("lose", ["d", "n", "l", "nd", "nn", "ln", "nl"])
@pytest.mark.parametrize("step", ["create", "ensemble change", "close", "recovery"])
async def test_rule_16_a_metadata_write_whose_answer_is_lost_is_looked_up(step: str, lose: str) -> None:
    """Whether it was done, was not, or is done later: nobody gives up, and nothing is done twice."""
    store = LosingStore()
    bookies = Bookies("b1", "b2", "b3", "b4", metadata=store)
    client, other = bookies.client(NO_LAC), bookies.client(NO_LAC)
    if step == "create":
        store.lose = lose
    writer = await client.create()
    confirmed = Confirmations()
    for n in range(3):
        writer.append(b"%d" % n, confirmed)
    await confirmed.count(3)
    if step == "ensemble change":
        bookies[writer.metadata.last_ensemble.bookies[0]].fail(BookieUnavailable("down"))
        store.lose = lose
        writer.append(b"3", confirmed)
        writer.append(b"4", confirmed)
        await confirmed.count(5)
        assert len(writer.metadata.ensembles) == 2
    if step == "recovery":
        store.lose = lose
        reader = await other.open(writer.ledger_id, recover=True)
        assert reader.last_add_confirmed == 2
    if step == "close":
        store.lose = lose
    metadata = await asyncio.wait_for(writer.close(), 1)
    assert store.lose == ""
    assert confirmed.errors == []
    assert metadata.last_entry == len(confirmed.ids) - 1
    assert metadata == await bookies.stored_metadata(writer.ledger_id)
    assert writer.ledger_id == 0
    assert await store.children("/ledgers/0000000000000000") == [ledger_path(0).rpartition("/")[2]]
    await client.close()
    await other.close()


@pytest.mark.parametrize("lost", ["ensemble change", "close"])
async def test_rule_16_a_metadata_write_that_cannot_be_looked_up(lost: str) -> None:
    """It may hold or not: the writer fails, and its next close finds out."""
    store = LosingStore()
    bookies = Bookies("b1", "b2", "b3", "b4", metadata=store)
    client = bookies.client(NO_LAC)
    writer = await client.create()
    confirmed = Confirmations()
    for n in range(3):
        writer.append(b"%d" % n, confirmed)
    await confirmed.count(3)
    store.lose, store.unreadable = "d", True
    if lost == "ensemble change":
        bookies[writer.metadata.last_ensemble.bookies[0]].fail(BookieUnavailable("down"))
        writer.append(b"3", confirmed)
        writer.append(b"4", confirmed)
        await confirmed.count(5)
        assert confirmed.errors == [ConnectionLost] * 2
    else:
        with pytest.raises(ConnectionLost, match="the answer was lost"):
            await writer.close()
    store.unreadable = False
    metadata = await asyncio.wait_for(writer.close(), 1)
    assert metadata.last_entry == 2
    assert metadata == await bookies.stored_metadata(writer.ledger_id)
    await client.close()


@pytest.mark.parametrize("lose", ["n", "d", "l"])
async def test_a_ledger_whose_making_is_not_known_is_deleted_when_the_store_is_back(lose: str) -> None:
    store = LosingStore()
    bookies = Bookies("b1", "b2", "b3", metadata=store)
    client = bookies.client(LedgerSettings(explicit_lac_interval_s=0, deletion_retry_s=0.01))
    store.lose, store.unreadable = lose, True
    with pytest.raises(ConnectionLost, match="the answer was lost"):
        await client.create()
    await asyncio.sleep(0.03)
    store.unreadable = False
    async with asyncio.timeout(5):
        while client._deletions._in_flight:
            await asyncio.sleep(0.001)
    assert await store.children("/ledgers/0000000000000000") == []
    await client.close()


async def test_rule_16_a_late_metadata_write_of_a_writer_that_gave_up_changes_nothing() -> None:
    """The write times out, and lands after somebody recovered the ledger: its version is old."""
    store = MemoryMetadataStore()
    bookies = Bookies("b1", "b2", "b3", "b4", metadata=store)
    client, other = bookies.client(NO_LAC), bookies.client(NO_LAC)
    writer = await client.create()
    confirmed = Confirmations()
    writer.append(b"0", confirmed)
    await confirmed.count(1)
    node = await store.get(ledger_path(writer.ledger_id))
    assert node is not None
    metadata = LedgerMetadata.decode(node.value, writer.ledger_id)
    late = metadata.with_ensemble(1, ("b1", "b2", "b4")).encode()
    recovered = await other.open(writer.ledger_id, recover=True)
    with pytest.raises(MagnetarError):
        await store.put(ledger_path(writer.ledger_id), late, version=node.version)
    assert (await bookies.stored_metadata(writer.ledger_id)) == recovered.metadata
    assert await writer.close() == recovered.metadata
    await client.close()
    await other.close()
