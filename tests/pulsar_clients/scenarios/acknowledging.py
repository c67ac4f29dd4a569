"""Acknowledgement, redelivery, dead letters, seek."""

from __future__ import annotations

import time
from typing import Any

from pulsar import ConsumerDeadLetterPolicy, ConsumerType, MessageId

from pulsar_clients.program import Program, path, scenario, short, slow
from pulsar_clients.scenarios.subscriptions import FAILOVER, KEY_SHARED, SHARED, drained, texts

NACK: dict[str, Any] = {"negative_ack_redelivery_delay_ms": 100}
BATCH: dict[str, Any] = {"batching_enabled": True, "batching_max_publish_delay_ms": 60_000}


def _again(p: Program, topic: str, consumer: Any, count: int, left: int, **settings: Any) -> Any:
    """Closes a consumer whose acknowledgements leave a backlog of `left`, and shows what the next one gets."""
    p.until(lambda: p.backlog(topic) == left, f"{left} are left")
    consumer.close()
    again = p.consumer(topic, **settings)
    return {"again": p.receive(again, count, ack=False), "then": p.nothing(again)}


@short
def acknowledged_one_by_one(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic)
    p.send(p.producer(topic), *"abcdef")
    messages = [p.next(consumer) for _ in range(6)]
    for at in (0, 2, 3):
        consumer.acknowledge(messages[at])
    return _again(p, topic, consumer, 3, 3)


@short
def acknowledged_by_id(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic)
    p.send(p.producer(topic), *"abc")
    ids = [p.next(consumer).message_id() for _ in range(3)]
    consumer.acknowledge(ids[1])
    consumer.acknowledge(MessageId.deserialize(ids[0].serialize()))
    return _again(p, topic, consumer, 1, 1)


@short
def acknowledged_cumulatively(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic)
    p.send(p.producer(topic), *"abcdef")
    messages = [p.next(consumer) for _ in range(6)]
    consumer.acknowledge_cumulative(messages[3])
    return _again(p, topic, consumer, 2, 2)


@scenario
def acknowledged_cumulatively_failover(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, **FAILOVER)
    p.send(p.producer(topic), *"abcdef")
    messages = [p.next(consumer) for _ in range(6)]
    consumer.acknowledge_cumulative(messages[1].message_id())
    consumer.acknowledge(messages[4])
    return _again(p, topic, consumer, 3, 3, **FAILOVER)


@short
def cumulative_is_not_for_shared(p: Program) -> Any:
    found: dict[str, Any] = {}
    for name, kind in (("shared", SHARED), ("key_shared", KEY_SHARED)):
        topic = p.topic(name)
        consumer = p.consumer(topic, **kind)
        p.send(p.producer(topic), "a")
        found[name] = p.fails(consumer.acknowledge_cumulative, p.next(consumer))
    return found


@scenario
def acknowledged_twice(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic)
    p.send(p.producer(topic), *"ab")
    messages = [p.next(consumer) for _ in range(2)]
    found = [p.fails(consumer.acknowledge, messages[0]) for _ in range(2)]
    return {"errors": found, **_again(p, topic, consumer, 1, 1)}


@short
def batches_are_acknowledged_as_a_whole(p: Program) -> Any:
    """Without acknowledgement by index, the client waits for all messages of a batch."""
    topic = p.topic()
    consumer = p.consumer(topic)
    producer = p.producer(topic, **BATCH)
    p.send_all(producer, "abcd")
    p.send_all(producer, "efg")
    messages = [p.next(consumer) for _ in range(7)]
    for at in (0, 1, 3, 4, 5, 6):
        consumer.acknowledge(messages[at])
    p.until(lambda: p.backlog(topic) in (1, 4), "the second batch is acknowledged")
    consumer.close()
    again = p.consumer(topic)
    return {"again": p.receive(again, 4, ack=False), "then": p.nothing(again)}


def _redelivered(p: Program, consumer: Any, count: int) -> Any:
    """By content, `count` messages of a batch; a client that asks for them one by one gets the others more than once."""
    found: dict[str, Any] = {}
    while len(found) < count:
        message = p.next(consumer)
        consumer.acknowledge(message)
        row = p.seen(message)
        found[row["data"]] = row | {"redelivered": message.redelivery_count() > 0}
    return [found[name] for name in sorted(found)]


INDEXES: dict[str, Any] = {"batch_index_ack_enabled": True}


@short
def acknowledged_by_batch_index(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, **SHARED, **INDEXES)
    p.send_all(p.producer(topic, **BATCH), "abcdef")
    messages = [p.next(consumer) for _ in range(6)]
    for at in (0, 2, 5):
        consumer.acknowledge(messages[at])
    time.sleep(0.5)  # acknowledgements are sent in groups, and the backlog of Pulsar does not show these
    consumer.close()
    again = p.consumer(topic, **SHARED, **INDEXES)
    return {"again": p.receive(again, 3), "then": p.nothing(again)}


@short
def acknowledged_cumulatively_within_a_batch(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, **INDEXES)
    producer = p.producer(topic, **BATCH)
    p.send_all(producer, "abc")
    p.send_all(producer, "defg")
    messages = [p.next(consumer) for _ in range(7)]
    consumer.acknowledge_cumulative(messages[4])
    time.sleep(0.5)
    consumer.close()
    again = p.consumer(topic, **INDEXES)
    return {"again": p.receive(again, 2), "then": p.nothing(again)}


@scenario
def batch_indexes_of_several_consumers(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, **SHARED, **INDEXES, **NACK)
    p.send_all(p.producer(topic, **BATCH), "abcdef")
    messages = [p.next(consumer) for _ in range(6)]
    for at in (1, 3):
        consumer.acknowledge(messages[at])
    time.sleep(0.5)
    for at in (0, 2, 4, 5):
        consumer.negative_acknowledge(messages[at])
    return _redelivered(p, consumer, 4)


@short
def a_negative_acknowledgement(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, **SHARED, **NACK)
    p.send(p.producer(topic), "a")
    found = []
    for _ in range(3):
        message = p.next(consumer)
        found.append(p.seen(message))
        consumer.negative_acknowledge(message)
    return {"thrice": found, "got": p.receive(consumer, 1), "then": p.nothing(consumer)}


@short
def one_of_several_is_negatively_acknowledged(p: Program) -> Any:
    found: dict[str, Any] = {}
    for name, kind in (
        ("exclusive", {}),
        ("shared", SHARED),
        ("failover", FAILOVER),
        ("key_shared", KEY_SHARED),
    ):
        topic = p.topic(name)
        consumer = p.consumer(topic, **kind, **NACK)
        p.send(p.producer(topic), *"abcd")
        messages = [p.next(consumer) for _ in range(4)]
        for at in (0, 1, 3):
            consumer.acknowledge(messages[at])
        consumer.negative_acknowledge(messages[2])
        found[name] = [p.receive(consumer, 1), p.nothing(consumer)]
    return found


@short
def a_batch_is_negatively_acknowledged(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, **SHARED, **NACK)
    p.send_all(p.producer(topic, **BATCH), "abcd")
    messages = [p.next(consumer) for _ in range(4)]
    for message in messages:
        consumer.negative_acknowledge(message)
    return _redelivered(p, consumer, 4)


@scenario
def the_delay_of_a_negative_acknowledgement(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, **SHARED, negative_ack_redelivery_delay_ms=2000)
    p.send(p.producer(topic), "a")
    began = time.monotonic()
    consumer.negative_acknowledge(p.next(consumer))
    return {"got": p.receive(consumer, 1), "late enough": time.monotonic() - began > 1.3}


@short
def redelivered_on_request(p: Program) -> Any:
    found: dict[str, Any] = {}
    for name, kind in (
        ("exclusive", {}),
        ("shared", SHARED),
        ("failover", FAILOVER),
        ("key_shared", KEY_SHARED),
    ):
        topic = p.topic(name)
        consumer = p.consumer(topic, **kind)
        p.send(p.producer(topic), *"abc")
        messages = [p.next(consumer) for _ in range(3)]
        consumer.acknowledge(messages[0])
        p.until(lambda: p.backlog(topic) == 2, "one is acknowledged")  # noqa: B023
        consumer.redeliver_unacknowledged_messages()
        found[name] = sorted(p.receive(consumer, 2), key=lambda one: one["data"])
    return found


@slow
def redelivered_after_a_timeout(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, **SHARED, unacked_messages_timeout_ms=10_000)
    p.send(p.producer(topic), *"ab")
    messages = [p.next(consumer) for _ in range(2)]
    consumer.acknowledge(messages[1])
    message = consumer.receive(40_000)
    consumer.acknowledge(message)
    return p.seen(message)


@scenario
def a_timeout_that_is_too_short(p: Program) -> Any:
    return p.fails(p.consumer, p.topic(), unacked_messages_timeout_ms=1000)


def _dead(p: Program, topic: str, count: int, policy: Any, **kind: Any) -> Any:
    """Negatively acknowledges each as often as it comes."""
    consumer = p.consumer(topic, **kind, **NACK, dead_letter_policy=policy)
    found = []
    for _ in range(count):
        message = p.next(consumer)
        found.append([message.data().decode(), message.redelivery_count()])
        consumer.negative_acknowledge(message)
    return consumer, sorted(found)


def _letters(p: Program, consumer: Any, count: int) -> Any:
    found = p.receive(consumer, count, ids=False)
    for one in found:
        properties = one["properties"]
        one["properties"] = {
            name: p.shown(value) if "TOPIC" in name else "an id" if "ID" in name else value
            for name, value in sorted(properties.items())
        }
    return sorted(found, key=lambda one: one["data"])


@short
def dead_letters(p: Program) -> Any:
    topic = p.topic()
    letters = p.consumer(f"{topic}-s-DLQ", "letters")
    p.send(p.producer(topic), "bad", properties={"x": "1"}, partition_key="k")
    consumer, tried = _dead(p, topic, 3, ConsumerDeadLetterPolicy(2), **SHARED)
    found = _letters(p, letters, 1)
    p.send(p.producer(topic), "good")
    return {
        "tried": tried,
        "letters": found,
        "then": p.receive(consumer, 1),
        "backlog": p.until(lambda: p.backlog(topic) == 0, "none is left"),
    }


@scenario
def dead_letters_elsewhere(p: Program) -> Any:
    topic, elsewhere = p.topic(), p.topic("bin")
    p.send(p.producer(topic), "a", "b")
    policy = ConsumerDeadLetterPolicy(1, elsewhere, "initial")
    _, tried = _dead(p, topic, 4, policy, **SHARED)
    p.until(lambda: p.admin("GET", f"{path(elsewhere)}/stats").status == 200, "the topic is there")
    subscriptions = p.until(lambda: list(p.stats(elsewhere)["subscriptions"]), "it has a subscription")
    letters = p.consumer(elsewhere, "initial")
    return {"tried": tried, "letters": _letters(p, letters, 2), "subscriptions": subscriptions}


@scenario
def dead_letters_of_a_batch(p: Program) -> Any:
    topic = p.topic()
    letters = p.consumer(f"{topic}-s-DLQ", "letters")
    p.send_all(p.producer(topic, **BATCH), "abc")
    _dead(p, topic, 6, ConsumerDeadLetterPolicy(1), **SHARED)
    return _letters(p, letters, 3)


@scenario
def dead_letters_by_key(p: Program) -> Any:
    topic = p.topic()
    letters = p.consumer(f"{topic}-s-DLQ", "letters")
    p.send(p.producer(topic), "a", partition_key="k")
    _, tried = _dead(p, topic, 2, ConsumerDeadLetterPolicy(1), **KEY_SHARED)
    return {"tried": tried, "letters": _letters(p, letters, 1)}


# Seek.


@short
def seek_to_a_message(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic)
    p.send(p.producer(topic), *"abcdef")
    messages = [p.next(consumer) for _ in range(6)]
    for message in messages:
        consumer.acknowledge(message)
    consumer.seek(messages[2].message_id())
    return {"got": p.receive(consumer, 3), "then": p.nothing(consumer)}


@short
def seek_to_a_message_inclusively(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, start_message_id_inclusive=True)
    p.send(p.producer(topic), *"abcdef")
    messages = [p.next(consumer) for _ in range(6)]
    consumer.seek(messages[2].message_id())
    return {"got": p.receive(consumer, 4), "then": p.nothing(consumer)}


@short
def seek_to_the_ends(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic)
    producer = p.producer(topic)
    p.send(producer, *"abc")
    first = p.receive(consumer, 1)
    consumer.seek(MessageId.latest)
    none = p.nothing(consumer)
    p.send(producer, "d")
    new = p.receive(consumer, 1)
    consumer.seek(MessageId.earliest)
    return {
        "first": first,
        "at the end": none,
        "new": new,
        "all": p.receive(consumer, 4),
        "then": p.nothing(consumer),
    }


@short
def seek_to_a_time(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic)
    producer = p.producer(topic)
    p.send(producer, *"abc")
    time.sleep(0.1)
    p.send(producer, "d")
    messages = [p.next(consumer) for _ in range(4)]
    at = messages[3].publish_timestamp()
    consumer.seek(at)
    found = {"d": p.receive(consumer, 1), "then": p.nothing(consumer)}
    consumer.seek(0)
    found["all"] = p.receive(consumer, 4)
    consumer.seek(at + 3_600_000)
    p.send(producer, "e")
    return found | {"in an hour": p.receive(consumer, 1)}


@scenario
def seek_into_a_batch(p: Program) -> Any:
    found: dict[str, Any] = {}
    for inclusive in (False, True):
        topic = p.topic(str(inclusive))
        consumer = p.consumer(topic, start_message_id_inclusive=inclusive)
        producer = p.producer(topic, **BATCH)
        p.send_all(producer, "abcd")
        p.send_all(producer, "ef")
        messages = [p.next(consumer) for _ in range(6)]
        for message in messages:
            consumer.acknowledge(message)
        consumer.seek(messages[1].message_id())
        found[f"inclusive {inclusive}"] = [p.receive(consumer, 5 if inclusive else 4), p.nothing(consumer)]
    return found


@scenario
def seek_of_a_shared_subscription(p: Program) -> Any:
    topic = p.topic()
    first, second = (p.consumer(topic, **SHARED, client=p.client()) for _ in range(2))
    producer = p.producer(topic)
    p.send(producer, *"abcdef")
    before = drained([first, second], 6)
    p.until(lambda: p.backlog(topic) == 0, "all are acknowledged")
    first.seek(MessageId.earliest)
    again = drained([first, second], 6)
    return [sorted(texts(one[0]) + texts(one[1])) for one in (before, again)]


@scenario
def seek_without_a_subscription_any_more(p: Program) -> Any:
    consumer = p.consumer(p.topic())
    consumer.close()
    return p.fails(consumer.seek, MessageId.earliest)


@scenario
def many_are_unacknowledged(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, consumer_type=ConsumerType.Shared, receiver_queue_size=100)
    p.send_all(
        p.producer(topic, **BATCH, batching_max_messages=500, max_pending_messages=5000),
        map(str, range(2000)),
    )
    messages = [p.next(consumer) for _ in range(2000)]
    unacknowledged = p.stats(topic)["subscriptions"]["s"]["unackedMessages"]
    for message in messages:
        consumer.acknowledge(message)
    p.until(lambda: p.backlog(topic) == 0, "all are acknowledged")
    p.until(lambda: p.stats(topic)["subscriptions"]["s"]["unackedMessages"] == 0, "none is unacknowledged")
    return {
        "unacknowledged": unacknowledged,
        "in order": [int(one.data()) for one in messages] == list(range(2000)),
    }
