"""`compact`: the last message of each key, in a new topic or as Parquet.

A message without value is a tombstone: its key is gone unless a later message brings it back. Messages without a key are
all kept (`keyless="drop"` leaves them out). A key is its bytes, whether it was sent as text or not. What is kept stands in
the order of its offsets, with key, value, properties and event time; publish time, producer and message id are those of the
new topic.

    orders:    k1=a  k2=b  k1=c  k2=(none)  k3=d          compacted:    k1=c  k3=d

"Last" goes by the order of the topic, never by time; between partitions, which have no order, by when the broker stored a
message. One pass over the topic and one shuffle by key: what a task has of one
key is reduced before it is sent. The topic is compacted as it was when the job began. Nothing of a target topic is visible
before all of it is, and a job that fails leaves nothing in it, so it can be run again. A target that has messages is
refused: a topic is compacted into a new one each time. Of two jobs into one new topic at the same moment one writes it: the
other finds that done if it has the same messages, and fails if it has others.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Final, Literal

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as sql

from magnetar.proto.errors import InvalidArgument

from ..options import ReadOptions
from .folders import check_new_folder
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

# A topic takes the first batch of this name, whatever job it is of.
QUERY: Final = "magnetar-compact"


@dataclass(frozen=True, slots=True)
class CompactResult:
    """What a compaction did. `target` is a full topic name or the path that was given."""

    topic: str
    target: str
    messages_read: int
    messages_kept: int


@dataclass(frozen=True, slots=True)
class Compaction:
    """What `compact` is asked for. `text_keys` and `compression`: how messages are written to a topic."""

    service_url: str
    topic: str
    _: KW_ONLY
    to_topic: str = ""
    to_parquet: str = ""
    keyless: Literal["keep", "drop"] = "keep"
    text_keys: bool = True
    compression: str = "none"

    def check(self) -> tuple[ReadOptions, str]:
        """What `compact` refuses, found without Spark; the topic to read and the target. Raises as `compact` does."""
        if bool(self.to_topic) == bool(self.to_parquet):
            raise InvalidArgument("either to_topic or to_parquet says where compacted messages go")
        if self.keyless not in ("keep", "drop"):
            raise InvalidArgument(f"keyless is {self.keyless!r}; want keep or drop")
        options = read_options(self.service_url, [self.topic])
        if self.to_parquet:
            check_new_folder("to_parquet", self.to_parquet)
        elif full_name(self.to_topic) == options.topics[0]:
            raise InvalidArgument(
                f"to_topic: topic {options.topics[0]} cannot be compacted into itself; name a new one"
            )
        check_topics(options)  # raises for a topic that is not there
        if self.to_parquet:
            return options, self.to_parquet
        return options, check_target(options, self.to_topic, empty=True, compression=self.compression)

    def run(self, spark: SparkSession) -> CompactResult:
        """Compacts one topic into a topic that has no messages yet, or into a new Parquet folder.

        Raises InvalidArgument, TopicNotFound, and what Spark raises when a task fails.
        """
        options, target = self.check()
        (source,) = options.topics
        seen, remaining = Observation(), Observation()
        messages = topics_frame(
            spark, self.service_url, [source], f"{READ_COLUMNS}, append_time timestamp", {}
        )
        messages = messages.observe(seen, sql.count(sql.lit(1)).alias("rows"))
        rows = last_of_keys(messages, keyless=self.keyless).orderBy("partition", "offset")
        # Counted after the last shuffle: Spark runs what stands before a sort twice, once to learn its ranges.
        rows = rows.observe(remaining, sql.count(sql.lit(1)).alias("rows"))
        if self.to_topic:
            make_topic(options, target)
            written = rows.withColumn("key", key_to_write(text=self.text_keys)).select(*MESSAGE_COLUMNS)
            append_to_topic(written, self.service_url, target, self.compression, query=QUERY, batch=0)
        else:
            rows.write.mode("errorifexists").parquet(target)
        return CompactResult(source, target, counted(seen, "rows"), counted(remaining, "rows"))


compact = runs(Compaction)
check_compact = checks(Compaction)


def last_of_keys(messages: DataFrame, *, keyless: Literal["keep", "drop"] = "keep") -> DataFrame:
    """The last message of each key, without keys whose last message has no value.

    Needs `key`, `value`, `offset`, `partition` and `append_time`, which never falls along a partition.
    """
    others = [name for name in messages.columns if name != "key"]
    if keyless == "drop":
        messages = messages.filter(sql.col("key").isNotNull())
    # A message without key is a group of its own.
    alone = sql.when(sql.col("key").isNull(), sql.struct("partition", "offset"))
    order = sql.struct("append_time", "partition", "offset")
    latest = messages.groupBy("key", alone.alias("alone")).agg(
        sql.max_by(sql.struct(*others), order).alias("last")
    )
    tombstone = sql.col("last.value").isNull() & sql.col("key").isNotNull()
    return latest.filter(~tombstone).select(
        "key", *[f"last.{name}" for name in others if name != "append_time"]
    )
