"""The client against the real broker, over sockets: policies, expiry, and messages trimmed before they were read."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from magnetar.broker import Broker
from magnetar.broker.listeners.native.connection import listener
from magnetar.client import (
    Client,
    InvalidArgument,
    MessageId,
    MessageLost,
    SubscriptionNotFound,
    connect,
)
from magnetar.proto.policies import Policies
from magnetar.runtime.connection import ConnectionOptions, FramedServer, start_server
from support.broker_kit import FakeClock, running_broker, settle
from support.client_kit import until
from support.service import holding_port

NAME = "persistent://public/default/t"


class World:
    """A broker whose clock the test moves, behind a listener that it may close and open again."""

    def __init__(self, broker: Broker, clock: FakeClock) -> None:
        self.broker = broker
        self.clock = clock
        self.server: FramedServer | None = None
        self.port = 0

    async def listen(self) -> None:
        self.server = await start_server(
            "127.0.0.1", self.port, listener(self.broker), ConnectionOptions(name="broker")
        )
        self.port = self.server.addresses[0][1]

    async def hang_up(self) -> None:
        assert self.server is not None
        await self.server.close(0.0)

    async def trim_all(self) -> None:
        """All that is closed is old; what nobody needs of it goes."""
        topic = self.broker.topics[NAME]
        await topic.change_policies({"retention_ms": 1})
        self.clock.now += 1_000
        topic.maintain()
        await topic.maintenance.trimmed()


@asynccontextmanager
async def world() -> AsyncIterator[tuple[World, Client]]:
    clock = FakeClock()
    with holding_port() as port:
        url = f"magnetar://127.0.0.1:{port}"
        async with running_broker(clock=clock, max_ledger_entries=1, service_url=url) as broker:
            made = World(broker, clock)
            made.port = port
            await made.listen()
            try:
                async with connect(url, backoff_first=0.01, operation_timeout=10.0) as client:
                    yield made, client
            finally:
                await made.hang_up()


async def sent(made: World, client: Client, *values: bytes) -> list[MessageId]:
    """Each in a ledger of its own, all of them closed."""
    async with client.create_producer("t") as producer:
        ids = [await producer.send(value) for value in values]
    await settle()
    return ids


@pytest.mark.parametrize("fail_on_trimmed", [False, True])
async def test_a_reader_that_was_away_while_messages_were_trimmed(
    fail_on_trimmed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with world() as (made, client):
        ids = await sent(made, client, b"0", b"1", b"2")
        reader = await client.create_reader("t", start="earliest", fail_on_trimmed=fail_on_trimmed)
        assert (await reader.read_next(10)).value == b"0"
        await made.hang_up()
        await until(lambda: not made.broker.topics[NAME].subscriptions)
        with caplog.at_level(logging.WARNING, "magnetar.client"):
            await made.trim_all()
            await made.listen()
            [new] = await sent(made, client, b"new")
            if fail_on_trimmed:
                with pytest.raises(
                    MessageLost, match=rf"messages from {ids[0]._replace(index=1)} on were trimmed .* {new}"
                ):
                    await reader.read_next(10)
            assert (await reader.read_next(10)).value == b"new"
        assert reader.trimmed_gaps == 1
        assert sum("were trimmed before they were read" in one.getMessage() for one in caplog.records) == 1
        # What it has read to its end is no loss, and neither is a break of the connection without a trimming.
        await made.hang_up()
        await until(lambda: not made.broker.topics[NAME].subscriptions)
        await made.trim_all()
        await made.listen()
        await sent(made, client, b"newer")
        assert (await reader.read_next(10)).value == b"newer"
        assert reader.trimmed_gaps == 1


async def test_starts_and_seeks_at_ids_that_are_gone() -> None:
    async with world() as (made, client):
        ids = await sent(made, client, b"0", b"1", b"2")
        await made.trim_all()
        await sent(made, client, b"new")
        reader = await client.create_reader("t", start=ids[1], fail_on_trimmed=True)
        for wanted in (ids[1], ids[0]):
            with pytest.raises(MessageLost, match=f"messages from {wanted} on were trimmed"):
                await reader.receive(10)
            assert (await reader.receive(10)).value == b"new"
            await reader.seek(ids[0])
        assert reader.trimmed_gaps == 3
        with pytest.raises(MessageLost):
            await anext(aiter(reader))
        await reader.seek("earliest")
        assert (await reader.receive(10)).value == b"new"
        assert reader.trimmed_gaps == 3
        # A consumer of a new subscription; several topics count together.
        await client.admin.create_topic("other")
        consumer = await client.subscribe(["t", "other"], "s", start=ids[2], fail_on_trimmed=True)
        with pytest.raises(MessageLost):
            await consumer.receive(10)
        assert (await consumer.receive(10)).value == b"new"
        assert consumer.trimmed_gaps == 1


async def test_policies_are_changed_one_by_one() -> None:
    async with world() as (_, client):
        await client.admin.create_topic("t")
        await client.admin.update_namespace_policies("public/default", {"message_ttl_ms": 5})
        found = await client.admin.update_topic_policies(
            "t", {"retention_ms": 9, "subscription_ttl_ms": {"a": 1, "b": 2}}
        )
        assert found.policies == Policies(retention_ms=9, subscription_ttl_ms={"a": 1, "b": 2})
        found = await client.admin.update_topic_policies(
            "t", {"retention_bytes": 7, "subscription_ttl_ms": {"a": None}}
        )
        assert found.policies == Policies(retention_ms=9, retention_bytes=7, subscription_ttl_ms={"b": 2})
        assert found == await client.admin.topic_policies("t")
        assert found.version == 2
        in_force = {row.policy: (row.value, row.source) for row in found.in_force if row.source != "broker"}
        assert in_force == {
            "retention_ms": (9, "topic"),
            "retention_bytes": (7, "topic"),
            "message_ttl_ms": (5, "namespace"),
            "subscription_ttl_ms": (2, "topic"),
        }
        assert (await client.admin.update_topic_policies("t", {})).version == 2, "nothing to change"
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"ttl": 5}, "'ttl' is no policy; there are"),
            ({"message_ttl_ms": "5"}, "not as they should be"),
            ({"retention_ms": 0}, "contradict each other"),
        ]
        for changes, text in wrong:
            with pytest.raises(InvalidArgument, match=text):
                await client.admin.update_topic_policies("t", changes)
        assert (await client.admin.namespace_policies("public/default")).policies == Policies(
            message_ttl_ms=5
        )


async def test_messages_expire_by_hand() -> None:
    async with world() as (made, client):
        made.clock.now = 1_000_000
        consumer = await client.subscribe("t", "s", start="earliest")
        await sent(made, client, b"0", b"1")
        made.clock.now = 2_000_000
        await sent(made, client, b"2")
        assert await client.admin.expire_messages("t", "s", 1_500_000) == 2
        assert await client.admin.expire_messages("t", "s", 1_500_000) == 0
        await consumer.close()
        consumer = await client.subscribe("t", "s")
        assert (await consumer.receive(10)).value == b"2"
        with pytest.raises(SubscriptionNotFound):
            await client.admin.expire_messages("t", "nobody", 5)
