"""Spark imports top-level modules named pyspark_* when it starts, and registers the data source each calls DefaultSource."""

from magnetar.spark import MagnetarDataSource as DefaultSource

__all__ = ["DefaultSource"]
