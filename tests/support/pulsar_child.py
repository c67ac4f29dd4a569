"""A program on Pulsar's Python client, for tests of mixed protocols: its library ends the process now and then.

    python -m support.pulsar_child produce URL TOPIC NAME '{"batching_enabled": true}'
    python -m support.pulsar_child consume URL TOPIC SUBSCRIPTION Shared

Of a producer each line of its input is how many more messages it sends; it prints a line when all of them are stored. A
consumer prints what it gets, `payload` as text, and acknowledges it, until its input ends.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
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


if __name__ == "__main__":
    import pulsar

    what, url, *rest = sys.argv[1:]
    client = pulsar.Client(url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))
    {"produce": produce, "consume": consume}[what](client, *rest)
    client.close()
