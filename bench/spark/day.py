"""A day of a stream with a trigger every ten seconds: ledgers in the topic's list, size of its record, the driver's time.

python -m bench.spark.day               without a session: the tasks and the commit of Spark's sink, against a real service

Each batch size is written by two tasks for TRIGGERS triggers. What they left is projected to 8,640 of them, with the
roll-over of the topic's own ledgers by size and age. Then: 1,000 small attached ledgers read as one large one is, and rows
without their values.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from bench.arguments import OUT
from bench.service_process import ServiceProcess
from magnetar.broker.settings import BrokerSettings
from magnetar.client import Client, connect
from magnetar.proto.commands import TopicLedgers
from magnetar.spark.batch_source import TopicReader
from magnetar.spark.options import ReadOptions, WriteOptions
from magnetar.spark.schema import COLUMNS, RowColumns
from magnetar.spark.sink import attach, write_task
from magnetar.spark.stream_source import TopicStreamReader
from magnetar.spark.versions import ReadAllAvailable

TRIGGERS = 30
TRIGGERS_A_DAY = 24 * 360
TASKS = 2
VALUE_BYTES = 100
BATCHES = (100_000, 1_000_000, 10_000_000, 40_000_000)  # bytes
SMALL_LEDGERS = 1_000
ROW_BYTES = 43  # of a ledger, in the topic's record


def main() -> None:
    """Prints two tables."""
    directory = OUT / f"scratch-{time.time_ns()}"
    service = ServiceProcess(directory)
    service.start()
    try:
        screen = Console()
        table = Table(title="A day of 10 s triggers", title_justify="left")
        for name in (
            "batch",
            "ledgers a day",
            "rows of its record",
            "commit, first ten",
            "last ten",
            "plan, first ten",
            "last ten",
        ):
            table.add_column(name, justify="right")
        for size in BATCHES:
            table.add_row(*_day(service, size))
        screen.print(table)
        screen.print(_reads(service))
    finally:
        service.stop()
        shutil.rmtree(directory, ignore_errors=True)


def _rows(size: int) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "value": pa.array(
                [os.urandom(VALUE_BYTES) for _ in range(max(1, size // VALUE_BYTES))], pa.binary()
            )
        }
    )


def _day(service: ServiceProcess, size: int) -> list[str]:
    topic = f"day-{size}"
    _make(service, topic)
    options = WriteOptions.parse({"service_url": service.url, "topic": topic})
    rows = _rows(size // TASKS)
    reader = TopicStreamReader(
        ReadOptions.parse({"service_url": service.url, "topic": topic}), RowColumns(("offset",))
    )
    offset = reader.initialOffset()
    commits, plans = [], []
    for number in range(TRIGGERS):
        written = [write_task(options, "q", number, iter([rows])) for _ in range(TASKS)]
        began = time.perf_counter()
        assert attach(options, written)
        commits.append(time.perf_counter() - began)
        began = time.perf_counter()
        end = reader.latestOffset(offset, ReadAllAvailable())
        assert reader.partitions(offset, end)
        plans.append(time.perf_counter() - began)
        offset = end
    reader.stop()
    ledgers = _ledgers(service, topic)
    attached = sum(row[0] != row[1] for row in ledgers)
    settings = BrokerSettings()
    entries = 0 if attached else TRIGGERS_A_DAY
    own = max(
        math.ceil(entries * size / settings.max_ledger_bytes),
        math.ceil(entries / settings.max_ledger_entries),
        math.ceil(24 * 3_600_000 / settings.max_ledger_age_ms),
    )
    a_day = attached * TRIGGERS_A_DAY // TRIGGERS + own
    record = a_day * ROW_BYTES
    figures = [_ms(some) for of in (commits, plans) for some in (of[:10], of[-10:])]
    return [f"{size / 1e6:g} MB", f"{a_day:,}", f"{record / 1e3:,.0f} kB", *figures]


def _reads(service: ServiceProcess) -> Table:
    """Rows a second of one process."""
    large, small = "large", "small"
    rows = _rows(20_000_000)
    for topic in (large, small):
        _make(service, topic)
    for number in range(5):
        options = WriteOptions.parse({"service_url": service.url, "topic": large})
        assert attach(options, [write_task(options, "q", number, iter([rows]))])
    options = WriteOptions.parse({"service_url": service.url, "topic": small})
    part = rows.num_rows * 5 // SMALL_LEDGERS
    # In one batch, so that it is large, and its ledgers are attached.
    written = [write_task(options, "q", 0, iter([rows.slice(0, part)])) for _ in range(SMALL_LEDGERS)]
    assert attach(options, written)
    table = Table(title=f"Reading 100 MB in messages of {VALUE_BYTES} B, one process", title_justify="left")
    for name in ("topic", "ledgers", "tasks", "rows/s, all columns", "rows/s, offset alone"):
        table.add_column(name, justify="right")
    for topic in (large, small):
        whole, tasks = _rate(service, topic, tuple(COLUMNS))
        bare, _ = _rate(service, topic, ("offset",))
        table.add_row(
            topic, f"{len(_ledgers(service, topic)):,}", str(tasks), f"{whole:,.0f}", f"{bare:,.0f}"
        )
    return table


def _rate(service: ServiceProcess, topic: str, columns: Sequence[str]) -> tuple[float, int]:
    options = ReadOptions.parse({"service_url": service.url, "topic": topic})
    rates, tasks = [], 0
    for _ in range(3):
        reader = TopicReader(options, RowColumns(tuple(columns)))
        began = time.perf_counter()
        partitions = reader.partitions()
        tasks = len(partitions)
        count = sum(batch.num_rows for one in partitions for batch in reader.read(one))
        rates.append(count / (time.perf_counter() - began))
    return statistics.median(rates), tasks


def _make(service: ServiceProcess, topic: str) -> None:
    async def work() -> None:
        async with connect(service.url) as client:
            await client.create_topic(topic)

    asyncio.run(work())


def _ledgers(service: ServiceProcess, topic: str) -> list[list[Any]]:
    async def pages(client: Client) -> list[list[Any]]:
        name, found, more = f"persistent://public/default/{topic}", list[list[Any]](), True
        while more:
            page = await client.request(TopicLedgers(0, name, found[-1][0] if found else -1), topic=name)
            found, more = found + page["ledgers"], page["more"]
        return found

    async def work() -> list[list[Any]]:
        async with connect(service.url) as client:
            return await pages(client)

    return asyncio.run(work())


def _ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.0f} ms"


if __name__ == "__main__":
    main()
