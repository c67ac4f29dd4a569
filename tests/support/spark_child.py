"""A Spark driver of its own, to be killed: copies a topic into another until somebody ends it.

    python spark_child.py URL SOURCE TARGET RETRIED CHECKPOINT

First it writes a thousand rows to the topic RETRIED, by tasks that fail once and then yield their rows the other way round.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def turned(numbers: Any) -> Any:
    """Task 0 raises and task 1 dies at the end of the first attempt; the second one turns the rows round."""
    import os

    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    rows = [(str(number),) for number in numbers]
    if context.attemptNumber() == 0:
        yield from rows
        if context.partitionId() == 1:
            os._exit(1)
        raise ValueError("the first attempt fails")
    yield from reversed(rows)


def main() -> None:
    """See the module docstring."""
    url, source, target, retried, checkpoint = sys.argv[1:]
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
    rows = session.sparkContext.parallelize(range(1000), 2).mapPartitions(turned)
    writer = session.createDataFrame(rows, "value string").write.format("magnetar").mode("append")
    writer.option("service_url", url).option("topic", retried).save()
    print("written", flush=True)
    reader = session.readStream.format("magnetar").option("service_url", url)
    copied = reader.option("max_rows_per_batch", "50").load(source).select("key", "value")
    query = copied.writeStream.format("magnetar").option("service_url", url).option("topic", target)
    query.option("checkpointLocation", checkpoint).start().awaitTermination()


if __name__ == "__main__":
    main()
