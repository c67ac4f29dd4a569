"""What goes wrong says so in one line that names the option, the topic or the bookie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bench.service_process import ServiceProcess

from magnetar.proto.errors import RetryableError
from support.service import Service
from support.spark_topics import Topics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120, func_only=True), pytest.mark.real]

Read = Callable[..., Any]


def test_a_wrong_option(read: Read) -> None:
    """What else can be wrong is in tests/unit/spark/test_options.py."""
    with pytest.raises(
        Exception, match=r"InvalidArgument: option 'strat' is not known; did you mean 'start'\?"
    ):
        read("a", strat="earliest").collect()


def test_a_missing_topic_and_a_column_that_a_topic_has_not(read: Read) -> None:
    with pytest.raises(Exception, match=r"TopicNotFound: .*missing") as caught:
        read("missing").collect()
    # What Spark says around it stays, and none of the frames that it came through.
    lines = [
        line for line in str(caught.value).splitlines() if not line.startswith(("\tat ", "JVM stacktrace"))
    ]
    assert len(lines) <= 8, "\n".join(lines)
    with pytest.raises(Exception, match="InvalidArgument: a topic has no column 'price'"):
        read("missing", schema="value binary, price int").collect()


def test_a_stream_of_a_topic_that_never_was(stream: Read) -> None:
    writer = stream("missing").writeStream.format("noop").trigger(availableNow=True)
    with pytest.raises(
        Exception, match=r"TopicNotFound: topic persistent://public/default/missing does not exist"
    ):
        writer.start().awaitTermination()


def test_a_service_that_is_not_there(read: Read, spark: Any) -> None:
    frame = read("any", service_url="magnetar://127.0.0.1:1", timeout_s="2")
    with pytest.raises(Exception, match=r"127\.0\.0\.1:1\b"):
        frame.collect()


def test_a_topic_is_not_overwritten(spark: Any, service: Service) -> None:
    writer = spark.range(3).selectExpr("cast(id AS string) AS value").write.format("magnetar")
    with pytest.raises(Exception, match="InvalidArgument: a topic cannot be overwritten"):
        writer.mode("overwrite").option("service_url", service.url).option("topic", "kept").save()


def test_another_replica_is_read_when_a_bookie_is_down_and_none_is_one_clear_error(
    tmp_path: Any,
) -> None:
    bookies = [ServiceProcess(tmp_path / f"bookie{n}", command="bookie") for n in range(2)]
    for bookie in bookies:
        bookie.start()
    broker = ServiceProcess(
        tmp_path / "broker",
        command="broker",
        arguments=[
            "--bookies", ",".join(f"127.0.0.1:{bookie.ports['bookie']}" for bookie in bookies),
            "--set", "broker.ensemble_size=2", "--set", "broker.write_quorum=2", "--set", "broker.ack_quorum=2",
        ],
    )  # fmt: skip
    try:
        broker.start()
        topics = Topics(broker)  # type: ignore[arg-type]
        topics.produce("replicated", [b"%d" % n for n in range(50)], per_entry=5)

        def count() -> int:
            return len(topics.read("value", topic="replicated", timeout_s="4"))

        assert count() == 50
        bookies[0].kill("daemon")
        assert count() == 50
        bookies[1].kill("daemon")
        with pytest.raises(RetryableError, match=r"(?i)(bookie|replica)"):
            count()
    finally:
        for process in (broker, *bookies):
            if process.running:
                process.stop()
