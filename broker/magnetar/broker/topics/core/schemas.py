"""Schemas as Pulsar has them: when two are the same one, and when a new one fits those that a topic has.

Two are the same if they have one type and one definition; definitions of Avro's kind, which JSON schemas are as well, are
compared as JSON, and without what they say for people. What fits is the policy `schema_compatibility`, by Avro's rules:

    BACKWARD    who has the new schema reads what was written with the last one
    FORWARD     who has the last schema reads what is written with the new one
    FULL        both; also where the policy says nothing
    ..._TRANSITIVE    the same, of all that the topic has in place of the last one

Definitions of other kinds, as of Protobuf or of keys with values, are not looked into: they fit if their type does.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from magnetar.proto.errors import IncompatibleSchema, InvalidArgument

MAX_SCHEMA_BYTES = 512 * 1024
ALWAYS, NEVER, BACKWARD = "ALWAYS_COMPATIBLE", "ALWAYS_INCOMPATIBLE", "BACKWARD"
_MAX_CHARS = 200  # of what Avro says


class SchemaType(enum.IntEnum):
    """Pulsar's names and numbers, as its protocol has them."""

    NONE = 0
    STRING = 1
    JSON = 2
    PROTOBUF = 3
    AVRO = 4
    BOOLEAN = 5
    INT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    FLOAT = 10
    DOUBLE = 11
    DATE = 12
    TIME = 13
    TIMESTAMP = 14
    KEY_VALUE = 15
    INSTANT = 16
    LOCAL_DATE = 17
    LOCAL_TIME = 18
    LOCAL_DATE_TIME = 19
    PROTOBUF_NATIVE = 20
    AUTO_CONSUME = 21
    EXTERNAL = 22


_DEFINED_BY_JSON = (SchemaType.JSON, SchemaType.PROTOBUF, SchemaType.AVRO)
_DEFINED_BY_AVRO = (SchemaType.JSON, SchemaType.AVRO)
_DEFINED = (*_DEFINED_BY_JSON, SchemaType.KEY_VALUE, SchemaType.PROTOBUF_NATIVE, SchemaType.EXTERNAL)


class Schema(NamedTuple):
    """As a client gives it."""

    type: SchemaType
    definition: bytes
    properties: Mapping[str, str]

    def check(self) -> Schema:
        """Itself. Raises InvalidArgument for a definition that is too long, or that none of its type is."""
        check_size(len(self.definition))
        if self.type is SchemaType.AUTO_CONSUME:
            raise InvalidArgument("Schema AUTO_CONSUME is a client-side schema type")
        # The client of Python gives a null for a text.
        empty = self.definition in (b"", b"null" if self.type is SchemaType.STRING else b"")
        wanted = "JSON" if self.type in _DEFINED_BY_JSON else "" if self.type in _DEFINED else "none"
        if (wanted == "JSON" and _parsed(self.definition) is None) or (wanted == "none" and not empty):
            raise InvalidArgument(
                f"Invalid schema definition data for {self.type.name} schema: want {wanted}"
            )
        return self

    def fingerprint(self) -> bytes:
        """The same schema has the same one."""
        definition = self.definition
        if self.type in _DEFINED_BY_JSON:
            definition = json.dumps(_parsed(definition), sort_keys=True).encode()
        return hashlib.sha256(definition).digest()


def check_size(size: int) -> None:
    """Raises InvalidArgument."""
    if size > MAX_SCHEMA_BYTES:
        raise InvalidArgument(f"a schema has at most {MAX_SCHEMA_BYTES:,} bytes, not {size:,}")


def _without_doc(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key != "doc" or "type" not in found}


def _parsed(definition: bytes) -> Any:
    """None: it is no JSON, or nested too deeply for one."""
    try:
        return json.loads(definition, object_hook=_without_doc)
    except (ValueError, RecursionError):
        return None


def check_types(new: SchemaType, others: Iterable[SchemaType]) -> None:
    """Raises IncompatibleSchema."""
    for other in others:
        if other != new:
            raise IncompatibleSchema(
                f"Incompatible schema: exists schema type {other.name}, new schema type {new.name}"
            )


def check_fits(new: Schema, others: Sequence[Schema], strategy: str) -> None:
    """Beside `others`, of whose type it is. Takes milliseconds, the first time many.

    Raises IncompatibleSchema, and InvalidArgument for what is not of Avro.
    """
    if new.type is SchemaType.AVRO:
        _avro(new)
    if strategy == NEVER and others:
        raise IncompatibleSchema(
            "the policy schema_compatibility=ALWAYS_INCOMPATIBLE lets no other schema in"
        )
    if new.type not in _DEFINED_BY_AVRO:
        return
    for other in others:
        if not strategy.startswith("FORWARD"):
            _check_readable(new, other)
        if not strategy.startswith(BACKWARD):
            _check_readable(other, new)


def _check_readable(reader: Schema, writer: Schema) -> None:
    from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType
    from avro.schema import RecordSchema

    try:
        reading, writing = _avro(reader), _avro(writer)
        checker: Any = ReaderWriterCompatibilityChecker
        found = checker().get_compatibility(reading, writing)
        refusals = sorted(found.messages)
        if found.compatibility is SchemaCompatibilityType.compatible:
            refusals = []
            if isinstance(reading, RecordSchema) and isinstance(writing, RecordSchema):
                added = [field for field in reading.fields if field.name not in writing.fields_dict]
                refusals = [
                    f"the default of {one.name} is not of its first type" for one in added if _wrong(one)
                ]
    except (InvalidArgument, RecursionError) as error:
        refusals = [str(error)]
    if refusals:
        raise IncompatibleSchema(f"Unable to read schema: {'; '.join(refusals)[:_MAX_CHARS]}")


def _avro(schema: Schema) -> Any:
    from avro.errors import AvroException
    from avro.schema import parse

    try:
        return parse(schema.definition.decode(), validate_names=False)
    except (AvroException, ValueError, RecursionError) as error:
        reason = f"Invalid schema definition data for {schema.type.name} schema: {error}"
        raise InvalidArgument(reason[:_MAX_CHARS]) from None


def _wrong(field: Any) -> bool:
    """Of a union the default is of the first type, which Avro for Java insists on and that for Python does not."""
    from avro.schema import UnionSchema

    return isinstance(field.type, UnionSchema) and (field.type.schemas[0].type == "null") != (
        field.default is None
    )
