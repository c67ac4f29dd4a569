"""`spark.read.format("magnetar")`: what a topic has now, a Spark partition for each piece of a ledger.

Where all columns that are wanted follow from a message's offset (topic, partition, offset itself), nothing is read but the
topic's list of ledgers, and a few entries where the range begins or ends within a ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from magnetar.client import Client
from magnetar.ledger import LedgerReader
from magnetar.proto.errors import InvalidArgument, MessageLost
from magnetar.proto.ids import MessageId
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.tasks import awaited

from .archived import ArchivedReader, ArchivedSlice, archived_slices, read_archived
from .bookies import ledger_readers
from .columns import BYTES_PER_RECORD_BATCH, OFFSET_COLUMNS, ROWS_PER_RECORD_BATCH, Rows, Source, offset_rows
from .error_boundary import short_errors
from .leases import keep, plan_of_topic, renewing
from .options import AtOffset, Place, ReadOptions
from .places import located, offsets_around, offsets_within
from .plan import LedgerSlice, Range, TopicLedger, missing, portions, slices
from .schema import topic_and_partition
from .service import TopicPlan, asking, connected, ledgers_of_topic, topic_names

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

_log = logging.getLogger(__name__)

READ_BYTES = 4 << 20
LEDGERS_AHEAD = 4  # of small ones
WAIT_FOR_CHUNKS_MS = 60_000
LOOK_AGAIN_S = 0.2
Reader = LedgerReader | ArchivedReader
# So that counting some millions of messages keeps several cores busy.
OFFSETS_PER_TASK = 1 << 20


@dataclass
class TopicPiece(InputPartition):
    """What one task reads: of one topic, in its order."""

    slices: Sequence[LedgerSlice | ArchivedSlice]
    lease: str  # archived ledgers need none
    follows: bool = False  # waits for the last chunks of messages that began in it


@dataclass
class OffsetsPiece(InputPartition):
    """Messages of which the task needs to know their offsets only: first..end-1."""

    topic: str
    first: int
    end: int


@short_errors("partitions", "read")
class TopicReader(DataSourceReader):
    """Plans in the driver, reads in the tasks. `wanted` narrows what the options say."""

    def __init__(self, options: ReadOptions, columns: Sequence[str]) -> None:
        options.check_batch()
        self._options = options
        self._columns = columns
        self._wanted = Range()

    def partitions(self) -> list[InputPartition]:
        """Asks the broker; in the order of topics and their ledgers."""
        return asking(self._options, self._plan)

    async def _plan(self, client: Client) -> list[InputPartition]:
        options = self._options
        wanted_of: list[tuple[TopicPlan, Range]] = []
        for topic in await topic_names(client, options):
            plan = await plan_of_topic(client, topic, options.lease_s)
            wanted = range_of(options, plan)
            if lost := lost_of(options, plan):
                message = (
                    f"{lost} messages of {topic}, from {options.start_of(topic)} to {options.end_of(topic)}, were trimmed; "
                    "with the option fail_on_data_loss=false what is left is read"
                )
                if options.fail_on_data_loss:
                    raise MessageLost(message)
                _log.warning("%s", message)
            wanted = wanted.narrowed(self._wanted)
            if not _offsets_suffice(self._columns):
                wanted = await located(wanted, plan, options.timeout_s)
            wanted_of.append((plan, wanted))
        pieces = await pieces_of(wanted_of, options, self._columns)
        if _offsets_suffice(self._columns):  # then no task needs the ledgers
            for plan, _ in wanted_of:
                await keep(client, plan.topic, plan.lease, 0)
        # Spark takes an empty list for "cannot be split", and calls read(None).
        return pieces or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Arrow record batches of one piece."""
        if isinstance(partition, TopicPiece | OffsetsPiece):
            yield from read_partition(partition, self._options, self._columns)


class FilteredTopicReader(TopicReader):
    """For sessions with spark.sql.python.filterPushdown.enabled; without it Spark refuses a reader that has pushFilters."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Narrows what is read, and leaves all filters to Spark as well."""
        from .filters import range_of_filters  # which needs PySpark 4.1

        self._wanted = self._wanted.narrowed(range_of_filters(filters))
        return filters


def read_partition(
    partition: TopicPiece | OffsetsPiece, options: ReadOptions, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """In a task."""
    if isinstance(partition, OffsetsPiece):
        of = partition
        return offset_rows(columns, *topic_and_partition(of.topic), of.first, of.end)
    return read_slices(partition.slices, partition.lease, options, columns, follows=partition.follows)


async def pieces_of(
    wanted_of: Sequence[tuple[TopicPlan, Range]], options: ReadOptions, columns: Sequence[str]
) -> list[InputPartition]:
    """What ranges of topics have, in their order: a large ledger is several tasks, many small ones are one. MessageLost."""
    if _offsets_suffice(columns):
        return await _offsets_of(wanted_of, options)
    partition_bytes = options.partition_bytes
    if options.min_partitions:
        met = (one.size for plan, wanted in wanted_of for one in plan.ledgers if wanted.meets(one))
        partition_bytes = max(1, min(partition_bytes, sum(met) // options.min_partitions))
    pieces: list[InputPartition] = []
    for plan, wanted in wanted_of:
        pieces += await _pieces_of(plan, wanted, partition_bytes)
    return pieces


def _offsets_suffice(columns: Sequence[str]) -> bool:
    return OFFSET_COLUMNS.issuperset(columns)


async def _offsets_of(
    wanted_of: Sequence[tuple[TopicPlan, Range]], options: ReadOptions
) -> list[InputPartition]:
    runs = [
        (plan.topic, first, end)
        for plan, wanted in wanted_of
        for first, end in await offsets_within(wanted, plan, options.timeout_s)
    ]
    step = OFFSETS_PER_TASK
    if options.min_partitions:
        step = max(1, min(step, sum(end - first for _, first, end in runs) // options.min_partitions))
    return [
        OffsetsPiece(topic, start, min(end, start + step))
        for topic, first, end in runs
        for start in range(first, end, step)
    ]


async def _pieces_of(plan: TopicPlan, wanted: Range, partition_bytes: int) -> list[TopicPiece]:
    """Archived ledgers are the beginning of a topic."""
    # Manifests are files: reading them in the loop would keep leases from being renewed.
    archived = await asyncio.to_thread(archived_slices, plan.topic, plan.ledgers, wanted, partition_bytes)
    found = [TopicPiece([piece], plan.lease) for piece in archived]
    at_bookies = slices(plan.topic, plan.ledgers, wanted, partition_bytes, plan.bookies)
    runs = portions(at_bookies, lambda piece: piece.size, partition_bytes)
    found += [TopicPiece(some, plan.lease) for some in runs]
    return found


def lost_of(options: ReadOptions, plan: TopicPlan) -> int:
    """How many messages between `start` and `end` the topic had and has no more; at most so many, if those are no offsets.

    A range that begins at a message id or an offset begins there, one that begins with `earliest` with the first message
    that there is. Whether a trimmed message lay between two times cannot be known: what may have counts if there is nothing
    left between them, and later messages are there.
    """
    wanted = range_of(options, plan)
    if wanted.from_position >= wanted.before_position or wanted.from_append_ms >= wanted.before_append_ms:
        return 0
    start, end = options.start_of(plan.topic), options.end_of(plan.topic)
    if isinstance(end, int) and end <= plan.created_ms:
        return 0
    first, before = offsets_around(start, plan), offsets_around(end, plan)
    reaches_kept = first.most < before.least
    return missing(
        plan.ledgers,
        first.most if isinstance(start, int) and reaches_kept else first.least,
        before.least if isinstance(end, int) and reaches_kept else before.most,
    )


def range_of(options: ReadOptions, plan: TopicPlan) -> Range:
    """What `start` and `end` mean for a topic. A message id is exact, a time goes by when the broker stored messages."""
    return _from(options.start_of(plan.topic), plan).narrowed(_before(options.end_of(plan.topic), plan))


def _from(place: Place, plan: TopicPlan) -> Range:
    if isinstance(place, MessageId):
        return Range(from_position=place[:3])
    if isinstance(place, AtOffset):
        return Range(from_offset=place.offset)
    if isinstance(place, int):
        return Range(from_append_ms=place)
    return Range() if place == "earliest" else Range(from_position=plan.end)


def _before(place: Place, plan: TopicPlan) -> Range:
    if isinstance(place, MessageId):
        return Range(before_position=place[:3])
    if isinstance(place, AtOffset):
        return Range(before_offset=place.offset)
    if isinstance(place, int):
        return Range(before_append_ms=place)
    if place == "earliest":
        raise InvalidArgument(
            "option end is 'earliest', before which there is nothing; want latest, an id or a time"
        )
    return Range(before_position=plan.end)


def read_slices(
    slices: Sequence[LedgerSlice | ArchivedSlice],
    lease: str,
    options: ReadOptions,
    columns: Sequence[str],
    *,
    follows: bool = False,
) -> Iterator[pa.RecordBatch]:
    """What a task reads: files of an archive, or entries of ledgers one after another.

    For the former it runs a loop whenever Spark wants more; the next reads are under way while Spark works on the last.
    """
    of_entries = [one for one in slices if isinstance(one, LedgerSlice)]
    for one in slices:
        if isinstance(one, ArchivedSlice):
            yield from read_archived(one, columns)
    if not of_entries:
        return
    with asyncio.Runner() as runner:
        run = (
            runner.get_loop().run_until_complete
        )  # the runner's own does no more but to mind Ctrl-C, each time
        batches = _batches(of_entries, lease, options, columns, follows)

        async def next_batch() -> pa.RecordBatch | None:
            return await anext(batches, None)

        try:
            while (batch := run(next_batch())) is not None:
                yield batch
        finally:
            run(batches.aclose())


async def _batches(
    slices: Sequence[LedgerSlice], lease: str, options: ReadOptions, columns: Sequence[str], follows: bool
) -> AsyncGenerator[pa.RecordBatch, None]:
    topic, first = slices[0].topic, slices[0].ledger
    rows = Rows(columns, *topic_and_partition(topic))
    async with (
        connected(options) as client,
        renewing(client, topic, lease, options.lease_s, None if first.archive else first.position_id),
        ledger_readers(slices, options.timeout_s) as reader_of,
        contextlib.aclosing(_entries(slices, reader_of)) as found,
    ):
        async for piece, entries in found:
            ledger = piece.ledger
            source = Source(ledger.position_id, ledger.first_offset, ledger.append_ms)
            for entry in entries:
                rows.add(entry, source, piece.wanted)
                if rows.count >= ROWS_PER_RECORD_BATCH or rows.large_bytes >= BYTES_PER_RECORD_BATCH:
                    yield rows.take()
        if rows.unfinished_since_ms is not None:
            behind = _entries_behind(client, slices[-1], options, rows, follows)
            async with contextlib.aclosing(behind):
                async for entry_behind, source in behind:
                    rows.finish(entry_behind, source)
                    if rows.large_bytes >= BYTES_PER_RECORD_BATCH:
                        yield rows.take()
    if rows.count:
        yield rows.take()


async def _entries_behind(
    client: Client, last: LedgerSlice, options: ReadOptions, rows: Rows, follows: bool
) -> AsyncGenerator[tuple[bytes, Source], None]:
    """What comes behind a slice, while messages in chunks are not finished that began in it.

    The slice in which a message begins has it. At the end of the topic a batch read leaves it out; a stream (`follows`)
    waits as long as a consumer does by default, since the next batch begins behind its first chunk.
    """
    position_id, first = last.ledger.position_id, last.last + 1
    while True:
        plan = await ledgers_of_topic(client, last.topic, position_id - 1, 0)
        for ledger in plan.ledgers:
            if ledger.position_id != position_id:
                position_id, first = ledger.position_id, 0
            if first >= ledger.entries:
                continue
            piece = last._replace(ledger=ledger, first=first, last=ledger.entries - 1, bookies=plan.bookies)
            async with (
                ledger_readers([piece], options.timeout_s) as reader_of,
                contextlib.aclosing(_entries([piece], reader_of)) as found,
            ):
                async for _, entries in found:
                    for entry in entries:
                        yield entry, Source(ledger.position_id, ledger.first_offset, ledger.append_ms)
                        first += 1
                        if rows.unfinished_since_ms is None:
                            return
        since_ms = rows.unfinished_since_ms
        if not plan.ledgers or plan.ledgers[-1].end_offset >= plan.end_offset:
            if not follows or since_ms is None or SystemClock().now_ms() - since_ms > WAIT_FOR_CHUNKS_MS:
                return
            await asyncio.sleep(LOOK_AGAIN_S)


async def _entries(
    slices: Sequence[LedgerSlice], reader_of: Callable[[TopicLedger], LedgerReader]
) -> AsyncGenerator[tuple[LedgerSlice, Sequence[bytes]], None]:
    """In order; of small ledgers, which one read has as a whole, several are read at a time."""
    coming = iter(slices)
    begun: deque[tuple[LedgerSlice, Reader, asyncio.Task[Sequence[bytes]]]] = deque()
    reading: asyncio.Task[Sequence[bytes]] | None = None

    def begin() -> None:
        for piece in itertools.islice(coming, LEDGERS_AHEAD - len(begun)):
            ledger = piece.ledger
            reader = ArchivedReader(piece.topic, ledger) if ledger.archive else reader_of(ledger)
            begun.append((piece, reader, _read(reader, piece.first, piece.last)))

    try:
        begin()
        while begun:
            piece, reader, reading = begun.popleft()
            first = piece.first
            while first <= piece.last:
                entries = await reading
                first += len(entries)
                if first <= piece.last:
                    reading = _read(reader, first, piece.last)
                else:
                    begin()
                yield piece, entries
    finally:
        for task in (reading, *(task for _, _, task in begun)):
            if task is not None:
                task.cancel()


def _read(reader: Reader, first: int, last: int) -> asyncio.Task[Sequence[bytes]]:
    return awaited(reader.read(first, last, max_bytes=READ_BYTES))
