"""Partitioned topics."""

from __future__ import annotations

from typing import Any

import pulsar
from pulsar import PartitionsRoutingMode

from pulsar_clients.program import Program, path, scenario, short
from pulsar_clients.scenarios.subscriptions import FAILOVER, KEY_SHARED, SHARED, drained, texts


def _by_partition(p: Program, messages: Any) -> Any:
    return sorted([p.shown(message.topic_name()), message.data().decode()] for message in messages)


def _all(p: Program, consumer: Any, count: int) -> list[Any]:
    messages = [p.next(consumer) for _ in range(count)]
    for message in messages:
        consumer.acknowledge(message)
    return messages


@short
def names_of_partitions(p: Program) -> Any:
    topic = p.partitioned(3)
    found = {
        "partitioned": [p.shown(one) for one in p.shared_client.get_topic_partitions(topic)],
        "one of them": [p.shown(one) for one in p.shared_client.get_topic_partitions(f"{topic}-partition-1")],
        "unknown": [p.shown(one) for one in p.shared_client.get_topic_partitions(p.topic("unknown"))],
    }
    p.producer(p.topic("plain"))
    return found | {"plain": [p.shown(one) for one in p.shared_client.get_topic_partitions(p.topic("plain"))]}


@short
def all_partitions_are_consumed(p: Program) -> Any:
    topic = p.partitioned(3)
    consumer = p.consumer(topic)
    producer = p.producer(topic)
    sent = p.send(producer, *(str(at) for at in range(9)))
    got = _all(p, consumer, 9)
    left = [p.until(lambda: p.backlog(f"{topic}-partition-{at}") == 0, "none is left") for at in range(3)]  # noqa: B023
    return {
        "each": sorted({one.partition for one in sent}),
        "got": sorted(texts(got)),
        "in the order of each": all(
            [one.data() for one in got if one.message_id().partition() == at]
            == sorted(one.data() for one in got if one.message_id().partition() == at)
            for at in range(3)
        ),
        "left": left,
    }


@short
def keys_choose_partitions(p: Program) -> Any:
    topic = p.partitioned(5)
    consumer = p.consumer(topic)
    producer = p.producer(topic)
    for at in range(20):
        p.send(producer, f"key {at % 10}", partition_key=f"key {at % 10}")
    return _by_partition(p, _all(p, consumer, 20))


@scenario
def a_single_partition(p: Program) -> Any:
    topic = p.partitioned(3)
    producer = p.producer(topic, message_routing_mode=PartitionsRoutingMode.UseSinglePartition)
    sent = p.send(producer, *"abcdef")
    return {
        "partitions": len({one.partition for one in sent}),
        "got": p.receive(p.consumer(topic), 6, plain=True),
    }


@scenario
def a_router_of_its_own(p: Program) -> Any:
    topic = p.partitioned(3)
    producer = p.producer(topic, message_router=lambda message, count: int(message.data()) % count)
    p.send(producer, *map(str, range(6)))
    return _by_partition(p, _all(p, p.consumer(topic), 6))


@short
def one_partition_by_its_name(p: Program) -> Any:
    topic = p.partitioned(3)
    consumer = p.consumer(f"{topic}-partition-1")
    sent = p.send(p.producer(f"{topic}-partition-1"), "a")
    p.send(p.producer(f"{topic}-partition-2"), "b")
    return {"sent": sent, "got": p.receive(consumer, 1, topics=True), "then": p.nothing(consumer)}


@scenario
def a_partition_that_is_not_there(p: Program) -> Any:
    topic = p.partitioned(2)
    return {
        "producer": p.fails(p.producer, f"{topic}-partition-5", client=p.client(operation_timeout_seconds=3)),
        "consumer": p.fails(p.consumer, f"{topic}-partition-5", client=p.client(operation_timeout_seconds=3)),
    }


@short
def partitions_are_added(p: Program) -> Any:
    topic = p.partitioned(2)
    client = p.client()
    before = len(client.get_topic_partitions(topic))
    p.consumer(topic, client=client).close()
    p.admin.must("POST", f"{path(topic)}/partitions", 4)
    client = p.client()
    after = len(client.get_topic_partitions(topic))
    sent = p.send(p.producer(topic, client=client), *(str(at) for at in range(8)))
    got = _all(p, p.consumer(topic, client=client), 8)
    return {
        "before": before,
        "after": after,
        "used": sorted({one.partition for one in sent}),
        "got": sorted(texts(got)),
    }


@scenario
def partitions_are_not_taken_away(p: Program) -> Any:
    topic = p.partitioned(3)
    refused = p.admin("POST", f"{path(topic)}/partitions", 2).status >= 400
    return {"refused": refused, "still": len(p.shared_client.get_topic_partitions(topic))}


@scenario
def a_producer_that_starts_lazily(p: Program) -> Any:
    topic = p.partitioned(3)
    consumer = p.consumer(topic)
    producer = p.producer(
        topic,
        lazy_start_partitioned_producers=True,
        message_routing_mode=PartitionsRoutingMode.UseSinglePartition,
    )
    p.send(producer, "a", partition_key="key 1")
    started = sum(len(p.stats(f"{topic}-partition-{at}")["publishers"]) for at in range(3))
    return {"not all are started": started < 3, "got": _by_partition(p, _all(p, consumer, 1))}


@scenario
def a_named_producer_of_partitions(p: Program) -> Any:
    topic = p.partitioned(2)
    producer = p.producer(topic, producer_name="anna")
    p.send(producer, *"ab")
    return {
        "name": producer.producer_name(),
        "topic": p.shown(producer.topic()),
        "last": producer.last_sequence_id(),
        "again": p.fails(p.producer, topic, producer_name="anna", client=p.client()),
        "got": sorted(p.receive(p.consumer(topic), 2, ids=False), key=lambda one: one["data"]),
    }


@short
def batches_over_partitions(p: Program) -> Any:
    topic = p.partitioned(2)
    producer = p.producer(
        topic, batching_enabled=True, batching_max_publish_delay_ms=60_000, block_if_queue_full=True
    )
    p.send_all(producer, [(f"{at:02}", {"partition_key": f"key {at % 6}"}) for at in range(24)])
    return _by_partition(p, _all(p, p.consumer(topic), 24))


@short
def failover_over_partitions(p: Program) -> Any:
    topic = p.partitioned(4)
    consumers = {name: p.consumer(topic, **FAILOVER, consumer_name=name, client=p.client()) for name in "ab"}
    active: list[Any] = []

    def settled() -> bool:
        active[:] = [
            p.stats(f"{topic}-partition-{at}")["subscriptions"]["s"]["activeConsumerName"] for at in range(4)
        ]
        return sorted(active) == ["a", "a", "b", "b"]

    p.until(settled, "each has two partitions")
    for at in range(4):
        p.send(p.producer(f"{topic}-partition-{at}"), str(at))
    got = {name: _by_partition(p, _all(p, consumer, 2)) for name, consumer in consumers.items()}
    return {"active": active, "got": got}


@scenario
def shared_over_partitions(p: Program) -> Any:
    topic = p.partitioned(2)
    consumers = [p.consumer(topic, **SHARED, client=p.client()) for _ in range(2)]
    p.send_all(p.producer(topic), (f"{at:02}" for at in range(60)))
    got = drained(consumers, 60)
    return {"all": sorted(texts(got[0] + got[1])) == [f"{at:02}" for at in range(60)], "each": all(got)}


@scenario
def key_shared_over_partitions(p: Program) -> Any:
    topic = p.partitioned(3)
    consumers = [p.consumer(topic, **KEY_SHARED, client=p.client()) for _ in range(2)]
    p.send_all(p.producer(topic), [(f"{at:02}", {"partition_key": f"key {at % 12}"}) for at in range(60)])
    got = drained(consumers, 60)
    keys = [{one.partition_key() for one in of_it} for of_it in got]
    return {"keys": len(keys[0] | keys[1]), "at both": len(keys[0] & keys[1])}


@scenario
def partitions_are_unsubscribed(p: Program) -> Any:
    topic = p.partitioned(2)
    p.consumer(topic).unsubscribe()
    return [list(p.stats(f"{topic}-partition-{at}")["subscriptions"]) for at in range(2)]


@scenario
def seek_over_partitions(p: Program) -> Any:
    topic = p.partitioned(2)
    consumer = p.consumer(topic)
    p.send(p.producer(topic), *"abcd")
    first = sorted(p.receive(consumer, 4, plain=True))
    by_time = p.fails(consumer.seek, 0)
    again = sorted(p.receive(consumer, 4, plain=True)) if by_time == "no error" else None
    return {"first": first, "seek": by_time, "again": again}


@scenario
def negative_acknowledgement_over_partitions(p: Program) -> Any:
    topic = p.partitioned(2)
    consumer = p.consumer(topic, **SHARED, negative_ack_redelivery_delay_ms=100)
    p.send(p.producer(topic), *"abcd")
    for _ in range(4):
        consumer.negative_acknowledge(p.next(consumer))
    return sorted(p.receive(consumer, 4, ids=False), key=lambda one: one["data"])


@scenario
def a_reader_of_a_partitioned_topic(p: Program) -> Any:
    topic = p.partitioned(2)
    p.send(p.producer(topic), *"abcd")
    reader = p.reader(topic)
    return sorted(one["data"] for one in p.read(reader))


@scenario
def a_reader_of_one_partition(p: Program) -> Any:
    topic = p.partitioned(2)
    p.send(p.producer(f"{topic}-partition-1"), *"ab")
    return p.read(p.reader(f"{topic}-partition-1"), topics=True)


@scenario
def a_partitioned_topic_that_does_not_persist(p: Program) -> Any:
    topic = p.topic(domain="non-persistent")
    p.admin.must("PUT", f"{path(topic)}/partitions", 2)
    consumer = p.consumer(topic)
    p.send(p.producer(topic), *"abcd")
    return {
        "names": [p.shown(one) for one in p.shared_client.get_topic_partitions(topic)],
        "got": sorted(p.receive(consumer, 4, plain=True)),
    }


@scenario
def acknowledged_over_partitions(p: Program) -> Any:
    topic = p.partitioned(2)
    consumer = p.consumer(topic, consumer_type=pulsar.ConsumerType.Shared)
    p.send(p.producer(topic), *"abcd")
    messages = sorted((p.next(consumer) for _ in range(4)), key=lambda one: one.data())
    for message in messages[1:]:
        consumer.acknowledge(message)
    p.until(lambda: sum(p.backlog(f"{topic}-partition-{at}") for at in range(2)) == 1, "one is left")
    consumer.close()
    return p.receive(p.consumer(topic, **SHARED), 1, plain=True)
