"""`replay`: messages of a range of topics, or of an archive, once more into another topic.

Key, value, properties and event time are kept; publish time, producer and message id are those of the new topic. Each
source topic stands in the target in its own order; several topics follow one another. All of it becomes visible at once.

    replay(spark, url, to_topic="orders-again", topics=["orders"], start="2026-11-21T00:00:00Z", end="2026-11-22T00:00:00Z")
    replay(spark, url, to_topic="orders-again", archive="/archive", from_offset=1_000, before_offset=2_000)

Times are those at which the broker stored messages. Offsets count the messages of a topic from 0; `from_offset` is the first
one that is replayed, `before_offset` the first one that is not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as sql

from magnetar.client import Client
from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import MessageId

from ..batch_source import range_of
from ..options import ReadOptions
from ..places import point_at
from ..service import TopicPlan, asking
from .archive import read_archive
from .topics import (
    MESSAGE_COLUMNS,
    READ_COLUMNS,
    append_to_topic,
    counted,
    full_name,
    key_to_write,
    make_target,
    plans_of,
    read_options,
    topics_frame,
)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What was replayed. `sources`: full topic names."""

    sources: tuple[str, ...]
    target: str
    messages: int


def replay(
    spark: SparkSession,
    service_url: str,
    *,
    to_topic: str,
    topics: Sequence[str] = (),
    archive: str = "",
    start: str = "earliest",
    end: str = "latest",
    from_offset: int | None = None,
    before_offset: int | None = None,
    text_keys: bool = True,
    compression: str = "none",
) -> ReplayResult:
    """Replays topics, or what an archive has of them (all of its topics if none is named).

    `start` and `end` are as for `spark.read`; of an archive they are times, earliest or latest. Raises InvalidArgument,
    TopicNotFound, and what Spark raises when a task fails.
    """
    if not topics and not archive:
        raise InvalidArgument("say what to replay: topics, an archive, or topics of an archive")
    if (from_offset or 0) < 0 or (before_offset is not None and before_offset < (from_offset or 0)):
        raise InvalidArgument(f"from_offset {from_offset} and before_offset {before_offset} are no range")
    sources = tuple(dict.fromkeys(full_name(topic) for topic in topics))
    target = full_name(to_topic)
    options = read_options(service_url, sources or [target], start=start, end=end)
    if archive:
        rows, sources = _archived(spark, archive, sources, options, from_offset, before_offset)
    else:
        rows = _topics(spark, options, from_offset, before_offset)
    if target in sources:
        raise InvalidArgument(f"topic {target} cannot be replayed into itself; name another topic")
    make_target(options, target, empty=False)
    seen = Observation()
    rows = rows.withColumn("key", key_to_write(text=text_keys)).select(*MESSAGE_COLUMNS)
    rows = rows.observe(seen, sql.count(sql.lit(1)).alias("rows"))
    append_to_topic(rows, service_url, target, compression)
    return ReplayResult(sources, target, counted(seen, "rows"))


def _topics(
    spark: SparkSession, options: ReadOptions, from_offset: int | None, before_offset: int | None
) -> DataFrame:
    """No shuffle: partitions are pieces of ledgers in the order of the topics, and the sink keeps their order."""
    plans = plans_of(options)
    for plan in plans:
        range_of(options, plan)  # raises for an end that leaves nothing
    first = _first_ids(options, plans, from_offset)
    told = {
        "start": json.dumps(
            {topic: first.get(topic) or str(options.start_of(topic)) for topic in options.topics}
        ),
        "end": json.dumps({topic: str(options.end_of(topic)) for topic in options.topics}),
    }
    rows = topics_frame(spark, options.service_url, options.topics, READ_COLUMNS, told)
    return _within(rows, from_offset, before_offset)


def _first_ids(options: ReadOptions, plans: Sequence[TopicPlan], from_offset: int | None) -> dict[str, str]:
    """Topics read from the beginning start at the offset's message, so that what lies before is not read."""
    if not from_offset:
        return {}

    async def work(_client: Client) -> dict[str, str]:
        return {
            plan.topic: str((await point_at(from_offset, plan, options.timeout_s)).id)
            for plan in plans
            if options.start_of(plan.topic) == "earliest"
            and plan.ledgers
            and plan.ledgers[0].first_offset < from_offset
        }

    return asking(options, work)


def _archived(
    spark: SparkSession,
    archive: str,
    topics: Sequence[str],
    options: ReadOptions,
    from_offset: int | None,
    before_offset: int | None,
) -> tuple[DataFrame, tuple[str, ...]]:
    """Parquet files come in the order that suits Spark, so they are sorted."""
    rows, found = read_archive(spark, archive, topics)
    for option, place in (("start", options.start_of("")), ("end", options.end_of(""))):
        if isinstance(place, MessageId) or place == ("latest" if option == "start" else "earliest"):
            raise InvalidArgument(f"option {option} of an archive is a time or left out, not {place}")
        if isinstance(place, int):
            time = sql.lit(datetime.fromtimestamp(place / 1000, UTC))
            rows = rows.filter(
                sql.col("append_time") >= time if option == "start" else sql.col("append_time") < time
            )
    return _within(rows, from_offset, before_offset).orderBy("topic", "offset"), found


def _within(rows: DataFrame, from_offset: int | None, before_offset: int | None) -> DataFrame:
    if from_offset:
        rows = rows.filter(sql.col("offset") >= from_offset)
    if before_offset is not None:
        rows = rows.filter(sql.col("offset") < before_offset)
    return rows


__all__ = ["ReplayResult", "replay"]
