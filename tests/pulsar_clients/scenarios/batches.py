"""Batches and compression."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pulsar
from pulsar import BatchingType, CompressionType

from pulsar_clients.program import Program, scenario, short

NEVER_MS = 60_000


@short
def a_batch_is_full_by_count(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(
        topic, batching_enabled=True, batching_max_messages=5, batching_max_publish_delay_ms=NEVER_MS
    )
    sent = p.send_all(producer, map(str, range(10)), flush=False)
    return {"sent": sent, "got": p.receive(p.consumer(topic), 10)}


@short
def a_batch_is_flushed(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic, batching_enabled=True, batching_max_publish_delay_ms=NEVER_MS)
    sent = [p.send_all(producer, map(str, range(count))) for count in (3, 1, 2)]
    return {"sent": sent, "last": producer.last_sequence_id(), "got": p.receive(p.consumer(topic), 6)}


@scenario
def a_batch_is_sent_by_time(p: Program) -> Any:
    producer = p.producer(p.topic(), batching_enabled=True, batching_max_publish_delay_ms=1000)
    return p.send_all(producer, "abcde", flush=False)


@scenario
def a_batch_is_full_by_size(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(
        topic,
        batching_enabled=True,
        batching_max_allowed_size_in_bytes=1000,
        batching_max_publish_delay_ms=NEVER_MS,
    )
    return p.send_all(producer, [name * 400 for name in "abcdefgh"])


@short
def batches_by_key(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(
        topic,
        batching_enabled=True,
        batching_type=BatchingType.KeyBased,
        batching_max_publish_delay_ms=NEVER_MS,
    )
    sent = p.send_all(producer, [(f"{at}", {"partition_key": "abc"[at % 3]}) for at in range(9)])
    return {"sent": sent, "got": p.receive(p.consumer(topic), 9)}


@scenario
def batches_by_ordering_key(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(
        topic,
        batching_enabled=True,
        batching_type=BatchingType.KeyBased,
        batching_max_publish_delay_ms=NEVER_MS,
    )
    p.send_all(producer, [(f"{at}", {"partition_key": "k", "ordering_key": "ab"[at % 2]}) for at in range(6)])
    return p.receive(p.consumer(topic), 6)


@short
def everything_of_messages_in_a_batch(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(
        topic, producer_name="anna", batching_enabled=True, batching_max_publish_delay_ms=NEVER_MS
    )
    p.send_all(
        producer,
        [
            ("a", {"properties": {"x": "1"}, "partition_key": "k", "event_timestamp": 7}),
            ("b", {"ordering_key": "o", "properties": {"y": "2", "z": "3"}}),
            ("", {}),
            ("d", {"partition_key": "ü", "sequence_id": 40}),
        ],
    )
    return {"last": producer.last_sequence_id(), "got": p.receive(p.consumer(topic), 4)}


@scenario
def a_delayed_message_leaves_the_batch(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic, consumer_type=pulsar.ConsumerType.Shared)
    producer = p.producer(topic, batching_enabled=True, batching_max_publish_delay_ms=NEVER_MS)
    p.send_all(producer, ["a", ("late", {"deliver_after": timedelta(seconds=2)}), "b"])
    return p.receive(consumer, 3, plain=True)


@scenario
def large_batches(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic, batching_enabled=True, batching_max_messages=1000, max_pending_messages=5000)
    p.send_all(producer, (f"{at:0100}" for at in range(3000)))
    got = p.receive(p.consumer(topic), 3000, plain=True)
    return {"in order": got == [f"{at:0100}" for at in range(3000)]}


def _compressed(name: str, p: Program) -> Any:
    topic = p.topic()
    settings = {"compression_type": getattr(CompressionType, name)}
    p.send(p.producer(topic, **settings), "single " * 100, "s", partition_key="k")
    p.send_all(
        p.producer(topic, batching_enabled=True, batching_max_publish_delay_ms=NEVER_MS, **settings),
        [(f"{at} in a batch", {"properties": {"at": str(at)}}) for at in range(5)],
    )
    return p.receive(p.consumer(topic), 7)


@short
def compressed_by_lz4(p: Program) -> Any:
    return _compressed("LZ4", p)


@short
def compressed_by_zlib(p: Program) -> Any:
    return _compressed("ZLib", p)


@short
def compressed_by_zstd(p: Program) -> Any:
    return _compressed("ZSTD", p)


@short
def compressed_by_snappy(p: Program) -> Any:
    return _compressed("SNAPPY", p)


@scenario
def compressions_side_by_side(p: Program) -> Any:
    topic = p.topic()
    for name in ("LZ4", "ZLib", "ZSTD", "SNAPPY", "NONE"):
        p.send(p.producer(topic, compression_type=getattr(CompressionType, name)), name * 50)
    return p.receive(p.consumer(topic), 5, plain=True)


@scenario
def a_batch_that_is_larger_than_a_message_may_be(p: Program) -> Any:
    """What compresses well is of any size."""
    topic = p.topic()
    producer = p.producer(topic, compression_type=CompressionType.ZSTD)
    found = p.fails(producer.send, bytes(8 << 20))
    return {"send": found, "got": p.receive(p.consumer(topic), 1) if found == "no error" else None}
