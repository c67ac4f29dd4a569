"""What jobs share: topics as frames, a topic as target, keys as their producers gave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as sql

from magnetar.client import Client
from magnetar.proto.errors import InvalidArgument, InvalidTopicName, TopicNotFound
from magnetar.proto.ids import TopicName

from ..leases import plan_of_topic
from ..options import ReadOptions, WriteOptions
from ..service import TopicPlan, asking, asking_once, ledgers_of_topic, logs_of, topic_names

# What a message keeps when it goes to another topic; the rest is the new topic's to give.
MESSAGE_COLUMNS: Final = ("key", "value", "properties", "event_time")
READ_COLUMNS: Final = (
    "key binary, value binary, topic string, partition int, `offset` bigint, event_time timestamp, "
    "properties map<string,string>"
)


def read_options(service_url: str, topics: Sequence[str], **options: str) -> ReadOptions:
    """Checked options of a read of these topics. Raises InvalidArgument, also for no topic at all."""
    return ReadOptions.parse({"service_url": service_url, "topics": ",".join(topics), **options})


def topics_frame(
    spark: SparkSession, service_url: str, topics: Sequence[str], schema: str, options: Mapping[str, str]
) -> DataFrame:
    """The topics as a table of these columns, in the order of topics and their messages."""
    reader = spark.read.format("magnetar").schema(schema).option("service_url", service_url)
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.option("topics", ",".join(topics)).load()


def check_topics(options: ReadOptions) -> list[TopicPlan]:
    """The topics as they are now, without leases. Raises TopicNotFound, ConnectionLost.

    Asked once: who names a service that is not there wants to know at once.
    """

    async def work(client: Client) -> list[TopicPlan]:
        return [await ledgers_of_topic(client, topic) for topic in await topic_names(client, options)]

    return asking_once(options, work)


def plans_of(options: ReadOptions, lease_s: float) -> list[TopicPlan]:
    """The topics with their ledgers, each under a new lease. Raises TopicNotFound."""

    async def work(client: Client) -> list[TopicPlan]:
        return [await plan_of_topic(client, topic, lease_s) for topic in await topic_names(client, options)]

    return asking(options, work)


def full_name(topic: str) -> str:
    """`orders` as `persistent://public/default/orders`. Raises InvalidTopicName."""
    return str(TopicName.parse(topic))


def check_target(options: ReadOptions, topic: str, *, empty: bool, compression: str = "none") -> str:
    """The topic to write to by its full name; nothing is made yet. `empty`: InvalidArgument if it ever had a message."""
    try:
        name = full_name(topic)
    except InvalidTopicName as error:
        raise InvalidArgument(f"to_topic: {error}") from None
    WriteOptions.parse({"service_url": options.service_url, "topic": name, "compression": compression})

    async def work(client: Client) -> int:
        try:
            return sum(
                [(await ledgers_of_topic(client, log)).end_offset for log in await logs_of(client, name)]
            )
        except TopicNotFound:
            return 0

    if empty and (end := asking_once(options, work)):
        raise InvalidArgument(
            f"to_topic {name} has messages already ({end}); name a new one, or delete it first: "
            f"magnetar topics delete {TopicName.parse(name).short}"
        )
    return name


def make_topic(options: ReadOptions, name: str) -> None:
    """The topic is there when this returns."""

    async def work(client: Client) -> None:
        if not await client.admin.partitions(name):
            await client.admin.create_topic(name)

    asking(options, work)


def append_to_topic(
    frame: DataFrame, service_url: str, topic: str, compression: str, **options: str | int
) -> None:
    """Writes the rows as messages: all of them become visible at once, in the order of the frame's partitions."""
    writer = frame.write.format("magnetar").mode("append").options(**options)
    writer.options(service_url=service_url, topic=topic, compression=compression).save()


def key_to_write(*, text: bool) -> Column:
    """The column `key` for a write. A table has keys as bytes only, so whoever writes says what they were.

    With `text` they become text again, and a key that is not UTF-8 fails the job rather than being changed.
    """
    if not text:
        return sql.col("key")
    message = sql.concat(
        sql.lit("InvalidArgument: the key "),
        sql.hex("key"),
        sql.lit(" is not text; keep keys as bytes with text_keys=False (--byte-keys)"),
    )
    readable = sql.col("key").isNull() | sql.is_valid_utf8(sql.col("key"))
    return sql.when(readable, sql.col("key").cast("string")).otherwise(
        sql.raise_error(message).cast("string")
    )


def counted(observation: Observation, name: str) -> int:
    """A figure of an observation whose action has ended. Spark leaves out what it saw no row of."""
    value: Any = observation.get.get(name)
    return int(value or 0)
