"""Calls that are cut, because they are cancelled or their client closes.

That is after k turns of the loop, for every k until the call ends by itself.

Whatever it left half done, the next one finds a ledger that it can recover, with every confirmed entry, and no task is left.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import pytest

from magnetar.ledger import LedgerClient, LedgerReader, LedgerSettings, LedgerWriter
from magnetar.ledger.core.metadata import LedgerMetadata, LedgerState
from magnetar.metadata.ledgers import StoredLedgers, ledger_path
from magnetar.metadata.store import Operation, Versioned
from magnetar.proto.errors import AlreadyClosed, BookieUnavailable, LedgerNotFound, MagnetarError, QuorumLost
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from support.bookies import Bookies, Confirmations
from support.memory_metadata import MemoryMetadataStore

NO_LAC = LedgerSettings(explicit_lac_interval_s=0)
DOWN = BookieUnavailable("down")
MAX_TURNS = 200


class SlowStore(MemoryMetadataStore):
    """Each call takes turns before and after it is applied."""

    async def get(self, path: str) -> Versioned | None:
        await turns(2)
        found = await super().get(path)
        await turns(2)
        return found

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        await turns(2)
        written = await super().put(path, value, version=version)
        await turns(2)
        return written

    async def commit(self, operations: Sequence[Operation]) -> None:
        await turns(2)
        await super().commit(operations)
        await turns(2)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def cut(work: Coroutine[Any, Any, Any], after: int) -> bool:
    """Cancels `work` after so many turns. True if it had ended."""
    task = asyncio.create_task(work)
    await turns(after)
    if task.done():
        task.result()
        return True
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled(), "a cancellation is never swallowed"
    return False


async def at_every_point(play: Callable[[int], Awaitable[bool]], step: int = 1) -> int:
    """Plays with every number of turns until one says that the call ended by itself."""
    for after in range(0, MAX_TURNS, step):
        before = asyncio.all_tasks()
        ended = await play(after)
        left = asyncio.all_tasks() - before
        assert not left, f"cancelled after {after} turns: tasks are left: {left}"
        if ended:
            return after
    raise AssertionError(f"it did not end within {MAX_TURNS} turns")


async def damaged(client: LedgerClient, bookies: Bookies) -> tuple[LedgerWriter, Confirmations]:
    """A writer with two ensembles, seven confirmed entries, and some that reached one bookie only."""
    writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
    confirmed = Confirmations()
    for n in range(3):
        writer.append(b"%d" % n, confirmed)
    await confirmed.count(3)
    first = writer.metadata.last_ensemble.bookies[0]
    bookies[first].fail(DOWN)
    for n in range(3, 7):
        writer.append(b"%d" % n, confirmed)
    await confirmed.count(7)
    while len(writer.metadata.ensembles) < 2 or not writer._core.sending:
        await asyncio.sleep(0)
    _, second, third = writer.metadata.last_ensemble.bookies
    bookies[second].fail(DOWN)
    bookies[third].fail(DOWN)
    writer.append(b"7", confirmed)
    writer.append(b"8", confirmed)
    writer.detach()
    await writer.ended()
    for bookie in bookies.values():
        bookie.fail(None)
    assert confirmed.ids == list(range(7))
    return writer, confirmed


async def judge(bookies: Bookies, ledger_id: int, confirmed: list[int]) -> LedgerMetadata:
    """Recovers with a client of its own, and reads everything."""
    client = bookies.client(NO_LAC)
    reader = await client.open(ledger_id, recover=True)
    assert reader.closed
    assert reader.last_add_confirmed >= len(confirmed) - 1, "truncated"
    if reader.last_add_confirmed >= 0:
        entries = await reader.read(0, reader.last_add_confirmed)
        payloads = [entry[LEDGER_ENTRY_HEADER_BYTES:] for entry in entries]
        assert payloads == [b"%d" % n for n in range(len(entries))]
        assert reader.metadata.length == sum(map(len, payloads))
    await client.close()
    return reader.metadata


@pytest.mark.parametrize("end", ["the caller is cancelled", "the client is closed"])
@pytest.mark.parametrize("lost", [0, 1])
async def test_rule_14_a_recovery_that_is_cut_anywhere(end: str, lost: int) -> None:
    async def play(after: int) -> bool:
        bookies = Bookies("b1", "b2", "b3", "b4", "b5", metadata=SlowStore())
        client, other = bookies.client(NO_LAC), bookies.client(NO_LAC)
        writer, confirmed = await damaged(client, bookies)
        for name in writer.metadata.last_ensemble.bookies[:lost]:
            bookies[name].fail(DOWN)
        if end == "the client is closed":
            task = asyncio.create_task(other.open(writer.ledger_id, recover=True))
            await turns(after)
            ended = task.done()
            await other.close()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(result, LedgerReader | AlreadyClosed), repr(result)
        else:
            ended = await cut(other.open(writer.ledger_id, recover=True), after)
            await other.close()
        metadata = await judge(bookies, writer.ledger_id, confirmed.ids)
        if not lost:
            assert metadata.last_entry == 8, "one bookie has them, and is asked"
        await client.close()
        return ended

    assert await at_every_point(play, 1 + lost) > 20


async def test_rule_16_recoveries_that_are_cut_while_another_one_goes_on() -> None:
    """One is cut at every point; the other one, of another client, began a few turns later and must not notice."""

    async def play(after: int) -> bool:
        bookies = Bookies("b1", "b2", "b3", "b4", "b5", metadata=SlowStore())
        client, first, second = (bookies.client(NO_LAC) for _ in range(3))
        writer, confirmed = await damaged(client, bookies)

        async def later() -> LedgerMetadata:
            await turns(3 + after % 5)
            return (await second.open(writer.ledger_id, recover=True)).metadata

        other = asyncio.create_task(later())
        ended = await cut(first.open(writer.ledger_id, recover=True), after)
        await first.close()
        result = await other
        assert result == await judge(bookies, writer.ledger_id, confirmed.ids)
        await client.close()
        await second.close()
        return ended

    await at_every_point(play)


async def test_rule_16_a_writer_that_comes_back_during_a_recovery_that_is_cut() -> None:
    """The writer goes on appending, and closes, while a recovery is cut: both ends agree, or the writer is told."""

    async def play(after: int) -> bool:
        bookies = Bookies("b1", "b2", "b3", "b4", "b5", metadata=SlowStore())
        client, other = bookies.client(NO_LAC), bookies.client(NO_LAC)
        writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
        confirmed = Confirmations()
        for n in range(3):
            writer.append(b"%d" % n, confirmed)
        await confirmed.count(3)

        async def write_on() -> LedgerMetadata | MagnetarError:
            for n in range(3, 30):
                await turns(2)
                if writer.append(b"%d" % n, confirmed) < 0:
                    break
                if n == 8:
                    bookies[writer.metadata.last_ensemble.bookies[0]].fail(DOWN)
            try:
                return await writer.close()
            except MagnetarError as error:
                return error

        writing = asyncio.create_task(write_on())
        ended = await cut(other.open(writer.ledger_id, recover=True), after)
        closed = await writing
        await other.close()
        await turns(5)  # answers to appends that were refused
        assert confirmed.ids == list(range(len(confirmed.ids)))
        metadata = await judge(bookies, writer.ledger_id, confirmed.ids)
        if isinstance(closed, LedgerMetadata):
            assert (closed.last_entry, closed.length) == (metadata.last_entry, metadata.length)
        await client.close()
        return ended

    await at_every_point(play)


@pytest.mark.parametrize("failing", [False, True])
async def test_a_close_that_is_cut_anywhere_goes_on(failing: bool) -> None:
    async def play(after: int) -> bool:
        bookies = Bookies("b1", "b2", "b3", "b4", metadata=SlowStore())
        client = bookies.client(NO_LAC)
        writer = await client.create()
        confirmed = Confirmations()
        if failing:
            bookies[writer.metadata.last_ensemble.bookies[1]].fail(DOWN)
        for n in range(5):
            writer.append(b"%d" % n, confirmed)
        ended = await cut(writer.close(), after)
        metadata = await writer.close()
        assert confirmed.ids == list(range(5))
        assert metadata.last_entry == 4
        assert metadata == await judge(bookies, writer.ledger_id, confirmed.ids)
        await client.close()
        return ended

    assert await at_every_point(play) > 3


@pytest.mark.parametrize("deferred", [False, True])
async def test_a_client_that_is_closed_anywhere_in_the_life_of_a_ledger_leaves_what_was_confirmed(
    deferred: bool,
) -> None:
    """A stop of the process, in order: adds in flight, an ensemble change and a close are cut."""

    async def play(after: int) -> bool:
        bookies = Bookies("b1", "b2", "b3", "b4", metadata=SlowStore())
        client = bookies.client(NO_LAC)
        writer = await client.create(deferred_sync=deferred)
        confirmed = Confirmations()

        async def live() -> None:
            bookies[writer.metadata.last_ensemble.bookies[1]].fail(DOWN)
            for n in range(5):
                writer.append(b"%d" % n, confirmed)
                await turns(1)
            await writer.force()
            assert writer.last_add_confirmed == 4
            await writer.close()

        living = asyncio.create_task(live())
        await turns(after)
        ended = living.done()
        await client.close()
        heard = len(confirmed.ids)
        durable = list(range(writer.last_add_confirmed + 1))
        async with asyncio.timeout(5):
            (result,) = await asyncio.gather(living, return_exceptions=True)
        assert result is None or isinstance(result, AlreadyClosed), repr(result)
        assert len(confirmed.ids) == heard, "nobody is called back after detaching"
        await judge(bookies, writer.ledger_id, durable if deferred else confirmed.ids)
        return ended

    assert await at_every_point(play) > 10


async def test_a_creation_and_a_deletion_that_are_cut_anywhere() -> None:
    async def create(after: int) -> bool:
        bookies = Bookies("b1", "b2", "b3", metadata=SlowStore())
        client = bookies.client(NO_LAC)
        ended = await cut(client.create(), after)
        await client.close()
        async for page in StoredLedgers(bookies.metadata).pages():
            for ledger_id in page:
                await judge(bookies, ledger_id, [])  # an orphan is recovered like any other
        return ended

    async def delete(after: int) -> bool:
        bookies = Bookies("b1", "b2", "b3", metadata=SlowStore())
        client = bookies.client(NO_LAC)
        writer = await client.create()
        confirmed = Confirmations()
        writer.append(b"0", confirmed)
        await confirmed.count(1)
        await writer.close()
        ended = await cut(client.delete(writer.ledger_id), after)
        if await bookies.metadata.get(ledger_path(writer.ledger_id)) is None:
            with pytest.raises(LedgerNotFound):
                await client.open(writer.ledger_id, recover=True)
        else:
            await judge(bookies, writer.ledger_id, [0])
        await client.close()
        return ended

    await at_every_point(create)
    await at_every_point(delete)


@pytest.mark.parametrize("deleted", ["by another client", "by the recovering client"])
async def test_a_ledger_that_is_deleted_anywhere_during_its_recovery(deleted: str) -> None:
    """Never a result that is not in the metadata: the recovery ends with it, or with LedgerNotFound."""

    async def play(after: int) -> bool:
        bookies = Bookies("b1", "b2", "b3", "b4", "b5", metadata=SlowStore())
        client, other = bookies.client(NO_LAC), bookies.client(NO_LAC)
        writer, _ = await damaged(client, bookies)
        opening = asyncio.create_task(other.open(writer.ledger_id, recover=True))
        await turns(after)
        ended = opening.done()
        await (client if deleted == "by another client" else other).delete(writer.ledger_id)
        (result,) = await asyncio.gather(opening, return_exceptions=True)
        if isinstance(result, BaseException):
            # QuorumLost: its bookies were told before the recovery looked at the metadata again.
            assert isinstance(result, LedgerNotFound | QuorumLost), repr(result)
            assert not ended
        else:
            assert result.closed
            assert result.last_add_confirmed >= 6, "what it returns was never truncated by the deletion"
        with pytest.raises(LedgerNotFound):
            await client.open(writer.ledger_id, recover=False)
        await client.close()
        await other.close()
        return ended

    await at_every_point(play)


@pytest.mark.parametrize("shape", [(3, 3, 2), (3, 2, 2), (5, 3, 2)])
async def test_a_read_that_is_cut_anywhere(shape: tuple[int, int, int]) -> None:
    bookies = Bookies("b1", "b2", "b3", "b4", "b5")
    client = bookies.client(NO_LAC)
    e, qw, qa = shape
    writer = await client.create(ensemble_size=e, write_quorum=qw, ack_quorum=qa)
    confirmed = Confirmations()
    for n in range(40):
        writer.append(b"%d" % n, confirmed)
    await confirmed.count(40)
    await writer.close()
    bookies[writer.metadata.last_ensemble.bookies[0]].fail(DOWN)
    reader = await client.open(writer.ledger_id, recover=False)

    async def play(after: int) -> bool:
        ended = await cut(reader.read(0, 39), after)
        entries = await reader.read(0, 39)
        assert [entry[LEDGER_ENTRY_HEADER_BYTES:] for entry in entries] == [b"%d" % n for n in range(40)]
        return ended

    await at_every_point(play)
    await client.close()


async def test_following_a_ledger_and_being_cut_anywhere_loses_and_repeats_nothing() -> None:
    """Not even the news that the ledger was closed: that would come with the next poll only, seconds later."""

    async def play(after: int) -> bool:
        bookies = Bookies("b1", "b2", "b3", metadata=SlowStore())
        client, other = bookies.client(NO_LAC), bookies.client(NO_LAC)
        writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
        confirmed = Confirmations()
        for n in range(4):
            writer.append(b"%d" % n, confirmed)
            await confirmed.count(n + 1)
        reader = await other.open(writer.ledger_id, recover=False)
        came: list[bytes] = []
        loop = asyncio.get_running_loop()
        async with reader.follow(0) as tail:

            async def follow() -> None:
                while not tail.ended:
                    came.extend(await tail.next())

            while len(came) < 3:
                came.extend(await tail.next())
            task = asyncio.create_task(follow())
            await turns(10)
            await writer.close()
            await turns(after)
            ended = task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            began = loop.time()
            async with asyncio.timeout(20):
                await follow()
            assert loop.time() - began < 1, f"cut after {after} turns: the close was forgotten"
        assert [entry[LEDGER_ENTRY_HEADER_BYTES:] for entry in came] == [b"%d" % n for n in range(4)]
        await client.close()
        await other.close()
        return ended

    await at_every_point(play)


async def test_open_with_recovery_ends_when_its_client_closes() -> None:
    """It ended as if whoever called had been cancelled."""
    bookies = Bookies("b1", "b2", "b3")
    client, other = bookies.client(NO_LAC), bookies.client(NO_LAC)
    writer = await client.create()
    for bookie in bookies.values():
        bookie.hold()
    opening = [asyncio.create_task(other.open(writer.ledger_id, recover=True)) for _ in range(3)]
    await turns(20)
    opening[2].cancel()
    await turns(3)
    assert opening[2].cancelled()
    await other.close()
    for task in opening[:2]:
        with pytest.raises(AlreadyClosed):
            await task
    await client.close()


async def test_no_recovery_begins_after_close() -> None:
    """The client closed while the metadata was read: a task of nobody recovered the ledger."""
    bookies = Bookies("b1", "b2", "b3", metadata=SlowStore())
    client, other = bookies.client(NO_LAC), bookies.client(NO_LAC)
    writer = await client.create()
    opening = asyncio.create_task(other.open(writer.ledger_id, recover=True))
    await asyncio.sleep(0)
    await other.close()
    with pytest.raises(AlreadyClosed):
        await opening
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert (await bookies.stored_metadata(writer.ledger_id)).state is LedgerState.OPEN
    await client.close()
