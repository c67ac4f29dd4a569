"""`rollup`: how many messages and bytes each topic had per window of time and per key. A streaming query to copy.

    messages = spark.readStream.format("magnetar").option("service_url", url).option("topics", "orders,payments").load()
    counts = rollup(messages, window="1 minute", watermark="10 minutes")
    counts.writeStream.format("parquet").option("checkpointLocation", ...).start(...)

A window is emitted once, when the watermark has passed its end: the latest time seen so far, less `watermark`. Messages that
come later than that are left out, which is the price of not keeping every window for ever. Times are event times, or publish
times where a message has none.

| column | what |
|---|---|
| window_start, window_end | [start, end) of the window |
| topic, key | full name; the key as text, bytes that are not UTF-8 replaced; null for messages without key |
| messages, bytes | how many; bytes of values and keys |
| largest | bytes of the largest value |
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.streaming.query import StreamingQuery

from magnetar.proto.errors import InvalidArgument

from ..options import ReadOptions
from .folders import check_writable
from .job import checks, runs
from .topics import check_target, check_topics, full_name, make_topic, read_options

READ_COLUMNS: Final = "key binary, value binary, topic string, publish_time timestamp, event_time timestamp"
_INTERVAL: Final = re.compile(
    r"(interval\s+)?\d+\s*(milli|micro)?(second|minute|hour|day|week)s?"
    r"(\s+\d+\s*(milli|micro)?(second|minute|hour|day|week)s?)*",
    re.IGNORECASE,
)


def rollup(
    messages: DataFrame, *, window: str = "1 minute", watermark: str = "10 minutes", by_key: bool = True
) -> DataFrame:
    """The figures of a table of messages, streaming or not. `window` and `watermark` are Spark intervals."""
    keys = [sql.col("topic")]
    if by_key:
        keys.append(sql.make_valid_utf8(sql.col("key").cast("string")).alias("key"))
    sizes = sql.coalesce(sql.octet_length("value"), sql.lit(0))
    timed = messages.withColumn("time", sql.coalesce("event_time", "publish_time"))
    counts = (
        timed.withWatermark("time", watermark)
        .groupBy(sql.window("time", window).alias("window"), *keys)
        .agg(
            sql.count(sql.lit(1)).alias("messages"),
            sql.sum(sizes + sql.coalesce(sql.octet_length("key"), sql.lit(0))).alias("bytes"),
            sql.max(sizes).alias("largest"),
        )
    )
    named = ["topic", "key"] if by_key else ["topic"]
    return counts.select(
        sql.col("window.start").alias("window_start"),
        sql.col("window.end").alias("window_end"),
        *named,
        "messages",
        "bytes",
        "largest",
    )


@dataclass(frozen=True, slots=True)
class Rollup:
    """What `start_rollup` is asked for. `once`: the query ends when it has read what is there now, and goes on from there
    the next time.
    """

    service_url: str
    topics: Sequence[str]
    _: KW_ONLY
    checkpoint: str
    to_topic: str = ""
    to_parquet: str = ""
    window: str = "1 minute"
    watermark: str = "10 minutes"
    by_key: bool = True
    start: str = "earliest"
    once: bool = False

    def check(self) -> tuple[ReadOptions, str]:
        """What `start_rollup` refuses, found without Spark; options of the read and the target. Raises as it does."""
        if bool(self.to_topic) == bool(self.to_parquet):
            raise InvalidArgument("either to_topic or to_parquet says where the figures go")
        if not self.checkpoint:
            raise InvalidArgument(
                "checkpoint is empty: name a folder where the query keeps how far it has come"
            )
        for option, length in (("window", self.window), ("watermark", self.watermark)):
            if not _INTERVAL.fullmatch(length.strip()):
                raise InvalidArgument(
                    f"{option} is {length!r}; want a length of time like '30 seconds', '1 minute' or '2 hours 30 minutes'"
                )
        options = read_options(self.service_url, self.topics, start=self.start)
        if self.to_topic and full_name(self.to_topic) in options.topics:
            raise InvalidArgument(
                f"to_topic: topic {full_name(self.to_topic)} would count its own figures; write them to another topic"
            )
        check_writable("checkpoint", self.checkpoint)
        if self.to_parquet:
            check_writable("to_parquet", self.to_parquet)
        check_topics(options)  # raises for a topic that is not there
        if self.to_parquet:
            return options, self.to_parquet
        return options, check_target(options, self.to_topic, empty=False)

    def run(self, spark: SparkSession) -> StreamingQuery:
        """Starts the query that writes the figures to a topic (as JSON, keyed by topic) or as Parquet.

        Raises InvalidArgument and TopicNotFound before anything starts.
        """
        options, target = self.check()
        messages = (
            spark.readStream.format("magnetar")
            .schema(READ_COLUMNS)
            .option("service_url", self.service_url)
            .option("topics", ",".join(options.topics))
            .option("start", self.start)
            .load()
        )
        figures = rollup(messages, window=self.window, watermark=self.watermark, by_key=self.by_key)
        if self.to_topic:
            make_topic(options, target)
            rows = figures.select(sql.col("topic").alias("key"), sql.to_json(sql.struct("*")).alias("value"))
            writer = rows.writeStream.format("magnetar").option("service_url", self.service_url)
            writer = writer.option("topic", target)
        else:
            writer = figures.writeStream.format("parquet").option("path", target)
        writer = writer.outputMode("append").option("checkpointLocation", self.checkpoint)
        if self.once:
            writer = writer.trigger(availableNow=True)
        return writer.start()


start_rollup = runs(Rollup)
check_rollup = checks(Rollup)
