"""`write` and `writeStream`: each task writes a ledger of its own, the driver's commit attaches them all at once.

What a batch is called decides what "exactly once" means. A stream's batches are (query id, batch id): Spark repeats the last
one after a crash, and it is found done. A new checkpoint has a new id. A batch write is called by chance: whoever runs it
twice writes twice, as with files, unless the options `query` and `batch` name it; in foreachBatch the stream's id is part of
that name. Whether a batch is done says the broker, by its number and by a digest of its rows (`packing`), so two writes that
share a name by mistake are an error and lose nothing. A task that Spark runs twice writes two ledgers; one of them is named
to the commit, the other goes with the discard that follows it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgpack
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from magnetar.client import Client
from magnetar.proto.commands import AttachLedgers, DiscardStaged
from magnetar.proto.compression import Compression
from magnetar.proto.errors import InvalidArgument, MagnetarError, RetryableError

from .doors import doors
from .options import WriteOptions
from .packing import CONTENT_MODULUS, Packer, check_written
from .service import asking, asking_once, connected
from .staged import DISCARD_TIMEOUT_S, keeping_staged, staged_ledger
from .values import ColumnEncoder

_log = logging.getLogger(__name__)

# Of a batch write, which nobody repeats under its name but the client that waits for the answer.
ONE_SHOT_REMEMBERED_MS = 24 * 3600 * 1000
# A task whose first rows take longer keeps what others staged. Most have theirs sooner, or none and no connection.
KEEP_AFTER_S = 0.5


@dataclass
class WrittenLedger(WriterCommitMessage):
    """What a task tells the driver. A task without rows makes no ledger (-1)."""

    query: str
    batch: int
    ledger_id: int
    messages: int
    first_ms: int
    last_ms: int
    content: int  # digest of the rows

    @property
    def transaction(self) -> str:
        """What the ledgers of a batch are staged under."""
        return transaction_of(self.query, self.batch)


def transaction_of(query: str, batch: int) -> str:
    """One batch of one query; an attempt that is repeated shares it with the one before."""
    return f"{query}/{batch}"


def write_task(
    options: WriteOptions, query: str, batch: int, rows: Iterator[pa.RecordBatch]
) -> WrittenLedger:
    """Writes the rows of one task to a ledger."""
    return asyncio.run(_write(options, query, batch, rows))


async def _write(
    options: WriteOptions, query: str, batch: int, rows: Iterator[pa.RecordBatch]
) -> WrittenLedger:
    first = await _first(options, transaction_of(query, batch), rows)
    if first is None:
        return WrittenLedger(query, batch, -1, 0, 0, 0, 0)
    context = TaskContext.get()
    part = context.partitionId() if context else 0
    async with (
        connected(options) as client,
        staged_ledger(
            client, options.topic, transaction_of(query, batch), options.timeout_s, options.staged_ttl_s
        ) as ledger,
    ):
        packer = Packer(
            f"spark-{query}-{part}",
            Compression.parse(options.compression),
            min(options.max_message_bytes, ledger.max_message_bytes),
            None if options.value_format == "binary" else ColumnEncoder(options),
        )
        first_ms = last_ms = _now_ms()
        one: pa.RecordBatch | None = first
        while one is not None:
            last_ms = max(last_ms, _now_ms())
            for entry in packer.pack(one, last_ms):
                await ledger.append(entry.payload)
            # In a thread: while Spark computes the next rows, however long, what is staged goes on being renewed.
            one = await asyncio.to_thread(next, rows, None)
        await ledger.close()
        return WrittenLedger(
            query, batch, ledger.ledger_id, packer.messages, first_ms, last_ms, packer.content
        )


async def _first(
    options: WriteOptions, transaction: str, rows: Iterator[pa.RecordBatch]
) -> pa.RecordBatch | None:
    """The first rows. While Spark computes them, however long, what other tasks staged goes on being renewed."""
    computing = asyncio.create_task(
        asyncio.to_thread(lambda: next((one for one in rows if one.num_rows), None))
    )
    done, _ = await asyncio.wait([computing], timeout=KEEP_AFTER_S)
    if not done:
        async with (
            connected(options) as client,
            keeping_staged(client, options.topic, transaction, options.staged_ttl_s),
        ):
            await asyncio.wait([computing])
    return await computing


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def attach(
    options: WriteOptions, messages: Sequence[WriterCommitMessage | None], remember_ms: int = 0
) -> bool:
    """Publishes what the tasks wrote; False if this batch was published before. In the order of the tasks.

    `remember_ms`: how long the topic remembers that it has this batch; 0: as long as the broker's settings say.
    """
    written = [message for message in messages if isinstance(message, WrittenLedger)]
    ledgers = [message for message in written if message.ledger_id >= 0]
    if not ledgers:
        return False
    query, batch = ledgers[0].query, ledgers[0].batch
    content = 0
    if options.repeated_batch == "compare":  # 0 says that there is nothing to compare
        content = sum(one.content for one in ledgers) % CONTENT_MODULUS or 1

    async def run(client: Client) -> bool:
        rows = [[one.ledger_id, one.messages, one.first_ms, one.last_ms] for one in ledgers]
        command = AttachLedgers(0, options.topic, query, batch, remember_ms, content)
        done = await client.request(command, topic=options.topic, payload=msgpack.packb(rows))
        # The batch is there; what tasks wrote that failed, or ran twice, goes.
        await _discard(client, options, query, batch)
        return bool(done["attached"])

    return asking(options, run)


def discard(options: WriteOptions, query: str, batch: int) -> None:
    """Deletes what the tasks of a batch wrote, if the broker can be reached; else the sweep does."""

    try:
        asking_once(options, lambda client: _discard(client, options, query, batch))
    except MagnetarError as error:
        _log.warning("staged ledgers of %s are left to the sweep: %s", options.topic, error)


async def _discard(client: Client, options: WriteOptions, query: str, batch: int) -> None:
    """Tidies up, but not at any price."""
    command = DiscardStaged(0, options.topic, transaction_of(query, batch))
    try:
        async with asyncio.timeout(DISCARD_TIMEOUT_S):
            await client.request(command, topic=options.topic)
    except (MagnetarError, TimeoutError) as error:
        _log.warning("staged ledgers of %s are left to the sweep: %s", options.topic, error)


@doors("write", "commit", "abort")
class TopicWriter(DataSourceArrowWriter):
    """`df.write.format("magnetar")`, mode append. The options `query` and `batch` make it one that can be repeated."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_written(schema, options)
        if options.query and options.batch < 0:
            raise InvalidArgument(
                "option query is set without the option batch: together they name a write that is done once, however often "
                "it is run"
            )
        self._options = options
        self._repeatable = options.batch >= 0
        self._query = options.query or f"write-{random.SystemRandom().getrandbits(64):016x}"
        self._batch = max(0, options.batch)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenLedger:
        """In a task. A named write in foreachBatch is one of that stream: with a new checkpoint it is another one."""
        stream = _task_properties().get("sql.streaming.queryId", "") if self._repeatable else ""
        query = f"{self._query}@{stream}" if stream else self._query
        return write_task(self._options, query, self._batch, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """In the driver, when all tasks succeeded."""
        if self._repeatable:
            attach(self._options, messages)
            return
        try:
            attach(self._options, messages, ONE_SHOT_REMEMBERED_MS)
        except RetryableError as error:
            raise type(error)(
                f"{error.message} (whether the rows are in {self._options.topic} is not known: look before you write again)",
                **error.details,
            ) from error

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """In the driver, when one did not."""
        discard(self._options, _query_of(messages, self._query), self._batch)


@doors("write", "commit", "abort")
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

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenLedger:
        """In a task."""
        properties = _task_properties()
        query = properties.get("sql.streaming.queryId", "")
        batch = int(properties.get("streaming.sql.batchId", "-1"))
        assert query, f"Spark names no streaming query: {properties}"
        assert batch >= 0, f"Spark numbers no micro-batch: {properties}"
        return write_task(self._options, query, batch, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """In the driver; Spark repeats a batch whose commit it does not know to have succeeded."""
        attach(self._options, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """In the driver. Without any message the query's name is not known.

        Then only killed tasks left something, which the sweep finds: those that fail discard what they wrote.
        """
        if query := _query_of(messages, ""):
            discard(self._options, query, batchId)


def _query_of(messages: Sequence[WriterCommitMessage | None], default: str) -> str:
    """What the tasks called the query."""
    return next((message.query for message in messages if isinstance(message, WrittenLedger)), default)


def _task_properties() -> Mapping[str, str]:
    context = TaskContext.get()
    if context is None:
        return {}
    names = ("sql.streaming.queryId", "streaming.sql.batchId")
    return {name: value for name in names if (value := context.getLocalProperty(name)) is not None}


__all__ = ["TopicStreamWriter", "TopicWriter", "WrittenLedger"]
