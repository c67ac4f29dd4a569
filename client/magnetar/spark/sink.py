"""`write` and `writeStream`: each task writes a ledger of its own, the driver's commit attaches them all at once.

What a batch is called decides what "exactly once" means. A stream's batches are (query id, batch id): Spark repeats the last
one after a crash, and it is found done. A new checkpoint has a new id. A batch write is called by chance: whoever runs it
twice writes twice, as with files, unless the options `query` and `batch` name it; in foreachBatch the stream's id is part of
that name. Whether a batch is done says the broker, by its number and by a digest of its rows (`packing`), so two writes that
share a name by mistake are an error and lose nothing. A task that Spark runs twice writes two ledgers; one of them is named
to the commit, the other goes with the discard that follows it.

**Partitioned topics.** A row goes to the partition of its key, as the client routes it; rows without one go to the partition
whose turn it is, by the number of the task and the batch. Each partition is attached by a compare-and-set of its own, from
the last one down to the first, also where no row goes. So whoever repeats a batch completes it, and finds, if the topic has
grown meanwhile, among how many partitions its rows are divided: the highest that has the batch was the last one. A batch
that the first one has is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from zlib import crc32

import msgpack
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from magnetar.client import Client
from magnetar.client.administration import ask
from magnetar.client.core.routing import Router
from magnetar.proto.commands import AttachLedgers, QueryState
from magnetar.proto.errors import FinalError, InvalidArgument, MagnetarError, RetryableError
from magnetar.proto.ids import TopicName
from magnetar.runtime.tasks import awaited

from .error_boundary import short_errors
from .options import WriteOptions
from .packing import CONTENT_MODULUS, Packer, check_written, keys_of
from .service import asking, asking_once, connected, logs_of
from .staged import StagedLedger, discard_staged, keeping_staged, staged_ledger
from .versions import STREAMS_WRITE_ARROW, DataSourceStreamArrowWriter, arrow_batches

_log = logging.getLogger(__name__)

# Of a batch write, which nobody repeats under its name but the client that waits for the answer.
ONE_SHOT_REMEMBERED_MS = 24 * 3600 * 1000
# A task whose first rows take longer keeps what others staged. Most have theirs sooner, or none and no connection.
KEEP_AFTER_S = 0.5


class WrittenLedger(NamedTuple):
    """What a task wrote for one topic."""

    topic: str
    ledger_id: int
    messages: int
    first_ms: int
    last_ms: int
    content: int  # digest of the rows


@dataclass
class WrittenByTask(WriterCommitMessage):
    """What a task hands to the driver. A task without rows made no ledger."""

    query: str
    batch: int
    transaction: str
    ledgers: list[WrittenLedger]
    partitions: dict[str, int] = field(
        default_factory=dict
    )  # among how many rows of a topic were divided; 0: it has none


def transaction_of(query: str, batch: int) -> str:
    """One batch of a stream; an attempt that is repeated shares it with the one before."""
    return f"{query}/{batch}"


def write_task(
    options: WriteOptions,
    query: str,
    batch: int,
    rows: Iterator[pa.RecordBatch],
    transaction: str | None = None,
) -> WrittenByTask:
    """Writes the rows of one task, to a ledger for each topic that they go to. `transaction` None: that of the batch."""
    transaction = transaction_of(query, batch) if transaction is None else transaction
    return asyncio.run(_write(options, query, batch, transaction, rows))


async def _write(
    options: WriteOptions, query: str, batch: int, transaction: str, rows: Iterator[pa.RecordBatch]
) -> WrittenByTask:
    one = await _first(options, transaction, rows)
    if one is None:
        return WrittenByTask(query, batch, transaction, [])
    context = TaskContext.get()
    task = context.partitionId() if context else 0
    producer = f"spark-{query}-{task}"
    first_ms = last_ms = _now_ms()
    written: dict[str, tuple[StagedLedger, Packer]] = {}
    routing = _Routing(options, query, batch, transaction, task)
    async with connected(options) as client, contextlib.AsyncExitStack() as stack:
        while one is not None:
            last_ms = max(last_ms, _now_ms())
            for topic, some in await routing.share_out(client, one):
                if topic not in written:
                    kept_s = options.kept_s(partitioned=topic not in routing.counts)
                    staging = staged_ledger(client, topic, transaction, options.timeout_s, kept_s)
                    ledger = await stack.enter_async_context(staging)
                    written[topic] = ledger, Packer(producer, options, ledger.max_message_bytes)
                ledger, packer = written[topic]
                for entry in packer.pack(some, last_ms):
                    await ledger.append(entry.payload)
            # In a thread: while Spark computes the next rows, however long, what is staged goes on being renewed.
            one = await asyncio.to_thread(next, rows, None)
        ledgers: list[WrittenLedger] = []
        for topic, (ledger, packer) in written.items():
            await ledger.close()
            # Its last entry may be older than those of other topics.
            ledgers.append(
                WrittenLedger(
                    topic, ledger.ledger_id, packer.messages, first_ms, packer.last_ms, packer.content
                )
            )
        return WrittenByTask(query, batch, transaction, ledgers, routing.counts)


class _Routing:
    """To which log the rows of one task go. `counts`: partitions by full name of their topic, 0 if it has none."""

    def __init__(self, options: WriteOptions, query: str, batch: int, transaction: str, task: int) -> None:
        self._options = options
        self._query = query
        self._batch = batch
        self._repeatable = query != transaction
        self._turn = crc32(query.encode()) + batch + task  # the same for whoever repeats this
        self.counts: dict[str, int] = {}
        self._routers: dict[str, Router] = {}  # of topics that have partitions

    async def share_out(self, client: Client, rows: pa.RecordBatch) -> list[tuple[str, pa.RecordBatch]]:
        """Rows by log, in their order."""
        found: list[tuple[str, pa.RecordBatch]] = []
        for topic, some in _routed(self._options, rows):
            if topic not in self.counts:
                count = self.counts[topic] = await self._count(client, topic)
                if count:
                    self._routers[topic] = Router(
                        "single", self._options.routing_hash, count, self._take_turns
                    )
            found += self._of_partitions(topic, some) if topic in self._routers else [(topic, some)]
        return found

    def _take_turns(self, count: int) -> int:
        return self._turn % count

    async def _count(self, client: Client, topic: str) -> int:
        """Among how many partitions the rows of the batch are divided; 0: the topic has none.

        As many as there are, unless a part of the batch was attached when there were fewer: then the last one that there was
        is the highest that knows it. If the last one that there is knows the query, there are no more than before.
        """
        logs = await logs_of(client, topic)
        if logs == [topic]:
            return 0
        for number in range(len(logs), 0, -1) if self._repeatable else ():
            log = logs[number - 1]
            last = (await ask(client.admin, QueryState(0, log, self._query), topic=log))["batch"]
            if last >= 0:
                return number if last == self._batch else len(logs)
        return len(logs)

    def _of_partitions(self, topic: str, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        name, router, keys = TopicName.parse(topic), self._routers[topic], keys_of(rows)
        keyless, of_key = router.of_batch(lambda _: True), router.of_key
        chosen = pa.repeat(pa.scalar(keyless, pa.int32()), rows.num_rows)
        if keys is not None:
            numbers = [keyless if key is None else of_key[key] for key in keys.to_pylist()]
            chosen = pa.array(numbers, pa.int32())
        for number in pc.unique(chosen).to_pylist():
            yield str(name.partition_of(number)), rows.filter(pc.equal(chosen, number))


def _routed(options: WriteOptions, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Rows by their topic: that of the options, or what stands in their column `topic`. Raises InvalidArgument."""
    if options.topic:
        yield options.topic, rows
        return
    column = rows.column("topic")
    for topic in pc.unique(column):
        if not topic.is_valid:
            raise InvalidArgument(
                "a row to write has no topic: its column 'topic' is null; name one, or set the option topic"
            )
        yield str(TopicName.parse(topic.as_py())), rows.filter(pc.equal(column, topic))


async def _first(
    options: WriteOptions, transaction: str, rows: Iterator[pa.RecordBatch]
) -> pa.RecordBatch | None:
    """The first rows. While Spark computes them, however long, what other tasks staged goes on being renewed."""
    computing = awaited(asyncio.to_thread(lambda: next((one for one in rows if one.num_rows), None)))
    done, _ = await asyncio.wait([computing], timeout=KEEP_AFTER_S)
    if not done and options.topic:
        async with connected(options) as client:
            if await logs_of(client, options.topic) == [options.topic]:
                async with keeping_staged(client, options.topic, transaction, options.kept_s()):
                    await asyncio.wait([computing])
    return await computing


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def attach(
    options: WriteOptions, messages: Sequence[WriterCommitMessage | None], remember_ms: int = 0
) -> bool:
    """Publishes what the tasks wrote, in their order; False if all of it was published before.

    Each topic has all of the batch or nothing, and they one after another: whoever repeats the batch finds those that are
    done. `remember_ms`: how long a topic remembers that it has this batch; 0: as long as the broker's settings say.
    """
    written = [message for message in messages if isinstance(message, WrittenByTask)]
    by_log: dict[str, list[WrittenLedger]] = {}
    for ledger in itertools.chain.from_iterable(message.ledgers for message in written):
        by_log.setdefault(ledger.topic, []).append(ledger)
    if not by_log:
        return False
    if written[0].query != written[0].transaction:  # it may be repeated
        for topic, count in _divided(written).items():
            for number in range(count):
                by_log.setdefault(str(TopicName.parse(topic).partition_of(number)), [])
    last_first = sorted(by_log, key=lambda log: TopicName.parse(log).partition, reverse=True)

    async def run(client: Client) -> bool:
        done = [
            await _attach(client, options, written[0], log, by_log[log], remember_ms) for log in last_first
        ]
        return any(done)

    return asking(options, run)


def _divided(written: Sequence[WrittenByTask]) -> dict[str, int]:
    """Among how many partitions the rows of each partitioned topic are divided. Raises FinalError unless all tasks agree."""
    counts: dict[str, int] = {}
    for topic, count in itertools.chain.from_iterable(message.partitions.items() for message in written):
        if counts.setdefault(topic, count) != count:
            raise FinalError(
                f"{topic} got partitions while the rows were written, so that tasks divided them among {counts[topic]} and "
                f"among {count}; nothing was published: run it again"
            )
    return {topic: count for topic, count in counts.items() if count}


async def _attach(
    client: Client,
    options: WriteOptions,
    of: WrittenByTask,
    topic: str,
    ledgers: Sequence[WrittenLedger],
    remember_ms: int,
) -> bool:
    content = 0
    if options.repeated_batch == "compare":  # 0 says that there is nothing to compare
        content = sum(one.content for one in ledgers) % CONTENT_MODULUS or 1
    rows = [[one.ledger_id, one.messages, one.first_ms, one.last_ms] for one in ledgers]
    command = AttachLedgers(0, topic, of.query, of.batch, remember_ms, content)
    done = await ask(client.admin, command, topic=topic, payload=msgpack.packb(rows))
    # The batch is there; what tasks wrote that failed, or ran twice, goes.
    await discard_staged(client, topic, of.transaction)
    return bool(done["attached"])


def discard(
    options: WriteOptions, transaction: str, messages: Sequence[WriterCommitMessage | None] = ()
) -> None:
    """Deletes what the tasks of a batch wrote, if the broker can be reached; else the sweep does.

    `transaction` "": what the messages name.
    """
    written = [message for message in messages if isinstance(message, WrittenByTask)]
    transaction = written[0].transaction if written else transaction
    topics = {ledger.topic: None for message in written for ledger in message.ledgers}
    if options.topic:
        topics[options.topic] = None

    async def run(client: Client) -> None:
        for topic in topics:
            for log in await logs_of(client, topic):
                await discard_staged(client, log, transaction)

    if not transaction:
        return
    try:
        asking_once(options, run)
    except MagnetarError as error:
        _log.warning("staged ledgers of %s are left to the sweep: %s", ", ".join(topics), error)


@short_errors("write", "commit", "abort")
class TopicWriter(DataSourceArrowWriter):
    """`df.write.format("magnetar")`, mode append. The options `query` and `batch` make it one that can be repeated."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_written(schema, options)
        if options.query and options.batch < 0:
            raise InvalidArgument(
                "option query is set without the option batch: together they name a write that is done once, however often "
                "it is run"
            )
        self._repeatable = options.batch >= 0
        # Nothing else can have a name that is drawn here, so there is nothing to compare.
        self._options = options if self._repeatable else replace(options, repeated_batch="done")
        # Of this write alone, also if another one has the same name: neither discards what the other has staged.
        self._transaction = f"write-{random.SystemRandom().getrandbits(64):016x}"
        self._query = options.query or self._transaction
        self._batch = max(0, options.batch)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenByTask:
        """In a task. A named write in foreachBatch is one of that stream: with a new checkpoint it is another one."""
        stream = _task_properties().get("sql.streaming.queryId", "") if self._repeatable else ""
        query = f"{self._query}@{stream}" if stream else self._query
        return write_task(self._options, query, self._batch, iterator, self._transaction)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """In the driver, when all tasks succeeded."""
        if self._repeatable:
            attach(self._options, messages)
            return
        try:
            attach(self._options, messages, ONE_SHOT_REMEMBERED_MS)
        except RetryableError as error:
            topic = self._options.topic or "their topics"
            raise type(error)(
                f"{error.message} (whether the rows are in {topic} is not known: look before you write again)",
                **error.details,
            ) from error

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """In the driver, when one did not."""
        discard(self._options, self._transaction, messages)


@short_errors("write", "commit", "abort")
class TopicStreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream.format("magnetar")`. The query's id, which its checkpoint has, names its batches."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_written(schema, options)
        if options.query:
            raise InvalidArgument(
                "options query and batch are for df.write; a stream's batches are named by the id in its checkpoint: leave "
                "them out"
            )
        self._options = options
        self._schema = schema

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenByTask:
        """In a task."""
        properties = _task_properties()
        query = properties.get("sql.streaming.queryId", "")
        batch = int(properties.get("streaming.sql.batchId", "-1"))
        rows = iterator if STREAMS_WRITE_ARROW else arrow_batches(iterator, self._schema)
        assert query, f"Spark names no streaming query: {properties}"
        assert batch >= 0, f"Spark numbers no micro-batch: {properties}"
        return write_task(self._options, query, batch, rows)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """In the driver; Spark repeats a batch whose commit it does not know to have succeeded."""
        attach(self._options, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """In the driver. Without any message the query's name is not known.

        Then only killed tasks left something, which the sweep finds: those that fail discard what they wrote.
        """
        discard(self._options, "", messages)


def _task_properties() -> Mapping[str, str]:
    context = TaskContext.get()
    if context is None:
        return {}
    names = ("sql.streaming.queryId", "streaming.sql.batchId")
    return {name: value for name in names if (value := context.getLocalProperty(name)) is not None}
