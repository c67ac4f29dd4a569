"""What Kafka's and Pulsar's connectors call an option, and what it means here."""

from __future__ import annotations

import pytest

from magnetar.proto.errors import InvalidArgument
from magnetar.spark.aliases import ALIASES
from magnetar.spark.batch_source import lost_of, range_of
from magnetar.spark.options import READ_OPTIONS, WRITE_OPTIONS, AtOffset, ReadOptions, WriteOptions
from magnetar.spark.plan import Range, TopicLedger
from magnetar.spark.service import TopicPlan

URL = "magnetar://127.0.0.1:7650"
A, B = "persistent://public/default/a", "persistent://public/default/b"


def test_a_query_of_kafka_with_another_url() -> None:
    theirs = {
        "service.url": URL, "subscribe": "a,b", "startingOffsets": '{"a": {"0": 23}, "b": {"0": -2}}',
        "endingOffsets": '{"a": -1, "b": 7}', "failOnDataLoss": "false", "maxOffsetsPerTrigger": "500",
        "minOffsetsPerTrigger": "10", "maxTriggerDelay": "60", "minPartitions": "8", "includeHeaders": "true",
    }  # fmt: skip
    ours = {
        "service_url": URL, "topics": "a,b", "start": '{"a": "offset:23", "b": "earliest"}',
        "end": '{"a": "latest", "b": "offset:7"}', "fail_on_data_loss": "false", "max_rows_per_batch": "500",
        "min_rows_per_batch": "10", "max_trigger_delay_s": "60", "min_partitions": "8",
    }  # fmt: skip
    found = ReadOptions.parse(theirs)
    assert found == ReadOptions.parse(ours)
    assert (found.start_of(A), found.start_of(B), found.end_of(A)) == (AtOffset(23), "earliest", "latest")


def test_times_and_patterns() -> None:
    for name in ("startingTimestamp", "startingTime"):
        found = ReadOptions.parse({"service_url": URL, "subscribePattern": "a.*", name: "1000"})
        assert (found.pattern, found.start_of(A)) == ("a.*", 1000)
    given = {"service_url": URL, "subscribe": "a", "startingOffsetsByTimestamp": '{"a": {"0": 2000}}'}
    assert ReadOptions.parse(given).start_of(A) == 2000
    assert WriteOptions.parse({"service.url": URL, "topic": "a"}).service_url == URL


def test_every_alias_is_of_an_option() -> None:
    assert {own for own, _ in ALIASES.values()} <= {*READ_OPTIONS, *WRITE_OPTIONS}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"startingOffsets": '{"a": {"0": 1, "b": 2}}'}, "'b' is no number of a partition of a"),
        ({"startingOffsets": '{"a": -3}'}, "no offset"),
        ({"startingOffsets": "{a}"}, "not JSON"),
        ({"startingTimestamp": "yesterday"}, "no time"),
        ({"start": "latest", "startingOffsets": "latest"}, "options start and startingOffsets say the same"),
        ({"kafka.bootstrap.servers": "x:9092"}, r"option 'kafka\.bootstrap\.servers' is for Kafka's client"),
    ],
)
def test_what_cannot_be_meant(wrong: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ReadOptions.parse({"service_url": URL, "subscribe": "a", **wrong})


def test_a_range_of_offsets_and_what_it_has_lost() -> None:
    ledgers = [TopicLedger(7, 1, first, 10, 10, 1000, 1, 2, True, b"") for first in (10, 20)]
    plan = TopicPlan(A, ledgers, (8, 10, 0), {}, "", 30, 1)
    given = {"service_url": URL, "topic": "a", "end": "offset:25"}
    for start, lost in (
        ("offset:12", 0),
        ("offset:4", 6),
        ("earliest", 0),
        ("offset:25", 0),
        ("offset:99", 0),
    ):
        assert lost_of(ReadOptions.parse({**given, "start": start}), plan) == lost, start
    last = range_of(ReadOptions.parse({**given, "start": "offset:99"}), plan)
    assert last == Range(from_offset=99, before_offset=25)
