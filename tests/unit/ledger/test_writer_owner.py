"""What the owner of a writer may do at any moment: detach it, close its client, append, close and raise within callbacks."""

import asyncio
import contextlib
from typing import Any

import pytest

from magnetar.ledger import LedgerSettings, LedgerWriter
from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.metadata.ledgers import ledger_path
from magnetar.proto.errors import (
    AlreadyClosed,
    BookieUnavailable,
    ConnectionLost,
    LedgerClosed,
    LedgerFenced,
    MagnetarError,
    NotEnoughBookies,
)
from support.bookies import Bookies, Confirmations
from support.memory_metadata import MemoryMetadataStore

NO_LAC = LedgerSettings(explicit_lac_interval_s=0)


class GatedStore(MemoryMetadataStore):
    """Writes wait while `gate` is closed: they are applied when it opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.puts = 0

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        self.puts += 1
        await self.gate.wait()
        return await super().put(path, value, version=version)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def within_a_second(work: Any) -> Any:
    async with asyncio.timeout(1):
        return await work


async def test_close_ends_when_its_client_closes() -> None:
    """The metadata write that `close` waits for is cancelled: it hung for ever."""
    store = GatedStore()
    bookies = Bookies("b1", "b2", "b3", metadata=store)
    client = bookies.client(NO_LAC)
    writer = await client.create()
    store.gate.clear()
    closing = asyncio.create_task(writer.close())
    await turns()
    assert store.puts == 1
    await client.close()
    with pytest.raises(AlreadyClosed, match="left open"):
        await within_a_second(closing)
    store.gate.set()
    assert not (await bookies.stored_metadata(writer.ledger_id)).closed


@pytest.mark.parametrize("when", ["idle", "adds in flight", "changing the ensemble", "closing", "failed"])
async def test_a_detached_writer_does_nothing_any_more(when: str) -> None:
    """It changed the ensemble in the metadata when the transport failed its adds, in a task that nobody waited for."""
    store = GatedStore()
    bookies = Bookies("b1", "b2", "b3", "b4", "b5", metadata=store)
    client = bookies.client(NO_LAC)
    writer = await client.create()
    first, second, _ = writer.metadata.last_ensemble.bookies
    confirmed = Confirmations()
    closing = None
    if when != "idle":
        for bookie in bookies.values():
            bookie.hold()
        writer.append(b"x", confirmed)
    if when == "changing the ensemble":
        store.gate.clear()
        writer._on_added(first, writer.ledger_id, 0, ConnectionLost.code)
        await turns()
        assert store.puts == 1
    if when == "closing":
        closing = asyncio.create_task(writer.close())
        await turns()
    if when == "failed":
        bookies["b1"].calls.clear()
        writer._on_added(first, writer.ledger_id, 0, LedgerFenced.code)
        assert confirmed.errors == [LedgerFenced]
    heard = list(confirmed.heard)
    puts = store.puts
    writer.detach()
    await writer.ended()
    adds = sum(bookie.adds for bookie in bookies.values())
    assert writer.append(b"late", confirmed) == -1
    for code in (0, ConnectionLost.code, LedgerFenced.code):
        writer._on_added(second, writer.ledger_id, 0, code)
    for bookie in bookies.values():
        bookie.release()
    store.gate.set()
    await turns()
    assert confirmed.heard[: len(heard)] == heard
    assert [type(error) for _, _, error in confirmed.heard[len(heard) :]] == [AlreadyClosed]
    assert sum(bookie.adds for bookie in bookies.values()) == adds
    assert store.puts == puts
    assert not writer._tasks
    node = await store.get(ledger_path(writer.ledger_id))
    assert node is not None
    assert node.version == 0, "left as it was"
    for asked in (closing, writer.close(), writer.close()):
        if asked is not None:
            with pytest.raises(AlreadyClosed):
                await within_a_second(asked)
    writer.detach()  # twice is once
    recovered = await bookies.client(NO_LAC).open(writer.ledger_id, recover=True)
    assert recovered.closed
    await client.close()


async def test_detaching_a_closed_writer_leaves_its_result() -> None:
    bookies = Bookies("b1", "b2", "b3")
    client = bookies.client(NO_LAC)
    writer = await client.create()
    metadata = await writer.close()
    writer.detach()
    assert await within_a_second(writer.close()) == metadata
    await client.close()


async def appending(writer: LedgerWriter, confirmed: Confirmations, left: list[int]) -> None:
    """Each confirmation appends the next entry, from within the callback."""

    def again(entry_id: int, entry: bytes, error: MagnetarError | None) -> None:
        confirmed(entry_id, entry, error)
        if left[0]:
            left[0] -= 1
            writer.append(b"again", again)

    writer.append(b"first", again)


@pytest.mark.parametrize("kind", ["nothing fails", "a bookie fails", "all fail"])
async def test_appends_from_within_confirm_callbacks_keep_their_order(kind: str) -> None:
    bookies = Bookies("b1", "b2", "b3", "b4")
    client = bookies.client(NO_LAC)
    writer = await client.create()
    confirmed = Confirmations()
    left = [20]
    await appending(writer, confirmed, left)
    await appending(writer, confirmed, left)
    await confirmed.count(8)
    for name in writer.metadata.last_ensemble.bookies[: {"a bookie fails": 1, "all fail": 3}.get(kind, 0)]:
        bookies[name].fail(BookieUnavailable("down"))
    await confirmed.count(22)
    assert confirmed.ids == list(range(len(confirmed.ids)))
    if kind == "all fail":
        assert set(confirmed.errors) == {NotEnoughBookies}
        assert confirmed.heard[-1][0] == -1, "what is appended after a failure has no id"
    else:
        assert len(confirmed.ids) == 22
    for bookie in bookies.values():
        bookie.fail(None)
    metadata = await writer.close()
    assert metadata.last_entry == len(confirmed.ids) - 1
    await client.close()


async def test_close_and_append_from_within_a_confirm_callback() -> None:
    bookies = Bookies("b1", "b2", "b3")
    client = bookies.client(NO_LAC)
    writer = await client.create()
    confirmed = Confirmations()
    closings: list[asyncio.Task[LedgerMetadata]] = []

    def close(entry_id: int, entry: bytes, error: MagnetarError | None) -> None:
        confirmed(entry_id, entry, error)
        # Begins the close in this very call.
        task = writer.close()
        with contextlib.suppress(StopIteration):
            task.send(None)
        task.close()
        closings.append(asyncio.create_task(writer.close()))
        assert writer.append(b"too late", confirmed) == -1

    writer.append(b"0", close)
    writer.append(b"1", confirmed)
    writer.append(b"2", confirmed)
    await confirmed.count(4)
    metadata = await within_a_second(closings[0])
    assert metadata.last_entry == 2
    assert confirmed.ids == [0, 1, 2]
    assert confirmed.errors == [LedgerClosed]
    assert await writer.close() == metadata
    await client.close()


@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_close_while_the_ensemble_changes_and_callbacks_raise() -> None:
    store = GatedStore()
    bookies = Bookies("b1", "b2", "b3", "b4", metadata=store)
    client = bookies.client(NO_LAC)
    writer = await client.create()
    heard: list[int] = []
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))

    def raises(entry_id: int, _entry: bytes, _error: MagnetarError | None) -> None:
        heard.append(entry_id)
        raise RuntimeError("a defect of the owner")

    down = writer.metadata.last_ensemble.bookies[0]
    bookies[down].fail(BookieUnavailable("down"))
    store.gate.clear()
    for _ in range(5):
        writer.append(b"x", raises)
    await turns()
    closing = asyncio.create_task(writer.close())
    await turns()
    assert heard == [], "nothing is confirmed across a change that is not in the metadata"
    store.gate.set()
    metadata = await within_a_second(closing)
    assert heard == list(range(5))
    assert len(problems) == 5
    assert metadata.last_entry == 4
    assert down not in metadata.last_ensemble.bookies
    await client.close()
