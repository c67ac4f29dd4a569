"""A request of the repair queue that cannot be read costs itself, and no other ledger."""

from __future__ import annotations

import logging

import pytest

from magnetar.ledger.replication.auditor import LedgerAudit
from magnetar.ledger.replication.core.request import Reason, RepairRequest
from magnetar.ledger.replication.operations import drain_progress, remove_bookie
from magnetar.ledger.replication.queue import UNDERREPLICATED_PATH, Task
from magnetar.ledger.replication.worker import Worker
from magnetar.metadata.damage import damaged_path, encode_ranges
from magnetar.metadata.drains import BOOKIE, mark_drained
from magnetar.metadata.ledgers import LEDGERS_PATH, StoredLedgers, ledger_path
from magnetar.proto.errors import InvalidArgument
from support.repair_kit import RepairCluster


@pytest.mark.parametrize("value", [b"\xc1", b"\x81\xa6format\x63"], ids=["damaged", "newer format"])
async def test_a_request_that_cannot_be_read_does_not_stop_the_audit(
    value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3")
    ledgers = [await cluster.closed_ledger(entries=2) for _ in range(5)]
    path = UNDERREPLICATED_PATH + ledger_path(ledgers[0]).removeprefix(LEDGERS_PATH)
    await cluster.metadata.create(path, value)
    audit = LedgerAudit(StoredLedgers(cluster.metadata), cluster.queue, cluster.bookies.clock)
    with caplog.at_level(logging.ERROR):
        found = await audit.run(dict.fromkeys(("b1", "b2", "b3"), Reason.LOST))
    assert (found.ledgers, found.queued, found.unreadable) == (5, 4, 1)
    assert path in caplog.text
    node = await cluster.metadata.get(path)
    assert node is not None
    assert node.value == value
    queued = [
        ledger_id for page in await cluster.queue.pages() for ledger_id in await cluster.queue.ledgers(page)
    ]
    assert queued == ledgers
    await cluster.close()


async def test_rule_48_a_record_or_request_that_cannot_be_read_is_named_and_a_drain_sees_the_others() -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3")
    ledgers = [await cluster.closed_ledger(entries=2) for _ in range(4)]
    await mark_drained(cluster.metadata, BOOKIE, "b1")
    record, request = (
        ledger_path(ledgers[0]),
        UNDERREPLICATED_PATH + ledger_path(ledgers[1])[len(LEDGERS_PATH) :],
    )
    node = await cluster.metadata.get(record)
    assert node is not None
    await cluster.metadata.put(
        record, node.value[:-1] if b"b1" in node.value else b"b1", version=node.version
    )
    await cluster.metadata.create(request, b"\xc1")
    progress = await drain_progress(cluster.metadata, ["b1", "b2", "b3"], cluster.bookies.clock)
    assert progress.ledgers == 4
    assert record in progress.notes[ledgers[0]]
    assert request in progress.notes[ledgers[1]]
    node = await cluster.metadata.get(record)
    assert node is not None
    await cluster.metadata.put(record, b"\xc1", version=node.version)
    with pytest.raises(InvalidArgument, match=f"{record} cannot be read"):
        await remove_bookie(cluster.metadata, "b9")
    await cluster.close()


async def test_rule_48_a_node_of_damage_that_cannot_be_read_is_named_and_others_are_healed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3")
    ledgers = [await cluster.closed_ledger(entries=2, ensemble_size=3, write_quorum=3) for _ in range(3)]
    bad, *others = (damaged_path("b1", ledger_id) for ledger_id in ledgers)
    await cluster.metadata.create(bad, b"\xc1")
    for path in others:
        await cluster.metadata.create(path, encode_ranges([(0, 1, "bits")]))
    await cluster.autorecovery()

    async def healed() -> bool:
        return [await cluster.metadata.get(path) for path in others] == [None, None]

    await cluster.until(healed)
    assert await cluster.metadata.get(bad) is not None
    assert f"{bad} is damaged" in caplog.text
    await cluster.close()


async def test_rule_41_a_defect_that_one_ledger_meets_stops_the_repair_of_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3", "b4")
    ledgers = [await cluster.closed_ledger(entries=2, ensemble_size=3, write_quorum=3) for _ in range(3)]
    real = Worker._repair_ledger

    async def broken(worker: Worker, task: Task) -> None:
        if task.ledger_id == ledgers[0]:
            raise ValueError("a defect")
        await real(worker, task)

    monkeypatch.setattr(Worker, "_repair_ledger", broken)
    repair = await cluster.autorecovery()
    for ledger_id in ledgers:
        await cluster.queue.add(ledger_id, RepairRequest({"b1": Reason.CHECK}, False, 0))

    async def done() -> bool:
        return list(await cluster.requests()) == ledgers[:1]

    await cluster.until(done)
    assert repair.figures()["repair_restarts_total"] == 0
    await cluster.close()
