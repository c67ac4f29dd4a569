"""Producers: names, access modes, sequence ids, deduplication, what a message carries."""

from __future__ import annotations

import random
import time
from datetime import timedelta
from typing import Any

import pulsar
from pulsar import ProducerAccessMode

from pulsar_clients.program import Program, Unsupported, in_thread, path, scenario, short


@short
def one_message(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic)
    sent = p.send(p.producer(topic), "hello")
    return {"sent": sent, "received": p.receive(consumer, 1), "then": p.nothing(consumer)}


@short
def many_messages_in_order(p: Program) -> Any:
    topic = p.topic()
    expected = [str(at) for at in range(300)]
    p.send_all(p.producer(topic), expected)
    return p.receive(p.consumer(topic), 300, plain=True) == expected


@short
def a_producer_name_that_is_given(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic, producer_name="anna")
    p.send(producer, "a")
    return {
        "name": producer.producer_name(),
        "topic": p.shown(producer.topic()),
        "got": p.receive(p.consumer(topic), 1),
    }


@scenario
def producer_names_that_are_generated(p: Program) -> Any:
    topic = p.topic()
    names = [p.producer(topic).producer_name() for _ in range(3)]
    return {"different": len(set(names)), "empty": names.count("")}


@short
def a_producer_name_that_is_taken(p: Program) -> Any:
    topic = p.topic()
    first = p.producer(topic, producer_name="anna")
    same = p.fails(p.producer, topic, producer_name="anna")
    other = p.fails(p.producer, topic, producer_name="anna", client=p.client())
    elsewhere = p.fails(p.producer, p.topic("other"), producer_name="anna")
    p.send(first, "the first still works")
    return {"same client": same, "other client": other, "other topic": elsewhere}


@short
def a_producer_name_that_is_free_again(p: Program) -> Any:
    topic = p.topic()
    p.producer(topic, producer_name="anna").close()
    return p.fails(p.producer, topic, producer_name="anna", client=p.client())


@short
def sequence_ids_of_its_own(p: Program) -> Any:
    producer = p.producer(p.topic())
    before = producer.last_sequence_id()
    p.send(producer, "a", "b", "c")
    return {"before": before, "after": producer.last_sequence_id()}


@short
def sequence_ids_that_are_given(p: Program) -> Any:
    producer = p.producer(p.topic())
    found = []
    for sequence_id in (10, 20, 15):
        p.send(producer, str(sequence_id), sequence_id=sequence_id)
        found.append(producer.last_sequence_id())
    return found


@scenario
def an_initial_sequence_id(p: Program) -> Any:
    producer = p.producer(p.topic(), initial_sequence_id=100)
    before = producer.last_sequence_id()
    p.send(producer, "a", "b")
    return {"before": before, "after": producer.last_sequence_id()}


@scenario
def last_sequence_id_without_deduplication(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic, producer_name="anna")
    p.send(producer, "a", "b")
    producer.close()
    return p.producer(topic, producer_name="anna").last_sequence_id()


def _deduplicated(p: Program) -> str:
    return p.topic(namespace=p.namespace(deduplication=True))


@short
def duplicates_are_dropped(p: Program) -> Any:
    topic = _deduplicated(p)
    producer = p.producer(topic, producer_name="anna")
    sent = [p.send(producer, f"{at}: {one}", sequence_id=one) for at, one in enumerate((1, 2, 2, 1, 3))]
    return {"sent": sent, "last": producer.last_sequence_id(), "got": p.receive(p.consumer(topic), 3)}


@short
def duplicates_of_an_earlier_producer(p: Program) -> Any:
    topic = _deduplicated(p)
    first = p.producer(topic, producer_name="anna")
    p.send(first, "a", sequence_id=5)
    p.send(first, "b", sequence_id=6)
    first.close()
    again = p.producer(topic, producer_name="anna", client=p.client())
    last = again.last_sequence_id()
    p.send(again, "b again", sequence_id=6)
    p.send(again, "c", sequence_id=7)
    own = p.send(again, "d")
    consumer = p.consumer(topic)
    return {
        "last": last,
        "then": again.last_sequence_id(),
        "own": own,
        "got": p.receive(consumer, 3),
        "no more": p.nothing(consumer),
    }


@scenario
def duplicates_are_of_one_producer(p: Program) -> Any:
    topic = _deduplicated(p)
    for name in ("anna", "bert"):
        p.send(p.producer(topic, producer_name=name), name, sequence_id=1)
    return p.receive(p.consumer(topic), 2)


@scenario
def duplicates_among_batches(p: Program) -> Any:
    topic = _deduplicated(p)
    producer = p.producer(
        topic, producer_name="anna", batching_enabled=True, batching_max_publish_delay_ms=10_000
    )
    found = [
        p.send_all(producer, [(f"{at}: {one}", {"sequence_id": one}) for one in ids])
        for at, ids in enumerate(([1, 2, 3], [1, 2, 3], [4, 5]))
    ]
    return {"sent": found, "last": producer.last_sequence_id(), "got": p.receive(p.consumer(topic), 5)}


@scenario
def duplicates_without_deduplication(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic, producer_name="anna")
    p.send(producer, "once", sequence_id=1)
    p.send(producer, "twice", sequence_id=1)
    return p.receive(p.consumer(topic), 2)


@scenario
def deduplication_of_a_topic(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic, producer_name="anna")
    p.admin.must("POST", f"{path(topic)}/deduplicationEnabled", True)
    p.until(lambda: p.stats(topic)["deduplicationStatus"] == "Enabled", "the topic is deduplicated")
    sent = [p.send(producer, f"{at}", sequence_id=1) for at in range(2)]
    p.send(producer, "last", sequence_id=2)
    return {"sent": sent, "got": p.receive(p.consumer(topic), 2)}


@scenario
def duplicates_in_chunks(p: Program) -> Any:
    topic = _deduplicated(p)
    producer = p.producer(topic, producer_name="anna", chunking_enabled=True)
    large = b"0123456789abcdef" * (6 << 16)
    for sequence_id in (1, 1, 2):
        producer.send(large + str(sequence_id).encode(), sequence_id=sequence_id)
    p.send(producer, "last", sequence_id=3)
    return p.receive(p.consumer(topic), 3, ids=False)


@short
def exclusive_and_a_second(p: Program) -> Any:
    topic = p.topic()
    first = p.producer(topic, access_mode=ProducerAccessMode.Exclusive)
    other = p.client()
    found = {
        "exclusive": p.fails(p.producer, topic, access_mode=ProducerAccessMode.Exclusive, client=other),
        "shared": p.fails(p.producer, topic, client=other),
    }
    p.send(first, "the first still works")
    first.close()
    return found | {"afterwards": p.fails(p.producer, topic, client=other)}


@scenario
def exclusive_beside_shared(p: Program) -> Any:
    topic = p.topic()
    shared = p.producer(topic)
    refused = p.fails(p.producer, topic, access_mode=ProducerAccessMode.Exclusive, client=p.client())
    p.send(shared, "the shared one still works")
    return refused


@short
def waiting_to_be_exclusive(p: Program) -> Any:
    topic = p.topic()
    first = p.producer(topic, producer_name="first", access_mode=ProducerAccessMode.Exclusive)
    other = p.client()

    def second() -> Any:
        producer = p.producer(
            topic, producer_name="second", access_mode=ProducerAccessMode.WaitForExclusive, client=other
        )
        return p.send(producer, "of the second")

    with in_thread(second) as result:
        time.sleep(0.5)
        p.send(first, "of the first")
        first.close()
        sent = result()
    return {"sent": sent, "got": p.receive(p.consumer(topic), 2)}


@scenario
def fencing_the_exclusive_one(p: Program) -> Any:
    topic = p.topic()
    first = p.producer(topic, producer_name="first", access_mode=ProducerAccessMode.Exclusive)
    p.send(first, "of the first")
    second = p.producer(
        topic, producer_name="second", access_mode=ProducerAccessMode.ExclusiveWithFencing, client=p.client()
    )
    p.send(second, "of the second")
    return {"first": p.fails(first.send, b"too late"), "got": p.receive(p.consumer(topic), 2)}


@short
def properties_of_messages(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    for properties in ({"a": "1", "b": "zwei"}, {}, {"clé": "ß €", "": "empty name", "empty": ""}):
        p.send(producer, "a", properties=properties)
    p.send(producer, "many", properties={f"name {at}": str(at) * 50 for at in range(100)})
    return p.receive(p.consumer(topic), 4)


@short
def keys(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    p.send(producer, "a", partition_key="one")
    p.send(producer, "b", ordering_key="two")
    p.send(producer, "c", partition_key="one", ordering_key="two")
    p.send(producer, "d", partition_key="")
    p.send(producer, "e", partition_key="schlüssel €")
    return p.receive(p.consumer(topic), 5)


@short
def event_and_publish_timestamps(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    before = time.time() * 1000
    p.send(producer, "a", event_timestamp=1_500_000_000_123)
    consumer = p.consumer(topic)
    message = consumer.receive()
    close = abs(message.publish_timestamp() - before) < 60_000
    return {"event": message.event_timestamp(), "published now": close}


@scenario
def an_empty_message(p: Program) -> Any:
    topic = p.topic()
    p.send(p.producer(topic), "", "then")
    return p.receive(p.consumer(topic), 2)


@scenario
def a_null_value(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    try:
        producer.send(None, partition_key="a")
    except TypeError as error:
        raise Unsupported(f"there is no null value: {error}") from error
    producer.send(b"", partition_key="a")
    consumer = p.consumer(topic)
    return [consumer.receive().has_null_value() for _ in range(2)]


@short
def delivered_after_a_while(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, consumer_type=pulsar.ConsumerType.Shared)
    producer = p.producer(topic)
    began = time.monotonic()
    p.send(producer, "late", deliver_after=timedelta(seconds=2))
    p.send(producer, "at once")
    got = p.receive(consumer, 2, ids=False)
    return {"got": got, "not too early": time.monotonic() - began > 1.5}


@scenario
def delivered_at_a_time(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, consumer_type=pulsar.ConsumerType.Shared)
    producer = p.producer(topic)
    now = int(time.time() * 1000)
    for name, after in (("third", 5_000), ("second", 2_500), ("first", -10_000)):
        p.send(producer, name, deliver_at=now + after)
    return p.receive(consumer, 3, ids=False)


@scenario
def delays_are_not_for_exclusive_consumers(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic)
    producer = p.producer(topic)
    p.send(producer, "in an hour", deliver_after=timedelta(hours=1))
    p.send(producer, "at once")
    return p.receive(consumer, 2)


@scenario
def a_delayed_message_is_backlog(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, consumer_type=pulsar.ConsumerType.Shared)
    p.send(p.producer(topic), "in an hour", deliver_after=timedelta(hours=1))
    return {"got": p.nothing(consumer), "backlog": p.backlog(topic)}


@short
def sending_without_waiting(p: Program) -> Any:
    producer = p.producer(p.topic())
    return p.send_all(producer, [f"{at}" for at in range(20)])


@scenario
def flushing_an_idle_producer(p: Program) -> Any:
    producer = p.producer(p.topic())
    first = p.fails(producer.flush)
    p.send(producer, "a")
    return [first, p.fails(producer.flush)]


@scenario
def a_queue_that_is_full(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(
        topic, max_pending_messages=2, batching_enabled=True, batching_max_publish_delay_ms=60_000
    )
    return p.send_all(producer, ["a", "b", "c", "d"])


@scenario
def a_queue_that_blocks(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic, max_pending_messages=5, block_if_queue_full=True)
    p.send_all(producer, map(str, range(100)))
    return p.receive(p.consumer(topic), 100, plain=True)


@scenario
def the_largest_message(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    producer.send(bytes(5 * 1024 * 1024 - 100))
    return p.receive(p.consumer(topic), 1)


@short
def a_message_that_is_too_large(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    too_large = p.fails(producer.send, bytes(5 * 1024 * 1024 + 1))
    p.send(producer, "the producer still works")
    return {"too large": too_large, "got": p.receive(p.consumer(topic), 1)}


@scenario
def large_messages_in_chunks(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic, chunking_enabled=True)
    for size in (1, 5 << 20, 12 << 20):
        producer.send(
            b"abcdefghijklmno\n" * (size // 16) + b"!", properties={"size": str(size)}, partition_key="k"
        )
    return p.receive(p.consumer(topic), 3, ids=False)


@scenario
def chunks_of_two_producers(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic)
    one, two = (p.producer(topic, chunking_enabled=True, client=p.client()) for _ in range(2))
    large = b"abcdefghijklmno\n" * (11 << 16)
    with in_thread(lambda: p.send_all(one, [large + b"1", large + b"3"])):
        p.send_all(two, [large + b"2", large + b"4"])
    return sorted(p.receive(consumer, 4, plain=True))


@scenario
def chunks_that_are_compressed(p: Program) -> Any:
    topic = p.topic()

    data = random.Random(1).randbytes(8 << 20)
    p.producer(topic, chunking_enabled=True, compression_type=pulsar.CompressionType.LZ4).send(data)
    return p.receive(p.consumer(topic), 1, ids=False)


@short
def a_producer_that_is_closed(p: Program) -> Any:
    producer = p.producer(p.topic())
    before = producer.is_connected()
    p.send(producer, "a")
    producer.close()
    return {
        "before": before,
        "after": producer.is_connected(),
        "send": p.fails(producer.send, b"late"),
        "flush": p.fails(producer.flush),
        "again": p.fails(producer.close),
    }


@scenario
def properties_of_a_producer(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic, producer_name="anna", properties={"version": "1", "team": "red"})
    p.send(producer, "a")
    (found,) = p.stats(topic)["publishers"]
    return {name: found[name] for name in ("producerName", "metadata", "accessMode")}


@scenario
def many_producers_of_a_topic(p: Program) -> Any:
    topic = p.topic()
    producers = [p.producer(topic, producer_name=f"p{at}") for at in range(20)]
    for at, producer in enumerate(producers):
        p.send(producer, str(at))
    return {"publishers": len(p.stats(topic)["publishers"]), "got": p.receive(p.consumer(topic), 20)}


@scenario
def a_producer_that_is_forgotten(p: Program) -> Any:
    """The client is closed, not the producer."""
    topic, client = p.topic(), p.client()
    p.send(p.producer(topic, producer_name="anna", client=client), "a")
    client.close()
    p.send(p.producer(topic, producer_name="anna", client=p.client()), "b")
    return p.receive(p.consumer(topic, client=p.client()), 2)
