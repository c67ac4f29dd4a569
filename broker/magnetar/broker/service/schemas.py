"""Schemas of topics. A partition's are those of its topic, and any broker answers for them."""

from __future__ import annotations

from magnetar.proto.errors import IncompatibleSchema, NotFound
from magnetar.proto.ids import TopicName

from ..log.records import TopicRecord, topic_path
from ..topics.core.schemas import Schema
from ..topics.policies import Resolved
from ..topics.registry import Broker
from ..topics.schemas import LATEST, StoredSchema, remove_schemas
from ..topics.topic import Topic
from .operations import on_topic

_DEFAULT_STRATEGY = "FULL"


class SchemaService:
    """`BrokerService.schemas`."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @on_topic("produce")
    async def add_schema(self, name: TopicName, schema: Schema) -> int:
        """By a client: its version, old or new if policies let a new one in. Raises TopicNotFound, IncompatibleSchema."""
        if not (await self._broker.partitioned.read(name.whole)).exists and not await self._broker.exists(
            name
        ):
            raise await self._broker.partitioned.missing(name)
        return await _add(self._broker, name, schema)

    @on_topic("set_schema")
    async def set_schema(self, name: TopicName, schema: Schema) -> int:
        """By an operator, also before the topic is made; its version. Raises IncompatibleSchema, InvalidArgument."""
        return await _add(self._broker, name, schema, by_operator=True)

    @on_topic("set_schema")
    async def delete_schemas(self, name: TopicName, *, force: bool = False) -> int:
        """The topic has none any more: the version of that; LATEST by `force`, as if there had never been one."""
        if force:
            await remove_schemas(self._broker.metadata, name)
            return LATEST
        return await self._broker.schemas.delete(name)

    @on_topic("produce", "consume", "get_schema")
    async def get_schema(self, name: TopicName, *, version: int = LATEST) -> StoredSchema:
        """The last one, or that of a version, which clients need who read older messages. Raises NotFound."""
        found = await self._broker.schemas.get(name, version)
        if found is None:
            raise NotFound("Schema not found")
        return found

    @on_topic("get_schema")
    async def get_schemas(self, name: TopicName) -> list[StoredSchema]:
        """All versions, oldest first."""
        return await self._broker.schemas.all(name, await self._broker.schemas.versions(name))

    @on_topic("get_schema")
    async def find_schema(self, name: TopicName, schema: Schema) -> int:
        """The version that a schema has; LATEST: the topic does not have it."""
        found = await self._broker.schemas.find(name, schema)
        return LATEST if found is None else found

    @on_topic("get_schema")
    async def test_schema(self, name: TopicName, schema: Schema) -> str:
        """That it would be let in: the strategy by which. Raises IncompatibleSchema."""
        strategy = _strategy(await _in_force(self._broker, name))
        await self._broker.schemas.check(name, schema, strategy)
        return strategy


async def version_of_producer(broker: Broker, topic: Topic, schema: Schema | None) -> int | None:
    """Of what it publishes; None: it does without. Raises IncompatibleSchema."""
    if schema is not None:
        return await _add(broker, topic.name, schema)
    await topic.policies.wait()
    in_force = topic.policies.in_force()
    enforced = in_force is not None and in_force.value("schema_validation")[0]
    if enforced and await broker.schemas.versions(topic.name):
        raise IncompatibleSchema(
            "Producers cannot connect or send message without a schema to topics with a schema when "
            "SchemaValidationEnforced is enabled"
        )
    return None


async def check_consumer(broker: Broker, topic: Topic, schema: Schema | None) -> None:
    """It can read what the topic has, or brings the schema of a topic that has nothing. Raises IncompatibleSchema."""
    if schema is None:
        return
    used = len(topic.producers) or await topic.log.last_message_id() is not None
    if used or await broker.schemas.versions(topic.name):
        strategy = _strategy(await _in_force(broker, topic.name))
        await broker.schemas.check(topic.name, schema, strategy, reading=True)
    else:
        await _add(broker, topic.name, schema)


async def _add(broker: Broker, name: TopicName, schema: Schema, *, by_operator: bool = False) -> int:
    async def strategy() -> str | None:
        in_force = await _in_force(broker, name)
        return _strategy(in_force) if by_operator or in_force.value("schema_auto_update")[0] else None

    return await broker.schemas.add(name, schema, strategy)


async def _in_force(broker: Broker, name: TopicName) -> Resolved:
    """By what is stored now, whether there is such a topic or not."""
    above = await broker.namespaces.in_force(name.full_namespace)
    own = (await broker.partitioned.read(name.whole)).policies
    path = topic_path(name.whole)
    if (stored := await broker.metadata.get(path)) is not None:
        own = TopicRecord.decode(stored.value, path).policies
    return Resolved((("topic", own), *above.levels))


def _strategy(in_force: Resolved) -> str:
    found: str = in_force.value("schema_compatibility")[0]
    return _DEFAULT_STRATEGY if found == "UNDEFINED" else found
