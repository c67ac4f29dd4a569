"""`compact` against a plain dictionary, into a topic and into Parquet."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from magnetar.proto.errors import InvalidArgument, TopicNotFound
from magnetar.spark.jobs import compact
from support.spark_kit import topic_frame

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.real]

Message = tuple[Any, ...]


def random_messages(seed: int, n: int) -> list[Message]:
    rng = random.Random(seed)
    return [
        (
            rng.choice([None, *[f"k{i}-ü" for i in range(50)]]),
            None if rng.random() < 0.15 else b"%d" % number,
            {"properties": {"n": str(number)} if number % 3 else None, "event_time": 1_000_000 + number},
        )
        for number in range(n)
    ]


def expected(messages: list[Message]) -> list[Message]:
    last = {key: number for number, (key, *_) in enumerate(messages) if key is not None}
    return [
        message
        for number, message in enumerate(messages)
        if message[0] is None or (last[message[0]] == number and message[1] is not None)
    ]


def as_messages(rows: list[Any]) -> list[Message]:
    return [
        (
            row.key if row.key is None or isinstance(row.key, str) else bytes(row.key).decode(),
            None if row.value is None else bytes(row.value),
            {"properties": row.properties, "event_time": round(row.event_time.timestamp() * 1000)},
        )
        for row in rows
    ]


def test_the_last_value_of_each_key_in_the_order_of_offsets(
    spark: Any, url: str, produce: Callable[..., None]
) -> None:
    messages = random_messages(1, 1000)
    produce("compact-me", messages)
    result = compact(spark, url, "compact-me", to_topic="compacted")
    rows = topic_frame(spark, url, "compacted").collect()
    assert as_messages(rows) == expected(messages)
    assert [row.offset for row in rows] == list(range(len(rows)))
    assert (result.messages_read, result.messages_kept) == (1000, len(rows))
    assert result.target == "persistent://public/default/compacted"
    with pytest.raises(InvalidArgument, match="has messages already"):
        compact(spark, url, "compact-me", to_topic="compacted")


@pytest.mark.parametrize("more", [False, True])
def test_of_two_compactions_at_once_one_is_written(
    spark: Any, url: str, produce: Callable[..., None], monkeypatch: pytest.MonkeyPatch, more: bool
) -> None:
    """Both found the target empty. What the other one has is the same, or it is refused."""
    source, target = f"twice-{more}", f"compacted-twice-{more}"
    produce(source, [(f"k{number % 7}", b"%d" % number) for number in range(30)])
    module = sys.modules["magnetar.spark.jobs.compact"]

    def meanwhile(*given: Any) -> None:
        monkeypatch.undo()
        compact(spark, url, source, to_topic=target)
        if more:
            produce(source, [("k1", b"new")])

    monkeypatch.setattr(module, "make_topic", meanwhile)
    with pytest.raises(Exception, match="with other rows") if more else contextlib.nullcontext():
        compact(spark, url, source, to_topic=target)
    assert topic_frame(spark, url, target).count() == 7


def test_to_parquet_without_messages_that_have_no_key(
    spark: Any, url: str, produce: Callable[..., None], tmp_path: Path
) -> None:
    messages = random_messages(2, 300)
    produce("compact-parquet", messages)
    path = str(tmp_path / "out")
    result = compact(spark, url, "compact-parquet", to_parquet=path, keyless="drop")
    rows = spark.read.parquet(path).orderBy("offset").collect()
    assert as_messages(rows) == [message for message in expected(messages) if message[0] is not None]
    assert result.messages_kept == len(rows)


def test_keys_that_are_not_text_are_not_changed_silently(
    spark: Any, url: str, produce: Callable[..., None]
) -> None:
    produce("compact-bytes", [(b"\xff\x00", b"a"), (b"\xff\x00", b"b")])
    with pytest.raises(Exception, match=r"the key FF00 is not text; .*text_keys=False"):
        compact(spark, url, "compact-bytes", to_topic="compacted-bytes")
    assert topic_frame(spark, url, "compacted-bytes").count() == 0
    compact(spark, url, "compact-bytes", to_topic="compacted-bytes", text_keys=False)
    (row,) = topic_frame(spark, url, "compacted-bytes").collect()
    assert (bytes(row.key), bytes(row.value)) == (b"\xff\x00", b"b")


def test_what_cannot_be_done_is_said_in_one_line(spark: Any, url: str) -> None:
    with pytest.raises(TopicNotFound, match="nothing-here"):
        compact(spark, url, "nothing-here", to_topic="x")
    with pytest.raises(InvalidArgument, match="either to_topic or to_parquet"):
        compact(spark, url, "nothing-here")
    with pytest.raises(InvalidArgument, match="keyless is 'maybe'"):
        compact(spark, url, "nothing-here", to_topic="x", keyless="maybe")  # type: ignore[arg-type]
