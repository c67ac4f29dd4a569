"""One Spark session for a test run, whichever folder's tests need it: starting one takes 5 to 25 s.

A conftest of tests that need it says `from support.spark_kit import spark`. On a machine without Java they are skipped,
and the summary of the run says so.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["SPARK_SETTINGS", "make_session", "old_spark", "spark", "topic_frame"]


def old_spark(*since: int) -> bool:
    """Whether PySpark is older than this release, in which something came that a test is about."""
    return tuple(map(int, version("pyspark").split(".")[:2])) < since


SPARK_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    # Short programs: the second compiler and the parallel collector cost more than they give.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


# Where the catalog's tables would have their files; it goes with this process.
_WAREHOUSE = tempfile.TemporaryDirectory(prefix="spark-warehouse-")


def make_session() -> SparkSession:
    """The session of this process, made on the first call. Its workers run this very Python."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("magnetar-tests")
    for name, value in {**SPARK_SETTINGS, "spark.sql.warehouse.dir": _WAREHOUSE.name}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Stopped when the test run ends. Several conftests may import it: they get the same session."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip(
            "there is no Java on this machine; Spark needs 17 or newer (Debian, Ubuntu: openjdk-17-jre-headless)"
        )
    session = make_session()
    yield session
    session.stop()


def topic_frame(spark: SparkSession, url: str, topic: str, **options: Any) -> Any:
    """`spark.read` of a topic."""
    reader = spark.read.format("magnetar").option("service_url", url)
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader.load(topic)
