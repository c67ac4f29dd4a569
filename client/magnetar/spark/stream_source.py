"""`spark.readStream.format("magnetar")`: micro-batches between two points of each topic.

An offset is JSON: `{"subscription": NAME, "topics": {TOPIC: {"id": "ledger:entry:index", "offset": N}}}`. The id says where,
the offset (messages of the topic before it) lets a batch be bounded by rows exactly, and a gap be noticed and counted.

The durable subscription keeps what the query may still ask for; it moves in `commit` alone, so after a crash the batch that
Spark repeats is still there. It is made with the first offset and named in it: a query that goes on from its checkpoint
finds its own. Nobody consumes it: it is moved by seeking.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from magnetar.client import Client
from magnetar.proto.commands import CloseConsumer, Seek, Subscribe
from magnetar.proto.errors import InvalidArgument, MessageLost, TopicNotFound

from .batch_source import TopicPiece, pieces_of, read_piece
from .doors import doors
from .options import ReadOptions
from .places import Point, end_of, point_at, point_of, start_of
from .plan import Range
from .schema import RowColumns
from .service import TopicPlan, asking, plan_of_topic, topic_names
from .values import decoded

_log = logging.getLogger(__name__)

T = TypeVar("T")
Offset = dict[str, Any]


@doors("initialOffset", "latestOffset", "prepareForTriggerAvailableNow", "partitions", "read", "commit")
class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in the driver as long as the query; copies of it read in the tasks."""

    def __init__(self, options: ReadOptions, columns: RowColumns) -> None:
        if options.max_rows_per_batch and options.max_bytes_per_batch:
            raise InvalidArgument(
                "options max_rows_per_batch and max_bytes_per_batch exclude each other; set one of them"
            )
        self._options = options
        self._columns = columns
        self._until: dict[str, Point] | None = (
            None  # trigger(availableNow=True): what was there when it began
        )
        self._subscription = options.subscription or f"spark-{random.SystemRandom().getrandbits(64):016x}"
        self._begin: Offset | None = None  # where the query begins

    # --- offsets -----------------------------------------------------------------------------------------------------

    def initialOffset(self) -> Offset:
        """Where `start` points to, for a query without checkpoint; makes its subscription.

        Spark asks twice, before the first batch is planned and before it is run: "latest" must not move in between.
        """
        if self._begin is None:
            self._begin = self._ask(self._initial)
        return self._begin

    async def _initial(self, client: Client) -> Offset:
        options, subscription = self._options, self._subscription
        points: dict[str, Point] = {}
        for topic in await topic_names(client, options):
            plan = await plan_of_topic(client, topic, options.lease_s, subscription)
            points[topic] = await point_of(options.start_of(topic), plan, options.timeout_s)
            await _move(client, topic, subscription, points[topic])
        return _offset(subscription, points)

    def getDefaultReadLimit(self) -> ReadLimit:
        """From the options max_rows_per_batch and max_bytes_per_batch."""
        if self._options.max_rows_per_batch:
            return ReadMaxRows(self._options.max_rows_per_batch)
        if self._options.max_bytes_per_batch:
            return ReadMaxBytes(self._options.max_bytes_per_batch)
        return ReadAllAvailable()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """How far the next batch goes."""
        return self._ask(lambda client: self._latest(client, start, limit))

    async def _latest(self, client: Client, start: Offset, limit: ReadLimit) -> Offset:
        started = _points(start)
        plans = await self._plans(client, started, start["subscription"], started)
        ends: dict[str, Point] = {}
        for topic, plan in plans.items():
            ends[topic] = end_of(plan)
            if self._until is not None:
                target = self._until.get(topic, started.get(topic, start_of(plan)))
                ends[topic] = min(ends[topic], target, key=lambda point: point.offset)
        begins = {topic: started.get(topic, start_of(plan)) for topic, plan in plans.items()}
        for topic, rows in _shares(begins, ends, plans, limit).items():
            end = begins[topic].offset + rows
            if end < ends[topic].offset:
                ends[topic] = await point_at(end, plans[topic], self._options.timeout_s)
        # A topic that is gone keeps its place, so that `partitions` can say what was lost.
        return _offset(start["subscription"], {**started, **ends})

    def reportLatestOffset(self) -> Offset | None:
        """For the query's progress report."""
        return None

    def prepareForTriggerAvailableNow(self) -> None:
        """Whatever comes from now on is for another run."""

        async def ends(client: Client) -> dict[str, Point]:
            return {topic: end_of(plan) for topic, plan in (await self._plans(client, {}, "", {})).items()}

        self._until = self._ask(ends)

    async def _plans(
        self, client: Client, known: dict[str, Point], lease: str, needed: dict[str, Point]
    ) -> dict[str, TopicPlan]:
        """Of all topics there are; topics that a pattern finds anew are read from their start.

        A query has one lease on a topic, called as its subscription is; it moves along with what is `needed`.
        """
        plans: dict[str, TopicPlan] = {}
        for topic in dict.fromkeys((*known, *await topic_names(client, self._options))):
            try:
                first = needed[topic].id.ledger if topic in needed else -1
                plans[topic] = await plan_of_topic(client, topic, self._options.lease_s, lease, first)
            except TopicNotFound as gone:
                if topic not in known and self._options.fail_on_data_loss:
                    raise  # there may never have been one: nothing is known to be lost
                self._lost(f"topic {topic} and its messages are gone", gone)
        return plans

    # --- batches -----------------------------------------------------------------------------------------------------

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """The pieces of ledgers between two offsets."""
        return self._ask(lambda client: self._plan(client, start, end))

    async def _plan(self, client: Client, start: Offset, end: Offset) -> Sequence[InputPartition]:
        started = _points(start)
        pieces: list[InputPartition] = []
        ends = _points(end)
        plans = await self._plans(client, ends, start["subscription"], started)
        for topic, plan in plans.items():
            if topic not in ends:
                continue
            begin = started.get(topic)
            if begin is None:
                begin = start_of(plan)
                await _move(client, topic, start["subscription"], begin)
            self._check_loss(begin, ends[topic], plan)
            wanted = Range(from_offset=begin.offset, before_offset=ends[topic].offset)
            pieces += pieces_of(plan, wanted, self._options.partition_bytes)
        return pieces

    def _check_loss(self, begin: Point, end: Point, plan: TopicPlan) -> None:
        first = start_of(plan).offset
        if begin.offset < min(first, end.offset):
            self._lost(
                f"{min(first, end.offset) - begin.offset} messages of {plan.topic} from {begin.id} on were trimmed"
            )
        if plan.end_offset < end.offset:
            self._lost(
                f"{plan.topic} ends at {plan.end_offset} messages, and {end.offset} were seen: it was made anew"
            )

    def _lost(self, what: str, cause: Exception | None = None) -> None:
        message = (
            f"{what} before the query read them; with the option fail_on_data_loss=false it goes on with what is left, "
            "and a new checkpoint begins anew"
        )
        if self._options.fail_on_data_loss:
            raise MessageLost(message) from cause
        _log.warning("%s", message)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Arrow record batches of one piece."""
        assert isinstance(partition, TopicPiece)
        piece, columns = partition.piece, self._columns
        return decoded(
            read_piece(piece, partition.lease, self._options, columns.of_topic), columns, piece.topic
        )

    def commit(self, end: Offset) -> None:
        """Everything before `end` is done with: the subscription moves there."""

        async def move(client: Client) -> None:
            for topic, point in _points(end).items():
                try:
                    await _move(client, topic, end["subscription"], point)
                except TopicNotFound as gone:
                    _log.warning("the cursor of %s is not moved: %s", topic, gone)

        self._ask(move)

    def stop(self) -> None:
        """The subscription stays: the checkpoint may be gone on from. `magnetar subscriptions delete` ends it."""

    def _ask(self, work: Callable[[Client], Awaitable[T]]) -> T:
        return asking(self._options, work)


def _shares(
    begins: dict[str, Point], ends: dict[str, Point], plans: dict[str, TopicPlan], limit: ReadLimit
) -> dict[str, int]:
    """Rows of each topic in the next batch: in proportion to what waits, at least one where something does."""
    waiting = {topic: max(0, ends[topic].offset - begins[topic].offset) for topic in ends}
    total = sum(waiting.values())
    if isinstance(limit, ReadMaxRows):
        most = limit.max_rows
    elif isinstance(limit, ReadMaxBytes):
        size = sum(ledger.size for plan in plans.values() for ledger in plan.ledgers)
        messages = sum(ledger.messages for plan in plans.values() for ledger in plan.ledgers)
        most = limit.max_bytes * messages // max(1, size)
    else:
        most = total
    if total <= most:
        return waiting
    shares: dict[str, int] = {}
    left = most = max(1, most)
    for topic, rows in waiting.items():
        shares[topic] = min(rows, left, -(-rows * most // total)) if left > 0 else 0
        left -= shares[topic]
    return shares


# Of a connection that has no other.
_CONSUMER = 1


async def _move(client: Client, topic: str, subscription: str, point: Point) -> None:
    """Makes the subscription, or moves it: as a consumer that asks for no messages."""
    connection = await client.connection_of_topic(topic)
    timeout = client.options.operation_timeout
    start = ("id", point.id.to_bytes())
    await connection.request(Subscribe(0, _CONSUMER, topic, subscription, "exclusive", start), timeout)
    try:
        await connection.request(Seek(0, _CONSUMER, start), timeout)
    finally:
        await connection.request(CloseConsumer(0, _CONSUMER), timeout)


def _offset(subscription: str, points: dict[str, Point]) -> Offset:
    return {
        "subscription": subscription,
        "topics": {topic: point.to_json() for topic, point in points.items()},
    }


def _points(offset: Offset) -> dict[str, Point]:
    try:
        return {topic: Point.from_json(told) for topic, told in offset["topics"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(
            f"the checkpoint has an offset that is not of a topic: {offset!r} ({error!r}); is it of another source?"
        ) from None
