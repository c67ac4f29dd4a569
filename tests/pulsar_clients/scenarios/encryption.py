"""Messages that only who has the key can read; brokers store them as they are."""

from __future__ import annotations

import subprocess
import tempfile
from typing import Any

from pulsar import CompressionType, ConsumerCryptoFailureAction, CryptoKeyReader

from pulsar_clients.program import Program, scenario, short


def _keys() -> CryptoKeyReader:
    folder = tempfile.mkdtemp()
    private, public = f"{folder}/private.pem", f"{folder}/public.pem"
    for command in (
        ["openssl", "genrsa", "-out", private, "2048"],
        ["openssl", "rsa", "-in", private, "-pubout", "-outform", "pem", "-out", public],
    ):
        subprocess.run(command, check=True, capture_output=True)
    return CryptoKeyReader(public, private)


@short
def encrypted_messages(p: Program) -> Any:
    topic, keys = p.topic(), _keys()
    settings = {"encryption_key": "client", "crypto_key_reader": keys}
    p.send(p.producer(topic, **settings), "secret", properties={"x": "1"}, partition_key="k")
    producer = p.producer(
        topic,
        **settings,
        batching_enabled=True,
        batching_max_publish_delay_ms=60_000,
        compression_type=CompressionType.LZ4,
    )
    p.send_all(producer, "abc")
    return p.receive(p.consumer(topic, crypto_key_reader=keys), 4)


@scenario
def encrypted_messages_without_the_key(p: Program) -> Any:
    topic, keys = p.topic(), _keys()
    producer = p.producer(topic, encryption_key="client", crypto_key_reader=keys)
    p.send(producer, "secret")
    p.send(p.producer(topic), "open")
    found: dict[str, Any] = {}
    for action in ("FAIL", "DISCARD", "CONSUME"):
        consumer = p.consumer(
            topic, action, crypto_failure_action=getattr(ConsumerCryptoFailureAction, action)
        )
        if action == "FAIL":
            found[action] = p.nothing(consumer)
        elif action == "DISCARD":
            found[action] = p.receive(consumer, 1, plain=True)
        else:
            message = p.next(consumer)
            found[action] = [len(message.data()), *p.receive(consumer, 1, plain=True)]
    return found


@scenario
def encrypted_chunks(p: Program) -> Any:
    topic, keys = p.topic(), _keys()
    producer = p.producer(topic, encryption_key="client", crypto_key_reader=keys, chunking_enabled=True)
    producer.send(b"abcdefghijklmno\n" * (6 << 16))
    return p.receive(p.consumer(topic, crypto_key_reader=keys), 1, ids=False)
