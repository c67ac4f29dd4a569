"""Topics as they come and go: names, domains, termination, what does not exist."""

from __future__ import annotations

from typing import Any

from pulsar_clients.program import EARLIEST, Program, path, scenario, short
from pulsar_clients.scenarios.subscriptions import SHARED

TIMEOUT: dict[str, Any] = {"operation_timeout_seconds": 3}


@short
def a_topic_is_made_when_it_is_used(p: Program) -> Any:
    by_producer, by_consumer, never = (p.topic(name) for name in ("producer", "consumer", "never"))
    p.producer(by_producer)
    p.consumer(by_consumer)
    topics = p.admin.must("GET", "persistent/public/default")
    return [topic in topics for topic in (by_producer, by_consumer, never)]


@short
def short_names(p: Program) -> Any:
    topic = p.topic()
    name = topic.rpartition("/")[2]
    consumer = p.consumer(topic)
    found = []
    for given in (name, f"public/default/{name}", topic):
        producer = p.producer(given)
        p.send(producer, given.count("/") * "x" + "name")
        found.append(p.shown(producer.topic()))
    return {"names": found, "got": p.receive(consumer, 3, topics=True)}


@short
def names_that_are_none(p: Program) -> Any:
    names = ("persistent://public/default", "persistent://", "a/b", "other://public/default/x", "")
    client = p.client(**TIMEOUT)
    return {
        name: [p.fails(p.producer, name, client=client), p.fails(p.consumer, name, client=client)]
        for name in names
    }


@scenario
def unusual_names(p: Program) -> Any:
    client = p.client(**TIMEOUT)
    found: dict[str, Any] = {}
    for name in ("with space", "ü", "a:b=c.d-e_f", "A" * 150, "per%20cent"):
        topic = p.topic(name)
        error = p.fails(p.producer, topic, client=client)
        found[name] = error
        if error == "no error":
            p.send(p.producer(topic, client=client), "a")
            found[name] = p.receive(p.consumer(topic, client=client), 1, topics=True)
    return found


@short
def a_namespace_that_is_not_there(p: Program) -> Any:
    topic = p.topic(namespace="public/nowhere")
    client = p.client(**TIMEOUT)
    return {
        "producer": p.fails(p.producer, topic, client=client),
        "consumer": p.fails(p.consumer, topic, client=client),
        "reader": p.fails(p.reader, topic, client=client),
    }


@scenario
def a_tenant_that_is_not_there(p: Program) -> Any:
    topic = p.topic(namespace="nobody/nowhere")
    client = p.client(**TIMEOUT)
    return {
        "producer": p.fails(p.producer, topic, client=client),
        "consumer": p.fails(p.consumer, topic, client=client),
    }


@short
def topics_are_not_made_here(p: Program) -> Any:
    namespace = p.namespace(autoTopicCreation={"allowAutoTopicCreation": False})
    topic = p.topic(namespace=namespace)
    client = p.client(**TIMEOUT)
    found = {
        "producer": p.fails(p.producer, topic, client=client),
        "consumer": p.fails(p.consumer, topic, client=client),
        "reader": p.fails(p.reader, topic, client=client),
        "partitions": p.fails(client.get_topic_partitions, topic),
    }
    p.admin.must("PUT", path(topic))
    return found | {"made": p.fails(p.producer, topic, client=client)}


@scenario
def topics_are_made_with_partitions(p: Program) -> Any:
    policy = {"allowAutoTopicCreation": True, "topicType": "partitioned", "defaultNumPartitions": 3}
    topic = p.topic(namespace=p.namespace(autoTopicCreation=policy))
    consumer = p.consumer(topic)
    sent = p.send(p.producer(topic), *map(str, range(6)))
    return {
        "names": len(p.shared_client.get_topic_partitions(topic)),
        "used": sorted({one.partition for one in sent}),
        "got": sorted(p.receive(consumer, 6, plain=True)),
    }


@short
def subscriptions_are_not_made_here(p: Program) -> Any:
    namespace = p.namespace(autoSubscriptionCreation={"allowAutoSubscriptionCreation": False})
    topic = p.topic(namespace=namespace)
    p.admin.must("PUT", path(topic))
    client = p.client(**TIMEOUT)
    refused = p.fails(p.consumer, topic, client=client)
    p.admin.must("PUT", f"{path(topic)}/subscription/s", EARLIEST)
    p.send(p.producer(topic, client=client), "a")
    return {
        "refused": refused,
        "reader": p.fails(p.reader, topic, client=client),
        "made": p.receive(p.consumer(topic, client=client), 1),
    }


@short
def a_topic_that_is_terminated(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    p.send(producer, *"abc")
    consumer = p.consumer(topic)
    first = p.receive(consumer, 1)
    p.admin.must("POST", f"{path(topic)}/terminate")
    return {
        "send": p.fails(producer.send, b"late"),
        "producer": p.fails(p.producer, topic, client=p.client(**TIMEOUT)),
        "first": first,
        "rest": p.receive(consumer, 2),
        "then": p.nothing(consumer),
        "new consumer": p.receive(p.consumer(topic, "t"), 3),
        "reader": [one["data"] for one in p.read(p.reader(topic))],
    }


@scenario
def a_topic_that_is_terminated_while_empty(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic)
    p.admin.must("POST", f"{path(topic)}/terminate")
    return {
        "producer": p.fails(p.producer, topic, client=p.client(**TIMEOUT)),
        "consumer": p.nothing(consumer),
    }


@short
def a_topic_that_is_deleted(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    p.send(producer, "old")
    consumer = p.consumer(topic)
    in_use = p.admin("DELETE", path(topic)).status
    producer.close()
    consumer.close()
    status = p.admin("DELETE", path(topic)).status
    consumer = p.consumer(topic)
    p.send(p.producer(topic), "new")
    return {
        "in use": in_use,
        "deleted": status,
        "got": p.receive(consumer, 1, plain=True),
        "then": p.nothing(consumer),
    }


@scenario
def a_topic_that_is_deleted_by_force(p: Program) -> Any:
    """Who is connected comes back, to a topic that is made anew."""
    topic = p.topic()
    producer = p.producer(topic)
    p.send(producer, "old")
    consumer = p.consumer(topic)
    status = p.admin("DELETE", f"{path(topic)}?force=true").status
    p.until(lambda: topic in p.admin.must("GET", "persistent/public/default"), "the topic is there again")
    p.send(producer, "new")
    found = p.until(lambda: p.receive(consumer, 1, plain=True) == ["new"], "the new message comes")
    return {"deleted": status, "new": found}


@short
def messages_that_are_not_stored(p: Program) -> Any:
    topic = p.topic(domain="non-persistent")
    producer = p.producer(topic)
    p.send(producer, "nobody listens")
    consumers = [p.consumer(topic, name) for name in ("one", "two")]
    producer.send(b"a", properties={"x": "1"}, partition_key="k")
    p.send_all(p.producer(topic, batching_enabled=True, batching_max_publish_delay_ms=60_000), "bcd")
    found = [p.receive(consumer, 4, ids=False) for consumer in consumers]
    consumers[0].close()
    p.send(producer, "lost")
    again = p.consumer(topic, "one")
    return {"got": found, "again": p.nothing(again), "other": p.receive(consumers[1], 1, plain=True)}


@scenario
def shared_without_storage(p: Program) -> Any:
    topic = p.topic(domain="non-persistent")
    consumer = p.consumer(topic, **SHARED)
    p.send(p.producer(topic), *"abcd")
    return p.receive(consumer, 4, plain=True)


@scenario
def ids_of_what_is_not_stored(p: Program) -> Any:
    topic = p.topic(domain="non-persistent")
    consumer = p.consumer(topic)
    producer = p.producer(topic)
    sent = producer.send(b"a")
    got = consumer.receive(20_000).message_id()
    return [[one.partition(), one.batch_index()] for one in (sent, got)]


@scenario
def a_reader_of_what_is_not_stored(p: Program) -> Any:
    topic = p.topic(domain="non-persistent")
    return p.fails(p.reader, topic, client=p.client(**TIMEOUT))


@short
def limits_of_producers_and_consumers(p: Program) -> Any:
    namespace = p.namespace(maxProducersPerTopic=1, maxConsumersPerTopic=2, maxConsumersPerSubscription=1)
    topic = p.topic(namespace=namespace)
    client = p.client(**TIMEOUT)
    p.producer(topic, client=client)
    p.consumer(topic, **SHARED, client=client)
    return {
        "producer": p.fails(p.producer, topic, client=client),
        "same subscription": p.fails(p.consumer, topic, **SHARED, client=client),
        "other subscription": p.fails(p.consumer, topic, "t", client=client),
        "one more": p.fails(p.consumer, topic, "u", client=client),
    }


@scenario
def limits_of_subscriptions(p: Program) -> Any:
    topic = p.topic(namespace=p.namespace(maxSubscriptionsPerTopic=1))
    client = p.client(**TIMEOUT)
    p.consumer(topic, client=client)
    return {
        "second": p.fails(p.consumer, topic, "t", client=client),
        "reader": p.fails(p.reader, topic, client=client),
    }
