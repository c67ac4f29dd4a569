"""Clients and their connections."""

from __future__ import annotations

import socket
from typing import Any

import pulsar

from pulsar_clients.program import Program, in_thread, scenario, short, slow


@short
def a_client_that_is_closed(p: Program) -> Any:
    topic, client = p.topic(), p.client()
    producer, consumer = p.producer(topic, client=client), p.consumer(topic, client=client)
    client.close()
    return {
        "send": p.fails(producer.send, b"late"),
        "receive": p.fails(consumer.receive, 100),
        "producer": p.fails(p.producer, topic, client=client),
        "consumer": p.fails(p.consumer, topic, client=client),
        "again": p.fails(client.close),
        "free for others": p.fails(p.consumer, topic, client=p.client()),
    }


@scenario
def a_client_that_is_shut_down(p: Program) -> Any:
    topic, client = p.topic(), p.client()
    producer = p.producer(topic, producer_name="anna", client=client)
    p.send(producer, "a")
    client.shutdown()
    return {
        "send": p.fails(producer.send, b"late"),
        "free for others": p.fails(p.producer, topic, producer_name="anna", client=p.client()),
    }


@short
def many_clients(p: Program) -> Any:
    topic = p.topic()
    consumer = p.consumer(topic)
    for at in range(10):
        client = p.client()
        p.send(p.producer(topic, client=client), str(at))
        client.close()
    return p.receive(consumer, 10)


@scenario
def many_topics_of_a_client(p: Program) -> Any:
    found = []
    pairs = [(p.producer(p.topic(str(at))), p.consumer(p.topic(str(at)))) for at in range(50)]
    for at, (producer, _) in enumerate(pairs):
        p.send(producer, str(at))
    for _, consumer in pairs:
        found += p.receive(consumer, 1, plain=True)
    return found


@scenario
def threads_of_a_client(p: Program) -> Any:
    topic = p.topic()
    client = p.client(io_threads=3, message_listener_threads=2)
    producers = [p.producer(topic, client=client) for _ in range(3)]
    p.send(producers[0], "a")
    p.send(producers[1], "b")
    return p.receive(p.consumer(topic, client=client), 2)


@scenario
def few_lookups_at_once(p: Program) -> Any:
    client = p.client(concurrent_lookup_requests=100)
    return [p.fails(p.producer, p.topic(str(at)), client=client) for at in range(5)]


@short
def nobody_listens(p: Program) -> Any:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        client = p.client(
            f"pulsar://127.0.0.1:{holder.getsockname()[1]}",
            operation_timeout_seconds=2,
            connection_timeout_ms=1000,
        )
        return p.fails(p.producer, p.topic(), client=client)


@slow
def who_listens_never_answers(p: Program) -> Any:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        client = p.client(f"pulsar://127.0.0.1:{holder.getsockname()[1]}", operation_timeout_seconds=2)
        return p.fails(p.consumer, p.topic(), client=client)


@scenario
def urls_that_are_none(p: Program) -> Any:
    found: dict[str, Any] = {}
    for url in ("pulsar//x", "other://127.0.0.1:1", "pulsar://127.0.0.1:0:1"):
        found[url] = p.fails(lambda: p.producer(p.topic(), client=p.client(url, operation_timeout_seconds=2)))  # noqa: B023
    return found


@scenario
def several_addresses(p: Program) -> Any:
    host = p.url.partition("://")[2]
    topic = p.topic()
    client = p.client(f"pulsar://{host},{host}")
    p.send(p.producer(topic, client=client), "a")
    return p.receive(p.consumer(topic, client=client), 1)


@scenario
def a_token_that_nobody_asked_for(p: Program) -> Any:
    topic = p.topic()
    client = p.client(authentication=pulsar.AuthenticationToken("abc"))
    p.send(p.producer(topic, client=client), "a")
    return p.receive(p.consumer(topic, client=client), 1)


@scenario
def basic_authentication_that_nobody_asked_for(p: Program) -> Any:
    topic = p.topic()
    client = p.client(authentication=pulsar.AuthenticationBasic("anna", "secret"))
    return p.fails(p.producer, topic, client=client)


@scenario
def tls_where_there_is_none(p: Program) -> Any:
    url = p.url.replace("pulsar://", "pulsar+ssl://")
    client = p.client(url, operation_timeout_seconds=3, tls_allow_insecure_connection=True)
    return p.fails(p.producer, p.topic(), client=client)


@scenario
def two_clients_at_work(p: Program) -> Any:
    topic = p.topic()
    one, two = p.producer(topic, client=p.client()), p.producer(topic, client=p.client())
    with in_thread(lambda: p.send_all(one, [f"1 {at}" for at in range(200)])):
        p.send_all(two, [f"2 {at}" for at in range(200)])
    got = p.receive(p.consumer(topic), 400, plain=True)
    return [
        [text for text in got if text.startswith(name)] == [f"{name} {at}" for at in range(200)]
        for name in "12"
    ]


@scenario
def a_timeout_of_sends(p: Program) -> Any:
    topic = p.topic()
    producer = p.producer(topic, send_timeout_millis=20_000)
    p.send(producer, "a")
    return p.receive(p.consumer(topic), 1)
