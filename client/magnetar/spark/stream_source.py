"""`spark.readStream.format("magnetar")`: micro-batches between two points of each topic.

An offset is JSON:

    {"lease": NAME, "subscription": NAME or "",
     "topics": {TOPIC: {"id": "ledger:entry:index", "offset": N, "created_ms": MS}},
     "begins": {TOPIC: the same}}

The id says where, the offset (messages of the topic before it) lets a batch be bounded by rows exactly, and a gap be noticed
and counted; `created_ms` tells a topic from another one of its name. `begins` has the topics that this batch finds anew, and
where they begin: what was seen once is read, or missed.

What the query may still ask for is kept by a lease (`leases`), and with the option `subscription` by a durable subscription
as well, which moves in `commit` alone: after a crash the batch that Spark repeats is still there. Nobody consumes it: it is
moved by seeking. Both are named in the offset: a query that goes on from its checkpoint finds its own.

A trigger asks the broker for the ledgers that it reads, not for those before or behind them.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from magnetar.client import Client
from magnetar.proto.errors import (
    AlreadyExists,
    InvalidArgument,
    MessageLost,
    PartitionNotFound,
    SubscriptionNotFound,
    TopicNotFound,
)
from magnetar.proto.ids import MessageId

from .batch_source import OffsetsPiece, TopicPiece, pieces_of, read_partition
from .error_boundary import short_errors
from .leases import Keeper, keep, plan_of_topic
from .options import ReadOptions
from .places import Point, end_of, point_at, point_of, start_of
from .plan import Range, missing
from .service import LEDGERS_PER_REQUEST, TopicPlan, asking, ledgers_of_topic, topic_names
from .versions import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows, SupportsTriggerAvailableNow

_log = logging.getLogger(__name__)

T = TypeVar("T")
Offset = dict[str, Any]


class Mark(NamedTuple):
    """How far a query has come in a topic."""

    point: Point
    created_ms: int  # of the topic that the point is in

    def to_json(self) -> dict[str, str | int]:
        """As the checkpoint keeps it."""
        return {**self.point.to_json(), "created_ms": self.created_ms}

    @classmethod
    def from_json(cls, stored: dict[str, str | int]) -> Mark:
        """Inverse of `to_json`."""
        return cls(Point.from_json(stored), int(stored["created_ms"]))


Marks = dict[str, Mark]


@short_errors(
    "initialOffset", "latestOffset", "prepareForTriggerAvailableNow", "partitions", "read", "commit"
)
class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in the driver as long as the query; copies of it read in the tasks."""

    def __init__(self, options: ReadOptions, columns: Sequence[str]) -> None:
        options.check_stream()
        self._options = options
        self._columns = columns
        self._until: Marks | None = None  # trigger(availableNow=True): what was there when it began
        self._begin: Offset | None = None  # where the query begins
        self._known: Offset | None = None  # how far it has come
        self._latest_seen: Offset | None = None  # what there is, however much of it the next batch takes
        self._keeper: Keeper | None = None
        self._last_batch_at = time.monotonic()

    # --- offsets -----------------------------------------------------------------------------------------------------

    def initialOffset(self) -> Offset:
        """Where `start` points to, for a query without checkpoint.

        Spark asks twice, before the first batch is planned and before it is run: "latest" must not move in between.
        """
        if self._begin is None:
            self._begin = self._ask(self._initial)
        return self._begin

    async def _initial(self, client: Client) -> Offset:
        options = self._options
        lease = self._new_lease()
        marks: Marks = {}
        for topic in await topic_names(client, options):
            plan = await plan_of_topic(client, topic, options.lease_s, lease)
            point = await point_of(options.start_of(topic), plan, options.timeout_s)
            marks[topic] = Mark(point, plan.created_ms)
            if options.subscription:
                await _move(client, topic, options.subscription, point)
        return _offset(lease, options.subscription, marks)

    def getDefaultReadLimit(self) -> ReadLimit:
        """From the options max_rows_per_batch and max_bytes_per_batch."""
        if self._options.max_rows_per_batch:
            return ReadMaxRows(self._options.max_rows_per_batch)
        if self._options.max_bytes_per_batch:
            return ReadMaxBytes(self._options.max_bytes_per_batch)
        return ReadAllAvailable()

    def latestOffset(self, start: Offset | None = None, limit: ReadLimit | None = None) -> Offset:
        """How far the next batch goes. Before 4.2 Spark says neither from where nor how much."""
        limit = limit or self.getDefaultReadLimit()
        start = start or self._known or self._begin
        if start is None:  # a query that goes on from a checkpoint, which `partitions` will be shown
            start, limit = _offset(self._new_lease(), self._options.subscription, {}), ReadAllAvailable()
        begin = start
        self._known = self._ask(lambda client: self._latest(client, begin, limit))
        return self._known

    def _new_lease(self) -> str:
        return self._options.subscription or f"spark-{random.SystemRandom().getrandbits(64):016x}"

    async def _latest(self, client: Client, start: Offset, limit: ReadLimit) -> Offset:
        started = _marks(start)
        if self._keeper is None:
            self._keeper = Keeper(self._options, start["lease"], started)
        # Without a limit the end is all that has to be known.
        count = 1 if isinstance(limit, ReadAllAvailable) else LEDGERS_PER_REQUEST
        plans = await self._plans(client, start["lease"], started, {}, count)
        self._keeper.keep(plans)
        found: Marks = {}
        for topic in [topic for topic in plans if topic not in started]:
            if self._until is None or topic in self._until:
                found[topic] = Mark(start_of(plans[topic]), plans[topic].created_ms)
            else:
                del plans[topic]
        begins = {
            topic: self._resumed(started.get(topic) or found[topic], plan) for topic, plan in plans.items()
        }
        ends = {topic: self._end(begins[topic], plan) for topic, plan in plans.items()}
        subscription = self._options.subscription or start["subscription"]
        self._latest_seen = _offset(
            start["lease"], subscription, {topic: _end_mark(plan) for topic, plan in plans.items()}
        )
        offsets = {topic: begin.point.offset for topic, begin in begins.items()}
        waiting = {topic: max(0, ends[topic].point.offset - offset) for topic, offset in offsets.items()}
        if self._waits(sum(waiting.values())):
            return start
        for topic, rows in shares(waiting, _most_rows(limit, plans), sum(offsets.values())).items():
            if rows < waiting[topic]:
                ends[topic] = await self._cut(client, begins[topic], rows, plans[topic])
        # A topic that does not exist any more is a new one if it is made again.
        return _offset(start["lease"], subscription, ends, found)

    def _waits(self, rows: int) -> bool:
        """Whether the next batch is not to be begun yet, for want of rows."""
        now = time.monotonic()
        if rows >= self._options.min_rows_per_batch or self._until is not None:
            self._last_batch_at = now
            return False
        if now - self._last_batch_at < self._options.max_trigger_delay_s:
            return True
        self._last_batch_at = now
        return False

    def _resumed(self, mark: Mark, plan: TopicPlan) -> Mark:
        """Where reading goes on: not where it stopped if the topic is another one."""
        if mark.created_ms == plan.created_ms:
            return mark
        self._lost(
            f"topic {plan.topic} was deleted and made again: what it had from {mark.point.id} on is lost"
        )
        return Mark(_FIRST_POINT, plan.created_ms)

    def _end(self, begin: Mark, plan: TopicPlan) -> Mark:
        """How far there is something to read for this run."""
        end = _end_mark(plan)
        if self._until is None:
            return end
        until = self._until.get(plan.topic)
        if until is None or until.created_ms != plan.created_ms:
            return begin  # it was made since this run began
        return min(end, until, key=lambda mark: mark.point.offset)

    async def _cut(self, client: Client, begin: Mark, rows: int, plan: TopicPlan) -> Mark:
        """So many messages behind the beginning."""
        offset = begin.point.offset + rows
        if not plan.ledgers or plan.ledgers[-1].end_offset <= offset < plan.end_offset:
            after = begin.point.id.ledger - 1
            plan = await ledgers_of_topic(client, plan.topic, after, offset + 1)
        return Mark(await point_at(offset, plan, self._options.timeout_s), plan.created_ms)

    def reportLatestOffset(self) -> Offset | None:
        """For the query's progress report: its `latestOffset` beside the batch's `endOffset` is the lag."""
        return self._latest_seen

    def prepareForTriggerAvailableNow(self) -> None:
        """Whatever comes from now on is for another run."""

        async def ends(client: Client) -> Marks:
            plans = await self._plans(client, "", {}, {}, 1)
            return {topic: _end_mark(plan) for topic, plan in plans.items()}

        self._until = self._ask(ends)

    async def _plans(
        self, client: Client, lease: str, started: Marks, until: Mapping[str, int], count: int
    ) -> dict[str, TopicPlan]:
        """Of all topics there are, and of those that there were: from where they are read, until an offset at least.

        The lease, if one is named, moves along.
        """
        plans: dict[str, TopicPlan] = {}
        for topic in dict.fromkeys((*started, *await topic_names(client, self._options))):
            first = started[topic].point.id.ledger if topic in started else -1
            try:
                if lease:
                    await keep(client, topic, lease, self._options.lease_s, first)
                plan = await ledgers_of_topic(client, topic, first - 1, until.get(topic, 0), count)
            except (TopicNotFound, PartitionNotFound) as gone:
                if topic not in started and self._options.fail_on_data_loss:
                    raise  # there may never have been one: nothing is known to be lost
                self._lost(
                    f"topic {topic} does not exist any more: what the query had not read of it is lost", gone
                )
            else:
                plans[topic] = plan._replace(lease=lease)
        return plans

    # --- batches -----------------------------------------------------------------------------------------------------

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """The pieces of ledgers between two offsets."""
        return self._ask(lambda client: self._plan(client, start, end))

    async def _plan(self, client: Client, start: Offset, end: Offset) -> Sequence[InputPartition]:
        ends = _marks(end)
        started = {**_marks(end, "begins"), **_marks(start)}
        wanted_of: list[tuple[TopicPlan, Range]] = []
        until = {topic: mark.point.offset for topic, mark in ends.items()}
        plans = await self._plans(client, end["lease"], started, until, LEDGERS_PER_REQUEST)
        for topic, end_mark in ends.items():
            plan, begin = plans.get(topic), started[topic]
            if plan is None:
                continue
            if end_mark.created_ms != plan.created_ms:
                self._lost(
                    f"topic {topic} was deleted and made again: a batch of what it had cannot be read again"
                )
                continue
            first = self._resumed(begin, plan).point
            if lost := missing(plan.ledgers, first.offset, end_mark.point.offset):
                self._lost(
                    f"{lost} messages of {topic} from {first.id} on were trimmed before the query read them"
                )
            end_point = end_mark.point
            wanted = Range(first.id[:3], end_point.id[:3], first.offset, end_point.offset)
            wanted_of.append((plan, wanted))
        pieces = await pieces_of(wanted_of, self._options, self._columns)
        return [replace(one, follows=True) if isinstance(one, TopicPiece) else one for one in pieces]

    def _lost(self, what: str, cause: Exception | None = None) -> None:
        message = (
            f"{what}; with the option fail_on_data_loss=false the query goes on with what is left, and a new checkpoint "
            "begins anew"
        )
        if self._options.fail_on_data_loss:
            raise MessageLost(message) from cause
        _log.warning("%s", message)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Arrow record batches of one piece."""
        assert isinstance(partition, TopicPiece | OffsetsPiece)
        return read_partition(partition, self._options, self._columns)

    def commit(self, end: Offset) -> None:
        """Everything before `end` is done with: the subscription, if there is one, moves there."""
        if not end["subscription"]:
            return

        async def move(client: Client) -> None:
            for topic, mark in _marks(end).items():
                try:
                    await _move(client, topic, end["subscription"], mark.point)
                except (TopicNotFound, PartitionNotFound) as gone:
                    _log.warning("the cursor of %s is not moved: %s", topic, gone)

        self._ask(move)

    def stop(self) -> None:
        """The lease ends by itself. A subscription stays: the query may go on from its checkpoint."""
        if self._keeper is not None:
            self._keeper.stop()

    def _ask(self, work: Callable[[Client], Awaitable[T]]) -> T:
        return asking(self._options, work)


_FIRST_POINT = Point(MessageId(0, 0, 0), 0)


def _end_mark(plan: TopicPlan) -> Mark:
    return Mark(end_of(plan), plan.created_ms)


def _most_rows(limit: ReadLimit, plans: Mapping[str, TopicPlan]) -> int | None:
    """Rows of a batch; None: no bound."""
    if isinstance(limit, ReadMaxRows):
        return limit.max_rows
    if isinstance(limit, ReadMaxBytes):
        ledgers = [ledger for plan in plans.values() for ledger in plan.ledgers]
        size, messages = sum(one.size for one in ledgers), sum(one.messages for one in ledgers)
        return limit.max_bytes * messages // max(1, size)
    return None


def shares(waiting: Mapping[str, int], most: int | None, done: int) -> dict[str, int]:
    """Rows of each topic in the next batch: in proportion to what waits, at least one where something does.

    Where there are more topics than rows they take turns: `done`, the rows that were read of all of them, says whose it is.
    """
    total = sum(waiting.values())
    if most is None or total <= most:
        return dict(waiting)
    left = most = max(1, most)
    found = dict.fromkeys(waiting, 0)
    order = [topic for topic, rows in waiting.items() if rows]
    turn = done % len(order)
    for topic in order[turn:] + order[:turn]:
        found[topic] = min(left, -(-waiting[topic] * most // total))
        left -= found[topic]
    return found


async def _move(client: Client, topic: str, subscription: str, point: Point) -> None:
    """Moves the subscription, whoever consumes it, or makes it."""
    try:
        await client.admin.seek_subscription(topic, subscription, point.id)
    except SubscriptionNotFound:
        with contextlib.suppress(AlreadyExists):  # an attempt whose answer was lost
            await client.admin.create_subscription(topic, subscription, start=point.id)


def _offset(lease: str, subscription: str, marks: Marks, begins: Marks | None = None) -> Offset:
    return {
        "lease": lease,
        "subscription": subscription,
        "topics": {topic: mark.to_json() for topic, mark in marks.items()},
        "begins": {topic: mark.to_json() for topic, mark in (begins or {}).items()},
    }


def _marks(offset: Offset, of: str = "topics") -> Marks:
    try:
        return {topic: Mark.from_json(stored) for topic, stored in offset[of].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(
            f"the checkpoint has an offset that is not of a topic: {offset!r} ({error!r}); is it of another source?"
        ) from None
