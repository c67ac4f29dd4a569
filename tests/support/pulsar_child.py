"""A program on Pulsar's Python client, for tests of mixed protocols: its library ends the process now and then.

    python -m support.pulsar_child produce URL TOPIC NAME '{"batching_enabled": true}'
    python -m support.pulsar_child consume URL TOPIC SUBSCRIPTION Shared
    python -m support.pulsar_child exchange URL

Of a producer each line of its input is how many more messages it sends; it prints a line when all of them are stored. A
consumer prints what it gets, `payload` as text, and acknowledges it, until its input ends. `exchange` answers each line of
its input, a request in JSON, with a line: ["send", TOPIC, options of the producer, [[value, named arguments of send], ...]]
with ids, ["read", TOPIC, options of the reader, COUNT] with all messages there are, COUNT at least. Values are base64.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

KEYS = 16


def payload(name: str, number: int) -> bytes:
    """Of the message with that number of a producer."""
    return b"%b:%d:%b" % (name.encode(), number, bytes([97 + number % 26]) * (number % 300))


def key(number: int) -> str:
    """Of the same."""
    return f"k{number % KEYS}"


def say(line: str) -> None:
    """On standard output, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def produce(client: Any, topic: str, name: str, options: str) -> None:
    """See the module docstring."""
    producer = client.create_producer(
        topic, producer_name=name, send_timeout_millis=0, block_if_queue_full=True, **json.loads(options)
    )
    say("ready")
    number = 0
    done: queue.Queue[Any] = queue.Queue()
    for line in sys.stdin:
        for _ in range(int(line)):
            content = payload(name, number)
            producer.send_async(content, lambda result, _id: done.put(result), partition_key=key(number))
            number += 1
        producer.flush()
        results = {str(done.get()) for _ in range(int(line))}
        say(" ".join(results))
    producer.close()


def consume(client: Any, topic: str, subscription: str, type: str) -> None:
    """See the module docstring."""
    import pulsar

    consumer = client.subscribe(
        topic,
        subscription,
        consumer_type=getattr(pulsar.ConsumerType, type),
        initial_position=pulsar.InitialPosition.Earliest,
    )
    say("ready")
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    while not ended.is_set():
        try:
            message = consumer.receive(200)
        except pulsar.Timeout:
            continue
        say(message.data().decode())
        consumer.acknowledge(message)
    consumer.close()


def exchange(client: Any) -> None:
    """See the module docstring."""
    for line in sys.stdin:
        what, *rest = json.loads(line)
        work: Callable[..., Any] = _send if what == "send" else _read
        say(json.dumps(work(client, *rest)))


def _send(client: Any, topic: str, options: dict[str, Any], messages: list[Any]) -> list[Any]:
    import pulsar

    codec = getattr(pulsar.CompressionType, options.pop("compression_type", "NONE"))
    producer = client.create_producer(topic, compression_type=codec, block_if_queue_full=True, **options)
    done: queue.Queue[Any] = queue.Queue()
    for value, named in messages:
        content = None if value is None else base64.b64decode(value)
        producer.send_async(content, lambda result, id: done.put((result, id)), **named)
    producer.flush()
    results = [done.get() for _ in messages]
    producer.close()
    assert {str(result) for result, _ in results} == {"Result.Ok"}, results
    return [_id(id) for _, id in results]


def _read(client: Any, topic: str, options: dict[str, Any], count: int) -> list[Any]:
    """`count`: a reader of several partitions says that nothing is available where messages are empty."""
    import pulsar

    reader = client.create_reader(topic, pulsar.MessageId.earliest, **options)
    found: list[dict[str, Any]] = []
    while len(found) < count or reader.has_message_available():
        message = reader.read_next(30_000)
        found.append(
            {
                "id": _id(message.message_id()),
                "value": None if message.has_null_value() else base64.b64encode(message.data()).decode(),
                "key": message.partition_key(),
                "ordering_key": message.ordering_key(),
                "properties": message.properties(),
                "event_time": message.event_timestamp(),
                "publish_time": message.publish_timestamp(),
                "producer": message.producer_name(),
            }
        )
    reader.close()
    return found


def _id(id: Any) -> list[int]:
    return [id.ledger_id(), id.entry_id(), id.batch_index(), id.partition()]


if __name__ == "__main__":
    import pulsar

    what, url, *rest = sys.argv[1:]
    client = pulsar.Client(url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))
    programs: dict[str, Callable[..., None]] = {"produce": produce, "consume": consume, "exchange": exchange}
    programs[what](client, *rest)
    client.close()
