"""Spark's DDL for schemas, read without Spark: `id bigint, tags array<string>, at timestamp, price decimal(10,2)`.

A data source says its schema in a Python process that has no session, and Spark's own parser is in the JVM. Handing it the
text would do for plain columns, but not for a prefix, for names that clash with the topic's, nor for an error that names
the option. So the text becomes what `df.schema.json()` gives, which PySpark reads without a session. Nullability and
comments are read and passed over: every field may be null.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from magnetar.proto.errors import InvalidArgument

# Names in DDL, and what they are in JSON where that is something else.
_TYPES: Final = dict.fromkeys(
    "boolean tinyint byte smallint short int integer bigint long float real double string binary date timestamp "
    "timestamp_ltz timestamp_ntz".split()
) | {
    "tinyint": "byte", "smallint": "short", "int": "integer", "bigint": "long", "real": "float",
    "timestamp_ltz": "timestamp",
}  # fmt: skip
_DECIMALS: Final = ("decimal", "dec", "numeric")
_TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)+`)|('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(\w+)|([<>(),:])|(\S))")
_KINDS: Final = ("quoted", "text", "name", "mark", "other")
_MAX_PRECISION: Final = 38
_END: Final = "\0"


class _Token(NamedTuple):
    kind: str  # one of _KINDS (quoted: a name in backticks), or end
    text: str
    at: int


class _Wrong(Exception):
    """What is wrong, and where in the text."""


def parse_schema(option: str, text: str) -> StructType:
    """Columns of a DDL schema, or of the JSON that `df.schema.json()` gives. Raises InvalidArgument."""
    try:
        if text.lstrip().startswith("{"):
            parsed = nullable(StructType.fromJson(json.loads(text)))
            assert isinstance(parsed, StructType)
            return parsed
        fields = _Parser(text).fields(_END)
        if not fields:
            raise _Wrong("it names no column")
        return StructType.fromJson({"fields": fields})
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

    def fields(self, closing: str) -> list[dict[str, Any]]:
        """Reads the fields of a struct up to and with `closing`; returns them in the form of Spark's JSON."""
        fields: list[dict[str, Any]] = []
        while not self._passed(closing):
            if fields:
                self._expect(",")
            name = self._take("a name", "name", "quoted").text
            self._passed(":")
            fields.append({"name": name, "type": self._type(), "nullable": True, "metadata": {}})
            if self._passed("not"):
                self._expect("null")
            if self._passed("comment"):
                self._take("the comment", "text")
        return fields

    def _type(self) -> Any:
        token = self._take("a type", "name")
        kind = token.text.lower()
        if kind in _TYPES:
            return _TYPES[kind] or kind
        if kind in _DECIMALS:
            return self._decimal(token)
        if kind not in ("array", "map", "struct"):
            raise _Wrong(
                f"there is no type {token.text!r} (at {token.at}) that values can have; there are {', '.join(_TYPES)}, "
                "decimal(p,s), array<>, map<,> and struct<>"
            )
        self._expect("<")
        if kind == "struct":
            return {"type": kind, "fields": self.fields(">")}
        found: dict[str, Any] = {"type": kind, "containsNull": True, "valueContainsNull": True}
        if kind == "map":
            found["keyType"] = self._type()
            self._expect(",")
        found["elementType" if kind == "array" else "valueType"] = self._type()
        self._expect(">")
        return found

    def _decimal(self, token: _Token) -> str:
        precision, scale = 10, 0
        if self._passed("("):
            precision = self._number()
            if self._passed(","):
                scale = self._number()
            self._expect(")")
        if not 0 < precision <= _MAX_PRECISION or scale > precision:
            raise _Wrong(
                f"decimal({precision},{scale}) (at {token.at}) does not exist: precision is at most {_MAX_PRECISION}, "
                "scale at most precision"
            )
        return f"decimal({precision},{scale})"

    def _number(self) -> int:
        token = self._take("a number", "name")
        if not token.text.isdecimal():
            raise _Wrong(f"{token.text!r} (at {token.at}) is where a number should be")
        return int(token.text)

    def _passed(self, text: str) -> bool:
        token = self._tokens[self._next]
        if token.kind not in ("name", "mark", "end") or token.text.lower() != text:
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
        assert match.lastindex is not None
        kind, token = _KINDS[match.lastindex - 1], match[match.lastindex]
        if kind == "quoted":
            token = token[1:-1].replace("``", "`")
        yield _Token(kind, token, match.start(match.lastindex))
    yield _Token("end", _END, len(text))


def nullable(data_type: DataType) -> DataType:
    """The type whose fields, elements and values may all be null."""
    if isinstance(data_type, StructType):
        return StructType([StructField(one.name, nullable(one.dataType)) for one in data_type.fields])
    if isinstance(data_type, ArrayType):
        return ArrayType(nullable(data_type.elementType))
    if isinstance(data_type, MapType):
        return MapType(nullable(data_type.keyType), nullable(data_type.valueType))
    return data_type
