"""A request of the repair queue that cannot be read costs itself, and no other ledger."""

from __future__ import annotations

import logging

import pytest

from magnetar.ledger.replication.audit_pass import LedgerAudit
from magnetar.ledger.replication.core.request import Reason
from magnetar.ledger.replication.queue import UNDERREPLICATED_PATH
from magnetar.metadata.ledgers import LEDGERS_PATH, StoredLedgers, ledger_path
from support.repair_kit import RepairCluster


@pytest.mark.parametrize("value", [b"\xc1", b"\x81\xa6format\x63"], ids=["damaged", "newer format"])
async def test_a_request_that_cannot_be_read_does_not_stop_the_audit(
    value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3")
    ledgers = [await cluster.closed_ledger(entries=2) for _ in range(5)]
    path = UNDERREPLICATED_PATH + ledger_path(ledgers[0]).removeprefix(LEDGERS_PATH)
    await cluster.metadata.create(path, value)
    audit = LedgerAudit(StoredLedgers(cluster.metadata), cluster.queue, cluster.bookies.clock, 10.0)
    with caplog.at_level(logging.ERROR):
        found = await audit.run(dict.fromkeys(("b1", "b2", "b3"), Reason.LOST))
    assert (found.ledgers, found.queued, found.unreadable) == (5, 4, 1)
    assert path in caplog.text
    node = await cluster.metadata.get(path)
    assert node is not None
    assert node.value == value
    assert [ledger_id async for ledger_id, _ in cluster.queue.requests()] == ledgers[1:]
    await cluster.close()
