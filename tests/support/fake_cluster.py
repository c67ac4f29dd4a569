"""Fake brokers of one cluster, for tests of the client: they share topics, know who owns which, and hold answers.

cluster.owners["orders"] = 1     broker 1 serves it; the others send look-ups there
cluster.fail(1)                  broker 1 is gone, and still the owner of its topics: look-ups with `unreachable` wait
cluster.give(1, 2)               broker 2 owns what broker 1 had; answers that were held are sent
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from magnetar.proto.commands import (
    CloseConsumer,
    CloseProducer,
    Command,
    CreateProducer,
    Lookup,
    Send,
    Subscribe,
)
from magnetar.proto.errors import TopicNotServed
from support.fake_broker import HELD, FakeBroker, Handler, StoredTopic


class ClusterBroker(FakeBroker):
    """One of them. times: loop time of every command but SEND."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self.cluster: FakeCluster
        self.number = -1
        self.address_url = ""

    @property
    def url(self) -> str:
        """Also after it has failed."""
        return self.address_url

    @property
    def look_ups(self) -> list[Lookup]:
        return self.received(Lookup)

    def answer(self, handler: Handler, command: Command, payload: bytes) -> Any:
        self.times.append(asyncio.get_running_loop().time())
        match command:
            case Lookup():
                return self.cluster.look_up(self, handler, command)
            case CreateProducer() | Subscribe():
                if self.cluster.owner_of(command.topic) != self.number:
                    raise TopicNotServed(f"{command.topic} is not served here")
        return super().answer(handler, command, payload)

    def sent(self, handler: Handler, command: Send, payloads: list[bytes]) -> None:
        """What was on its way when the producer was closed is not stored."""
        if command.producer_id in handler.producers:
            super().sent(handler, command, payloads)


class FakeCluster:
    """owners: number of the broker by full name of the topic; those that are not there belong to `default`."""

    def __init__(self) -> None:
        self.brokers: list[ClusterBroker] = []
        self.owners: dict[str, int] = {}
        self.default = 0
        self.held: list[tuple[ClusterBroker, Handler, Lookup]] = []
        self.redirects: list[int] = []  # brokers to which the next look-ups are sent on, whoever is asked
        self.topics: dict[str, StoredTopic] = {}

    @classmethod
    @asynccontextmanager
    async def of(cls, count: int) -> AsyncIterator[FakeCluster]:
        self = cls()
        for number in range(count):
            broker = await ClusterBroker.start()
            broker.cluster, broker.number, broker.topics = self, number, self.topics
            broker.address_url = f"magnetar://127.0.0.1:{broker.port}"
            self.brokers.append(broker)
        try:
            yield self
        finally:
            for broker in self.brokers:
                await broker.close()

    @property
    def url(self) -> str:
        """That names all of them."""
        hosts = ",".join(broker.url.removeprefix("magnetar://") for broker in self.brokers)
        return f"magnetar://{hosts}"

    def owner_of(self, topic: str) -> int:
        return self.owners.get(topic, self.default)

    def look_up(self, asked: ClusterBroker, handler: Handler, command: Lookup) -> Any:
        if self.redirects:
            return {"url": self.brokers[self.redirects.pop(0)].url, "final": False}
        owner = self.brokers[self.owner_of(command.topic)]
        if command.unreachable == owner.url:
            self.held.append((asked, handler, command))
            return HELD
        return {"url": owner.url, "final": True}

    def fail(self, number: int) -> None:
        """The broker is gone; what it owned is still its own."""
        self.brokers[number].server.stop_accepting()
        self.brokers[number].cut()

    def give(self, from_: int, to: int) -> None:
        """Another one owns its topics."""
        if self.default == from_:
            self.default = to
        for topic, owner in self.owners.items():
            if owner == from_:
                self.owners[topic] = to
        held, self.held = self.held, []
        for asked, handler, command in held:
            answer = self.look_up(asked, handler, command)
            if answer is not HELD:
                handler.connection.answer(command.request_id, answer)

    def move(self, topic: str, to: int) -> None:
        """A transfer: the owner closes what is open on the topic, and says where it goes."""
        owner = self.brokers[self.owner_of(topic)]
        self.owners[topic] = to
        url = self.brokers[to].url
        for handler in owner.handlers:
            for producer_id, (stored, _, _) in list(handler.producers.items()):
                if stored is self.topics[topic]:
                    del handler.producers[producer_id]
                    handler.connection.send(CloseProducer(0, producer_id, url=url).encode())
            for consumer_id, consumer in list(handler.consumers.items()):
                if consumer.topic is self.topics[topic]:
                    del handler.consumers[consumer_id]
                    handler.connection.send(CloseConsumer(0, consumer_id, url=url).encode())
