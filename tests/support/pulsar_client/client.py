"""The client itself: look-ups and partitions, and one connection for each broker."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from magnetar.proto.errors import ConnectionLost, LookupAgainError
from magnetar.proto.ids import TopicName
from magnetar.proto.pulsar import wire_pb2 as wire

from .connection import Connection
from .consumer import Consumer, ConsumerOptions
from .producer import Producer, ProducerOptions

_MOST_REDIRECTS = 20


class PulsarClient:
    """Use it within a running loop; `close` ends its connections."""

    def __init__(
        self,
        service_url: str,
        *,
        operation_timeout_s: float = 30.0,
        connect_timeout_s: float = 10.0,
        ping_interval_s: float = 30.0,
        client_version: str = "Pulsar-Java-v4.0.6",
        rng: random.Random | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """`service_url`: pulsar://host:port[,host:port]."""
        self.rng = rng or random.Random()
        self.now_ms = now_ms
        self.operation_timeout_s = operation_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._ping_interval_s = ping_interval_s
        self._client_version = client_version
        self._hosts = service_url.removeprefix("pulsar://").split(",")
        self._connections: dict[str, asyncio.Task[Connection]] = {}
        self._next_id = 0
        self.attachments = 0  # of all consumers, so far
        self._open: list[Producer | Consumer] = []

    async def create_producer(self, topic: str, options: ProducerOptions) -> Producer:
        """Raises MagnetarError."""
        producer = Producer(self, full_name(topic), self._id(), options)
        await producer.attachment.begin()
        self._open.append(producer)
        return producer

    async def subscribe(self, topic: str, options: ConsumerOptions, **hooks: Callable[..., None]) -> Consumer:
        """`hooks`: `on_detached`, `on_redelivery`, see Consumer. Raises MagnetarError."""
        consumer = Consumer(self, full_name(topic), self._id(), options, **hooks)
        await consumer.attachment.begin()
        self._open.append(consumer)
        return consumer

    async def partitions(self, topic: str) -> int:
        """0: it is not partitioned."""
        connection = await self._connect(self.rng.choice(self._hosts))
        command = wire.CommandPartitionedMetadata(topic=full_name(topic), metadata_auto_creation_enabled=True)
        answer = await connection.ask(command, self.operation_timeout_s)
        return int(answer.partitions)

    async def close(self) -> None:
        """Producers and consumers are gone with their connections."""
        for one in self._open:
            one.attachment.close()
        for connecting in self._connections.values():
            if connecting.done() and not connecting.cancelled() and connecting.exception() is None:
                connecting.result().close()
            connecting.cancel()
        self._connections.clear()

    # --- for producers and consumers ---------------------------------------------------------------------------------

    async def find(self, topic: str) -> Connection:
        """A connection to the broker that has the topic. Raises MagnetarError."""
        host, authoritative = self.rng.choice(self._hosts), False
        for _ in range(_MOST_REDIRECTS):
            connection = await self._connect(host)
            answer: wire.CommandLookupResponse = await connection.ask(
                wire.CommandLookup(topic=topic, authoritative=authoritative), self.operation_timeout_s
            )
            if not answer.proxy_through_service_url:
                host = answer.broker_service_url.removeprefix("pulsar://")
            if answer.response == answer.CONNECT:
                return await self._connect(host)
            authoritative = answer.authoritative
        raise LookupAgainError(
            f"{topic} was looked up {_MOST_REDIRECTS} times, and each broker named another one"
        )

    def _id(self) -> int:
        self._next_id += 1
        return self._next_id

    async def _connect(self, host: str) -> Connection:
        """Shared by all that need it."""
        connecting = self._connections.get(host)
        if connecting is None or (
            connecting.done()
            and (connecting.cancelled() or connecting.exception() is not None or connecting.result().closed)
        ):
            connecting = asyncio.get_running_loop().create_task(self._open_connection(host))
            self._connections[host] = connecting
        return await asyncio.shield(connecting)

    async def _open_connection(self, host: str) -> Connection:
        name, port = host.rsplit(":", 1)
        first_request_id = self.rng.getrandbits(62)

        def make() -> Connection:
            return Connection(first_request_id, self._ping_interval_s, self._client_version)

        connection: Connection | None = None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(make, name, int(port))
                await connection.ready
        except OSError as error:  # TimeoutError is one
            if connection is not None:
                connection.close()
            raise ConnectionLost(f"{host} cannot be reached: {error!r}") from None
        return connection


def full_name(topic: str) -> str:
    """Java's clients send full names."""
    return str(TopicName.parse(topic))
