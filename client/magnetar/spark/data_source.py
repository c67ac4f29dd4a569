"""The data source that Spark knows as "magnetar".

Spark makes a Python process for each thing it asks a data source, and most of them need little of it. So its parts are
imported where they are used: all of them are 0.2 s of CPU, as much again as Spark's own share of such a process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from .error_boundary import short_errors

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceArrowWriter,
        DataSourceReader,
        DataSourceStreamArrowWriter,
        DataSourceStreamReader,
    )
    from pyspark.sql.types import StructType


@short_errors("schema", "reader", "streamReader", "writer", "streamWriter")
class MagnetarDataSource(DataSource):
    """`spark.read.format("magnetar").option("service_url", ...).load("orders")`; all options: docs/spark-options.md."""

    @classmethod
    def name(cls) -> str:
        """What stands in `format(...)`."""
        return "magnetar"

    def schema(self) -> StructType:
        """All columns; `.schema("value binary, offset bigint")` reads a few of them for less."""
        from .options import ReadOptions
        from .schema import topic_schema
        from .tables import is_new_table, table_schema

        if is_new_table(self.options):
            return table_schema(self.options)
        ReadOptions.parse(self.options)  # an option that is wrong is said now, not by the first action
        return topic_schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        from .batch_source import FilteredTopicReader, TopicReader
        from .options import ReadOptions
        from .schema import chosen_columns
        from .tables import read_options
        from .versions import hands_filters_down

        reader = FilteredTopicReader if hands_filters_down() else TopicReader
        options = ReadOptions.parse(read_options(self.options, schema))
        return reader(options, chosen_columns(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For `spark.readStream`."""
        from .options import ReadOptions
        from .schema import chosen_columns
        from .stream_source import TopicStreamReader
        from .tables import read_options

        options = ReadOptions.parse(read_options(self.options, schema))
        return TopicStreamReader(options, chosen_columns(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """For `df.write`; a topic can only be appended to."""
        from .options import WriteOptions
        from .sink import TopicWriter
        from .tables import write_options

        _no_overwrite(overwrite)
        return TopicWriter(WriteOptions.parse(write_options(self.options)), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """For `df.writeStream`, output mode append or update."""
        from .options import WriteOptions
        from .sink import TopicStreamWriter
        from .tables import write_options

        _no_overwrite(overwrite)
        return TopicStreamWriter(WriteOptions.parse(write_options(self.options)), schema)


def _no_overwrite(overwrite: bool) -> None:
    from magnetar.proto.errors import InvalidArgument

    if overwrite:
        raise InvalidArgument("a topic cannot be overwritten; use mode('append'), or outputMode('append')")
