"""`archive`: closed ledgers of topics to Parquet files, with a manifest for each ledger; `read_archive` reads them back.

Tasks read a piece of a ledger from the bookies and write a file of its rows with pyarrow: rows never pass through the JVM.
A ledger's manifest is written when all of its files are there and hold as many rows as the topic says it has. So the job
may be killed and started again at any time: ledgers whose manifest stands are passed over, the others are archived anew,
over what was left of them. One job at a time writes to an archive. The layout stands in `magnetar.archive.files`.

With `trim` archived ledgers leave the bookies: the topic goes on naming them, and `spark.read` of it reads the files.
Without it they stay; a later run with `trim` reads the files again before it lets go of the ledgers, and writes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from magnetar.archive.files import BATCH_COLUMNS, ArchivedFile, ArchiveFolder, LedgerManifest
from magnetar.client import Client
from magnetar.client.administration import ask
from magnetar.proto.commands import KeepLedgers
from magnetar.proto.errors import InvalidArgument, MagnetarError, MessageLost, Unsupported
from magnetar.proto.ids import TopicName

from ..batch_source import read_slices
from ..leases import Keeper, keep, plan_of_topic
from ..options import ReadOptions
from ..plan import LedgerSlice, Range, TopicLedger, portions, slices
from ..schema import COLUMNS, topic_schema
from ..service import TopicPlan, asking, topic_names
from .folders import check_writable
from .job import checks, runs
from .topics import check_topics, full_name, read_options
from .trim import KeptLedgers, Trimming, foreign

# Topic and ledger are in the path; the partition number is part of the topic's name.
ARCHIVED_COLUMNS: Final = tuple(name for name in COLUMNS if name not in ("topic", "partition"))
ARROW_SCHEMA: Final = pa.schema(
    [(name, COLUMNS[name][1]) for name in ARCHIVED_COLUMNS] + list(BATCH_COLUMNS.items())
)
# Ledgers of one Spark job; what a killed run has to do again is no more than that.
ROUND_BYTES: Final = 4 << 30
ROUND_LEDGERS: Final = 1000
# A service that does not answer has failed the job already.
END_LEASE_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class ArchiveResult:
    """`archived`: manifests of this run. `archived_before`: ledgers that stood in the archive before, trimmed or not.

    `elsewhere`: ledgers that were trimmed before and are in another archive. `trimmed`: those that left the bookies now,
    by topic and position id. `moved`: those that were in another archive and are in this one now. `not_in_topic`:
    those that the broker trimmed meanwhile: the archive has them, and the topic does not name them. `kept`: what was
    to be trimmed or moved and stays as it is, and what a manifest of something else kept from being archived, for
    each topic where there is such.
    """

    archived: tuple[LedgerManifest, ...]
    archived_before: int
    elsewhere: int = 0
    trimmed: tuple[tuple[str, int], ...] = ()
    moved: int = 0
    not_in_topic: int = 0
    kept: tuple[KeptLedgers, ...] = ()

    def __add__(self, other: ArchiveResult) -> ArchiveResult:
        """The result for the topics of both."""
        names = [one.name for one in dataclasses.fields(self)]
        return ArchiveResult(*[getattr(self, name) + getattr(other, name) for name in names])

    @property
    def rows(self) -> int:
        """Messages that this run archived."""
        return sum(manifest.rows for manifest in self.archived)

    @property
    def bytes(self) -> int:
        """Of the files that this run wrote."""
        return sum(one.bytes for manifest in self.archived for one in manifest.files)


@dataclass(frozen=True, slots=True)
class Archiving:
    """What `archive` is asked for. A file holds about `file_bytes` of a ledger (as stored, in bytes).

    `trim`: archived ledgers leave the bookies, as far as nobody needs them. `moved`: the archive that the topics know was
    copied here, manifests and all, and they are to know this one from now on. `with_backlog`: what subscriptions and readers
    have not read yet leaves the bookies as well; they read it from the archive, which the broker must be able to open.
    """

    service_url: str
    topics: Sequence[str]
    path: str
    _: KW_ONLY
    file_bytes: int = 256 << 20
    lease_s: float = 600.0
    trim: bool = False
    moved: bool = False
    with_backlog: bool = False

    def _checked(self) -> tuple[ReadOptions, ArchiveFolder]:
        if self.file_bytes < 1:
            raise InvalidArgument(f"file_bytes is {self.file_bytes}; want a positive number of bytes")
        names = [full_name(topic) for topic in self.topics]
        options = read_options(
            self.service_url, names, lease_s=f"{self.lease_s}", partition_bytes=f"{self.file_bytes}"
        )
        if self.with_backlog and not self.trim:
            raise InvalidArgument(
                "with_backlog says what may leave the bookies, and without trim nothing does; give both"
            )
        folder = ArchiveFolder(self.path)
        if self.trim or self.moved:
            _ = folder.location  # raises if no topic may know it
        return options, folder

    def check(self) -> None:
        """Raises, without Spark and in the time of a few requests, what `archive` would raise for these arguments."""
        options, _folder = self._checked()
        check_writable("path", self.path)
        check_topics(options)

    def run(self, spark: SparkSession) -> ArchiveResult:
        """Archives what is closed and not yet archived.

        Raises InvalidArgument, TopicNotFound, MessageLost when a ledger was not what the topic says of it, and what Spark
        raises when a task fails. What was archived and trimmed until then stands. What cannot be trimmed now is in `kept`
        and no error.
        """
        options, folder = self._checked()
        names = asking(options, lambda client: topic_names(client, options))
        results = [self._archive_topic(spark, options, folder, topic) for topic in names]
        return functools.reduce(ArchiveResult.__add__, results)

    def _archive_topic(
        self, spark: SparkSession, options: ReadOptions, folder: ArchiveFolder, topic: str
    ) -> ArchiveResult:
        # Right before the topic's turn: from then on its tasks renew the lease.
        plan = asking(options, lambda client: plan_of_topic(client, topic, options.lease_s))
        keeper = Keeper(options, plan.lease, (topic,))
        try:
            manifests = folder.manifests(topic)
            closed = [ledger for ledger in plan.ledgers if ledger.closed and ledger.entries > 0]
            at_bookies = [ledger for ledger in closed if not ledger.archive]
            elsewhere = [ledger for ledger in closed if ledger.archive and not folder.is_at(ledger.archive)]
            wanted = [ledger for ledger in at_bookies if ledger.position_id not in manifests]
            written: list[LedgerManifest] = []
            for ledgers in portions(wanted, lambda ledger: ledger.size, ROUND_BYTES, ROUND_LEDGERS):
                for manifest in _archive_round(spark, options, folder, plan, ledgers):
                    folder.write_manifest(manifest)
                    written.append(manifest)
            manifests |= {manifest.ledger: manifest for manifest in written}
            to_record = (elsewhere if self.moved else []) + (at_bookies if self.trim else [])
            pairs = [(ledger, manifests.get(ledger.position_id)) for ledger in to_record]
            recorded = Trimming(spark, options, folder, plan, self.with_backlog)
            recorded.run(pairs)
            kept = recorded.kept or foreign(folder, plan, manifests, at_bookies)
        finally:
            keeper.stop()
            _end_lease(options, plan)
        return ArchiveResult(
            archived=tuple(written),
            archived_before=len(closed) - len(wanted) - len(elsewhere),
            elsewhere=len(elsewhere) - recorded.moved,
            trimmed=tuple((topic, ledger.position_id) for ledger in recorded.trimmed),
            moved=recorded.moved,
            not_in_topic=recorded.not_in_topic,
            kept=() if kept is None else (kept,),
        )


archive = runs(Archiving)
check_archive = checks(Archiving)


def _end_lease(options: ReadOptions, plan: TopicPlan) -> None:
    """Another run need not wait for it."""
    briefly = dataclasses.replace(options, timeout_s=min(options.timeout_s, END_LEASE_S))
    with contextlib.suppress(MagnetarError):  # then it ends by itself
        asking(briefly, lambda client: keep(client, plan.topic, plan.lease, 0))


def _archive_round(
    spark: SparkSession,
    options: ReadOptions,
    folder: ArchiveFolder,
    plan: TopicPlan,
    ledgers: Sequence[TopicLedger],
) -> list[LedgerManifest]:
    _check_alone(options, folder, plan, ledgers)
    for ledger in ledgers:
        folder.clear_ledger(plan.topic, ledger.position_id)
    pieces = slices(plan.topic, ledgers, Range(), options.partition_bytes, plan.bookies)
    place, lease = folder.place, plan.lease

    def work(piece: LedgerSlice) -> ArchivedFile:
        return write_piece(piece, lease, options, place)

    tasks = spark.sparkContext.parallelize(pieces, len(pieces))
    of_ledger: dict[int, list[ArchivedFile]] = {}
    for piece, file in zip(pieces, tasks.map(work).collect(), strict=True):
        of_ledger.setdefault(piece.ledger.position_id, []).append(file)
    return [manifest_of(plan.topic, ledger, tuple(of_ledger[ledger.position_id])) for ledger in ledgers]


def _check_alone(
    options: ReadOptions, folder: ArchiveFolder, plan: TopicPlan, ledgers: Sequence[TopicLedger]
) -> None:
    """What is cleared may not be the only copy of a ledger that another job has archived and trimmed meanwhile.

    While this job's lease is held no other one can trim. So it is renewed first, which tells whether it was held so far.
    """

    async def work(client: Client) -> int | None:
        command = KeepLedgers(0, plan.topic, plan.lease, round(options.lease_s * 1000))
        found: int | None = (await ask(client.admin, command, topic=plan.topic))["first"]
        return found

    first = asking(options, work)
    if first is None or first > ledgers[0].position_id:
        raise MessageLost(
            f"ledger {ledgers[0].position_id} of {plan.topic} was trimmed before it was archived, perhaps by another job "
            f"that archives this topic; run it again, with a longer lease_s than {options.lease_s:g} if it was only slow"
        )
    for ledger in ledgers:
        if folder.has_manifest(plan.topic, ledger.position_id):
            raise InvalidArgument(
                f"path {folder.place}: another job archives {plan.topic} there just now; run one at a time"
            )


def write_piece(piece: LedgerSlice, lease: str, options: ReadOptions, place: str) -> ArchivedFile:
    """In a task: one file of the archive."""
    return ArchiveFolder(place).write_file(
        piece.topic,
        piece.ledger.position_id,
        piece.first,
        piece.last,
        ARROW_SCHEMA,
        read_slices([piece], lease, options, ARROW_SCHEMA.names),
    )


def manifest_of(topic: str, ledger: TopicLedger, files: tuple[ArchivedFile, ...]) -> LedgerManifest:
    """Of a ledger whose files are all there. Raises MessageLost if they hold other than the topic's count of messages."""
    rows = sum(one.rows for one in files)
    if rows != ledger.messages:
        raise MessageLost(
            f"ledger {ledger.position_id} of {topic} was read with {rows} messages, and the topic says it has "
            f"{ledger.messages}; audit it before it is archived: magnetar spark audit {topic}"
        )
    return LedgerManifest(
        topic=topic,
        ledger=ledger.position_id,
        stored_ledger=ledger.stored_id,
        first_offset=ledger.first_offset,
        end_offset=ledger.end_offset,
        first_append_ms=ledger.first_append_ms,
        last_append_ms=ledger.last_append_ms,
        entries=ledger.entries,
        rows=rows,
        files=files,
    )


def read_archive(
    spark: SparkSession, path: str, topics: Sequence[str] = ()
) -> tuple[DataFrame, tuple[str, ...]]:
    """Archived messages of these topics, or of all, as a table with the columns of `spark.read` of a topic; in no order.

    Also the topics' full names. Only files that manifests name are read. Raises InvalidArgument when there are none,
    Unsupported for messages in chunks.
    """
    folder = ArchiveFolder(path)
    names = archived_names(folder, topics)
    paths: list[str] = []
    for topic in names:
        for one in folder.manifests(topic).values():
            if any(file.chunked for file in one.files):
                raise Unsupported(
                    f"ledger {one.ledger} of {topic} has messages in chunks, and its files a row for each chunk: read them "
                    "through the topic, which puts them together"
                )
            paths += [folder.path_of(topic, one.ledger, file.name) for file in one.files]
    if not paths:
        raise _nothing_of(folder, names[0])
    rows = spark.read.schema(_READ_SCHEMA).option("basePath", folder.base_path).parquet(*paths)
    # As `schema.topic_and_partition`.
    number = sql.regexp_extract("topic", _PARTITION, 1)
    partition = sql.when(number == "", -1).otherwise(number.cast("int"))
    whole = sql.regexp_replace("topic", _PARTITION, "")
    return rows.withColumn("partition", partition).withColumn("topic", whole).select(*COLUMNS), names


_PARTITION: Final = "-partition-(0|[1-9][0-9]*)$"


def archived_names(folder: ArchiveFolder, topics: Sequence[str]) -> tuple[str, ...]:
    """Full names as the archive has them, of these topics or of all; those of its partitions for a partitioned one.

    Raises InvalidArgument for one that it does not have.
    """
    there = folder.topics()
    if not there:
        raise InvalidArgument(
            f"archive: there is no archive at {folder.place}: no manifest was found below it"
        )
    names: list[str] = []
    for topic in dict.fromkeys(full_name(topic) for topic in topics):
        found = [name for name in there if name == topic or str(TopicName.parse(name).whole) == topic]
        if not found:
            raise _nothing_of(folder, topic)
        names += found
    return tuple(names or there)


def _nothing_of(folder: ArchiveFolder, topic: str) -> InvalidArgument:
    return InvalidArgument(f"the archive {folder.place} has nothing of topic {topic}; has it been archived?")


_READ_SCHEMA: Final = topic_schema((*ARCHIVED_COLUMNS, "topic"))
