"""Spark's DDL for schemas, read without Spark: `id bigint, tags array<string>, at timestamp, price decimal(10,2)`.

A data source says its schema in a Python process that has no session, and Spark's own parser is in the JVM. Handing it the
text would do for plain columns, but not for a prefix, for names that clash with the topic's, nor for an error that names
the option. Nullability and comments are read and passed over: every field may be null.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from magnetar.proto.errors import InvalidArgument

_PRIMITIVES: Final[dict[str, Callable[[], DataType]]] = {
    "boolean": BooleanType,
    "tinyint": ByteType,
    "byte": ByteType,
    "smallint": ShortType,
    "short": ShortType,
    "int": IntegerType,
    "integer": IntegerType,
    "bigint": LongType,
    "long": LongType,
    "float": FloatType,
    "real": FloatType,
    "double": DoubleType,
    "string": StringType,
    "binary": BinaryType,
    "date": DateType,
    "timestamp": TimestampType,
    "timestamp_ltz": TimestampType,
    "timestamp_ntz": TimestampNTZType,
}
_DECIMALS: Final = ("decimal", "dec", "numeric")
_TYPES: Final = f"{', '.join(_PRIMITIVES)}, decimal(p,s), array<>, map<,> and struct<>"
_TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)+`)|('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(\w+)|([<>(),:])|(\S))")
_MAX_PRECISION: Final = 38


class _Token(NamedTuple):
    kind: str  # name, quoted (a name in backticks), text, mark or end
    text: str
    at: int


class _Wrong(Exception):
    """What is wrong, and where in the text."""


def parse_schema(option: str, text: str) -> StructType:
    """Columns of a DDL schema, or of the JSON that `df.schema.json()` gives. Raises InvalidArgument."""
    try:
        if text.lstrip().startswith("{"):
            parsed = StructType.fromJson(json.loads(text))
            return StructType([StructField(one.name, nullable(one.dataType)) for one in parsed.fields])
        return _Parser(text).schema()
    except _Wrong as wrong:
        raise InvalidArgument(
            f"option {option} is not a schema: {wrong}; want it as in 'id bigint, name string, tags array<string>'"
        ) from None
    except Exception as error:
        # Spark's reading of its own JSON fails with whatever it stumbles over.
        raise InvalidArgument(
            f"option {option} is not a schema: {error!r}; want DDL, or what df.schema.json() gives"
        ) from None


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._next = 0

    def schema(self) -> StructType:
        fields = self._fields("end")
        if not fields:
            raise _Wrong("it names no column")
        return StructType(fields)

    def _fields(self, closing: str) -> list[StructField]:
        fields: list[StructField] = []
        while not self._closes(closing):
            if fields:
                self._expect(",")
            name = self._take("a name", "name", "quoted")
            self._passed(":")
            fields.append(StructField(name.text, self._type()))
            self._remarks()
        return fields

    def _type(self) -> DataType:
        token = self._take("a type", "name")
        kind = token.text.lower()
        if kind in _PRIMITIVES:
            return _PRIMITIVES[kind]()
        if kind in _DECIMALS:
            return self._decimal(token)
        if kind == "array":
            self._expect("<")
            element = self._type()
            self._expect(">")
            return ArrayType(element)
        if kind == "map":
            self._expect("<")
            key = self._type()
            self._expect(",")
            value = self._type()
            self._expect(">")
            return MapType(key, value)
        if kind == "struct":
            self._expect("<")
            return StructType(self._fields(">"))
        raise _Wrong(
            f"there is no type {token.text!r} (at {token.at}) that values can have; there are {_TYPES}"
        )

    def _decimal(self, token: _Token) -> DecimalType:
        numbers: list[int] = []
        if self._passed("("):
            numbers.append(self._number())
            if self._passed(","):
                numbers.append(self._number())
            self._expect(")")
        precision, scale = numbers + [10, 0][len(numbers) :]
        if not 0 < precision <= _MAX_PRECISION or scale > precision:
            raise _Wrong(
                f"decimal({precision},{scale}) (at {token.at}) does not exist: precision is at most {_MAX_PRECISION}, "
                "scale at most precision"
            )
        return DecimalType(precision, scale)

    def _number(self) -> int:
        token = self._take("a number", "name")
        if not token.text.isdecimal():
            raise _Wrong(f"{token.text!r} (at {token.at}) is where a number should be")
        return int(token.text)

    def _remarks(self) -> None:
        if self._passed("not"):
            self._expect("null")
        if self._passed("comment"):
            self._take("the comment", "text")

    def _closes(self, closing: str) -> bool:
        token = self._tokens[self._next]
        if closing == "end":
            return token.kind == "end"
        return self._passed(closing)

    def _passed(self, text: str) -> bool:
        token = self._tokens[self._next]
        if token.kind not in ("name", "mark") or token.text.lower() != text:
            return False
        self._next += 1
        return True

    def _expect(self, text: str) -> None:
        if not self._passed(text):
            self._take(repr(text))

    def _take(self, what: str, *kinds: str) -> _Token:
        token = self._tokens[self._next]
        if token.kind not in kinds:
            found = "it ends" if token.kind == "end" else f"{token.text!r} stands (at {token.at})"
            raise _Wrong(f"{found} where {what} should be")
        self._next += 1
        return token


def _tokens(text: str) -> Iterator[_Token]:
    for match in _TOKEN.finditer(text):
        quoted, string, name, mark, other = match.groups()
        at = match.end() - len(match[0].lstrip())
        if quoted:
            yield _Token("quoted", quoted[1:-1].replace("``", "`"), at)
        elif string:
            yield _Token("text", string, at)
        elif name:
            yield _Token("name", name, at)
        else:
            yield _Token("mark" if mark else "other", mark or other, at)
    yield _Token("end", "", len(text))


def nullable(data_type: DataType) -> DataType:
    """The type whose fields, elements and values may all be null."""
    if isinstance(data_type, StructType):
        return StructType([StructField(one.name, nullable(one.dataType)) for one in data_type.fields])
    if isinstance(data_type, ArrayType):
        return ArrayType(nullable(data_type.elementType))
    if isinstance(data_type, MapType):
        return MapType(nullable(data_type.keyType), nullable(data_type.valueType))
    return data_type


__all__ = ["nullable", "parse_schema"]
