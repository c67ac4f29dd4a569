"""What an audit tells the broker of its table, and which ledgers it may judge at all."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import msgpack
import pytest
from pyspark.sql import Row

from magnetar.client.administration import Admin
from magnetar.ledger import LedgerMetadata
from magnetar.ledger.core.quorum import Striping
from magnetar.proto.commands import ReportDamage
from magnetar.proto.errors import LedgerNotFound, NotAuthorized
from magnetar.spark.jobs.audit import auditable, report_damage
from magnetar.spark.plan import TopicLedger


class Broker:
    """Notes what is reported to it; `trimmed` ledgers are not its own any more."""

    def __init__(self, *trimmed: int) -> None:
        self.admin = Admin(self)  # type: ignore[arg-type]
        self.trimmed = trimmed
        self.reported: list[tuple[str, list[list[Any]]]] = []

    async def request(self, command: ReportDamage, topic: str, payload: bytes) -> dict[str, int]:
        """As a client asks."""
        assert command.topic == topic
        rows = msgpack.unpackb(payload)
        self.reported.append((topic, rows))
        if rows[0][0] in self.trimmed:
            raise LedgerNotFound("gone")
        return {"queued": 1, "known": len({row[1] for row in rows}) - 1}


def row(topic: str, stored: int, bookie: str, first: int, last: int, detail: str = "") -> Row:
    return Row(
        topic=topic,
        ledger=stored + 100,
        stored_ledger=stored,
        first_entry=first,
        last_entry=last,
        copies=last - first + 1,
        bookie=bookie,
        state="missing",
        detail=detail,
    )


async def test_a_request_tells_of_one_ledger_by_its_stored_id() -> None:
    broker = Broker(8)
    rows = [
        row("t", 7, "a", 0, 3),
        row("t", 7, "b", 2, 2, "why"),
        row("t", 8, "a", 0, 0),
        row("u", 9, "a", 5, 9),
    ]
    assert await report_damage(broker, rows) == (2, 1)  # type: ignore[arg-type]
    assert broker.reported == [
        ("t", [[7, "a", 0, 3, "audit: missing"], [7, "b", 2, 2, "audit: missing: why"]]),
        ("t", [[8, "a", 0, 0, "audit: missing"]]),
        ("u", [[9, "a", 5, 9, "audit: missing"]]),
    ]


async def test_many_rows_of_a_ledger_are_reported_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    # The package has a function of the module's name.
    monkeypatch.setattr(import_module("magnetar.spark.jobs.audit"), "ROWS_PER_REPORT", 2)
    broker = Broker()
    assert await report_damage(broker, [row("t", 7, "a", n, n) for n in range(0, 10, 2)]) == (3, 0)  # type: ignore[arg-type]
    assert [[row[2] for row in rows] for _, rows in broker.reported] == [[0, 2], [4, 6], [8]]


async def test_a_reason_is_what_the_broker_takes() -> None:
    broker = Broker()
    await report_damage(broker, [row("t", 7, "a", 0, 0, "first line\nsecond\x00 " + "x" * 500)])  # type: ignore[arg-type]
    ((_, ((_, _, _, _, reason),)),) = broker.reported
    assert reason.startswith("audit: missing: first line second  xxx")
    assert len(reason) == 200
    assert reason.isprintable()


async def test_a_refusal_is_not_swallowed() -> None:
    class Refusing(Broker):
        async def request(self, command: ReportDamage, topic: str, payload: bytes) -> dict[str, int]:
            raise NotAuthorized("report_damage")

    with pytest.raises(NotAuthorized):
        await report_damage(Refusing(), [row("t", 7, "a", 0, 0)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("closed", "ack_quorum", "judged"),
    [(True, 3, True), (True, 2, True), (False, 3, True), (False, 2, False)],
)
def test_copies_that_may_be_on_their_way_are_not_missed(closed: bool, ack_quorum: int, judged: bool) -> None:
    metadata = LedgerMetadata.create(Striping(3, 3, ack_quorum), ("a", "b", "c"), 0, {})
    if closed:
        metadata = metadata.close(9, 100)
    ledger = TopicLedger(1, 1, 0, 10, 10, 100, 0, 1, closed, metadata.encode())
    assert auditable(ledger) is judged
