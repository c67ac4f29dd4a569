"""Topics as Spark tables: a PySpark data source that reads ledgers straight from the bookies, and pipeline jobs.

    spark.read.format("magnetar").option("service_url", "magnetar://127.0.0.1:7650").load("orders")

Spark finds the data source by itself (`pyspark_magnetar`). Needs the extra `magnetar[spark]`.
"""

from .data_source import MagnetarDataSource

__all__ = ["MagnetarDataSource"]
