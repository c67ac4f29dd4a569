"""`replay` keeps what a message has, and marks say what it is a copy of; what is refused makes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from magnetar.proto.errors import InvalidArgument, TopicNotFound
from magnetar.spark.jobs import replay
from magnetar.spark.jobs.replay import MARKS
from support.service import Service
from support.spark_kit import topic_frame
from support.spark_topics import Topics, full

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.real, pytest.mark.spark]


def as_tuples(rows: list[Any]) -> list[tuple[Any, ...]]:
    return [
        (row.key, row.value, row.properties, row.event_time)
        for row in sorted(rows, key=lambda row: row.offset)
    ]


def marked(row: Any) -> dict[str, str]:
    return {
        **{name: value for name, value in (row.properties or {}).items() if name not in MARKS},
        MARKS[0]: row.topic,
        MARKS[1]: str(row.offset),
    }


def test_a_marked_copy_tells_of_its_original_and_a_copy_of_a_copy_of_the_copy(
    spark: Any, url: str, produce: Callable[..., None]
) -> None:
    produce(
        "mark-a",
        [
            (
                b"\xff%d" % i,
                None if i % 3 == 0 else b"%d" % i,
                {"properties": {"n": str(i)} if i % 2 else None},
            )
            for i in range(50)
        ],
        flush_every=2,
    )
    first = replay(
        spark, url, to_topic="mark-b", topics=["mark-a"], from_offset=10, mark=True, text_keys=False
    )
    again = replay(
        spark, url, to_topic="mark-c", topics=["mark-b"], before_offset=30, mark=True, text_keys=False
    )
    assert (first.messages, again.messages) == (40, 30)
    a, b, c = (
        topic_frame(spark, url, name).orderBy("offset").collect() for name in ("mark-a", "mark-b", "mark-c")
    )
    assert as_tuples(b) == [(row.key, row.value, marked(row), row.event_time) for row in a[10:]]
    assert as_tuples(c) == [(row.key, row.value, marked(row), row.event_time) for row in b[:30]]


def test_each_source_keeps_its_order_and_twice_is_twice(
    spark: Any, url: str, produce: Callable[..., None]
) -> None:
    for name in ("order-a", "order-b"):
        produce(name, [(f"k{i % 3}", f"{name}{i}".encode()) for i in range(100)], flush_every=2)
    for _ in range(2):
        replay(spark, url, to_topic="order-c", topics=["order-a", "order-b"])
    values = [
        bytes(row.value).decode() for row in topic_frame(spark, url, "order-c").orderBy("offset").collect()
    ]
    once = [f"order-a{i}" for i in range(100)] + [f"order-b{i}" for i in range(100)]
    assert values == once * 2


def test_a_job_that_fails_leaves_nothing_in_its_target(
    spark: Any, url: str, service: Service, produce: Callable[..., None]
) -> None:
    produce("fail-a", [(b"good", b"1"), (b"\xff", b"2")] * 40, flush_every=2)
    produce("fail-b", [("k", b"before")])
    with pytest.raises(Exception, match=r"the key FF is not text"):
        replay(spark, url, to_topic="fail-b", topics=["fail-a"])
    topics = Topics(service)
    assert topics.values("fail-b") == [b"before"]
    topics.wait_for(lambda: topics.staged("fail-b") == 0, "what tasks wrote is discarded")
    with pytest.raises(TopicNotFound):
        replay(spark, url, to_topic="fail-c", topics=["fail-nothing"])
    with pytest.raises(InvalidArgument, match="into itself"):
        replay(spark, url, to_topic="fail-a", topics=["fail-b", "fail-a"])
    assert full("fail-c") not in topics.ask(lambda client: client.admin.list_topics())
