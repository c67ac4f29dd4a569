"""Schemas of topics in the metadata store: versions that are added, looked for and deleted. Any broker does it.

    /schemas/{tenant}/{namespace}/{topic}              what there is: a row for each version
    /schemas/{tenant}/{namespace}/{topic}/{version}    a version, which never changes

A version is added by a commit that replaces the list by compare-and-set and makes the node. So two brokers lose none, the
same schema has one version however many bring it, and whoever reads the list finds the nodes. A deletion takes all versions
away in one commit and a number of its own, as in Pulsar: later versions have higher ones.

A topic may have schemas before it is made. They go with the topic, or with its namespace: the commit that adds one checks
that the namespace is not being deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

from magnetar.metadata import MetadataStore
from magnetar.metadata.store import Create, Delete, Operation
from magnetar.proto.errors import (
    AlreadyExists,
    IncompatibleSchema,
    InvalidArgument,
    NotFoundInStore,
    VersionConflict,
)
from magnetar.proto.ids import TopicName
from magnetar.runtime.clock import Clock

from ..log.records import ABSENT, SchemaRecord, SchemaRow, SchemasRecord, Stored, schema_path, schemas_path
from .core.schemas import ALWAYS, BACKWARD, Schema, SchemaType, check_fits, check_size, check_types

MAX_VERSIONS = 1_000  # of a topic, so that one commit removes all
LATEST = -1
_FIT_WITH_THE_LAST = ("BACKWARD", "FORWARD", "FULL")


class StoredSchema(NamedTuple):
    """A version."""

    version: int
    schema: Schema
    created_ms: int
    user: str


class _Found(Stored[SchemasRecord]):
    __slots__ = ()

    @property
    def versions(self) -> range:
        return range(self.record.first, self.record.first + len(self.record.rows))

    def version_of(self, schema: Schema) -> int | None:
        row = SchemaRow(schema.type, schema.fingerprint())
        rows = self.record.rows
        return self.record.first + rows.index(row) if row in rows else None

    def removal(self, name: TopicName) -> list[Operation]:
        return [Delete(schema_path(name, version)) for version in self.versions]


class Schemas:
    """Of all topics."""

    def __init__(
        self,
        metadata: MetadataStore,
        clock: Clock,
        make: Callable[[TopicName, Sequence[Operation]], Awaitable[None]],
    ) -> None:
        """`make`: commits what is of a topic, if its namespace allows it."""
        self._metadata = metadata
        self._clock = clock
        self._make = make

    async def versions(self, name: TopicName) -> range:
        """Those that there are."""
        return (await _read(self._metadata, name)).versions

    async def get(self, name: TopicName, version: int = LATEST) -> StoredSchema | None:
        """None: there is no such version."""
        path = schema_path(name, (await self.versions(name)).stop - 1 if version == LATEST else version)
        stored = await self._metadata.get(path)
        if stored is None:
            return None
        record = SchemaRecord.decode(stored.value, path)
        schema = Schema(SchemaType(record.type), record.definition, record.properties)
        return StoredSchema(record.version, schema, record.created_ms, record.user)

    async def all(self, name: TopicName, versions: Sequence[int]) -> list[StoredSchema]:
        """Of these those that there are."""
        found = [await self.get(name, version) for version in versions]
        return [one for one in found if one is not None]

    async def find(self, name: TopicName, schema: Schema) -> int | None:
        """The version that it has."""
        return (await _read(self._metadata, name)).version_of(schema.check())

    async def add(
        self, name: TopicName, schema: Schema, strategy: Callable[[], Awaitable[str | None]], user: str = ""
    ) -> int:
        """The version that it has, old or new. `strategy`: of a new one; None: the policies let none in.

        Raises IncompatibleSchema, InvalidArgument.
        """
        schema.check()
        while True:
            found = await _read(self._metadata, name)
            if (version := found.version_of(schema)) is not None:
                return version
            if (by := await strategy()) is None:
                raise IncompatibleSchema("Schema not found and schema auto updating is disabled.")
            await self._check(name, found, schema, by)
            nodes = self._nodes(name, found, schema, user)
            with contextlib.suppress(AlreadyExists, NotFoundInStore, VersionConflict):
                await self._make(name, nodes)
                return found.versions.stop

    async def check(self, name: TopicName, schema: Schema, strategy: str, *, reading: bool = False) -> None:
        """That it would be let in, or (`reading`) reads what the topic has. Raises IncompatibleSchema, InvalidArgument."""
        found = await _read(self._metadata, name)
        if reading and not found.versions:
            raise IncompatibleSchema("Topic does not have schema to check")
        if reading and strategy in (*_FIT_WITH_THE_LAST, "FORWARD_TRANSITIVE"):
            strategy = BACKWARD
        if found.version_of(schema.check()) is None:
            await self._check(name, found, schema, strategy)

    async def delete(self, name: TopicName) -> int:
        """The topic has no schema any more; the number of that."""
        while True:
            found = await _read(self._metadata, name)
            number = found.versions.stop
            written = found.write(schemas_path(name), SchemasRecord(number + 1, []))
            with contextlib.suppress(AlreadyExists, NotFoundInStore, VersionConflict):
                await self._make(name, [*found.removal(name), written])
                return number

    async def _check(self, name: TopicName, found: _Found, schema: Schema, strategy: str) -> None:
        versions = found.versions if strategy != ALWAYS else range(0)
        if strategy in _FIT_WITH_THE_LAST:
            versions = versions[-1:]
        others = [one.schema for one in await self.all(name, versions)]
        check_types(schema.type, (one.type for one in others))
        # A parser of what others choose, and its import, would hold up everybody else.
        work = partial(check_fits, schema, others, strategy)
        await asyncio.get_running_loop().run_in_executor(None, work)

    def _nodes(self, name: TopicName, found: _Found, schema: Schema, user: str) -> list[Operation]:
        first, rows, version = found.record.first, found.record.rows, found.versions.stop
        if len(rows) == MAX_VERSIONS:
            raise InvalidArgument(
                f"topic {name.whole} has {MAX_VERSIONS:,} versions of its schema, and no more are kept; delete them first"
            )
        node = SchemaRecord(
            version, schema.type, schema.definition, dict(schema.properties), user, self._clock.now_ms()
        ).encode()
        check_size(len(node))
        row = SchemaRow(schema.type, schema.fingerprint())
        written = found.write(schemas_path(name), SchemasRecord(first, [*rows, row]))
        return [written, Create(schema_path(name, version), node)]


async def _read(metadata: MetadataStore, name: TopicName) -> _Found:
    path = schemas_path(name)
    stored = await metadata.get(path)
    if stored is None:
        return _Found(SchemasRecord(0, []), ABSENT)
    return _Found(SchemasRecord.decode(stored.value, path), stored.version)


async def remove_schemas(metadata: MetadataStore, name: TopicName) -> None:
    """All versions at once, as if there had never been one."""
    while (found := await _read(metadata, name)).version != ABSENT:
        with contextlib.suppress(NotFoundInStore, VersionConflict):
            await metadata.commit([*found.removal(name), Delete(schemas_path(name), found.version)])
