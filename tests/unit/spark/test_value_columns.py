"""Which columns a value has: by its schema, by the reader's wish, by what is to be written. Wrong ones are named."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, LongType, MapType, StructField, StructType

from magnetar.proto.batch import decode_batch
from magnetar.proto.entry import Entry
from magnetar.proto.errors import InvalidArgument
from magnetar.spark.data_source import MagnetarDataSource
from magnetar.spark.ddl import parse_schema
from magnetar.spark.options import ReadOptions, WriteOptions
from magnetar.spark.packing import Packer, check_written
from magnetar.spark.schema import COLUMNS, RowColumns, chosen_columns, read_schema

GOOD = {"service_url": "magnetar://127.0.0.1:7650", "topic": "orders"}
DDL = "id bigint, o struct<x: int, y: array<string>>"
AVRO = json.dumps(
    {
        "type": "record",
        "name": "r",
        "fields": [{"name": "id", "type": "long"}, {"name": "s", "type": "string"}],
    }
)


def reading(**options: str) -> ReadOptions:
    return ReadOptions.parse({**GOOD, "value_format": "json", **options})


def columns(ddl: str) -> StructType:
    return parse_schema("schema", ddl)


@pytest.mark.parametrize(
    ("ddl", "simple"),
    [
        ("id bigint", "struct<id:bigint>"),
        ("a INT, B Long ,c: string", "struct<a:int,B:bigint,c:string>"),
        ("a int not null comment 'it''s, a <b>' , `x``, y` string", "struct<a:int,x`, y:string>"),
        ("a decimal, b dec(5), c numeric(38, 18)", "struct<a:decimal(10,0),b:decimal(5,0),c:decimal(38,18)>"),
        (
            "a array<map<string,struct<x:int,`y z` timestamp_ntz>>>, s struct<>",
            "struct<a:array<map<string,struct<x:int,y z:timestamp_ntz>>>,s:struct<>>",
        ),
        (
            "1a byte, b_2 short, c real, d timestamp_ltz",
            "struct<1a:tinyint,b_2:smallint,c:float,d:timestamp>",
        ),
    ],
)
def test_ddl(ddl: str, simple: str) -> None:
    if "it''s" in ddl:
        ddl = ddl.replace("it''s", "it\\'s")
    assert columns(ddl).simpleString() == simple
    assert columns(columns(ddl).json()) == columns(ddl), "the JSON of a schema is as good"


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("", "names no column"),
        ("id", "it ends where a type"),
        ("id strng", "no type 'strng' (at 3)"),
        ("id interval day", "no type 'interval'"),
        ("a int b int", "'b' stands (at 6) where ','"),
        ("a array<int", "it ends where '>'"),
        ("a map<string>", "where ','"),
        ("a decimal(99,2)", "decimal(99,2)"),
        ("a decimal(5,x)", "'x'"),
        ("a int;", "';'"),
        ("a int,", "it ends where a name"),
        ("a struct<b>", "'>'"),
        ("'a' int", "where a name"),
        ("{", "not a schema"),
        ("{}", "not a schema"),
    ],
)
def test_ddl_that_is_wrong(ddl: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_schema("value_schema", ddl)
    assert message in caught.value.message
    assert "option value_schema" in caught.value.message


def test_the_fields_stand_behind_the_columns_of_the_topic() -> None:
    schema = MagnetarDataSource({**GOOD, "value_format": "json", "value_schema": DDL}).schema()
    assert schema.fieldNames() == [*COLUMNS, "id", "o"]
    chosen = chosen_columns(schema, reading(value_schema=DDL))
    assert chosen.names == (*COLUMNS, "id", "o")
    assert chosen.of_topic == tuple(COLUMNS)
    assert chosen.values is not None
    assert chosen.values.names == ("id", "o")
    assert MagnetarDataSource(GOOD).schema().fieldNames() == [*COLUMNS]
    avro = read_schema(reading(value_format="avro", value_schema=AVRO))
    assert [field.simpleString() for field in avro.fields[-2:]] == ["id:bigint", "s:string"]


def test_a_schema_of_the_readers_prunes() -> None:
    wish = columns("o struct<y: array<string>>, offset bigint")
    chosen = chosen_columns(wish, reading(value_schema=DDL))
    assert chosen.names == ("o", "offset")
    assert chosen.of_topic == ("value", "message_id", "offset")
    assert chosen.values is not None
    assert chosen.values.fields == pa.struct(list(to_arrow_schema(columns("o struct<y: array<string>>"))))
    assert chosen_columns(columns("offset bigint"), reading(value_schema=DDL)) == RowColumns(("offset",))
    # Names that clash hurt nobody who does not ask for them.
    assert chosen_columns(columns("a int"), reading(value_schema="topic string, a int, A int")).names == (
        "a",
    )
    # It is enough by itself, but for avro.
    assert chosen_columns(wish, reading()).names == ("o", "offset")


def test_a_prefix_keeps_names_apart() -> None:
    options = reading(value_schema="topic string, id bigint", value_prefix="v_")
    assert read_schema(options).fieldNames()[-2:] == ["v_topic", "v_id"]
    chosen = chosen_columns(columns("v_topic string, topic string"), options)
    assert chosen.values is not None
    assert ([field.name for field in chosen.values.fields], chosen.values.names) == (["topic"], ("v_topic",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set the option value_schema"),
        ({"value_schema": "topic string"}, "field 'topic'.*value_prefix"),
        ({"value_schema": "Offset bigint"}, "field 'Offset'.*value_prefix"),
        ({"value_schema": "a int, A int"}, "two fields 'a'"),
        ({"value_schema": "a"}, "option value_schema"),
        (
            {"value_schema": "id bigint", "value_format": "avro"},
            "option value_schema is not a schema of Avro",
        ),
    ],
)
def test_schemas_that_cannot_be_read_by(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read_schema(reading(**options))


@pytest.mark.parametrize(
    ("options", "ddl", "message"),
    [
        ({"value_format": "binary"}, "id bigint", "no column 'id'.*value_format"),
        ({"value_schema": DDL}, "ident bigint", "no.* column 'ident'"),
        ({"value_schema": DDL}, "id int", "'id' is of type bigint by the option value_schema, not int"),
        ({"value_schema": DDL}, "o struct<z: int>", "'o' is of type"),
        ({}, "offset string", "'offset' is of type bigint.*value_prefix"),
        ({"value_prefix": "v_"}, "id bigint", "'id'.*'v_'"),
        ({"value_format": "avro"}, "id bigint", "set the option value_schema"),
        ({}, "o struct<>", "column 'o' would have no fields"),
        ({}, "o struct<a int, a int>", "two fields 'a'"),
        ({"value_format": "avro", "value_schema": AVRO}, "id bigint, id bigint", "two fields 'id'"),
        ({}, "m map<timestamp,int>", "column 'm' is a map"),
        ({}, "a array<map<string,map<double,int>>>", "'a.element.value' is a map"),
    ],
)
def test_wishes_that_cannot_be_met(options: dict[str, str], ddl: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        chosen_columns(columns(ddl), reading(**options))


@pytest.mark.parametrize("name", ["offset", "id"])
def test_nothing_that_is_read_is_never_null(name: str) -> None:
    inner = StructType([StructField("x", LongType(), nullable=False)])
    for field in (
        StructField(name, LongType(), nullable=False),
        StructField(name, inner),
        StructField(name, ArrayType(LongType(), containsNull=False)),
        StructField(name, MapType(LongType(), inner)),
    ):
        with pytest.raises(InvalidArgument, match=f"column '{name}' is NOT NULL.*nullable=True"):
            chosen_columns(StructType([field]), reading())


def writing(value_format: str = "json", **options: str) -> WriteOptions:
    return WriteOptions.parse({**GOOD, "value_format": value_format, **options})


@pytest.mark.parametrize(
    ("options", "ddl", "message"),
    [
        ({"value_format": "binary"}, "id bigint", "no column 'value'.*value_format"),
        ({"value_format": "binary"}, "value binary, id bigint", "no column 'id'.*value_format"),
        ({}, "value binary, key binary", "no columns to encode.*leave out the option value_format"),
        ({}, "id bigint, key bigint", "'key' is of type bigint; cast"),
        ({}, "id bigint, value string", "'value' is the topic's.*value_prefix"),
        ({}, "id bigint, topic int", "'topic' is the topic's.*value_prefix"),
        ({}, "id bigint, Key binary", "'Key' is called as 'key'"),
        ({}, "m map<double,int>", "column 'm' is a map"),
        ({"value_prefix": "v_"}, "v_id bigint, name string", "'name' is neither"),
        ({"value_prefix": "v_"}, "v_ bigint", "'v_' has no name"),
        ({"value_format": "avro"}, "id bigint", 'needs the option value_schema.*"long"'),
        ({"value_format": "avro", "value_schema": AVRO}, "id string", "'id' is of type string"),
    ],
)
def test_rows_that_cannot_be_written(options: dict[str, str], ddl: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        check_written(columns(ddl), writing(**options))


def test_types_that_no_format_has() -> None:
    from pyspark.sql.types import DayTimeIntervalType, VariantType

    for kind in (DayTimeIntervalType(), VariantType()):
        for value_format in ("json", "msgpack"):
            with pytest.raises(
                InvalidArgument, match=r"column 'x' is of type .* cannot hold; cast it to string"
            ):
                check_written(StructType([StructField("x", kind)]), writing(value_format))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_format": "xml"}, "want one of binary, json"),
        ({"value_schema": "id int"}, "option value_schema is for avro"),
        ({"value_format": "binary", "value_prefix": "v_"}, "option value_prefix says"),
        ({"on_bad_value": "null"}, "'on_bad_value' is not known"),
    ],
)
def test_options_of_writers_that_are_wrong(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        writing(**options)


def written(rows: pa.RecordBatch, options: WriteOptions) -> list[Any]:
    """Values and keys of the entries that a task makes of rows."""
    packer = Packer("p", options, 1000)
    found: list[Any] = []
    for packed in packer.pack(rows, 5):
        entry = Entry(packed.payload)
        batch = decode_batch(bytes(entry.batch(0)))
        found += zip(batch.values, batch.keys or [None] * packed.messages)
    return found


def test_the_messages_own_columns_stay_out_of_the_value() -> None:
    rows = pa.RecordBatch.from_pydict(
        {
            "id": [1, 2],
            "key": ["a", None],
            "offset": [5, 6],
            "p": [Decimal("1.50"), None],
            "value": [b"x", b"y"],
        }
    )
    assert written(rows, writing()) == [(b'{"id":1,"p":1.50}', "a"), (b'{"id":2}', None)]
    prefixed = rows.rename_columns(["v_offset", "key", "offset", "v_p", "value"])
    assert written(prefixed, writing(value_prefix="v_")) == [
        (b'{"offset":1,"p":1.50}', "a"),
        (b'{"offset":2}', None),
    ]


def test_tombstones_that_were_read_are_written_as_such() -> None:
    rows = pa.RecordBatch.from_pydict(
        {"id": [None, 1, None, None, 2], "value": pa.array([None, None, b"{}", None, b"x"], pa.binary())}
    )
    assert [value for value, _ in written(rows, writing())] == [None, b'{"id":1}', b"{}", None, b'{"id":2}']
    # A schema may allow no nulls: there is none in a tombstone.
    schema = json.dumps({"type": "record", "name": "r", "fields": [{"name": "id", "type": "long"}]})
    kept = rows.take([0, 1, 3])
    assert [value for value, _ in written(kept, writing("avro", value_schema=schema))] == [
        None,
        b"\x02",
        None,
    ]
    nothing = rows.take([0, 3])
    assert [value for value, _ in written(nothing, writing("avro", value_schema=schema))] == [None, None]
