"""The data source that Spark knows as "magnetar"."""

from __future__ import annotations

import sys

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.types import StructType

from magnetar.proto.errors import InvalidArgument

from .batch_source import FilteredTopicReader, TopicReader
from .options import ReadOptions, WriteOptions
from .schema import chosen_columns, topic_schema
from .sink import TopicStreamWriter, TopicWriter
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
        # Which of Spark's planners asks tells whether the session hands filters down; it says so nowhere else.
        planner = sys._getframe(1).f_code.co_filename
        reader = FilteredTopicReader if planner.endswith("data_source_pushdown_filters.py") else TopicReader
        return reader(ReadOptions.parse(self.options), chosen_columns(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For `spark.readStream`."""
        return TopicStreamReader(ReadOptions.parse(self.options), chosen_columns(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """For `df.write`; a topic can only be appended to."""
        _no_overwrite(overwrite)
        return TopicWriter(WriteOptions.parse(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """For `df.writeStream`, output mode append or update."""
        _no_overwrite(overwrite)
        return TopicStreamWriter(WriteOptions.parse(self.options), schema)


def _no_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise InvalidArgument("a topic cannot be overwritten; use mode('append'), or outputMode('append')")
