"""Values to columns and back: what was encoded comes back as it was, and what is wrong is named row by row."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructType

from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import MessageId
from magnetar.spark.avro import AvroSchema, derived
from magnetar.spark.ddl import parse_schema
from magnetar.spark.schema import RowColumns, ValueFields
from magnetar.spark.values import ValueDecoder, ValueEncoder, decoded
from magnetar.spark.versions import arrow_schema

EVERY_TYPE = (
    "b boolean, t tinyint, h smallint, i int, l bigint, f float, d double, s string, y binary, p decimal(20,4), "
    "day date, at timestamp, n timestamp_ntz, xs array<int>, m map<string,double>, mi map<int,timestamp>, "
    "o struct<x int, y: array<struct<z string>>>, os array<struct<q decimal(5,2)>>, `a b` string"
)
ROWS: list[dict[str, Any]] = [
    {
        "b": True, "t": -128, "h": 32767, "i": 2**31 - 1, "l": -(2**63), "f": 0.5, "d": math.nan, "s": "ü\0\U0001f600\n",
        "y": b"\x00\xff", "p": Decimal("-1234567890123456.7891"), "day": date(1, 1, 1),
        "at": datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC), "n": datetime(2026, 1, 1, 2, 3, 4, 5),
        "xs": [1, None, 3], "m": [("a", -math.inf), ("b", None)],
        "mi": [(-5, datetime(1960, 1, 1, 0, 0, 0, 1, tzinfo=UTC))],
        "o": {"x": None, "y": [{"z": "q"}, None, {"z": None}]}, "os": [None, {"q": Decimal("1.50")}], "a b": "",
    },
    {
        "b": False, "t": 0, "h": 0, "i": 0, "l": 2**63 - 1, "f": math.inf, "d": 1e308, "s": "", "y": b"",
        "p": Decimal("0.0000"), "day": date(9999, 12, 31), "at": datetime(1, 1, 1, tzinfo=UTC), "n": datetime(1, 1, 1),
        "xs": [], "m": [], "mi": [], "o": {"x": 5, "y": []}, "os": [], "a b": None,
    },
]  # fmt: skip


def arrow(ddl: str) -> pa.Schema:
    return arrow_schema(parse_schema("value_schema", ddl))


def decode(
    value_format: str, ddl: str, values: Sequence[bytes | None]
) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Rows, and what is wrong with them."""
    schema = arrow(ddl)
    wanted = ValueFields(value_format, pa.struct(list(schema)), tuple(schema.names), "", "null")
    columns, bad = ValueDecoder(wanted).decode(values)
    batch = pa.RecordBatch.from_arrays(columns, names=schema.names)
    batch.validate(full=True)
    assert batch.schema.equals(schema), "Spark compares them"
    return batch.to_pylist(), bad


def read_json(ddl: str, *values: Any) -> list[dict[str, Any]]:
    """Of values that are all good; text is taken as it is, all else as Python's json writes it."""
    texts = [one.encode() if isinstance(one, str) else json.dumps(one).encode() for one in values]
    rows, bad = decode("json", ddl, texts)
    assert not bad
    return rows


@pytest.mark.parametrize("value_format", ["json", "msgpack", "avro"])
@pytest.mark.parametrize("part", [slice(None), slice(1, 5), slice(2, None), slice(0, 0)])
def test_what_is_encoded_comes_back(value_format: str, part: slice) -> None:
    schema = arrow(EVERY_TYPE)
    nulls = dict.fromkeys(schema.names)
    rows = pa.RecordBatch.from_pylist([*ROWS, nulls, *ROWS, nulls], schema=schema)
    text = ""
    if value_format == "avro":  # knows neither such keys nor such names
        rows = rows.select([name for name in schema.names if name not in ("mi", "a b")])
        text = json.dumps(derived(pa.struct(list(rows.schema))))
    fields = pa.struct(list(rows.schema))
    names = rows.schema.names
    start, end, _ = part.indices(rows.num_rows)
    rows = rows.slice(start, end - start)
    values = ValueEncoder(value_format, text, fields).encode(names, rows.columns).to_pylist()
    if value_format == "avro":
        fields = AvroSchema(text).arrow  # bytes and shorts are ints there
    decoder = ValueDecoder(ValueFields(value_format, fields, tuple(names), text, "fail"))
    columns, bad = decoder.decode([*values, None])
    assert not bad
    found = pa.RecordBatch.from_arrays(columns, names=names)
    found.validate(full=True)
    assert repr(found.to_pylist()) == repr([*rows.to_pylist(), dict.fromkeys(names)])
    assert found.schema.equals(pa.schema(list(fields)))
    spark_type = from_arrow_type(fields, prefer_timestamp_ntz=True)
    assert isinstance(spark_type, StructType)
    assert arrow_schema(spark_type).equals(found.schema)


def random_type(rng: random.Random, depth: int = 0) -> pa.DataType:
    kinds = [
        pa.bool_(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.binary(), pa.decimal128(12, 3),
        pa.date32(), pa.timestamp("us", "UTC"), pa.timestamp("us"),
    ]  # fmt: skip
    kind = rng.randrange(14) if depth < 3 else rng.randrange(11)
    if kind < 11:
        return kinds[kind]
    if kind == 11:
        return pa.list_(pa.field("element", random_type(rng, depth + 1)))
    if kind == 12:
        return pa.map_(pa.string(), random_type(rng, depth + 1))
    return pa.struct([pa.field(f"f{n}", random_type(rng, depth + 1)) for n in range(rng.randrange(1, 4))])


def random_object(rng: random.Random, kind: pa.DataType) -> Any:
    if rng.random() < 0.25:
        return None
    if pa.types.is_struct(kind):
        return {field.name: random_object(rng, field.type) for field in kind}
    if pa.types.is_map(kind):
        return [(f"k{n}", random_object(rng, kind.item_type)) for n in range(rng.randrange(3))]
    if pa.types.is_list(kind):
        return [random_object(rng, kind.value_type) for _ in range(rng.randrange(4))]
    if pa.types.is_decimal(kind):
        return Decimal(rng.randrange(-(10**12) + 1, 10**12)).scaleb(-3)
    if pa.types.is_date(kind):
        return date.fromordinal(rng.randrange(1, date.max.toordinal()))
    if pa.types.is_timestamp(kind):
        time = datetime(1, 1, 1) + timedelta(microseconds=rng.randrange(10**6 * 86400 * 3_650_000))
        return time.replace(tzinfo=UTC) if kind.tz else time
    if pa.types.is_floating(kind):
        return rng.choice([math.nan, math.inf, -math.inf, 0.0, -0.0, rng.randrange(-1000, 1000) / 8])
    if pa.types.is_integer(kind):
        return rng.randrange(-(1 << (kind.bit_width - 1)), 1 << (kind.bit_width - 1))
    if pa.types.is_boolean(kind):
        return rng.random() < 0.5
    text = "".join(
        map(chr, rng.choices([0, 9, 10, 34, 92, 97, 0x7F, 0xFC, 0x2028, 0x4E16, 0x1F600], k=rng.randrange(6)))
    )
    return text if pa.types.is_string(kind) else rng.randbytes(rng.randrange(9))


@pytest.mark.parametrize("seed", range(30))
def test_random_rows_of_random_types_come_back(seed: int) -> None:
    rng = random.Random(seed)
    fields = pa.struct([pa.field(f"c{n}", random_type(rng)) for n in range(rng.randrange(1, 6))])
    names = tuple(field.name for field in fields)
    given = [
        {field.name: random_object(rng, field.type) for field in fields} for _ in range(rng.randrange(1, 40))
    ]
    rows = pa.RecordBatch.from_pylist(given, schema=pa.schema(list(fields)))
    start = rng.randrange(rows.num_rows)
    part = rows.slice(start, rng.randrange(rows.num_rows - start + 1))
    for value_format in ("json", "msgpack", "avro"):
        text = json.dumps(derived(fields)) if value_format == "avro" else ""
        values = ValueEncoder(value_format, text, fields).encode(names, part.columns).to_pylist()
        spoilt = rng.randrange(len(values) + 1)
        values.insert(spoilt, b"\xc1")  # is of none of the formats
        columns, bad = ValueDecoder(ValueFields(value_format, fields, names, text, "null")).decode(values)
        assert [*bad] == [spoilt]
        found = pa.RecordBatch.from_arrays(columns, schema=pa.schema(list(fields)))
        found.validate(full=True)
        back = found.to_pylist()
        assert back.pop(spoilt) == dict.fromkeys(names)
        assert repr(back) == repr(part.to_pylist())


@pytest.mark.parametrize("value_format", ["json", "msgpack", "avro"])
def test_damaged_values_are_judged_one_by_one(value_format: str) -> None:
    """Whatever stands beside them; and nothing that a decoder stumbles over gets out."""
    rng = random.Random(5)
    schema = arrow(EVERY_TYPE)
    schema = pa.schema([field for field in schema if field.name not in ("mi", "a b")])
    fields, names = pa.struct(list(schema)), schema.names
    text = json.dumps(derived(fields)) if value_format == "avro" else ""
    rows = pa.RecordBatch.from_pylist([{name: row[name] for name in names} for row in ROWS], schema=schema)
    good = ValueEncoder(value_format, text, fields).encode(names, rows.columns).to_pylist()
    if value_format == "avro":
        fields = AvroSchema(text).arrow
    decoder = ValueDecoder(ValueFields(value_format, fields, tuple(names), text, "null"))
    damaged_in_all = 0
    for _ in range(15):
        values = [damaged(rng, rng.choice(good)) for _ in range(20)]
        columns, bad = decoder.decode(values)
        pa.RecordBatch.from_arrays(columns, names=names).validate(full=True)
        for row, value in enumerate(values):
            alone, wrong = decoder.decode([value])
            assert [*wrong.values()] == ([bad[row]] if row in bad else [])
            assert [str(one) for one in alone] == [str(one.slice(row, 1)) for one in columns]
        damaged_in_all += len(bad)
    assert 100 < damaged_in_all < 300


def damaged(rng: random.Random, value: bytes) -> bytes:
    kept = bytearray(value)
    for _ in range(rng.randrange(1, 3)):
        at = rng.randrange(len(kept))
        length = rng.randrange(1, 4)
        kept[at : at + length] = rng.choice(
            (b"", rng.randbytes(1), rng.randbytes(length), bytes([kept[at] ^ 1]))
        )
        kept = kept or bytearray(1)
    return bytes(kept)


def test_json_of_others() -> None:
    rows = read_json(
        "id bigint, name string, price double",
        {"name": "a", "id": 1, "unknown": [{"deep": None}], "price": 2},
        {},
        '{\n  "id": 3,\n\n  "name": "line\\nbreak"\n}\n',
        '{"id": 4, "id": 5}',
        'null',
        '',
        {"id": None, "price": 1e-7, "ID": 7},
        '\t {"price": -0.0} ',
    )  # fmt: skip
    assert rows == [
        {"id": 1, "name": "a", "price": 2.0},
        {"id": None, "name": None, "price": None},
        {"id": 3, "name": "line\nbreak", "price": None},
        {"id": 5, "name": None, "price": None},
        {"id": None, "name": None, "price": None},
        {"id": None, "name": None, "price": None},
        {"id": None, "name": None, "price": 1e-7},
        {"id": None, "name": None, "price": -0.0},
    ]


def test_numbers_that_are_not_finite() -> None:
    values = [{"d": math.nan}, {"d": math.inf}, {"d": -math.inf, "s": 'NaN\\" Infinity'}, {"d": 1.0}]
    words = [{"d": word} for word in ("NaN", "Infinity", "-Infinity", "+Infinity", "INF", "-INF", "+INF")]
    rows = read_json("d double, s string", *values, *words)
    inf = math.inf
    assert repr([row["d"] for row in rows]) == repr(
        [math.nan, inf, -inf, 1.0, math.nan, inf, -inf, inf, inf, -inf, inf]
    )
    assert rows[2]["s"] == 'NaN\\" Infinity'


def test_decimals() -> None:
    rows = read_json(
        "p decimal(10,2)", '{"p": 1.50}', '{"p": "2.5"}', '{"p": 1e3}', '{"p": 1.005}', '{"p": -1.005}'
    )
    assert [row["p"] for row in rows] == [Decimal(p) for p in ("1.50", "2.50", "1000.00", "1.01", "-1.01")]
    assert str(read_json("p decimal(38,18)", '{"p": 12345678901234567890.123456789012345678}')[0]["p"]) == (
        "12345678901234567890.123456789012345678"
    )


def test_times() -> None:
    noon = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
    kinds = [
        noon.isoformat(),
        noon.astimezone(timezone(timedelta(hours=5, minutes=30))).isoformat(),
        "2026-11-21T12:00:00.000Z",
        "2026-11-21 12:00:00+00:00",
        "2026-11-21T12:00:00",
        "2026-11-21T12:00:00.000000999Z",
        round(noon.timestamp()),
        noon.timestamp(),
    ]
    assert {row["at"] for row in read_json("at timestamp", *({"at": kind} for kind in kinds))} == {noon}
    # All of a kind, which is another way.
    for kind in kinds:
        assert read_json("at timestamp", {"at": kind}, {"at": None}) == [{"at": noon}, {"at": None}]
    assert read_json("at timestamp", {"at": noon.timestamp() + 0.25})[0]["at"].microsecond == 250_000
    assert read_json("d date, n timestamp_ntz", {"d": "2026-11-21T00:00:00", "n": "2026-11-21"}) == [
        {"d": date(2026, 11, 21), "n": datetime(2026, 11, 21)}
    ]
    packed = [msgspec.msgpack.encode({"at": one}) for one in (noon, noon.isoformat(), noon.timestamp(), None)]
    rows, bad = decode("msgpack", "at timestamp", packed)
    assert not bad
    assert [row["at"] for row in rows] == [noon, noon, noon, None]


@pytest.mark.parametrize("value_format", ["json", "msgpack", "avro"])
def test_the_zone_of_a_session_is_none_of_the_values(value_format: str) -> None:
    noon = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
    column = pa.array([noon], pa.timestamp("us", "Asia/Kolkata"))
    fields = pa.struct([pa.field("at", pa.timestamp("us", "UTC"))])
    text = json.dumps(derived(fields)) if value_format == "avro" else ""
    encoder = ValueEncoder(value_format, text, pa.struct([pa.field("at", column.type)]))
    values = encoder.encode(["at"], [column]).to_pylist()
    columns, _ = ValueDecoder(ValueFields(value_format, fields, ("at",), text, "fail")).decode(values)
    assert columns[0].to_pylist() == [noon]


@pytest.mark.parametrize(
    ("ddl", "value", "message"),
    [
        ("id bigint", "{", "truncated"),
        ("id bigint", "[1]", "Expected `object | null`, got `array`"),
        ("id bigint", "5", "Expected `object | null`, got `int`"),
        ("id bigint", '{"id": 1} {"id": 2}', "trailing"),
        ("id bigint", '{"id": "1"}', r"Expected `int \| null`, got `str` - at `\$.id`"),
        ("id bigint", '{"id": 1.5}', r"\$.id"),
        ("id bigint", '{"id": 9223372036854775808}', r"\$.id"),
        ("id tinyint", '{"id": 128}', r"\$.id"),
        ("id bigint", '{"id": NaN}', "malformed"),
        ("s string", '{"s": 1}', r"\$.s"),
        ("s string", b'{"s": "\xff"}', "utf-8"),
        ("s string", " ", "truncated"),
        ("p decimal(4,2)", '{"p": 100}', ""),
        ("p decimal(4,2)", '{"p": "NaN"}', ""),
        ("at timestamp", '{"at": "yesterday"}', "yesterday"),
        ("at timestamp", '{"at": 1e300}', ""),
        ("n timestamp_ntz", '{"n": "2026-11-21T12:00:00Z"}', "has a zone"),
        ("d date", '{"d": "2026-02-30"}', ""),
        ("d double", '{"d": "many"}', r"\$.d"),
        ("y binary", '{"y": "no base64"}', r"\$.y"),
        ("o struct<xs array<int>>", '{"o": {"xs": [1, "2"]}}', r"\$.o.xs\[1\]"),
        ("s string", '{"u": ' + "[" * 100_000 + "]" * 100_000 + "}", "recursion"),
    ],
)
def test_bad_json_is_named_row_by_row(ddl: str, value: str | bytes, message: str) -> None:
    bad_one = value.encode() if isinstance(value, str) else value
    good: list[bytes | None] = [b"{}", None, b'{"unknown": 1}']
    values = [*good, bad_one, *good * 9, bad_one, *good]
    rows, bad = decode("json", ddl, values)
    assert sorted(bad) == [3, 31]
    assert re.search(message, bad[3], re.IGNORECASE), bad[3]
    assert len(rows) == len(values)
    assert all(one is None for row in rows for one in row.values())


def test_bad_msgpack() -> None:
    good = msgspec.msgpack.encode({"id": 1})
    for wrong in (
        b"",
        good + good,
        good[:-1],
        b"{}",
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode({"id": "1"}),
    ):
        rows, bad = decode("msgpack", "id bigint", [good, wrong, b"\xc0"])
        assert [*bad] == [1]
        assert rows == [{"id": 1}, {"id": None}, {"id": None}]


def batch_of(values: Sequence[bytes | None]) -> pa.RecordBatch:
    ids = [MessageId(7, 1, n).to_bytes() for n in range(len(values))]
    return pa.RecordBatch.from_arrays(
        [pa.array(values, pa.binary()), pa.array(ids, pa.binary())], names=["value", "message_id"]
    )


@pytest.mark.parametrize("names", [("x", "value", "y"), ("message_id", "y")])
def test_columns_of_the_value_stand_where_the_schema_has_them(names: tuple[str, ...]) -> None:
    of_value = {"x": pa.int64(), "y": pa.string()}
    fields = pa.struct([pa.field(name, of_value[name]) for name in names if name in of_value])
    wanted = ValueFields("json", fields, tuple(field.name for field in fields), "", "null")
    columns = RowColumns(names, wanted)
    assert {*columns.of_topic} == {"value", "message_id"}
    rows = next(decoded(iter([batch_of([b'{"x": 1, "y": "a"}', b"bad"])]), columns, "t"))
    assert rows.schema.names == [*names]
    first, second = rows.to_pylist()
    assert first["y"] == "a"
    assert second["y"] is None
    assert second.get("value", b"bad") == b"bad"


def test_a_bad_value_fails_with_its_place_and_the_cure() -> None:
    fields = pa.struct([pa.field("x", pa.int64())])
    columns = RowColumns(("x",), ValueFields("json", fields, ("x",), "", "fail"))
    with pytest.raises(InvalidArgument) as caught:
        list(decoded(iter([batch_of([b"{}", b"{", b"["])]), columns, "persistent://a/b/c"))
    for message in (
        "message 7:1:1 of persistent://a/b/c",
        "value_format=json",
        "truncated",
        "on_bad_value=null",
    ):
        assert message in caught.value.message
