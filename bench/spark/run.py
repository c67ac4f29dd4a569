"""A Spark session, a service with a full topic, and what is measured, each workload beside its ceiling.

The ceiling is in the same session and the same round: the same columns and rows from (or to) a source (or sink) in Python
that does nothing (`bench.spark.toy`). The first round warms Spark and its JIT up and is not counted.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.probes.calibration import settle
from bench.service_process import ServiceProcess
from bench.services import Measured
from magnetar.client import connect

WORKLOADS = "abcde"
VALUE_BYTES = 100
TOPIC = "bench"
# As many closed ledgers as keep two cores busy to the end.
LEDGERS = 8
PIECES = 8


class Sizes:
    """How much of everything."""

    def __init__(self, quick: bool) -> None:
        self.rows = 1_000_000 if quick else 5_000_000


def make_session() -> Any:
    """Two cores; its workers run this Python and find this folder."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("magnetar-bench")
    for name, value in (
        ("spark.ui.enabled", "false"),
        ("spark.ui.showConsoleProgress", "false"),
        ("spark.driver.host", "127.0.0.1"),
        ("spark.driver.bindAddress", "127.0.0.1"),
        ("spark.driver.memory", "2g"),
        ("spark.sql.shuffle.partitions", "2"),
        ("spark.sql.streaming.numRecentProgressUpdates", "1000"),
        ("spark.sql.session.timeZone", "UTC"),
    ):
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    from bench.spark.toy import ToySource

    session.dataSource.register(ToySource)
    return session


class Pipeline:
    """The session, the service and the topic of a run."""

    def __init__(self, scratch: Path, sizes: Sizes, settle_s: float, say: Callable[[str], None]) -> None:
        self.scratch, self.sizes, self.settle_s, self.say = scratch, sizes, settle_s, say
        arguments = [
            "--set", "broker.max_ledger_entries=1000000000",
            "--set", f"broker.max_ledger_bytes={sizes.rows * VALUE_BYTES // LEDGERS}",
            "--set", "broker.min_ledger_age_ms=0",
            "--set", "broker.maintenance_interval_s=1",
        ]  # fmt: skip
        self.service = ServiceProcess(scratch / "data", arguments=arguments)
        self.number = 0

    def __enter__(self) -> Pipeline:
        self.scratch.mkdir(parents=True)
        began = time.perf_counter()
        self.spark = make_session()
        self.say(f"Spark is ready after {time.perf_counter() - began:.1f} s")
        self.service.start()
        began = time.perf_counter()
        asyncio.run(self._fill())
        seconds = time.perf_counter() - began
        self.say(f"{self.sizes.rows:,} messages of {VALUE_BYTES} B produced in {seconds:.1f} s")
        return self

    def __exit__(self, *_: object) -> None:
        self.spark.stop()
        self.service.stop()
        shutil.rmtree(self.scratch, ignore_errors=True)

    async def _fill(self) -> None:
        value = b"x" * (VALUE_BYTES - 10)
        async with connect(self.service.url) as client, client.create_producer(TOPIC) as producer:
            for first in range(0, self.sizes.rows, 10_000):
                for number in range(first, first + 10_000):
                    producer.send_nowait(b"%010d" % number + value)
                await producer.flush()

    # --- workloads ---------------------------------------------------------------------------------------------------

    def round(self, wanted: list[str]) -> dict[str, dict[str, Any]]:
        """Seconds and rates of every workload and its ceiling."""
        found: dict[str, dict[str, Any]] = {}
        for name in wanted:
            for label, ours, ceiling in _PARTS[name](self):
                found[f"{name} {label}"] = {
                    "idle_share": settle(self.settle_s), "ceiling": self._timed(ceiling), "ours": self._timed(ours),
                }  # fmt: skip
                result = found[f"{name} {label}"]
                ours_per_s, ceiling_per_s = (
                    self.sizes.rows / result[who]["seconds"] for who in ("ours", "ceiling")
                )
                result["share"] = ours_per_s / ceiling_per_s
                self.say(
                    f"  ({name}) {label}: {ours_per_s:,.0f} rows/s, ceiling {ceiling_per_s:,.0f}, {result['share']:.2f}"
                )
        return found

    def _timed(self, work: Callable[[], None]) -> dict[str, Any]:
        measured = Measured([self.service])
        began = time.perf_counter()
        work()
        return {"seconds": time.perf_counter() - began, **measured.result()}

    def place(self) -> str:
        """A folder of its own."""
        self.number += 1
        return str(self.scratch / f"place-{self.number}")

    def topic(self, schema: Any = "", name: str = TOPIC) -> Any:
        """A topic as a table, read by as many tasks as the ceiling has."""
        reader = self.spark.read.format("magnetar").option("service_url", self.service.url)
        size = self.sizes.rows * VALUE_BYTES // PIECES * 2
        reader = reader.option("partition_bytes", str(size))
        return (reader.schema(schema) if schema else reader).load(name)

    def _toy(self, schema: str, reader: Any = None) -> Any:
        reader = (reader or self.spark.read).format("toy").option("rows", str(self.sizes.rows))
        reader = reader.option("pieces", str(PIECES)).option("value_bytes", str(VALUE_BYTES))
        return (reader.schema(schema) if schema else reader).load()

    def noop(self, frame: Any) -> None:
        """Reads all of it."""
        frame.write.format("noop").mode("overwrite").save()

    def batch_read(self) -> Any:
        """All columns, and the value alone."""
        for label, schema in (("batch read, all columns", ""), ("batch read, value", "value binary")):
            yield (
                label,
                lambda schema=schema: self.noop(self.topic(schema)),
                lambda schema=schema: self.noop(self._toy(schema)),
            )

    def stream_read(self) -> Any:
        """In five micro-batches."""
        step = str(self.sizes.rows // 5)

        def ours() -> None:
            reader = self.spark.readStream.format("magnetar").option("service_url", self.service.url)
            reader = reader.option("max_rows_per_batch", step)
            self._until_done(reader.load(TOPIC).writeStream.format("noop"), available_now=True)

        def ceiling() -> None:
            reader = self.spark.readStream.option("rows_per_batch", step)
            self._until_done(self._toy("", reader).writeStream.format("noop"), available_now=False)

        yield "stream read, all columns", ours, ceiling

    def batch_write(self) -> Any:
        """Values from the toy source."""

        def ours() -> None:
            writer = self._toy("value binary").write.format("magnetar").mode("append")
            writer.option("service_url", self.service.url).option("topic", "written").save()

        def ceiling() -> None:
            self._toy("value binary").write.format("toy").mode("append").save()

        self.make_topic("written")
        yield "batch write", ours, ceiling

    def stream_write(self) -> Any:
        """The same in five micro-batches."""
        step = str(self.sizes.rows // 5)

        def frame() -> Any:
            return self._toy("value binary", self.spark.readStream.option("rows_per_batch", step)).writeStream

        def ours() -> None:
            writer = frame().format("magnetar").option("service_url", self.service.url)
            self._until_done(writer.option("topic", "streamed"), available_now=False)

        self.make_topic("streamed")
        yield "stream write", ours, lambda: self._until_done(frame().format("toy"), available_now=False)

    def archive(self) -> Any:
        """All closed ledgers to Parquet; the ceiling writes the toy's rows with Spark's own writer."""
        from magnetar.spark.jobs import archive

        def ours() -> None:
            archive(
                self.spark,
                self.service.url,
                [TOPIC],
                self.place(),
                file_bytes=self.sizes.rows * VALUE_BYTES // 4,
            )

        yield "archive", ours, lambda: self._toy("").write.parquet(self.place())

    def make_topic(self, name: str) -> None:
        """Without messages."""

        async def work() -> None:
            async with connect(self.service.url) as client:
                await client.admin.create_topic(name)

        asyncio.run(work())

    def _until_done(self, writer: Any, *, available_now: bool) -> None:
        """`available_now`: as Spark says it; else until a toy's rows are through."""
        writer = writer.option("checkpointLocation", self.place())
        if available_now:
            writer.trigger(availableNow=True).start().awaitTermination()
            return
        query = writer.start()
        query.processAllAvailable()
        query.stop()


_PARTS: dict[str, Callable[[Pipeline], Any]] = {
    "a": Pipeline.batch_read,
    "b": Pipeline.stream_read,
    "c": Pipeline.batch_write,
    "d": Pipeline.stream_write,
    "e": Pipeline.archive,
}
