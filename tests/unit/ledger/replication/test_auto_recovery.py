"""Lost bookies heal by themselves: auditor, queue and workers together, over bookies in memory and in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.ledger import LedgerState
from magnetar.proto.errors import LedgerFenced
from support.bookies import Confirmations
from support.repair_kit import RepairCluster, payload
from support.virtual_time import in_virtual_time

MINUTE: dict[str, Any] = {
    "lost_bookie_delay_s": 60.0,
    "open_ledger_grace_s": 30.0,
    "retry_backoff_s": 5.0,
    "retry_backoff_max_s": 60.0,
}


@pytest.mark.parametrize("quorums", [(3, 3, 2), (3, 2, 2), (5, 3, 2), (2, 2, 1), (4, 1, 1)])
def test_every_entry_of_a_lost_bookie_is_replicated_again(quorums: tuple[int, int, int]) -> None:
    @in_virtual_time
    async def run() -> None:
        e, qw, qa = quorums
        cluster = await RepairCluster.start(*(f"b{number}" for number in range(1, 8)))
        ledger = await cluster.closed_ledger(40, ensemble_size=e, write_quorum=qw, ack_quorum=qa)
        lost = (await cluster.record(ledger)).ensembles[0].bookies[1]
        repair = await cluster.autorecovery()
        if qw == 1:  # the only copy: it can be read, although its bookie is not registered any more
            await cluster.unregister(lost)
        else:
            await cluster.lose(lost)
        await cluster.until(lambda: cluster.replicated(ledger))
        await cluster.until(lambda: repair.figures()["repaired_ledgers_total"] == 1)
        assert await cluster.requests() == {}
        reader = await (await cluster.client()).open(ledger, recover=False)
        entries = await reader.read(0, 39)
        assert [entry[40:] for entry in entries] == [payload(number) for number in range(40)]
        await cluster.close()

    run()


@in_virtual_time
async def test_rule_22_a_bookie_that_returns_within_the_delay_costs_nothing() -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3", "b4")
    ledger = await cluster.closed_ledger(10, ensemble_size=3, write_quorum=3)
    before = await cluster.record(ledger)
    repair = await cluster.autorecovery(**MINUTE)
    lost = before.ensembles[0].bookies[0]
    await asyncio.sleep(1)
    await cluster.unregister(lost)
    await asyncio.sleep(59)
    assert await cluster.requests() == {}
    await cluster.register(lost)
    await asyncio.sleep(300)
    assert await cluster.record(ledger) == before
    assert repair.figures()["repair_copied_entries_total"] == 0
    await cluster.close()


@in_virtual_time
async def test_rule_22_the_delay_is_waited_for() -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3", "b4")
    ledger = await cluster.closed_ledger(10, ensemble_size=3, write_quorum=3)
    await cluster.autorecovery(**MINUTE)
    await asyncio.sleep(1)
    lost = (await cluster.record(ledger)).ensembles[0].bookies[0]
    await cluster.lose(lost)
    await asyncio.sleep(59)
    assert lost in (await cluster.record(ledger)).ensembles[0].bookies
    await cluster.until(lambda: cluster.replicated(ledger), 10)
    await cluster.close()


@in_virtual_time
async def test_rule_22_a_second_lost_bookie_ends_the_delay() -> None:
    cluster = await RepairCluster.start(*(f"b{number}" for number in range(1, 7)))
    ledger = await cluster.closed_ledger(10, ensemble_size=4, write_quorum=3)
    await cluster.autorecovery(**MINUTE)
    await asyncio.sleep(61)  # a new auditor gives every bookie its delay: the cluster may be starting
    one, two = (await cluster.record(ledger)).ensembles[0].bookies[:2]
    await cluster.lose(one)
    await asyncio.sleep(5)
    await cluster.lose(two)
    await cluster.until(lambda: cluster.replicated(ledger), 10)
    await cluster.close()


@in_virtual_time
async def test_rule_22_a_read_only_bookie_is_alive_and_a_source() -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3", "b4")
    ledger = await cluster.closed_ledger(10, ensemble_size=3, write_quorum=3)
    lost, full, other = (await cluster.record(ledger)).ensembles[0].bookies
    await cluster.autorecovery()
    await cluster.register(full, read_only=True)
    await asyncio.sleep(30)
    assert full in (await cluster.record(ledger)).ensembles[0].bookies
    await cluster.lose(lost)
    await cluster.unregister(other)
    await cluster.register(other, read_only=True)
    await cluster.until(lambda: cluster.replicated(ledger))
    assert (await cluster.record(ledger)).ensembles[0].bookies[1:] == (full, other)
    await cluster.close()


@in_virtual_time
async def test_rule_22_an_open_ledger_is_fenced_only_after_its_grace_period() -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3", "b4")
    client = await cluster.client()
    writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
    confirmed = Confirmations()
    for number in range(5):
        writer.append(payload(number), confirmed)
    await confirmed.count(5)
    await cluster.autorecovery(**MINUTE)
    await asyncio.sleep(1)
    lost = (await cluster.record(writer.ledger_id)).ensembles[0].bookies[0]
    await cluster.lose(lost)
    await asyncio.sleep(60 + 29)  # the writer is idle, and does not notice
    assert (await cluster.record(writer.ledger_id)).state is LedgerState.OPEN
    await cluster.until(lambda: cluster.replicated(writer.ledger_id), 10)
    writer.append(b"late", confirmed)
    await confirmed.count(6)
    assert confirmed.errors == [LedgerFenced]
    assert (await cluster.record(writer.ledger_id)).last_entry == 4
    await cluster.close()


@in_virtual_time
async def test_rule_22_a_writer_that_replaced_the_bookie_within_the_grace_period_goes_on() -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3", "b4")
    client = await cluster.client()
    writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
    confirmed = Confirmations()
    for number in range(5):
        writer.append(payload(number), confirmed)
    await confirmed.count(5)
    await cluster.autorecovery(**MINUTE)
    await asyncio.sleep(1)
    await cluster.lose((await cluster.record(writer.ledger_id)).ensembles[0].bookies[0])
    await asyncio.sleep(60 + 10)
    writer.append(payload(5), confirmed)
    await confirmed.count(6)
    await asyncio.sleep(120)
    for number in range(6, 10):
        writer.append(payload(number), confirmed)
    await confirmed.count(10)
    assert confirmed.errors == []
    record = await cluster.record(writer.ledger_id)
    assert record.state is LedgerState.OPEN
    assert [ensemble.first_entry for ensemble in record.ensembles] == [0, 5]
    assert not cluster.lacking(writer.ledger_id, record)  # the first fragment was repaired beside its writer
    await writer.close()
    assert await cluster.replicated(writer.ledger_id)
    await cluster.close()
