"""The data source that Spark knows as "magnetar"."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from .batch_source import TopicReader
from .options import ReadOptions
from .schema import chosen_columns, topic_schema
from .stream_source import TopicStreamReader


class MagnetarDataSource(DataSource):
    """`spark.read.format("magnetar").option("service_url", ...).load("orders")`: see magnetar.spark.options."""

    @classmethod
    def name(cls) -> str:
        """What stands in `format(...)`."""
        return "magnetar"

    def schema(self) -> StructType:
        """All columns; `.schema("value binary, offset bigint")` reads a few of them for less."""
        return topic_schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        return TopicReader(ReadOptions.parse(self.options), chosen_columns(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For `spark.readStream`."""
        return TopicStreamReader(ReadOptions.parse(self.options), chosen_columns(schema))
