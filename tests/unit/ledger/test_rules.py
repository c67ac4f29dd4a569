"""CORRECTNESS.md rules 13 to 21 through the whole client, over bookies in memory. (The cores: tests/scenarios.)"""

import asyncio

import pytest

from magnetar.ledger import LedgerSettings, LedgerWriter
from magnetar.ledger.core import recovery
from magnetar.ledger.core.events import (
    AddFailed,
    AddStored,
    BookiesChosen,
    LastConfirmedRead,
    ReadEntries,
)
from magnetar.ledger.core.metadata import Ensemble, LedgerMetadata, LedgerState
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.core.recovery import RecoveryCore
from magnetar.metadata.ledgers import ledger_path
from magnetar.proto.errors import (
    BookieUnavailable,
    EntryDamaged,
    EntryNotFound,
    LedgerFenced,
    NotEnoughBookies,
    QuorumLost,
    RequestTimeout,
    TooManyRequests,
    UnknownLedgerState,
)
from magnetar.proto.ledger_entry import encode_ledger_entry, verify_ledger_entry
from magnetar.proto.stripe import EVERY_ENTRY
from support.bookies import Bookies, Confirmations
from support.ledger_scenario import entry_read

NO_LAC = LedgerSettings(explicit_lac_interval_s=0)
DOWN = BookieUnavailable("down")


async def written(bookies: Bookies, quorums: tuple[int, int, int], count: int) -> LedgerWriter:
    """A writer that had `count` entries confirmed one by one, so that the last one carries the LAC before it."""
    client = bookies.client(NO_LAC)
    e, qw, qa = quorums
    writer = await client.create(ensemble_size=e, write_quorum=qw, ack_quorum=qa)
    confirmed = Confirmations()
    for n in range(count):
        writer.append(b"%d" % n, confirmed)
        await confirmed.count(n + 1)
        while not all((writer.ledger_id, n) in bookies[b].entries for b in replicas(writer, n)):
            await asyncio.sleep(0)
    return writer


def replicas(writer: LedgerWriter, entry_id: int) -> list[str]:
    """The bookies of an entry's write set."""
    metadata = writer.metadata
    return [metadata.ensemble_of(entry_id).bookies[p] for p in metadata.striping.write_set(entry_id)]


async def stored_metadata(bookies: Bookies, ledger_id: int) -> LedgerMetadata:
    node = await bookies.metadata.get(ledger_path(ledger_id))
    assert node is not None
    return LedgerMetadata.decode(node.value, ledger_id)


async def test_rule_07_only_recovery_passes_the_fence() -> None:
    bookies = Bookies("b1")
    writer = await written(bookies, (1, 1, 1), 3)
    await bookies.client().open(writer.ledger_id, recover=True)
    confirmed = Confirmations()
    writer.append(b"late", confirmed)
    await confirmed.count(1)
    assert confirmed.errors == [LedgerFenced]
    assert (writer.ledger_id, 3) not in bookies["b1"].entries


async def test_rule_13_last_confirmed_with_unknown_bookies() -> None:
    bookies = Bookies("b1", "b2", "b3")
    writer = await written(bookies, (3, 3, 2), 5)
    bookies["b1"].fail(DOWN)
    reader = await bookies.client().open(writer.ledger_id, recover=False)
    assert reader.last_add_confirmed == 3, "the last entry tells of the one before it"
    bookies["b2"].fail(UnknownLedgerState("repairing"))
    with pytest.raises(QuorumLost, match=r"(?=.*b1 \(BookieUnavailable\))(?=.*b2 \(UnknownLedgerState\))"):
        await reader.read_last_confirmed()


async def test_rule_13_a_hung_bookie_does_not_hold_up_what_the_others_know() -> None:
    bookies = Bookies("b1", "b2", "b3")
    writer = await written(bookies, (3, 3, 2), 5)
    bookies["b3"].hold()
    reader = await asyncio.wait_for(bookies.client().open(writer.ledger_id, recover=False), 5)
    assert reader.last_add_confirmed == 3
    recovered = await asyncio.wait_for(bookies.client().open(writer.ledger_id, recover=True), 5)
    assert recovered.last_add_confirmed == 4


async def test_rule_14_recovery_fences_with_its_reads_and_never_truncates_by_ignorance() -> None:
    bookies = Bookies("b1", "b2", "b3")
    writer = await written(bookies, (3, 3, 2), 5)
    for name in ("b1", "b2"):
        bookies[name].fail(RequestTimeout("no answer"))
    with pytest.raises(QuorumLost, match="try again"):
        await bookies.client().open(writer.ledger_id, recover=True)
    assert (await stored_metadata(bookies, writer.ledger_id)).state is LedgerState.IN_RECOVERY
    bookies["b1"].fail(None)
    reader = await bookies.client().open(writer.ledger_id, recover=True)
    assert reader.last_add_confirmed == 4
    reads = [call for call in bookies["b3"].calls if call[0] == "read"]
    assert reads
    assert all(fence for *_, fence in reads)


def test_rule_15_reads_use_the_ensemble_as_it_was_when_recovery_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "WINDOW_ENTRIES", 2)
    metadata = LedgerMetadata.create(Striping(2, 2, 2), ("a", "b"), 0, {}).in_recovery()
    core = RecoveryCore(0, metadata, 0)
    core.begin()
    core.handle(LastConfirmedRead("a", -1, 0))
    for entry_id in range(2):
        entry = encode_ledger_entry(0, entry_id, -1, entry_id + 1, b"x")
        core.handle(entry_read("a", entry_id, entry, entry_id + 1, 0))
    core.handle(AddStored("a", 0))
    core.handle(AddFailed("b", 0, RequestTimeout.code))
    core.handle(BookiesChosen({1: "c"}))
    after = core.handle(AddStored("c", 0))  # entry 0 is done: the window moves on
    core.check()
    assert after == [ReadEntries("a", 2, 2, EVERY_ENTRY)]
    assert core.handle(entry_read("a", 2, b"", 0, RequestTimeout.code)) == [
        ReadEntries("b", 2, 2, EVERY_ENTRY)
    ]


async def test_rule_15_recovery_adds_again_in_order_and_as_it_was_stored() -> None:
    bookies = Bookies("b1", "b2", "b3", "b4")
    writer = await written(bookies, (3, 3, 2), 5)
    lost = writer.metadata.last_ensemble.bookies[1]
    before = dict(bookies[writer.metadata.last_ensemble.bookies[0]].entries)
    bookies[lost].fail(DOWN)
    reader = await bookies.client().open(writer.ledger_id, recover=True)
    # LAC 3, so entry 4 is added again: the new bookie has it, and the metadata says so from there on.
    assert [e.first_entry for e in reader.metadata.ensembles] == [0, 4]
    replacement = reader.metadata.last_ensemble.bookies[1]
    assert replacement != lost
    assert bookies[replacement].entries == {(writer.ledger_id, 4): before[writer.ledger_id, 4]}
    assert len(await reader.read(0, 4)) == 5


async def test_rule_16_two_recoveries_agree_and_the_writer_stops() -> None:
    bookies = Bookies("b1", "b2", "b3")
    writer = await written(bookies, (3, 2, 2), 20)
    readers = await asyncio.gather(
        *(bookies.client(seed=n).open(writer.ledger_id, recover=True) for n in range(3))
    )
    assert {(r.last_add_confirmed, r.metadata.length) for r in readers} == {(19, writer.length)}
    assert (await writer.close()).last_entry == 19


async def test_rule_16_a_writers_close_is_good_only_if_last_entry_and_length_agree() -> None:
    bookies = Bookies("b1", "b2", "b3")
    writer = await written(bookies, (3, 3, 2), 5)
    for bookie in bookies.values():
        bookie.hold()
    confirmed = Confirmations()
    writer.append(b"stored, not confirmed", confirmed)
    for bookie in bookies.values():
        bookie.forget_held()
    reader = await bookies.client().open(writer.ledger_id, recover=True)
    assert reader.last_add_confirmed == 5, "recovery found it"
    writer.append(b"next", confirmed)
    await confirmed.count(2)
    assert confirmed.errors == [LedgerFenced, LedgerFenced]
    with pytest.raises(LedgerFenced, match="another owner took over"):
        await writer.close()
    with pytest.raises(LedgerFenced):
        await writer.close()


async def test_rules_17_and_18_several_bookies_fail_while_adds_are_in_flight() -> None:
    bookies = Bookies(*(f"b{n}" for n in range(6)))
    writer = await written(bookies, (3, 3, 2), 10)
    first, second, _ = writer.metadata.last_ensemble.bookies
    confirmed = Confirmations()
    for n in range(30):
        writer.append(b"%d" % n, confirmed)
        if n == 10:
            bookies[first].fail(DOWN)
        if n == 12:
            bookies[second].fail(TooManyRequests("full"))
    await confirmed.count(30)
    assert confirmed.ids == list(range(10, 40))
    metadata = await writer.close()
    assert first not in metadata.last_ensemble.bookies
    assert second not in metadata.last_ensemble.bookies
    reader = await bookies.client().open(writer.ledger_id, recover=False)
    assert len(await reader.read(0, 39)) == 40


async def test_rule_18_without_a_spare_all_pending_entries_fail_in_order() -> None:
    bookies = Bookies("b1", "b2")
    writer = await written(bookies, (2, 2, 2), 3)
    bookies["b2"].fail(DOWN)
    confirmed = Confirmations()
    for n in range(5):
        writer.append(b"%d" % n, confirmed)
    await confirmed.count(5)
    assert [entry_id for entry_id, _, _ in confirmed.heard] == [3, 4, 5, 6, 7]
    assert confirmed.errors == [NotEnoughBookies] * 5
    assert writer.outstanding_bytes == 0
    assert (await writer.close()).last_entry == 2


async def test_rule_19_an_idle_writer_tells_its_last_confirmed_entry_once() -> None:
    bookies = Bookies("b1", "b2", "b3")
    client = bookies.client(LedgerSettings(explicit_lac_interval_s=0.001))
    writer = await client.create(ensemble_size=3, write_quorum=2, ack_quorum=2)
    confirmed = Confirmations()
    for n in range(3):
        writer.append(b"%d" % n, confirmed)
    told = ("write_last_confirmed", writer.ledger_id, 2)
    while not all(told in bookie.calls for bookie in bookies.values()):
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    assert all(bookie.calls.count(told) == 1 for bookie in bookies.values())
    await client.close()


async def test_rule_19_a_bookie_that_did_not_take_it_is_told_again() -> None:
    bookies = Bookies("b1")
    client = bookies.client(LedgerSettings(1, 1, 1, explicit_lac_interval_s=0.001))
    writer = await client.create()
    confirmed = Confirmations()
    writer.append(b"x", confirmed)
    await confirmed.count(1)
    bookies["b1"].fail(DOWN)
    told = ("write_last_confirmed", writer.ledger_id, 0)
    while bookies["b1"].calls.count(told) < 2:
        await asyncio.sleep(0.001)
    bookies["b1"].fail(None)
    while bookies["b1"].confirmed[writer.ledger_id] < 0:
        await asyncio.sleep(0.001)
    await client.close()


def test_rule_20_the_digest_covers_ledger_entry_lac_and_length() -> None:
    entry = encode_ledger_entry(1, 2, 1, 30, b"payload")
    verify_ledger_entry(entry)
    for position in range(len(entry)):
        damaged = bytearray(entry)
        damaged[position] ^= 1
        with pytest.raises(EntryDamaged):
            verify_ledger_entry(bytes(damaged))


@pytest.mark.parametrize("quorums", [(3, 3, 2), (4, 3, 2)])
async def test_a_damaged_missing_or_misplaced_copy_is_passed_over(quorums: tuple[int, int, int]) -> None:
    bookies = Bookies("b1", "b2", "b3", "b4")
    writer = await written(bookies, quorums, 40)
    await writer.close()
    whole = {key: entry for bookie in bookies.values() for key, entry in bookie.entries.items()}
    for number, bookie in enumerate(bookies.values()):
        for key in sorted(bookie.entries):
            fate = (key[1] + number) % 6  # each entry has at most two bad copies in a row of replicas
            if fate == 0:
                damaged = bytearray(bookie.entries[key])
                damaged[-1] ^= 1
                bookie.entries[key] = bytes(damaged)
            elif fate == 1:
                bookie.entries[key] = whole[key[0], (key[1] + 7) % 40]
    reader = await bookies.client().open(writer.ledger_id, recover=False)
    assert await reader.read(0, 39) == [whole[writer.ledger_id, n] for n in range(40)]
    part = await reader.read(7, 39, max_bytes=200)
    assert part == [whole[writer.ledger_id, 7 + n] for n in range(len(part))]
    assert 1 <= len(part) <= 5


async def test_the_error_of_a_failed_read_tells_whether_to_try_again() -> None:
    bookies = Bookies("b1", "b2")
    writer = await written(bookies, (2, 2, 1), 3)
    await writer.close()
    reader = await bookies.client().open(writer.ledger_id, recover=False)
    for bookie in bookies.values():
        bookie.entries[0, 1] = bookie.entries[0, 1][:-1] + b"?"
    with pytest.raises(EntryDamaged):
        await reader.read(1, 1)
    del bookies["b1"].entries[0, 1], bookies["b2"].entries[0, 1]
    with pytest.raises(EntryNotFound):
        await reader.read(1, 1)
    bookies["b2"].fail(DOWN)
    with pytest.raises(BookieUnavailable):
        await reader.read(1, 1)


async def test_a_silent_bookie_is_asked_last_for_a_while() -> None:
    bookies = Bookies("b1", "b2")
    writer = await written(bookies, (2, 2, 2), 3)
    await writer.close()
    reader = await bookies.client().open(writer.ledger_id, recover=False)
    preferred = writer.metadata.last_ensemble.bookies[0]
    bookies[preferred].fail(DOWN)
    for _ in range(5):
        assert len(await reader.read(0, 2)) == 3
    assert len([call for call in bookies[preferred].calls if call[0] == "read"]) == 1


async def test_reads_cross_ensembles() -> None:
    bookies = Bookies("b1", "b2", "b3", "b4")
    writer = await written(bookies, (2, 2, 2), 5)
    confirmed = Confirmations()
    for n in range(2):
        bookies[writer.metadata.last_ensemble.bookies[n]].fail(DOWN)
        writer.append(b"x", confirmed)
        await confirmed.count(n + 1)
    assert [e.first_entry for e in writer.metadata.ensembles] == [0, 5, 6]
    assert isinstance(writer.metadata.ensembles[2], Ensemble)
    metadata = await writer.close()
    for bookie in bookies.values():
        bookie.fail(None)
    reader = await bookies.client().open(writer.ledger_id, recover=False)
    assert [verify_ledger_entry(entry).entry_id for entry in await reader.read(0, 6)] == list(range(7))
    assert metadata.last_entry == 6


@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_a_confirm_callback_that_raises_harms_nobody_else() -> None:
    bookies = Bookies("b1")
    client = bookies.client(LedgerSettings(1, 1, 1))
    writer = await client.create()
    told: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    confirmed = Confirmations()

    def bad(_entry_id: int, _entry: bytes, _error: object) -> None:
        raise RuntimeError("bug")

    writer.append(b"x", bad)
    writer.append(b"y", confirmed)
    await confirmed.count(1)
    assert confirmed.ids == [1]
    assert "confirm callback" in str(told[0]["message"])
    await writer.close()


async def test_close_survives_the_cancellation_of_who_asked() -> None:
    bookies = Bookies("b1")
    client = bookies.client(LedgerSettings(1, 1, 1))
    writer = await client.create()
    bookies["b1"].hold()
    confirmed = Confirmations()
    writer.append(b"x", confirmed)
    task = asyncio.ensure_future(writer.close())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    bookies["b1"].release()
    assert (await writer.close()).last_entry == 0
    assert confirmed.ids == [0]
