"""The rows of schemas."""

from __future__ import annotations

import json
import struct
from typing import Any, Final

import msgspec

from magnetar.proto.errors import InvalidArgument

from ...service.schemas import SchemaService
from ...topics.core.schemas import Schema, SchemaType
from ...topics.schemas import StoredSchema
from .routes import WHOLE, Asked, Route
from .statuses import Refused

_PATH: Final = "/admin/v2/schemas/{tenant}/{namespace}/{topic}"
_LENGTH: Final = struct.Struct(">I")


class Payload(msgspec.Struct):
    """A schema as tools give it."""

    type: str
    schema: str
    properties: dict[str, str] = {}

    def read(self) -> Schema:
        """Raises Refused."""
        if self.type not in SchemaType.__members__:
            raise Refused(422, f"Unknown schema type: {self.type[:40]}")
        definition, kind = self.schema.encode(), SchemaType[self.type]
        if kind is SchemaType.KEY_VALUE:
            definition = _joined(definition)
        try:
            return Schema(kind, definition, self.properties).check()
        except InvalidArgument as error:
            raise Refused(422, error.message) from None


def _joined(text: bytes) -> bytes:
    """Of a key and a value: both definitions, each behind its length; tools have an object of both."""
    try:
        parts = [msgspec.json.decode(text, type=dict[str, Any])[name] for name in ("key", "value")]
    except (ValueError, KeyError):
        raise Refused(422, "a schema of keys with values is an object with both") from None
    definitions = [b"" if part == "" else json.dumps(part, separators=(",", ":")).encode() for part in parts]
    return b"".join(_LENGTH.pack(len(one)) + one for one in definitions)


def _divided(definition: bytes) -> str:
    (length,) = _LENGTH.unpack_from(definition)
    parts = definition[4 : 4 + length], definition[8 + length :]
    key, value = (json.loads(part) if part else "" for part in parts)
    return json.dumps({"key": key, "value": value}, separators=(",", ":"))


def _shape(found: StoredSchema) -> dict[str, Any]:
    kind, definition, properties = found.schema
    try:
        data = _divided(definition) if kind is SchemaType.KEY_VALUE else definition.decode(errors="replace")
    except (ValueError, struct.error):
        data = definition.decode(errors="replace")
    return {
        "version": found.version,
        "type": kind.name,
        "timestamp": found.created_ms,
        "data": data,
        "properties": properties,
    }


async def add(asked: Asked, payload: Payload) -> dict[str, Any]:
    """Adds a schema to the topic, unless it has it: the version that it has."""
    return {
        "version": {"version": await asked.service.schemas.set_schema(asked, asked.topic, payload.read())}
    }


async def find(asked: Asked, payload: Payload) -> dict[str, Any]:
    """The version that a schema has, -1: the topic does not have it."""
    return {"version": await asked.service.schemas.find_schema(asked, asked.topic, payload.read())}


async def check(asked: Asked, payload: Payload) -> dict[str, Any]:
    """Whether a schema would be let in, and by which strategy."""
    strategy = await asked.service.schemas.test_schema(asked, asked.topic, payload.read())
    return {"compatibility": True, "schemaCompatibilityStrategy": strategy}


def _metadata(found: list[StoredSchema]) -> dict[str, Any] | None:
    """Where Pulsar's ledgers have them: here none does."""
    rows = [{"ledgerId": -1, "entryId": -1, "version": one.version} for one in found]
    return {"info": rows[-1], "index": rows} if rows else None


_S: Final = SchemaService
SCHEMAS_ROUTES: Final = (
    Route("GET", f"{_PATH}/schema", _S.get_schema, answer=_shape, partitions=WHOLE),
    Route("GET", f"{_PATH}/schema/{{version}}", _S.get_schema, answer=_shape, partitions=WHOLE),
    Route(
        "GET", f"{_PATH}/schemas", _S.get_schemas, partitions=WHOLE,
        answer=lambda found: {"getSchemaResponses": [_shape(one) for one in found]},
    ),
    Route("GET", f"{_PATH}/metadata", _S.get_schemas, answer=_metadata, partitions=WHOLE),
    Route("POST", f"{_PATH}/schema", add, body="payload", partitions=WHOLE),
    Route("POST", f"{_PATH}/version", find, body="payload", partitions=WHOLE),
    Route("POST", f"{_PATH}/compatibility", check, body="payload", partitions=WHOLE, status=202),
    Route(
        "DELETE", f"{_PATH}/schema", _S.delete_schemas, partitions=WHOLE,
        answer=lambda version: {"version": version},
    ),
)  # fmt: skip
