"""Recovery when much goes wrong at once: other clients, answers of an earlier attempt, its caller gone."""

import asyncio

import pytest

from magnetar.ledger import LedgerSettings
from magnetar.ledger.core.events import (
    EntryRead,
    LastConfirmedRead,
    MetadataFound,
)
from magnetar.ledger.core.last_confirmed import LastConfirmedQuorum
from magnetar.ledger.core.metadata import LedgerMetadata, LedgerState
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.core.recovery import RecoveryCore, RecoveryState
from magnetar.metadata.memory import MemoryMetadataStore
from magnetar.metadata.paths import ledger_path
from magnetar.proto.errors import (
    AlreadyClosed,
    ConnectionLost,
    EntryNotFound,
    FinalError,
    LedgerNotFound,
)
from magnetar.proto.ledger_entry import encode_ledger_entry
from support.bookies import Bookies, Confirmations

NO_LAC = LedgerSettings(explicit_lac_interval_s=0)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def stored(bookies: Bookies, ledger_id: int) -> LedgerMetadata:
    node = await bookies.metadata.get(ledger_path(ledger_id))
    assert node is not None
    return LedgerMetadata.decode(node.value, ledger_id)


# --- answers to questions of an earlier attempt ------------------------------------------------------------------------


def test_rule_13_an_answer_of_a_bookie_that_is_not_in_the_ensemble_counts_for_nothing() -> None:
    """A recovery that starts over with another ensemble hears late answers of the old one: it ended with a ValueError."""
    quorum = LastConfirmedQuorum(Striping(3, 3, 2), ("a", "b", "c"))
    quorum.answered("x", 99, 0)
    quorum.answered("y", -1, ConnectionLost.code)
    quorum.answered("z", -1, EntryNotFound.code)
    assert (quorum.covered, quorum.complete, quorum.last_add_confirmed) == (False, False, -1)
    assert quorum.silent == ("a", "b", "c")


def test_rule_13_a_bookie_that_answers_twice_is_one_bookie() -> None:
    quorum = LastConfirmedQuorum(Striping(3, 3, 2), ("a", "b", "c"))
    quorum.answered("a", -1, ConnectionLost.code)
    quorum.answered("a", 4, 0)
    quorum.answered("b", -1, ConnectionLost.code)
    assert not quorum.complete, "c has not answered"
    quorum.answered("c", 3, 0)
    assert quorum.covered
    assert quorum.last_add_confirmed == 4


def state(core: RecoveryCore) -> RecoveryState:
    return core.state


def started_over(last: tuple[str, ...]) -> RecoveryCore:
    """A recovery that lost its closing compare-and-set to a change of the ensemble, and reads entries again."""
    striping = Striping(3, 3, 2)
    before = LedgerMetadata.create(striping, ("a", "b", "c"), 0, {}).in_recovery()
    core = RecoveryCore(7, before, 1)
    core.begin()
    for bookie in ("a", "b"):
        core.handle(LastConfirmedRead(bookie, -1, LedgerNotFound.code))
    for bookie in ("a", "b"):
        core.handle(EntryRead(bookie, 0, b"", 0, EntryNotFound.code))
    assert state(core) is RecoveryState.CLOSING
    after = LedgerMetadata.create(striping, last, 0, {}).in_recovery()
    core.handle(MetadataFound(after, 2))
    assert state(core) is RecoveryState.FENCING
    return core


def test_rule_13_late_fences_of_an_earlier_attempt() -> None:
    core = started_over(("a", "d", "e"))
    assert core.handle(LastConfirmedRead("c", -1, ConnectionLost.code)) == []
    assert core.handle(LastConfirmedRead("c", 5, 0)) == []
    core.check()
    for bookie in ("a", "d"):
        core.handle(LastConfirmedRead(bookie, -1, 0))
    assert state(core) is RecoveryState.ENTRIES


def test_rule_14_negatives_of_an_earlier_attempt_count_only_within_the_write_set() -> None:
    """Two bookies that left the ensemble said no: that says nothing about the bookies of now."""
    core = started_over(("a", "d", "e"))
    for bookie in ("a", "d"):
        core.handle(LastConfirmedRead(bookie, -1, 0))
    assert core.handle(EntryRead("b", 0, b"", 0, EntryNotFound.code)) == []
    assert core.handle(EntryRead("c", 0, b"", 0, EntryNotFound.code)) == []
    core.check()
    assert state(core) is RecoveryState.ENTRIES
    core.handle(EntryRead("a", 0, b"", 0, EntryNotFound.code))
    entry = encode_ledger_entry(7, 0, -1, 1, b"x")
    core.handle(EntryRead("d", 0, entry, 1, 0))
    core.check()
    assert state(core) is RecoveryState.ENTRIES, "it exists"


def test_rule_14_a_late_negative_for_another_write_set_of_a_striped_ledger() -> None:
    """E = 3, Qw = 2: entry 0 is on a and b. What c says about it is no answer to anything."""
    metadata = LedgerMetadata.create(Striping(3, 2, 2), ("a", "b", "c"), 0, {}).in_recovery()
    core = RecoveryCore(7, metadata, 1)
    core.begin()
    for bookie in ("a", "b", "c"):
        core.handle(LastConfirmedRead(bookie, -1, 0))
    assert core.handle(EntryRead("c", 0, b"", 0, EntryNotFound.code)) == []
    assert state(core) is RecoveryState.ENTRIES


# --- several clients at once -------------------------------------------------------------------------------------------


async def test_open_with_recovery_ends_when_its_client_closes() -> None:
    """It ended as if whoever called had been cancelled."""
    bookies = Bookies("b1", "b2", "b3")
    client, other = bookies.client(NO_LAC), bookies.client(NO_LAC)
    writer = await client.create()
    for bookie in bookies.values():
        bookie.hold()
    opening = [asyncio.create_task(other.open(writer.ledger_id, recover=True)) for _ in range(3)]
    await turns()
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
    bookies = Bookies("b1", "b2", "b3", metadata=SlowReads())
    client, other = bookies.client(NO_LAC), bookies.client(NO_LAC)
    writer = await client.create()
    opening = asyncio.create_task(other.open(writer.ledger_id, recover=True))
    await asyncio.sleep(0)
    await other.close()
    with pytest.raises(AlreadyClosed):
        await opening
    assert not other._recoveries
    assert (await stored(bookies, writer.ledger_id)).state is LedgerState.OPEN
    await client.close()


class SlowReads(MemoryMetadataStore):
    async def get(self, path: str):  # type: ignore[no-untyped-def]
        await turns(5)
        return await super().get(path)


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
