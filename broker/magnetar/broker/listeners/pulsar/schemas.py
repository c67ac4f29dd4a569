"""Schemas in commands. A version is eight bytes, or none where there is no schema."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import TopicName
from magnetar.proto.pulsar import wire_pb2 as wire

from ...service.broker import BrokerService
from ...topics.core.schemas import Schema, SchemaType
from ...topics.schemas import LATEST
from .ports import Link

_VERSION_BYTES = 8
_NONE = (SchemaType.NONE, SchemaType.AUTO_CONSUME)


def schema_of(command: Any) -> Schema | None:
    """Of PRODUCER and others; None: plain bytes, or whatever the topic has."""
    found = command.schema
    if not command.HasField("schema") or found.type in _NONE:
        return None
    return Schema(SchemaType(found.type), found.schema_data, {one.key: one.value for one in found.properties})


def version_bytes(version: int | None) -> bytes:
    """As clients get it."""
    return b"" if version is None else version.to_bytes(_VERSION_BYTES)


async def get_schema(service: BrokerService, link: Link, command: wire.CommandGetSchema) -> Message:
    """GET_SCHEMA: of a version, or the last one."""
    wanted = command.schema_version
    if len(wanted) not in (0, _VERSION_BYTES):
        raise InvalidArgument(f"a version of a schema has {_VERSION_BYTES} bytes, not {len(wanted)}")
    version = int.from_bytes(wanted) if wanted else LATEST
    found = await service.schemas.get_schema(link, command.topic, version=version)
    kind, definition, properties = found.schema
    name = TopicName.parse(command.topic)
    return wire.CommandGetSchemaResponse(
        request_id=command.request_id,
        schema=wire.Schema(
            name=f"{name.full_namespace}/{name.whole.name}",
            schema_data=definition,
            type=wire.Schema.Type.Name(kind),
            properties=[wire.KeyValue(key=key, value=value) for key, value in properties.items()],
        ),
        schema_version=version_bytes(found.version),
    )


async def add_schema(service: BrokerService, link: Link, command: wire.CommandGetOrCreateSchema) -> Message:
    """GET_OR_CREATE_SCHEMA."""
    schema = schema_of(command)
    version = None if schema is None else await service.schemas.add_schema(link, command.topic, schema)
    return wire.CommandGetOrCreateSchemaResponse(
        request_id=command.request_id, schema_version=version_bytes(version)
    )
