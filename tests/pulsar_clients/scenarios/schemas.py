"""Schemas."""

from __future__ import annotations

import json
from typing import Any

from pulsar.schema import Array, AvroSchema, Boolean, Integer, JsonSchema, Map, Record, String, StringSchema

from pulsar_clients.program import Program, scenario, short


class Person(Record):  # type: ignore[misc]
    name = String()
    age = Integer()


First = Person


class Inner(Record):  # type: ignore[misc]
    words = Array(String())
    counts = Map(Integer())


class Outer(Record):  # type: ignore[misc]
    inner = Inner()
    yes = Boolean()


def _versions(p: Program, topic: str) -> list[Any]:
    status, schemas = p.admin("GET", f"schemas/{topic.partition('://')[2]}/schemas")
    if status != 200:
        return [status]
    return [[one["version"], one["type"]] for one in schemas["getSchemaResponses"]]


@short
def text_as_a_schema(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, schema=StringSchema())
    producer = p.producer(topic, schema=StringSchema())
    producer.send("größe")
    message = p.next(consumer)
    return [message.value(), p.seen(message)]


@short
def records_as_json(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, schema=JsonSchema(Person))
    p.producer(topic, schema=JsonSchema(Person)).send(Person(name="Anna", age=7))
    value = p.next(consumer).value()
    return [value.name, value.age]


@scenario
def records_within_records(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, schema=JsonSchema(Outer))
    producer = p.producer(topic, schema=JsonSchema(Outer))
    producer.send(Outer(inner=Inner(words=["a", "b"], counts={"x": 1}), yes=True))
    return json.loads(p.next(consumer).data())


@short
def records_as_avro(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, schema=AvroSchema(Person))
    p.producer(topic, schema=AvroSchema(Person)).send(Person(name="Anna", age=7))
    message = p.next(consumer)
    return [message.value().name, message.value().age, message.data().hex()]


@scenario
def batches_with_a_schema(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(
        topic, schema=StringSchema(), batching_enabled=True, batching_max_publish_delay_ms=60_000
    )
    answered: list[Any] = []
    for name in "abc":
        producer.send_async(name, lambda result, _: answered.append(result.name))
    producer.flush()
    consumer = p.consumer(topic, schema=StringSchema())
    return {
        "got": [p.next(consumer).value() for _ in range(3)],
        "answers": p.until(lambda: len(answered) == 3 and answered, "all answer"),
    }


@short
def the_version_of_a_schema(p: Program) -> Any:
    topic = p.topic()
    p.producer(topic, schema=StringSchema()).send("a")
    p.send(p.producer(p.topic("without")), "a")
    found: dict[str, Any] = {}
    for name in (topic, p.topic("without")):
        version = p.next(p.consumer(name)).schema_version()
        found[p.shown(name)] = version.hex() if isinstance(version, bytes) else str(version)
    return found


@short
def a_schema_is_kept(p: Program) -> Any:
    topic = p.topic()
    p.producer(topic, schema=JsonSchema(Person)).send(Person(name="Anna", age=7))
    found = p.admin.must("GET", f"schemas/{topic.partition('://')[2]}/schema")
    fields = [one["name"] for one in json.loads(found["data"])["fields"]]
    return {"type": found["type"], "version": found["version"], "fields": fields}


@scenario
def a_consumer_brings_the_schema(p: Program) -> Any:
    topic = p.topic()
    p.consumer(topic, schema=JsonSchema(Person))
    return _versions(p, topic)


@short
def schemas_that_do_not_fit(p: Program) -> Any:
    topic = p.topic()
    p.producer(topic, schema=JsonSchema(Person)).send(Person(name="Anna", age=7))
    return {
        "text producer": p.fails(p.producer, topic, schema=StringSchema()),
        "text consumer": p.fails(p.consumer, topic, "text", schema=StringSchema()),
        "avro producer": p.fails(p.producer, topic, schema=AvroSchema(Person)),
        "bytes consumer": p.fails(p.consumer, topic, "bytes"),
        "versions": _versions(p, topic),
    }


@scenario
def a_schema_that_grows(p: Program) -> Any:
    class Person(Record):  # type: ignore[misc]
        name = String()
        age = Integer()
        town = String(required=False, default="Bern")

    topic = p.topic()
    found = []
    for record in (First, Person, First):
        found.append(p.fails(p.producer, topic, schema=JsonSchema(record)))
    return {"errors": found, "versions": _versions(p, topic)}


@scenario
def a_schema_that_changes_a_type(p: Program) -> Any:
    class Person(Record):  # type: ignore[misc]
        name = String()
        age = String()

    topic = p.topic()
    p.producer(topic, schema=AvroSchema(First))
    return {"changed": p.fails(p.producer, topic, schema=AvroSchema(Person)), "versions": _versions(p, topic)}


@scenario
def bytes_beside_a_schema(p: Program) -> Any:
    topic = p.topic()
    p.producer(topic, schema=StringSchema()).send("text")
    error = p.fails(p.producer, topic)
    consumer = p.consumer(topic)
    return {"producer without": error, "got": p.receive(consumer, 1)}


@scenario
def a_schema_where_there_were_bytes(p: Program) -> Any:
    topic = p.topic()
    p.send(p.producer(topic), "bytes")
    return {"then": p.fails(p.producer, topic, schema=StringSchema()), "versions": _versions(p, topic)}


@scenario
def schemas_over_partitions(p: Program) -> Any:
    topic = p.partitioned(2)
    consumer = p.consumer(topic, schema=StringSchema())
    producer = p.producer(topic, schema=StringSchema())
    for name in "abcd":
        producer.send(name)
    return {"got": sorted(p.next(consumer).value() for _ in range(4)), "versions": _versions(p, topic)}


@scenario
def a_table_view_with_a_schema(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic, schema=StringSchema())
    producer.send("one", partition_key="a")
    view = p.shared_client.create_table_view(topic, schema=StringSchema())
    return view.get("a")


@scenario
def a_wrong_object(p: Program) -> Any:
    producer = p.producer(p.topic(), schema=JsonSchema(Person))
    return p.fails(producer.send, "no record")


@scenario
def a_schema_that_an_operator_deletes(p: Program) -> Any:
    topic = p.topic()
    p.producer(topic, schema=StringSchema()).close()
    name = topic.partition("://")[2]
    before = _versions(p, topic)
    p.admin.must("DELETE", f"schemas/{name}/schema")
    return {
        "before": before,
        "after": p.admin("GET", f"schemas/{name}/schema").status,
        "then": p.fails(p.producer, topic, schema=JsonSchema(Person)),
    }
