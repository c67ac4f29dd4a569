"""`rollup` counts what was produced, once, over a restart of its query."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from magnetar.proto.errors import InvalidArgument
from magnetar.spark.jobs import rollup, start_rollup
from support.spark_kit import topic_frame

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.real, pytest.mark.spark]

MINUTE_MS = 60_000
START_MS = 1_700_000_000_000 // MINUTE_MS * MINUTE_MS


def messages(minutes: range) -> list[tuple[Any, ...]]:
    return [
        (
            f"k{i % 3}" if i % 4 else None,
            b"x" * i,
            {"event_time": START_MS + minute * MINUTE_MS + i * 5000},
        )
        for minute in minutes
        for i in range(10)
    ]


def expected(minutes: range) -> dict[tuple[int, str | None], tuple[int, int, int]]:
    found: dict[tuple[int, str | None], tuple[int, int, int]] = {}
    for key, value, more in messages(minutes):
        place = ((more["event_time"] - START_MS) // MINUTE_MS, key)
        count, size, largest = found.get(place, (0, 0, 0))
        found[place] = (count + 1, size + len(value) + len(key or ""), max(largest, len(value)))
    return found


def test_figures_of_a_table(spark: Any, url: str, produce: Callable[..., None]) -> None:
    produce("rollup-batch", messages(range(3)))
    rows = rollup(topic_frame(spark, url, "rollup-batch")).collect()
    assert {
        (round(row.window_start.timestamp() * 1000 - START_MS) // MINUTE_MS, row.key): (
            row.messages,
            row.bytes,
            row.largest,
        )
        for row in rows
    } == expected(range(3))
    assert {row.topic for row in rows} == {"persistent://public/default/rollup-batch"}


def test_windows_come_once_over_a_restart(
    spark: Any, url: str, produce: Callable[..., None], tmp_path: Path
) -> None:
    def run() -> None:
        query = start_rollup(
            spark,
            url,
            ["rollup-stream"],
            checkpoint=str(tmp_path / "checkpoint"),
            to_topic="figures",
            watermark="1 minute",
            once=True,
        )
        query.awaitTermination()
        assert query.exception() is None

    produce("rollup-stream", messages(range(4)))
    run()
    produce("rollup-stream", messages(range(4, 8)))
    run()
    rows = [json.loads(bytes(row.value)) for row in topic_frame(spark, url, "figures").collect()]
    places = Counter((row["window_start"], row.get("key")) for row in rows)
    assert set(places.values()) == {1}
    whole = expected(range(8))
    # What the watermark has not reached is not emitted yet.
    assert 20 <= len(rows) < len(whole)
    assert {(row["messages"], row["bytes"], row["largest"]) for row in rows} <= set(whole.values())


def test_what_cannot_be_started(spark: Any, url: str, produce: Callable[..., None]) -> None:
    with pytest.raises(InvalidArgument, match="checkpoint is empty"):
        start_rollup(spark, url, ["rollup-x"], checkpoint="", to_topic="y")
    with pytest.raises(InvalidArgument, match="either to_topic or to_parquet"):
        start_rollup(spark, url, ["rollup-x"], checkpoint="/c")
    produce("rollup-x", [("k", b"v")])
    with pytest.raises(InvalidArgument, match="would count its own figures"):
        start_rollup(spark, url, ["rollup-x"], checkpoint="/c", to_topic="rollup-x")
