"""Requests of Pulsar's protocol that are interrupted at any step: by the end of their connection, or of the topic."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from magnetar.broker import Broker
from magnetar.broker.listeners.pulsar.connection import ClientConnection
from magnetar.broker.listeners.pulsar.consumers import Consumer
from magnetar.broker.listeners.pulsar.producers import Producer
from magnetar.proto.errors import TopicNotServed
from magnetar.proto.ids import TopicName
from magnetar.proto.pulsar.commands import NO_REQUEST
from magnetar.runtime.connection import FramedServer
from support.broker_kit import settle
from support.pulsar_messages import frame
from support.pulsar_scenario import PulsarClient, pulsar_server
from support.virtual_time import in_virtual_time

NAME = TopicName.parse("orders")
VALUES = [b"%d" % number for number in range(5)]
STEPS = [*range(12), 15, 20, 30, 50]  # turns of the loop


def produce(client: PulsarClient) -> None:
    client.send("PRODUCER", topic="orders", producer_id=2, request_id=20, initial_subscription_name="first")


def publish(client: PulsarClient) -> None:
    for number in range(3):
        client.send("SEND", frame(b"more", sequence_id=number), producer_id=1, sequence_id=number)
    client.send("CLOSE_PRODUCER", producer_id=1, request_id=21)


def subscribe(client: PulsarClient) -> None:
    client.send("SUBSCRIBE", topic="orders", subscription="s", sub_type=1, consumer_id=2, request_id=22)
    client.send("SUBSCRIBE", topic="orders", subscription="new", sub_type=0, consumer_id=3, request_id=23)
    client.send(
        "SUBSCRIBE", topic="orders", subscription="r", sub_type=0, consumer_id=4, request_id=24, durable=False
    )


def seek(client: PulsarClient) -> None:
    client.send("SEEK", consumer_id=1, request_id=25, message_publish_time=0)


def unsubscribe(client: PulsarClient) -> None:
    client.send("UNSUBSCRIBE", consumer_id=1, request_id=26, force=True)


def acknowledge(client: PulsarClient) -> None:
    ids: Any = [command.message_id for name, command, _ in client.received if name == "message"]
    client.send("ACK", consumer_id=1, ack_type="INDIVIDUAL", message_id=ids[:2], request_id=27)
    client.send("GET_LAST_MESSAGE_ID", consumer_id=1, request_id=28)
    client.send("CONSUMER_STATS", consumer_id=1, request_id=29)
    client.send("REDELIVER_UNACKNOWLEDGED_MESSAGES", consumer_id=1)


ASKED: dict[Callable[[PulsarClient], None], list[int]] = {  # request ids
    produce: [20],
    publish: [21],
    subscribe: [22, 23, 24],
    seek: [25],
    unsubscribe: [26],
    acknowledge: [27, 28, 29],
}


async def connected(server: FramedServer) -> PulsarClient:
    client = await PulsarClient.connect(server)
    client.send("CONNECT", client_version="test", protocol_version=21)
    await client.next("connected")
    return client


async def read(server: FramedServer, subscription: str, sub_type: int) -> list[bytes]:
    client = await connected(server)
    client.send(
        "SUBSCRIBE", topic="orders", subscription=subscription, sub_type=sub_type, consumer_id=1, request_id=1,
        initial_position=1,
    )  # fmt: skip
    await client.next("success")
    client.send("FLOW", consumer_id=1, message_permits=100)
    await asyncio.sleep(1)
    found = [
        rest[10 + int.from_bytes(rest[6:10]) :] for name, _, rest in client.received if name == "message"
    ]
    await client.close()
    return found


async def lost(client: PulsarClient, broker: Broker) -> None:
    """Its connection is gone."""
    await client.close()


async def unloaded(client: PulsarClient, broker: Broker) -> None:
    """The topic moves away."""
    await broker.unload(NAME, TopicNotServed("it moves"))


async def deleted_and_lost(client: PulsarClient, broker: Broker) -> None:
    """Both at once."""
    unloading = asyncio.ensure_future(broker.unload(NAME, TopicNotServed("it moves")))
    await settle(1)
    await client.close()
    await unloading


@in_virtual_time
async def play(request: Callable[[PulsarClient], None], interrupt: Any, steps: int) -> None:
    async with pulsar_server() as (broker, server):
        client = await connected(server)
        client.send("PRODUCER", topic="orders", producer_id=1, request_id=1, producer_name="p")
        await client.next("producer_success")
        for number, value in enumerate(VALUES):
            client.send("SEND", frame(value, sequence_id=number), producer_id=1, sequence_id=number)
            await client.next("send_receipt")
        client.send(
            "SUBSCRIBE",
            topic="orders",
            subscription="s",
            sub_type=1,
            consumer_id=1,
            request_id=2,
            initial_position=1,
        )
        await client.next("success")
        client.send("FLOW", consumer_id=1, message_permits=3)
        await asyncio.sleep(1)
        request(client)
        await settle(steps)
        await interrupt(client, broker)
        await asyncio.sleep(1)
        if interrupt is unloaded:
            answered = [getattr(command, "request_id", NO_REQUEST) for _, command, _ in client.received]
            assert sorted(one for one in answered if one != NO_REQUEST) == ASKED[request]
        await client.close()
        await asyncio.sleep(6)  # a reader that does not return is forgotten after a while
        assert server.connections == []
        for topic in broker.topics.values():
            assert not topic.producers
            assert all(not one.consumers for one in topic.subscriptions.values())
        found = await read(server, "all", 0)
        assert [value for value in found if value != b"more"] == VALUES
        rest = await read(server, "s", 1)
        acknowledged = 2 if request is acknowledge else 0
        assert [value for value in rest if value != b"more"] in (VALUES, VALUES[acknowledged:])
    gc.collect()
    kinds = (ClientConnection, Producer, Consumer)
    assert [one for one in gc.get_objects() if isinstance(one, kinds)] == []


@pytest.mark.parametrize("interrupt", [lost, unloaded, deleted_and_lost])
@pytest.mark.parametrize("request_", [produce, publish, subscribe, seek, unsubscribe, acknowledge])
def test_interrupted(
    request_: Callable[[PulsarClient], None], interrupt: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for steps in STEPS:
        play(request_, interrupt, steps)
    assert [
        record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")
    ] == []
