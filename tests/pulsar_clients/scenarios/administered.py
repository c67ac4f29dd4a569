"""What operators do while programs run: unload, reset, skip, expire; what figures say."""

from __future__ import annotations

import time
from typing import Any

from pulsar import ProducerAccessMode

from pulsar_clients.program import EARLIEST, LATEST, Program, path, scenario, short
from pulsar_clients.scenarios.subscriptions import FAILOVER, KEY_SHARED, SHARED

_FIELDS = {
    "ledgerId": "ledger",
    "entryId": "entry",
    "batchIndex": "batch_index",
}  # of ids, over HTTP and in programs
BATCH: dict[str, Any] = {"batching_enabled": True, "batching_max_publish_delay_ms": 60_000}


def _unload(p: Program, topic: str) -> None:
    p.admin.must("PUT", f"{path(topic)}/unload")


def _until(p: Program, consumer: Any, last: str) -> dict[str, Any]:
    """By content, each message up to `last`; what was acknowledged just before may come again."""
    found: dict[str, Any] = {}
    while last not in found:
        message = p.next(consumer)
        consumer.acknowledge(message)
        found.setdefault(message.data().decode(), p.seen(message))
    return found


@short
def unloaded_in_the_middle(p: Program) -> Any:
    topic = p.topic()
    producer, consumer = p.producer(topic, producer_name="anna"), p.consumer(topic)
    found: dict[str, Any] = {}
    for at in range(3):
        p.send(producer, f"{at}a", f"{at}b")
        found |= _until(p, consumer, f"{at}b")
        _unload(p, topic)
    p.send(producer, "last")
    found |= _until(p, consumer, "last")
    return {"got": list(found.values()), "last": producer.last_sequence_id()}


@short
def unloaded_with_unacknowledged_messages(p: Program) -> Any:
    found: dict[str, Any] = {}
    for name, kind in (
        ("exclusive", {}),
        ("shared", SHARED),
        ("failover", FAILOVER),
        ("key_shared", KEY_SHARED),
    ):
        topic = p.topic(name)
        consumer = p.consumer(topic, **kind)
        p.send(p.producer(topic), *"abcd")
        messages = [p.next(consumer) for _ in range(4)]
        consumer.acknowledge(messages[1])
        p.until(lambda: p.backlog(topic) == 3, "one is acknowledged")  # noqa: B023
        _unload(p, topic)
        found[name] = [sorted(p.receive(consumer, 3), key=lambda one: one["data"]), p.nothing(consumer)]
    return found


@scenario
def unloaded_with_batch_indexes(p: Program) -> Any:
    topic = p.topic()
    settings = {**SHARED, "batch_index_ack_enabled": True}
    consumer = p.consumer(topic, **settings)
    p.send_all(p.producer(topic, **BATCH), "abcdef")
    messages = [p.next(consumer) for _ in range(6)]
    for at in (1, 4):
        consumer.acknowledge(messages[at])
    time.sleep(0.5)
    _unload(p, topic)
    return {"again": p.receive(consumer, 4), "then": p.nothing(consumer)}


@scenario
def unloaded_while_messages_are_sent(p: Program) -> Any:
    topic = p.topic(namespace=p.namespace(deduplication=True))
    consumer = p.consumer(topic)
    producer = p.producer(topic, producer_name="anna", block_if_queue_full=True)
    p.send(producer, "first")
    for at in range(3):
        p.send_all(producer, [f"{at} {number}" for number in range(100)], flush=at != 1)
        _unload(p, topic)
    p.send(producer, "last")
    seen = _until(p, consumer, "last")
    return {
        "count": len(seen),
        "in order": list(seen)[1:-1] == [f"{at} {number}" for at in range(3) for number in range(100)],
    }


@scenario
def unloaded_under_a_reader(p: Program) -> Any:
    topic = p.topic()
    producer, reader = p.producer(topic), p.reader(topic)
    p.send(producer, *"abc")
    found = [p.next(reader).data().decode() for _ in range(2)]
    _unload(p, topic)
    p.send(producer, "d")
    return found + [p.next(reader).data().decode() for _ in range(2)]


@scenario
def unloaded_with_an_exclusive_producer(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic, access_mode=ProducerAccessMode.Exclusive)
    p.send(producer, "a")
    _unload(p, topic)
    p.send(producer, "b")
    return {"got": p.receive(p.consumer(topic), 2), "second": p.fails(p.producer, topic, client=p.client())}


@scenario
def a_namespace_that_is_unloaded(p: Program) -> Any:
    namespace = p.namespace()
    topic = p.topic(namespace=namespace)
    producer, consumer = p.producer(topic), p.consumer(topic)
    p.send(producer, "a")
    first = _until(p, consumer, "a")
    p.admin.must("PUT", f"namespaces/{namespace}/unload")
    p.send(producer, "b")
    return first | _until(p, consumer, "b")


@scenario
def a_cursor_that_is_reset(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic)
    p.send(p.producer(topic), *"abc")
    first = p.receive(consumer, 3)
    p.until(lambda: p.backlog(topic) == 0, "all are acknowledged")
    p.admin.must("POST", f"{path(topic)}/subscription/s/resetcursor/0")
    return {"first": first, "again": p.receive(consumer, 3), "then": p.nothing(consumer)}


@scenario
def messages_that_are_skipped(p: Program) -> Any:
    topic = p.topic()
    p.consumer(topic).close()
    p.send(p.producer(topic), *"abcde")
    p.admin.must("POST", f"{path(topic)}/subscription/s/skip/2")
    backlog = p.backlog(topic)
    return {"backlog": backlog, "got": p.receive(p.consumer(topic), 3)}


@scenario
def a_backlog_that_is_cleared(p: Program) -> Any:
    topic = p.topic()
    p.consumer(topic).close()
    producer = p.producer(topic)
    p.send(producer, *"abc")
    p.admin.must("POST", f"{path(topic)}/subscription/s/skip_all")
    p.send(producer, "d")
    return p.receive(p.consumer(topic), 1)


@short
def a_subscription_that_an_operator_made(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic)
    p.send(producer, *"ab")
    p.admin.must("PUT", f"{path(topic)}/subscription/early", EARLIEST)
    p.admin.must("PUT", f"{path(topic)}/subscription/late", LATEST)
    p.send(producer, "c")
    return [
        p.receive(p.consumer(topic, name, latest=True), count) for name, count in (("early", 3), ("late", 1))
    ]


@scenario
def a_subscription_that_an_operator_deletes(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic)
    refused = p.admin("DELETE", f"{path(topic)}/subscription/s").status
    consumer.close()
    return {
        "refused": refused,
        "deleted": p.admin("DELETE", f"{path(topic)}/subscription/s").status,
        "left": list(p.stats(topic)["subscriptions"]),
    }


@short
def figures_of_a_topic(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, **SHARED, consumer_name="carl")
    producer = p.producer(topic, producer_name="anna", **BATCH)
    p.send_all(producer, "abcd")
    for _ in range(4):
        p.next(consumer)
    stats = p.stats(topic)
    subscription = stats["subscriptions"]["s"]
    return {
        "publishers": [one["producerName"] for one in stats["publishers"]],
        "type": subscription["type"],
        "consumers": [[one["consumerName"], one["unackedMessages"]] for one in subscription["consumers"]],
        "unacknowledged": subscription["unackedMessages"],
        "came in": stats["msgInCounter"],
        "went out": subscription["msgOutCounter"],
    }


@scenario
def figures_when_all_are_gone(p: Program) -> Any:
    topic, client = p.topic(), p.client()
    p.consumer(topic, client=client)
    p.producer(topic, client=client)
    client.close()
    stats = p.stats(topic)
    return [len(stats["publishers"]), len(stats["subscriptions"]["s"]["consumers"])]


@scenario
def the_last_message_id_for_operators(p: Program) -> Any:
    """Ids of both worlds are the same."""
    topic = p.topic()
    sent = p.send(p.producer(topic), *"abc")[-1]
    found = p.admin.must("GET", f"{path(topic)}/lastMessageId")
    return [found["ledgerId"] == sent.ledger, found["entryId"] == sent.entry]


@scenario
def a_message_that_an_operator_looks_at(p: Program) -> Any:
    topic = p.topic()
    p.consumer(topic).close()
    p.send(p.producer(topic), "look", properties={"x": "1"})
    return p.admin.must("GET", f"{path(topic)}/subscription/s/position/1")


@scenario
def ids_of_clients_for_operators(p: Program) -> Any:
    """Operators name messages as clients do: alone, in a batch, and a batch as a whole."""
    topic = p.topic()
    p.consumer(topic).close()
    first, second, _ = p.send(p.producer(topic), *"abc")
    batch = p.send_all(p.producer(topic, **BATCH), "de")
    last = p.admin.must("GET", f"{path(topic)}/lastMessageId")
    p.send(p.producer(topic), "f")

    def from_(ledger: int, entry: int, index: int = -1, *, excluded: bool = False) -> str:
        """What comes first after a reset."""
        place = {"ledgerId": ledger, "entryId": entry, "batchIndex": index, "excluded": excluded}
        p.admin.must("POST", f"{path(topic)}/subscription/s/resetcursor", {"partitionIndex": -1, **place})
        consumer = p.consumer(topic)
        found: str = p.next(consumer).data().decode()
        consumer.close()
        return found

    return {
        "last": [last[name] == getattr(batch[-1], field) for name, field in _FIELDS.items()],
        "by id": p.admin.must("GET", f"{path(topic)}/ledger/{second.ledger}/entry/{second.entry}"),
        "examined": p.admin.must(
            "GET", f"{path(topic)}/examinemessage?initialPosition=earliest&messagePosition=2"
        ),
        "at": from_(second.ledger, second.entry),
        "behind": from_(first.ledger, first.entry, excluded=True),
        "at a batch": from_(batch[0].ledger, batch[0].entry),
        "within a batch": from_(batch[1].ledger, batch[1].entry, batch[1].batch_index),
        "behind a batch": from_(batch[0].ledger, batch[0].entry, excluded=True),
    }
