"""Avro against what fastavro itself writes and reads, and every schema that is refused."""

from __future__ import annotations

import io
import json
import re
import sys
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import fastavro
import pyarrow as pa
import pytest

from magnetar.proto.errors import InvalidArgument
from magnetar.spark.avro import AvroSchema, derived
from magnetar.spark.schema import ValueFields
from magnetar.spark.values import ValueDecoder, ValueEncoder

NOON = datetime(2026, 11, 21, 12, 0, 0, 123456, tzinfo=UTC)


def record(**fields: Any) -> str:
    return json.dumps(
        {
            "type": "record",
            "name": "row",
            "fields": [{"name": name, "type": kind} for name, kind in fields.items()],
        }
    )


def logical(kind: str, meaning: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": meaning, **more}


MILLIS, MICROS, NANOS = (logical("long", f"timestamp-{unit}") for unit in ("millis", "micros", "nanos"))


def written(text: str, *rows: dict[str, Any]) -> list[bytes | None]:
    """By fastavro."""
    schema = fastavro.parse_schema(json.loads(text))
    values: list[bytes | None] = []
    for row in rows:
        data = io.BytesIO()
        fastavro.schemaless_writer(data, schema, row)
        values.append(data.getvalue())
    return values


def read(
    text: str, values: list[bytes | None], fields: pa.DataType | None = None
) -> tuple[list[dict[str, Any]], dict[int, str]]:
    fields = AvroSchema(text).arrow if fields is None else fields
    names = tuple(field.name for field in fields)
    columns, bad = ValueDecoder(ValueFields("avro", fields, names, text, "null")).decode(values)
    batch = pa.RecordBatch.from_arrays(columns, schema=pa.schema(list(fields)))
    batch.validate(full=True)
    return batch.to_pylist(), bad


ADDRESS = {
    "type": "record",
    "name": "address",
    "namespace": "a.b",
    "fields": [{"name": "street", "type": "string"}],
}
EVERY_TYPE = record(
    n="null", b="boolean", i="int", l="long", f="float", d="double", s={"type": "string"}, y="bytes",
    e={"type": "enum", "name": "suit", "symbols": ["HEARTS", "SPADES"]}, e2=["null", "suit"],
    x={"type": "fixed", "name": "pair", "size": 2}, u=logical("string", "uuid"),
    p=logical("bytes", "decimal", precision=10, scale=2),
    q=logical("fixed", "decimal", name="eight", size=8, precision=18, scale=3),
    day=logical("int", "date"), at_ms=MILLIS, at_us=["null", MICROS], at_ns=NANOS,
    local=logical("long", "local-timestamp-micros"), t=logical("long", "time-micros"),
    xs={"type": "array", "items": ["null", "int"]}, m={"type": "map", "values": ADDRESS}, o=["a.b.address", "null"],
    w=["null", "int", "long"], v=["float", "double"],
)  # fmt: skip
GIVEN: dict[str, Any] = {
    "n": None, "b": True, "i": -5, "l": 2**62, "f": 0.5, "d": 0.1, "s": "ü", "y": b"\xff", "e": "SPADES", "e2": "HEARTS",
    "x": b"ab", "u": UUID(int=7), "p": Decimal("-12.30"), "q": Decimal("1.5"), "day": date(2026, 11, 21), "at_ms": NOON,
    "at_us": NOON, "at_ns": 1795262400123456789, "local": NOON.replace(tzinfo=None), "t": time(microsecond=5),
    "xs": [1, None], "m": {"home": {"street": "x"}}, "o": {"street": "y"}, "w": 2**40, "v": 0.1,
}  # fmt: skip
EXPECTED = {
    **GIVEN, "u": str(UUID(int=7)), "q": Decimal("1.500"), "at_ms": NOON.replace(microsecond=123000),
    "at_ns": NOON, "t": 5, "m": [("home", {"street": "x"})],
}  # fmt: skip
del EXPECTED["n"]


def test_what_fastavro_writes_in_every_type() -> None:
    nulls = {**GIVEN, "e2": None, "at_us": None, "o": None, "w": None}
    rows, bad = read(EVERY_TYPE, [*written(EVERY_TYPE, GIVEN, nulls), None])
    assert not bad
    assert rows[0] == EXPECTED
    assert rows[1] == {**EXPECTED, "e2": None, "at_us": None, "o": None, "w": None}
    assert {*rows[2].values()} == {None}


def test_fastavro_reads_what_is_written() -> None:
    fields = AvroSchema(EVERY_TYPE).arrow
    given = {**EXPECTED, "at_ms": NOON}  # is cut to what the schema has
    rows = pa.RecordBatch.from_pylist([given, {**given, "o": None}], schema=pa.schema(list(fields)))
    values = ValueEncoder("avro", EVERY_TYPE, fields).encode(rows.schema.names, rows.columns).to_pylist()
    schema = fastavro.parse_schema(json.loads(EVERY_TYPE))
    found = [fastavro.schemaless_reader(io.BytesIO(value), schema, None) for value in values]
    wanted = {**GIVEN, "at_ms": NOON.replace(microsecond=123000), "at_ns": 1795262400123456000}
    assert found == [wanted, {**wanted, "o": None}]


def test_only_the_fields_that_are_wanted() -> None:
    """The named type stands first in a field that is left out."""
    names = ("o", "l")
    whole = AvroSchema(EVERY_TYPE).arrow
    fields = pa.struct([whole.field(name) for name in names])
    rows, bad = read(EVERY_TYPE, written(EVERY_TYPE, GIVEN), fields)
    assert not bad
    assert rows == [{"o": {"street": "y"}, "l": 2**62}]


def test_columns_may_be_narrower_and_fields_may_be_missing() -> None:
    text = json.dumps(
        {
            "type": "record", "name": "row", "fields": [
                {"name": "l", "type": "long"}, {"name": "d", "type": "double", "default": 2.5},
                {"name": "s", "type": ["null", "string"]},
                {"name": "p", "type": logical("bytes", "decimal", precision=10, scale=4)},
            ],
        }
    )  # fmt: skip
    columns = [
        pa.array([1, 2], pa.int16()),
        pa.array([Decimal("1.5"), Decimal("-2.25")], pa.decimal128(5, 2)),
    ]
    fields = pa.struct([pa.field("l", pa.int16()), pa.field("p", pa.decimal128(5, 2))])
    values = ValueEncoder("avro", text, fields).encode(["l", "p"], columns).to_pylist()
    assert read(text, values)[0] == [
        {"l": 1, "d": 2.5, "s": None, "p": Decimal("1.5000")},
        {"l": 2, "d": 2.5, "s": None, "p": Decimal("-2.2500")},
    ]


def test_bad_values_are_named_row_by_row() -> None:
    text = record(id="long", name="string", at=logical("long", "timestamp-millis"))
    good = written(text, {"id": 1, "name": "abc", "at": NOON})[0]
    far = written(record(id="long", name="string", at="long"), {"id": 1, "name": "", "at": 2**62})[0]
    assert good is not None
    wrong = [good[:-1], good + b"\0", b"", b"\xc3\x01" + b"12345678" + good, far, b"\x02\x04\xff\xff\x00"]
    rows, bad = read(text, [good, *wrong, None, good])
    assert sorted(bad) == [1, 2, 3, 4, 5, 6]
    assert "1 bytes are left" in bad[2]
    assert [row["id"] for row in rows] == [1, *[None] * 7, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id bigint", "not a schema of Avro"),
        ('"string"', "is no record"),
        ('["null"]', "is no record"),
        ("5", "TypeError"),
        ('{"type": "record"}', "name"),
        (record(a="strng"), "strng"),
        (record(), "no fields"),
        (record(a="null"), "no fields"),
        (record(a=["null", "row"]), "'a' is a record row within itself"),
        (record(o={"type": "array", "items": ["int", "string"]}), "'o.element' is a union of 2 types"),
        (record(a=logical("bytes", "decimal", precision=50, scale=2)), "38 digits"),
        (record(a=["null"]), "union of 0 types"),
        (record(a={"type": "array", "items": "null"}), "always null"),
    ],
)
def test_schemas_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(
        InvalidArgument, match=f"option value_schema.*{re.escape(message)}|the value would have {message}"
    ):
        AvroSchema(text)


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        (record(a="long"), {"a": pa.string()}, "column 'a' is of type string.*int64"),
        (record(a="int"), {"a": pa.int64()}, "column 'a' is of type int64.*int32"),
        (record(a="long"), {"a": pa.int64(), "b": pa.int64()}, "no field 'b'"),
        (record(a="long", b="long"), {"a": pa.int64()}, "no column 'b'"),
        (record(o=ADDRESS), {"o": pa.struct([pa.field("city", pa.string())])}, "no field 'o.city'"),
        (record(m={"type": "map", "values": "int"}), {"m": pa.map_(pa.int32(), pa.int32())}, "m.key"),
        (record(a=logical("long", "timestamp-micros")), {"a": pa.timestamp("us")}, "column 'a'"),
        (
            record(p=logical("bytes", "decimal", precision=4, scale=2)),
            {"p": pa.decimal128(5, 2)},
            "column 'p'",
        ),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_anything_is_written(
    text: str, columns: dict[str, pa.DataType], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ValueEncoder("avro", text, pa.struct([pa.field(name, kind) for name, kind in columns.items()]))


def test_a_null_where_the_schema_has_none() -> None:
    columns = [pa.array([1, None])]
    encoder = ValueEncoder("avro", record(a="long"), pa.struct([pa.field("a", pa.int64())]))
    with pytest.raises(InvalidArgument, match="column 'a' has a null"):
        encoder.encode(["a"], columns)
    # Within a struct that is null there is nothing, and so no null.
    struct = pa.array([{"street": "x"}, None], pa.struct([pa.field("street", pa.string())]))
    text = record(o=["null", ADDRESS])
    values = ValueEncoder("avro", text, pa.struct([pa.field("o", struct.type)])).encode(["o"], [struct])
    assert read(text, values.to_pylist())[0] == [{"o": {"street": "x"}}, {"o": None}]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ({"type": "enum", "name": "suit", "symbols": ["HEARTS"]}, pa.array(["CLUBS"])),
        ({"type": "fixed", "name": "pair", "size": 2}, pa.array([b"abc"], pa.binary())),
        (
            logical("long", "timestamp-nanos"),
            pa.array([datetime(9999, 1, 1, tzinfo=UTC)], pa.timestamp("us", "UTC")),
        ),
    ],
)
def test_rows_that_the_schema_does_not_allow(kind: Any, values: pa.Array) -> None:
    encoder = ValueEncoder("avro", record(a=kind), pa.struct([pa.field("a", values.type)]))
    with pytest.raises(InvalidArgument, match="option value_schema"):
        encoder.encode(["a"], [values])


def test_a_machine_without_fastavro(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastavro", None)
    with pytest.raises(InvalidArgument, match="value_format is 'avro', and fastavro is not installed on"):
        AvroSchema(EVERY_TYPE)


def test_what_is_proposed_for_columns_has_no_place_for_some() -> None:
    with pytest.raises(InvalidArgument, match="duration"):
        derived(pa.struct([pa.field("a", pa.duration("us"))]))
