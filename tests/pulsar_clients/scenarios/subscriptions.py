"""The four types of subscription, and who gets what."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from pulsar import BatchingType, ConsumerKeySharedPolicy, ConsumerType, KeySharedMode

from pulsar_clients.program import Program, error_name, scenario, short

SHARED: dict[str, Any] = {"consumer_type": ConsumerType.Shared}
FAILOVER: dict[str, Any] = {"consumer_type": ConsumerType.Failover}
KEY_SHARED: dict[str, Any] = {"consumer_type": ConsumerType.KeyShared}
HALVES = ((0, 32767), (32768, 65535))


def drained(consumers: Sequence[Any], count: int) -> list[list[Any]]:
    """What each got, until they have `count` messages together; all are acknowledged."""
    got: list[list[Any]] = [[] for _ in consumers]
    waits = 0
    while sum(map(len, got)) < count:
        before = sum(map(len, got))
        for consumer, of_it in zip(consumers, got):
            try:
                while True:
                    message = consumer.receive(50)
                    of_it.append(message)
                    consumer.acknowledge(message)
            except Exception as error:
                if error_name(error) != "Timeout":
                    raise
        waits = waits + 1 if sum(map(len, got)) == before else 0
        if waits > 100:
            raise TimeoutError(f"{sum(map(len, got))} of {count} messages came")
    return got


def texts(messages: Sequence[Any]) -> list[str]:
    return [message.data().decode() for message in messages]


@short
def exclusive_is_for_one(p: Program) -> Any:
    topic = p.topic()
    first = p.consumer(topic)
    found = {
        "same client": p.fails(p.consumer, topic),
        "other client": p.fails(p.consumer, topic, client=p.client()),
    }
    p.send(p.producer(topic), "a")
    got = p.receive(first, 1)
    first.close()
    return found | {"got": got, "afterwards": p.fails(p.consumer, topic, client=p.client())}


@short
def subscriptions_are_independent(p: Program) -> Any:
    topic = p.topic()
    consumers = [p.consumer(topic, name) for name in ("one", "two")]
    p.send(p.producer(topic), "a", "b")
    return [p.receive(consumer, 2) for consumer in consumers]


@short
def shared_gives_each_message_once(p: Program) -> Any:
    topic = p.topic()
    consumers = [p.consumer(topic, **SHARED, receiver_queue_size=10, client=p.client()) for _ in range(3)]
    p.send_all(p.producer(topic), (f"{at:03}" for at in range(90)))
    got = [texts(of_it) for of_it in drained(consumers, 90)]
    return {
        "all": sorted(functools.reduce(operator.iadd, got, [])) == [f"{at:03}" for at in range(90)],
        "each got some": all(got),
        "in order for each": all(of_it == sorted(of_it) for of_it in got),
        "then": [p.nothing(consumer) for consumer in consumers],
    }


@short
def shared_gives_back_what_was_not_acknowledged(p: Program) -> Any:
    topic = p.topic()
    first = p.consumer(topic, **SHARED, client=p.client())
    p.send(p.producer(topic), *"abcde")
    got = p.receive(first, 5, ack=False)
    first.close()
    second = p.consumer(topic, **SHARED, client=p.client())
    return {"first": got, "second": sorted(p.receive(second, 5), key=lambda one: one["data"])}


@scenario
def shared_gives_back_what_lay_in_a_queue(p: Program) -> Any:
    topic = p.topic()
    first = p.consumer(topic, **SHARED, client=p.client())
    p.send(p.producer(topic), *"abcde")
    p.receive(first, 1)
    second = p.consumer(topic, **SHARED, client=p.client())
    first.close()
    return sorted(p.receive(second, 4, plain=True))


def _active(p: Program, topic: str) -> str:
    """The name of the consumer that gets messages: that depends on a hash of the names."""
    return str(p.stats(topic)["subscriptions"]["s"]["activeConsumerName"])


@short
def failover_has_one_after_another(p: Program) -> Any:
    topic = p.topic()
    consumers = {name: p.consumer(topic, **FAILOVER, consumer_name=name, client=p.client()) for name in "ab"}
    first = consumers.pop(_active(p, topic))
    (second,) = consumers.values()
    producer = p.producer(topic)
    p.send(producer, *"abcd")
    before = p.receive(first, 2)
    left = p.receive(first, 2, ack=False)
    idle = p.nothing(second)
    first.close()
    after = p.receive(second, 2)
    p.send(producer, "e")
    return {"first": before, "left": left, "second idle": idle, "second": after, "new": p.receive(second, 1)}


@scenario
def failover_until_none_is_left(p: Program) -> Any:
    topic = p.topic()
    consumers = {name: p.consumer(topic, **FAILOVER, consumer_name=name, client=p.client()) for name in "bac"}

    producer = p.producer(topic)
    found = []
    for at in range(3):
        p.send(producer, str(at))
        active = consumers.pop(
            p.until(lambda: _active(p, topic) in consumers and _active(p, topic), "one is active")
        )
        found.append([p.receive(active, 1), [p.nothing(one) for one in consumers.values()]])
        p.until(lambda: p.backlog(topic) == 0, "it is acknowledged")
        active.close()
    return found


@short
def key_shared_keeps_the_order_of_a_key(p: Program) -> Any:
    topic = p.topic()
    consumers = [p.consumer(topic, **KEY_SHARED, client=p.client()) for _ in range(2)]
    p.send_all(p.producer(topic), [(f"{at:03}", {"partition_key": f"key {at % 20}"}) for at in range(200)])
    got = drained(consumers, 200)
    keys = [{message.partition_key() for message in of_it} for of_it in got]
    orders = [
        [int(message.data()) for message in of_it if message.partition_key() == key]
        for of_it, found in zip(got, keys)
        for key in found
    ]
    return {
        "keys": len(keys[0] | keys[1]),
        "at both": len(keys[0] & keys[1]),
        "each got some": all(keys),
        "in order": all(order == sorted(order) for order in orders),
    }


def _sticky(p: Program, topic: str, *ranges: Sequence[tuple[int, int]]) -> list[Any]:
    return [
        p.consumer(
            topic,
            **KEY_SHARED,
            key_shared_policy=ConsumerKeySharedPolicy(KeySharedMode.Sticky, False, list(of_it)),
            client=p.client(),
        )
        for of_it in ranges
    ]


@short
def sticky_ranges(p: Program) -> Any:
    topic = p.topic()
    consumers = _sticky(p, topic, [HALVES[0]], [HALVES[1]])
    p.send_all(p.producer(topic), [(f"{at:02}", {"partition_key": f"key {at}"}) for at in range(60)])
    return [texts(of_it) for of_it in drained(consumers, 60)]


@short
def sticky_ranges_by_ordering_key(p: Program) -> Any:
    topic = p.topic()
    consumers = _sticky(p, topic, [HALVES[0]], [HALVES[1]])
    p.send_all(
        p.producer(topic),
        [(f"{at:02}", {"ordering_key": f"key {at}", "partition_key": "same"}) for at in range(30)],
    )
    return [texts(of_it) for of_it in drained(consumers, 30)]


@scenario
def sticky_ranges_in_quarters(p: Program) -> Any:
    topic = p.topic()
    quarters = [(at, at + 16383) for at in range(0, 65536, 16384)]
    consumers = _sticky(p, topic, [quarters[0], quarters[2]], [quarters[1]], [quarters[3]])
    keys = [*(f"k{at}" for at in range(40)), "ü", "a longer key, of several words", "日本"]
    p.send_all(p.producer(topic), [(key, {"partition_key": key}) for key in keys])
    return [texts(of_it) for of_it in drained(consumers, len(keys))]


@short
def sticky_ranges_that_overlap(p: Program) -> Any:
    topic = p.topic()
    _sticky(p, topic, [(0, 40000)])
    return {
        "overlap": p.fails(_sticky, p, topic, [(40000, 50000)]),
        "beside": p.fails(_sticky, p, topic, [(40001, 50000)]),
        "within": p.fails(_sticky, p, topic, [(45000, 45001)]),
        "over itself": p.fails(_sticky, p, topic, [(60000, 61000), (60500, 62000)]),
        "turned around": p.fails(_sticky, p, topic, [(63000, 62500)]),
    }


@scenario
def sticky_ranges_with_a_gap(p: Program) -> Any:
    topic = p.topic()
    (low,) = _sticky(p, topic, [HALVES[0]])
    keys = [f"key {at}" for at in range(10)]
    p.send_all(p.producer(topic), [(key, {"partition_key": key}) for key in keys])
    got = p.until(lambda: drained([low], 1)[0], "the lower half comes")
    first = texts(got)
    (high,) = _sticky(p, topic, [HALVES[1]])
    rest = drained([low, high], len(keys) - len(first))
    return {"low": first + texts(rest[0]), "high": texts(rest[1])}


@scenario
def sticky_beside_automatic(p: Program) -> Any:
    topic = p.topic()
    _sticky(p, topic, [(0, 100)])
    return p.fails(p.consumer, topic, **KEY_SHARED, client=p.client())


@short
def key_shared_with_batches_by_key(p: Program) -> Any:
    topic = p.topic()
    consumers = _sticky(p, topic, [HALVES[0]], [HALVES[1]])
    producer = p.producer(
        topic,
        batching_enabled=True,
        batching_type=BatchingType.KeyBased,
        batching_max_publish_delay_ms=60_000,
    )
    p.send_all(producer, [(f"{at:02}", {"partition_key": f"key {at % 8}"}) for at in range(40)])
    return [sorted(texts(of_it)) for of_it in drained(consumers, 40)]


@scenario
def key_shared_with_mixed_batches(p: Program) -> Any:
    """A batch goes where its first key goes."""
    topic = p.topic()
    consumers = _sticky(p, topic, [HALVES[0]], [HALVES[1]])
    producer = p.producer(
        topic, batching_enabled=True, batching_max_messages=5, batching_max_publish_delay_ms=60_000
    )
    p.send_all(producer, [(f"{at:02}", {"partition_key": f"key {at}"}) for at in range(50)])
    return [texts(of_it) for of_it in drained(consumers, 50)]


@scenario
def key_shared_without_keys(p: Program) -> Any:
    topic = p.topic()
    consumers = [p.consumer(topic, **KEY_SHARED, client=p.client()) for _ in range(2)]
    p.send_all(p.producer(topic), (f"{at:02}" for at in range(40)))
    got = drained(consumers, 40)
    return sorted(texts(got[0]) + texts(got[1])) == [f"{at:02}" for at in range(40)]


@scenario
def key_shared_out_of_order(p: Program) -> Any:
    topic = p.topic()
    policy = ConsumerKeySharedPolicy(KeySharedMode.AutoSplit, True)
    consumers = [
        p.consumer(topic, **KEY_SHARED, key_shared_policy=policy, client=p.client()) for _ in range(2)
    ]
    p.send_all(p.producer(topic), [(f"{at:02}", {"partition_key": f"key {at % 9}"}) for at in range(90)])
    got = drained(consumers, 90)
    return sorted(texts(got[0]) + texts(got[1])) == [f"{at:02}" for at in range(90)]


@scenario
def key_shared_when_one_leaves(p: Program) -> Any:
    topic = p.topic()
    first, second = (p.consumer(topic, **KEY_SHARED, client=p.client()) for _ in range(2))
    producer = p.producer(topic)
    p.send_all(producer, [(f"{at:02}", {"partition_key": f"key {at % 9}"}) for at in range(18)])
    first.close()
    (got,) = drained([second], 18)
    orders = {
        key: [int(one.data()) for one in got if one.partition_key() == key]
        for key in {one.partition_key() for one in got}
    }
    return {"all": sorted(texts(got)), "in order": all(order == sorted(order) for order in orders.values())}


@scenario
def key_shared_with_delays(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, **KEY_SHARED)
    producer = p.producer(topic)
    p.send(producer, "late", partition_key="a", deliver_after=timedelta(seconds=2))
    p.send(producer, "soon", partition_key="b")
    return p.receive(consumer, 2, plain=True)


@short
def types_that_do_not_go_together(p: Program) -> Any:
    kinds = {
        "exclusive": ConsumerType.Exclusive,
        "shared": ConsumerType.Shared,
        "failover": ConsumerType.Failover,
        "key_shared": ConsumerType.KeyShared,
    }
    found: dict[str, Any] = {}
    for first in ("shared", "failover", "key_shared", "exclusive"):
        topic = p.topic(first)
        p.consumer(topic, consumer_type=kinds[first])
        found[first] = {
            second: p.fails(p.consumer, topic, consumer_type=kinds[second], client=p.client())
            for second in kinds
            if second != first
        }
    return found


@short
def the_type_may_change_when_all_are_gone(p: Program) -> Any:
    topic = p.topic()
    p.send(p.producer(topic), *"abc")
    found: dict[str, Any] = {}
    for name, kind in (("shared", SHARED), ("failover", FAILOVER), ("key_shared", KEY_SHARED)):
        consumer = p.consumer(topic, **kind)
        found[name] = p.receive(consumer, 1, plain=True)
        p.until(lambda: p.backlog(topic) == 3 - len(found), "the acknowledgement arrived")
        consumer.close()
    return found
