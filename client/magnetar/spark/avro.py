"""Avro: a writer's schema as JSON, the columns that its record becomes, and values in the binary encoding.

A value is one record and nothing else: neither a container file's header nor a fingerprint or a registry's number before it.

| Avro | column |
|---|---|
| boolean, int, long, float, double, string, bytes | boolean, int, bigint, float, double, string, binary |
| enum, uuid; fixed | string; binary |
| decimal (of bytes or fixed) | decimal |
| date; timestamp-millis, -micros, -nanos (cut to microseconds); local-timestamp-* | date; timestamp; timestamp_ntz |
| time-millis; time-micros | int; bigint: what they count |
| record, array, map | struct, array, map<string, ...> |
| union of null and a type; of int and long; of float and double | that type; bigint; double |

Null itself is no column. Other unions and records within themselves are refused, by an error that names the field.
"""

from __future__ import annotations

import importlib
import io
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from magnetar.proto.errors import InvalidArgument

from .value_types import (
    TIMESTAMP,
    TIMESTAMP_NTZ,
    DictOf,
    ExactDecimal,
    ListOf,
    MapOf,
    ValueType,
    check_fields,
)

_PRIMITIVES: Final[dict[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
    "enum": pa.string(),
    "fixed": pa.binary(),
}
_TIMES: Final[dict[str, tuple[str, pa.DataType]]] = {
    "timestamp-millis": ("ms", TIMESTAMP),
    "timestamp-micros": ("us", TIMESTAMP),
    "timestamp-nanos": ("ns", TIMESTAMP),
    "local-timestamp-millis": ("ms", TIMESTAMP_NTZ),
    "local-timestamp-micros": ("us", TIMESTAMP_NTZ),
    "local-timestamp-nanos": ("ns", TIMESTAMP_NTZ),
}
_WIDER: Final = {frozenset(("int", "long")): "long", frozenset(("float", "double")): "double"}
_NAMED: Final = ("record", "enum", "fixed")
_MAX_PRECISION: Final = 38
_FIELDS_WORTH_SKIPPING: Final = 8

Schema = Any  # as fastavro parsed it: names in full


class _Count(ValueType):
    """Days or ticks since the epoch, which fastavro reads and writes as the numbers that they are."""

    def __init__(self, arrow: pa.DataType, counted: pa.DataType, number: pa.DataType) -> None:
        super().__init__(arrow)
        self._counted = counted  # the same with the unit of the schema
        self._unit = getattr(counted, "unit", "")
        self._number = number

    def to_arrow(self, objects: list[Any]) -> pa.Array:
        counted = pa.array(objects, self._number).cast(self._counted)
        return counted.cast(self.arrow, safe=self._unit != "ns")

    def to_python(self, column: pa.Array) -> list[Any]:
        # To milliseconds it is cut, to nanoseconds it may not fit.
        counted = column.cast(self._counted, safe=self._unit != "ms")
        return super().to_python(counted.cast(self._number))


class _Field(ValueType):
    """What stands at a place of the schema. `optional`: it may be left out of a record to write, as it has a default."""

    def __init__(self, inner: ValueType, path: str, *, nullable: bool, optional: bool = False) -> None:
        super().__init__(inner.arrow)
        self.inner = inner
        self.path = path
        self.nullable = nullable
        self.optional = optional or nullable

    def to_arrow(self, objects: list[Any]) -> pa.Array:
        return self.inner.to_arrow(objects)

    def to_python(self, column: pa.Array) -> list[Any]:
        if column.null_count and not self.nullable:
            raise InvalidArgument(
                f"column {self.path!r} has a null in a row to write, and the option value_schema allows none there; "
                'make its type ["null", ...], or fill it: coalesce(...)'
            )
        return self.inner.to_python(column)


class AvroSchema:
    """Of a record. Raises InvalidArgument, which names the option, for anything else, and without fastavro."""

    def __init__(self, text: str) -> None:
        self._fastavro = fastavro = _fastavro()
        try:
            self._plain = _without_logical(json.loads(text))
            self._root: Schema = fastavro.parse_schema(json.loads(text))
        except (
            ValueError,
            TypeError,
            AttributeError,
            LookupError,
            fastavro.schema.SchemaParseException,
        ) as error:
            raise InvalidArgument(
                f"option value_schema is not a schema of Avro in JSON: {error!r}; want the one that the values are "
                'written with, as in {"type": "record", "name": "row", "fields": [...]}'
            ) from None
        if not isinstance(self._root, dict) or self._root.get("type") != "record":
            raise _refused("the value", "is no record", "write records, whose fields become the columns")
        self._named = dict(_named(self._root))
        self._writer = fastavro.parse_schema(self._plain)
        self._reader: Schema = None
        self._full = self.record()

    @property
    def arrow(self) -> pa.DataType:
        """All fields, as a struct."""
        return self._full.arrow

    def record(self, wanted: pa.DataType | None = None) -> DictOf:
        """Its fields, or those that are wanted (of the types that they have here); `decode` leaves out the others."""
        if wanted is not None:
            names = {field.name for field in wanted}
            # fastavro's way of passing over fields takes 0.7 us a value, and saves 0.1 us a field.
            fields = self._plain["fields"]
            if len(fields) - len(names) >= _FIELDS_WORTH_SKIPPING:
                # A field that has the definition of a named type is read as well.
                read = [one for one in fields if one["name"] in names or any(_named(one["type"]))]
                self._reader = self._fastavro.parse_schema({**self._plain, "fields": read})
        return self._record(self._root, wanted, "", ())

    # --- values ------------------------------------------------------------------------------------------------------

    def decode(self, value: bytes | None) -> Any:
        """A dict, or None. Raises whatever fastavro stumbles over."""
        if value is None:
            return None
        data = io.BytesIO(value)
        try:
            row = self._fastavro.schemaless_reader(data, self._writer, self._reader)
        except (EOFError, LookupError):
            raise ValueError(
                "it is no record of the schema: it was written with another, or cut short"
            ) from None
        if data.tell() != len(value):
            raise ValueError(
                f"{len(value) - data.tell()} bytes are left of it: it was written with another schema"
            )
        return row

    def encode(self, row: Mapping[str, Any]) -> bytes:
        """The other way."""
        data = io.BytesIO()
        self._fastavro.schemaless_writer(data, self._writer, row)
        return data.getvalue()

    def check_written(self, columns: pa.DataType) -> None:
        """Raises InvalidArgument if rows of these columns cannot be written, whatever is in them."""
        _check_record(columns, self._full, "")

    # --- the schema --------------------------------------------------------------------------------------------------

    def _record(self, node: Schema, wanted: pa.DataType | None, path: str, outer: tuple[str, ...]) -> DictOf:
        if node["name"] in outer:
            raise _refused(
                path, f"is a record {node['name']} within itself", "columns cannot be of such a type"
            )
        fields: dict[str, _Field] = {}
        types = {field["name"]: field for field in node["fields"] if field["type"] != "null"}
        check_fields([field["name"] for field in node["fields"]], path)
        for name in types if wanted is None else [field.name for field in wanted]:
            inner = None if wanted is None else wanted.field(name).type
            at = f"{path}.{name}" if path else name
            fields[name] = self._field(types[name]["type"], inner, at, (*outer, node["name"]))
            fields[name].optional |= "default" in types[name]
        arrow = pa.struct([pa.field(name, one.arrow) for name, one in fields.items()])
        check_fields(list(fields), path)
        return DictOf(arrow, fields)

    def _field(self, node: Schema, wanted: pa.DataType | None, path: str, outer: tuple[str, ...]) -> _Field:
        nullable = False
        if isinstance(node, list):
            kinds = [one for one in node if one != "null"]
            nullable = len(kinds) < len(node)
            if len(kinds) == 1:
                node = kinds[0]
            else:
                names = frozenset(one if isinstance(one, str) else one.get("type", "") for one in kinds)
                if names not in _WIDER or any("logicalType" in one for one in kinds if isinstance(one, dict)):
                    raise _refused(
                        path, f"is a union of {len(kinds)} types", "write records with a field for each"
                    )
                node = _WIDER[names]
        return _Field(self._type(node, wanted, path, outer), path, nullable=nullable)

    def _type(self, node: Schema, wanted: pa.DataType | None, path: str, outer: tuple[str, ...]) -> ValueType:
        if isinstance(node, str):
            node = self._named.get(node, {"type": node})
        kind, logical = node["type"], node.get("logicalType")
        if not isinstance(kind, str) or kind in self._named:
            return self._field(kind, wanted, path, outer)
        if kind == "record":
            return self._record(node, wanted, path, outer)
        if kind == "array":
            inner = None if wanted is None else wanted.value_type
            item = self._field(node["items"], inner, f"{path}.element", outer)
            return ListOf(pa.list_(pa.field("element", item.arrow)), item)
        if kind == "map":
            inner = None if wanted is None else wanted.item_type
            item = self._field(node["values"], inner, f"{path}.value", outer)
            return MapOf(pa.map_(pa.string(), item.arrow), ValueType(pa.string()), item)
        if logical == "decimal" and kind in ("bytes", "fixed"):
            if node["precision"] > _MAX_PRECISION:
                raise _refused(path, f"has more than {_MAX_PRECISION} digits", "Spark has no such decimals")
            return ExactDecimal(pa.decimal128(node["precision"], node.get("scale", 0)))
        if logical == "date" and kind == "int":
            return _Count(pa.date32(), pa.date32(), pa.int32())
        if logical in _TIMES and kind == "long":
            unit, arrow = _TIMES[logical]
            return _Count(arrow, pa.timestamp(unit, arrow.tz), pa.int64())
        if kind == "null":
            raise _refused(path, "is always null", "leave the field out")
        return ValueType(_PRIMITIVES[kind])


def _fastavro() -> Any:
    """Imported only where it is used: other value formats do without it, and it need not be installed for them."""
    try:
        return importlib.import_module("fastavro")
    except ModuleNotFoundError as missing:
        raise InvalidArgument(
            f"option value_format is 'avro', and {missing.name} is not installed on {platform.node()}, in {sys.prefix}; "
            "install it there (it comes with magnetar[spark])"
        ) from None


def _without_logical(node: Any) -> Any:
    """A schema in JSON whose values are read and written as the numbers and texts that they are; decimals stay."""
    if isinstance(node, list):
        return [_without_logical(one) for one in node]
    if isinstance(node, dict):
        return {
            name: _without_logical(one)
            for name, one in node.items()
            if name != "logicalType" or one == "decimal"
        }
    return node


def _named(node: Schema) -> Iterator[tuple[str, Schema]]:
    """Types that may be referred to by name."""
    if isinstance(node, list):
        for one in node:
            yield from _named(one)
    elif isinstance(node, dict):
        if node.get("type") in _NAMED:
            yield node["name"], node
        for field in node.get("fields", ()):
            yield from _named(field["type"])
        for inner in ("type", "items", "values"):
            yield from _named(node.get(inner))


def _refused(path: str, what: str, cure: str) -> InvalidArgument:
    where = path if path == "the value" else f"field {path!r}"
    return InvalidArgument(f"option value_schema: {where} {what}; {cure}")


# --- what may be written ---------------------------------------------------------------------------------------------


def _check_record(columns: pa.DataType, record: DictOf, path: str) -> None:
    at = path and f"{path}."
    check_fields([column.name for column in columns], path)
    for column in columns:
        if column.name not in record.fields:
            raise InvalidArgument(
                f"the option value_schema has no field {at + column.name!r}; drop the column, or add the field"
            )
        _check(column.type, record.fields[column.name], at + column.name)
    given = {column.name for column in columns}
    for name, field in record.fields.items():
        if name not in given and not (isinstance(field, _Field) and field.optional):
            raise InvalidArgument(
                f"the rows to write have no column {at + name!r}, which the option value_schema wants; "
                "add it, or give the field a default"
            )


def _check(have: pa.DataType, wanted: ValueType, path: str) -> None:
    while isinstance(wanted, _Field):
        wanted = wanted.inner
    want = wanted.arrow
    if isinstance(wanted, DictOf) and pa.types.is_struct(have):
        _check_record(have, wanted, path)
    elif isinstance(wanted, ListOf) and pa.types.is_list(have):
        _check(have.value_type, wanted.item, f"{path}.element")
    elif isinstance(wanted, MapOf) and pa.types.is_map(have):
        _check(have.key_type, wanted.key, f"{path}.key")
        _check(have.item_type, wanted.item, f"{path}.value")
    elif not _fits(have, want):
        raise InvalidArgument(
            f"column {path!r} is of type {have}, and the option value_schema wants {want}; cast it, or correct the schema"
        )


def _fits(have: pa.DataType, want: pa.DataType) -> bool:
    """Whether every value of one type is one of the other."""
    types = pa.types
    if types.is_timestamp(have) and types.is_timestamp(want):
        return bool((have.tz is None) == (want.tz is None))
    if types.is_decimal(have) and types.is_decimal(want):
        digits = want.precision - want.scale, have.precision - have.scale
        return bool(have.scale <= want.scale and digits[1] <= digits[0])
    for same in (types.is_signed_integer, types.is_floating):
        if same(have) and same(want):
            return bool(have.bit_width <= want.bit_width)
    if types.is_large_string(have) or types.is_large_binary(have):
        have = pa.string() if types.is_large_string(have) else pa.binary()
    return bool(have.equals(want))


_DERIVED: Final[Sequence[tuple[Any, Any]]] = (
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_int64, "long"),
    (pa.types.is_signed_integer, "int"),
    (pa.types.is_float32, "float"),
    (pa.types.is_floating, "double"),
    (pa.types.is_date32, {"type": "int", "logicalType": "date"}),
    (pa.types.is_string, "string"),
    (pa.types.is_large_string, "string"),
    (pa.types.is_binary, "bytes"),
    (pa.types.is_large_binary, "bytes"),
)


def derived(columns: pa.DataType, name: str = "row") -> Schema:
    """A schema that would do for these columns: what an error proposes. Raises InvalidArgument if there is none."""
    if pa.types.is_struct(columns):
        fields = [
            {"name": one.name, "type": ["null", derived(one.type, f"{name}_{one.name}")], "default": None}
            for one in columns
        ]
        return {"type": "record", "name": name, "fields": fields}
    if pa.types.is_map(columns):
        return {"type": "map", "values": ["null", derived(columns.item_type, f"{name}_value")]}
    if pa.types.is_list(columns):
        return {"type": "array", "items": ["null", derived(columns.value_type, f"{name}_element")]}
    if pa.types.is_decimal(columns):
        return {
            "type": "bytes",
            "logicalType": "decimal",
            "precision": columns.precision,
            "scale": columns.scale,
        }
    if pa.types.is_timestamp(columns):
        local = "" if columns.tz else "local-"
        return {"type": "long", "logicalType": f"{local}timestamp-micros"}
    for holds, schema in _DERIVED:
        if holds(columns):
            return schema
    raise InvalidArgument(f"a column of type {columns} has no type in Avro; cast it to string or drop it")
