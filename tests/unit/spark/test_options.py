"""Every wrong option ends in one error that names it and says what it wants."""

from __future__ import annotations

from datetime import datetime

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import MessageId
from magnetar.spark.batch_source import TopicReader
from magnetar.spark.options import ReadOptions, WriteOptions
from magnetar.spark.sink import TopicStreamWriter, TopicWriter
from magnetar.spark.stream_source import TopicStreamReader

GOOD = {"service_url": "magnetar://127.0.0.1:7650", "topic": "orders"}
ORDERS = "persistent://public/default/orders"


def test_the_least_that_is_needed() -> None:
    options = ReadOptions.parse(GOOD)
    assert (options.service_url, options.topics) == ("magnetar://127.0.0.1:7650", (ORDERS,))
    assert (options.start_of(ORDERS), options.end_of(ORDERS)) == ("earliest", "latest")
    assert options.partition_bytes == 64 << 20


def test_a_topic_may_be_what_is_loaded_and_the_port_may_be_left_out() -> None:
    options = ReadOptions.parse({"service_url": "magnetar://[::1]", "path": "orders"})
    assert (options.service_url, options.topics) == ("magnetar://[::1]", (ORDERS,))


def test_names_of_options_do_not_mind_case_and_topics_are_named_once() -> None:
    options = ReadOptions.parse({"SERVICE_URL": GOOD["service_url"], "Topics": "orders, a/b/c,orders"})
    assert options.topics == (ORDERS, "persistent://a/b/c")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("latest", "latest"),
        ("7:3:1", MessageId(7, 3, 1)),
        ("1700000000000", 1700000000000),
        ("2026-11-21T12:00:00Z", 1795262400000),
        ("2026-11-21T13:00:00+01:00", 1795262400000),
        ("2026-11-21T12:00:00", round(datetime(2026, 11, 21, 12).timestamp() * 1000)),  # local time
    ],
)
def test_places(text: str, place: object) -> None:
    assert ReadOptions.parse({**GOOD, "start": text}).start_of(ORDERS) == place


def test_places_by_topic() -> None:
    both = {"service_url": GOOD["service_url"], "topics": "orders,early,other"}
    options = ReadOptions.parse({**both, "start": '{"orders": "7:3:1", "early": 1000, "": "latest"}'})
    assert options.start_of("persistent://public/default/early") == 1000
    assert options.start_of(ORDERS) == MessageId(7, 3, 1)
    assert options.start_of("persistent://public/default/other") == "latest"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"service_url": ""}, "service_url"),
        ({"service_url": "http://x:1"}, "service_url"),
        ({"service_url": "magnetar://x:99999"}, "service_url"),
        ({"topic": ""}, "none of them"),
        ({"topics": "a"}, "topic and topics"),
        ({"topic": "a b"}, "option topic"),
        ({"topic": "", "topics_pattern": "("}, "topics_pattern"),
        (
            {"start": '{"others": "latest"}'},
            "option start names topic .*others, which is not read; there is .*orders",
        ),
        ({"topc": "x"}, "did you mean 'topic'"),
        ({"kafka.bootstrap.servers": "x:9092"}, "is for Kafka's client; the service is named by service_url"),
        ({"start": "yesterday"}, "option start"),
        ({"end": "2026-11-32T12:00:00"}, "option end: not a position"),
        ({"start": "{"}, "option start is not JSON"),
        ({"start": '{"": -1}'}, "option start: not a time"),
        ({"start": '{"": true}'}, "option start: not a time"),
        ({"partition_bytes": "0"}, "partition_bytes"),
        ({"partition_bytes": "many"}, "partition_bytes"),
        ({"lease_s": "-1"}, "lease_s"),
        ({"timeout_s": "soon"}, "timeout_s"),
        ({"fail_on_data_loss": "maybe"}, "fail_on_data_loss"),
        ({"max_rows_per_batch": "-5"}, "max_rows_per_batch"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ReadOptions.parse(
            {name: value for name, value in {**GOOD, **wrong}.items() if value or name == "service_url"}
        )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch": "3"}, "option query names that"),
        ({"batch": "-1", "query": "q"}, "option batch"),
        ({"batch": "next", "query": "q"}, "option batch"),
        ({"batch": str(1 << 63), "query": "q"}, "option batch"),
        ({"compression": "gzip"}, "option compression"),
        ({"repeated_batch": "never"}, "option repeated_batch"),
    ],
)
def test_what_is_wrong_of_a_write_is_named(wrong: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        WriteOptions.parse({**GOOD, **wrong})


def test_a_write_is_named_by_both_options_and_a_stream_by_none() -> None:
    schema = StructType([StructField("value", BinaryType())])
    named, half, stream = (
        WriteOptions.parse({**GOOD, "query": "q", "batch": "3"}),
        WriteOptions.parse({**GOOD, "query": "q"}),
        WriteOptions.parse({**GOOD, "queryName": "q"}),  # Spark hands it on
    )
    TopicWriter(named, schema)
    TopicStreamWriter(stream, schema)
    with pytest.raises(InvalidArgument, match="without the option batch"):
        TopicWriter(half, schema)
    for wrong in (named, half):
        with pytest.raises(InvalidArgument, match=r"options query and batch are for df\.write"):
            TopicStreamWriter(wrong, schema)


def test_what_means_nothing_to_a_stream_or_to_a_batch_read_is_refused() -> None:
    columns = ("value",)
    with pytest.raises(InvalidArgument, match=r"option end is for spark\.read"):
        TopicStreamReader(ReadOptions.parse({**GOOD, "end": "latest"}), columns)
    with pytest.raises(InvalidArgument, match="exclude each other"):
        TopicStreamReader(
            ReadOptions.parse({**GOOD, "max_rows_per_batch": "1", "max_bytes_per_batch": "1"}), columns
        )
    for name in ("max_rows_per_batch", "max_bytes_per_batch", "subscription"):
        with pytest.raises(InvalidArgument, match=rf"option {name} is for spark\.readStream"):
            TopicReader(ReadOptions.parse({**GOOD, name: "7"}), columns)
