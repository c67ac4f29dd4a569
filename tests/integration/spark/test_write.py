"""`write` and `writeStream` to topics of a real service: all of a batch or nothing, and each batch once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from magnetar.proto import commands as c
from support.service import Service
from support.spark_topics import Topics, full

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120, func_only=True)]


@pytest.fixture
def write(service: Service) -> Callable[..., None]:
    """`write(frame, "orders", compression="lz4")`."""

    def save(frame: Any, topic: str, **options: str) -> None:
        writer = frame.write.format("magnetar").mode("append").option("service_url", service.url)
        writer.option("topic", topic).options(**options).save()

    return save


def staged(topics: Topics, topic: str) -> int:
    """Staged ledgers of a topic, of all transactions."""
    return int(topics.stats(topic).get("staged_ledgers", 0))


def test_what_is_written_is_read_in_every_column_and_in_order_of_the_tasks(
    spark: Any, topics: Topics, write: Callable[..., None]
) -> None:
    topics.produce("written", [b"before"])
    frame = spark.range(0, 3000, 1, 3).selectExpr(
        "concat('v', id) AS value",
        "if(id % 3 = 0, null, concat('k', id % 7)) AS key",
        "if(id % 2 = 0, map('n', cast(id AS string)), null) AS properties",
        "if(id % 5 = 0, null, timestamp_millis(1700000000000 + id)) AS event_time",
        "id AS offset",  # a topic's own column is passed over
    )
    write(frame, "written", compression="zstd")
    topics.produce("written", [b"after"])
    rows = topics.rows("written", 3002)
    assert (rows[0].value, rows[-1].value) == (b"before", b"after")
    for n, row in enumerate(rows[1:-1]):
        assert row.value == b"v%d" % n
        assert row.key == (None if n % 3 == 0 else b"k%d" % (n % 7))
        assert row.properties == ({"n": str(n)} if n % 2 == 0 else None)
        assert row.event_time == (None if n % 5 == 0 else 1700000000000 + n)
    assert [row.message_id for row in rows] == sorted(row.message_id for row in rows)
    assert len(topics.ledgers("written")) == 5


def test_a_write_without_rows_and_tasks_without_rows(
    spark: Any, topics: Topics, write: Callable[..., None]
) -> None:
    topics.create("sparse")
    write(spark.range(0).selectExpr("cast(id AS string) AS value"), "sparse")
    assert topics.values("sparse") == []
    write(spark.range(0, 4, 1, 4).where("id = 2").selectExpr("cast(id AS string) AS value"), "sparse")
    assert topics.values("sparse") == [b"2"]


def test_a_write_that_fails_leaves_nothing_staged_and_nothing_visible(
    spark: Any, topics: Topics, write: Callable[..., None]
) -> None:
    topics.create("failing")
    bad = spark.range(0, 2000, 1, 2).selectExpr(
        "if(id = 1500, raise_error('the rows end here'), cast(id AS string)) AS value"
    )
    with pytest.raises(Exception, match="the rows end here"):
        write(bad, "failing")
    large = spark.range(0, 2, 1, 2).selectExpr("repeat('x', 100 + cast(id AS int) * 100) AS value")
    with pytest.raises(
        Exception,
        match="InvalidArgument: a row to write has 200 bytes of value and key, and",
    ):
        write(large, "failing", max_message_bytes="150")
    assert topics.values("failing") == []
    topics.wait_for(lambda: topics.staged("failing") == 0, "nothing is staged")


def test_readers_see_all_of_a_batch_or_nothing(
    spark: Any, topics: Topics, write: Callable[..., None], service: Service
) -> None:
    """A reader at the tail, and one that counts again and again, while batches of 600 rows from three tasks appear."""
    topics.create("whole")
    counts: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            counts.append(sum(row[4] for row in topics.ledgers("whole")))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for batch in range(3):
            write(spark.range(0, 600, 1, 3).selectExpr(f"concat('{batch}/', id) AS value"), "whole")
            assert len(topics.values("whole")) == 600 * (batch + 1)
    finally:
        done.set()
        watcher.join()
    assert {*counts} <= {0, 600, 1200, 1800}
    assert len({*counts}) >= 3
    assert topics.values("whole") == [b"%d/%d" % (b, n) for b in range(3) for n in range(600)]
    page = topics.request(c.TopicLedgers(0, full("whole")), "whole")
    assert all(row[8] for row in page["ledgers"] if row[3])
