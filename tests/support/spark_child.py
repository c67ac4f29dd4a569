"""A Spark driver of its own, to be killed: copies a topic into another until it kills itself.

    python spark_child.py URL SOURCE TARGET RETRIED CHECKPOINT KILL_AT

First it writes a thousand rows to the topic RETRIED, by tasks that fail once and then yield their rows the other way round;
and ten more, by tasks whose first attempt fails after its ledger was closed. Then it copies SOURCE to TARGET, 50 rows a
batch; after the commit of batch KILL_AT, and before Spark hears of it, driver and tasks die of SIGKILL.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from pyspark import TaskContext

from magnetar.spark.data_source import MagnetarDataSource
from magnetar.spark.options import WriteOptions
from magnetar.spark.sink import TopicStreamWriter, TopicWriter


def turned(numbers: Any) -> Any:
    """Task 0 raises and task 1 dies at the end of the first attempt; the second one turns the rows round."""
    context = TaskContext.get()
    assert context is not None
    rows = [(str(number),) for number in numbers]
    if context.attemptNumber() == 0:
        yield from rows
        if context.partitionId() == 1:
            os._exit(1)
        raise ValueError("the first attempt fails")
    yield from reversed(rows)


class LateWriter(TopicWriter):
    """The first attempt of each task fails when everything is written."""

    def write(self, iterator: Any) -> Any:
        """In a task."""
        written = super().write(iterator)
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            raise ValueError("the ledger was closed")
        return written


class KillingWriter(TopicStreamWriter):
    """Kills the driver, whose process group comes as an option, after it attached a batch."""

    def __init__(self, options: WriteOptions, schema: Any, kill_at: int, driver: int) -> None:
        super().__init__(options, schema)
        self._kill_at = kill_at
        self._driver = driver

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803 - Spark's name
        """In the driver."""
        super().commit(messages, batchId)
        if batchId == self._kill_at:
            os.killpg(self._driver, 9)


class Unlucky(MagnetarDataSource):
    """Options `kill_at` and `driver` beside those of the data source."""

    @classmethod
    def name(cls) -> str:
        """What stands in `format(...)`."""
        return "unlucky"

    def writer(self, schema: Any, overwrite: bool) -> Any:
        """For `df.write`."""
        return LateWriter(WriteOptions.parse(self.options), schema)

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        """For `df.writeStream`."""
        options = dict(self.options)
        kill_at, driver = int(options.pop("kill_at")), int(options.pop("driver"))
        return KillingWriter(WriteOptions.parse(options), schema, kill_at, driver)


def main() -> None:
    """See the module docstring."""
    url, source, target, retried, checkpoint, kill_at = sys.argv[1:]
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2,3]")
    for name, value in (
        ("spark.ui.enabled", "false"),
        ("spark.ui.showConsoleProgress", "false"),
        ("spark.driver.host", "127.0.0.1"),
        ("spark.driver.bindAddress", "127.0.0.1"),
        ("spark.driver.memory", "1g"),
    ):
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    session.dataSource.register(Unlucky)
    rows = session.sparkContext.parallelize(range(1000), 2).mapPartitions(turned)
    writer = session.createDataFrame(rows, "value string").write.format("magnetar").mode("append")
    writer.option("service_url", url).option("topic", retried).save()
    delayed = session.range(1000, 1010, 1, 2).selectExpr("cast(id AS string) AS value")
    writer = delayed.write.format("unlucky").mode("append").option("service_url", url)
    writer.option("topic", retried).save()
    print("written", flush=True)
    reader = session.readStream.format("magnetar").option("service_url", url)
    copied = reader.option("max_rows_per_batch", "50").load(source).select("key", "value")
    query = copied.writeStream.format("unlucky").option("service_url", url).option("topic", target)
    query = query.option("kill_at", kill_at).option("driver", str(os.getpgid(0)))
    query.option("checkpointLocation", checkpoint).start().awaitTermination()


if __name__ == "__main__":
    main()
