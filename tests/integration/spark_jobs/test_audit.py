"""What `audit` does in its tasks, over three real bookies with striped ledgers: one is killed, another has lost a ledger."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from bench.service_process import ServiceProcess
from pyspark.sql import Row

from magnetar.client import connect
from magnetar.ledger import LedgerMetadata, LedgerSettings, StaticBookies, TcpTransport
from magnetar.metadata.damage import DAMAGED_PATH, damaged_path, decode_ranges
from magnetar.metadata.embedded import EmbeddedMetadataStore
from magnetar.runtime.connection import ConnectionOptions
from magnetar.spark.jobs.audit import AUDIT_SCHEMA, audit_piece, auditable, report_damage
from magnetar.spark.jobs.copies import HEALABLE
from magnetar.spark.jobs.topics import plans_of, read_options
from magnetar.spark.plan import LedgerSlice, Range, slices

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.real, pytest.mark.spark]

# The last ledger is not full: it stays open.
MESSAGES, LEDGER_ENTRIES, WRITE_QUORUM = 35, 10, 2


@pytest.fixture
def bookies(tmp_path: Path) -> Iterator[list[ServiceProcess]]:
    started: list[ServiceProcess] = []
    try:
        for number in range(3):
            bookie = ServiceProcess(tmp_path / f"bookie{number}", command="bookie")
            bookie.start()
            started.append(bookie)
        yield started
    finally:
        for bookie in started:
            if bookie.running:
                bookie.stop()


@pytest.fixture
def broker(bookies: list[ServiceProcess], tmp_path: Path) -> Iterator[ServiceProcess]:
    listed = ",".join(address_of(bookie) for bookie in bookies)
    settings = {
        "broker.max_ledger_entries": LEDGER_ENTRIES,
        "broker.min_ledger_age_ms": 0,
        "broker.ensemble_size": 3,
        "broker.write_quorum": WRITE_QUORUM,
        "broker.ack_quorum": WRITE_QUORUM,
    }
    arguments = ["--bookies", listed]
    for name, value in settings.items():
        arguments += ["--set", f"{name}={value}"]
    with ServiceProcess(tmp_path / "broker", command="broker", arguments=arguments) as running:
        yield running


def address_of(bookie: ServiceProcess) -> str:
    return f"127.0.0.1:{bookie.ports['bookie']}"


async def produce(url: str) -> None:
    async with connect(url) as client, client.create_producer("orders") as producer:
        for number in range(MESSAGES):
            await producer.send(b"%d" % number)


async def lose(bookie: str, ledger_id: int) -> None:
    """The bookie deletes what it has of a ledger that is still wanted."""
    host, _, port = bookie.partition(":")
    transport = TcpTransport(
        StaticBookies({bookie: (host, int(port))}), LedgerSettings(), ConnectionOptions("test")
    )
    try:
        await transport.delete_ledger(bookie, ledger_id)
    finally:
        await transport.close()


NAMES = [column.split()[0] for column in AUDIT_SCHEMA.split(", ")]
States = dict[tuple[int, int, str], str]


class Audited(NamedTuple):
    """Ledgers by position id, the rows of the table, and the state of every copy."""

    pieces: dict[int, LedgerSlice]
    rows: list[dict[str, Any]]
    states: States


def audited(url: str, timeout_s: float) -> Audited:
    options = read_options(url, ["orders"], timeout_s=f"{timeout_s}")
    (plan,) = plans_of(options, 60)
    assert not plan.ledgers[-1].closed
    assert all(auditable(ledger) for ledger in plan.ledgers)
    wanted = [ledger for ledger in plan.ledgers if ledger.entries]
    pieces = slices(plan.topic, wanted, Range(), 1 << 30, plan.bookies)
    states: States = {}
    rows: list[dict[str, Any]] = []
    for piece in pieces:
        metadata = LedgerMetadata.decode(piece.ledger.metadata, piece.ledger.stored_id)
        for found in asyncio.run(audit_piece(piece, plan.lease, options)):
            row = dict(zip(NAMES, found, strict=True))
            rows.append(row)
            held = [
                entry
                for entry in range(row["first_entry"], row["last_entry"] + 1)
                if row["bookie"] in write_set(metadata, entry)
            ]
            assert len(held) == row["copies"]
            for entry in held:
                assert (row["ledger"], entry, row["bookie"]) not in states
                states[row["ledger"], entry, row["bookie"]] = row["state"]
    return Audited({piece.ledger.position_id: piece for piece in pieces}, rows, states)


def write_set(metadata: LedgerMetadata, entry: int) -> list[str]:
    bookies = metadata.ensemble_of(entry).bookies
    return [bookies[position] for position in metadata.striping.write_set(entry)]


def reported(url: str, rows: list[dict[str, Any]]) -> tuple[int, int]:
    """As the driver does with the rows that can be healed."""

    async def run() -> tuple[int, int]:
        async with connect(url) as client:
            return await report_damage(client, [Row(**row) for row in rows if row["state"] in HEALABLE])

    return asyncio.run(run())


async def queue(directory: Path) -> dict[tuple[str, int], Any]:
    """Of a broker that was stopped."""
    metadata = EmbeddedMetadataStore(str(directory))
    found = {}
    try:
        for bookie in await metadata.children(DAMAGED_PATH):
            for name in await metadata.children(f"{DAMAGED_PATH}/{bookie}"):
                node = await metadata.get(damaged_path(bookie, int(name)))
                assert node is not None
                found[bookie, int(name)] = decode_ranges(node.value)
    finally:
        await metadata.close()
    return found


def test_each_copy_of_each_entry_is_read_from_its_bookie_and_what_is_lost_comes_into_the_queue(
    bookies: list[ServiceProcess], broker: ServiceProcess, tmp_path: Path
) -> None:
    asyncio.run(produce(broker.url))
    pieces, rows, clean = audited(broker.url, 30)
    assert len(pieces) >= 3
    entries = {(number, entry) for number, piece in pieces.items() for entry in range(piece.ledger.entries)}
    assert len(entries) == MESSAGES
    copies = Counter((ledger, entry) for ledger, entry, _ in clean)
    assert copies == dict.fromkeys(entries, WRITE_QUORUM)
    assert set(clean.values()) == {"ok"}
    assert {bookie for _, _, bookie in clean} == {address_of(bookie) for bookie in bookies}
    assert len(rows) == len(pieces) * len(bookies)  # what is sound is a row for each bookie

    dead, forgetful = address_of(bookies[0]), address_of(bookies[1])
    lost = min(pieces)
    stored_id = pieces[lost].ledger.stored_id
    asyncio.run(lose(forgetful, stored_id))
    bookies[0].kill("daemon")
    expected = {
        (ledger, entry, bookie): "unreachable"
        if bookie == dead
        else "missing"
        if (bookie, ledger) == (forgetful, lost)
        else "ok"
        for ledger, entry, bookie in clean
    }
    _, rows, states = audited(broker.url, 5)
    assert states == expected
    # A bookie that is away has lost nothing. The next audit finds the same, and writes nothing.
    assert reported(broker.url, rows) == (1, 0)
    assert reported(broker.url, rows) == (0, 1)
    broker.stop()
    ((place, ((first, last, reason),)),) = asyncio.run(queue(tmp_path / "broker" / "metadata")).items()
    assert place == (forgetful, stored_id)
    mine = [entry for ledger, entry, bookie in clean if (ledger, bookie) == (lost, forgetful)]
    assert (first, last) == (min(mine), max(mine))
    assert reason.startswith("audit: missing: the bookie does not know the ledger")
