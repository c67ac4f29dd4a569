"""Which replica answers: failures, speculative reads, reads of a recovery in runs."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from magnetar.ledger import (
    BookieFacts,
    LedgerSettings,
    LedgerWriter,
    recover,
)
from magnetar.ledger.core import recovery
from magnetar.ledger.core.recovery import RecoveryCore
from magnetar.ledger.replicas import first_good
from magnetar.proto.errors import (
    BookieUnavailable,
    EntryNotFound,
    InvalidSetting,
    LedgerNotFound,
    MagnetarError,
    QuorumLost,
)
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from support.bookies import Bookies, Confirmations, FakeBookie
from support.virtual_time import in_virtual_time

HASTY = LedgerSettings(explicit_lac_interval_s=0, speculative_read_s=0.02)


async def filled(bookies: Bookies, shape: tuple[int, int, int], count: int, size: int = 1) -> LedgerWriter:
    """All appended at once: no entry tells that another one was confirmed."""
    e, qw, qa = shape
    client = bookies.client(HASTY)
    writer = await client.create(ensemble_size=e, write_quorum=qw, ack_quorum=qa)
    confirmed = Confirmations()
    for number in range(count):
        writer.append((b"%d" % number).ljust(size, b"."), confirmed)
    await confirmed.count(count)
    for _ in range(5):
        await asyncio.sleep(0)
    writer.detach()
    return writer


def numbers(entries: list[bytes]) -> list[int]:
    return [int(entry[LEDGER_ENTRY_HEADER_BYTES:].rstrip(b".")) for entry in entries]


# --- speculative reads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 3, 2), (3, 2, 2), (5, 3, 2)])
async def test_a_silent_replica_does_not_hold_up_a_read(shape: tuple[int, int, int]) -> None:
    bookies = Bookies("b1", "b2", "b3", "b4", "b5")
    writer = await filled(bookies, shape, 50)
    reader = await bookies.client(HASTY).open(writer.ledger_id, recover=True)
    hung = writer.metadata.last_ensemble.bookies[0]
    bookies[hung].hold()
    before = len(asyncio.all_tasks())
    assert numbers(await asyncio.wait_for(reader.read(0, 49), 2)) == list(range(50))
    assert len(asyncio.all_tasks()) == before, "the losers were cancelled"
    bookies[hung].calls.clear()
    assert numbers(await reader.read(0, 49)) == list(range(50))
    assert bookies[hung].calls == [], "asked last for a while"


async def test_without_speculation_the_answer_is_waited_for() -> None:
    bookies = Bookies("b1", "b2")
    writer = await filled(bookies, (2, 2, 2), 3)
    client = bookies.client(LedgerSettings(explicit_lac_interval_s=0, speculative_read_s=0))
    reader = await client.open(writer.ledger_id, recover=True)
    for bookie in bookies.values():
        bookie.calls.clear()
        bookie.hold()
    reading = asyncio.create_task(reader.read(0, 2))
    await asyncio.sleep(0.1)
    assert sum(len(bookie.calls) for bookie in bookies.values()) == 1
    for bookie in bookies.values():
        bookie.release()
    assert numbers(await reading) == [0, 1, 2]


@in_virtual_time
async def test_rule_21_a_bookie_whose_reads_hang_is_asked_last_although_it_answers_otherwise() -> None:
    """Its disk hangs, its process does not: that it answers what it is asked about itself ends the suspicion alone."""
    bookies = Bookies("b1", "b2")
    writer = await filled(bookies, (2, 2, 2), 3)
    directory = bookies.directory()
    patient = LedgerSettings(explicit_lac_interval_s=0, speculative_read_s=0)
    reader = await bookies.client(patient, directory=directory).open(writer.ledger_id, recover=True)
    for bookie in bookies.values():
        bookie.calls.clear()
    await reader.read(0, 2)
    (hung,) = (name for name, bookie in bookies.items() if bookie.calls)
    bookies[hung].hold()
    began = asyncio.get_running_loop().time()
    assert numbers(await reader.read(0, 2)) == [0, 1, 2]
    waited = asyncio.get_running_loop().time()
    assert waited > began + 1
    directory.lost(hung)
    directory.answered(hung, BookieFacts())
    assert numbers(await reader.read(0, 2)) == [0, 1, 2]
    assert asyncio.get_running_loop().time() < waited + 1, "it is not waited for once more"


async def test_closed_ledger_that_is_deleted_while_a_bookie_is_gone_for_good_is_not_asked_for_for_ever() -> (
    None
):
    """That bookie may have what the others deny, so the failure alone says that a retry may help."""
    bookies = Bookies("b1", "b2", "b3")
    writer = await filled(bookies, (3, 3, 3), 3)
    reader = await bookies.client(HASTY).open(writer.ledger_id, recover=True)
    assert reader.closed
    bookies["b2"].fail(BookieUnavailable("gone"))
    await bookies.client(HASTY).delete(writer.ledger_id)
    for name in ("b1", "b3"):
        bookies[name].fail(LedgerNotFound("deleted"))
    with pytest.raises(LedgerNotFound):
        await reader.read(0, 2)


async def test_the_first_good_answer_counts_even_if_it_is_that_of_the_slow_one() -> None:
    late: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    slow: list[str] = []
    asked: list[str] = []
    errors: list[MagnetarError] = []

    async def ask(bookie: str) -> str:
        asked.append(bookie)
        if bookie == "a":
            return await late
        raise EntryNotFound(bookie)

    reading = asyncio.create_task(first_good(("a", "b", "c"), ask, 0.01, slow.append, errors))
    await asyncio.sleep(0.1)
    assert (asked, slow) == (["a", "b", "c"], ["a"])
    late.set_result("good")
    assert await reading == "good"
    errors.clear()
    assert await first_good(("b", "c"), ask, 0.01, slow.append, errors) is None
    assert [error.message for error in errors] == ["b", "c"]


async def test_a_cancelled_read_cancels_what_it_asked() -> None:
    bookies = Bookies("b1", "b2", "b3")
    writer = await filled(bookies, (3, 3, 2), 3)
    reader = await bookies.client(HASTY).open(writer.ledger_id, recover=True)
    for bookie in bookies.values():
        bookie.hold()
    before = len(asyncio.all_tasks())
    reading = asyncio.create_task(reader.read(0, 2))
    await asyncio.sleep(0.1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert len(asyncio.all_tasks()) == before


def test_speculation_before_the_read_even_began_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="speculative_read_s=-1"):
        LedgerSettings(speculative_read_s=-1)


# --- recovery ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 3, 2), (3, 2, 2), (5, 3, 2), (4, 2, 1)])
async def test_recovery_of_many_entries_reads_runs(shape: tuple[int, int, int]) -> None:
    bookies = Bookies("b1", "b2", "b3", "b4", "b5")
    writer = await filled(bookies, shape, 3000)
    recovered = await bookies.client(HASTY).open(writer.ledger_id, recover=True)
    assert recovered.last_add_confirmed == 2999
    assert recovered.metadata.length == writer.length
    calls = [call for bookie in bookies.values() for call in bookie.calls if call[0] == "read"]
    assert all(fence for *_, fence in calls)
    # Each has a run, or a share of a quarter of the window at least, once that has grown; and asks beyond the end before
    # that is known.
    run = recovery.RUN_ENTRIES if shape[0] == shape[1] else recovery.WINDOW_ENTRIES // 4 // shape[0]
    assert len(calls) <= 3000 // run + recovery.WINDOW_ENTRIES // run + 40


@pytest.mark.parametrize("shape", [(3, 3, 2), (3, 2, 1), (4, 3, 2), (5, 3, 2), (5, 4, 3)])
async def test_rule_14_a_hole_in_one_replica_is_no_absence(shape: tuple[int, int, int]) -> None:
    bookies = Bookies("b1", "b2", "b3", "b4", "b5")
    writer = await filled(bookies, shape, 300)
    ensemble = writer.metadata.last_ensemble.bookies
    for entry_id in range(300):  # most are missing at one bookie, whoever is asked first
        write_set = writer.metadata.striping.write_set(entry_id)
        if entry_id % 10:
            del bookies[ensemble[write_set[entry_id // 3 % len(write_set)]]].entries[
                writer.ledger_id, entry_id
            ]
    recovered = await bookies.client(HASTY).open(writer.ledger_id, recover=True)
    assert numbers(await recovered.read(0, 299)) == list(range(300))


@pytest.mark.parametrize("shape", [(3, 3, 2), (3, 2, 2), (5, 3, 2), (4, 2, 1)])
async def test_rule_14_what_a_range_did_not_answer_is_not_absent(shape: tuple[int, int, int]) -> None:
    """Answers that are cut by their size, and one with a damaged entry in its middle."""
    bookies = Bookies("b1", "b2", "b3", "b4", "b5")
    writer = await filled(bookies, shape, 300, size=100)
    key = (writer.ledger_id, 130)
    having = [bookie for bookie in bookies.values() if key in bookie.entries]
    for bookie in having[1:]:
        bookie.entries[key] = bookie.entries[key][:-1] + b"?"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recover, "_MAX_READ_BYTES", 1000)
        recovered = await bookies.client(HASTY).open(writer.ledger_id, recover=True)
        assert numbers(await recovered.read(0, 299)) == list(range(300))
        again = await filled(bookies, shape, 5)
        for bookie in bookies.values():
            if (entry := bookie.entries.get((again.ledger_id, 3))) is not None:
                bookie.entries[again.ledger_id, 3] = entry[:-1] + b"?"
        with pytest.raises(QuorumLost, match="stops at entry 3"):
            await bookies.client(HASTY).open(again.ledger_id, recover=True)


@pytest.mark.parametrize("shape", [(3, 3, 2), (3, 2, 2)])
@in_virtual_time
async def test_rule_21_a_bookie_that_hangs_in_recovery_costs_one_wait(shape: tuple[int, int, int]) -> None:
    bookies = Bookies("b1", "b2", "b3", "b4")
    writer = await filled(bookies, shape, 3000)
    hung = bookies[writer.metadata.last_ensemble.bookies[1]]
    right = FakeBookie.read

    async def read(self: FakeBookie, *arguments: Any, **options: Any) -> Any:
        if self is hung:
            await asyncio.Event().wait()
        return await right(self, *arguments, **options)

    client = bookies.client(LedgerSettings(explicit_lac_interval_s=0, speculative_read_s=0.2))
    loop = asyncio.get_running_loop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeBookie, "read", read)
        began = loop.time()
        recovered = await asyncio.wait_for(client.open(writer.ledger_id, recover=True), 10)
        assert loop.time() - began < 2
    assert recovered.last_add_confirmed == 2999


async def test_recovery_holds_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recover, "_MAX_HELD_BYTES", 100_000)
    monkeypatch.setattr(recover, "_MAX_READ_BYTES", 10_000)
    highest = 0
    right = RecoveryCore.handle

    def handle(self: RecoveryCore, event: Any) -> Any:
        nonlocal highest
        try:
            return right(self, event)
        finally:
            highest = max(highest, self.held_bytes)
            self.check()

    monkeypatch.setattr(RecoveryCore, "handle", handle)
    bookies = Bookies("b1", "b2", "b3")
    writer = await filled(bookies, (3, 3, 2), 400, size=5000)
    for bookie in bookies.values():
        right_add = bookie.add
        bookie.add = lambda entry, recovery, done, right=right_add: asyncio.get_running_loop().call_later(  # type: ignore[assignment,method-assign,misc]
            0.002, lambda: right(entry, recovery=recovery, done=done)
        )
    recovered = await asyncio.wait_for(bookies.client(HASTY).open(writer.ledger_id, recover=True), 50)
    assert recovered.last_add_confirmed == 399
    assert 50_000 < highest <= 100_000 + 3 * 12 * 10_100


@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_a_recovery_that_fails_leaves_nothing_running() -> None:
    bookies = Bookies("b1", "b2", "b3")
    writer = await filled(bookies, (3, 3, 2), 300)
    before = len(asyncio.all_tasks())
    client = bookies.client(HASTY)
    opening = asyncio.create_task(client.open(writer.ledger_id, recover=True))
    await asyncio.sleep(0.005)
    for bookie in bookies.values():
        bookie.fail(BookieUnavailable("down"))
    with pytest.raises(MagnetarError):
        await asyncio.wait_for(opening, 5)
    await client.close()
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == before


# --- the nearest replica -----------------------------------------------------------------------------------------------


def reads_by_bookie(bookies: Bookies) -> dict[str, int]:
    found = {name: sum(call[0] == "read" for call in bookie.calls) for name, bookie in bookies.items()}
    for bookie in bookies.values():
        bookie.calls.clear()
    return found


@pytest.mark.parametrize("shape", [(3, 3, 2), (3, 2, 2)])
async def test_reads_ask_the_bookies_of_the_own_zone_first_and_others_when_these_fail(
    shape: tuple[int, int, int],
) -> None:
    bookies = Bookies("b1", "b2", "b3")
    writers = [await filled(bookies, shape, 30) for _ in range(6)]
    directory = bookies.directory()
    for name, zone in (("b1", "east"), ("b2", "west"), ("b3", "")):
        directory.answered(name, BookieFacts.of({"zone": zone}))
    client = bookies.client(replace(HASTY, zone="west"), seed=1, directory=directory)
    readers = [await client.open(writer.ledger_id, recover=True) for writer in writers]
    reads_by_bookie(bookies)
    for reader in readers:
        assert numbers(await reader.read(0, 29)) == list(range(30))
    counts = reads_by_bookie(bookies)
    assert counts["b2"] == 6, "one read of each ledger"
    assert counts["b1"] + counts["b3"] == (0 if shape[1] == 3 else 6), "only what the near one does not have"
    bookies["b2"].fail(BookieUnavailable("down"))
    for reader in readers:
        assert numbers(await reader.read(0, 29)) == list(range(30)), "another one answers"
    reads_by_bookie(bookies)
    bookies["b2"].fail(None)
    for reader in readers:
        await reader.read(0, 29)
    assert reads_by_bookie(bookies)["b2"] == 0, "suspected for a while"
    await client.close()
