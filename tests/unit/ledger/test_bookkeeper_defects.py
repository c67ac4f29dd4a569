"""Defects that BookKeeper had in this protocol (CORRECTNESS.md), each as the smallest play that shows it."""

import asyncio
from pathlib import Path

import pytest

from magnetar.ledger import LedgerSettings
from magnetar.ledger.core.events import (
    AddFailed,
    AddStored,
    BookiesChosen,
    ChooseBookies,
    Confirm,
    Event,
    Failed,
    Instruction,
    LastConfirmedRead,
    MetadataFound,
    MetadataWritten,
    SendAdds,
    WriteMetadata,
)
from magnetar.ledger.core.metadata import Ensemble, LedgerMetadata
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.core.recovery import RecoveryCore, RecoveryState
from magnetar.ledger.core.writer import WriterCore, WriterState
from magnetar.metadata.ledgers import ledger_path
from magnetar.proto.errors import (
    BookieReadOnly,
    BookieUnavailable,
    ConnectionLost,
    EntryDamaged,
    EntryNotFound,
    LedgerFenced,
    LedgerNotFound,
    QuorumLost,
    UnknownLedgerState,
)
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES, encode_ledger_entry
from support.bookie_kit import add, crash, open_inline
from support.bookies import Bookies, Confirmations
from support.index_model import ModelStorage
from support.ledger_scenario import entry_read

NO_LAC = LedgerSettings(explicit_lac_interval_s=0)
LEDGER = 7


def writer_of(shape: tuple[int, int, int], bookies: tuple[str, ...]) -> WriterCore:
    return WriterCore(LEDGER, LedgerMetadata.create(Striping(*shape), bookies, 0, {}), 0)


def stored(entry_id: int) -> bytes:
    return encode_ledger_entry(LEDGER, entry_id, -1, 1, b"x")


def tell(core: WriterCore, event: Event) -> list[Instruction]:
    instructions = core.handle(event)
    core.check()
    return instructions


def state(core: WriterCore | RecoveryCore) -> WriterState | RecoveryState:
    return core.state


def sent(instructions: list[Instruction]) -> dict[str, list[int]]:
    return {i.bookie: [e for e, _ in i.adds] for i in instructions if isinstance(i, SendAdds)}


def confirmed(instructions: list[Instruction]) -> list[int]:
    return [
        entry_id
        for i in instructions
        if isinstance(i, Confirm) and i.error is None
        for entry_id in range(i.first_entry, i.first_entry + len(i.adds))
    ]


# --- ensemble changes --------------------------------------------------------------------------------------------------


def test_defect_1591_bookies_that_fail_one_by_one_while_the_store_is_silent_confirm_nothing() -> None:
    """3/3/2: each failure came after its entry's quorum, so each was replaced in memory, and entries of a, b, c's successors
    were confirmed that nobody else could find."""
    core = writer_of((3, 3, 2), ("a", "b", "c"))
    core.append(b"0", None)
    core.stored("b", 0)
    assert len(core.stored("c", 0)) == 1, "Qa of Qw"
    assert isinstance(tell(core, AddFailed("a", 0, ConnectionLost.code))[0], ChooseBookies)
    (write,) = tell(core, BookiesChosen({0: "d"}))
    assert isinstance(write, WriteMetadata)
    for entry_id in (1, 2):
        assert core.append(b"x", None)[1] == (), "held: the change is not in the metadata"
        for bookie in ("b", "c", "d"):
            assert core.stored(bookie, entry_id) == ()
    for bookie in ("b", "c"):
        assert tell(core, AddFailed(bookie, 0, ConnectionLost.code)) == [], "queued (rule 18)"
    assert core.last_add_confirmed == 0
    instructions = tell(core, MetadataWritten(1))
    assert [type(i) for i in instructions] == [ChooseBookies], "looked at before anything is sent"
    (write,) = tell(core, BookiesChosen({1: "e", 2: "f"}))
    assert isinstance(write, WriteMetadata)
    assert [e.first_entry for e in write.metadata.ensembles] == [0, 1], (
        "replaces the one recorded for that entry (rule 17)"
    )
    instructions = tell(core, MetadataWritten(2))
    assert sent(instructions) == {"d": [1, 2], "e": [1, 2], "f": [1, 2]}
    assert confirmed(instructions) == []


def test_defect_4651_a_late_answer_of_a_replaced_bookie_counts_for_nobody() -> None:
    core = writer_of((2, 2, 2), ("a", "b"))
    core.append(b"0", None)
    core.stored("b", 0)
    tell(core, AddFailed("a", 0, ConnectionLost.code))
    tell(core, BookiesChosen({0: "c"}))
    assert core.stored("a", 0) == (), "in flight when it was given up"
    assert sent(tell(core, MetadataWritten(1))) == {"c": [0]}
    assert core.stored("a", 0) == ()
    assert core.last_add_confirmed == -1
    assert tell(core, AddFailed("a", 0, ConnectionLost.code)) == [], "nor against its successor"
    assert len(core.stored("c", 0)) == 1


def test_defect_4097_answers_that_complete_an_entry_during_a_change_wait_for_the_metadata() -> None:
    """And are not forgotten: nobody sends them again."""
    core = writer_of((3, 2, 2), ("a", "b", "c"))
    for _ in range(3):
        core.append(b"x", None)
    # Entry 0 is on a and b, 1 on b and c, 2 on c and a.
    tell(core, AddFailed("c", 1, ConnectionLost.code))
    tell(core, BookiesChosen({2: "d"}))
    assert core.stored("a", 0) == ()
    assert core.stored("b", 0) == ()
    assert core.stored("b", 1) == ()
    assert core.last_add_confirmed == -1
    instructions = tell(core, MetadataWritten(1))
    assert confirmed(instructions) == [0], "whose write set has nothing to do with the change"
    assert sent(instructions) == {"d": [1, 2]}
    assert core.metadata.last_ensemble.first_entry == 0
    assert len(core.stored("d", 1)) == 1


def test_rule_17_the_new_ensemble_starts_at_lac_plus_one_whatever_was_acknowledged_behind_it() -> None:
    """Entry 1 has all its answers; entry 0 has not. A reader must find both in the new ensemble."""
    core = writer_of((3, 3, 2), ("a", "b", "c"))
    for _ in range(2):
        core.append(b"x", None)
    for bookie in ("a", "b", "c"):
        assert core.stored(bookie, 1) == ()
    tell(core, AddFailed("a", 0, ConnectionLost.code))
    (write,) = tell(core, BookiesChosen({0: "d"}))
    assert isinstance(write, WriteMetadata)
    assert write.metadata.last_ensemble.first_entry == 0
    assert sent(tell(core, MetadataWritten(1))) == {"d": [0, 1]}
    assert core.stored("b", 0) == ()
    assert len(core.stored("c", 0)) == 2


def test_rule_18_a_replacement_that_fails_at_once_is_replaced_and_its_successor_gets_everything() -> None:
    core = writer_of((2, 2, 2), ("a", "b"))
    for _ in range(3):
        core.append(b"x", None)
    for entry_id in range(3):
        core.stored("b", entry_id)
    tell(core, AddFailed("a", 0, ConnectionLost.code))
    tell(core, BookiesChosen({0: "c"}))
    assert sent(tell(core, MetadataWritten(1))) == {"c": [0, 1, 2]}
    assert len(core.stored("c", 0)) == 1
    choose = tell(core, AddFailed("c", 1, ConnectionLost.code))[0]
    assert isinstance(choose, ChooseBookies)
    assert set(choose.exclude) == {"a", "b", "c"}, "a bookie that failed is not chosen again"
    tell(core, BookiesChosen({0: "d"}))
    assert sent(tell(core, MetadataWritten(2))) == {"d": [1, 2]}
    assert [e.first_entry for e in core.metadata.ensembles] == [0, 1]
    assert core.stored("c", 2) == ()
    assert len(core.stored("d", 1)) == 1
    assert len(core.stored("d", 2)) == 1


def test_rule_16_a_writer_that_finds_its_own_change_after_a_conflict_goes_on() -> None:
    """The store applied the write, lost the answer, and was asked again by its client: a conflict with oneself."""
    core = writer_of((2, 2, 2), ("a", "b"))
    core.append(b"0", None)
    tell(core, AddFailed("a", 0, ConnectionLost.code))
    (write,) = tell(core, BookiesChosen({0: "c"}))
    assert isinstance(write, WriteMetadata)
    assert sent(tell(core, MetadataFound(write.metadata, 1))) == {"c": [0]}
    assert state(core) is WriterState.WRITING
    assert core.version == 1


# --- recovery ----------------------------------------------------------------------------------------------------------


def test_defect_2615_an_empty_last_ensemble_recovers_nothing_of_the_ones_before() -> None:
    """Its bookies know no LAC. An ensemble change on the way tried to begin at entry 0, before the last ensemble."""
    metadata = LedgerMetadata.create(Striping(2, 2, 2), ("a", "b"), 0, {})
    metadata = metadata.with_ensemble(1000, ("b", "c")).with_ensemble(2000, ("d", "e")).in_recovery()
    core = RecoveryCore(LEDGER, metadata, 3)
    core.begin()
    core.handle(LastConfirmedRead("d", -1, LedgerNotFound.code))
    core.handle(LastConfirmedRead("e", -1, 0))
    core.check()
    base = encode_ledger_entry(LEDGER, 1999, 1998, 20_000, b"x" * 10)
    core.handle(entry_read("b", 1999, base, 20_000, 0))
    core.check()
    found = encode_ledger_entry(LEDGER, 2000, 1999, 20_010, b"x" * 10)
    core.handle(entry_read("e", 2000, found, 20_010, 0))
    (choose,) = core.handle(AddFailed("e", 2000, ConnectionLost.code))
    assert isinstance(choose, ChooseBookies)
    core.handle(BookiesChosen({1: "f"}))
    core.check()
    for bookie in ("d", "f"):
        core.handle(AddStored(bookie, 2000))
    absent = [core.handle(entry_read(bookie, 2001, b"", 0, EntryNotFound.code)) for bookie in ("d", "e")]
    (close,) = (one for some in absent for one in some if isinstance(one, WriteMetadata))
    assert close.metadata.ensembles == (*metadata.ensembles[:2], Ensemble(2000, ("d", "f")))


async def test_defect_2615_through_the_client_with_nothing_in_the_last_ensemble() -> None:
    """LAC -1 in the last ensemble, entries in two before it; the recovery closes behind them, at the right length."""
    bookies = Bookies("b1", "b2", "b3", "b4", "b5", "b6")
    client = bookies.client(NO_LAC)
    writer = await client.create(ensemble_size=2, write_quorum=2, ack_quorum=2)
    heard = Confirmations()
    for n in range(4):
        if n == 2:
            bookies[writer.metadata.last_ensemble.bookies[0]].fail(BookieUnavailable("down"))
        writer.append(b"%d" % n, heard)
        await heard.count(n + 1)
    metadata = writer.metadata
    assert [e.first_entry for e in metadata.ensembles] == [0, 2]
    spare = [name for name in bookies if all(name not in e.bookies for e in metadata.ensembles)][:2]
    node = await bookies.metadata.get(ledger_path(writer.ledger_id))
    assert node is not None
    changed = metadata.with_ensemble(4, (spare[0], spare[1])).encode()
    await bookies.metadata.put(ledger_path(writer.ledger_id), changed, version=node.version)
    reader = await bookies.client(NO_LAC).open(writer.ledger_id, recover=True)
    assert (reader.last_add_confirmed, reader.metadata.length) == (3, 4)
    assert len(await reader.read(0, 3)) == 4
    await client.close()


@pytest.mark.parametrize("code", [EntryDamaged.code, UnknownLedgerState.code, ConnectionLost.code, 9999])
def test_defect_2908_what_a_bookie_cannot_answer_is_never_a_no(code: int) -> None:
    """3/3/2, Qw - Qa + 1 = 2: one no and any number of cannot-tell end nothing."""
    metadata = LedgerMetadata.create(Striping(3, 3, 2), ("a", "b", "c"), 0, {}).in_recovery()
    core = RecoveryCore(LEDGER, metadata, 1)
    core.begin()
    for bookie in ("a", "b", "c"):
        core.handle(LastConfirmedRead(bookie, -1, 0))
    core.handle(entry_read("a", 0, b"", 0, EntryNotFound.code))
    core.handle(entry_read("b", 0, b"", 0, code))
    assert state(core) is RecoveryState.ENTRIES
    (failed,) = core.handle(entry_read("c", 0, b"", 0, code))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, QuorumLost)
    assert failed.error.retryable


async def test_defect_2614_a_writer_whose_lac_fence_was_lost_is_stopped_by_the_recovery_reads() -> None:
    """3/3/2: the fence reached a and b only; c, then a recovery read at c, must not complete the writer's next add."""
    bookies = Bookies("b1", "b2", "b3")
    client = bookies.client(NO_LAC)
    writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
    heard = Confirmations()
    writer.append(b"0", heard)
    await heard.count(1)
    for bookie in bookies.values():
        bookie.calls.clear()
    reader = await bookies.client(NO_LAC).open(writer.ledger_id, recover=True)
    assert reader.closed
    for bookie in bookies.values():
        reads = [call for call in bookie.calls if call[0] == "read"]
        assert all(call[-1] for call in reads), "every read of a recovery fences"
    writer.append(b"1", heard)
    await heard.count(2)
    assert heard.errors == [LedgerFenced]
    await client.close()


async def test_defect_1067_a_hung_bookie_blocks_neither_the_fence_nor_the_recovery() -> None:
    bookies = Bookies("b1", "b2", "b3")
    settings = LedgerSettings(explicit_lac_interval_s=0, speculative_read_s=0.01)
    client = bookies.client(settings)
    writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
    heard = Confirmations()
    for n in range(3):
        writer.append(b"%d" % n, heard)
    await heard.count(3)
    hung = writer.metadata.last_ensemble.bookies[0]
    bookies[hung].hold()
    async with asyncio.timeout(2):
        reader = await bookies.client(settings).open(writer.ledger_id, recover=True)
    assert reader.last_add_confirmed == 2
    bookies[hung].release()
    await client.close()


async def test_defect_14861_and_a_crash_of_the_fast_replicas() -> None:
    """Qa < Qw with one slow replica: what the two fast ones confirmed is not lost with them, it is waited for."""
    bookies = Bookies("b1", "b2", "b3")
    client = bookies.client(NO_LAC)
    writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
    slow, *fast = writer.metadata.last_ensemble.bookies
    heard = Confirmations()
    writer.append(b"0", heard)
    await heard.count(1)
    lost = dict(bookies[slow].entries)
    for n in range(1, 20):
        writer.append(b"%d" % n, heard)
    await heard.count(20)
    bookies[slow].entries = lost  # it took them into its socket buffers, and then its machine went
    bookies[slow].confirmed[writer.ledger_id] = -1
    await client.close()
    other = bookies.client(NO_LAC)
    for name in fast:
        bookies[name].fail(BookieUnavailable("down"))
    with pytest.raises(QuorumLost):
        await other.open(writer.ledger_id, recover=True)
    bookies[fast[0]].fail(None)
    # Between it and the slow one the fate of every entry can be told.
    reader = await other.open(writer.ledger_id, recover=True)
    assert reader.last_add_confirmed == 19
    entries = await reader.read(0, reader.last_add_confirmed)
    assert [entry[LEDGER_ENTRY_HEADER_BYTES:] for entry in entries] == [b"%d" % n for n in range(20)]
    await other.close()


# --- the real bookie ---------------------------------------------------------------------------------------------------


async def test_defect_208_a_read_only_bookie_is_fenced_and_takes_part_in_recoveries(tmp_path: Path) -> None:
    storage = ModelStorage()
    bookie = await open_inline(str(tmp_path / "bookie"), storage)
    assert await add(bookie, stored(0)) == 0
    bookie.adds.refuse_all(BookieReadOnly.code, recoveries=False)
    assert await add(bookie, stored(1)) == BookieReadOnly.code
    assert await bookie.read_last_confirmed(LEDGER, fence=True) == (-1, 0)
    assert await add(bookie, stored(1), recovery=True) == 0
    await bookie.close()


@pytest.mark.parametrize("known", [True, False])
async def test_defect_bp46_a_fence_survives_the_crash_of_its_bookie(tmp_path: Path, known: bool) -> None:
    """Also of a ledger that was never written here. What an idle writer tells after the fence is refused."""
    storage = ModelStorage()
    directory = str(tmp_path / "bookie")
    bookie = await open_inline(directory, storage)
    if known:
        assert await add(bookie, stored(0)) == 0
    with pytest.raises(EntryNotFound):
        await bookie.read(LEDGER, 5, 5, fence=True)
    crash(bookie)
    bookie = await open_inline(directory, storage)
    with pytest.raises(LedgerFenced):
        await bookie.write_last_confirmed(LEDGER, 0)
    assert await add(bookie, stored(0)) == LedgerFenced.code
    assert await add(bookie, stored(0), recovery=True) == 0
    await bookie.close()
