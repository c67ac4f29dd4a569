"""Arrow columns to Python objects and back, for what msgspec encodes and decodes: a few C calls per column, not per row.

pyarrow makes nested columns of dicts by itself; decoding records of three fields takes four times as long that way.

A `ValueType` stands for one column or nested field. `hint` is the type that msgspec decodes and checks: a value of
another type does not get past it. `to_arrow` makes a column of what was decoded, `to_python` takes one apart for encoding.

| column | JSON | MessagePack |
|---|---|---|
| integers, boolean, string | as they are; an integer out of the column's range is a bad value | the same |
| float, double | number, "NaN", "Infinity", "-Infinity" | float |
| decimal | number (read also from a string) | string (read also from a number) |
| binary | base64 | bin |
| date | "2026-11-21" | the same |
| timestamp | RFC 3339, of any zone (UTC if of none); a number is seconds since 1970 | timestamp extension, or as JSON |
| timestamp_ntz | "2026-11-21T12:00:00.123456" | the same |
| array, struct, map (keys: string, integers) | array, object, object | array, map, map |

That is what Spark's to_json writes and from_json reads, but for bad values (from_json is less strict: it makes text of
anything that stands for a string) and for times, which to_json cuts to milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal
from itertools import accumulate, chain, pairwise
from operator import attrgetter, itemgetter
from types import GenericAlias
from typing import Annotated, Any, Final, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from magnetar.proto.errors import InvalidArgument

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
TIMESTAMP: Final = pa.timestamp("us", "UTC")
TIMESTAMP_NTZ: Final = pa.timestamp("us")
_DECIMALS = Context(prec=80, rounding=ROUND_HALF_UP)
_NOT_FINITE = Literal["NaN", "Infinity", "+Infinity", "-Infinity", "INF", "+INF", "-INF"]


class ValueType:
    """A type whose Python objects are those that pyarrow makes and takes by itself."""

    def __init__(self, arrow: pa.DataType, hint: Any = object) -> None:
        self.arrow = arrow
        self.hint = hint

    def to_arrow(self, objects: list[Any]) -> pa.Array:
        """A column. Raises ValueError, TypeError, ArithmeticError or pyarrow's errors (most are ValueErrors)."""
        return pa.array(objects, self.arrow)

    def to_python(self, column: pa.Array) -> list[Any]:
        """What an encoder takes, for a column of `arrow`'s type."""
        objects: list[Any] = column.to_pylist()
        return objects


class JsonFloat(ValueType):
    """JSON has no numbers that are not finite: they are words, as Spark writes them."""

    def to_arrow(self, objects: list[Any]) -> pa.Array:
        if str in {*map(type, objects)}:
            objects = [float(one) if type(one) is str else one for one in objects]
        return pa.array(objects, self.arrow)

    def to_python(self, column: pa.Array) -> list[Any]:
        objects: list[Any] = column.to_pylist()
        if pc.all(pc.is_finite(column)).as_py() is False:
            return [one if one is None or math.isfinite(one) else _word(one) for one in objects]
        return objects


def _word(number: float) -> str:
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


class ExactDecimal(ValueType):
    """Digits past the scale are rounded half up, as Spark does; what is too large does not fit."""

    def to_arrow(self, objects: list[Any]) -> pa.Array:
        try:
            return pa.array(objects, self.arrow)
        except pa.ArrowInvalid:
            unit = Decimal(1).scaleb(-self.arrow.scale)
            rounded = [None if one is None else one.quantize(unit, context=_DECIMALS) for one in objects]
            return pa.array(rounded, self.arrow)


class IsoDate(ValueType):
    """Days as text."""

    def to_arrow(self, objects: list[Any]) -> pa.Array:
        try:
            return pa.array(objects, pa.string()).cast(self.arrow)
        except pa.ArrowInvalid:
            return pa.array(
                [None if one is None else datetime.fromisoformat(one).date() for one in objects], self.arrow
            )

    def to_python(self, column: pa.Array) -> list[Any]:
        return super().to_python(column.cast(pa.string()))


class IsoTime(ValueType):
    """Moments as text; dates and times of day that belong to no zone, if the column's type has none."""

    def to_arrow(self, objects: list[Any]) -> pa.Array:
        try:
            return pa.array(objects, pa.string()).cast(self.arrow)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            # Without a zone, with nanoseconds, as a number; or nonsense.
            return pa.array([None if one is None else self._moment(one) for one in objects], self.arrow)

    def _moment(self, value: str | float) -> datetime:
        if not isinstance(value, str):
            return EPOCH + timedelta(seconds=value)
        time = datetime.fromisoformat(value)
        if time.tzinfo and self.arrow.tz is None:
            raise ValueError(f"{value!r} has a zone, and a timestamp_ntz has none")
        return time  # one without a zone is UTC to Arrow

    def to_python(self, column: pa.Array) -> list[Any]:
        return super().to_python(self.texts(column))

    def texts(self, column: pa.Array) -> pa.Array:
        """As RFC 3339 has it. Arrow's own text is that but for the T and the Z; its strftime takes 15 times as long."""
        texts = pc.replace_substring(
            column.cast(TIMESTAMP_NTZ).cast(pa.string()), " ", "T", max_replacements=1
        )
        return texts if self.arrow.tz is None else pc.binary_join_element_wise(texts, "Z", "")


class ExtensionTime(IsoTime):
    """Moments as MessagePack's timestamp extension, which msgspec makes of a datetime; texts and numbers are read too."""

    def to_arrow(self, objects: list[Any]) -> pa.Array:
        if not {*map(type, objects)} <= {datetime, type(None)}:
            objects = [
                EPOCH + timedelta(seconds=one) if isinstance(one, (int, float)) else one for one in objects
            ]
        return pa.array(objects, self.arrow)

    def to_python(self, column: pa.Array) -> list[Any]:
        # A quarter of the time of Arrow's own datetimes with a zone.
        return msgspec.convert(super().to_python(column), list[datetime | None])


class ListOf(ValueType):
    """Arrays."""

    def __init__(self, arrow: pa.DataType, item: ValueType) -> None:
        super().__init__(arrow, GenericAlias(list, (item.hint | None,)))
        self.item = item

    def to_arrow(self, objects: list[Any]) -> pa.Array:
        offsets, mask = _layout(objects)
        items = self.item.to_arrow(list(chain.from_iterable(filter(None, objects))))
        return pa.ListArray.from_arrays(offsets, items, type=self.arrow, mask=mask)

    def to_python(self, column: pa.Array) -> list[Any]:
        first, bounds = _bounds(column)
        items = self.item.to_python(column.values.slice(first, bounds[-1][1] if bounds else 0))
        return _with_nulls(column, (items[start:end] for start, end in bounds))


class MapOf(ValueType):
    """Maps: dicts on the side of Python."""

    def __init__(self, arrow: pa.DataType, key: ValueType, item: ValueType) -> None:
        super().__init__(arrow, GenericAlias(dict, (key.hint, item.hint | None)))
        self.key = key
        self.item = item

    def to_arrow(self, objects: list[Any]) -> pa.Array:
        offsets, mask = _layout(objects)
        present = [one for one in objects if one]
        keys = self.key.to_arrow(list(chain.from_iterable(present)))
        items = self.item.to_arrow(list(chain.from_iterable(one.values() for one in present)))
        return pa.MapArray.from_arrays(offsets, keys, items, type=self.arrow, mask=mask)

    def to_python(self, column: pa.Array) -> list[Any]:
        first, bounds = _bounds(column)
        count = bounds[-1][1] if bounds else 0
        keys = self.key.to_python(column.keys.slice(first, count))
        items = self.item.to_python(column.items.slice(first, count))
        return _with_nulls(column, (dict(zip(keys[start:end], items[start:end])) for start, end in bounds))


def _layout(objects: list[Any]) -> tuple[pa.Array, pa.Array]:
    """Offsets of lists or maps, and which are null."""
    lengths = [0 if one is None else len(one) for one in objects]
    mask = pa.array([one is None for one in objects], pa.bool_())
    return pa.array(accumulate(lengths, initial=0), pa.int32()), mask


def _bounds(column: pa.Array) -> tuple[int, list[tuple[int, int]]]:
    """Where its items begin among those of the whole array it is a slice of, and each row's part of them from there."""
    offsets = column.offsets.to_pylist()
    return offsets[0], [(start - offsets[0], end - offsets[0]) for start, end in pairwise(offsets)]


def _with_nulls(column: pa.Array, objects: Iterable[Any]) -> list[Any]:
    if not column.null_count:
        return list(objects)
    return [one if valid else None for one, valid in zip(objects, column.is_valid().to_pylist())]


class Record(ValueType):
    """Structs, and the whole value: named fields. What they are to Python is a subclass's to say."""

    def __init__(self, arrow: pa.DataType, fields: Mapping[str, ValueType]) -> None:
        super().__init__(arrow)
        self.fields = dict(fields)
        self.blank: Any = None  # one whose fields are all null
        self.getters: list[Callable[[Any], Any]] = []

    def columns(self, objects: list[Any]) -> list[pa.Array]:
        """A column of each field; all null where the record is."""
        return [kind.to_arrow(column) for kind, column in self.taken_apart(objects)]

    def taken_apart(self, objects: list[Any]) -> Iterator[tuple[ValueType, list[Any]]]:
        """The fields of records, field by field."""
        blank = self.blank
        present = [blank if one is None else one for one in objects]
        for getter, kind in zip(self.getters, self.fields.values()):
            yield kind, list(map(getter, present))

    def records(self, names: Sequence[str], columns: Sequence[pa.Array]) -> Iterator[Any]:
        """What an encoder takes, row by row."""
        raise NotImplementedError

    def to_arrow(self, objects: list[Any]) -> pa.Array:
        mask = pa.array([one is None for one in objects], pa.bool_())
        return pa.StructArray.from_arrays(self.columns(objects), fields=list(self.arrow), mask=mask)

    def to_python(self, column: pa.Array) -> list[Any]:
        names = [field.name for field in column.type]
        if not column.null_count:
            return list(self.records(names, column.flatten()))
        valid = column.is_valid()
        records = self.records(names, column.filter(valid).flatten())
        return [next(records) if one else None for one in valid.to_pylist()]


class StructOf(Record):
    """Records that msgspec reads and writes: unknown fields are passed over, null ones are not written."""

    def __init__(self, arrow: pa.DataType, fields: Mapping[str, ValueType]) -> None:
        super().__init__(arrow, fields)
        places = {f"f{n}": name for n, name in enumerate(fields)}
        self.hint = msgspec.defstruct(
            "Row",
            [(place, fields[name].hint | None, None) for place, name in places.items()],
            rename=places,
            omit_defaults=True,
            gc=False,  # acyclic; looking through 16,000 of them at a time would cost more than making them
            eq=False,
        )
        self.blank = self.hint()
        self.getters = [attrgetter(place) for place in places]

    def records(self, names: Sequence[str], columns: Sequence[pa.Array]) -> Iterator[Any]:
        return map(self.hint, *(one.to_python(column) for one, column in zip(self.fields.values(), columns)))


class DictOf(Record):
    """Records that are dicts: those of fastavro. Fields that are not wanted may stand there; others may be missing."""

    def __init__(self, arrow: pa.DataType, fields: Mapping[str, ValueType]) -> None:
        super().__init__(arrow, fields)
        self.blank = dict.fromkeys(fields)
        self.getters = [itemgetter(name) for name in fields]

    def records(self, names: Sequence[str], columns: Sequence[pa.Array]) -> Iterator[Any]:
        objects = [self.fields[name].to_python(column) for name, column in zip(names, columns)]
        return (dict(zip(names, row)) for row in zip(*objects))


def value_type(arrow: pa.DataType, value_format: str, path: str) -> ValueType:
    """For json or msgpack. `path` names the column in errors. Raises InvalidArgument for a type that has no place there."""
    if pa.types.is_struct(arrow) and not any(field.metadata for field in arrow):  # a variant has such
        return struct_type(arrow, value_format, path)
    if pa.types.is_map(arrow):
        if not (_is_text(arrow.key_type) or pa.types.is_signed_integer(arrow.key_type)):
            raise InvalidArgument(
                f"column {path!r} is a map whose keys are of type {arrow.key_type}, and those of {value_format} are text; "
                "make it a map<string, ...>, or an array of structs: map_entries(...)"
            )
        key = value_type(arrow.key_type, value_format, f"{path}.key")
        return MapOf(arrow, key, value_type(arrow.item_type, value_format, f"{path}.value"))
    if pa.types.is_list(arrow):
        return ListOf(arrow, value_type(arrow.value_type, value_format, f"{path}.element"))
    if pa.types.is_signed_integer(arrow):
        bound = 1 << (arrow.bit_width - 1)
        return ValueType(arrow, Annotated[int, msgspec.Meta(ge=-bound, le=bound - 1)])
    if pa.types.is_floating(arrow):
        return JsonFloat(arrow, float | _NOT_FINITE) if value_format == "json" else ValueType(arrow, float)
    if pa.types.is_timestamp(arrow):
        if arrow.tz is None:
            return IsoTime(arrow, str)
        return (
            IsoTime(arrow, str | int | float)
            if value_format == "json"
            else ExtensionTime(arrow, datetime | int | float)
        )
    for holds, kind, hint in _SCALARS:
        if holds(arrow):
            return kind(arrow, hint)
    raise InvalidArgument(
        f"column {path!r} is of type {arrow}, which a {value_format} value cannot hold; cast it to string or drop it"
    )


def struct_type(arrow: pa.DataType, value_format: str, path: str) -> StructOf:
    """The fields of a struct, or of the whole value (path "")."""
    check_fields([field.name for field in arrow], path)
    at = path and f"{path}."
    return StructOf(
        arrow, {field.name: value_type(field.type, value_format, f"{at}{field.name}") for field in arrow}
    )


def check_fields(names: Sequence[str], path: str) -> None:
    """Raises InvalidArgument if a record would have none, or two of one name."""
    where = f"column {path!r}" if path else "the value"
    if not names:
        raise InvalidArgument(f"{where} would have no fields; name one, or leave it out")
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(f"{where} has two fields {name!r}; rename one of them")


def _is_text(arrow: pa.DataType) -> bool:
    return bool(pa.types.is_string(arrow) or pa.types.is_large_string(arrow))


def _is_bytes(arrow: pa.DataType) -> bool:
    return bool(pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow))


_SCALARS: tuple[tuple[Callable[[pa.DataType], bool], type[ValueType], Any], ...] = (
    (pa.types.is_boolean, ValueType, bool),
    (_is_text, ValueType, str),
    (_is_bytes, ValueType, bytes),
    (pa.types.is_decimal, ExactDecimal, Decimal),
    (pa.types.is_date32, IsoDate, str),
)
