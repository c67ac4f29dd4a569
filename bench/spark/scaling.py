"""What must not cost more as there is more of it: small ledgers, triggers, and messages that are only counted.

Each is a ratio of two things that are measured in turns, in the same session, so it says more than either of them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa

from bench.spark.run import TOPIC, VALUE_BYTES, Pipeline
from magnetar.client import connect
from magnetar.spark.options import WriteOptions
from magnetar.spark.schema import topic_schema
from magnetar.spark.sink import attach, write_task

TURNS = 3
SMALL_LEDGERS = 10_000
LEDGERS_A_BATCH = 1_000
TRIGGERS = 100
ROWS_A_TRIGGER = 1_000
FEW = 10


class Ratio(NamedTuple):
    """`goal`: what is asked, as the ratio at least or (`at_most`) at most."""

    name: str
    first: str
    second: str
    ratio: float
    goal: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether it is as asked."""
        return self.ratio <= self.goal if self.at_most else self.ratio >= self.goal


def small_ledgers(pipeline: Pipeline) -> Ratio:
    """As many rows in thousands of attached ledgers as the large topic has, read as fast."""
    count = SMALL_LEDGERS if pipeline.sizes.rows >= 5_000_000 else SMALL_LEDGERS // 10
    part = pipeline.sizes.rows // count
    rows = pa.record_batch(
        {"value": pa.array([b"%010d" % n + b"x" * (VALUE_BYTES - 10) for n in range(part)])}
    )
    pipeline.make_topic("small")
    options = WriteOptions.parse({"service_url": pipeline.service.url, "topic": "small"})
    began = time.perf_counter()
    for batch in range(0, count, LEDGERS_A_BATCH):
        ledgers = min(LEDGERS_A_BATCH, count - batch)
        written = [write_task(options, "small", batch, iter([rows])) for _ in range(ledgers)]
        assert attach(options, written)
    pipeline.say(f"{count:,} ledgers of {part:,} messages made in {time.perf_counter() - began:.0f} s")
    small, large = _in_turns(
        lambda: pipeline.noop(pipeline.topic("", "small")), lambda: pipeline.noop(pipeline.topic("", TOPIC))
    )
    total = count * part
    return Ratio(
        f"(f) {count:,} small ledgers beside eight large ones",
        f"{total / small:,.0f} rows/s",
        f"{pipeline.sizes.rows / large:,.0f} rows/s",
        total / small / (pipeline.sizes.rows / large),
        0.60,
    )


def triggers(pipeline: Pipeline) -> Ratio:
    """A stream of small batches from topic to topic: its last triggers beside its first."""
    _triggers(pipeline, "to-warm-up", FEW)
    seconds = _triggers(pipeline, "triggers", TRIGGERS)
    first, last = statistics.median(seconds[:FEW]), statistics.median(seconds[-FEW:])
    size = f"{ROWS_A_TRIGGER * VALUE_BYTES // 1000} KB"
    name = f"(g) {len(seconds)} triggers of {size}: the last ten beside the first"
    return Ratio(name, f"{last * 1e3:.0f} ms", f"{first * 1e3:.0f} ms", last / first, 1.2, at_most=True)


def count(pipeline: Pipeline) -> Ratio:
    """Rows that are only counted, by the list of ledgers, beside a read of all their columns."""
    counted, read = _in_turns(
        lambda: _counted(pipeline, pipeline.topic("partition int", TOPIC)),
        lambda: _counted(pipeline, pipeline.topic(topic_schema(), TOPIC)),
    )
    return Ratio(
        "(h) count(), schema 'partition int' beside all columns",
        f"{counted * 1e3:.0f} ms",
        f"{read * 1e3:.0f} ms",
        read / counted,
        5.0,
    )


def _counted(pipeline: Pipeline, frame: Any) -> None:
    assert frame.count() == pipeline.sizes.rows


def _in_turns(first: Callable[[], None], second: Callable[[], None]) -> tuple[float, float]:
    """Medians, in seconds, after a turn that warms up."""
    seconds: tuple[list[float], list[float]] = [], []
    for _ in range(TURNS + 1):
        for work, found in zip((first, second), seconds, strict=True):
            began = time.perf_counter()
            work()
            found.append(time.perf_counter() - began)
    return statistics.median(seconds[0][1:]), statistics.median(seconds[1][1:])


def _triggers(pipeline: Pipeline, name: str, count: int) -> list[float]:
    """Seconds of each."""
    source = f"{name}-source"
    pipeline.make_topic(name)
    asyncio.run(_produce(pipeline.service.url, source, count * ROWS_A_TRIGGER))
    reader = pipeline.spark.readStream.format("magnetar").option("service_url", pipeline.service.url)
    rows = reader.option("max_rows_per_batch", str(ROWS_A_TRIGGER)).load(source)
    writer = (
        rows.writeStream.format("magnetar").option("service_url", pipeline.service.url).option("topic", name)
    )
    query = writer.option("checkpointLocation", pipeline.place()).trigger(availableNow=True).start()
    query.awaitTermination()
    progress = [one for one in query.recentProgress if one.numInputRows]
    assert len(progress) == count, len(progress)
    return [one.durationMs["triggerExecution"] / 1e3 for one in progress]


async def _produce(url: str, topic: str, rows: int) -> None:
    async with connect(url) as client, client.create_producer(topic) as producer:
        for number in range(rows):
            producer.send_nowait(b"%010d" % number + b"x" * (VALUE_BYTES - 10))
        await producer.flush()


SCALING: dict[str, Callable[[Pipeline], Ratio]] = {"f": small_ledgers, "g": triggers, "h": count}
