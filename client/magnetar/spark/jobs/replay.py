"""`replay`: messages of a range of topics, or of an archive, once more into another topic.

Key, value, properties and event time are kept; publish time, producer and message id are those of the new topic. Each
source topic stands in the target in its own order; several topics follow one another. All of it becomes visible at once.

    replay(spark, url, to_topic="orders-again", topics=["orders"], start="2026-11-21T00:00:00Z", end="2026-11-22T00:00:00Z")
    replay(spark, url, to_topic="orders-again", archive="/archive", from_offset=1_000, before_offset=2_000)

The target may have messages, and whoever replays twice has them twice: with `mark` a consumer can tell. A job that fails
leaves nothing in the target.

Times are those at which the broker stored messages. Offsets count the messages of a topic from 0; `from_offset` is the first
one that is replayed, `before_offset` the first one that is not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from typing import Final

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as sql

from magnetar.archive.files import ArchiveFolder
from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import MessageId, TopicName

from ..batch_source import range_of
from ..options import AtOffset, Place, ReadOptions
from ..service import asking, topic_names
from .archive import archived_names, read_archive
from .job import checks, runs
from .topics import (
    MESSAGE_COLUMNS,
    READ_COLUMNS,
    append_to_topic,
    check_target,
    check_topics,
    counted,
    full_name,
    key_to_write,
    make_topic,
    read_options,
    topics_frame,
)

# Properties of a copy: which message it was.
MARKS: Final = ("magnetar.replay.topic", "magnetar.replay.offset")


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What was replayed. `sources`: full topic names."""

    sources: tuple[str, ...]
    target: str
    messages: int


@dataclass(frozen=True, slots=True)
class Replay:
    """What `replay` is asked for: topics, or what an archive has of them (all of its topics if none is named).

    `start` and `end` are as for `spark.read`; of an archive they are times, earliest or latest. `mark` adds the properties
    MARKS, which say what a message is a copy of.
    """

    service_url: str
    _: KW_ONLY
    to_topic: str
    topics: Sequence[str] = ()
    archive: str = ""
    start: str = "earliest"
    end: str = "latest"
    from_offset: int | None = None
    before_offset: int | None = None
    mark: bool = False
    text_keys: bool = True
    compression: str = "none"

    def check(self) -> tuple[ReadOptions, tuple[str, ...], str]:
        """What `replay` refuses, found without Spark; what is read, of which topics (full names), and the target."""
        first, before = self.from_offset or 0, self.before_offset
        if not self.topics and not self.archive:
            raise InvalidArgument("say what to replay: topics, an archive, or topics of an archive")
        if first < 0 or (before is not None and before <= first):
            raise InvalidArgument(
                f"from_offset {first} and before_offset {before} are no range: nothing lies between them"
            )
        options = read_options(
            self.service_url, self.topics or [self.to_topic], start=self.start, end=self.end
        )
        sources = options.topics
        if self.archive:
            _check_places(options)
            sources = archived_names(ArchiveFolder(self.archive), self.topics)
        if full_name(self.to_topic) in [str(TopicName.parse(topic).whole) for topic in sources]:
            raise InvalidArgument(
                f"to_topic: topic {full_name(self.to_topic)} cannot be replayed into itself; name another topic"
            )
        if not self.archive:
            for plan in check_topics(options):
                range_of(options, plan)  # raises for an end that leaves nothing
        target = check_target(options, self.to_topic, empty=False, compression=self.compression)
        return options, sources, target

    def run(self, spark: SparkSession) -> ReplayResult:
        """Replays topics, or what an archive has of them.

        Raises InvalidArgument, TopicNotFound, and what Spark raises when a task fails.
        """
        options, sources, target = self.check()
        if self.archive:
            rows = _archived(spark, self.archive, options, sources)
        else:
            rows = _topics(spark, options, self.from_offset)
        rows = _within(rows, self.from_offset, self.before_offset)
        if self.archive:  # Parquet files come in the order that suits Spark
            rows = rows.orderBy("topic", "partition", "offset")
        make_topic(options, target)
        seen = Observation()
        if self.mark:
            rows = rows.withColumn("properties", _marked())
        rows = rows.withColumn("key", key_to_write(text=self.text_keys)).select(*MESSAGE_COLUMNS)
        rows = rows.observe(seen, sql.count(sql.lit(1)).alias("rows"))
        append_to_topic(rows, self.service_url, target, self.compression)
        return ReplayResult(sources, target, counted(seen, "rows"))


replay = runs(Replay)
check_replay = checks(Replay)


def _topics(spark: SparkSession, options: ReadOptions, from_offset: int | None) -> DataFrame:
    """No shuffle: partitions are pieces of ledgers in the order of the topics, and the sink keeps their order."""

    def start_of(topic: str) -> int | str:
        place = options.start_of(topic)
        return (
            f"offset:{from_offset}" if from_offset is not None and place == "earliest" else _as_option(place)
        )

    logs = asking(options, lambda client: topic_names(client, options))
    given = {
        "start": json.dumps({topic: start_of(topic) for topic in logs}),
        "end": json.dumps({topic: _as_option(options.end_of(topic)) for topic in logs}),
    }
    return topics_frame(spark, options.service_url, options.topics, READ_COLUMNS, given)


def _as_option(place: Place) -> int | str:
    return place if isinstance(place, int) else str(place)


def _marked() -> Column:
    """The properties with MARKS; a copy of a copy tells of the latter."""
    none = sql.create_map().cast("map<string,string>")
    own = sql.map_filter(sql.coalesce("properties", none), lambda name, _value: ~name.isin(*MARKS))
    topic, offset = MARKS
    log = sql.when(sql.col("partition") < 0, sql.col("topic")).otherwise(
        sql.concat("topic", sql.lit("-partition-"), sql.col("partition"))
    )
    origin = sql.create_map(sql.lit(topic), log, sql.lit(offset), sql.col("offset").cast("string"))
    return sql.map_concat(own, origin)


def _check_places(options: ReadOptions) -> None:
    for option, place in (("start", options.start_of("")), ("end", options.end_of(""))):
        if isinstance(place, MessageId | AtOffset) or place == (
            "latest" if option == "start" else "earliest"
        ):
            raise InvalidArgument(f"option {option} of an archive is a time or left out, not {place}")


def _archived(spark: SparkSession, archive: str, options: ReadOptions, sources: Sequence[str]) -> DataFrame:
    rows, _ = read_archive(spark, archive, sources)
    start, end = options.start_of(""), options.end_of("")
    if isinstance(start, int):
        rows = rows.filter(sql.col("append_time") >= _time(start))
    if isinstance(end, int):
        rows = rows.filter(sql.col("append_time") < _time(end))
    return rows


def _time(milliseconds: int) -> Column:
    return sql.lit(datetime.fromtimestamp(milliseconds / 1000, UTC))


def _within(rows: DataFrame, from_offset: int | None, before_offset: int | None) -> DataFrame:
    if from_offset is not None:
        rows = rows.filter(sql.col("offset") >= from_offset)
    if before_offset is not None:
        rows = rows.filter(sql.col("offset") < before_offset)
    return rows
