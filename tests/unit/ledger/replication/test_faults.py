"""What goes wrong while a ledger is repaired: processes that die, bookies that hang, damage, races, deleted ledgers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.ledger import LedgerSettings, LedgerState
from magnetar.ledger.replication.copying import EntryCopier, Throttle
from magnetar.ledger.replication.healing import Healer
from magnetar.ledger.replication.operations import drain_progress, remove_bookie
from magnetar.ledger.replication.queue import LOCKS_PATH
from magnetar.ledger.replication.records import records_naming
from magnetar.metadata.damage import add_ranges, damaged_path
from magnetar.metadata.drains import BOOKIE, mark_drained
from magnetar.metadata.ledgers import StoredLedgers, ledger_path
from magnetar.proto.errors import BookieUnavailable, InvalidArgument, RequestTimeout, StorageFailed
from support.bookies import Confirmations
from support.repair_kit import RepairCluster, payload
from support.virtual_time import in_virtual_time

SEVEN = [f"b{number}" for number in range(1, 8)]


async def lost_ledger(cluster: RepairCluster, entries: int = 30, **quorums: int) -> tuple[int, str]:
    """A closed ledger of 3/3/2 that lost its first bookie, before anybody knows."""
    ledger = await cluster.closed_ledger(entries, **({"ensemble_size": 3, "write_quorum": 3} | quorums))
    lost = (await cluster.record(ledger)).ensembles[0].bookies[0]
    await cluster.lose(lost)
    return ledger, lost


@in_virtual_time
async def test_rule_22_of_two_processes_one_audits_and_each_ledger_is_repaired_once() -> None:
    cluster = await RepairCluster.start(*SEVEN)
    ledgers = [await cluster.closed_ledger(20, ensemble_size=3, write_quorum=3) for _ in range(20)]
    one, two = await cluster.autorecovery(seed=1), await cluster.autorecovery(seed=2)
    await cluster.until(lambda: one.figures()["auditor_elected"] + two.figures()["auditor_elected"] == 1)
    before = {ledger: await cluster.record(ledger) for ledger in ledgers}
    await asyncio.sleep(1)
    await cluster.lose("b1")
    lost = [ledger for ledger in ledgers if "b1" in before[ledger].ensembles[0].bookies]
    for ledger in lost:
        await cluster.until(lambda ledger=ledger: cluster.replicated(ledger))  # type: ignore[misc]
    await asyncio.sleep(5)
    copied = [repair.figures()["repair_copied_entries_total"] for repair in (one, two)]
    assert sum(copied) == 20 * len(lost)  # nobody copied what another process was copying
    assert all(copied), "both work"
    assert await cluster.metadata.children(LOCKS_PATH) == []
    await cluster.close()


@in_virtual_time
async def test_another_process_takes_over_when_the_auditor_ends() -> None:
    cluster = await RepairCluster.start(*SEVEN)
    one, two = await cluster.autorecovery(), await cluster.autorecovery()
    await cluster.until(lambda: one.figures()["auditor_elected"] == 1)
    await one.close()
    await cluster.until(lambda: two.figures()["auditor_elected"] == 1)
    ledger, _ = await lost_ledger(cluster)
    await cluster.until(lambda: cluster.replicated(ledger))
    await cluster.close()


@in_virtual_time
async def test_a_process_that_loses_its_session_stops_and_begins_anew() -> None:
    cluster = await RepairCluster.start(*SEVEN)
    repair = await cluster.autorecovery(copy_bytes_per_s=1024)
    await cluster.until(lambda: repair.figures()["auditor_elected"] == 1)
    ledger, _ = await lost_ledger(cluster, 100)
    await cluster.until(
        lambda: repair.figures()["repairs_running"] > 0 < repair.figures()["repair_copied_bytes_total"]
    )
    node = await cluster.metadata.get(f"{LOCKS_PATH}/{ledger:020d}")
    assert node is not None
    cluster.metadata.expire(int(node.value.split()[-1]))
    await asyncio.sleep(0.05)
    assert repair.figures()["auditor_elected"] == 0
    assert repair.figures()["repairs_running"] == 0
    assert await cluster.metadata.children(LOCKS_PATH) == []
    assert repair.figures()["repair_sessions_lost_total"] == 1
    await cluster.until(lambda: cluster.replicated(ledger), 60)
    await cluster.close()


def test_rule_22_a_repair_that_is_cancelled_anywhere_can_be_repeated() -> None:
    """The process is killed after each number of turns of the loop: nothing is lost, no lock stays, the next one ends it."""

    ended: list[bool] = []

    @in_virtual_time
    async def kill_after(turns: int) -> None:
        cluster = await RepairCluster.start(*SEVEN)
        ledger, lost = await lost_ledger(cluster, 12, ensemble_size=4)
        first = await cluster.autorecovery(start=False)
        await first.recover_bookie(lost)
        await first.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        ended.append(await cluster.requests() == {})
        await first.close()
        assert await cluster.metadata.children(LOCKS_PATH) == []
        record = await cluster.record(ledger)
        for ensemble in record.ensembles:  # what the record names is there: the copy was durable before
            assert all(
                (ledger, entry_id) in cluster.bookies[ensemble.bookies[position]].entries
                for entry_id in range(12)
                for position in record.striping.write_set(entry_id)
                if ensemble.bookies[position] != lost
            )
        await cluster.autorecovery()
        await cluster.until(lambda: cluster.replicated(ledger))
        await cluster.close()

    for turns in range(1000):
        kill_after(turns)
        if ended[-1]:
            break
    assert ended[-1]
    assert len(ended) > 10


@in_virtual_time
async def test_rule_21_a_target_that_hangs_is_replaced_by_another_one() -> None:
    settings = LedgerSettings(add_timeout_s=2.0)
    cluster = await RepairCluster.start("b1", "b2", "b3", "b4", settings=settings)
    ledger, lost = await lost_ledger(cluster)
    (target,) = set(cluster.bookies) - set((await cluster.record(ledger)).ensembles[0].bookies)
    cluster.bookies[target].hold_adds()
    await cluster.autorecovery()
    await asyncio.sleep(10)
    requests = await cluster.requests()
    assert "too few" in requests[ledger].note or "left to choose" in requests[ledger].note
    assert lost in (await cluster.record(ledger)).ensembles[0].bookies
    await cluster.register("b5")
    await cluster.until(lambda: cluster.replicated(ledger))
    assert "b5" in (await cluster.record(ledger)).ensembles[0].bookies
    await cluster.close()


@in_virtual_time
async def test_rule_21_a_source_that_hangs_costs_a_moment() -> None:
    cluster = await RepairCluster.start(*SEVEN)
    ledger, _ = await lost_ledger(cluster)
    cluster.bookies[(await cluster.record(ledger)).ensembles[0].bookies[1]].hold()
    await cluster.autorecovery()
    await cluster.until(lambda: cluster.replicated(ledger), 10)
    await cluster.close()


@in_virtual_time
async def test_a_damaged_copy_is_never_copied_and_is_healed_as_well() -> None:
    cluster = await RepairCluster.start(*SEVEN)
    ledger, _ = await lost_ledger(cluster)
    one, two = (await cluster.record(ledger)).ensembles[0].bookies[1:]
    for bookie, entry_id in ((one, 7), (two, 8)):
        entries = cluster.bookies[bookie].entries
        entries[ledger, entry_id] = entries[ledger, entry_id][:-1] + b"?"
    repair = await cluster.autorecovery()
    await cluster.until(lambda: cluster.replicated(ledger))
    new = (await cluster.record(ledger)).ensembles[0].bookies[0]
    good = {number: cluster.bookies[new].entries[ledger, number] for number in range(30)}
    assert all(entry.endswith(payload(number)) for number, entry in good.items())
    # One of both was met by the copy, and reported; whoever scrubs or reads finds the other.
    await add_ranges(cluster.metadata, one, ledger, [(0, 29, "found by a scrub")])
    await add_ranges(cluster.metadata, two, ledger, [(5, 10, "found by an audit")])
    await cluster.until(lambda: repair.figures()["healed_entries_total"] == 2)
    assert all(cluster.bookies[bookie].entries[ledger, n] == good[n] for bookie in (one, two) for n in good)
    for bookie in (one, two):
        await cluster.until(lambda bookie=bookie: no_report(cluster, bookie, ledger))  # type: ignore[misc]
    await cluster.close()


async def no_report(cluster: RepairCluster, bookie: str, ledger: int) -> bool:
    """Whether the queue of damage has nothing of them."""
    return await cluster.metadata.get(damaged_path(bookie, ledger)) is None


@in_virtual_time
async def test_a_report_about_good_copies_writes_nothing() -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3")
    ledger = await cluster.closed_ledger(20, ensemble_size=3, write_quorum=2)
    adds = sum(bookie.adds for bookie in cluster.bookies.values())
    for bookie in cluster.bookies:
        await add_ranges(cluster.metadata, bookie, ledger, [(0, 100, "a rumour")])
        await add_ranges(cluster.metadata, bookie, 77, [(0, 100, "of a ledger that was deleted")])
    await cluster.autorecovery()
    for bookie in cluster.bookies:
        for number in (ledger, 77):
            await cluster.until(lambda b=bookie, n=number: no_report(cluster, b, n))  # type: ignore[misc]
    assert sum(bookie.adds for bookie in cluster.bookies.values()) == adds
    await cluster.close()


@in_virtual_time
async def test_an_entry_of_which_every_copy_is_bad_stays_reported() -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3", "b4")
    ledger = await cluster.closed_ledger(20, ensemble_size=3, write_quorum=3)
    one, two, three = (await cluster.record(ledger)).ensembles[0].bookies
    for bookie in (one, two):
        cluster.bookies[bookie].entries[ledger, 5] = b"?" * 60
    del cluster.bookies[three].entries[ledger, 5]
    cluster.bookies[one].entries[ledger, 6] = b"?" * 60
    await add_ranges(cluster.metadata, one, ledger, [(5, 6, "found by a scrub")])
    repair = await cluster.autorecovery()
    await cluster.until(lambda: repair.figures()["healed_entries_total"] == 1)
    await asyncio.sleep(30)
    assert repair.figures()["lost_entries_total"] == 1  # said once
    assert not await no_report(cluster, one, ledger)
    await cluster.lose(two)
    await asyncio.sleep(30)
    assert two in (await cluster.record(ledger)).ensembles[0].bookies
    requests = await cluster.requests()
    assert "entry 5" in requests[ledger].note
    await cluster.close()


@in_virtual_time
async def test_a_ledger_that_is_deleted_in_mid_copy_leaves_nothing_behind() -> None:
    cluster = await RepairCluster.start(*SEVEN)
    ledger, _ = await lost_ledger(cluster, 500)
    repair = await cluster.autorecovery(copy_bytes_per_s=5000)
    before = set((await cluster.record(ledger)).ensembles[0].bookies)

    def copies() -> list[str]:
        return [
            n
            for n, b in cluster.bookies.items()
            if n not in before and any(k[0] == ledger for k in b.entries)
        ]

    await cluster.until(lambda: bool(copies()))
    await cluster.delete_record(ledger)
    for bookie in before & set(await cluster.metadata.children("/bookies")):
        await cluster.bookies[bookie].delete_ledger(ledger)
    await cluster.until(lambda: repair.figures()["repairs_running"] == 0)
    assert await cluster.requests() == {}
    assert copies() == []
    await cluster.close()


@in_virtual_time
async def test_the_writers_ensemble_change_during_the_repair_of_an_earlier_fragment() -> None:
    cluster = await RepairCluster.start(*SEVEN)
    client = await cluster.client()
    writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=3)
    confirmed = Confirmations()

    async def write(count: int) -> None:
        for _ in range(count):
            writer.append(payload(writer.last_add_pushed + 1), confirmed)
        await confirmed.count(len(confirmed.heard) + count)

    await write(100)
    record = await cluster.record(writer.ledger_id)
    first, second, _ = record.ensembles[0].bookies
    await cluster.lose(first)
    await write(10)  # an ensemble change: the fragment of the first 100 entries lost a bookie
    repair = await cluster.autorecovery(copy_bytes_per_s=5000)
    await cluster.until(lambda: repair.figures()["repair_copied_bytes_total"] > 2000)
    cluster.bookies[second].fail(BookieUnavailable("away for a moment"))
    await write(10)  # another one, while the first fragment is copied
    cluster.bookies[second].fail(None)
    await write(10)
    await cluster.until(lambda: repair.figures()["repaired_ledgers_total"] == 1, 60)
    record = await cluster.record(writer.ledger_id)
    assert record.state is LedgerState.OPEN
    assert len(record.ensembles) == 3
    assert not cluster.lacking(writer.ledger_id, record)
    assert confirmed.errors == []
    await writer.close()
    assert await cluster.replicated(writer.ledger_id)
    await cluster.close()


@in_virtual_time
async def test_a_bookie_that_returns_while_its_entries_are_copied_ends_the_next_attempt() -> None:
    cluster = await RepairCluster.start(*SEVEN)
    ledger, lost = await lost_ledger(cluster)
    await cluster.autorecovery(lost_bookie_delay_s=1.0)
    await asyncio.sleep(0.5)
    await cluster.register(lost)
    await asyncio.sleep(30)
    assert lost in (await cluster.record(ledger)).ensembles[0].bookies
    assert await cluster.requests() == {}
    await cluster.close()


@in_virtual_time
async def test_not_enough_bookies_is_said_and_costs_only_itself() -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3", "b4")
    wide = await cluster.closed_ledger(10, ensemble_size=4, write_quorum=2)
    narrow = [await cluster.closed_ledger(10, ensemble_size=2, write_quorum=2) for _ in range(6)]
    await cluster.lose("b1")
    await cluster.autorecovery()
    for ledger in narrow:
        await cluster.until(lambda ledger=ledger: cluster.replicated(ledger))  # type: ignore[misc]
    requests = await cluster.requests()
    assert list(requests) == [wide]
    await cluster.until(lambda: noted(cluster, wide, "left to choose from"))
    await cluster.register("b5")
    await cluster.until(lambda: cluster.replicated(wide))
    await cluster.close()


async def noted(cluster: RepairCluster, ledger: int, text: str) -> bool:
    """Whether the queue says so."""
    requests = await cluster.requests()
    return ledger in requests and text in requests[ledger].note


@in_virtual_time
async def test_a_record_that_cannot_be_read_costs_only_itself() -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3", "b4")
    ledgers = [await cluster.closed_ledger(10, ensemble_size=2, write_quorum=2) for _ in range(6)]
    node = await cluster.metadata.get(ledger_path(ledgers[0]))
    assert node is not None
    await cluster.metadata.put(ledger_path(ledgers[0]), b"b1 damaged", version=node.version)
    await cluster.lose("b1")
    repair = await cluster.autorecovery()
    for ledger in ledgers[1:]:
        await cluster.until(lambda ledger=ledger: cluster.replicated(ledger))  # type: ignore[misc]
    assert repair.figures()["audit_unreadable_ledgers"] == 1
    await cluster.close()


@in_virtual_time
async def test_a_drained_bookie_serves_as_a_source_and_gets_nothing_new() -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3", "b4")
    ledgers = [
        await cluster.closed_ledger(10, ensemble_size=1, write_quorum=1, ack_quorum=1) for _ in range(12)
    ]
    ledgers += [await cluster.closed_ledger(10, ensemble_size=3, write_quorum=3) for _ in range(4)]
    repair = await cluster.autorecovery()
    stored = StoredLedgers(cluster.metadata)
    assert [one async for one in records_naming(stored, ["b1"])]
    assert await mark_drained(cluster.metadata, BOOKIE, "b1")
    assert not await mark_drained(cluster.metadata, BOOKIE, "b1")
    with pytest.raises(InvalidArgument, match="stop it first"):
        await remove_bookie(cluster.metadata, "b1")

    async def drained() -> bool:
        return [one async for one in records_naming(stored, ["b1"])] == []

    await cluster.until(drained)
    for ledger in ledgers:
        assert await cluster.replicated(ledger)
    assert await cluster.requests() == {}
    assert repair.figures()["bookies_draining"] == 1
    assert (await drain_progress(cluster.metadata, ["b1"], cluster.bookies.clock)).ledgers == 0
    await cluster.lose("b1")
    await remove_bookie(cluster.metadata, "b1")
    assert await cluster.metadata.get("/cookies/b1") is None
    await cluster.close()


@in_virtual_time
async def test_a_bookie_that_lost_its_disk_and_is_back_gets_its_entries_again() -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3")
    ledgers = [await cluster.closed_ledger(20, ensemble_size=3, write_quorum=qw) for qw in (2, 3)]
    repair = await cluster.autorecovery()
    cluster.bookies["b2"].entries.clear()
    before = [await cluster.record(ledger) for ledger in ledgers]
    assert (await repair.recover_bookie("b2")).queued == 2
    for ledger in ledgers:
        await cluster.until(lambda ledger=ledger: cluster.replicated(ledger))  # type: ignore[misc]
    assert [await cluster.record(ledger) for ledger in ledgers] == before
    await cluster.close()


@in_virtual_time
async def test_ensembles_that_break_placement_are_moved() -> None:
    cluster = await RepairCluster.start()
    for name in ("b1", "b2", "b3"):
        await cluster.register(name, rack="r1")
    ledgers = [await cluster.closed_ledger(10, ensemble_size=3, write_quorum=3) for _ in range(3)]
    cluster.settings = LedgerSettings(placement="rack")
    await cluster.register("b4", rack="r2")
    await cluster.register("b5", rack="r1")
    repair = await cluster.autorecovery()
    await asyncio.sleep(1)
    assert (await repair.full_check()).queued == 3
    for ledger in ledgers:

        async def moved(ledger: int = ledger) -> bool:
            return "b4" in (await cluster.record(ledger)).ensembles[0].bookies and await cluster.replicated(
                ledger
            )

        await cluster.until(moved)
    await cluster.until(lambda: repair.figures()["repaired_ledgers_total"] == 3)
    assert (await repair.full_check()).queued == 0
    assert repair.figures()["replaced_bookies_total"] == 3
    await cluster.close()


@in_virtual_time
async def test_the_full_check_finds_what_no_auditor_saw() -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3", "b4")
    ledger, lost = await lost_ledger(cluster)
    await cluster.metadata.delete(f"/cookies/{lost}")  # nobody knows that it ever was
    repair = await cluster.autorecovery(full_check_interval_s=3600.0)
    await asyncio.sleep(60)
    assert not await cluster.replicated(ledger)
    cluster.bookies.clock.now += 3_700_000
    await cluster.until(lambda: cluster.replicated(ledger), 60)
    assert repair.figures()["repaired_ledgers_total"] == 1
    await cluster.close()


@pytest.mark.parametrize("error", [StorageFailed("broken"), RequestTimeout("silent")])
def test_rule_46_a_store_that_fails_delays_repairs(error: Exception) -> None:
    @in_virtual_time
    async def run() -> None:
        cluster = await RepairCluster.start(*SEVEN)
        repair = await cluster.autorecovery()
        await cluster.until(lambda: repair.figures()["auditor_elected"] == 1)
        children = cluster.metadata.children

        async def failing(path: str, **options: Any) -> list[str]:
            raise error

        ledger = await cluster.closed_ledger(10, ensemble_size=3, write_quorum=3)
        cluster.metadata.children = failing  # type: ignore[method-assign]
        await cluster.lose((await cluster.record(ledger)).ensembles[0].bookies[0])
        await asyncio.sleep(20)
        cluster.metadata.children = children  # type: ignore[method-assign]
        await cluster.until(lambda: cluster.replicated(ledger), 120)
        await cluster.close()

    run()


@in_virtual_time
async def test_the_full_check_heals_what_an_ensemble_change_left_with_fewer_copies() -> None:
    """With Qa < Qw entries are confirmed without the bookie that fails, and its replacement begins behind them."""
    cluster = await RepairCluster.start(*SEVEN)
    client = await cluster.client()
    writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
    confirmed = Confirmations()
    failed = (await cluster.record(writer.ledger_id)).ensembles[0].bookies[1]
    cluster.bookies[failed].drop_adds = True
    for count in (20, 40):
        for _ in range(20):
            writer.append(payload(writer.last_add_pushed + 1), confirmed)
        await confirmed.count(count)
        await asyncio.sleep(10)
    await writer.close()
    cluster.bookies[failed].drop_adds = False
    record = await cluster.record(writer.ledger_id)
    assert len(record.ensembles) == 2
    assert cluster.lacking(writer.ledger_id, record)
    repair = await cluster.autorecovery()
    assert (await repair.full_check()).queued == 1
    await cluster.until(lambda: cluster.replicated(writer.ledger_id))
    assert await cluster.record(writer.ledger_id) == record
    await cluster.close()


@in_virtual_time
async def test_a_bookie_that_is_completed_is_read_and_written_many_entries_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each round trip takes 1 ms: entries one after another would take three of them each."""
    round_trips = 0
    real = EntryCopier.read_copy

    async def read_copy(*args: Any, **kwargs: Any) -> list[bytes]:
        nonlocal round_trips
        round_trips += 1
        await asyncio.sleep(0.001)
        return await real(*args, **kwargs)

    monkeypatch.setattr(EntryCopier, "read_copy", read_copy)
    cluster = await RepairCluster.start("b1", "b2", "b3", "b4")
    ledgers = {
        shape: await cluster.closed_ledger(600, ensemble_size=shape[0], write_quorum=shape[1])
        for shape in ((3, 3), (3, 2))
    }
    repair = await cluster.autorecovery()
    for shape, ledger in ledgers.items():
        emptied = (await cluster.record(ledger)).ensembles[0].bookies[1]
        cluster.bookies[emptied].entries.clear()
        round_trips = 0
        await repair.recover_bookie(emptied)
        await cluster.until(lambda ledger=ledger: cluster.replicated(ledger))  # type: ignore[misc]
        await cluster.until(lambda: repair.figures()["repairs_running"] == 0)
        assert round_trips < 40, shape
    assert repair.figures()["healed_entries_total"] >= 600 + 400
    await cluster.close()


@in_virtual_time
async def test_rule_08_what_was_written_again_and_is_not_good_at_the_bookie_is_not_healed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bookie that confirms an add and has it not: the request stays, and is tried again."""
    cluster = await RepairCluster.start("b1", "b2", "b3")
    ledger = await cluster.closed_ledger(3, ensemble_size=3, write_quorum=3)
    record = await cluster.record(ledger)
    emptied = record.ensembles[0].bookies[1]
    cluster.bookies[emptied].entries.clear()
    components = (await cluster.client()).components
    copier = EntryCopier(components, Throttle(1 << 30), 1 << 20, lambda *_: None)
    healer = Healer(components.transport, copier)
    real = EntryCopier.copy

    async def copy(self: EntryCopier, *args: Any) -> int:
        copied = await real(self, *args)
        cluster.bookies[emptied].entries.clear()
        return copied

    monkeypatch.setattr(EntryCopier, "copy", copy)
    healed = await healer.heal(ledger, record, emptied, [(0, 2)], {})
    assert not healed.whole
    assert f"entry 0 was written again at bookie {emptied}" in healed.postponed
    await cluster.close()


@in_virtual_time
async def test_rule_47_a_report_of_damage_with_any_end_in_an_open_ledger_is_looked_through_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3")
    writer = await (await cluster.client()).create(ensemble_size=3, write_quorum=3, ack_quorum=2)
    confirmed = Confirmations()
    for entry_id in range(2000):
        writer.append(payload(entry_id), confirmed)
    await cluster.until(lambda: len(confirmed.ids) == 2000)
    record = await cluster.record(writer.ledger_id)
    damaged = record.ensembles[0].bookies[1]
    cluster.bookies[damaged].entries.clear()
    components = (await cluster.client()).components
    healer = Healer(
        components.transport, EntryCopier(components, Throttle(1 << 30), 1 << 20, lambda *_: None)
    )
    reads = 0
    real = EntryCopier.read_copy

    async def read_copy(*args: Any) -> list[bytes]:
        nonlocal reads
        reads += 1
        assert reads < 20_000, "it goes on behind the end of the ledger"
        return await real(*args)

    monkeypatch.setattr(EntryCopier, "read_copy", read_copy)
    healed = await healer.heal(writer.ledger_id, record, damaged, [(0, 1 << 62)], {})
    assert (healed.written, healed.whole) == (2000, True)
    assert all((writer.ledger_id, entry_id) in cluster.bookies[damaged].entries for entry_id in range(2000))

    async def silent(self: EntryCopier, bookie: str, *args: Any) -> list[bytes]:
        if bookie == damaged:
            return await real(self, bookie, *args)
        raise BookieUnavailable("no answer")

    monkeypatch.setattr(EntryCopier, "read_copy", silent)
    cluster.bookies[damaged].entries.clear()
    healed = await healer.heal(writer.ledger_id, record, damaged, [(0, 9)], {})
    assert healed.postponed, "whoever has them may answer later"
    await cluster.close()


@in_virtual_time
async def test_a_long_repair_does_not_delay_what_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await RepairCluster.start(*SEVEN)
    long, _ = await lost_ledger(cluster)
    begun, goes_on = asyncio.Event(), asyncio.Event()
    real = EntryCopier.copy

    async def copy(self: EntryCopier, ledger_id: int, *args: Any) -> int:
        if ledger_id == long:
            begun.set()
            await goes_on.wait()
        return await real(self, ledger_id, *args)

    monkeypatch.setattr(EntryCopier, "copy", copy)
    repair = await cluster.autorecovery()
    await cluster.until(begun.is_set)
    await asyncio.sleep(1)
    other, _ = await lost_ledger(cluster)
    await cluster.until(lambda: cluster.replicated(other))
    assert repair.figures()["repairs_running"] == 1
    goes_on.set()
    await cluster.until(lambda: cluster.replicated(long))
    await cluster.close()
