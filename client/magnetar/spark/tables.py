"""`CREATE TABLE orders USING magnetar OPTIONS (...)`: a topic as a table of Spark's catalog, to read.

Spark shows a Python data source the options of a table when the table is made, and not when it is read. What the catalog
keeps and hands back is the schema, with the metadata of its columns. So the options stand in that of the first column:

    CREATE TABLE          schema() has them                 -> schema with the options in it, which the catalog keeps
    SELECT, readStream    reader(schema), streamReader      <- the options, with those of `WITH (...)` in place of some

INSERT is refused. The schema that Spark hands to a writer is that of the rows, and a column that is selected from a table
keeps its metadata: with `INSERT INTO copy SELECT * FROM orders` it would be `orders` that the rows are written to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from pyspark.sql.types import StructField, StructType

from magnetar.proto.errors import InvalidArgument

from .aliases import translated
from .options import ReadOptions
from .schema import topic_schema

_METADATA: Final = "magnetar.options"
# What Spark puts before the names in `OPTIONS (...)`; the same without it, and table properties, stand beside them.
_OPTION: Final = "option."
_PLACES: Final = ("service_url", "topic", "topics", "topics_pattern", "path")


def is_new_table(options: Mapping[str, str]) -> bool:
    """Whether these are what Spark says when it asks for the schema of a table that is being made."""
    return "provider" in options


def table_schema(options: Mapping[str, str]) -> StructType:
    """The schema of a new table, which has the table's options in it. Raises InvalidArgument."""
    given = {name[len(_OPTION) :]: value for name, value in options.items() if name.startswith(_OPTION)}
    if not given:
        raise InvalidArgument(
            "a table needs to know its topic: CREATE TABLE orders USING magnetar OPTIONS (service_url "
            "'magnetar://host:port', topic 'orders')"
        )
    ReadOptions.parse(given)
    first, *others = topic_schema().fields
    metadata = {_METADATA: json.dumps(translated(given))}
    return StructType([StructField(first.name, first.dataType, True, metadata), *others])


def read_options(options: Mapping[str, str], schema: StructType) -> dict[str, str]:
    """Options of a read: what is given for it, and where that names no topic those of the table that the schema is of."""
    given = translated(options)
    if not given.keys().isdisjoint(_PLACES):
        return given
    for field in schema.fields:
        if _METADATA in field.metadata:
            return {**json.loads(field.metadata[_METADATA]), **given}
    raise InvalidArgument(
        "neither the option service_url nor a topic is set. A table of Spark's catalog keeps them if it is made without "
        "columns: CREATE TABLE orders USING magnetar OPTIONS (service_url 'magnetar://host:port', topic 'orders')"
    )


def write_options(options: Mapping[str, str]) -> dict[str, str]:
    """Options of a write. Raises InvalidArgument if it is one to a table of the catalog."""
    given = translated(options)
    if given.keys().isdisjoint(_PLACES):
        raise InvalidArgument(
            "neither the option service_url nor a topic is set. Tables of Spark's catalog can be read only, as Spark does "
            "not say which of them it writes to (INSERT, AS SELECT, toTable): write with "
            "df.write.format('magnetar').mode('append').option('service_url', ...).save('orders')"
        )
    return given
