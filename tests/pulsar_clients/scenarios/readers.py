"""Readers and table views."""

from __future__ import annotations

import threading
import time
from typing import Any

from pulsar import MessageId

from pulsar_clients.program import WAIT_MS, Program, path, scenario, short
from pulsar_clients.scenarios.subscriptions import SHARED

BATCH: dict[str, Any] = {"batching_enabled": True, "batching_max_publish_delay_ms": 60_000}


@short
def a_reader_from_the_earliest(p: Program) -> Any:
    topic = p.topic()
    p.send(p.producer(topic), *"abc")
    reader = p.reader(topic)
    return {"topic": p.shown(reader.topic()), "read": p.read(reader), "then": p.nothing(reader)}


@short
def a_reader_from_the_latest(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    p.send(producer, *"ab")
    reader = p.reader(topic, MessageId.latest)
    before = reader.has_message_available()
    p.send(producer, "c")
    return {"before": before, "after": p.read(reader), "then": reader.has_message_available()}


@short
def a_reader_from_a_message(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    ids = [producer.send(name.encode()) for name in "abcd"]
    found: dict[str, Any] = {}
    for inclusive in (False, True):
        for at in (1, 3):
            reader = p.reader(topic, ids[at], start_message_id_inclusive=inclusive)
            found[f"{'abcd'[at]}, inclusive {inclusive}"] = p.read(reader)
    return found


@short
def a_reader_from_within_a_batch(p: Program) -> Any:
    topic = p.topic()
    p.send_all(p.producer(topic, **BATCH), "abcd")
    p.send_all(p.producer(topic, **BATCH), "ef")
    first = p.reader(topic)
    messages = [p.next(first) for _ in range(6)]
    found: dict[str, Any] = {}
    for inclusive in (False, True):
        for at in (0, 2, 3, 5):
            reader = p.reader(topic, messages[at].message_id(), start_message_id_inclusive=inclusive)
            found[f"{'abcdef'[at]}, inclusive {inclusive}"] = [one["data"] for one in p.read(reader)]
    return found


@short
def a_reader_of_an_empty_topic(p: Program) -> Any:
    topic = p.topic()
    found: dict[str, Any] = {}
    for name, start in (("earliest", MessageId.earliest), ("latest", MessageId.latest)):
        for inclusive in (False, True):
            reader = p.reader(topic, start, start_message_id_inclusive=inclusive)
            found[f"{name}, inclusive {inclusive}"] = reader.has_message_available()
    return found


@scenario
def a_reader_from_the_last_message_inclusively(p: Program) -> Any:
    topic = p.topic()
    p.send(p.producer(topic), *"abc")
    reader = p.reader(topic, MessageId.latest, start_message_id_inclusive=True)
    return p.read(reader)


@short
def a_reader_from_an_id_that_was_stored(p: Program) -> Any:
    topic = p.topic()
    p.send_all(p.producer(topic, **BATCH), "abc")
    reader = p.reader(topic)
    stored = [p.next(reader).message_id().serialize() for _ in range(3)]
    again = p.reader(topic, MessageId.deserialize(stored[1]), client=p.client())
    return p.read(again)


@short
def a_reader_seeks(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    ids = [producer.send(name.encode()) for name in "abcd"]
    reader = p.reader(topic)
    first = p.read(reader)
    reader.seek(ids[1])
    exclusively = p.read(reader)
    reader.seek(MessageId.earliest)
    earliest = p.read(reader)
    reader.seek(MessageId.latest)
    latest = p.read(reader)
    p.send(producer, "e")
    return {
        "first": first,
        "exclusively": exclusively,
        "earliest": earliest,
        "latest": latest,
        "then": p.read(reader),
    }


@scenario
def a_reader_seeks_inclusively(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    ids = [producer.send(name.encode()) for name in "abcd"]
    reader = p.reader(topic, start_message_id_inclusive=True)
    p.read(reader)
    reader.seek(ids[2])
    return p.read(reader)


@short
def a_reader_seeks_to_a_time(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    p.send(producer, *"abc")
    time.sleep(0.1)
    p.send(producer, "d")
    reader = p.reader(topic)
    messages = [p.next(reader) for _ in range(4)]
    reader.seek(messages[3].publish_timestamp())
    late = [p.seen(p.next(reader)), p.nothing(reader)]
    reader.seek(0)
    return {"late": late, "all": [p.seen(p.next(reader)) for _ in range(4)]}


@scenario
def a_reader_asks_after_seeking_to_a_time(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    p.send(producer, *"abc")
    reader = p.reader(topic)
    reader.seek(0)
    return [reader.has_message_available(), p.read(reader)]


@scenario
def a_reader_seeks_beyond_the_end_by_time(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    p.send(producer, *"ab")
    reader = p.reader(topic)
    reader.seek(int(time.time() * 1000) + 3_600_000)
    none = reader.has_message_available()
    p.send(producer, "c")
    return {"none": none, "then": p.read(reader)}


@scenario
def readers_side_by_side(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    readers = [p.reader(topic, client=p.client()) for _ in range(3)]
    p.send(producer, *"ab")
    return [p.read(reader, plain=True) for reader in readers]


@scenario
def the_subscription_of_a_reader(p: Program) -> Any:
    topic = p.topic()
    reader = p.reader(topic, reader_name="rita", subscription_role_prefix="audit")
    ((name, subscription),) = p.stats(topic)["subscriptions"].items()
    consumers = [one["consumerName"] for one in subscription["consumers"]]
    found = {
        "prefixed": name.startswith("audit-reader-"),
        "consumers": consumers,
        "durable": subscription["isDurable"],
    }
    reader.close()
    p.until(lambda: not p.stats(topic)["subscriptions"], "the subscription is gone")
    return found


@scenario
def a_reader_holds_nothing_back(p: Program) -> Any:
    topic = p.topic()
    reader = p.reader(topic)
    p.send(p.producer(topic), *"ab")
    p.read(reader)
    return {
        "connected": reader.is_connected(),
        "closed": p.fails(reader.close),
        "read": p.fails(reader.read_next, 100),
    }


@scenario
def a_reader_with_a_listener(p: Program) -> Any:
    topic = p.topic()
    came, seen = threading.Semaphore(0), []

    def listener(reader: Any, message: Any) -> None:
        seen.append(message.data().decode())
        came.release()

    reader = p.reader(topic, reader_listener=listener)
    p.send(p.producer(topic), *"abc")
    found = all(came.acquire(timeout=WAIT_MS / 1000) for _ in range(3))
    reader.close()
    return {"came": found, "seen": seen}


@scenario
def a_reader_with_a_small_queue(p: Program) -> Any:
    topic = p.topic()
    p.send_all(p.producer(topic), map(str, range(100)))
    return p.read(p.reader(topic, receiver_queue_size=3), plain=True)


@scenario
def a_reader_follows_a_producer(p: Program) -> Any:
    topic = p.topic()
    reader = p.reader(topic, MessageId.latest)
    producer = p.producer(topic)
    found = []
    for at in range(20):
        p.send(producer, str(at))
        found.append(p.next(reader).data().decode())
    return found


def _compact(p: Program, topic: str) -> None:
    p.admin.must("PUT", f"{path(topic)}/compaction")
    p.until(
        lambda: p.admin.must("GET", f"{path(topic)}/compaction")["status"] == "SUCCESS", "it is compacted"
    )


@scenario
def reading_compacted_before_compaction(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    for at in range(6):
        p.send(producer, str(at), partition_key="ab"[at % 2])
    return p.read(p.reader(topic, is_read_compacted=True))


@scenario
def reading_compacted(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    for at in range(6):
        p.send(producer, str(at), partition_key="abc"[at % 3])
    p.send(producer, "", partition_key="c")
    p.send(producer, "without a key")
    _compact(p, topic)
    p.send(producer, "later", partition_key="a")
    compacted, every = p.read(p.reader(topic, is_read_compacted=True)), p.read(p.reader(topic))
    consumer = p.consumer(topic, is_read_compacted=True)
    return {
        "compacted": compacted,
        "all": len(every),
        "consumer": p.receive(consumer, len(compacted), plain=True),
    }


@scenario
def reading_compacted_batches(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic, **BATCH)
    for batch in range(2):
        p.send_all(producer, [(f"{batch}{name}", {"partition_key": name}) for name in ("abc", "bc")[batch]])
    _compact(p, topic)
    return p.read(p.reader(topic, is_read_compacted=True))


@scenario
def reading_compacted_is_not_for_shared(p: Program) -> Any:
    return p.fails(p.consumer, p.topic(), is_read_compacted=True, **SHARED)


def _table(view: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    view.for_each(lambda key, value: found.update({key: value.decode()}))
    return dict(sorted(found.items()))


@short
def a_table_view(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    for at in range(6):
        p.send(producer, str(at), partition_key="abc"[at % 3])
    view = p.shared_client.create_table_view(topic)
    first = [len(view), _table(view), view.get("a"), view.get("x")]
    p.send(producer, "new", partition_key="d")
    p.send(producer, "changed", partition_key="a")
    p.until(lambda: view.get("a") == b"changed", "the view follows")
    found = [str(one) for one in first] + [_table(view)]
    view.close()
    return found


@scenario
def a_table_view_of_partitions(p: Program) -> Any:
    topic = p.partitioned(3)
    producer = p.producer(topic)
    for at in range(20):
        p.send(producer, str(at), partition_key=f"key {at % 10}")
    return _table(p.shared_client.create_table_view(topic))


@scenario
def a_table_view_that_is_listened_to(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    p.send(producer, "1", partition_key="a")
    view = p.shared_client.create_table_view(topic)
    came, seen = threading.Semaphore(0), []

    def listener(key: str, value: bytes) -> None:
        seen.append([key, value.decode()])
        came.release()

    view.for_each_and_listen(listener)
    p.send(producer, "2", partition_key="b")
    p.send(producer, "3", partition_key="a")
    found = all(came.acquire(timeout=WAIT_MS / 1000) for _ in range(3))
    view.close()
    return {"came": found, "seen": seen}
