"""Topics as Spark tables: a PySpark data source that reads ledgers straight from the bookies, and pipeline jobs.

    spark.read.format("magnetar").option("service_url", "magnetar://127.0.0.1:7650").load("orders")

Spark finds the data source by itself (`pyspark_magnetar`). Needs the extra `magnetar[spark]`, and is imported only when
somebody asks for it: in most of the processes that Spark starts nobody does.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data_source import MagnetarDataSource

__all__ = ["MagnetarDataSource"]


def __getattr__(name: str) -> Any:
    if name == "MagnetarDataSource":
        from .data_source import MagnetarDataSource

        return MagnetarDataSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
