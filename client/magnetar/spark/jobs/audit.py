"""`audit`: every entry of every closed ledger of topics, read from every bookie that should have it, and compared.

A Spark partition reads a piece of a ledger from the bookies themselves, over the ledger client's transport; the broker only
says which ledgers there are, and keeps them while they are read. The result has a row for each copy:

    topic, ledger (position id), stored_ledger (as bookies know it), entry, bookie, state, detail

with a state of ok, missing, damaged, differs or unreachable: see `copies`. A ledger that is open is not audited.

Differences are reported and not yet handed to the repair queue: no command of the broker takes them (ARCHITECTURE.md, "Audit
and the repair queue"). Bookies that find damage themselves put it there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from magnetar.ledger import LedgerMetadata, LedgerSettings, StaticBookies

from ..bookies import bookie_transport
from ..options import ReadOptions
from ..plan import LedgerSlice, Range, slices
from ..service import connected, renewing
from .copies import OK, CopyRow, compare_copies
from .topics import full_name, plans_of, read_options

AUDIT_SCHEMA: Final = (
    "topic string, ledger bigint, stored_ledger bigint, entry bigint, bookie string, "
    "state string, detail string"
)
_ARROW_SCHEMA: Final = pa.schema(
    {
        "topic": pa.string(),
        "ledger": pa.int64(),
        "stored_ledger": pa.int64(),
        "entry": pa.int64(),
        "bookie": pa.string(),
        "state": pa.string(),
        "detail": pa.string(),
    }
)


@dataclass(frozen=True, slots=True)
class AuditResult:
    """`copies` is kept by Spark until `close`; `states` says how many copies are in each state."""

    copies: DataFrame
    ledgers: int
    states: dict[str, int]

    @property
    def problems(self) -> DataFrame:
        """The copies that are not ok."""
        return self.copies.filter(sql.col("state") != OK)

    @property
    def clean(self) -> bool:
        """Whether every copy is ok."""
        return all(state == OK for state in self.states)

    def close(self) -> None:
        """Spark forgets the copies."""
        self.copies.unpersist()


def audit(
    spark: SparkSession,
    service_url: str,
    topics: Sequence[str],
    *,
    partition_bytes: int = 64 << 20,
    timeout_s: float = 30.0,
    lease_s: float = 600.0,
) -> AuditResult:
    """Audits topics. A task reads about `partition_bytes` of a ledger, from each of its bookies.

    Raises InvalidArgument, TopicNotFound. What bookies answer, or do not, is part of the result and no error.
    """
    told = {"partition_bytes": f"{partition_bytes}", "timeout_s": f"{timeout_s}", "lease_s": f"{lease_s}"}
    options = read_options(service_url, [full_name(topic) for topic in topics], **told)
    plans_of(options)  # raises for a topic that is not there before Spark starts on anything
    spark.dataSource.register(AuditSource)
    reader = spark.read.format(AuditSource.name()).option("service_url", service_url).options(**told)
    copies = reader.option("topics", ",".join(options.topics)).load()
    copies = copies.persist(StorageLevel.MEMORY_AND_DISK)
    states = {row["state"]: row["count"] for row in copies.groupBy("state").count().collect()}
    ledgers = copies.select("topic", "ledger").distinct().count()
    return AuditResult(copies, ledgers, dict(sorted(states.items())))


@dataclass
class AuditPiece(InputPartition):
    """What one task audits."""

    piece: LedgerSlice
    lease: str


class AuditSource(DataSource):
    """The copies as a table. A data source and no mapInArrow, which cannot do without pandas."""

    @classmethod
    def name(cls) -> str:
        """What stands in `format(...)` once it is registered."""
        return "magnetar_audit"

    def schema(self) -> str:
        """A row per copy."""
        return AUDIT_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """Options are those of a read of topics."""
        return AuditReader(ReadOptions.parse(self.options))


class AuditReader(DataSourceReader):
    """Plans in the driver, audits in the tasks."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """One for each piece of a closed ledger: a slow bookie holds up one task."""
        pieces: list[InputPartition] = []
        for plan in plans_of(self._options):
            closed = [ledger for ledger in plan.ledgers if ledger.closed and ledger.entries > 0]
            size = self._options.partition_bytes
            pieces += [
                AuditPiece(piece, plan.lease)
                for piece in slices(plan.topic, -1, closed, Range(), size, plan.bookies)
            ]
        # Spark takes an empty list for "cannot be split", and calls read(None).
        return pieces or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: the verdicts on a piece, in one record batch."""
        if isinstance(partition, AuditPiece):
            yield asyncio.run(audit_piece(partition.piece, partition.lease, self._options))


async def audit_piece(piece: LedgerSlice, lease: str, options: ReadOptions) -> pa.RecordBatch:
    """The verdicts on every copy of a piece, while its ledger is kept. Raises MessageLost if it was trimmed."""
    ledger = piece.ledger
    metadata = LedgerMetadata.decode(ledger.metadata, ledger.stored_id)
    async with (
        connected(options) as client,
        renewing(client, piece.topic, lease, options.lease_s, ledger.position_id),
        bookie_transport(
            StaticBookies(piece.bookies), LedgerSettings(read_timeout_s=options.timeout_s)
        ) as transport,
    ):
        rows = await compare_copies(transport, ledger.stored_id, metadata, piece.first, piece.last)
    return _record_batch(piece, rows)


def _record_batch(piece: LedgerSlice, rows: Sequence[CopyRow]) -> pa.RecordBatch:
    n = len(rows)
    return pa.RecordBatch.from_arrays(
        [
            pa.repeat(pa.scalar(piece.topic), n),
            pa.repeat(pa.scalar(piece.ledger.position_id, pa.int64()), n),
            pa.repeat(pa.scalar(piece.ledger.stored_id, pa.int64()), n),
            pa.array([row.entry for row in rows], pa.int64()),
            pa.array([row.bookie for row in rows], pa.string()),
            pa.array([row.state for row in rows], pa.string()),
            pa.array([row.detail for row in rows], pa.string()),
        ],
        schema=_ARROW_SCHEMA,
    )


__all__ = ["AuditResult", "audit"]
