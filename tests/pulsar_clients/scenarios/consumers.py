"""What consumers are set to, listeners, several topics, patterns."""

from __future__ import annotations

import functools
import operator
import re
import threading
from typing import Any

import pulsar
from pulsar import ConsumerBatchReceivePolicy, RegexSubscriptionMode

from pulsar_clients.program import WAIT_MS, Program, error_name, scenario, short, slow
from pulsar_clients.scenarios.subscriptions import SHARED, drained, texts


@short
def receiving_with_a_timeout(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic)
    empty = p.fails(consumer.receive, 200)
    p.send(p.producer(topic), "a")
    return {"empty": empty, "got": p.receive(consumer, 1)}


@short
def initial_positions(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    p.send(producer, *"ab")
    early, late = p.consumer(topic, "early"), p.consumer(topic, "late", latest=True)
    p.send(producer, "c")
    return {"early": p.receive(early, 3), "late": p.receive(late, 1)}


@short
def a_subscription_keeps_what_comes(p: Program) -> Any:
    topic = p.topic()
    p.consumer(topic, latest=True).close()
    p.send(p.producer(topic), *"abc")
    return {"backlog": p.backlog(topic), "got": p.receive(p.consumer(topic, latest=True), 3)}


@short
def unsubscribing(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    consumer = p.consumer(topic)
    p.send(producer, "a")
    consumer.unsubscribe()
    subscriptions = list(p.stats(topic)["subscriptions"])
    anew = p.consumer(topic, latest=True)
    nothing = p.nothing(anew)
    p.send(producer, "b")
    return {"subscriptions": subscriptions, "anew": nothing, "then": p.receive(anew, 1)}


@scenario
def unsubscribing_while_others_are_there(p: Program) -> Any:
    topic = p.topic()
    first, second = (p.consumer(topic, **SHARED, client=p.client()) for _ in range(2))
    refused = p.fails(first.unsubscribe)
    p.send(p.producer(topic), "a")
    got = texts(functools.reduce(operator.iadd, drained([second], 1), [])) if refused == "no error" else None
    return {"refused": refused, "got": got, "subscriptions": list(p.stats(topic)["subscriptions"])}


@short
def names_of_a_consumer(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, "my-subscription", consumer_name="carl")
    return {
        "consumer": consumer.consumer_name(),
        "subscription": consumer.subscription_name(),
        "topic": p.shown(consumer.topic()),
        "seen by operators": [
            one["consumerName"] for one in p.stats(topic)["subscriptions"]["my-subscription"]["consumers"]
        ],
    }


@scenario
def names_of_subscriptions(p: Program) -> Any:
    topic = p.topic()
    names = ("a/b", "ünï", "with space", "a?b=c&d", "%41", "a:b", "x" * 200)
    found = {name: p.fails(p.consumer, topic, name) for name in names}
    p.send(p.producer(topic), "a")
    return {"errors": found, "kept": sorted(p.stats(topic)["subscriptions"])}


@scenario
def a_subscription_without_a_name(p: Program) -> Any:
    return p.fails(p.consumer, p.topic(), "")


@scenario
def properties_of_a_consumer(p: Program) -> Any:
    topic = p.topic()
    p.consumer(topic, properties={"version": "1", "team": "red"})
    (found,) = p.stats(topic)["subscriptions"]["s"]["consumers"]
    return found["metadata"]


@short
def a_consumer_that_is_closed(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic)
    p.send(p.producer(topic), "a")
    message = p.next(consumer)
    consumer.close()
    return {
        "receive": p.fails(consumer.receive, 100),
        "acknowledge": p.fails(consumer.acknowledge, message),
        "unsubscribe": p.fails(consumer.unsubscribe),
    }


@scenario
def a_consumer_is_connected(p: Program) -> Any:
    consumer = p.consumer(p.topic())
    before = consumer.is_connected()
    consumer.close()
    return [before, consumer.is_connected()]


@scenario
def receiving_in_batches(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, batch_receive_policy=ConsumerBatchReceivePolicy(4, -1, 10_000))
    p.send(p.producer(topic), *"abcdefgh")
    return [texts(consumer.batch_receive()) for _ in range(2)]


@scenario
def receiving_in_batches_by_time(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, batch_receive_policy=ConsumerBatchReceivePolicy(100, -1, 2000))
    p.send(p.producer(topic), *"abc")
    return [texts(consumer.batch_receive()), texts(consumer.batch_receive())]


@scenario
def receiving_in_batches_by_size(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, batch_receive_policy=ConsumerBatchReceivePolicy(-1, 250, 10_000))
    p.send(p.producer(topic), *(name * 100 for name in "abcdef"))
    return [len(consumer.batch_receive()) for _ in range(2)]


class _Listener:
    """Keeps what comes."""

    def __init__(self, p: Program, *, acknowledge: bool = True) -> None:
        self._p = p
        self._acknowledge = acknowledge
        self._came = threading.Condition()
        self.seen: list[Any] = []
        self.error = ""

    def __call__(self, consumer: Any, message: Any) -> None:
        try:
            if self._acknowledge:
                consumer.acknowledge(message)
            with self._came:
                self.seen.append(self._p.seen(message))
                self._came.notify_all()
        except Exception as error:
            self.error = error_name(error)

    def until(self, count: int) -> list[Any]:
        with self._came:
            if not self._came.wait_for(lambda: len(self.seen) >= count, WAIT_MS / 1000):
                raise TimeoutError(f"{len(self.seen)} of {count} came; {self.error}")
            return list(self.seen)


@short
def a_listener(p: Program) -> Any:
    topic = p.topic()
    listener = _Listener(p)
    consumer = p.consumer(topic, message_listener=listener)
    p.send(p.producer(topic), *"abcde")
    got = listener.until(5)
    p.until(lambda: p.backlog(topic) == 0, "all are acknowledged")
    consumer.close()
    return got


@scenario
def a_listener_that_pauses(p: Program) -> Any:
    topic = p.topic()
    listener = _Listener(p)
    consumer = p.consumer(topic, message_listener=listener)
    producer = p.producer(topic)
    p.send(producer, *"ab")
    listener.until(2)
    consumer.pause_message_listener()
    p.send(producer, *"cd")
    threading.Event().wait(0.3)
    paused = len(listener.seen)
    consumer.resume_message_listener()
    return {"paused": paused, "all": [one["data"] for one in listener.until(4)]}


@scenario
def a_listener_that_acknowledges_nothing(p: Program) -> Any:
    topic = p.topic()
    listener = _Listener(p, acknowledge=False)
    consumer = p.consumer(topic, message_listener=listener)
    p.send(p.producer(topic), *"ab")
    listener.until(2)
    consumer.close()
    return p.receive(p.consumer(topic), 2)


@short
def receiver_queues_of_one(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, receiver_queue_size=1)
    p.send_all(p.producer(topic), map(str, range(50)))
    p.send_all(
        p.producer(topic, batching_enabled=True, batching_max_publish_delay_ms=60_000),
        map(str, range(50, 60)),
    )
    return p.receive(consumer, 60, plain=True)


@scenario
def no_receiver_queue(p: Program) -> Any:
    topic = p.topic()
    first, second = (p.consumer(topic, **SHARED, receiver_queue_size=0, client=p.client()) for _ in range(2))
    p.send(p.producer(topic), *"abcd")
    found = []
    for consumer in (first, second, second, first):
        message = consumer.receive()
        consumer.acknowledge(message)
        found.append(p.seen(message))
    return found


@short
def several_topics(p: Program) -> Any:
    topics = [p.topic(name) for name in "abc"]
    consumer = p.consumer(topics)
    for topic in topics:
        p.send(p.producer(topic), "1", "2")
    found = sorted(p.receive(consumer, 6, topics=True), key=lambda one: (one["topic"], one["data"]))
    return {
        "got": found,
        "then": p.nothing(consumer),
        "none is left": p.until(lambda: not any(map(p.backlog, topics)), "none is left"),
    }


@scenario
def several_topics_and_negative_acknowledgement(p: Program) -> Any:
    topics = [p.topic(name) for name in "ab"]
    consumer = p.consumer(topics, **SHARED, negative_ack_redelivery_delay_ms=100)
    for topic in topics:
        p.send(p.producer(topic), "1")
    for _ in topics:
        consumer.negative_acknowledge(p.next(consumer))
    return sorted(p.receive(consumer, 2, topics=True), key=lambda one: str(one["topic"]))


@scenario
def several_topics_are_unsubscribed(p: Program) -> Any:
    topics = [p.topic(name) for name in "ab"]
    p.consumer(topics).unsubscribe()
    return [list(p.stats(topic)["subscriptions"]) for topic in topics]


def _pattern(p: Program, domain: str = "persistent") -> Any:
    return re.compile(p.topic("(one|two|three)", domain=domain))


@short
def a_pattern(p: Program) -> Any:
    for name in ("one", "two", "four"):
        p.send(p.producer(p.topic(name)), name)
    consumer = p.consumer(_pattern(p))
    return {"got": sorted(p.receive(consumer, 2, topics=True), key=str), "then": p.nothing(consumer)}


@slow
def a_pattern_discovers_topics(p: Program) -> Any:
    """Once a minute; this client does not pass its setting on."""
    consumer = p.consumer(_pattern(p), pattern_auto_discovery_period=1)
    first = p.nothing(consumer)
    p.send(p.producer(p.topic("one")), "one")
    discovered = consumer.receive(100_000)
    consumer.acknowledge(discovered)
    p.send(p.producer(p.topic("one")), "one more")
    return {"first": first, "discovered": p.seen(discovered), "then": p.receive(consumer, 1)}


@scenario
def a_pattern_of_partitioned_topics(p: Program) -> Any:
    for name in ("one", "two"):
        topic = p.partitioned(2, name)
        p.send(p.producer(topic), f"{name} 1", f"{name} 2")
    consumer = p.consumer(_pattern(p))
    return sorted(p.receive(consumer, 4, plain=True))


@scenario
def patterns_by_domain(p: Program) -> Any:
    found: dict[str, Any] = {}
    for name, mode in (
        ("one", RegexSubscriptionMode.NonPersistentOnly),
        ("two", RegexSubscriptionMode.AllTopics),
    ):
        topics = [p.topic(name, domain) for domain in ("persistent", "non-persistent")]
        producers = [p.producer(topic) for topic in topics]
        consumer = p.consumer(
            re.compile(f"public/default/{p.topic(name).rpartition('/')[2]}"),
            name,
            regex_subscription_mode=mode,
        )
        for producer, topic in zip(producers, topics):
            p.send(producer, topic.partition("://")[0])
        count = 1 if name == "one" else 2
        found[name] = [sorted(p.receive(consumer, count, plain=True)), p.nothing(consumer)]
    return found


@short
def the_last_message_id(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic)

    def last() -> Any:
        return p.id(consumer.get_last_message_id(), topic)

    empty = last()
    producer = p.producer(topic)
    sent = [*p.send(producer, "a", "b")]
    single = last()
    batch = p.send_all(p.producer(topic, batching_enabled=True, batching_max_publish_delay_ms=60_000), "cde")
    got = p.receive(consumer, 5)
    return {"empty": empty, "sent": sent, "single": single, "batch": batch, "batched": last(), "got": got}


@scenario
def a_consumer_of_much(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, receiver_queue_size=100)
    with_batches = p.producer(
        topic, batching_enabled=True, compression_type=pulsar.CompressionType.LZ4, max_pending_messages=9999
    )
    expected = [f"{at} {'x' * (at % 500)}" for at in range(5000)]
    p.send_all(with_batches, expected)
    got = [p.next(consumer) for _ in expected]
    consumer.acknowledge_cumulative(got[-1])
    p.until(lambda: p.backlog(topic) == 0, "all are acknowledged")
    return texts(got) == expected
