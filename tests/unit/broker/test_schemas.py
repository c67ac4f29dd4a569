"""Schemas of topics: versions whoever adds them at once, what fits, and what goes with a topic."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker import Broker
from magnetar.broker.log.records import SchemaRow, SchemasRecord, schema_path, schemas_path
from magnetar.broker.service.broker import BrokerService
from magnetar.broker.topics.core.schemas import MAX_SCHEMA_BYTES, Schema, SchemaType, check_fits
from magnetar.broker.topics.schemas import LATEST, MAX_VERSIONS, Schemas, remove_schemas
from magnetar.metadata.embedded import EmbeddedMetadataStore
from magnetar.metadata.store import Create
from magnetar.proto import commands as c
from magnetar.proto.errors import ConnectionLost, IncompatibleSchema, InvalidArgument, NotFound, TopicNotFound
from magnetar.proto.ids import TopicName
from support.broker_kit import TOPIC, FakeClient, FakeClock, running_broker
from support.memory_metadata import CrashingStore, MemoryMetadataStore, ModelKeyValue
from unit.broker.test_partitions_on_zookeeper import brokers

TEXT = Schema(SchemaType.STRING, b"", {})


class Everyone:
    """May do everything."""

    def authorize(self, operation: str, resource: str) -> None:
        """Allows it."""


ME = Everyone()


def record(*fields: Any, kind: SchemaType = SchemaType.AVRO, **more: Any) -> Schema:
    """Of fields that are names of integers, or more than that."""
    rows = [{"name": one, "type": "int"} if isinstance(one, str) else one for one in fields]
    definition = {"type": "record", "name": "R", "fields": rows, **more}
    return Schema(kind, json.dumps(definition).encode(), {})


A, AB, B = record("a"), record("a", "b"), record("b")
A_AND = record("a", {"name": "b", "type": "int", "default": 0})
NULL_OR_TEXT = ["null", "string"]


def test_which_are_the_same() -> None:
    other = Schema(
        SchemaType.AVRO, A.definition.replace(b'"name": "R", ', b"").replace(b"}]", b'}], "name":"R"'), {}
    )
    assert other.definition != A.definition
    assert other.fingerprint() == A.fingerprint() == record("a", doc="numbers").fingerprint()
    assert (
        record({"name": "doc", "type": "int"}).fingerprint()
        != record({"name": "x", "type": "int"}).fingerprint()
    )
    assert A.fingerprint() != AB.fingerprint()


@pytest.mark.parametrize(
    ("strategy", "last", "new", "fits"),
    [
        ("BACKWARD", AB, A, True),  # it reads less
        ("BACKWARD", A, AB, False),  # nothing was written of what it wants
        ("BACKWARD", A, A_AND, True),
        ("FORWARD", A, AB, True),
        ("FORWARD", AB, A, False),
        ("FULL", A, AB, False),
        ("FULL", AB, A, False),
        ("FULL", A, A_AND, True),
        ("FULL_TRANSITIVE", A_AND, A, True),
        ("FULL", A, record({"name": "a", "type": "string"}), False),
        ("FULL", A, record("a", {"name": "b", "type": NULL_OR_TEXT, "default": None}), True),
        ("FULL", A, record("a", {"name": "b", "type": NULL_OR_TEXT, "default": "x"}), False),
        ("BACKWARD", A, record({"name": "a", "type": "long"}), True),
        ("FORWARD", A, record({"name": "a", "type": "long"}), False),
        ("ALWAYS_INCOMPATIBLE", A, A_AND, False),
    ],
)
@pytest.mark.parametrize("kind", [SchemaType.AVRO, SchemaType.JSON])
def test_what_fits(strategy: str, last: Schema, new: Schema, *, fits: bool, kind: SchemaType) -> None:
    last, new = last._replace(type=kind), new._replace(type=kind)
    if fits:
        check_fits(new, [last], strategy)
    else:
        with pytest.raises(IncompatibleSchema):
            check_fits(new, [last], strategy)


@pytest.mark.parametrize(
    "schema",
    [
        Schema(SchemaType.AVRO, b"no", {}),
        Schema(SchemaType.JSON, b"[" * 100_000, {}),
        Schema(SchemaType.AVRO, b'{"type": "recrd"}', {}),
        Schema(SchemaType.STRING, b"text", {}),
        Schema(SchemaType.AUTO_CONSUME, b"", {}),
        Schema(SchemaType.PROTOBUF_NATIVE, bytes(MAX_SCHEMA_BYTES), {}),
    ],
)
async def test_what_is_none(schema: Schema) -> None:
    async with running_broker() as broker:
        with pytest.raises(InvalidArgument):
            await BrokerService(broker).schemas.set_schema(ME, "orders", schema)


@pytest.mark.parametrize("kind", SchemaType)
def test_rule_47_the_size_of_a_schema_is_looked_at_before_it_is(kind: SchemaType) -> None:
    """A parser takes seconds for a frame full of small objects, in which nobody else is served."""
    with pytest.raises(InvalidArgument, match="at most 524,288 bytes"):
        Schema(kind, b"{" * (MAX_SCHEMA_BYTES + 1), {}).check()


def test_rule_47_a_definition_that_is_nested_too_deeply_is_none() -> None:
    definition = '{"type":"array","items":' * 700 + '"int"' + "}" * 700
    schema = Schema(SchemaType.AVRO, definition.encode(), {}).check()
    with pytest.raises(InvalidArgument):
        check_fits(schema, [], "FULL")


async def test_who_reads_has_to_read_what_was_written_whatever_writers_have_to() -> None:
    async with running_broker() as broker:
        await BrokerService(broker).schemas.set_schema(ME, "orders", AB)
        await broker.schemas.check(TOPIC, A, "FORWARD", reading=True)
        with pytest.raises(IncompatibleSchema):
            await broker.schemas.check(TOPIC, A, "FORWARD")


async def always() -> str:
    return "ALWAYS_COMPATIBLE"


@pytest.mark.parametrize("lag_s", [0.0, 0.4])
async def test_two_brokers_at_once_lose_none(lag_s: float) -> None:
    async with brokers(2, 0.0, lag_s) as (one, other):
        wanted = [record(f"f{number}") for number in range(10)]
        adding = [
            broker.schemas.add(TOPIC, schema, always) for schema in wanted for broker in (one, other, one)
        ]
        versions = await asyncio.gather(*adding)
        assert sorted(set(versions)) == list(range(10))
        assert all(len(set(versions[at : at + 3])) == 1 for at in range(0, 30, 3))
        for at, schema in zip(versions[::3], wanted, strict=True):
            found = await other.schemas.get(TOPIC, at)
            assert found is not None
            assert (found.version, found.schema) == (at, schema)


@pytest.mark.parametrize("store", ["embedded", "zookeeper"])
async def test_as_many_as_there_may_be_go_at_once(store: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        if store == "embedded":
            embedded = EmbeddedMetadataStore(str(tmp_path))
            stack.push_async_callback(embedded.close)
            broker = await stack.enter_async_context(running_broker(metadata=embedded))
        else:
            (broker,) = await stack.enter_async_context(brokers(1, 0.0))
        name = TopicName.parse("x" * 200)
        rows = [
            SchemaRow(SchemaType.AVRO, record(f"f{number}").fingerprint()) for number in range(MAX_VERSIONS)
        ]
        for at in range(0, MAX_VERSIONS, 250):
            nodes = [Create(schema_path(name, number), b"") for number in range(at, at + 250)]
            await broker.metadata.commit(nodes)
        await broker.metadata.create(schemas_path(name), SchemasRecord(0, rows).encode())
        with pytest.raises(InvalidArgument, match="no more are kept"):
            await broker.schemas.add(name, B, always)
        assert await broker.schemas.add(name, record("f7"), always) == 7
        assert await broker.schemas.delete(name) == MAX_VERSIONS
        assert await broker.schemas.add(name, B, always) == MAX_VERSIONS + 1
        await remove_schemas(broker.metadata, name)
        assert await broker.metadata.children("/schemas") == []


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("what", ["add", "delete", "remove"])
async def test_a_crash_at_any_write_leaves_all_of_it_or_nothing(what: str, *, after: bool) -> None:
    at, done = 0, False
    while not done:
        disk = ModelKeyValue()
        store = CrashingStore(disk)

        async def make(_: TopicName, nodes: Any, store: MemoryMetadataStore = store) -> None:
            await store.commit(nodes)

        schemas = Schemas(store, FakeClock(), make)
        for schema in (A, AB):
            await schemas.add(TOPIC, schema, always)
        store.writes, store.at, store.after = 0, at, after
        try:
            if what == "add":
                await schemas.add(TOPIC, B, always)
            elif what == "delete":
                await schemas.delete(TOPIC)
            else:
                await remove_schemas(store, TOPIC)
            done = True
        except ConnectionLost:
            pass
        heir = MemoryMetadataStore(disk)
        nodes = await heir.children("/schemas/public/default/orders")
        found = await heir.get("/schemas/public/default/orders")
        rows = [] if found is None else SchemasRecord.decode(found.value, "").rows
        assert len(nodes) == len(rows)
        assert len(rows) == (2 if not done and not after else 3 if what == "add" else 0)
        at += 1
    assert at == 2, "one write"


async def test_a_deletion_has_a_number_and_force_begins_anew() -> None:
    async with running_broker() as broker:
        service = BrokerService(broker).schemas
        assert [await service.set_schema(ME, "orders", one) for one in (A, A_AND)] == [0, 1]
        assert await service.delete_schemas(ME, "orders") == 2
        for version in (LATEST, 0, 1, 2):
            with pytest.raises(NotFound, match="Schema not found"):
                await service.get_schema(ME, "orders", version=version)
        assert await service.set_schema(ME, "orders-partition-3", TEXT) == 3
        assert [one.version for one in await service.get_schemas(ME, "orders")] == [3]
        assert await service.find_schema(ME, "non-persistent://public/default/orders", TEXT) == 3
        assert await service.delete_schemas(ME, "orders", force=True) == LATEST
        assert await service.set_schema(ME, "orders", TEXT) == 0


@pytest.mark.parametrize("partitions", [0, 2])
async def test_they_go_with_their_topic(partitions: int) -> None:
    async with running_broker() as broker:
        service, client = BrokerService(broker), FakeClient(broker)
        await service.schemas.set_schema(ME, "orders", A)
        await client.ask(c.CreateTopic, "orders", partitions)
        await service.schemas.set_schema(ME, "orders", A_AND)
        if partitions:
            left = await client.ask(c.DeleteTopic, "orders")
            for number in left["partitions"]:
                await client.ask(c.DeleteTopic, f"orders-partition-{number}")
                assert len(await service.schemas.get_schemas(ME, "orders")) == 2
        await client.ask(c.DeleteTopic, "orders")
        assert await broker.metadata.children("/schemas") == []


async def opens(broker: Broker, schema: Schema | None, topic: str = "orders") -> int | None:
    """As a producer, which leaves again."""
    port: Any = FakePort()
    opened = await BrokerService(broker).create_producer(
        ME, topic, new_port=lambda epoch: port, schema=schema
    )
    opened.topic.producer_left(opened.session, lost=False)
    return opened.schema_version


class FakePort:
    """Of a producer that sends nothing."""

    peer = None

    def hold(self, reason: str) -> None:
        """Nothing to hold."""


async def test_what_policies_let_in() -> None:
    async with running_broker() as broker:
        service = BrokerService(broker)

        async def policies(**changes: Any) -> None:
            await service.change_namespace_policies(ME, "public/default", changes)

        assert await opens(broker, None) is None
        await policies(schema_auto_update=False)
        with pytest.raises(IncompatibleSchema, match="schema auto updating is disabled"):
            await opens(broker, A)
        await service.schemas.set_schema(ME, "orders", A)
        assert await opens(broker, A) == 0
        await policies(schema_auto_update=True, schema_validation=True)
        with pytest.raises(IncompatibleSchema, match="without a schema"):
            await opens(broker, None)
        assert await opens(broker, None, "others") is None
        with pytest.raises(IncompatibleSchema, match="exists schema type AVRO, new schema type STRING"):
            await opens(broker, TEXT)
        with pytest.raises(IncompatibleSchema):
            await opens(broker, AB)
        await service.change_topic_policies(ME, "orders", {"schema_compatibility": "FORWARD"})
        assert await opens(broker, AB) == 1
        assert await service.schemas.test_schema(ME, "orders", AB) == "FORWARD"
        await service.change_topic_policies(ME, "orders", {"schema_compatibility": "BACKWARD_TRANSITIVE"})
        with pytest.raises(IncompatibleSchema):  # the first one has no b
            await opens(broker, record("b"))
        await service.change_topic_policies(ME, "orders", {"schema_compatibility": "ALWAYS_COMPATIBLE"})
        assert await opens(broker, TEXT) == 2
        with pytest.raises(TopicNotFound):
            await service.schemas.add_schema(ME, "none", A)
