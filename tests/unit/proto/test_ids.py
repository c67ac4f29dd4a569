"""Message ids and names."""

from __future__ import annotations

from typing import Any

import pytest

from magnetar.proto.errors import InvalidArgument, InvalidTopicName
from magnetar.proto.ids import DUPLICATE_ID, NO_PARTITION, MessageId, TopicName, check_subscription_name


def test_message_ids_are_ordered_hashable_and_read_back() -> None:
    ids = [MessageId(1, 2, 3), MessageId(1, 2, 4), MessageId(1, 3, 0), MessageId(2, 0, 0, 5)]
    backwards = ids[::-1]
    assert sorted(backwards) == ids
    assert len(set(ids + ids)) == 4
    for one in ids:
        assert MessageId.from_bytes(one.to_bytes()) == one
        assert MessageId.parse(str(one)) == one
    with pytest.raises(InvalidArgument):
        MessageId.from_bytes(b"x")
    for text in ("", "1:2", "a:b:c", "1:2:3:4:5", "-1:0:0", f"{1 << 64}:0:0"):
        with pytest.raises(InvalidArgument):
            MessageId.parse(text)


def test_the_id_of_what_was_stored_before_is_none_that_a_message_has() -> None:
    for duplicate in (DUPLICATE_ID, DUPLICATE_ID._replace(partition=3)):
        assert duplicate.is_duplicate
        assert duplicate < MessageId(0, 0, 0)
        assert duplicate.to_bytes()[:16] == b"\xff" * 16
        assert MessageId.from_bytes(duplicate.to_bytes()) == duplicate
        assert MessageId.parse(str(duplicate)) == duplicate
        with pytest.raises(InvalidArgument, match="stored before, and not where"):
            duplicate.place()
    largest = MessageId((1 << 63) - 1, (1 << 43) - 1, (1 << 20) - 1)
    assert not largest.is_duplicate
    assert largest.place() == largest
    assert MessageId.from_bytes(largest.to_bytes()) == largest
    for wrong in (MessageId(-1, 0, 0), MessageId(7, -1, 0), MessageId(-1, -1, 4), MessageId(-2, -2, 0)):
        with pytest.raises(InvalidArgument, match="not a message id"):
            wrong.to_bytes()
        with pytest.raises(InvalidArgument, match="not a message id"):
            MessageId.parse(str(wrong))
    with pytest.raises(InvalidArgument, match="not a message id"):
        MessageId.from_bytes(b"\xff" * 8 + bytes(16))


def test_topic_names() -> None:
    assert TopicName.parse("orders") == ("persistent", "public", "default", "orders")
    assert TopicName.parse("a/b/c") == ("persistent", "a", "b", "c")
    assert str(TopicName.parse("non-persistent://a/b/c")) == "non-persistent://a/b/c"
    assert TopicName.parse("orders").short == "orders"
    assert TopicName.parse("a/b/c").short == "persistent://a/b/c"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a b",
        "a/b",
        "a/b/c/d",
        "x://a/b/c",
        "persistent://a/b",
        "a//c",
        "../x/y",
        "a/b/..",
        "n" * 256,
        "a\n",
    ],
)
def test_names_that_are_none(text: str) -> None:
    with pytest.raises(InvalidTopicName, match="not a topic name"):
        TopicName.parse(text)


def test_names_of_partitions() -> None:
    whole = TopicName.parse("non-persistent://a/b/orders")
    one = whole.partition_of(12)
    assert str(one) == "non-persistent://a/b/orders-partition-12"
    assert (one.partition, one.whole) == (12, whole)
    assert (whole.partition, whole.whole) == (NO_PARTITION, whole)
    nested = whole.partition_of(1).partition_of(0)
    assert (nested.partition, nested.whole) == (0, whole.partition_of(1))


@pytest.mark.parametrize(
    "end", ["-partition-", "-partition-01", "-partition--1", "-partition-1a", "-partition-٣"]
)
def test_names_that_look_like_those_of_partitions(end: str) -> None:
    name = TopicName.parse(f"orders{end}")
    assert (name.partition, name.whole) == (NO_PARTITION, name)


def test_a_name_that_is_too_long_with_the_number_of_its_partition() -> None:
    name = TopicName.parse("n" * 243)
    assert len(name.partition_of(9).name) == 255
    with pytest.raises(InvalidTopicName, match="shorter name for the topic"):
        name.partition_of(10)


@pytest.mark.parametrize("name", [None, 5, b"orders"])
def test_names_of_another_type(name: Any) -> None:
    with pytest.raises(InvalidTopicName, match="named by a str"):
        TopicName.parse(name)
    with pytest.raises(InvalidArgument, match="named by a str"):
        check_subscription_name(name)


def test_subscription_names() -> None:
    assert check_subscription_name("billing-1") == "billing-1"
    with pytest.raises(InvalidArgument):
        check_subscription_name("a/b")
