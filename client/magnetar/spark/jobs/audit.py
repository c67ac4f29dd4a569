"""`audit`: every entry of every ledger of topics, read from every bookie that should have it, and compared.

A Spark partition reads a piece of a ledger from the bookies themselves, over the ledger client's transport; the broker only
says which ledgers there are, and keeps them while they are read. The result has a row for each run of copies of one bookie
that are in the same state, so that a sound ledger is a few rows:

    topic, ledger (position id), stored_ledger (as bookies know it), first_entry, last_entry, copies, bookie, state, detail

with a state of ok, missing, damaged, differs, disputed or unreachable: see `copies`. Closed ledgers are audited whole. Of an
open one the entries that are confirmed are, if its ack quorum is its write quorum: else copies may be on their way still.

What others can heal (missing, damaged, differs) is then reported to the broker, which puts it into the repair queue (command
REPORT_DAMAGE), unless `report` is False. To find the same again writes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import groupby
from typing import Any, Final

import msgpack
from pyspark import StorageLevel
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sql

from magnetar.client import Client
from magnetar.client.administration import ask
from magnetar.ledger import LedgerMetadata, LedgerSettings
from magnetar.proto.commands import ReportDamage
from magnetar.proto.errors import LedgerNotFound, MagnetarError

from ..bookies import bookie_transport, directory_of
from ..leases import renewing
from ..options import ReadOptions
from ..plan import LedgerSlice, Range, TopicLedger, slices
from ..service import asking, connected
from .copies import HEALABLE, OK, compare_copies, ranges_of
from .job import checks, runs
from .topics import check_topics, plans_of, read_options

AUDIT_SCHEMA: Final = (
    "topic string, ledger bigint, stored_ledger bigint, first_entry bigint, last_entry bigint, copies bigint, "
    "bookie string, state string, detail string"
)
ROWS_PER_REPORT: Final = 1000
REASON_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class AuditResult:
    """`table` is kept by Spark until `close`; `states` says how many copies are in each state.

    `queued`: copies of ledgers (each of one bookie) that came newly into the repair queue; `known` stood there before. None:
    nothing was reported, for the reason `unreported` if that was not intended.
    """

    table: DataFrame
    ledgers: int
    states: dict[str, int]
    queued: int | None = None
    known: int | None = None
    unreported: str = ""

    @property
    def problems(self) -> DataFrame:
        """The rows that are not ok, in the order of ledgers and entries."""
        return self.table.filter(sql.col("state") != OK).orderBy("topic", "ledger", "first_entry", "bookie")

    @property
    def clean(self) -> bool:
        """Whether every copy is ok."""
        return all(state == OK for state in self.states)

    def close(self) -> None:
        """Spark forgets the table."""
        self.table.unpersist()


@dataclass(frozen=True, slots=True)
class Audit:
    """What `audit` is asked for. A task reads about `partition_bytes` of a ledger, from each of its bookies.

    `report`: what can be healed comes into the repair queue.
    """

    service_url: str
    topics: Sequence[str]
    _: KW_ONLY
    report: bool = True
    partition_bytes: int = 64 << 20
    timeout_s: float = 30.0
    lease_s: float = 600.0

    def check(self) -> ReadOptions:
        """What `audit` refuses, found without Spark. Raises as `audit` does."""
        named = {name: f"{getattr(self, name)}" for name in ("partition_bytes", "timeout_s", "lease_s")}
        options = read_options(self.service_url, self.topics, **named)
        check_topics(options)  # raises for a topic that is not there
        return options

    def run(self, spark: SparkSession) -> AuditResult:
        """Audits topics. Raises InvalidArgument, TopicNotFound.

        What bookies answer, or do not, is part of the result and no error; so is a broker that refuses the report.
        """
        options = self.check()
        pieces = _pieces(options)
        tasks = spark.sparkContext.parallelize(pieces, max(1, len(pieces)))
        rows = tasks.flatMap(lambda one: asyncio.run(audit_piece(*one, options)))
        table = spark.createDataFrame(rows, AUDIT_SCHEMA).persist(StorageLevel.MEMORY_AND_DISK)
        sums = table.groupBy("state").agg(sql.sum("copies").alias("copies")).orderBy("state").collect()
        states = {row["state"]: row["copies"] for row in sums}
        ledgers = table.select("topic", "ledger").distinct().count()
        result = AuditResult(table, ledgers, states)
        if not self.report:
            return result
        try:
            queued, known = asking(options, lambda client: report_damage(client, _healable(result)))
        except MagnetarError as error:
            return replace(result, unreported=error.message)
        return replace(result, queued=queued, known=known)


audit = runs(Audit)
check_audit = checks(Audit)


def _healable(result: AuditResult) -> Iterator[Row]:
    if not any(state in HEALABLE for state in result.states):
        return iter(())
    rows: Iterator[Row] = result.problems.filter(sql.col("state").isin(*HEALABLE)).toLocalIterator()
    return rows


async def report_damage(client: Client, rows: Iterable[Row]) -> tuple[int, int]:
    """Tells the broker of rows of an audit, sorted by topic and ledger. Returns what it queued, and what it knew.

    A ledger that was trimmed since it was read needs no repair any more.
    """
    queued = known = 0
    for (topic, stored_ledger), of_ledger in groupby(rows, lambda row: (row["topic"], row["stored_ledger"])):
        damage = [
            [stored_ledger, row["bookie"], row["first_entry"], row["last_entry"], _reason(row)]
            for row in of_ledger
        ]
        for start in range(0, len(damage), ROWS_PER_REPORT):
            payload = msgpack.packb(damage[start : start + ROWS_PER_REPORT])
            try:
                answer = await ask(client.admin, ReportDamage(0, topic), topic=topic, payload=payload)
            except LedgerNotFound:
                break
            queued += answer["queued"]
            known += answer["known"]
    return queued, known


def _reason(row: Row) -> str:
    reason = f"audit: {row['state']}" + (f": {row['detail']}" if row["detail"] else "")
    return "".join(char if char.isprintable() else " " for char in reason)[:REASON_CHARS]


def _pieces(options: ReadOptions) -> list[tuple[LedgerSlice, str]]:
    """What one task audits, each with the name of the lease that keeps it: a slow bookie holds up one task."""
    pieces: list[tuple[LedgerSlice, str]] = []
    for plan in plans_of(options, options.lease_s):
        ledgers = [ledger for ledger in plan.ledgers if ledger.entries > 0 and auditable(ledger)]
        found = slices(plan.topic, ledgers, Range(), options.partition_bytes, plan.bookies)
        pieces += [(piece, plan.lease) for piece in found]
    return pieces


def auditable(ledger: TopicLedger) -> bool:
    """Whether all copies of the ledger's confirmed entries have to be there by now."""
    if ledger.closed:
        return True
    metadata = LedgerMetadata.decode(ledger.metadata, ledger.stored_id)
    return metadata.ack_quorum == metadata.write_quorum


async def audit_piece(piece: LedgerSlice, lease: str, options: ReadOptions) -> list[tuple[Any, ...]]:
    """Rows of AUDIT_SCHEMA: the verdicts on every copy of a piece, while its ledger is kept.

    Raises MessageLost if it was trimmed.
    """
    ledger = piece.ledger
    metadata = LedgerMetadata.decode(ledger.metadata, ledger.stored_id)
    settings = LedgerSettings(read_timeout_s=options.timeout_s)
    async with (
        connected(options) as client,
        renewing(client, piece.topic, lease, options.lease_s, ledger.position_id),
        bookie_transport(directory_of(piece.bookies), piece.bookies, settings) as transport,
    ):
        rows = await compare_copies(transport, ledger.stored_id, metadata, piece.first, piece.last)
    of_ledger = (piece.topic, ledger.position_id, ledger.stored_id)
    return [(*of_ledger, *found) for found in ranges_of(rows, metadata)]
